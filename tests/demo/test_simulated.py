from __future__ import annotations

import json
from typing import Any

import pytest
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from llmgw.demo.simulated import Model, SimulatedSite

MODEL = Model("tiny", slots=1, context_length=100, prefill_rate=10, decode_rate=2)


class Caller:
    """One connection to a site, in memory."""

    def __init__(self, site: SimulatedSite) -> None:
        self.transport = StringTransport()
        self.protocol = site.buildProtocol(None)
        # The idle timer is not what is tested here, and would need the real reactor.
        self.protocol.timeOut = None
        self.protocol.makeConnection(self.transport)

    def get(self, path: str) -> Any:
        self.protocol.dataReceived(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        return self.body()

    def chat(self, content: str = "Hello", **fields: object) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()
        head = f"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n"
        self.protocol.dataReceived(head.encode() + body)

    def body(self) -> Any:
        raw = self.transport.value().partition(b"\r\n\r\n")[2]
        return json.loads(raw) if raw[:1] in b"[{" else raw.decode()

    def events(self) -> list[Any]:
        lines = self.transport.value().decode().split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def leave(self) -> None:
        from twisted.internet.error import ConnectionLost
        from twisted.python.failure import Failure

        self.protocol.connectionLost(Failure(ConnectionLost()))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def site(clock: Clock) -> SimulatedSite:
    return SimulatedSite(MODEL, clock)


def test_it_looks_like_a_server_and_says_what_it_is(site: SimulatedSite) -> None:
    assert Caller(site).get("/health") == {"status": "ok"}
    props = Caller(site).get("/props")
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (1, 100)
    assert props["build_info"] == "llmgw-simulated"
    assert [slot["is_processing"] for slot in Caller(site).get("/slots")] == [False]
    assert Caller(site).get("/v1/models")["data"][0]["id"] == "tiny"
    assert "llamacpp:requests_deferred 0" in Caller(site).get("/metrics")


def test_the_first_token_comes_after_the_prompt_and_the_rest_at_the_rate(
    site: SimulatedSite, clock: Clock
) -> None:
    caller = Caller(site)
    caller.chat(stream=True, max_tokens=3)  # 4 + 5 // 4 = 5 tokens: 0.5 s
    clock.advance(0.49)
    assert not caller.events()
    clock.advance(0.02)
    deltas = [event["choices"][0]["delta"] for event in caller.events()]
    assert deltas == [{"role": "assistant", "content": None}, {"content": "Simulated:"}]
    clock.pump([0.5] * 2)
    assert len(caller.events()) == 4
    clock.advance(0.5)
    assert caller.transport.value().endswith(b"data: [DONE]\n\n")


def test_timings_stand_on_the_last_event(site: SimulatedSite, clock: Clock) -> None:
    caller = Caller(site)
    caller.chat(stream=True, max_tokens=2, stream_options={"include_usage": True}, return_progress=True)
    assert "prompt_progress" in caller.events()[0]
    clock.pump([0.5] * 3)
    *_, finish, last = caller.events()
    assert finish["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7
    assert last["timings"]["prompt_n"] == 5


def test_without_a_stream_the_answer_is_whole(site: SimulatedSite, clock: Clock) -> None:
    caller = Caller(site)
    caller.chat(max_tokens=2)
    clock.pump([0.5] * 3)
    assert caller.body()["choices"][0]["message"]["content"] == "Simulated: The"


def test_a_request_over_the_slots_waits_without_a_word(site: SimulatedSite, clock: Clock) -> None:
    first, second = Caller(site), Caller(site)
    first.chat(stream=True, max_tokens=1)
    second.chat(stream=True, max_tokens=1, return_progress=True)
    assert site.slots.deferred == 1
    assert second.transport.value() == b""
    clock.pump([0.5] * 2)
    assert first.transport.value().endswith(b"[DONE]\n\n")
    assert second.events()
    clock.pump([0.5] * 2)
    assert (site.slots.busy, site.slots.deferred) == (0, 0)


def test_a_client_that_leaves_frees_its_slot_or_its_place(site: SimulatedSite, clock: Clock) -> None:
    first, second, third = Caller(site), Caller(site), Caller(site)
    for caller in (first, second, third):
        caller.chat(stream=True, max_tokens=1, return_progress=True)
    second.leave()
    assert (site.slots.busy, site.slots.deferred) == (1, 1)
    first.leave()
    assert (site.slots.busy, site.slots.deferred) == (1, 0)
    assert third.events()
    third.leave()
    assert site.slots.busy == 0
    assert not clock.getDelayedCalls()


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"messages": 1}', b'{"messages": [1]}'])
def test_what_cannot_be_read_is_400(site: SimulatedSite, body: bytes) -> None:
    caller = Caller(site)
    head = f"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n"
    caller.protocol.dataReceived(head.encode() + body)
    assert b" 400 " in caller.transport.value().split(b"\r\n")[0]
    assert caller.body()["error"]["type"] == "invalid_request_error"


def test_a_prompt_over_the_context_is_400(site: SimulatedSite) -> None:
    caller = Caller(site)
    caller.chat("x" * 400)
    assert caller.body()["error"]["type"] == "exceed_context_size_error"
    assert site.slots.busy == 0
