"""Accepts or refuses the connections of a listener, within the site's limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from twisted.internet.interfaces import IProtocolNegotiationFactory
from twisted.internet.protocol import Factory, Protocol
from zope.interface import implementer

from llmgw.wire.server import ClientConnection

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress, ITCPTransport

    from llmgw.wire.site import Site


class Refused(Protocol):
    """Closes at once. A factory may also return ``None`` for that, but Twisted's own TLS would
    then keep a connection without a protocol for ever."""

    def connectionMade(self) -> None:
        transport = cast("ITCPTransport", self.transport)
        transport.loseConnection()


@implementer(IProtocolNegotiationFactory)
class ClientFactory(Factory):
    """Makes the connections of one listener."""

    noisy = False

    def __init__(self, site: Site) -> None:
        self.site = site

    def acceptableProtocols(self) -> list[bytes]:
        """The protocols that TLS listeners accept by ALPN (RFC 7301): no HTTP/2.

        A client that offers protocols, but none of these, gets no connection; ``curl -0``
        offers only ``http/1.0``.
        """
        return [b"http/1.1", b"http/1.0"]

    def believes(self, host: str) -> bool:
        """Whether ``host`` may send the PROXY protocol's header for other clients."""
        return self.site.is_exempt(host)

    def tls_failed(self) -> None:
        """A connection was closed because of a TLS error."""
        self.site.count_refusal("tls")

    def buildProtocol(self, addr: IAddress | None) -> ClientConnection | Refused:
        """A connection, or beyond a limit a protocol that closes it before TLS has begun."""
        peer = getattr(addr, "host", None) or "unix"
        if not self.site.may_open(peer):
            return Refused()
        connection = ClientConnection(self.site, peer)
        connection.factory = self
        return connection
