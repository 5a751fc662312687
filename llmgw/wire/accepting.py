"""Who may come in: a listener's connections, within the site's caps."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from twisted.internet.interfaces import IProtocolNegotiationFactory
from twisted.internet.protocol import Factory, Protocol
from zope.interface import implementer

from llmgw.wire.server import ClientConnection

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress, ITCPTransport

    from llmgw.wire.site import Site


class TurnedAway(Protocol):
    """Closes at once. A factory may also make ``None`` for that, but Twisted's own TLS then
    holds a connection with nothing behind it, for ever."""

    def connectionMade(self) -> None:
        transport = cast("ITCPTransport", self.transport)
        transport.loseConnection()


@implementer(IProtocolNegotiationFactory)
class ClientFactory(Factory):
    """Makes connections for one listener, within the site's caps."""

    noisy = False

    def __init__(self, site: Site) -> None:
        self.site = site

    def acceptableProtocols(self) -> list[bytes]:
        """What TLS listeners take by ALPN (RFC 7301): no HTTP/2.

        A client that offers something and finds nothing of it here gets no connection;
        ``curl -0`` offers ``http/1.0`` alone.
        """
        return [b"http/1.1", b"http/1.0"]

    def believes(self, host: str) -> bool:
        """Whether ``host`` may speak for other clients (the PROXY protocol)."""
        return self.site.is_exempt(host)

    def tls_failed(self) -> None:
        """A connection has ended for a fault of TLS."""
        self.site.count_refusal("tls")

    def buildProtocol(self, addr: IAddress | None) -> ClientConnection | TurnedAway:
        """What closes the connection before TLS has begun, when a cap is reached."""
        peer = getattr(addr, "host", None) or "unix"
        if not self.site.may_open(peer):
            return TurnedAway()
        connection = ClientConnection(self.site, peer)
        connection.factory = self
        return connection
