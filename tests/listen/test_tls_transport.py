"""TLS of our own against Twisted's: the same bytes, the same ends, in whatever pieces.

Each scene is played with both. Without a network, but for the last tests, which want
real sockets that fill up.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from authority import Authority
from OpenSSL import SSL
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IHandshakeListener
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.ssl import DefaultOpenSSLContextFactory
from twisted.internet.task import Clock, deferLater
from twisted.internet.testing import StringTransport
from twisted.internet.threads import deferToThread
from twisted.logger import capturedLogs
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from zope.interface import implementer

from llmgw.listen.contexts import Contexts, TlsFiles
from llmgw.listen.tls import TlsFactory
from llmgw.wire.senders import Outbox, TlsSender, sender

KINDS = ["ours", "twisted"]


@implementer(IHandshakeListener)
class App(Protocol):
    """What stands above TLS; ``answers`` maps what has arrived so far to what is written."""

    def __init__(self, answer: Callable[[App, bytes], None] | None = None) -> None:
        self.got = b""
        self.shaken = 0
        self.lost: list[Failure] = []
        self._answer = answer

    def handshakeCompleted(self) -> None:
        self.shaken += 1

    def dataReceived(self, data: bytes) -> None:
        self.got += data
        if self._answer is not None:
            self._answer(self, data)

    def connectionLost(self, reason: Failure = None) -> None:  # type: ignore[assignment]
        self.lost.append(reason)


class Wire(StringTransport):
    """The server's socket."""

    def __init__(self) -> None:
        super().__init__()
        self.out: list[bytes] = []
        self.ended = ""

    def write(self, data: bytes) -> None:
        assert isinstance(data, bytes)
        if not self.ended:
            self.out.append(data)

    def take(self) -> bytes:
        out = b"".join(self.out)
        self.out.clear()
        return out

    def loseConnection(self) -> None:
        self.ended = self.ended or "closed"

    def abortConnection(self) -> None:
        self.ended = "aborted"


class Scene:
    """A server's TLS before a client that is OpenSSL's own, as the standard library has it."""

    def __init__(
        self, factory: Any, app: App, clock: Clock, *, version: ssl.TLSVersion | None = None
    ) -> None:
        self.app = app
        self.clock = clock
        self.wire = Wire()
        factory.wrappedFactory.app = app
        self.tls = factory.buildProtocol(None)
        self.tls.makeConnection(self.wire)
        context = trusting_all()
        if version is not None:
            context.maximum_version = version
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = context.wrap_bio(self.incoming, self.outgoing)
        self.heard = b""
        self.client_end: Any = None
        self.up = False

    def play(self, cut: Callable[[bytes], list[bytes]] = lambda data: [data]) -> None:
        """Carry bytes both ways until nothing moves; each way in pieces."""
        for _ in range(1000):
            self.clock.advance(0)
            self._client_reads()
            moved = False
            for piece in cut(self.outgoing.read()) if self.outgoing.pending else []:
                if not self.wire.ended:
                    self.tls.dataReceived(piece)
                moved = True
            self.clock.advance(0)
            for piece in cut(self.wire.take()):
                if piece:
                    self.incoming.write(piece)
                    self._client_reads()
                    moved = True
            if not moved:
                return
        raise AssertionError("it never comes to rest")

    def say(self, data: bytes) -> None:
        self.client.write(data)

    def end(self, why: type[Exception] = ConnectionDone) -> None:
        self.tls.connectionLost(Failure(why()))

    def _client_reads(self) -> None:
        try:
            if not self.up:
                self.client.do_handshake()
                self.up = True
            while True:
                data = self.client.read(65536)
                if not data:
                    self.client_end = "goodbye"
                    return
                self.heard += data
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.client_end = error.reason


def trusting_all() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


Make = Callable[..., Scene]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transport")
    Authority().issue("localhost").write(folder, "one.pem")
    return folder


