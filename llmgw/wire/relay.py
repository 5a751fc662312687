"""The sinks of responses: from the backend's socket to the client's, past the meter.

A metered sink does three things with each read: show it to the meter, tell the lease
what the meter found, and forward the bytes as they came. Nothing here waits, creates a
timer, or logs.
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
"""Time in which the backend must end its body after the stream's last event."""
PING = b": ping\n"


class MeteredSink:
    """The base of all sinks whose response is metered.

    :param gaps: the histogram of seconds between two reads of a stream.
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
        """Body bytes of one read. See :class:`~llmgw.wire.sink.Sink`."""
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
        self.forward(data, last)

    def forward(self, data: bytes, last: bool) -> None:
        """Do with ``data`` what the sink is for.

        :param last: as in :meth:`received`.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """The backend has sent all it has for now."""

    def ended(self) -> None:
        """The body is complete."""
        self.meter.end(self.connection.clock())
        self._fire(None)

    def failed(self, fault: UpstreamFault) -> None:
        """The body was cut off; after the stream's last event nothing is lost by that."""
        if self.meter.closed:
            self.ended()
        else:
            self._fire(fault)

    def _fire(self, fault: UpstreamFault | None) -> None:
        self.done.fire(fault)

    def _cancelled(self) -> None:
        self.connection.abort()


class Relay(MeteredSink):
    """Forwards a response to the client, and the client's back-pressure to the backend.

    :param strip: removes the usage event that the client did not ask for.
    :param heartbeat_s: seconds of silence after which a streaming client is sent a comment;
        0 for never. Only between events, and only while the backend is connected.
    :param limit_bytes: the largest body that the client may get; ``None`` for no limit.
    :cvar fast_path: typical reads may take the :mod:`.fast_path`.
    """

    __slots__ = ("_left_bytes", "_paced", "_sweep", "deadline_s", "heartbeat_s", "incoming", "strip")

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
        limit_bytes: int | None = None,
        sweep: Sweep | None = None,
    ) -> None:
        super().__init__(connection, meter, lease, gaps=gaps, until_s=until_s)
        self.incoming = incoming
        self.strip = strip
        self.heartbeat_s = heartbeat_s
        self._left_bytes = limit_bytes
        self._sweep = sweep if heartbeat_s else None
        self._paced = False
        self.deadline_s = NEVER
        if self._sweep is not None:
            self.deadline_s = connection.clock() + heartbeat_s
            self._sweep.add(self)

    def forward(self, data: bytes, last: bool) -> None:
        if self._left_bytes is not None:
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                self.connection.abort()
                self._fire(UpstreamFault("response_limit", "the answer is larger than it may be"))
                return
        if self.strip is not None:
            data = self.strip.feed(data)
            if last:
                data += self.strip.end()
            if not data:
                self.incoming.flush()  # the head does not wait for an event that is held back
                return
        if last:
            self.incoming.hold(data)
            return
        self.incoming.send(data)
        if not self._paced:
            self._paced = True
            self.incoming.stream_from(self.connection)
            if self.fast_path and self._left_bytes is None and self.incoming.is_chunked:
                self.connection.open_fast_path(self)
        if self._sweep is not None:
            self.deadline_s = self.connection.clock() + self.heartbeat_s

    def flush(self) -> None:
        self.incoming.flush()

    def ended(self) -> None:
        rest = b"" if self.strip is None else self.strip.end()
        if rest:
            self.incoming.send(rest)  # the end of the body came in a read of its own
        super().ended()

    def expired(self, now_s: float) -> None:
        """From the sweep: the client has heard nothing for a while, unless by the fast path."""
        if self.last_s + self.heartbeat_s > now_s:
            self.deadline_s = self.last_s + self.heartbeat_s
            return
        self.deadline_s = now_s + self.heartbeat_s
        meter = self.meter
        # Also not between a CR and the LF that may belong to it.
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


class AssemblingSink(MeteredSink):
    """Assembles a streamed response for a client that did not ask for a stream."""

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

    def forward(self, data: bytes, last: bool) -> None:
        self.assembler.feed(data)


class BodyCollector:
    """Collects a short body, such as that of an error; fails above ``limit_bytes``.

    :ivar done: as of :class:`MeteredSink`.
    """

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
        """See :class:`~llmgw.wire.sink.Sink`; so for the others."""
        self._size += len(data)
        if self._size > self._limit_bytes:
            self._connection.abort()
            self.done.fire(UpstreamFault("framing", "the error's body is too long"))
            return
        self._parts.append(data)

    def flush(self) -> None:
        """There is nothing to flush."""

    def ended(self) -> None:
        """The body is complete."""
        self.done.fire(None)

    def failed(self, fault: UpstreamFault) -> None:
        """The body was cut off."""
        self.done.fire(fault)
