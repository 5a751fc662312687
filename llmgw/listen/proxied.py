"""The PROXY protocol on a listener: trusted from listed networks, refused from all others.

Neither TLS nor anything else of the gateway exists for a connection before its header has been
read. So all limits per address apply to the client's address, and the protocol that follows the
header sees no trace of it: the transport has the client's address and calls that protocol
directly.

:source: "The PROXY protocol, versions 1 & 2" (HAProxy), section 2: "the receiver MUST NOT
    try to guess whether the protocol header is present or not".
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.interfaces import IStreamServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger
from zope.interface import implementer

from llmgw.core.proxy_header import Place, ProxyFault, ProxyReader
from llmgw.listen.complaints import Complaints
from llmgw.wire.twisted_internals import take_over

HEADER_S = 5.0
"""Longest time for the header, which a balancer can send as soon as it has connected."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ProxyPreface(Protocol):
    """Reads the header of one connection, then steps aside."""

    def __init__(self, factory: ProxiedFactory) -> None:
        self._factory = factory
        self._reader: ProxyReader | None = ProxyReader()
        self._behind: Any = None
        self._late: Any = None

    def connectionMade(self) -> None:
        self._late = self._factory.reactor.callLater(HEADER_S, self._too_late)

    def dataReceived(self, data: bytes) -> None:
        reader = self._reader
        if reader is None:
            if self._behind is not None:
                self._behind.dataReceived(data)
            return
        try:
            header = reader.feed(data)
        except ProxyFault as fault:
            self._refuse(str(fault))
            return
        if header is None:
            return
        self._header_is_here()
        transport: Any = self.transport
        peer, here = transport.getPeer(), transport.getHost()
        if header.source is not None and header.destination is not None:
            peer, here = _address(header.source), _address(header.destination)
        behind = self._factory.wrapped.buildProtocol(peer)
        if behind is None:
            transport.abortConnection()
            return
        self._behind = behind
        transport.getPeer = lambda: peer
        transport.getHost = lambda: here
        take_over(transport, behind)
        behind.makeConnection(transport)
        if reader.rest:
            behind.dataReceived(reader.rest)

    def connectionLost(self, reason: Any = None) -> None:
        self._header_is_here()
        if self._behind is not None:
            self._behind.connectionLost(reason)

    def _header_is_here(self) -> None:
        self._reader = None
        late, self._late = self._late, None
        if late is not None and late.active():
            late.cancel()

    def _too_late(self) -> None:
        self._refuse(f"no PROXY header within {HEADER_S:g} s")

    def _refuse(self, why: str) -> None:
        self._header_is_here()
        transport: Any = self.transport
        self._factory.complain(transport.getPeer(), why)
        transport.abortConnection()


class ProxiedFactory(Factory):
    """Makes the protocols that read the headers.

    :param wrapped: makes the protocol that follows the header, with the client's address. Where
        ``networks`` is ``None``, the innermost factory's ``believes(host)`` decides which peers
        are trusted; without it, loopback and Unix sockets are.
    """

    noisy = False
    log = Logger()

    def __init__(self, wrapped: Any, networks: Sequence[Network] | None, reactor: Any) -> None:
        self.wrapped = wrapped
        self.reactor = reactor
        self._networks = networks
        self._complaints = Complaints(reactor.seconds)

    def doStart(self) -> None:
        self.wrapped.doStart()
        super().doStart()

    def doStop(self) -> None:
        self.wrapped.doStop()
        super().doStop()

    def buildProtocol(self, addr: Any) -> Any:
        """``None`` closes the connection: a stranger."""
        if not self._may_speak(getattr(addr, "host", None)):
            self.complain(addr, "not in a network that may speak the PROXY protocol")
            return None
        return ProxyPreface(self)

    def complain(self, addr: Any, why: str) -> None:
        """Log a line, unless there were too many lately."""
        swallowed = self._complaints.may_tell()
        if swallowed is not None:
            more = f" ({swallowed} more were not told)" if swallowed else ""
            host = getattr(addr, "host", None) or "unix"
            self.log.warn("{peer}: refused: {why}{more}", peer=host, why=why, more=more)

    def _may_speak(self, host: str | None) -> bool:
        if self._networks is None:
            innermost = self.wrapped
            while hasattr(innermost, "wrappedFactory"):
                innermost = innermost.wrappedFactory
            believes = getattr(innermost, "believes", _is_near)
            return bool(believes(host or "unix"))
        if host is None:
            return True  # a Unix socket has no network; its mode says who may connect
        address = _ip(host)
        return address is not None and any(address in network for network in self._networks)


@implementer(IStreamServerEndpoint)
class ProxiedEndpoint:
    """Listens on ``inner`` for connections that begin with a PROXY header.

    :param networks: who may connect; ``None``: see :class:`ProxiedFactory`.
    """

    def __init__(self, inner: Any, networks: Sequence[Network] | None, reactor: Any) -> None:
        self.inner = inner
        self._networks = networks
        self._reactor = reactor

    def listen(self, protocolFactory: Any) -> Any:
        """See ``IStreamServerEndpoint``."""
        return self.inner.listen(ProxiedFactory(protocolFactory, self._networks, self._reactor))


def networks_of(text: str) -> tuple[Network, ...]:
    """CIDR networks, a comma between them.

    :raise ValueError: one of them is none, or there are none.
    """
    return tuple(ipaddress.ip_network(each.strip()) for each in text.split(","))


def _ip(host: str) -> Any:
    """An address, an IPv4 client of a listener for both families as what it is; ``None`` for other words."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_near(host: str) -> bool:
    address = _ip(host)
    return address is None or bool(address.is_loopback)


def _address(place: Place) -> IPv4Address | IPv6Address:
    kind = IPv6Address if ":" in place.host else IPv4Address
    return kind("TCP", place.host, place.port)