def factory_of(kind: str, folder: Path, clock: Any, build: Any = None) -> Any:
    inner = Factory()
    inner.noisy = False
    inner.app = None  # type: ignore[attr-defined]
    inner.buildProtocol = build or (lambda addr: inner.app)  # type: ignore[attr-defined, method-assign]
    path = str(folder / "one.pem")
    if kind == "ours":
        return TlsFactory(Contexts(TlsFiles(key=path).read(), clock.seconds), inner, clock)
    return TLSMemoryBIOFactory(DefaultOpenSSLContextFactory(path, path), False, inner, clock)


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, folder: Path) -> Make:
    clock = Clock()
    factory = factory_of(request.param, folder, clock)
    return lambda answer=None, **options: Scene(factory, App(answer), clock, **options)


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def anyhow(seed: int) -> Callable[[bytes], list[bytes]]:
    dice = random.Random(seed)

    def cut(data: bytes) -> list[bytes]:
        pieces = []
        while data:
            size = dice.choice([1, 2, 5, 17, 100, 1500, 20000])
            pieces.append(data[:size])
            data = data[size:]
        return pieces

    return cut


def answer_twice(app: App, data: bytes) -> None:
    app.transport.write(b"<" + data)  # type: ignore[union-attr]
    app.transport.write(b">")  # type: ignore[union-attr]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("cut", [lambda data: [data], bytewise, anyhow(1), anyhow(2)])
def test_data_goes_both_ways_in_whatever_pieces(make: Make, version: ssl.TLSVersion, cut: Any) -> None:
    scene = make(answer_twice, version=version)
    scene.play(cut)
    assert scene.app.shaken == 1
    said = b""
    for size in (1, 100, 16384, 16385, 70000):
        data = bytes([size % 251]) * size
        scene.say(data)
        said += data
        scene.play(cut)
    assert scene.app.got == said
    assert scene.heard.replace(b"<", b"").replace(b">", b"") == said.replace(b"<", b"").replace(b">", b"")
    scene.end()
    assert len(scene.app.lost) == 1
    assert scene.app.lost[0].check(ConnectionLost)  # no goodbye: the end may have been cut off


@pytest.mark.parametrize("why", [ConnectionDone, ConnectionLost])
def test_a_connection_cut_at_any_byte_ends_once_and_quietly(make: Make, why: type[Exception]) -> None:
    whole = make(answer_twice)
    whole.play()
    whole.say(b"x" * 50)
    total = 0

    def count(data: bytes) -> list[bytes]:
        nonlocal total
        total += len(data)
        return [data]

    rest = make(answer_twice)
    rest.play(count)
    whole.end()
    rest.end()
    for at in [*range(60), *range(60, total, 37)]:
        scene = make(answer_twice)
        left = at

        def until(data: bytes) -> list[bytes]:
            nonlocal left
            piece, left = data[:left], max(0, left - len(data))
            return [piece] if piece else []

        with capturedLogs() as logs:
            scene.play(until)
            scene.end(why)
        assert len(scene.app.lost) == 1
        assert scene.app.lost[0].check(ConnectionDone, ConnectionLost)
        assert not logs, logs


def test_what_was_written_before_the_handshake_comes_after_it(make: Make) -> None:
    scene = make()
    scene.tls.write(b"early ")
    scene.tls.writeSequence([b"bird", b"!"])
    scene.play()
    assert scene.heard == b"early bird!"
    scene.end()


def test_an_orderly_end_sends_everything_then_says_goodbye(make: Make) -> None:
    def answer(app: App, data: bytes) -> None:
        app.transport.write(b"a" * 100_000)  # type: ignore[union-attr]
        app.transport.loseConnection()  # type: ignore[union-attr]
        app.transport.write(b"too late")  # type: ignore[union-attr]

    scene = make(answer)
    scene.play()
    scene.say(b"hi")
    scene.play()
    assert scene.heard == b"a" * 100_000
    assert scene.client_end == "goodbye"
    # The client has not said goodbye itself: its end of the socket is waited for.
    assert scene.wire.ended == ""
    scene.client.unwrap()
    scene.play()
    assert scene.wire.ended == "closed"
    scene.end()
    assert len(scene.app.lost) == 1


