"""The fast path does what the general path does with an event, whatever comes before and after."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from llmgw.core.http import DEFAULT_LIMITS
from llmgw.core.meter import Meter
from llmgw.core.response_reader import ResponseMemo
from llmgw.core.sse import UsageStripper
from llmgw.wire.relay import Relay
from llmgw.wire.upstream import UpstreamConnection

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]%b}\n\n'
OTHERS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n',
    b'data: {"error":{"message":"no"}}\n\n',
    b": comment\n\n",
    b"data: [DONE]\n\n",
    b"data: nonsense\n\n",
    b"data: {\r\n\r\n",
    b"\n",
    b"\r",
    PIECE.replace(b"\n", b"\r\n") % (b"x", b""),
    PIECE % (b"x" * 3000, b""),
    (PIECE % (b"x", b"")) * 2,
]
USUAL = b"%x\r\n%b\r\n" % (len(PIECE % (b"y", b"")), PIECE % (b"y", b""))
"""A read of a running stream: one whole chunk with one event."""


class Answer:
    """A client's answer: keeps the bytes that would leave, framed."""

    is_chunked = True

    def __init__(self) -> None:
        self.wire = b""
        self.sent_bytes = 0
        self.gone = False
        self.fast_path_reads = 0

    def send(self, data: bytes) -> None:
        self.hold(data)

    def hold(self, data: bytes) -> None:
        if not self.gone:
            self.sent_bytes += len(data)
            self.wire += b"%x\r\n%b\r\n" % (len(data), data)

    def send_framed(self, data: bytes, size: int) -> None:
        self.fast_path_reads += 1
        self.sent_bytes += size
        self.wire += data

    def flush(self) -> None:
        """Nothing waits here."""

    def stream_from(self, source: Any) -> None:
        """Never slow."""


class Stream:
    """One backend's stream on its way to an :class:`Answer`."""

    def __init__(
        self, *, strip: bool = False, heartbeat_s: float = 0.0, limit_bytes: int | None = None
    ) -> None:
        self.now_s = 100.0
        pool: Any = SimpleNamespace(
            clock=lambda: self.now_s,
            head_limits=DEFAULT_LIMITS,
            response_heads=ResponseMemo(DEFAULT_LIMITS),
            outbox=None,
            sweep=SimpleNamespace(add=lambda _: None, discard=lambda _: None),
            forget=lambda _: None,
            give=lambda _: None,
        )
        self.connection = UpstreamConnection(pool)
        self.connection.makeConnection(StringTransport())
        self.connection.request("POST", b"x", head_s=9.0, first_token_s=9.0, idle_s=2.5, until_s=900.0)
        self.meter = Meter("chat")
        self.lease: Any = SimpleNamespace(moved_s=0.0, first_token=lambda _: None)
        self.gaps: list[float] = []
        self.answer = Answer()
        self.connection.dataReceived(HEAD)
        self.meter.begin(200, b"text/event-stream", self.now_s)
        self.relay = Relay(
            self.answer,  # type: ignore[arg-type]
            self.connection,
            self.meter,
            self.lease,
            gaps=SimpleNamespace(observe=self.gaps.append),
            until_s=700.0,
            strip=UsageStripper() if strip else None,
            heartbeat_s=heartbeat_s,
            limit_bytes=limit_bytes,
            sweep=pool.sweep,
        )
        self.connection.deliver(self.relay)

    def read(self, data: bytes, at_s: float) -> None:
        self.now_s = at_s
        self.connection.dataReceived(data)

    def read_usual(self, count: int) -> None:
        """``count`` usual events, one a second from 100 s on."""
        for n in range(count):
            self.read(USUAL, 100.0 + n)

    def told(self) -> tuple[object, ...]:
        """All that a read can have changed."""
        meter, relay = self.meter, self.relay
        return (
            self.answer.wire,
            self.answer.sent_bytes,
            self.gaps,
            self.lease.moved_s,
            (self.connection.heard_s, self.connection.until_s, self.connection.lost),
            (relay.last_s, relay.done.done),
            (meter.events, meter.content_events, meter.last_s, meter.last_content_s, meter.first_content_s),
            (meter.finished, meter.error, meter.usage, meter.cut_in_event, meter.at_line_start),
        )


