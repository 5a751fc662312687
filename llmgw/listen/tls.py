"""TLS on a connection, with the certificate chosen for each handshake.

:class:`TlsTransport` is Twisted's ``TLSMemoryBIOProtocol`` with another way of writing: what was
written in one turn of the reactor becomes one record at its end, and is sent to the socket at
once instead of in the reactor's next turn (see ``wire.senders``). Everything else is Twisted's:
the handshake, partial writes, producers, and the two ways to close.

1. Private names of Twisted are used (``_flushSendBIO``, ``_flushReceiveBIO``,
   ``_tlsShutdownFinished``, ``_shutdownTLS``, ``_handshakeDone``, ``_lostTLSConnection``,
   ``_aborted``, ``_reason``, ``_tlsConnection``, ``_appSendBuffer``, ``_creatorCallable``);
   the tests hold them, side by side with Twisted's own class.
2. The answer to a KeyUpdate that comes together with data waits for our next write
   (RFC 8446 section 4.6.3 asks for no more).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from OpenSSL.SSL import Error, WantReadError, ZeroReturnError
from twisted.internet.interfaces import IStreamServerEndpoint
from twisted.internet.main import CONNECTION_LOST
from twisted.logger import Logger
from twisted.protocols.tls import TLSMemoryBIOFactory, TLSMemoryBIOProtocol
from twisted.python.failure import Failure
from zope.interface import implementer, providedBy
from zope.interface.declarations import Provides

from llmgw.certificates import BadPair, Pairs, now_utc
from llmgw.errors import ConfigError, ConfigFault
from llmgw.listen.complaints import Complaints
from llmgw.listen.contexts import Contexts, TlsFiles, reason_of
from llmgw.wire.senders import TlsSender
from llmgw.wire.twisted_internals import send_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from llmgw.wire.senders import Outbox

BIO_BYTES = 32768
SUBJECT_LENGTH = 256
_LOST = Failure(CONNECTION_LOST)


class TlsTransport(TLSMemoryBIOProtocol):
    """The TLS layer of one connection.

    :ivar refused_because: why the client's certificate was refused, if it was.
    """

    refused_because = ""

    def makeConnection(self, transport: Any) -> None:
        # As Twisted's, but the interfaces of the transport are taken over once, and the
        # handshake waits for the client's first bytes: a server has nothing to say before.
        self._send_at_once = send_at_once(transport)
        self._tlsConnection = self.factory._creatorCallable(self)
        self._appSendBuffer = []
        self.__provides__ = Provides(type(self), providedBy(transport))
        self.connected = 1
        self.transport = transport
        self.factory.registerProtocol(self)
        self.wrappedProtocol.makeConnection(self)

    def make_sender(self, outbox: Outbox) -> TlsSender:
        """For ``wire.senders.sender``."""
        return TlsSender(self, outbox)

    @property
    def handshaken(self) -> bool:
        """Whether the handshake is done."""
        return bool(self._handshakeDone)

    @property
    def client_certificate(self) -> str | None:
        """The subject of the client's certificate (RFC 4514), if it has shown one."""
        factory = cast("TlsFactory", self.factory)
        if self._tlsConnection is None or not factory.contexts.asks_clients:
            return None
        certificate = self._tlsConnection.get_peer_certificate(as_cryptography=True)
        return None if certificate is None else certificate.subject.rfc4514_string()[:SUBJECT_LENGTH]

    def _flushSendBIO(self) -> None:
        try:
            data = self._tlsConnection.bio_read(BIO_BYTES)
        except WantReadError:
            return
        self._send_at_once(data)

    def _flushReceiveBIO(self) -> None:
        receive = self._tlsConnection.recv
        quiet = True
        while not self._lostTLSConnection:
            try:
                data = receive(BIO_BYTES)
            except WantReadError:
                break
            except ZeroReturnError:
                self._shutdownTLS()
                self._tlsShutdownFinished(None)
            except Error:
                self._tlsShutdownFinished(Failure())
            else:
                quiet = False
                if not self._aborted:
                    self.wrappedProtocol.dataReceived(data)
        if quiet:
            # It may need an answer, such as an alert or a KeyUpdate.
            self._flushSendBIO()

    def connectionLost(self, reason: Any = _LOST) -> None:
        # Each record was read when its last byte came. Twisted's has OpenSSL look once more, and
        # turns what that finds, an end without a goodbye, into the same words.
        if not self._lostTLSConnection:
            self._lostTLSConnection = True
            self._reason = self._reason or _LOST
        super().connectionLost(reason)

    def _tlsShutdownFinished(self, reason: Any) -> None:
        lost_before = self._lostTLSConnection
        super()._tlsShutdownFinished(reason)
        # An end of file in place of TLS is squashed to a lost connection; that is no fault worth a line.
        squashed = self._reason is not reason
        if reason is not None and not lost_before and not squashed:
            cast("TlsFactory", self.factory).complain(self, reason.value)


