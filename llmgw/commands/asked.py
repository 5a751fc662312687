"""One backend, asked as the gateway would ask it, and compared with what its table says of it."""

from __future__ import annotations

import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from llmgw.config import BackendConfig
from llmgw.health.model_list import is_compressed

WITHIN_S = 3.0
SOON_S = 21 * 86_400
"""A certificate or key that ends sooner is worth a word."""
MOST_BYTES = 4 << 20


class Finding(Struct, frozen=True):
    """One thing that is probably not meant.

    :param where: path of a key.
    :param cure: what to do, one or more ways.
    """

    where: str
    what: str
    cure: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. {self.cure}."


class Told(Struct):
    """What a backend says of itself; ``None``: it does not tell.

    :param answers: HTTP is spoken there.
    :param kind: what it is, where it shows.
    """

    answers: bool = False
    kind: str | None = None
    models: tuple[str, ...] | None = None
    slots: int | None = None
    context_length: int | None = None
    router: bool = False


def ask_backend(where: str, backend: BackendConfig) -> tuple[Told, list[Finding]]:
    """What ``backend`` says of itself, and what of it is probably not meant.

    :param where: its place in the configuration.
    """
    told = Told()
    asked = _Asked(backend)
    try:
        status, body = asked.get("/health")
        if status == 503 and b"oading model" in body:
            cure = "Wait, or look at its log"
            return told, [Finding(where, f"{backend.id} is loading its model", cure)]
        told.answers = True
        listed, raw = asked.get("/v1/models")
        props, facts = asked.get("/props")
    except OSError as error:
        return told, [_unreachable(f"{where}.url", backend, error)]
    findings = []
    if 401 in (listed, props) or 403 in (listed, props):
        findings.append(
            Finding(
                f"{where}.api_key_file",
                f"{backend.id} refuses us ({listed} from /v1/models)",
                "Name the file that holds its --api-key"
                if backend.api_key is None
                else "Put the server's --api-key into that file",
            )
        )
    elif status >= 500 or (status >= 400 and listed >= 400):
        findings.append(
            Finding(
                f"{where}.url",
                f"{backend.url} answers, but {status} to /health and {listed} to /v1/models",
                "Is it a model server? The URL has no path but a prefix that stands before /v1",
            )
        )
    if is_compressed(raw) or is_compressed(facts):
        findings.append(
            Finding(
                f"{where}.url",
                f"{backend.id} compresses its answers, though none is asked for: what it serves is not "
                "known, and tokens are not counted",
                "Switch that off in the proxy before it (nginx: gzip off), or name a URL behind the proxy",
            )
        )
    told.models = _model_names(raw) if listed == 200 else None
    if props == 200:
        _take_props(told, facts)
    if not findings:
        if told.kind is None and _wants_to_know(backend):
            told.kind = "ollama" if asked.has("/api/tags") and asked.has("/api/ps") else None
        findings += _of_its_kind(where, backend, told)
    findings += _compared(where, backend, told)
    findings += asked.certificate(where)
    return told, findings


_KINDS = {"llama-server": "a llama-server", "ollama": "an Ollama"}
_LOST = {
    "llama-server": "what is not streamed is asked as llama-server would be",
    "openai": "a call that is not streamed keeps its slot when its client leaves",
    "ollama": "it has none of Ollama's paths",
}
"""What a wrong ``kind`` costs."""


def _wants_to_know(backend: BackendConfig) -> bool:
    """Whether it is an Ollama matters."""
    return backend.kind != "auto" or loader_of(backend) == "ollama"


def loader_of(backend: BackendConfig) -> str | None:
    """The plugin that is to load its models, as far as its table says."""
    if backend.loader is not None:
        return backend.loader.plugin
    return "ollama" if backend.kind == "ollama" else None


def _of_its_kind(where: str, backend: BackendConfig, told: Told) -> Iterable[Finding]:
    """The server is another one than its table says."""
    loader = loader_of(backend)
    key, value = ("kind", backend.kind) if backend.loader is None else ("loader", loader)
    if (loader == "ollama" and told.kind != "ollama") or (loader == "llamacpp-router" and not told.router):
        lost = "nothing is loaded there by name"
    elif backend.kind not in ("auto", told.kind or "openai"):
        key, value, lost = "kind", backend.kind, _LOST[backend.kind]
        if told.kind == "ollama":
            lost = "requests to /api/ and loads by name are not for it"
    else:
        return
    seen = _KINDS.get(told.kind or "", "neither llama-server nor Ollama")
    if value == "llamacpp-router" and told.kind == "llama-server":
        seen += " that is not in router mode"
    cure = 'Set kind = "ollama"' if told.kind == "ollama" else "Take the key out, or correct the url"
    yield Finding(f"{where}.{key}", f'{backend.id} seems to be {seen}, not "{value}": {lost}', cure)


def _compared(where: str, backend: BackendConfig, told: Told) -> Iterable[Finding]:
    if (
        told.slots is not None
        and backend.max_connections is not None
        and backend.max_connections > told.slots
    ):
        yield Finding(
            f"{where}.max_connections",
            f"{backend.max_connections} is above the {told.slots} slots of {backend.id}: what is above waits "
            "inside the server, where nobody sees it",
            f"Take the key out, or set it to {told.slots}, or start the server with "
            f"--parallel {backend.max_connections}",
        )
    if told.context_length is not None and (backend.context_length or 0) > told.context_length:
        yield Finding(
            f"{where}.context_length",
            f"{backend.context_length} is above the {told.context_length} tokens that a slot of "
            f"{backend.id} has",
            "Take the key out; llama-server divides --ctx-size by --parallel",
        )
    if told.models is not None and backend.models is not None and not told.router:
        missing = [name for name in backend.models if name not in told.models]
        if missing:
            yield Finding(
                f"{where}.models",
                f"{backend.id} does not serve {quoted(missing)}, but {quoted(told.models)}",
                "Take the key out, so that it is asked, or start the server with --alias",
            )


