"""The admin listener: probes, metrics, state, and the few levers.

``/livez`` says that the event loop turns, ``/readyz`` that requests can be
taken; neither depends on Redis, etcd, or any one backend. With
``admin_token_file`` set, everything but the two probes wants
``Authorization: Bearer`` with that token.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.web import http
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twisted.web.server import Request

_encode = msgspec.json.Encoder(enc_hook=str).encode
JSON = b"application/json; charset=utf-8"


class Operations(Protocol):
    """What the admin listener asks of the gateway."""

    def readiness(self) -> tuple[bool, str]:
        """Whether requests can be taken, and why not."""

    def state(self) -> Mapping[str, Any]:
        """Fleet, profiles, breakers, limits, as plain values without secrets."""

    def metrics_text(self) -> bytes:
        """Prometheus' text format."""

    def drain_backend(self, id: str, on: bool) -> bool:
        """:return: whether there is such a backend."""

    def reload(self) -> Deferred[list[str]]:
        """Fires with what could not be changed without a restart. Fails with ConfigError."""

    def drain(self) -> None:
        """Begin to drain the whole gateway."""


class Page(Resource):
    """One path, one function, one method."""

    isLeaf = True

    def __init__(self, answer: Callable[[Request], tuple[int, bytes, bytes]], method: bytes = b"GET") -> None:
        super().__init__()
        self._answer = answer
        self._method = method

    def render(self, request: Request) -> bytes | int:
        wanted = self._method
        if request.method != wanted and not (wanted == b"GET" and request.method == b"HEAD"):
            request.setHeader("allow", wanted.decode("ascii"))
            return finish(request, 405, JSON, _error("method_not_allowed"))
        return finish(request, *self._answer(request))


class AdminRoot(Resource):
    """All paths of the admin listener."""

    log = Logger()

    def __init__(self, operations: Operations, token: str | None = None) -> None:
        super().__init__()
        self._operations = operations
        self._token = token.encode("utf-8") if token is not None else None
        self._pages: dict[bytes, Resource] = {
            b"livez": Page(lambda _: (200, JSON, b'{"status":"ok"}')),
            b"readyz": Page(self._readyz),
            b"metrics": Page(
                lambda _: (200, b"text/plain; version=0.0.4; charset=utf-8", operations.metrics_text())
            ),
        }
        self._api: dict[bytes, Resource] = {
            b"state": Page(lambda _: (200, JSON, _encode(operations.state()))),
            b"reload": Reload(operations),
            b"drain": Page(self._drain, b"POST"),
        }

    def getChild(self, path: bytes, request: Request) -> Resource:
        """The resource of ``path``, if the caller may see it."""
        page = self._pages.get(path)
        if path in (b"livez", b"readyz") and page is not None:
            return page
        if self._token is not None:
            scheme, _, given = (request.getHeader(b"authorization") or b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
                request.setHeader("www-authenticate", "Bearer")
                return _Fixed(401, _error("unauthorized"))
        if page is not None:
            return page
        rest = [path, *request.postpath]
        if rest[0] == b"api" and len(rest) == 2 and rest[1] in self._api:
            return self._api[rest[1]]
        if rest[:2] == [b"api", b"backends"] and len(rest) == 4 and rest[3] in (b"drain", b"undrain"):
            return Page(lambda _: self._drain_backend(rest[2], rest[3] == b"drain"), b"POST")
        if path == b"" and not request.postpath:
            return Page(lambda _: (200, b"text/html; charset=utf-8", _INDEX))
        return _Fixed(404, _error("not_found"))

    def _readyz(self, request: Request) -> tuple[int, bytes, bytes]:
        ready, why = self._operations.readiness()
        return (
            (200 if ready else 503),
            JSON,
            _encode({"status": "ok" if ready else "not ready", "reason": why}),
        )

    def _drain(self, request: Request) -> tuple[int, bytes, bytes]:
        self._operations.drain()
        return 202, JSON, b'{"status":"draining"}'

    def _drain_backend(self, id: bytes, on: bool) -> tuple[int, bytes, bytes]:
        name = id.decode("utf-8", "replace")
        if not self._operations.drain_backend(name, on):
            return 404, JSON, _error("not_found")
        return 200, JSON, _encode({"backend": name, "draining": on})


class Reload(Resource):
    """``POST /api/reload``: verify the whole, then swap, or say what is wrong."""

    isLeaf = True

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self._operations = operations

    def render(self, request: Request) -> bytes | int:
        if request.method != b"POST":
            request.setHeader("allow", "POST")
            return finish(request, 405, JSON, _error("method_not_allowed"))
        reloading = self._operations.reload()
        reloading.addCallbacks(
            lambda left: (200, _encode({"status": "reloaded", "needs_restart": left})),
            lambda failure: (
                400,
                _encode({"error": {"code": "config", "message": failure.getErrorMessage()}}),
            ),
        )
        reloading.addCallback(lambda answer: self._late(request, *answer))
        return int(NOT_DONE_YET)

    def _late(self, request: Request, status: int, body: bytes) -> None:
        if request.channel is None:
            return  # the operator left
        request.write(finish(request, status, JSON, body))
        request.finish()


class _Fixed(Resource):
    isLeaf = True

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__()
        self._status = status
        self._body = body

    def render(self, request: Request) -> bytes:
        return finish(request, self._status, JSON, self._body)


def finish(request: Request, status: int, content_type: bytes, body: bytes) -> bytes:
    """Set status and headers of an answer; ``body`` is its own."""
    request.setResponseCode(status)
    request.setHeader(b"content-type", content_type)
    request.setHeader(b"content-length", b"%d" % len(body))
    request.setHeader(b"cache-control", b"no-store")
    request.setHeader(b"x-content-type-options", b"nosniff")
    return b"" if request.method == b"HEAD" else body


def _error(code: str) -> bytes:
    return _encode(
        {
            "error": {
                "code": code,
                "message": http.RESPONSES.get(404, b"").decode() if code == "not_found" else code,
            }
        }
    )


_INDEX = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>llmgw</title>
<h1>llmgw</h1><ul><li><a href="/api/state">state</a><li><a href="/metrics">metrics</a>
<li><a href="/readyz">readyz</a><li><a href="/livez">livez</a></ul></html>"""


class AdminSite(Site):
    """``twisted.web`` without its access log: the admin listener is for machines."""

    displayTracebacks = False

    def log(self, request: Any) -> None:
        """Nothing."""
