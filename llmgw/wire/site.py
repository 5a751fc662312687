"""What all client connections of this process share: limits, counters, the clock, ``serve``."""

from __future__ import annotations

import ipaddress
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from twisted.internet.tcp import Connection
from twisted.python.runtime import seconds as wall_seconds

from llmgw.core.http import HeadLimits
from llmgw.core.request_reader import RequestMemo
from llmgw.wire.twisted_internals import unsent_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmgw.config import Limits, Timeouts
    from llmgw.core.http import HttpFault
    from llmgw.wire.incoming import Headers, Incoming
    from llmgw.wire.senders import Outbox
    from llmgw.wire.server import ClientConnection
    from llmgw.wire.sweep import Sweep

SHEDDING_KEEPALIVE_S = 5.0
BURST_WINDOW_S = 1.0
SILENT_PER_FREE = 2
"""Connections that have not sent a request may be twice as many as the places that are free; beyond
that the oldest of them is closed. So a burst finds room, and there is always room for the next."""
MIN_SILENT = 64
"""So many of them are always allowed."""
CACHED_GROUPS = 4096


class Site:
    """Shared by every listener.

    :param serve: starts the exchange of one request; never raises.
    :param fault_answer: makes the headers and the body of the answer to malformed bytes, from
        the fault and the peer's address.
    :ivar shedding: idle connections are kept for :data:`SHEDDING_KEEPALIVE_S` only.
    :ivar accepting: if false, every new connection is closed at once.
    :ivar draining: every answer closes its connection.
    :ivar patient: a connection whose client may be about to send a request is not idle.
    :ivar held_bytes: bytes of request bodies in memory now.
    :ivar refusals: number of refused connections and requests by reason.
    """

    def __init__(
        self,
        *,
        sweep: Sweep,
        outbox: Outbox,
        limits: Limits,
        timeouts: Timeouts,
        serve: Callable[[Incoming], None],
        fault_answer: Callable[[HttpFault, str], tuple[Headers, bytes]],
    ) -> None:
        self.sweep = sweep
        self.outbox = outbox
        self.clock = sweep.clock
        self.serve = serve
        self.fault_answer = fault_answer
        self.connections: set[ClientConnection] = set()
        self.draining = False
        self.patient = True
        self.shedding = False
        self.accepting = True
        self.held_bytes = 0
        self.refusals: dict[str, int] = {}
        # Connections that have not sent a request yet, the oldest first.
        self._silent: dict[ClientConnection, None] = {}
        self._per_peer: dict[str, int] = {}
        self._recent: dict[str, int] = {}
        self._recent_since_s = 0.0
        self._date_s = 0
        self._date = b""
        self.configure(limits, timeouts)

    def configure(self, limits: Limits, timeouts: Timeouts) -> None:
        """Change the limits; connections already open follow them from their next step on."""
        self.limits = limits
        self.timeouts = timeouts
        self.head_limits = HeadLimits(
            request_line=limits.request_line,
            header_line=limits.header_line,
            headers=limits.headers,
            count=limits.header_count,
        )
        # A new memo also drops what the old configuration derived from heads.
        self.request_heads = RequestMemo(self.head_limits)
        # Parsing an address costs as much as all other checks of a new connection.
        self._groups: dict[str, str] = {}
        self._trusted = [ipaddress.ip_network(text, strict=False) for text in limits.trusted_networks]

    @property
    def keepalive_s(self) -> float:
        """Seconds for which an idle connection is kept."""
        return SHEDDING_KEEPALIVE_S if self.shedding else self.timeouts.keepalive_s

    @property
    def http_date(self) -> bytes:
        """The time for ``Date`` (RFC 9110 section 6.6.1), made once a second."""
        now_s = int(wall_seconds())
        if now_s != self._date_s:
            self._date_s = now_s
            self._date = formatdate(now_s, usegmt=True).encode("ascii")
        return self._date

    # --- limits ---

    def may_open(self, peer: str) -> bool:
        """Whether another connection from ``peer`` is within the limits; counts the refusal if not."""
        reason = self._over_limit(peer)
        if reason:
            self.count_refusal(reason)
            return False
        return True

    def _over_limit(self, peer: str) -> str:
        if not self.accepting:
            return "overload"
        if len(self.connections) >= self.limits.connections:
            return "connections"
        return self._over_peer_limit(self._group(peer))

    def _over_peer_limit(self, group: str) -> str:
        """The limits per address."""
        if not group:
            return ""
        if self._per_peer.get(group, 0) >= self.limits.connections_per_ip:
            return "connections_per_ip"
        now_s = self.clock()
        if now_s - self._recent_since_s >= BURST_WINDOW_S:
            self._recent_since_s = now_s
            self._recent.clear()
        count = self._recent.get(group, 0) + 1
        if count > self.limits.new_connections_per_ip_s:
            return "new_connections_per_ip"
        self._recent[group] = count
        return ""

    def is_exempt(self, peer: str) -> bool:
        """Addresses without limits: loopback, Unix sockets, ``limits.trusted_networks``."""
        return not self._group(peer)

    def _group(self, peer: str) -> str:
        """What a peer is counted under: its address for IPv4, its /64 for IPv6, ``""`` if exempt."""
        group = self._groups.get(peer)
        if group is None:
            if len(self._groups) >= CACHED_GROUPS:
                self._groups.clear()
            group = self._groups[peer] = self._group_of(peer)
        return group

    def _group_of(self, peer: str) -> str:
        try:
            address = ipaddress.ip_address(peer.partition("%")[0])
        except ValueError:
            return ""  # unix sockets
        if address.version == 6 and address.ipv4_mapped is not None:
            # An IPv4 client of a dual-stack listener.
            address = address.ipv4_mapped
        if address.is_loopback or any(address in network for network in self._trusted):
            return ""
        if address.version == 6:
            return str(ipaddress.ip_network((address, 64), strict=False).network_address)
        return str(address)

    # --- called by connections ---

    def opened(self, connection: ClientConnection) -> None:
        """A connection was opened."""
        self.connections.add(connection)
        self.sweep.add(connection)
        self._count_in(connection)
        self._silent[connection] = None
        free = self.limits.connections - len(self.connections)
        if len(self._silent) > max(MIN_SILENT, SILENT_PER_FREE * free):
            # Clients that connect and send nothing must not take places from those that send requests.
            oldest = next(iter(self._silent))
            self.count_refusal("awaiting_first_request")
            # Its transport reports the loss one turn later; more may have been opened by then.
            self.closed(oldest)
            oldest.cut()

    def first_request(self, connection: ClientConnection) -> None:
        """A connection has sent its first request head."""
        self._silent.pop(connection, None)

    def closed(self, connection: ClientConnection) -> None:
        """A connection was closed. Idempotent."""
        self.connections.discard(connection)
        self._silent.pop(connection, None)
        self.sweep.discard(connection)
        self._count_out(connection)

    def _count_in(self, connection: ClientConnection) -> None:
        connection.group = group = self._group(connection.peer)
        if group:
            self._per_peer[group] = self._per_peer.get(group, 0) + 1

    def _count_out(self, connection: ClientConnection) -> None:
        # Not looked up again: a reload may have changed who is exempt.
        group, connection.group = connection.group, ""
        if group:
            left = self._per_peer.get(group, 1) - 1
            if left > 0:
                self._per_peer[group] = left
            else:
                self._per_peer.pop(group, None)

    def count_refusal(self, reason: str) -> None:
        """Count a refusal under ``reason``, one of a fixed set of words."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    @staticmethod
    def is_plain(transport: Any) -> bool:
        """Whether ``transport`` is the socket itself, which can be half-closed."""
        return isinstance(transport, Connection) and not getattr(transport, "TLS", False)

    # --- closing ---

    def close_idle(self) -> None:
        """Close the connections without a request; see ``ClientConnection.close_if_idle``."""
        for connection in list(self.connections):
            connection.close_if_idle()

    def cut_stalled(self, most: int) -> None:
        """Cut up to ``most`` answers that their clients do not read, those that hold most memory first."""
        stalled = [connection for connection in self.connections if connection.stalled]
        stalled.sort(key=lambda connection: unsent_bytes(connection.transport), reverse=True)
        for connection in stalled[:most]:
            self.count_refusal("cut_by_overload")
            connection.expired(self.clock())

    def cut_all(self) -> None:
        """Cut every connection."""
        for connection in list(self.connections):
            connection.cut()

    @property
    def busy(self) -> int:
        """The number of connections with a request being served or on its way, or an unfinished answer."""
        return sum(
            each.current is not None or each.expects_request or each.is_draining for each in self.connections
        )
