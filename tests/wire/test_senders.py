"""Writing at the end of the turn: order, short writes, back-pressure, foreign transports.

These guard the private fields that ``llmgw.wire.twisted_internals`` reads, on whatever
Twisted is installed.
"""

import pytest
import pytest_twisted
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, connectProtocol
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock, deferLater
from twisted.internet.testing import StringTransport

from llmgw.wire.senders import Outbox, PlainSender, Sender, sender
from llmgw.wire.twisted_internals import read_directly, stop_reading_directly, take_over, unsent_bytes


class Reads(Protocol):
    """Counts what arrives; may be told not to read."""

    def __init__(self):
        self.got = b""
        self.pieces = []
        self.ready = Deferred()
        self.lost = Deferred()

    def connectionMade(self):
        self.ready.callback(self)

    def dataReceived(self, data):
        self.got += data
        self.pieces.append(data)

    def connectionLost(self, reason=None):
        self.lost.callback(None)


async def pair():
    """Two ends of a real TCP connection, and the port to stop."""
    served = Reads()
    factory = Factory.forProtocol(lambda: served)
    factory.noisy = False
    port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)
    client = await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port), Reads())
    await served.ready
    return served, client, port


async def until(check):
    for _ in range(2000):
        if check():
            return
        await deferLater(reactor, 0.002)
    raise AssertionError("it did not happen")


async def end(served, client, port):
    client.transport.abortConnection()
    await client.lost
    await served.lost
    await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_what_is_written_in_one_turn_leaves_together_at_its_end():
    served, client, port = await pair()
    send = sender(client.transport, Outbox(reactor))
    assert isinstance(send, Sender)
    send(b"one ")
    send(b"two")
    assert not send.is_flushed
    await until(lambda: served.got == b"one two")
    assert served.pieces == [b"one two"]
    assert send.is_flushed
    await end(served, client, port)


@pytest_twisted.ensureDeferred
async def test_many_senders_are_flushed_in_the_same_turn():
    first, second = await pair(), await pair()
    outbox = Outbox(reactor)
    for served, client, _ in (first, second):
        sender(client.transport, outbox)(b"x")
        assert served.got == b""
    await until(lambda: first[0].got == second[0].got == b"x")
    await end(*first)
    await end(*second)


@pytest_twisted.ensureDeferred
async def test_more_than_the_socket_takes_arrives_whole_and_in_order():
    served, client, port = await pair()
    served.transport.pauseProducing()
    send = sender(client.transport, Outbox(reactor))
    sent = b"".join(b"%08d" % n for n in range(2_000_000))
    for start in range(0, len(sent), 1_000_000):
        send(sent[start : start + 1_000_000])
        send.flush()
    assert not send.is_flushed
    served.transport.resumeProducing()
    await until(lambda: len(served.got) == len(sent))
    assert served.got == sent
    await end(served, client, port)


@pytest_twisted.ensureDeferred
async def test_a_slow_reader_pauses_the_producer_and_resumes_it():
    served, client, port = await pair()
    served.transport.pauseProducing()
    told = []

    class Producer:
        def pauseProducing(self):
            told.append("pause")

        def resumeProducing(self):
            told.append("resume")

        def stopProducing(self):
            told.append("stop")

    client.transport.registerProducer(Producer(), True)
    send = sender(client.transport, Outbox(reactor))
    while "pause" not in told:
        send(b"x" * 65536)
        send.flush()
    served.transport.resumeProducing()
    await until(lambda: "resume" in told)
    client.transport.unregisterProducer()
    await end(served, client, port)


@pytest_twisted.ensureDeferred
async def test_writing_to_a_peer_that_has_gone_raises_nothing():
    served, client, port = await pair()
    served.transport.abortConnection()
    send = sender(client.transport, Outbox(reactor))
    for _ in range(20):
        send(b"x")
        send.flush()
        await deferLater(reactor, 0.001)
    await client.lost
    send(b"x")
    send.flush()
    await served.lost
    await port.stopListening()


def test_foreign_transports_are_written_to_directly():
    transport = StringTransport()
    send = sender(transport, Outbox(Clock()))
    assert isinstance(send, PlainSender)
    send(b"a")
    send.flush()
    assert transport.value() == b"a"
    assert send.is_flushed


def test_any_reactor_with_timers_will_do():
    clock = Clock()
    outbox = Outbox(clock)
    flushed = []

    class Fake:
        def flush(self):
            flushed.append(True)

    outbox.wake()
    outbox.waiting += [Fake(), Fake()]
    assert len(clock.getDelayedCalls()) == 1
    clock.advance(0)
    assert flushed == [True, True]


@pytest_twisted.ensureDeferred
async def test_a_taken_over_transport_calls_its_protocol_itself():
    served, client, port = await pair()
    connector = client.transport.connector
    made_by = connector.factory
    take_over(client.transport, client)
    assert client.transport.protocol is client
    assert connector.factory is not made_by  # nor is anything kept that only connected
    served.transport.write(b"hi")
    await until(lambda: client.got == b"hi")
    await end(served, client, port)


@pytest_twisted.ensureDeferred
async def test_what_the_socket_has_not_taken_can_be_seen():
    served, client, port = await pair()
    served.transport.pauseProducing()
    assert unsent_bytes(client.transport) == 0
    client.transport.write(b"x" * (32 << 20))
    await until(lambda: client.transport.dataBuffer)
    assert unsent_bytes(client.transport) > 1 << 20
    served.transport.resumeProducing()
    await until(lambda: unsent_bytes(client.transport) == 0)
    assert unsent_bytes(StringTransport()) == 0
    await end(served, client, port)


@pytest_twisted.ensureDeferred
async def test_reads_that_are_taken_do_not_reach_the_protocol():
    served, client, port = await pair()
    seen = []

    def take(data):
        seen.append(data)
        return data.startswith(b"mine")

    assert read_directly(client.transport, take)
    served.transport.write(b"mine")
    await until(lambda: seen == [b"mine"])
    served.transport.write(b"yours")
    await until(lambda: client.got == b"yours")
    stop_reading_directly(client.transport)
    served.transport.write(b"mine")
    await until(lambda: client.got == b"yoursmine")
    assert seen == [b"mine", b"yours"]
    stop_reading_directly(client.transport)
    await end(served, client, port)


@pytest_twisted.ensureDeferred
@pytest.mark.parametrize("cut", [False, True], ids=["closed", "reset"])
async def test_the_end_is_told_as_ever(cut):
    served, client, port = await pair()
    reasons = []
    client.connectionLost = lambda reason: (reasons.append(reason.type), client.lost.callback(None))
    assert read_directly(client.transport, lambda data: True)
    if cut:
        served.transport.abortConnection()
    else:
        served.transport.loseConnection()
    await client.lost
    await served.lost
    assert reasons == [ConnectionLost if cut else ConnectionDone]
    await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_a_socket_with_nothing_to_read_is_no_end():
    served, client, port = await pair()
    assert read_directly(client.transport, lambda data: True)
    assert client.transport.doRead() is None
    assert not client.transport.disconnected
    await end(served, client, port)


def test_foreign_transports_are_read_by_their_protocol():
    transport = StringTransport()
    assert not read_directly(transport, lambda data: True)
    stop_reading_directly(transport)
