"""The usual event of a token stream, from the backend's socket to the client's in one step.

Nearly every read of a running stream is one whole chunk that holds one event that
adds a piece of text. What the general way does with it (take the chunk apart, show
it to the meter and the usage stripper, frame it anew) comes to this: the same bytes
go on, and some figures move. :class:`Express` does just that, for such reads alone;
every other read goes the general way, and both may follow each other in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmgw.wire.relay import Relay
    from llmgw.wire.upstream import UpstreamConnection


class Express:
    """For one stream, once its first bytes have left for the client.

    The client's framing is chunked, too, and no limit of size holds.

    :param alone_at: recognises a whole chunk, :meth:`ResponseReader.alone_at
        <llmgw.core.response_reader.ResponseReader>`.
    """

    __slots__ = (
        "_alone_at",
        "_clock",
        "_connection",
        "_incoming",
        "_lease",
        "_observe_gap",
        "_relay",
        "_strip",
        "_takes_plain",
    )

    def __init__(
        self, relay: Relay, connection: UpstreamConnection, alone_at: Callable[[bytes], int]
    ) -> None:
        self._relay = relay
        self._connection = connection
        self._alone_at = alone_at
        self._clock = connection.clock
        self._incoming = relay.incoming
        self._lease = relay.lease
        self._strip = relay.strip
        self._takes_plain = relay.meter.takes_plain
        self._observe_gap = relay.observe_gap

    def take(self, data: bytes) -> bool:
        """Pass a read on. :return: whether it was a usual one; else nothing was done."""
        start = self._alone_at(data)
        incoming = self._incoming
        strip = self._strip
        # The stripper would take nothing out of a plain event, but it may hold a line end before it.
        if not start or incoming.gone or (strip is not None and strip.held):
            return False
        try:
            now_s = self._clock()
            stop = len(data) - 2
            if not self._takes_plain(data, start, stop, now_s):
                return False
            relay = self._relay
            self._observe_gap(now_s - relay.last_s)
            # All deadlines of a running stream count from these, see ``expired`` of both.
            self._connection.heard_s = relay.last_s = self._lease.moved_s = now_s
            incoming.send_framed(data, stop - start)
        except Exception:
            self._connection.failed_ourselves()
        return True