def test_a_client_that_says_goodbye_is_answered_and_closed(make: Make) -> None:
    scene = make()
    scene.play()
    scene.say(b"last words")
    with pytest.raises(ssl.SSLWantReadError):
        scene.client.unwrap()
    scene.play()
    assert scene.app.got == b"last words"
    assert scene.wire.ended == "closed"
    scene.end()
    assert [each.type for each in scene.app.lost] == [ConnectionDone]


def test_an_abort_is_at_once_and_nothing_is_delivered_after_it(make: Make) -> None:
    scene = make(lambda app, data: app.transport.abortConnection())  # type: ignore[union-attr]
    scene.play()
    scene.say(b"one")
    scene.say(b"two" * 6000)
    scene.play()
    assert scene.wire.ended == "aborted"
    assert scene.app.got == b"one"
    scene.end(ConnectionLost)
    assert len(scene.app.lost) == 1


def test_an_abort_before_the_handshake(make: Make) -> None:
    scene = make()
    scene.tls.abortConnection()
    scene.play()
    scene.end(ConnectionLost)
    assert scene.app.shaken == 0
    assert len(scene.app.lost) == 1
    assert not scene.app.got


def test_an_end_before_the_handshake_is_an_abort(make: Make) -> None:
    scene = make()
    scene.tls.loseConnection()
    assert scene.wire.ended == "aborted"
    scene.end(ConnectionLost)
    assert len(scene.app.lost) == 1


@pytest.mark.parametrize("when", ["handshake", "later"])
def test_junk_ends_the_connection_with_openssls_reason(make: Make, when: str) -> None:
    scene = make()
    if when == "later":
        scene.play()
    scene.tls.dataReceived(b"\x17\x03\x03\x00\x30" + b"j" * 48)
    assert scene.wire.ended == "closed"
    scene.play()
    assert not scene.app.got
    scene.end()
    assert len(scene.app.lost) == 1
    assert scene.app.lost[0].check(SSL.Error)


class Producer:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def pauseProducing(self) -> None:
        self.told.append("pause")

    def resumeProducing(self) -> None:
        self.told.append("resume")

    def stopProducing(self) -> None:
        self.told.append("stop")


def test_producers_are_told_what_the_socket_is_told(make: Make) -> None:
    scene = make()
    scene.play()
    producer = Producer()
    scene.tls.registerProducer(producer, True)
    scene.wire.producer.pauseProducing()
    scene.wire.producer.pauseProducing()
    scene.wire.producer.resumeProducing()
    assert producer.told == ["pause", "resume"]
    scene.tls.loseConnection()
    scene.tls.write(b"still allowed")
    scene.clock.advance(0)
    assert scene.wire.ended == ""
    scene.tls.unregisterProducer()
    scene.play()
    assert scene.heard == b"still allowed"
    assert scene.client_end == "goodbye"
    scene.end()


def test_a_producer_that_writes_during_the_handshake_is_paused_until_its_end(make: Make) -> None:
    scene = make()
    producer = Producer()
    scene.tls.registerProducer(producer, True)
    scene.tls.write(b"early")
    scene.clock.advance(0)
    assert producer.told == ["pause"]
    scene.play()
    assert producer.told == ["pause", "resume"]
    assert scene.heard == b"early"
    scene.tls.unregisterProducer()
    scene.end()


def test_a_producer_that_comes_too_late_is_stopped(make: Make) -> None:
    scene = make()
    scene.play()
    scene.tls.dataReceived(b"\x17\x03\x03\x00\x30" + b"j" * 48)
    producer = Producer()
    scene.tls.registerProducer(producer, True)
    assert producer.told == ["stop"]
    scene.end()


# --- ours alone ------------------------------------------------------------------------


def ours(folder: Path, answer: Any = None) -> Scene:
    clock = Clock()
    return Scene(factory_of("ours", folder, clock), App(answer), clock)


