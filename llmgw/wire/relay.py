"""From the backend's socket to the client's, with the meter looking on.

A sink here does three things with each read: show it to the meter, tell the
lease what the meter found, and pass the bytes on as they came. Nothing in it
waits, allocates a timer, or logs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmgw.wire.coroutines import Future
from llmgw.wire.sink import UpstreamFault
from llmgw.wire.sweep import NEVER

if TYPE_CHECKING:
    from llmgw.core.assemble import Assembler
    from llmgw.core.fleet import Lease
    from llmgw.core.meter import Meter
    from llmgw.core.sse import UsageStripper
    from llmgw.wire.incoming import Incoming
    from llmgw.wire.sweep import Sweep
    from llmgw.wire.upstream import UpstreamConnection

DONE_GRACE_S = 1.0
"""After the stream's own last event the backend has this long to end its body."""
PING = b": ping\n"


class Watched:
    """What every sink of a metered response has.

    :param gaps: takes the seconds between two reads of a stream.
    :param until_s: monotonic time by which the whole response must be over.
    :ivar done: fires with ``None`` at the body's end, or with the
        :class:`UpstreamFault` that cut it. Cancelling closes the backend's connection.
    """

    __slots__ = (
        "_closing",
        "_until_s",
        "connection",
        "done",
        "last_s",
        "lease",
        "meter",
        "observe_gap",
    )

    def __init__(
        self, connection: UpstreamConnection, meter: Meter, lease: Lease, *, gaps: Any, until_s: float
    ) -> None:
        self.connection = connection
        self.meter = meter
        self.lease = lease
        self.done: Future[UpstreamFault | None] = Future(self._cancelled)
        self.observe_gap = gaps.observe
        self._until_s = until_s
        self.last_s = 0.0
        self._closing = False

    def received(self, data: bytes, now_s: float, last: bool) -> None:
        """A read of the backend's socket."""
        meter = self.meter
        meter.feed(data, now_s)
        if self.last_s:
            self.observe_gap(now_s - self.last_s)
            self.lease.moved_s = self.last_s = now_s
        elif meter.first_content_s is not None:
            self.last_s = now_s
            self.lease.first_token(now_s)
            self.connection.first_token(self._until_s)
        if meter.closed and not self._closing:
            self._closing = True
            self.connection.end_by(now_s + DONE_GRACE_S)
        self.passed(data, last)

    def passed(self, data: bytes, last: bool) -> None:
        """Pass ``data`` on; for subclasses."""
        raise NotImplementedError

    def flush(self) -> None:
        """The backend is silent for now."""

    def ended(self) -> None:
        """The body is complete."""
        self.meter.end(self.connection.clock())
        self._fire(None)

    def failed(self, fault: UpstreamFault) -> None:
        """The body is cut; after the stream's own last event that is no loss."""
        if self.meter.closed:
            self.ended()
        else:
            self._fire(fault)

    def _fire(self, fault: UpstreamFault | None) -> None:
        self.done.fire(fault)

    def _cancelled(self) -> None:
        self.connection.abort()


