"""Connections to one backend: kept while they can be reused, used by one request at a time.

llama-server closes an idle connection after 5 s and answers its 100th request with
``Connection: close``. A kept connection is therefore dropped before the backend's own limit
(``Keep-Alive: timeout``, less one second), and the newest one is used first, so that a
quiet pool shrinks by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from OpenSSL import crypto
from twisted.internet import error, ssl
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.endpoints import (
    HostnameEndpoint,
    TCP4ClientEndpoint,
    TCP6ClientEndpoint,
    wrapClientTLS,
)
from twisted.internet.protocol import Factory

from llmgw.certificates import Pair, read_certificates
from llmgw.core.response_reader import ResponseMemo
from llmgw.errors import OUR_FAULTS
from llmgw.wire.sink import UpstreamFault
from llmgw.wire.upstream import UpstreamConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint

    from llmgw.core.http import HeadLimits
    from llmgw.wire.senders import Outbox
    from llmgw.wire.sweep import Sweep


def tls_options(host: str, ca_file: str | None, verify: bool, own: Pair | None = None) -> Any:
    """TLS towards a backend: its certificate is verified against the system's or a given CA, and by name.

    :param own: our certificate, for backends that request one.
    :raise BadPair: ``ca_file`` cannot be read, or holds no certificate.
    """
    shown: dict[str, Any] = {}
    if own is not None:
        first, *rest = [crypto.X509.from_cryptography(each) for each in own.chain]
        shown = {
            "privateKey": crypto.PKey.from_cryptography_key(own.key),
            "certificate": first,
            "extraCertChain": rest,
        }
    if not verify:
        return ssl.CertificateOptions(verify=False, **shown)
    if ca_file is None:
        return ssl.optionsForClientTLS(host, extraCertificateOptions=shown)
    authorities = [crypto.X509.from_cryptography(each) for each in read_certificates(ca_file)]
    trust = ssl.trustRootFromCertificates([ssl.Certificate(each) for each in authorities])
    return ssl.optionsForClientTLS(host, trustRoot=trust, extraCertificateOptions=shown)


def endpoint_for(
    reactor: Any, scheme: str, host: str, port: int, *, connect_s: float, tls: Any = None
) -> IStreamClientEndpoint:
    """A client endpoint that tries every address of ``host`` (RFC 8305).

    Where ``host`` is an address, nothing is resolved, which would take a thread each time.
    """
    endpoint: IStreamClientEndpoint
    if isIPAddress(host):
        endpoint = TCP4ClientEndpoint(reactor, host, port, timeout=connect_s)
    elif isIPv6Address(host):
        endpoint = TCP6ClientEndpoint(reactor, host, port, timeout=connect_s)
    else:
        endpoint = HostnameEndpoint(reactor, host, port, timeout=connect_s)
    if scheme == "https":
        endpoint = wrapClientTLS(tls, endpoint)
    return endpoint


RESOLVE_S = 2.0
"""Longest time for resolving a name."""

NAMED_AGE_S = 60.0
"""A connection to a host name is kept no longer, so that a new address is noticed under load, too."""


class _Connector(Factory):
    """Makes the connections of one pool."""

    noisy = False

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def buildProtocol(self, addr: Any) -> UpstreamConnection:
        return UpstreamConnection(self._pool)


class Pool:
    """Connections to one backend.

    :param make_endpoint: makes the endpoint for each connection, so that a name is resolved again.
    :param tls: the endpoints speak TLS.
    :param connect_s: longest time for connecting, and again for the TLS handshake.
    :param idle_s: longest time for which an idle connection is kept.
    :param close_grace_s: time for the backend's end of an orderly close.
    :param named: the host is a name, whose address may change.
    :ivar connects: number of connections opened so far.
    """

    def __init__(
        self,
        make_endpoint: Callable[[], IStreamClientEndpoint],
        *,
        reactor: IReactorTime,
        tls: bool,
        sweep: Sweep,
        outbox: Outbox,
        head_limits: HeadLimits,
        connect_s: float,
        idle_s: float,
        close_grace_s: float,
        named: bool = False,
    ) -> None:
        self._make_endpoint = make_endpoint
        self._reactor = reactor
        self._tls = tls
        self.sweep = sweep
        self.outbox = outbox
        self.clock = sweep.clock
        self.head_limits = head_limits
        self.response_heads = ResponseMemo(head_limits)
        self.connect_s = connect_s
        self.idle_s = idle_s
        self.close_grace_s = close_grace_s
        self.idle: list[UpstreamConnection] = []
        self.connects = 0
        self.closed = False
        self._named = named

    def take(self) -> UpstreamConnection | None:
        """An idle connection, if there is one."""
        now_s = self.clock()
        while self.idle:
            connection = self.idle.pop()
            if not connection.lost and connection.deadline_s > now_s:
                return connection
        return None

    def connect(self) -> Deferred[UpstreamConnection]:
        """A new connection, with its TLS handshake done. Cancelling closes it.

        :raise UpstreamFault: nobody listens there, or not in time.
        """
        self.connects += 1
        connecting: Deferred[Any] = self._make_endpoint().connect(_Connector(self))
        # The endpoint's own limit starts when the name has been resolved.
        connecting.addTimeout(self.connect_s + RESOLVE_S, self._reactor)
        connecting.addErrback(_translate)
        if self._tls:
            return connecting.addCallback(self._handshake)
        return connecting

    def _handshake(self, connection: UpstreamConnection) -> Deferred[UpstreamConnection]:
        connection.deadline_s = self.clock() + self.connect_s
        ready: Deferred[UpstreamConnection] = Deferred(lambda _: connection.abort())
        connection.ready = ready
        return ready

    def give(self, connection: UpstreamConnection) -> None:
        """Keep ``connection`` for another request, if it may be kept."""
        keep_s = self.idle_s
        if connection.advertised_s is not None:
            keep_s = min(keep_s, connection.advertised_s - 1.0)
        if self._named and self.clock() - connection.made_s > NAMED_AGE_S:
            keep_s = 0.0
        if self.closed or keep_s <= 0:
            connection.abort()
            return
        connection.deadline_s = self.clock() + keep_s
        self.idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """``connection`` is closed or about to be."""
        if connection.lost:
            self.sweep.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections now, and each of the others when its response ends."""
        self.closed = True
        for connection in list(self.idle):
            connection.abort()


def _translate(failure: Any) -> Any:
    """Translate Twisted's connect errors to :class:`UpstreamFault`."""
    fault = failure.value
    if isinstance(fault, CancelledError | UpstreamFault):
        return failure
    if isinstance(fault, error.ConnectingCancelledError):
        # How an endpoint reports a cancel: the client has left, the backend has not failed.
        raise CancelledError
    detail = failure.getErrorMessage()
    if isinstance(fault, error.ConnectionRefusedError | error.NoRouteError):
        raise UpstreamFault("refused", detail)
    if isinstance(fault, error.TimeoutError | TimeoutError):
        raise UpstreamFault("timeout_connect", detail)
    if isinstance(fault, error.DNSLookupError):
        raise UpstreamFault("dns", detail)
    if getattr(fault, "osError", None) in OUR_FAULTS:
        raise UpstreamFault("local", detail)
    raise UpstreamFault("connect", detail)