class TlsFactory(TLSMemoryBIOFactory):
    """Adds TLS below the protocols of ``wrapped``."""

    protocol = TlsTransport
    log = Logger()

    def __init__(self, contexts: Contexts, wrapped: Any, reactor: Any) -> None:
        super().__init__(contexts, False, wrapped, reactor)
        self.contexts = contexts
        self._complaints = Complaints(reactor.seconds)

    def buildProtocol(self, addr: Any) -> Any:
        """``None`` closes the connection before TLS has begun."""
        wrapped = self.wrappedFactory.buildProtocol(addr)
        return None if wrapped is None else self.protocol(self, wrapped)

    def complain(self, transport: TlsTransport, error: BaseException) -> None:
        """A connection has failed with a TLS error: count it, and log it unless there were too many."""
        counts = getattr(self.wrappedFactory, "tls_failed", None)
        if counts is not None:
            counts()
        swallowed = self._complaints.may_tell()
        if swallowed is not None:
            self.log.info(
                "{peer}: TLS {what}: {why}{more}",
                peer=getattr(transport.getPeer(), "host", None) or "unix",
                what="failed" if transport.handshaken else "handshake failed",
                why=transport.refused_because or reason_of(error),
                more=f" ({swallowed} more were not told)" if swallowed else "",
            )


@implementer(IStreamServerEndpoint)
class TlsEndpoint:
    """Listens on ``inner`` and speaks TLS there.

    :raise BadPair: some file will not do.
    """

    def __init__(self, inner: Any, files: TlsFiles, reactor: Any) -> None:
        self.inner = inner
        self._files = files
        self._reactor = reactor
        self._contexts = Contexts(files.read(), reactor.seconds)

    def listen(self, protocolFactory: Any) -> Any:
        """See ``IStreamServerEndpoint``."""
        return self.inner.listen(TlsFactory(self._contexts, protocolFactory, self._reactor))

    def reread(self) -> Callable[[], None]:
        """Read every file again.

        :return: what puts them to use for the handshakes that follow.
        :raise BadPair: some file will not do, or is out of date while the one in use is not.
        """
        material = self._files.read()
        now = now_utc()
        for pair in material.pairs:
            if not pair.is_valid_at(now) and all(old.is_valid_at(now) for old in self.pairs):
                raise BadPair("; ".join(pair.warnings(now)))
        return lambda: self._contexts.use(material)

    @property
    def pairs(self) -> Pairs:
        """What is in use."""
        return self._contexts.material.pairs


def tls_endpoints(listeners: Iterable[tuple[str, Any]]) -> Iterator[tuple[int, TlsEndpoint]]:
    """The TLS endpoints among listeners, each beside the place of its listener."""
    for index, (_, service) in enumerate(listeners):
        endpoint = getattr(service, "endpoint", None)
        while endpoint is not None:
            if isinstance(endpoint, TlsEndpoint):
                yield index, endpoint
            endpoint = getattr(endpoint, "inner", None)


def reread_all(key: str, listeners: Iterable[tuple[str, Any]]) -> list[Callable[[], None]]:
    """Read the certificates of all listeners again.

    :param key: ``listen`` or ``admin``, for the faults.
    :return: what puts them to use.
    :raise ConfigError: some file will not do.
    """
    steps: list[Callable[[], None]] = []
    faults: list[ConfigFault] = []
    for index, endpoint in tls_endpoints(listeners):
        try:
            steps.append(endpoint.reread())
        except BadPair as error:
            faults.append(ConfigFault(f"{key}[{index}]", str(error)))
    if faults:
        raise ConfigError(faults)
    return steps


def certificate_warnings(key: str, listeners: Iterable[tuple[str, Any]]) -> list[str]:
    """What an operator should know of the certificates in use, each with its key's path."""
    now = now_utc()
    return [
        f"{key}[{index}]: {told}"
        for index, endpoint in tls_endpoints(listeners)
        for told in endpoint.pairs.warnings(now)
    ]


def first_expiry(listeners: Iterable[tuple[str, Any]]) -> float | None:
    """Unix time at which the first certificate in use runs out; ``None``: there is none."""
    times = [pair.expires.timestamp() for _, endpoint in tls_endpoints(listeners) for pair in endpoint.pairs]
    return min(times, default=None)
