"""``/api/events``: the state as server-sent events, one a second, only while it changes.

Beside the state, which has no event name, a listener gets what is new in each feed
under the feed's name: on its first look all that is kept. ``{"total", "items"}``.

One timer serves all listeners, and runs only while there are any. A listener
that reads slowly misses events and then gets the newest: each is the whole state.

:source: WHATWG HTML, section 9.2 (server-sent events).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.interfaces import IPushProducer
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request
from zope.interface import implementer

from llmgw.admin.pages import Answer, encode, error_answer, fault_answer, not_allowed, send, set_headers
from llmgw.errors import Overloaded

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

EVERY_S = 1.0
COMMENT_AFTER = 15
"""Ticks of silence after which a comment goes out, so that nobody between us and the listener hangs up."""
STALLED_AFTER = 60
"""Ticks after which a listener that takes nothing gives its place to others."""
MAX_LISTENERS = 64
UNTOLD = frozenset({"uptime_s", "at", "contact_age_s"})
"""Keys of the state that always change, and are no reason for an event."""
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class Feed(Protocol):
    """Things that come one after the other.

    :ivar total: how many ever came.
    """

    name: str
    total: int

    def since(self, seen: int) -> Sequence[Any]:
        """Those after the first ``seen``, as far as they are kept, oldest first."""


def news(feed: Feed, seen: int = 0) -> bytes:
    """What is new in ``feed``, as JSON."""
    return encode({"total": feed.total, "items": feed.since(seen)})


class Events(Resource):
    """All listeners to ``state`` and ``feeds``."""

    isLeaf = True
    log = Logger()

    def __init__(
        self,
        state: Callable[[], Mapping[str, Any] | Deferred[Mapping[str, Any]]],
        reactor: IReactorTime | None = None,
        feeds: Sequence[Feed] = (),
    ) -> None:
        super().__init__()
        self._feeds = feeds
        self._state = state
        self._listeners: set[_Listener] = set()
        self._told = b""
        self._event = b""
        self._loop = LoopingCall(self._tick)
        if reactor is not None:
            self._loop.clock = reactor

    def __len__(self) -> int:
        return len(self._listeners)

    def render(self, request: Request) -> int:
        if request.method == b"HEAD":
            return send(request, Answer(b"", content_type=EVENT_STREAM))
        if request.method != b"GET":
            return send(request, not_allowed(request, (b"GET", b"HEAD")))
        if len(self._listeners) >= MAX_LISTENERS:
            return send(request, error_answer(Overloaded("too many listeners")))
        gone = request.notifyFinish()
        gone.addErrback(lambda _: None)
        looking = self._look()
        looking.addCallbacks(
            lambda _: None if gone.called else self._begin(request),
            lambda failure: None if gone.called else send(request, fault_answer(failure)),
        )
        looking.addErrback(lambda failure: self.log.failure("beginning to tell the state", failure))
        return NOT_DONE_YET

    def _begin(self, request: Request) -> None:
        set_headers(request, EVENT_STREAM)
        request.setHeader(b"x-accel-buffering", b"no")
        listener = _Listener(request, self._feeds)
        self._listeners.add(listener)
        request.notifyFinish().addBoth(lambda _: self._left(listener))
        request.registerProducer(listener, True)
        if not self._loop.running:
            self._loop.start(EVERY_S, now=False)
        listener.offer(self._event)

    def close(self) -> None:
        """End every stream."""
        for listener in list(self._listeners):
            listener.end()

    def _left(self, listener: _Listener) -> None:
        self._listeners.discard(listener)
        if not self._listeners and self._loop.running:
            self._loop.stop()

    def _tick(self) -> Deferred[None]:
        return self._look().addCallbacks(
            lambda _: self._offer(),
            lambda failure: self.log.failure("reading the state for listeners", failure),
        )

    def _offer(self) -> None:
        for listener in list(self._listeners):
            listener.offer(self._event)

    def _look(self) -> Deferred[None]:
        state: Deferred[Any] = maybeDeferred(self._state)
        return state.addCallback(self._take)

    def _take(self, state: Mapping[str, Any]) -> None:
        told = encode({key: value for key, value in state.items() if key not in UNTOLD})
        if told != self._told:
            self._told = told
            self._event = b"data: %s\n\n" % encode(state)


@implementer(IPushProducer)
class _Listener:
    """One stream; the transport pauses it while its buffer is full."""

    def __init__(self, request: Request, feeds: Sequence[Feed]) -> None:
        self._request = request
        self._seen = [(feed, 0) for feed in feeds]
        self._paused = False
        self._stalled = 0
        self._sent: bytes | None = None
        self._silent = 0

    def pauseProducing(self) -> None:
        self._paused = True

    def resumeProducing(self) -> None:
        self._paused = False
        self._stalled = 0

    def stopProducing(self) -> None:
        self._paused = True

    def offer(self, event: bytes) -> None:
        """Send ``event`` unless it was sent already, and what is new in the feeds."""
        if self._paused:
            self._stalled += 1
            if self._stalled == STALLED_AFTER:
                channel: Any = self._request.channel
                channel.cut()
            return
        self._silent += 1
        for index, (feed, seen) in enumerate(self._seen):
            if feed.total > seen:
                self._silent = 0
                self._seen[index] = (feed, feed.total)
                self._request.write(b"event: %b\ndata: %b\n\n" % (feed.name.encode(), news(feed, seen)))
        if event is not self._sent:
            self._sent = event
            self._silent = 0
            self._request.write(event)
        elif self._silent >= COMMENT_AFTER:
            self._silent = 0
            self._request.write(b":\n\n")

    def end(self) -> None:
        """Finish the answer."""
        self._request.unregisterProducer()
        self._request.finish()
