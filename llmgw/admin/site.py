"""The admin listener: probes, metrics, state, and the few levers.

``/livez`` says that the event loop turns, ``/readyz`` that requests can be
taken; neither depends on Redis, etcd, or any one backend, and both are open.

Everything else wants the token, if there is one, see :mod:`.session`. Without a
token the listener is on loopback, where a browser could be made to speak for a
foreign page; so it must then be addressed as ``localhost`` or by number (DNS
rebinding). In either case levers are not moved for pages of another origin (CSRF).
"""

from __future__ import annotations

import time
from ipaddress import ip_address
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from twisted.internet.defer import maybeDeferred
from twisted.web.resource import Resource
from twisted.web.server import Request, Site

from llmgw.admin import assets, metrics, openmetrics
from llmgw.admin.channel import BODY_BYTES, IDLE_S, AdminChannel, Connections
from llmgw.admin.events import Events, Feed, news
from llmgw.admin.guesses import Guesses
from llmgw.admin.pages import Answer, Page, encode, error_answer, send
from llmgw.admin.session import Sessions
from llmgw.errors import GatewayError, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IReactorTime

    from llmgw.access.flood import FailureFlood


class Operations(Protocol):
    """What the admin listener asks of the gateway."""

    def readiness(self) -> tuple[bool, str]:
        """Whether requests can be taken, and why not."""

    def state(self) -> Mapping[str, Any] | Deferred[Mapping[str, Any]]:
        """Fleet, profiles, breakers, limits, as plain values without secrets."""

    def metrics_text(self) -> bytes | Deferred[bytes]:
        """Prometheus' text format."""

    def openmetrics(self) -> bytes | Deferred[bytes] | None:
        """The same as OpenMetrics; ``None`` where it would tell nothing more."""

    def explain(self, body: bytes) -> Mapping[str, Any] | Deferred[Mapping[str, Any]]:
        """Candidates, scores, reasons and choice for a request that is not sent.

        :raise GatewayError: what the request would have been answered with.
        """

    def drain_backend(self, id: str, on: bool) -> bool | Deferred[bool]:
        """:return: whether there is such a backend."""

    def load_model(
        self, name: str, on: bool
    ) -> Mapping[str, Any] | Deferred[Mapping[str, Any] | None] | None:
        """:return: what was begun; ``None``: no loader has the model.

        :raise GatewayError: it cannot be had now.
        """

    def reload(self) -> Deferred[list[str]]:
        """Fires with what could not be changed without a restart. Fails with ConfigError or PluginError."""

    def restart(self) -> Deferred[list[int]]:
        """Replace the workers one after another. Fires with the new ones' process ids.

        :raise GatewayError: (the Deferred fails with it) a new one does not become
            ready; or there are no workers.
        """

    def drain(self) -> None:
        """Begin to drain the whole gateway."""