def _unreachable(where: str, backend: BackendConfig, error: OSError) -> Finding:
    reason: Any = getattr(error, "reason", error)
    if isinstance(reason, ConnectionRefusedError):
        what, cure = "nobody listens there", "Start the server, or take its table out; check host and port"
    elif isinstance(reason, socket.gaierror):
        what, cure = f"the name is not known ({reason.strerror})", "Check the host's name, or use its address"
    elif isinstance(reason, ssl.SSLCertVerificationError):
        what = f"its certificate is not trusted ({reason.verify_message})"
        cure = "Name its authority in tls.ca_file; use the name that stands in the certificate"
    elif isinstance(reason, ssl.SSLError):
        what, cure = f"no TLS there ({reason.reason})", "Use http://, or the port that speaks TLS"
    elif isinstance(reason, TimeoutError):
        what = f"no answer within {WITHIN_S:g} s"
        cure = "Check the address and firewalls, and that the server listens on more than loopback (--host)"
        if backend.url.startswith("https:"):
            cure += "; use http:// where it speaks no TLS"
    else:
        what, cure = str(getattr(reason, "strerror", None) or reason), "Check host and port"
    return Finding(where, f"{backend.id} at {backend.url} cannot be reached: {what}", cure)


class _Asked:
    """Requests to one backend, as the gateway makes them."""

    def __init__(self, backend: BackendConfig) -> None:
        self._backend = backend
        self._headers = {"user-agent": "llmgw check"}
        if backend.api_key is not None:
            self._headers["authorization"] = f"Bearer {backend.api_key.reveal()}"
        self._tls = ssl.create_default_context(cafile=backend.tls.ca_file)
        if not backend.tls.verify:
            self._tls.check_hostname = False
            self._tls.verify_mode = ssl.CERT_NONE
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._tls), _NoRedirect()
        )

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. :raise OSError: no HTTP came back."""
        parts = urlsplit(self._backend.url)
        if parts.scheme == "http" and parts.hostname == "localhost":
            # Both loopback addresses, whatever the hosts file says; see llmgw.wire.names.
            self._headers["host"] = parts.netloc
            try:
                return self._get(self._backend.url.replace("localhost", "127.0.0.1", 1) + path)
            except urllib.error.URLError as error:
                if not isinstance(error.reason, ConnectionRefusedError):
                    raise
            return self._get(self._backend.url.replace("localhost", "[::1]", 1) + path)
        return self._get(self._backend.url + path)

    def _get(self, url: str) -> tuple[int, bytes]:
        request = urllib.request.Request(url, headers=self._headers)
        try:
            with self._opener.open(request, timeout=WITHIN_S) as answer:
                return answer.status, answer.read(MOST_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(65_536)
        except (ValueError, EOFError) as error:
            raise OSError(str(error)) from None
        except Exception as error:
            if isinstance(error, OSError):
                raise
            raise OSError(f"no HTTP response: {error}") from None  # http.client's own kind

    def has(self, path: str) -> bool:
        """It answers there with JSON."""
        try:
            status, body = self.get(path)
            return status == 200 and isinstance(json.loads(body), dict)
        except (OSError, ValueError, RecursionError):
            return False

    def certificate(self, where: str) -> Iterable[Finding]:
        """One that runs out soon."""
        parts = urlsplit(self._backend.url)
        if parts.scheme != "https" or not self._backend.tls.verify or parts.hostname is None:
            return
        try:
            with (
                socket.create_connection((parts.hostname, parts.port or 443), WITHIN_S) as plain,
                self._tls.wrap_socket(plain, server_hostname=parts.hostname) as line,
            ):
                peer = line.getpeercert() or {}
        except OSError:
            return
        ends = peer.get("notAfter")
        if isinstance(ends, str) and ssl.cert_time_to_seconds(ends) < time.time() + SOON_S:
            what = f"the certificate of {self._backend.id} runs out on {ends}"
            yield Finding(f"{where}.url", what, "Renew it; after that day the backend is refused")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The gateway follows none either."""

    def redirect_request(self, *_: Any) -> None:
        """None."""
        return


def _model_names(raw: bytes) -> tuple[str, ...] | None:
    try:
        return tuple(str(each["id"]) for each in json.loads(raw)["data"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _take_props(told: Told, raw: bytes) -> None:
    try:
        props = json.loads(raw)
        told.router = props.get("role") == "router"
        slots = props.get("total_slots")
        context = (props.get("default_generation_settings") or {}).get("n_ctx")
    except (ValueError, AttributeError, RecursionError):
        return
    if told.router or isinstance(slots, int):
        told.kind = "llama-server"
    told.slots = slots if isinstance(slots, int) and slots > 0 else None
    told.context_length = context if isinstance(context, int) and context > 0 else None


def quoted(names: Sequence[str]) -> str:
    """The first six of ``names``, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown
