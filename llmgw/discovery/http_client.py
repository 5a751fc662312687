"""Questions to a store's HTTP API: one connection each, bounded, closed when it is over.

A bare agent asks and treq reads, as health sources do it: cookies, redirects and
compression have no place here. Files of certificates are read at each
connection, so that they may be changed at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import treq
from msgspec import Struct
from OpenSSL import SSL, crypto
from service_identity import CertificateError, VerificationError
from twisted.internet import error, ssl
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.python.failure import Failure
from twisted.web.client import Agent, FileBodyProducer, HTTPConnectionPool
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from llmgw.plain_files import read_plain
from llmgw.wire.pool import endpoint_for

if TYPE_CHECKING:
    from twisted.internet.interfaces import IDelayedCall

ANSWER_BYTES = 32 << 20
ERROR_BYTES = 64 << 10


class AwayError(Exception):
    """Nobody is there, or what is there does not answer in time, or not in HTTP."""


class QuietError(Exception):
    """A stream was silent for too long; that alone is no failure."""


class StatusError(Exception):
    """The answer to a stream's request was not 200.

    :param body: as much of it as tells why.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body


class TlsFiles(Struct, frozen=True):
    """PEM files for ``https``; the system's authorities and no certificate of ours by default."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def options(self, host: str) -> Any:
        """How ``host`` is verified, and who we are.

        :raise OSError: a file cannot be read.
        :raise ValueError: it holds nothing of the kind.
        """
        trust = identity = None
        try:
            if self.ca_file is not None:
                marker = b"-----END CERTIFICATE-----"
                pem = read_plain(self.ca_file)
                blocks = [block + marker for block in pem.split(marker) if b"BEGIN CERTIFICATE" in block]
                if not blocks:
                    raise ValueError(f"no certificate in {self.ca_file}")
                trust = ssl.trustRootFromCertificates([ssl.Certificate.loadPEM(block) for block in blocks])
            if self.cert_file is not None:
                key = read_plain(self.key_file or self.cert_file)
                both = read_plain(self.cert_file) + b"\n" + key
                identity = ssl.PrivateCertificate.loadPEM(both)
        except (SSL.Error, crypto.Error) as fault:
            raise ValueError(f"not a usable certificate or key: {fault}") from None
        more = {} if trust is None else {"trustRoot": trust}
        return ssl.optionsForClientTLS(host, clientCertificate=identity, **more)


class HttpClient:
    """Asks one question at a time or many; holds nothing between them."""

    def __init__(self, reactor: Any, tls: TlsFiles, connect_s: float) -> None:
        self._reactor = reactor
        self._tls = tls
        self._connect_s = connect_s

    async def ask(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """Status and whole body.

        :raise AwayError: see there. Cancelling closes the connection.
        """

        async def question() -> tuple[int, bytes]:
            line = _Line(self._endpoint(url))
            try:
                response = await self._request(line, method, url, headers, body)
                return response.code, await _read(line, response, ANSWER_BYTES)
            finally:
                line.end()

        def too_late(outcome: Any, timeout_s: float) -> Any:
            # The timer has cancelled the question, which fails in one way or another.
            if isinstance(outcome, Failure):
                raise AwayError(f"no answer in {timeout_s:g} s")
            return outcome

        asking = Deferred.fromCoroutine(question())
        asking.addTimeout(timeout_s, self._reactor, onTimeoutCancel=too_late)
        try:
            return await asking
        except Exception as fault:
            raise _told(fault) from None

    async def stream(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        feed: Callable[[bytes], None],
        *,
        open_s: float,
        silence_s: float,
        speaks_first: bool = True,
    ) -> None:
        """Hand what comes to ``feed``, until the other side ends it.

        :param open_s: until the first bytes of the body; until the head of the answer
            only, if the other side does not always ``speaks_first``.
        :param silence_s: between any two later ones.
        :raise QuietError: nothing came for ``silence_s``.
        :raise StatusError: not 200.
        :raise AwayError: see there. What ``feed`` raises ends the stream and comes
            out here. Cancelling closes the connection.
        """
        line = _Line(self._endpoint(url))
        watch = _Watchdog(self._reactor, open_s, line.end)
        fault: list[Exception] = []

        def take(data: bytes) -> None:
            if fault:
                return
            watch.touch(silence_s)
            try:
                feed(data)
            except Exception as raised:
                fault.append(raised)
                line.end()

        asking = Deferred.fromCoroutine(self._request(line, method, url, headers, body))
        try:
            response = await asking.addTimeout(open_s, self._reactor)
            if not speaks_first:
                watch.touch(silence_s)
            if response.code != 200:
                raise StatusError(response.code, await _read(line, response, ERROR_BYTES))
            await treq.collect(response, take)
        except (CancelledError, StatusError):
            raise
        except Exception as raised:
            if fault:
                raise fault[0] from None
            if watch.bit:
                if watch.touched:
                    raise QuietError(f"nothing came for {silence_s:g} s") from None
                raise AwayError(f"no answer in {open_s:g} s") from None
            if isinstance(raised, TimeoutError):
                raise AwayError(f"no answer in {open_s:g} s") from None
            raise _told(raised) from None
        finally:
            watch.stop()
            line.end()
        if fault:
            raise fault[0]

    async def _request(
        self, line: _Line, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> Any:
        agent = Agent.usingEndpointFactory(
            self._reactor, line, pool=HTTPConnectionPool(self._reactor, persistent=False)
        )
        fields = Headers({"user-agent": ["llmgw"]})
        for name, value in headers.items():
            fields.setRawHeaders(name, [value])
        producer = None if body is None else FileBodyProducer(BytesIO(body))
        return await agent.request(method.encode(), url.encode("ascii"), fields, producer)

    def _endpoint(self, url: str) -> Any:
        parts = urlsplit(url)
        host = parts.hostname or ""
        tls = None
        if parts.scheme == "https":
            try:
                tls = self._tls.options(host)
            except (OSError, ValueError) as fault:
                raise AwayError(f"TLS: {fault}") from None
        port = parts.port or (443 if tls is not None else 80)
        return endpoint_for(self._reactor, parts.scheme, host, port, connect_s=self._connect_s, tls=tls)


async def _read(line: _Line, response: Any, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0

    def take(data: bytes) -> None:
        nonlocal size
        size += len(data)
        if size > most:
            line.end()
        else:
            parts.append(data)

    try:
        await treq.collect(response, take)
    except CancelledError:
        raise
    except Exception:
        if size <= most:
            raise
    if size > most:
        raise AwayError(f"it answered more than {most} bytes")
    return b"".join(parts)


@implementer(IAgentEndpointFactory)
class _Line:
    """Opens the one connection of a question, and closes it."""

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        self._protocol: Any = None

    def endpointForURI(self, uri: Any) -> Any:
        return cast("Any", self)

    def connect(self, factory: Any) -> Deferred[Any]:
        """What the agent calls as on any endpoint."""
        factory.noisy = False
        return cast("Deferred[Any]", self._endpoint.connect(factory).addCallback(self._opened))

    def end(self) -> None:
        """Close at once; what was to be said has been said."""
        if self._protocol is not None and self._protocol.transport is not None:
            self._protocol.transport.abortConnection()

    def _opened(self, protocol: Any) -> Any:
        self._protocol = protocol
        return protocol


class _Watchdog:
    """Bites once nothing has touched it for its time.

    :ivar touched: something came, ever.
    :ivar bit: it has bitten.
    """

    def __init__(self, reactor: Any, first_s: float, bite: Callable[[], None]) -> None:
        self.touched = False
        self.bit = False
        self._bite = bite
        self._call: IDelayedCall | None = reactor.callLater(first_s, self._bites)

    def touch(self, next_s: float) -> None:
        self.touched = True
        if self._call is not None:
            self._call.reset(next_s)

    def stop(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _bites(self) -> None:
        self._call = None
        self.bit = True
        self._bite()


def _told(fault: Exception) -> Exception:
    """What happened, in the words of :class:`AwayError`."""
    if isinstance(fault, CancelledError | AwayError):
        return fault
    if isinstance(fault, error.ConnectingCancelledError):
        return CancelledError()  # an endpoint's own word for it
    values = list(_causes(fault))
    if len(values) > 1:
        for value in values:
            if isinstance(value, CancelledError):
                return value
            if isinstance(value, SSL.Error):
                queue = value.args[0] if value.args else ()
                return AwayError(f"TLS: {'; '.join(entry[-1] for entry in queue) or 'handshake failed'}")
            if isinstance(value, VerificationError | CertificateError):
                return AwayError("TLS: the certificate is for another name")
        if any(isinstance(value, error.ConnectionDone | error.ConnectionLost) for value in values):
            return AwayError("it closed the connection before its answer was whole")
        return AwayError(f"it answered with something that is not HTTP: {_one_line(values[-1])}")
    return AwayError(_one_line(fault))


def _causes(fault: BaseException) -> Iterator[BaseException]:
    """What an agent's error is made of, which may lie several deep."""
    yield fault
    for reason in getattr(fault, "reasons", ()):
        yield from _causes(reason.value)


def _one_line(fault: BaseException) -> str:
    return " ".join(str(fault).split())[:200] or type(fault).__name__
