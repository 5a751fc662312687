"""The admin listener as commands ask it: where it is, with which token, and its stream of events."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

ANSWER_BYTES = 32 << 20
WITHIN_S = 10.0
SILENT_S = 20.0
"""A stream that says nothing for so long, not even that it has nothing to say, is dead."""


class Unreachable(click.ClickException):
    """Nobody answers, or not what was asked for; the message is one line."""


def options(command: Command) -> Command:
    """``--admin`` and ``--token-file``."""
    for option in (
        click.option(
            "--token-file",
            type=click.Path(dir_okay=False, exists=True, path_type=Path),
            envvar="LLMGW_ADMIN_TOKEN_FILE",
            help="A file with the admin token.  [env: LLMGW_ADMIN_TOKEN_FILE]",
        ),
        click.option(
            "--admin",
            "url",
            default="http://127.0.0.1:9901",
            envvar="LLMGW_ADMIN",
            show_default=True,
            help="The gateway's admin listener.  [env: LLMGW_ADMIN]",
        ),
    ):
        command = option(command)
    return command


class AdminListener:
    """One gateway's.

    :param url: ``http://`` or ``https://``; paths of the listener are appended.
    :param token_file: holds its token, if it wants one.
    :raise click.ClickException: no such URL, or the file cannot be read.
    """

    def __init__(self, url: str, token_file: Path | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise click.BadParameter("must be an http:// or https:// URL", param_hint="--admin")
        self.url = url.rstrip("/")
        self._headers = {}
        if token_file is not None:
            try:
                token = token_file.read_text("ascii").strip()
            except (OSError, ValueError) as error:
                raise click.ClickException(f"{token_file}: {error}") from None
            self._headers["authorization"] = f"Bearer {token}"
        # A proxy of the environment has no way to our loopback.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> Any:
        """A JSON document. :raise Unreachable: there is none."""
        with self._open(path, None, WITHIN_S) as response:
            return self._json(response.read(ANSWER_BYTES))

    def post(self, path: str, body: bytes) -> Any:
        """What a page answers to ``body``. :raise Unreachable: it refuses, or nobody answers."""
        with self._open(path, body, WITHIN_S) as response:
            return self._json(response.read(ANSWER_BYTES))

    def events(self) -> Iterator[tuple[str, Any]]:
        """``/api/events``: name (``state`` for those without one) and content, until it ends.

        :raise Unreachable: it cannot be had, or has fallen silent.
        """
        name, data = "state", b""
        with self._open("/api/events", None, SILENT_S) as response:
            try:
                for line in response:
                    line = line.rstrip(b"\n")
                    if line.startswith(b"event: "):
                        name = line[7:].decode()
                    elif line.startswith(b"data: "):
                        data += line[6:]
                    elif not line and data:
                        yield name, self._json(data)
                        name, data = "state", b""
            except OSError as error:
                raise Unreachable(f"{self.url}: {error}") from None

    def _open(self, path: str, body: bytes | None, within_s: float) -> Any:
        request = urllib.request.Request(self.url + path, body, self._headers)
        try:
            return self._opener.open(request, timeout=within_s)
        except urllib.error.HTTPError as error:
            with error:
                raise Unreachable(_refusal(self.url, error)) from None
        except urllib.error.URLError as error:
            raise Unreachable(_silence(self.url, error.reason)) from None
        except OSError as error:
            raise Unreachable(_silence(self.url, error)) from None

    def _json(self, raw: bytes) -> Any:
        try:
            return json.loads(raw)
        except ValueError:
            raise Unreachable(f"{self.url} did not answer with JSON: is it the admin listener?") from None


def _silence(url: str, reason: Any) -> str:
    if isinstance(reason, ConnectionRefusedError):
        return (
            f"{url}: nobody listens there. Does the gateway run with an admin listener, and --admin name it?"
        )
    if isinstance(reason, ssl.SSLCertVerificationError):
        return (
            f"{url}: its certificate is not trusted ({reason.verify_message}): name its authority by"
            " SSL_CERT_FILE in the environment; use the name that stands in the certificate"
        )
    if isinstance(reason, ssl.SSLError):
        return f"{url}: no TLS there ({reason.reason}): use http://, or the port that speaks TLS"
    if isinstance(reason, RemoteDisconnected):
        cure = "is it the admin listener?" if url.startswith("https:") else "use https:// if it speaks TLS"
        return f"{url}: closes without an answer: {cure}"
    return f"{url}: {getattr(reason, 'strerror', None) or reason}"


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return f"{url} wants its token: --token-file FILE"
    try:
        said = json.loads(error.read(65_536))["error"]
        if error.code == 404 and said["code"] in ("not_found", 404):
            return f"{url} has no such page: is it the admin listener?"
        return f"{error.code} {said['code']}: {said['message']}"
    except (ValueError, KeyError, TypeError, OSError):
        return f"{url} answered {error.code}"