def chunk(data: bytes, dice: Random) -> bytes:
    """``data`` as a chunk, mostly in the usual spelling."""
    size = b"%x" % len(data)
    if dice.random() < 0.1:
        size = dice.choice([b"0" + size, size.upper(), size + b";a=b"])
    return b"%b\r\n%b\r\n" % (size, data)


def reads(dice: Random) -> list[bytes]:
    """What a backend's socket gives: whole chunks mostly, and every other cut."""
    pieces = [
        PIECE % (b"y" * dice.randrange(80), dice.choice([b"", b"", b',"usage":null']))
        if dice.random() < 0.8
        else dice.choice(OTHERS)
        for _ in range(30)
    ]
    chunks = [chunk(piece, dice) for piece in pieces] + [b"0\r\n\r\n"]
    found = []
    while chunks:
        data = b"".join(chunks.pop(0) for _ in range(min(len(chunks), 1 if dice.random() < 0.8 else 2)))
        if dice.random() < 0.15:
            at = dice.randrange(len(data))
            found += [data[:at], data[at:]]
        else:
            found.append(data)
    return [each for each in found if each]


@pytest.mark.parametrize("seed", range(60))
def test_both_ways_leave_the_same_behind(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Random(seed)
    options: Any = {"strip": seed % 2 == 1, "heartbeat_s": (0.0, 15.0)[seed % 3 == 1]}
    short = Stream(**options)
    with monkeypatch.context() as patched:
        patched.setattr(Relay, "fast_path", False)
        general = Stream(**options)
        script = [(data, 100.0 + n * dice.random()) for n, data in enumerate(reads(dice))]
        for data, at_s in script:
            general.read(data, at_s)
            patched.setattr(Relay, "fast_path", True)
            short.read(data, at_s)
            patched.setattr(Relay, "fast_path", False)
            assert short.told() == general.told(), data
    assert general.answer.fast_path_reads == 0
    assert short.answer.fast_path_reads > 0


def test_a_stream_of_usual_events_takes_it_from_the_third_on() -> None:
    """The first tells the first token's time; the general path has then to see that it may."""
    stream = Stream(strip=True)
    stream.read_usual(10)
    assert stream.answer.fast_path_reads == 9
    assert stream.gaps == [1.0] * 9


def test_not_where_an_answer_may_have_so_many_bytes_only() -> None:
    stream = Stream(limit_bytes=1 << 20)
    stream.read_usual(5)
    assert stream.answer.fast_path_reads == 0


def test_nothing_is_sent_to_a_client_that_has_gone() -> None:
    stream = Stream()
    for n in range(5):
        stream.answer.gone = n > 2
        stream.read(USUAL, 100.0 + n)
    assert stream.answer.wire.count(b"data: ") == 3


def test_a_fault_of_ours_on_the_fast_path_does_not_leave_the_client_waiting(
    expected_failures: Callable[..., list[Failure]],
) -> None:
    stream = Stream()
    stream.read_usual(3)
    stream.answer.send_framed = None  # type: ignore[assignment]
    stream.read(USUAL, 109.0)
    assert stream.relay.done.done
    assert len(expected_failures(TypeError)) == 1


def test_silence_counts_from_the_last_event_on_the_fast_path() -> None:
    stream = Stream(heartbeat_s=1.0)
    stream.read_usual(4)
    connection, relay = stream.connection, stream.relay
    # The deadline that the first read has set has passed, the one that counts has not.
    assert connection.deadline_s == 102.5
    connection.expired(103.1)
    assert (connection.deadline_s, relay.done.done) == (105.5, False)
    relay.expired(103.5)
    assert relay.deadline_s == 104.0
    assert b": ping" not in stream.answer.wire
    relay.expired(104.0)
    assert relay.deadline_s == 105.0
    assert b": ping" in stream.answer.wire
    connection.expired(105.5)
    assert relay.done.done


def test_no_read_takes_the_fast_path_after_the_stream() -> None:
    stream = Stream()
    stream.read_usual(4)
    stream.read(b"0\r\n\r\n", 105.0)
    short = stream.answer.fast_path_reads
    stream.read(USUAL, 106.0)
    assert stream.answer.fast_path_reads == short
