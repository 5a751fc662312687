"""Questions over real sockets, to a server that answers whatever it is told to."""

from __future__ import annotations

import gzip
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import error, ssl
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IHostnameResolver
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock, deferLater
from twisted.internet.testing import MemoryReactorClock
from twisted.python.failure import Failure
from zope.interface import implementer
from zope.interface.verify import verifyObject

from llmgw.demo.certificate import ensure_certificate
from llmgw.health import target as target_module
from llmgw.health.llamacpp import LlamaCppHealth
from llmgw.health.target import ANSWER_BYTES, NoAnswerError, Target
from llmgw.interfaces import IHealthTarget
from llmgw.values import HealthReport
from llmgw.wire.pool import tls_options

Script = Callable[[Protocol, bytes], None]


def answer(body: bytes, status: int = 200, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\n%scontent-length: %d\r\n\r\n%s" % (status, headers, len(body), body)


def says(data: bytes, close: bool = False) -> Script:
    """Write ``data`` at each request."""

    def script(connection: Protocol, request: bytes) -> None:
        assert connection.transport is not None
        connection.transport.write(data)
        if close:
            connection.transport.loseConnection()

    return script


class Server(Factory):
    """Hands each request's bytes to ``script`` and remembers them."""

    noisy = False

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[bytes] = []
        self.open: set[Protocol] = set()
        self.waiting: list[Deferred[None]] = []

    def buildProtocol(self, addr: object) -> Protocol:
        return _Connection(self)

    async def all_closed(self) -> None:
        while self.open:
            self.waiting.append(Deferred())
            await self.waiting[-1].addTimeout(5, _reactor())


class _Connection(Protocol):
    def __init__(self, server: Server) -> None:
        self.server = server

    def connectionMade(self) -> None:
        self.server.open.add(self)

    def dataReceived(self, data: bytes) -> None:
        self.server.requests.append(data)
        self.server.script(self, data)

    def connectionLost(self, reason: Failure = Failure(error.ConnectionDone())) -> None:  # noqa: B008
        self.server.open.discard(self)
        waiting, self.server.waiting = self.server.waiting, []
        for each in waiting:
            each.callback(None)


def _reactor() -> Any:
    from twisted.internet import reactor

    return reactor


@asynccontextmanager
async def serving(script: Script, context: Any = None) -> AsyncIterator[tuple[Server, str]]:
    """A server on a free port, and its base URL; afterwards every connection must be closed."""
    server = Server(script)
    reactor = _reactor()
    if context is None:
        port = reactor.listenTCP(0, server, interface="127.0.0.1")
    else:
        port = reactor.listenSSL(0, server, context, interface="127.0.0.1")
    try:
        yield server, f"{'http' if context is None else 'https'}://localhost:{port.getHost().port}"
        await server.all_closed()
        await deferLater(reactor, 0)  # our side's end of it
    finally:
        await port.stopListening()


def target(url: str, tls: Any = None, **headers: str) -> Target:
    return Target(_reactor(), "b0", url.replace("localhost", "127.0.0.1"), headers, tls)


async def fault_of(asking: Deferred[Any]) -> BaseException:
    try:
        await asking
    except Exception as fault:
        return fault
    raise AssertionError("it answered")


def test_it_keeps_the_interface() -> None:
    verifyObject(IHealthTarget, Target(Clock(), "b0", "http://127.0.0.1:1", {}))


@pytest_twisted.ensureDeferred
async def test_status_and_body_come_back_and_the_request_is_plain() -> None:
    async with serving(says(answer(b"hello", 503))) as (server, url):
        assert await target(url + "/base", authorization="Bearer k").get("/health?x=1", 2.0) == (
            503,
            b"hello",
        )
    head = server.requests[0].lower()
    assert head.startswith(b"get /base/health?x=1 http/1.1\r\n")
    assert b"\r\nauthorization: bearer k\r\n" in head
    assert b"\r\nconnection: close\r\n" in head
    assert b"\r\nuser-agent: llmgw\r\n" in head
    assert b"accept-encoding" not in head
    assert b"cookie" not in head


@pytest_twisted.ensureDeferred
async def test_cookies_are_not_kept() -> None:
    async with serving(says(answer(b"", headers=b"set-cookie: a=b; path=/\r\n"))) as (server, url):
        asked = target(url)
        await asked.get("/", 2.0)
        await asked.get("/", 2.0)
    assert len(server.requests) == 2
    assert b"cookie" not in server.requests[1].lower()


@pytest_twisted.ensureDeferred
async def test_an_ipv6_address_can_be_asked() -> None:
    server = Server(says(answer(b"hello")))
    try:
        port = _reactor().listenTCP(0, server, interface="::1")
    except error.CannotListenError:
        pytest.skip("no IPv6 here")
    number = port.getHost().port
    assert await target(f"http://[::1]:{number}").get("/", 2.0) == (200, b"hello")
    assert b"\r\nhost: [::1]:%d\r\n" % number in server.requests[0].lower()
    await server.all_closed()
    await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_redirects_are_not_followed() -> None:
    async with serving(says(answer(b"", 302, b"location: /elsewhere\r\n"))) as (server, url):
        assert await target(url).get("/", 2.0) == (302, b"")
    assert len(server.requests) == 1


@pytest_twisted.ensureDeferred
async def test_a_compressed_answer_stays_packed() -> None:
    packed = gzip.compress(b"\0" * 50_000_000)
    async with serving(says(answer(packed, headers=b"content-encoding: gzip\r\n"))) as (_, url):
        assert await target(url).get("/", 5.0) == (200, packed)


@pytest.mark.parametrize(
    ("wire", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 200, b"abc"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + answer(b"x"), 200, b"x"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (answer(b"abc") + b"more", 200, b"abc"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_framings(wire: bytes, status: int, body: bytes) -> None:
    async with serving(says(wire)) as (_, url):
        assert await target(url).get("/", 2.0) == (status, body)


@pytest_twisted.ensureDeferred
async def test_an_answer_that_ends_with_the_connection() -> None:
    async with serving(says(b"HTTP/1.0 200 OK\r\n\r\nabc", close=True)) as (_, url):
        assert await target(url).get("/", 2.0) == (200, b"abc")


@pytest.mark.parametrize(
    ("data", "close", "what"),
    [
        (b"", True, "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ncontent-le", True, "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc", True, "closed the connection"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False, "not HTTP"),
        (b"\x00\x01\x02\r\n\r\n", False, "not HTTP"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_what_is_no_whole_http_answer_is_an_error(data: bytes, close: bool, what: str) -> None:
    async with serving(says(data, close)) as (_, url):
        fault = await fault_of(target(url).get("/health", 2.0))
    assert isinstance(fault, NoAnswerError)
    assert what in str(fault)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3b9aca00\r\n",
        b"HTTP/1.1 200 OK\r\n",
    ],
    ids=["length", "chunk", "headers"],
)
@pytest_twisted.ensureDeferred
async def test_an_endless_answer_is_cut_off(data: bytes) -> None:
    sent = 0

    def flood(connection: Any, request: bytes) -> None:
        connection.transport.write(data)
        connection.transport.registerProducer(Flood(connection.transport), False)

    class Flood:
        def __init__(self, transport: Any) -> None:
            self.transport = transport

        def resumeProducing(self) -> None:
            nonlocal sent
            piece = (b"x: " + b"y" * 1000 + b"\r\n") * 64
            sent += len(piece)
            self.transport.write(piece)

        def stopProducing(self) -> None:
            pass

    async with serving(flood) as (_, url):
        fault = await fault_of(target(url).get("/health", 10.0))
    assert isinstance(fault, NoAnswerError)
    assert str(fault) == f"/health answered more than {ANSWER_BYTES} bytes"
    assert sent < 40_000_000


@pytest.mark.parametrize(
    "data",
    [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"],
    ids=["accepts", "in-the-head", "in-the-body"],
)
@pytest_twisted.ensureDeferred
async def test_one_that_hangs_is_given_up_in_time(data: bytes) -> None:
    async with serving(says(data)) as (_, url):
        fault = await fault_of(target(url).get("/health", 0.1))
    assert isinstance(fault, TimeoutError)
    assert str(fault) == "no answer from /health in 0.1 s"


@pytest.mark.parametrize(
    "data", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"], ids=["head", "body"]
)
@pytest_twisted.ensureDeferred
async def test_cancelling_closes_the_connection(data: bytes) -> None:
    asked: Deferred[None] = Deferred()

    def script(connection: Any, request: bytes) -> None:
        connection.transport.write(data)
        asked.callback(None)

    async with serving(script) as (_, url):
        asking = target(url).get("/", 5.0)
        await asked
        await deferLater(_reactor(), 0.02)
        asking.cancel()
        assert isinstance(await fault_of(asking), CancelledError)


@pytest_twisted.ensureDeferred
async def test_nobody_there_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        fault = await fault_of(target(url).get("/", 2.0))
    assert isinstance(fault, error.ConnectionRefusedError)


# --- under a clock ------------------------------------------------------------


@implementer(IHostnameResolver)
class Resolver:
    """Finds nothing, at once or never."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent

    def resolveHostName(self, receiver: Any, hostName: str, *args: object, **more: object) -> Any:
        receiver.resolutionBegan(self)
        if not self.silent:
            receiver.resolutionComplete()
        return self

    def cancel(self) -> None:
        raise NotImplementedError


def without_names(silent: bool) -> Any:
    reactor = MemoryReactorClock()
    reactor.nameResolver = Resolver(silent)  # type: ignore[attr-defined]
    return reactor


def test_a_name_without_address_is_no_refusal() -> None:
    asking = Target(without_names(silent=False), "b0", "http://gone.example", {}).get("/", 2.0)
    faults: list[Failure] = []
    asking.addErrback(faults.append)
    assert isinstance(faults[0].value, error.DNSLookupError)
    assert not isinstance(faults[0].value, error.ConnectError)


def test_a_resolver_that_is_silent_is_given_up_in_time() -> None:
    reactor = without_names(silent=True)
    faults: list[Failure] = []
    Target(reactor, "b0", "http://slow.example:81", {}).get("/", 2.0).addErrback(faults.append)
    reactor.advance(1.9)
    assert not faults
    reactor.advance(0.2)
    assert isinstance(faults[0].value, TimeoutError)
    assert not reactor.getDelayedCalls()


def test_a_connection_that_is_never_taken_is_given_up_in_time() -> None:
    reactor = MemoryReactorClock()
    faults: list[Failure] = []
    Target(reactor, "b0", "http://127.0.0.1:81", {}).get("/", 2.0).addErrback(faults.append)
    assert reactor.tcpClients[0][:2] == ("127.0.0.1", 81)
    reactor.pump([0.5] * 5)
    assert isinstance(faults[0].value, TimeoutError)
    assert not reactor.getDelayedCalls()


def test_cancelling_while_connecting_is_told_as_that() -> None:
    reactor = MemoryReactorClock()
    faults: list[Failure] = []
    asking = Target(reactor, "b0", "http://127.0.0.1:81", {}).get("/", 2.0).addErrback(faults.append)
    assert reactor.tcpClients
    asking.cancel()
    assert isinstance(faults[0].value, CancelledError)
    assert not reactor.getDelayedCalls()


def test_ports_follow_the_scheme() -> None:
    reactor = MemoryReactorClock()
    for url in ("http://127.0.0.1", "https://127.0.0.1"):
        Target(reactor, "b0", url, {}).get("/", 2.0).addErrback(lambda _: None)
    assert [client[1] for client in reactor.tcpClients] == [80, 443]
    reactor.advance(3)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (error.ConnectError(24, "Too many open files"), OSError),
        (error.ConnectError(99, "Cannot assign requested address"), OSError),
        (error.ConnectError(113, "No route to host"), error.ConnectError),
        (error.TimeoutError(), TimeoutError),
        (error.TCPTimedOutError(110, "timed out"), TimeoutError),
        (RuntimeError("a bug"), RuntimeError),
        (target_module.ResponseFailed([Failure(target_module.SSL.Error())]), error.SSLError),
        (target_module.ResponseFailed([]), NoAnswerError),
    ],
)
def test_causes_are_told_by_the_promised_classes(fault: Exception, kind: type[Exception]) -> None:
    assert isinstance(target_module._cause(fault), kind)


# --- TLS ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Server contexts by the name they are for, and the authorities' files."""
    found: dict[str, Any] = {}
    for name in ("127.0.0.1", "other.example"):
        directory: Path = tmp_path_factory.mktemp("tls")
        files = ensure_certificate(directory, (name,))
        pair = ssl.PrivateCertificate.loadPEM(files.key.read_text() + files.certificate.read_text())
        found[name] = (pair.options(), str(files.authority))
    return found


@pytest_twisted.ensureDeferred
async def test_a_certificate_of_the_given_authority_is_trusted(certificates: dict[str, Any]) -> None:
    context, authority = certificates["127.0.0.1"]
    async with serving(says(answer(b"hello")), context) as (_, url):
        asked = target(url, tls_options("127.0.0.1", authority, True))
        assert await asked.get("/", 5.0) == (200, b"hello")


@pytest_twisted.ensureDeferred
async def test_without_verification_any_certificate_does(certificates: dict[str, Any]) -> None:
    context, _ = certificates["other.example"]
    async with serving(says(answer(b"hello")), context) as (_, url):
        assert await target(url, tls_options("127.0.0.1", None, False)).get("/", 5.0) == (200, b"hello")


@pytest_twisted.ensureDeferred
async def test_a_server_that_never_answers_close_notify_is_left(certificates: dict[str, Any]) -> None:
    context, authority = certificates["127.0.0.1"]

    def deaf(connection: Any, request: bytes) -> None:
        connection.transport.write(answer(b"hello"))
        connection.transport.transport.pauseProducing()
        _reactor().callLater(0.05, connection.transport.transport.resumeProducing)

    async with serving(deaf, context) as (_, url):
        asked = target(url, tls_options("127.0.0.1", authority, True))
        assert await asked.get("/", 5.0) == (200, b"hello")
        await deferLater(_reactor(), 0)
        ours = [reader for reader in _reactor().getReaders() if getattr(reader, "realAddress", None)]
        assert not ours, "our end is still open"


@pytest.mark.parametrize(
    ("name", "authority", "what"),
    [("127.0.0.1", None, "certificate verify failed"), ("other.example", "its own", "for another name")],
)
@pytest_twisted.ensureDeferred
async def test_bad_tls_is_a_refusal(
    certificates: dict[str, Any], name: str, authority: str | None, what: str
) -> None:
    context, own = certificates[name]
    tls = tls_options("127.0.0.1", own, True) if authority else None
    async with serving(says(answer(b"hello")), context) as (server, url):
        fault = await fault_of(target(url, tls).get("/", 5.0))
    assert isinstance(fault, error.SSLError)
    assert what in str(fault)
    assert not server.requests, "the request, and its credential, went to an unknown server"


@pytest_twisted.ensureDeferred
async def test_a_server_without_tls_is_a_refusal() -> None:
    async with serving(says(b"HTTP/1.1 400 Bad Request\r\n\r\n", close=True)) as (_, url):
        fault = await fault_of(target(url.replace("http:", "https:")).get("/", 5.0))
    assert isinstance(fault, error.SSLError)


@pytest_twisted.ensureDeferred
async def test_a_handshake_that_hangs_is_given_up_in_time() -> None:
    async with serving(says(b"")) as (_, url):
        fault = await fault_of(target(url.replace("http:", "https:")).get("/", 0.1))
    assert isinstance(fault, TimeoutError)


# --- a source on it -----------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_stopping_a_source_mid_question_leaves_nothing() -> None:
    asked: Deferred[None] = Deferred()

    def script(connection: Any, request: bytes) -> None:
        if request.startswith(b"GET /health "):
            connection.transport.write(answer(b"{}"))
        else:
            asked.callback(None)

    reports: list[HealthReport] = []
    async with serving(script) as (server, url):
        source = LlamaCppHealth(_reactor(), 5.0, 2.0)
        source.start(target(url), reports.append)
        await asked
        source.stop()
    assert [request.split(b" ")[1] for request in server.requests] == [b"/health", b"/props"]
    assert not reports


@pytest_twisted.ensureDeferred
async def test_a_source_that_is_hung_up_on_reports_it() -> None:
    first: Deferred[HealthReport] = Deferred()
    async with serving(says(b"", close=True)) as (_, url):
        source = LlamaCppHealth(_reactor(), 5.0, 2.0)
        source.start(target(url), first.callback)
        report = await first
        source.stop()
    assert report == HealthReport(alive=False, detail="it closed the connection before its answer was whole")


# --- what loaders ask -----------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_body_is_sent_as_json() -> None:
    async with serving(says(answer(b'{"success":true}'))) as (server, url):
        assert await target(url).post("/models/load", b'{"model":"m"}', 5.0) == (200, b'{"success":true}')
    (request,) = server.requests
    assert request.startswith(b"POST /models/load HTTP/1.1\r\n")
    assert b"content-type: application/json" in request.lower()
    assert b"content-length: 13" in request.lower()
    assert request.endswith(b'\r\n\r\n{"model":"m"}')


@pytest_twisted.ensureDeferred
async def test_an_answer_without_end_comes_piece_by_piece_and_can_be_left() -> None:
    first: Deferred[bytes] = Deferred()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    async with serving(says(head + b"data: 1\n\n")) as (_, url):
        watching = target(url).watch("/models/sse", first.callback, 5.0)
        assert await first == b"data: 1\n\n"
        assert not watching.called
        watching.cancel()
        assert isinstance(await fault_of(watching), CancelledError)


@pytest_twisted.ensureDeferred
async def test_the_end_of_what_is_watched_is_told_with_its_status() -> None:
    pieces: list[bytes] = []
    long = b"x" * (ANSWER_BYTES + 1)
    async with serving(says(answer(long))) as (_, url):
        assert await target(url).watch("/events", pieces.append, 5.0) == 200
    assert b"".join(pieces) == long, "what is watched has no limit"
    async with serving(says(answer(b"no", 404))) as (_, url):
        assert await target(url).watch("/events", pieces.append, 5.0) == 404
