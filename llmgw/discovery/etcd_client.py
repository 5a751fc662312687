"""Calls to an etcd cluster: any of its members, a token that is renewed, errors with their reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from llmgw.config.files import existing_file, private_file
from llmgw.config.places import base_url
from llmgw.config.reader import Reader, Rule
from llmgw.core.json_lines import JsonLines, NotJsonLinesError
from llmgw.discovery.etcd_protocol import UNAUTHENTICATED, EtcdError, error_of
from llmgw.errors import ConfigError
from llmgw.private_files import read_private


def _prefix(reader: Reader, where: str, text: str) -> str:
    """With a slash at its end, so that ``/llmgw`` is not ``/llmgw-test`` too."""
    return text if text.endswith("/") else f"{text}/"


def _private_file(reader: Reader, where: str, path: str) -> str:
    return private_file(reader, path)


class EtcdOptions(Struct, frozen=True):
    """Where etcd is and who we are there.

    :param prefix: of every key, up to a ``/``.
    :param username: needs ``password_file``, which is read again at each log-in.
    :param timeout_s: for each call, and for a watch to begin.
    :param silence_s: a watch that says nothing for so long is opened anew.
    """

    endpoints: Annotated[tuple[Annotated[str, Rule(convert=base_url)], ...], Rule(filled=True)] = (
        "http://127.0.0.1:2379",
    )
    prefix: Annotated[str, Rule(filled=True, convert=_prefix)] = "/llmgw/"
    username: Annotated[str | None, Rule(filled=True)] = None
    password_file: Annotated[str | None, Rule(filled=True, convert=_private_file)] = None
    ca_file: Annotated[str | None, Rule(filled=True, convert=existing_file)] = None
    cert_file: Annotated[str | None, Rule(filled=True, convert=existing_file)] = None
    key_file: Annotated[str | None, Rule(filled=True, convert=_private_file)] = None
    timeout_s: Annotated[float, Rule(least=0.1, most=60)] = 2.0
    silence_s: Annotated[float, Rule(least=1, most=3600)] = 30.0


def check_etcd_options(reader: Reader, options: EtcdOptions) -> None:
    """What no single key can tell."""
    if (options.username is None) != (options.password_file is None):
        missing = "password_file" if options.password_file is None else "username"
        reader.fault(missing, "username and password_file belong together")
    if options.key_file is not None and options.cert_file is None:
        reader.fault("cert_file", "missing beside key_file")
    files = (options.ca_file, options.cert_file)
    if any(files):
        if not any(url.startswith("https:") for url in options.endpoints):
            reader.fault("endpoints", "none is https, so certificates do nothing")
        else:
            from llmgw.discovery.http_client import TlsFiles

            try:
                TlsFiles(options.ca_file, options.cert_file, options.key_file).options("localhost")
            except (OSError, ValueError) as error:
                reader.fault("cert_file" if options.cert_file else "ca_file", str(error))


class EtcdClient:
    """One member at a time; :meth:`turn` goes on to the next.

    :param http: see :class:`llmgw.discovery.http_client.HttpClient`.
    """

    def __init__(self, options: EtcdOptions, http: Any) -> None:
        self._options = options
        self._http = http
        self._turn = 0
        self._token: str | None = None

    @property
    def endpoint(self) -> str:
        """The member that is asked now."""
        urls: Sequence[str] = self._options.endpoints
        return urls[self._turn % len(urls)]

    def turn(self) -> None:
        """Ask the next member from now on, and log in anew there: a token that a member
        does not know yet can make it hang for ever (seen after its data were wiped)."""
        self._turn += 1
        self._token = None

    async def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """:raise EtcdError: etcd says no.
        :raise AwayError: it does not answer.
        """
        try:
            return await self._call(path, body)
        except EtcdError as error:
            if not self._wants_log_in(error):
                raise
        self._token = None
        return await self._call(path, body)

    async def watch(self, body: Mapping[str, Any], take: Callable[[dict[str, Any]], None]) -> None:
        """Hand each message to ``take``, until etcd ends it.

        :raise QuietError: it said nothing for ``silence_s``.
        :raise EtcdError: (AwayError) see :meth:`call`; whatever ``take`` raises.
        """
        from llmgw.discovery.http_client import StatusError

        lines = JsonLines()

        def feed(data: bytes) -> None:
            try:
                messages = lines.feed(data)
            except NotJsonLinesError as error:
                raise EtcdError(str(error)) from None
            for message in messages:
                take(message)

        headers = await self._headers()
        # A member that is cut off from the others says so in place of telling old news.
        headers["grpc-metadata-hasleader"] = "true"
        try:
            await self._http.stream(
                "POST",
                f"{self.endpoint}/v3/watch",
                headers,
                msgspec.json.encode(body),
                feed,
                open_s=self._options.timeout_s,
                silence_s=self._options.silence_s,
            )
        except StatusError as error:
            self._token = None
            raise _failed(error.status, error.body) from None
        except EtcdError:
            self._token = None
            raise

    async def _call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._post(path, body, await self._headers())

    async def _post(self, path: str, body: Mapping[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        status, raw = await self._http.ask(
            "POST", self.endpoint + path, headers, msgspec.json.encode(body), self._options.timeout_s
        )
        if status != 200:
            raise _failed(status, raw)
        return _decoded(raw)

    async def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self._options.username is not None:
            if self._token is None:
                self._token = await self._log_in()
            headers["authorization"] = self._token
        return headers

    async def _log_in(self) -> str:
        try:
            password = read_private(self._options.password_file or "").decode().strip()
        except (ConfigError, UnicodeDecodeError) as error:
            raise EtcdError(f"password_file: {error}") from None
        body = {"name": self._options.username, "password": password}
        answer = await self._post("/v3/auth/authenticate", body, {"content-type": "application/json"})
        token = answer.get("token")
        if not isinstance(token, str) or not token.isprintable():
            raise EtcdError("a log-in without a token")
        return token

    def _wants_log_in(self, error: EtcdError) -> bool:
        if self._options.username is None or self._token is None:
            return False
        return error.code == UNAUTHENTICATED or "user name is empty" in str(error)


def _failed(status: int, raw: bytes) -> EtcdError:
    try:
        error = error_of(msgspec.json.decode(raw))
    except (ValueError, RecursionError):
        return EtcdError(f"status {status} and no reason told")
    if status == 401:
        error.code = UNAUTHENTICATED
    return error


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise EtcdError(f"an answer that is no JSON: {error}") from None
    if not isinstance(answer, dict):
        raise EtcdError("an answer that is no object")
    return answer