def test_what_one_turn_brings_is_one_record(folder: Path) -> None:
    scene = ours(folder)
    scene.play()
    send = sender(scene.tls, Outbox(scene.clock))
    assert isinstance(send, TlsSender)
    for word in (b"one ", b"two ", b"three"):
        send(word)
    assert not send.is_flushed
    assert not scene.wire.out
    scene.clock.advance(0)
    assert send.is_flushed
    [record] = scene.wire.out
    assert record[0] == 0x17
    assert len(record) == 5 + int.from_bytes(record[3:5], "big")
    scene.incoming.write(record)
    assert scene.client.read(100) == b"one two three"
    scene.end()


def test_a_fault_of_tls_is_told_once_and_counted(folder: Path) -> None:
    clock = Clock()
    factory = factory_of("ours", folder, clock)
    counted: list[int] = []
    factory.wrappedFactory.tls_failed = lambda: counted.append(1)
    for when in ("handshake", "later"):
        scene = Scene(factory, App(), clock)
        if when == "later":
            scene.play()
        with capturedLogs() as logs:
            scene.tls.dataReceived(b"\x17\x03\x03\x00\x30" + b"j" * 48)
            scene.end()
        [event] = logs
        assert event["what"] == ("failed" if when == "later" else "handshake failed")
        assert event["why"].isprintable()
    assert len(counted) == 2


def test_nothing_is_built_where_the_factory_makes_nothing(folder: Path) -> None:
    assert factory_of("ours", folder, Clock(), lambda addr: None).buildProtocol(None) is None


def test_a_stranger_to_our_factory_needs_no_certificate(folder: Path) -> None:
    scene = ours(folder)
    scene.play()
    assert scene.tls.handshaken
    assert scene.tls.client_certificate is None
    scene.end()
    assert scene.tls.client_certificate is None


# --- real sockets ------------------------------------------------------------------------

SIZE = 24_000_000


class Pours(App):
    """Writes :data:`SIZE` bytes as fast as it is allowed to, then ends.

    :ivar most: bytes written while it was paused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0
        self.pauses = 0
        self.paused = False
        self.done: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.transport.registerProducer(self, True)  # type: ignore[union-attr]
        self.resumeProducing()

    def pauseProducing(self) -> None:
        self.paused = True
        self.pauses += 1

    def resumeProducing(self) -> None:
        self.paused = False
        self._pour()

    def stopProducing(self) -> None:
        self.paused = True

    def connectionLost(self, reason: Failure = None) -> None:  # type: ignore[assignment]
        super().connectionLost(reason)
        self.done.callback(None)

    def _pour(self) -> None:
        while not self.paused and self.sent < SIZE:
            self.transport.write(pattern(self.sent, 50_000))  # type: ignore[union-attr]
            self.sent += 50_000
        if self.sent >= SIZE and not self.paused:
            self.paused = True
            self.transport.unregisterProducer()  # type: ignore[union-attr]
            self.transport.loseConnection()  # type: ignore[union-attr]


def pattern(start: int, size: int) -> bytes:
    return (start // 50_000).to_bytes(4, "big") * (size // 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest_twisted.ensureDeferred
async def test_a_slow_reader_gets_all_of_it_and_fills_no_memory(kind: str, folder: Path) -> None:
    app = Pours()
    factory = factory_of(kind, folder, reactor, lambda addr: app)
    port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)

    stopped = Deferred[None]()

    def read() -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port.getHost().port), 20) as plain,
            trusting_all().wrap_socket(plain) as sock,
        ):
            sock.sendall(b"go")
            parts = [sock.recv(1000)]
            reactor.callFromThread(stopped.callback, None)  # type: ignore[attr-defined]
            go_on.wait(20)
            while data := sock.recv(1 << 20):
                parts.append(data)
            return b"".join(parts)

    go_on = threading.Event()
    reading = deferToThread(read)
    await stopped
    last = -1
    while app.sent != last:  # until nothing goes any more
        last = app.sent
        await deferLater(reactor, 0.05)  # type: ignore[arg-type]
    assert app.paused
    assert app.sent < SIZE / 2
    go_on.set()
    got = await reading
    await app.done
    await port.stopListening()
    assert len(got) == SIZE
    assert all(got[at : at + 50_000] == pattern(at, 50_000) for at in range(0, SIZE, 50_000))
    assert len(app.lost) == 1
