"""The fast path: a typical event of a token stream, from socket to socket in one step.

Nearly every read of a running stream is one whole chunk with one event that adds a
piece of text. The general path (decode the chunk, show it to the meter and the usage
stripper, frame it again) then forwards the same bytes and updates a few figures.
:class:`FastPath` does only that, for such reads alone. Every other read takes the general
path, and the two may alternate in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmgw.wire.relay import Relay
    from llmgw.wire.upstream import UpstreamConnection


class FastPath:
    """One stream's fast path; opened once its first bytes have been sent to the client.

    Requires that the client's framing is chunked, too, and that no size limit applies.

    :param alone_at: recognises a read that is exactly one chunk,
        :meth:`ResponseReader.alone_at <llmgw.core.response_reader.ResponseReader>`.
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
        """Forward a read. :return: whether it was a typical one; if not, nothing was done."""
        start = self._alone_at(data)
        incoming = self._incoming
        strip = self._strip
        # The stripper removes nothing from a plain event, but may hold back a line end before it.
        if not start or incoming.gone or (strip is not None and strip.held):
            return False
        try:
            now_s = self._clock()
            stop = len(data) - 2
            if not self._takes_plain(data, start, stop, now_s):
                return False
            relay = self._relay
            self._observe_gap(now_s - relay.last_s)
            # All deadlines of a running stream are computed from these, see ``expired`` of both.
            self._connection.heard_s = relay.last_s = self._lease.moved_s = now_s
            incoming.send_framed(data, stop - start)
        except Exception:
            self._connection.failed_ourselves()
        return True
