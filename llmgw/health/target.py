"""How a health source asks its backend: one bounded connection per question.

A plain agent sends the request, and treq reads the answer. treq's client would add what a probe
must not have: cookies, redirects, and compression, by which a small answer can expand to
gigabytes. It also (26.7) refuses IPv6 addresses.

The connection is closed when the question is over, whatever happens, and the error says what is
at fault, see :meth:`Target.get`.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import treq
from OpenSSL import SSL
from service_identity import CertificateError, VerificationError
from twisted.internet import error
from twisted.internet.defer import CancelledError, Deferred, TimeoutError, succeed
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.protocols.tls import TLSMemoryBIOProtocol
from twisted.python.failure import Failure
from twisted.web.client import Agent, HTTPConnectionPool, ResponseFailed
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory, IBodyProducer
from zope.interface import implementer

from llmgw.errors import OUR_FAULTS
from llmgw.interfaces import IHealthTarget
from llmgw.wire.pool import endpoint_for, tls_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint

ANSWER_BYTES = 1 << 20
"""The longest answer, its head included."""


class NoAnswerError(Exception):
    """The connection was accepted, but no complete HTTP answer came."""


@implementer(IHealthTarget)
class Target:
    """One backend as health sources see it.

    :param url: base URL, ``http`` or ``https``.
    :param tls: what :func:`llmgw.wire.pool.tls_options` made for it; ``None``
        judges an ``https`` backend by name and the system's authorities.
    """

    def __init__(self, reactor: Any, id: str, url: str, headers: Mapping[str, str], tls: Any = None) -> None:
        self.id = id
        self.url = url
        self.headers = headers
        self._reactor = reactor
        parts = urlsplit(url)
        self._scheme = parts.scheme
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls
        if tls is None and parts.scheme == "https":
            self._tls = tls_options(self._host, None, True)

    def get(self, path: str, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        """See :meth:`llmgw.interfaces.IHealthTarget.get`.

        :raise twisted.internet.error.ConnectError: refused, no route, or the
            certificate is not to be trusted (``SSLError``).
        :raise twisted.internet.error.DNSLookupError: the name has no address.
        :raise NoAnswerError: it closed, spoke something else, or did not stop.
        :raise OSError: this machine has no descriptor or port left.
        """

        return self._bounded(path, timeout_s, self._ask(b"GET", path, None, timeout_s))

    def post(self, path: str, body: bytes, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        """As :meth:`get`, with a JSON ``body`` to send; see :class:`llmgw.interfaces.IHealthTarget`."""
        return self._bounded(path, timeout_s, self._ask(b"POST", path, body, timeout_s))

    def watch(self, path: str, received: Callable[[bytes], None], connect_s: float) -> Deferred[int]:
        """GET an answer that does not end; see :class:`llmgw.interfaces.IHealthTarget`."""
        return Deferred.fromCoroutine(self._ask(b"GET", path, None, connect_s, received)).addCallback(
            lambda answer: answer[0]
        )

    def _bounded(self, path: str, timeout_s: float, asking: Any) -> Deferred[tuple[int, bytes]]:
        def too_late(outcome: Any, timeout_s: float) -> Any:
            # The timer has cancelled the question, whose error may be any.
            if isinstance(outcome, Failure):
                raise TimeoutError(f"no answer from {path} in {timeout_s:g} s")
            return outcome

        question: Deferred[tuple[int, bytes]] = Deferred.fromCoroutine(asking)
        return question.addTimeout(timeout_s, self._reactor, onTimeoutCancel=too_late)

    async def _ask(
        self,
        method: bytes,
        path: str,
        sent: bytes | None,
        timeout_s: float,
        received: Callable[[bytes], None] | None = None,
    ) -> tuple[int, bytes]:
        endpoint = endpoint_for(
            self._reactor, self._scheme, self._host, self._port, connect_s=timeout_s, tls=self._tls
        )
        line = _Line(endpoint, endless=received is not None)
        agent = Agent.usingEndpointFactory(
            self._reactor, line, pool=HTTPConnectionPool(self._reactor, persistent=False)
        )
        headers = Headers({"user-agent": ["llmgw"]})
        for name, value in self.headers.items():
            headers.setRawHeaders(name, [value])
        producer = None
        if sent is not None:
            headers.setRawHeaders("content-type", ["application/json"])
            producer = _Body(sent)
        whole = False
        try:
            response = await agent.request(method, (self.url + path).encode("ascii"), headers, producer)
            if received is not None and response.code == 200:
                await treq.collect(response, received)
                return response.code, b""
            body = await treq.content(response)
            whole = True
            return response.code, body
        except Exception as fault:
            flood = NoAnswerError(f"{path} answered more than {ANSWER_BYTES} bytes")
            raise (flood if line.flooded else _cause(fault)) from None
        finally:
            line.end(whole)


@implementer(IBodyProducer)
class _Body:
    """A short body, sent in one piece."""

    def __init__(self, data: bytes) -> None:
        self.length = len(data)
        self._data = data

    def startProducing(self, consumer: Any) -> Deferred[None]:
        consumer.write(self._data)
        return succeed(None)

    def pauseProducing(self) -> None:
        pass

    def resumeProducing(self) -> None:
        pass

    def stopProducing(self) -> None:
        pass


@implementer(IAgentEndpointFactory)
class _Line:
    """Opens the connection of a question, counts the received bytes, and closes it."""

    def __init__(self, endpoint: IStreamClientEndpoint, *, endless: bool) -> None:
        self._endpoint = endpoint
        self._endless = endless
        self._wire: _Wire | None = None

    @property
    def flooded(self) -> bool:
        """Whether the answer was cut off because of its length."""
        return self._wire is not None and self._wire.left < 0

    def endpointForURI(self, uri: Any) -> IStreamClientEndpoint:
        return cast("IStreamClientEndpoint", self)

    def connect(self, factory: IProtocolFactory) -> Deferred[IProtocol]:
        """What the agent calls as on any endpoint; it gets its own protocol back."""
        factory.noisy = False  # type: ignore[attr-defined]  # two log lines a question
        opening = self._endpoint.connect(_WireFactory(factory))
        return opening.addCallback(self._opened)

    def end(self, whole: bool) -> None:
        """Close: in order after a complete answer, else at once."""
        if self._wire is not None:
            self._wire.close(whole)

    def _opened(self, wire: Any) -> IProtocol:
        self._wire = wire
        if self._endless:
            wire.left = inf
        return cast("IProtocol", wire.wrappedProtocol)


class _Wire(ProtocolWrapper):
    left: float = ANSWER_BYTES

    def dataReceived(self, data: bytes) -> None:
        self.left -= len(data)
        if self.left < 0:
            self.close(False)
        else:
            super().dataReceived(data)

    def close(self, whole: bool) -> None:
        """Close without waiting: a peer need not answer a TLS ``close_notify``."""
        transport: Any = self.transport
        if not whole:
            transport.abortConnection()
            return
        transport.loseConnection()
        if isinstance(transport, TLSMemoryBIOProtocol):
            beneath: Any = transport.transport
            beneath.loseConnection()


class _WireFactory(WrappingFactory):
    protocol = _Wire
    noisy = False


def _cause(fault: Exception) -> Exception:
    """The cause of an agent's error, as one of the classes that ``get`` documents."""
    if isinstance(fault, error.ConnectingCancelledError):
        return CancelledError()
    if isinstance(fault, error.TimeoutError | error.TCPTimedOutError):
        return TimeoutError(str(fault))
    if isinstance(fault, error.ConnectError) and fault.osError in OUR_FAULTS:
        return OSError(fault.osError, str(fault))
    if not isinstance(fault, ResponseFailed):
        return fault
    for reason in fault.reasons:
        value = reason.value
        if isinstance(value, CancelledError):
            return value
        if isinstance(value, SSL.Error):
            # Its argument is OpenSSL's queue of (library, function, reason).
            queue = value.args[0] if value.args else ()
            return error.SSLError(string="; ".join(entry[-1] for entry in queue) or "handshake failed")
        if isinstance(value, VerificationError | CertificateError):
            return error.SSLError(string="the certificate is for another name")
        if isinstance(value, error.ConnectionClosed):
            return NoAnswerError("it closed the connection before its answer was whole")
    return NoAnswerError("it answered with something that is not HTTP")