class AdminRoot(Resource):
    """All paths of the admin listener.

    :param token: what callers must show; ``None`` for none.
    :param flood: counts wrong tokens by who shows them.
    :param reactor: for timers; the global one if absent.
    :param feeds: told with the events, and each at ``/api/`` and its name.
    :param wall_clock: Unix seconds, for the end of sessions.
    :param clock: monotonic seconds.
    :raise ValueError: an empty token, which anybody could show.
    """

    def __init__(
        self,
        operations: Operations,
        token: str | None = None,
        *,
        flood: FailureFlood,
        reactor: IReactorTime | None = None,
        feeds: Sequence[Feed] = (),
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        if token == "":
            raise ValueError("the admin token is empty")
        self.reactor = reactor
        self._operations = operations
        self._sessions = None if token is None else Sessions(token.encode("utf-8"), wall_clock)
        self._guesses = Guesses(flood, clock)
        self.events = Events(operations.state, reactor, feeds)
        files = assets.load()
        self._login = assets.Asset("login.html", files["login.html"], status=401)
        self._assets = {name.encode(): assets.Asset(name, body) for name, body in files.items()}
        self._probes: dict[bytes, Resource] = {
            b"livez": Page(lambda _: Answer(b'{"status":"ok"}')),
            b"readyz": Page(self._readyz),
        }
        self._pages: dict[tuple[bytes, ...], Resource] = {
            (b"",): self._assets[b"dashboard.html"],
            (b"metrics",): Page(self._metrics),
            (b"api", b"state"): Page(lambda _: _as_json(operations.state())),
            (b"api", b"events"): self.events,
            (b"api", b"explain"): Page(self._explain, b"POST"),
            (b"api", b"reload"): Page(self._reload, b"POST"),
            (b"api", b"restart"): Page(self._restart, b"POST"),
            (b"api", b"drain"): Page(self._drain, b"POST"),
        }
        self._session: dict[bytes, tuple[Callable[[Request], Answer], bytes]] = {
            b"GET": (self._tell_session, b"GET"),
            b"POST": (self._begin_session, b"POST"),
            b"DELETE": (self._end_session, b"DELETE"),
        }
        for feed in feeds:
            self._pages[b"api", feed.name.encode()] = Page(_told(feed))

    def close(self) -> None:
        """End the streams of events."""
        self.events.close()

    def admits(self, request: Request) -> GatewayError | None:
        """``None``, or why this caller gets nothing but the probes."""
        if self._sessions is None:
            if not _is_local_name(request):
                return _denied("set admin_token_file to use the admin listener by this name")
        elif not self._sessions.admit(request):
            return GatewayError("a token is needed", status=401, code="unauthorized")
        if request.method not in (b"GET", b"HEAD") and _is_foreign(request):
            return _denied("not for pages of another origin")
        return None

    def getChild(self, path: bytes, request: Request) -> Resource:
        """The page of the whole path, if the caller may see it."""
        whole = (path, *(request.postpath or ()))
        if len(whole) == 1 and path in self._probes:
            return self._probes[path]
        if len(whole) == 2 and path == b"assets" and whole[1] in self._assets:
            return self._assets[whole[1]]
        refused = self.admits(request)
        if refused is not None:
            return self._challenge(request, whole) if refused.status == 401 else _Refusal(refused)
        if whole == (b"api", b"session"):
            return Page(*self._session.get(request.method, self._session[b"GET"]))
        page = self._pages.get(whole)
        if page is not None:
            return page
        if whole[:2] == (b"api", b"backends") and len(whole) == 4 and whole[3] in (b"drain", b"undrain"):
            return Page(lambda _: self._drain_backend(whole[2], whole[3] == b"drain"), b"POST")
        if whole[:2] == (b"api", b"models") and len(whole) > 3 and whole[-1] in (b"load", b"unload"):
            # Names of models have slashes.
            return Page(lambda _: self._load_model(b"/".join(whole[2:-1]), whole[-1] == b"load"), b"POST")
        return _Refusal(NotFound("no such page"))

    def _challenge(self, request: Request, whole: tuple[bytes, ...]) -> Resource:
        """401, or 429 to who guesses: a person gets a form, a program the schemes. A browser that is
        offered ``Basic`` would ask by itself, at each request of the page in the background too."""
        assert self._sessions is not None  # else nobody wants a token
        refusal = self._guesses.refusal(request, tried=self._sessions.tried(request))
        challenges = [b"Bearer"]
        if not request.getHeader(b"sec-fetch-mode"):
            challenges.append(b'Basic realm="llmgw", charset="UTF-8"')
        request.responseHeaders.setRawHeaders(b"www-authenticate", challenges)
        if whole == (b"",) and b"text/html" in (request.getHeader(b"accept") or b""):
            request.responseHeaders.setRawHeaders(b"www-authenticate", challenges[:1])
            return self._login
        if refusal.retry_after_s is not None:
            request.responseHeaders.removeHeader(b"www-authenticate")
            request.setHeader(b"retry-after", b"%d" % ceil(refusal.retry_after_s))
        return _Refusal(refusal)

    def _tell_session(self, request: Request) -> Answer:
        """Whether there is anything to sign out of."""
        return Answer(encode({"token": self._sessions is not None}))

    def _begin_session(self, request: Request) -> Answer:
        """The token was shown; from now on a cookie does."""
        if self._sessions is not None:
            self._sessions.begin(request)
        return Answer(b'{"status":"ok"}')

    def _end_session(self, request: Request) -> Answer:
        if self._sessions is not None:
            self._sessions.end(request)
        return Answer(b'{"status":"ok"}')

    def _readyz(self, request: Request) -> Answer:
        ready, why = self._operations.readiness()
        return Answer(
            encode({"status": "ok" if ready else "not ready", "reason": why}), 200 if ready else 503
        )

    def _metrics(self, request: Request) -> Deferred[Answer]:
        if b"application/openmetrics-text" in (request.getHeader(b"accept") or b""):
            opened: Deferred[Any] = maybeDeferred(self._operations.openmetrics)
            return opened.addCallback(
                lambda text: (
                    self._plain_metrics()
                    if text is None
                    else Answer(text, content_type=openmetrics.CONTENT_TYPE)
                )
            )
        return self._plain_metrics()

    def _plain_metrics(self) -> Deferred[Answer]:
        text: Deferred[Any] = maybeDeferred(self._operations.metrics_text)
        return text.addCallback(lambda text: Answer(text, content_type=metrics.CONTENT_TYPE))

    def _explain(self, request: Request) -> Deferred[Answer]:
        assert request.content is not None
        return _as_json(self._operations.explain(request.content.read()))

    def _restart(self, request: Request) -> Deferred[Answer]:
        return self._operations.restart().addCallback(
            lambda pids: Answer(encode({"status": "restarted", "workers": pids}))
        )

    def _reload(self, request: Request) -> Deferred[Answer]:
        return self._operations.reload().addCallback(
            lambda left: Answer(encode({"status": "reloaded", "needs_restart": left}))
        )

    def _drain(self, request: Request) -> Answer:
        self._operations.drain()
        return Answer(b'{"status":"draining"}', 202)

    def _load_model(self, name: bytes, on: bool) -> Deferred[Answer]:
        def answer(begun: Mapping[str, Any] | None) -> Answer:
            if begun is None:
                raise NotFound("no backend loads such a model by name", param="name")
            return Answer(encode(begun), 202)

        asking: Deferred[Any] = maybeDeferred(
            self._operations.load_model, name.decode("utf-8", "replace"), on
        )
        return asking.addCallback(answer)

    def _drain_backend(self, id: bytes, on: bool) -> Deferred[Answer]:
        name = id.decode("utf-8", "replace")

        def answer(known: bool) -> Answer:
            if not known:
                raise NotFound("no such backend", param="id")
            return Answer(encode({"backend": name, "draining": on}))

        known: Deferred[Any] = maybeDeferred(self._operations.drain_backend, name, on)
        return known.addCallback(answer)


def _told(feed: Feed) -> Callable[[Request], Answer]:
    return lambda _: Answer(news(feed))


class _Refusal(Resource):
    """The same answer to every method."""

    isLeaf = True

    def __init__(self, error: GatewayError) -> None:
        super().__init__()
        self._error = error

    def render(self, request: Request) -> int:
        return send(request, error_answer(self._error))


def _as_json(value: Any) -> Deferred[Answer]:
    """What was returned, now or later."""
    return maybeDeferred(lambda: value).addCallback(lambda found: Answer(encode(found)))


def _denied(message: str) -> GatewayError:
    return GatewayError(message, status=403, code="forbidden")


def _is_local_name(request: Request) -> bool:
    host = request.getHeader(b"host")
    if not host or getattr(request.getHost(), "host", None) is None:
        return True  # HTTP/1.0 probes; a UNIX socket, which no page can reach
    try:
        name = urlsplit("//" + host.decode("ascii")).hostname or ""
        if name == "localhost" or name.endswith(".localhost"):
            return True
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_foreign(request: Request) -> bool:
    """A browser says that a page of somebody else's sent this."""
    if request.getHeader(b"sec-fetch-site") not in (None, b"same-origin", b"none"):
        return True
    origin = request.getHeader(b"origin")
    return origin is not None and origin.partition(b"://")[2] != request.getHeader(b"host")


class AdminRequest(Request):
    """Takes a body of at most :data:`BODY_BYTES`, and keeps none of a stranger's."""

    _left = BODY_BYTES
    _kept = True

    def process(self) -> None:
        if self.path == b"*":  # OPTIONS about nothing in particular, which Twisted answers with its own name
            send(self, error_answer(NotFound("no such page")))
        else:
            super().process()

    def gotLength(self, length: int | None) -> None:
        channel: Any = self.channel
        self._kept = length == 0 or channel.site.resource.admits(self) is None
        super().gotLength(length if self._kept else 0)
        if length is not None and length > BODY_BYTES:
            self._refuse_body()

    def handleContentChunk(self, data: bytes) -> None:
        if self._left < 0:
            return  # refused, and the connection is about to close
        self._left -= len(data)
        if self._left < 0:
            self._refuse_body()
        elif self._kept:
            super().handleContentChunk(data)

    def _refuse_body(self) -> None:
        self._left = -1
        channel: Any = self.channel
        channel.refuse(b"413 Content Too Large", b"the body is too large")


class AdminSite(Site):
    """``twisted.web`` without its access log: the admin listener is for machines."""

    displayTracebacks = False
    noisy = False  # or its start is told once more, by its repr
    protocol: Any = AdminChannel

    def __init__(self, root: AdminRoot) -> None:
        super().__init__(root, requestFactory=AdminRequest, reactor=root.reactor, timeout=IDLE_S)
        self.connections = Connections()

    def acceptableProtocols(self) -> list[bytes]:
        """By ALPN: as on the public side no HTTP/2, which Twisted offers where ``h2`` is installed."""
        return [b"http/1.1"]

    def log(self, request: Any) -> None:
        """Nothing."""

    def stopFactory(self) -> None:
        self.resource.close()
        super().stopFactory()