class Relay(Watched):
    """Passes a response on, and the client's pace back.

    :param strip: takes out the usage event that the client did not ask for.
    :param heartbeat_s: silence after which a streaming client is sent a comment;
        0 for never. Only between events, and only while the backend is connected.
    :cvar fast_path: typical reads may take the :mod:`.fast_path`.
    """

    __slots__ = ("_paced", "_sweep", "deadline_s", "heartbeat_s", "incoming", "strip")

    fast_path = True

    def __init__(
        self,
        incoming: Incoming,
        connection: UpstreamConnection,
        meter: Meter,
        lease: Lease,
        *,
        gaps: Any,
        until_s: float,
        strip: UsageStripper | None = None,
        heartbeat_s: float = 0.0,
        sweep: Sweep | None = None,
    ) -> None:
        super().__init__(connection, meter, lease, gaps=gaps, until_s=until_s)
        self.incoming = incoming
        self.strip = strip
        self.heartbeat_s = heartbeat_s
        self._sweep = sweep if heartbeat_s else None
        self._paced = False
        self.deadline_s = NEVER
        if self._sweep is not None:
            self.deadline_s = connection.clock() + heartbeat_s
            self._sweep.add(self)

    def passed(self, data: bytes, last: bool) -> None:
        if self.strip is not None:
            data = self.strip.feed(data)
            if last:
                data += self.strip.end()
            if not data:
                self.incoming.flush()  # the head does not wait for an event that is held
                return
        if last:
            self.incoming.hold(data)
            return
        self.incoming.send(data)
        if not self._paced:
            self._paced = True
            self.incoming.stream_from(self.connection)
            if self.fast_path and self.incoming.is_chunked:
                self.connection.open_fast_path(self)
        if self._sweep is not None:
            self.deadline_s = self.connection.clock() + self.heartbeat_s

    def flush(self) -> None:
        self.incoming.flush()

    def ended(self) -> None:
        rest = b"" if self.strip is None else self.strip.end()
        if rest:
            self.incoming.send(rest)  # the body's end came in a read of its own
        super().ended()

    def expired(self, now_s: float) -> None:
        """From the sweep: the client has heard nothing for a while, unless by the fast path."""
        if self.last_s + self.heartbeat_s > now_s:
            self.deadline_s = self.last_s + self.heartbeat_s
            return
        self.deadline_s = now_s + self.heartbeat_s
        meter = self.meter
        # Nor between a CR and the LF that may belong to it.
        if meter.at_line_start and not meter.cut_in_event and not self.connection.lost:
            self.incoming.send(PING)

    def _fire(self, fault: UpstreamFault | None) -> None:
        if self._sweep is not None:
            self._sweep.discard(self)
        super()._fire(fault)

    def _cancelled(self) -> None:
        if self._sweep is not None:
            self._sweep.discard(self)
        super()._cancelled()


class CappedRelay(Relay):
    """A :class:`Relay` of an answer that may have ``limit_bytes`` of body.

    Set :attr:`limit_bytes` before it gets anything.
    """

    fast_path = False
    limit_bytes = 0

    def passed(self, data: bytes, last: bool) -> None:
        self.limit_bytes -= len(data)
        if self.limit_bytes < 0:
            self.connection.abort()
            self._fire(UpstreamFault("response_limit", "the answer is larger than it may be"))
            return
        super().passed(data, last)


class Assembly(Watched):
    """Puts a streamed answer together for a client that did not ask for a stream."""

    def __init__(
        self,
        connection: UpstreamConnection,
        meter: Meter,
        lease: Lease,
        assembler: Assembler,
        *,
        gaps: Any,
        until_s: float,
    ) -> None:
        super().__init__(connection, meter, lease, gaps=gaps, until_s=until_s)
        self.assembler = assembler

    def passed(self, data: bytes, last: bool) -> None:
        self.assembler.feed(data)


class Collected:
    """Takes a short body whole, such as an error's; gives up over ``limit_bytes``."""

    def __init__(self, connection: UpstreamConnection, limit_bytes: int) -> None:
        self._connection = connection
        self._limit_bytes = limit_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self.done: Future[UpstreamFault | None] = Future(connection.abort)

    @property
    def body(self) -> bytes:
        """What has arrived."""
        return b"".join(self._parts)

    def received(self, data: bytes, now_s: float, last: bool) -> None:
        """More of it."""
        self._size += len(data)
        if self._size > self._limit_bytes:
            self._connection.abort()
            self.done.fire(UpstreamFault("framing", "the error's body is too long"))
            return
        self._parts.append(data)

    def flush(self) -> None:
        """Nothing to do."""

    def ended(self) -> None:
        """All of it is here."""
        self.done.fire(None)

    def failed(self, fault: UpstreamFault) -> None:
        """It was cut."""
        self.done.fire(fault)
