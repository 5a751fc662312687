"""Faults between gateway and backend, through the fault proxy: what clients get, and
that nothing of it is left behind afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import (
    LAST_CHUNK,
    Answer,
    Gateway,
    Line,
    Received,
    Scripted,
    chunk,
    event,
    eventually,
    json_response,
)

from cases.scenes import DONE, SSE_HEAD, STEADY, STOP, ask_stream, ask_whole, side_by_side
from llmgw.testing import FAULTS, Fault, FaultProxy

CONFIG = (
    STEADY
    + """
lone_open_s = 0.05
[timeouts]
connect_s = 0.3
response_head_s = 0.4
first_token_s = 0.6
stream_idle_s = 0.4
total_s = 3.0
[retry]
attempts = 1
[[health]]
plugin = "http"
interval_s = 600.0
"""
)
STREAM = SSE_HEAD + chunk(event("one")) + chunk(event("two") + STOP) + chunk(DONE) + LAST_CHUNK
WHOLE = json_response({"id": "c", "choices": [{"index": 0, "message": {"content": "one"}}], "usage": {}})
AT_ONCE = 4


def answer(line: Line, request: Received) -> None:
    """Byte for byte the same each time."""
    line.send(STREAM if request.json.get("stream") else WHOLE)


class Broken:
    """A gateway, a backend, and the fault proxy between them.

    :param kind: ``llama-server`` has whole answers put together from streams.
    """

    def __init__(self, folder: Path, kind: str = "openai") -> None:
        self.kind = kind
        self.backend = Scripted(answer)
        self.proxy = FaultProxy("127.0.0.1", self.backend.port)
        config = CONFIG + '[log]\naccess = "access.log"\n'
        config += f'[[backends]]\nid = "b"\nurl = "{self.proxy.url}"\nkind = "{kind}"\n'
        self.gateway = Gateway(folder, config + 'models = ["m"]\nmax_connections = 50\n')
        self.whole = self.good()

    def good(self) -> tuple[bytes, bytes]:
        """The bodies of two good answers."""
        stream, whole = self.gateway.ask(ask_stream()), self.gateway.ask(ask_whole())
        assert (stream.status, stream.clean, whole.status, whole.clean) == (200, True, 200, True)
        return stream.body, whole.body

    def suffer(self, fault: Fault) -> list[Answer]:
        """Answers of some requests at once under ``fault``; then all is well again, and nothing is left."""
        self.proxy.play(fault)
        requests = [ask_stream(), ask_whole()] * (AT_ONCE // 2)
        answers = side_by_side(self.gateway.ask, requests)
        self.proxy.play(Fault())
        eventually(self.gateway.is_idle)
        # A backend that refuses is left alone for a moment.
        eventually(lambda: self.gateway.ask(ask_whole()).status == 200)
        assert self.good() == self.whole
        return answers

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.gateway.process.pid}/fd"))

    @property
    def memory_mib(self) -> float:
        for line in Path(f"/proc/{self.gateway.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no VmRSS")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    yield from scene(tmp_path_factory.mktemp("faults"), "openai")


@pytest.fixture(scope="module")
def assembling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    yield from scene(tmp_path_factory.mktemp("assembling"), "llama-server")


def scene(folder: Path, kind: str) -> Iterator[Broken]:
    """One for a module: at its end all that it took is given back."""
    made = Broken(folder, kind)
    for _ in range(3):
        made.good()
    descriptors, memory_mib = made.descriptors, made.memory_mib
    yield made
    eventually(lambda: made.gateway.is_idle() and made.descriptors <= descriptors + 4)
    assert made.memory_mib < memory_mib + 24
    state = made.gateway.state
    assert (state["held_bytes"], state["waiting"], state["in_flight_by_key"]) == (0, 0, {})
    assert made.gateway.stop() == 0
    made.proxy.close()
    made.backend.close()
    for word in ("Traceback", "Unhandled"):
        assert word not in made.gateway.log, made.gateway.log


def check(answer: Answer, made: Broken, kind: str) -> None:
    """Whole and right, or visibly not so."""
    if kind == "corrupt":
        return  # another byte inside an event, a value or a length is nobody's to notice
    if kind in ("garbage", "truncate") and answer.status == 200:
        if answer.clean:
            check_right(answer, made)
    elif answer.status == 200 and answer.clean:
        assert answer.body in made.whole, answer.body
    elif answer.status == 200:
        told = answer.body.split(b'data: {"error')[0].rstrip()
        assert any(body.startswith(told[:20]) for body in made.whole), answer.body
    else:
        assert (answer.status in (502, 504), answer.clean) == (True, True), answer
        assert answer.json["error"]["code"] in ("upstream_error", "upstream_timeout")


def check_right(answer: Answer, made: Broken) -> None:
    """A clean end after noise: all of the answer had come before it."""
    stream, whole = made.whole
    if answer.get("content-type") == "text/event-stream":
        events, done, rest = answer.body.partition(DONE)
        assert (events + done, rest.count(b"\n\n")) == (stream, 0), answer.body  # half an event is none
    elif made.kind == "llama-server":
        assert answer.body == whole
    else:
        # As many bytes as the backend had announced: which ones they are is its own affair.
        assert len(answer.body) == len(whole), answer.body


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind not in ("none", "delay", "drip")])
def test_before_the_first_byte_the_client_gets_a_status(broken: Broken, kind: str) -> None:
    begun = time.monotonic()
    answers = broken.suffer(Fault(kind))
    # A lone backend that refused one request is not asked by the others: 503.
    expected = (502, 503) if kind in ("refuse", "unreachable") else (502, 504)
    assert [each.status in expected and each.clean for each in answers] == [True] * AT_ONCE, answers
    for each in answers:
        assert str(broken.proxy.port) not in each.body.decode()
    assert time.monotonic() - begun < 8


@pytest.mark.parametrize("kind", ["stall", "cut", "reset", "garbage", "truncate", "corrupt"])
def test_in_the_middle_the_client_can_tell(broken: Broken, kind: str) -> None:
    at = len(SSE_HEAD) + len(chunk(event("one"))) + 12
    for each in broken.suffer(Fault(kind, at=at)):
        check(each, broken, kind)
        if each.status == 200 and each.get("content-type") == "text/event-stream":
            # What was changed inside an event's text is not ours to notice.
            assert not each.clean or kind == "corrupt"


@pytest.mark.parametrize("kind", ["drip", "delay"])
def test_slow_is_not_broken(broken: Broken, kind: str) -> None:
    at = len(STREAM) - 40
    answers = broken.suffer(Fault(kind, at=at if kind == "drip" else 0, rate=200, delay_s=0.05))
    assert [(each.status, each.clean) for each in answers] == [(200, True)] * AT_ONCE
    assert {each.body for each in answers} == set(broken.whole)


SAMPLED = range(1, len(STREAM), 61)


def test_stalled_and_cut_at_some_bytes(broken: Broken) -> None:
    for at in SAMPLED:
        kind = "cut" if at % 2 else "reset"
        for each in broken.suffer(Fault(kind, at=at)):
            check(each, broken, kind)


@pytest.mark.parametrize("kind", ["garbage", "truncate"])
def test_noise_never_ends_an_answer_cleanly(broken: Broken, assembling: Broken, kind: str) -> None:
    for made in (broken, assembling):
        for at in (*SAMPLED, *range(len(STREAM) - 7, len(STREAM))):
            for each in made.suffer(Fault(kind, at=at)):
                check(each, made, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stall", "cut", "reset", "garbage", "truncate", "corrupt"])
@pytest.mark.parametrize("scene", ["broken", "assembling"])
def test_broken_at_every_byte(request: pytest.FixtureRequest, scene: str, kind: str) -> None:
    made = request.getfixturevalue(scene)
    for at in range(len(STREAM)):
        for each in made.suffer(Fault(kind, at=at)):
            check(each, made, kind)
