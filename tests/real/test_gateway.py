"""The gateway before real llama.cpp servers: its rules, its figures, and that nothing is left behind."""

from __future__ import annotations

import json
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from live_gateway import CAPPED_TOKENS, FREED_WITHIN_S, LiveGateway, wait_until

pytestmark = pytest.mark.real

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
WORDS = [{"role": "user", "content": "Hello"}]
ENDLESS = {"messages": WORDS, "ignore_eos": True}
GREEDY = {"temperature": 0, "seed": 1}
CIRCLES = {"temperature": 0, "top_k": 1}
"""On ``/v1/messages``, where llama-server drops ``ignore_eos``, this goes on for ever: in circles."""
LONG = "harbour " * 9000
"""A prompt that ``big`` reads for seconds."""


# --- names and rules ------------------------------------------------------------


def test_an_alias_is_the_model_it_stands_for(live_gateway: LiveGateway, http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"model": "gpt-4o-mini", "messages": WORDS, **GREEDY})
    assert answer.status_code == 200
    assert answer.headers["x-llmgw-backend"] in ("wide", "narrow")
    line = live_gateway.access_line(answer.headers["x-request-id"])
    assert (line["model"], line["target"]) == ("gpt-4o-mini", "tiny")


@pytest.mark.parametrize("asked", [None, 1000, -1, 2])
@pytest.mark.parametrize(
    ("path", "fields", "key", "counted"),
    [
        (CHAT, {"messages": WORDS}, "max_tokens", ("usage", "completion_tokens")),
        (CHAT, {"messages": WORDS}, "max_completion_tokens", ("usage", "completion_tokens")),
        (TEXT, {"prompt": "The"}, "max_tokens", ("usage", "completion_tokens")),
        (NATIVE, {"prompt": "The"}, "n_predict", ("tokens_predicted",)),
        ("/v1/messages", {"messages": WORDS}, "max_tokens", ("usage", "output_tokens")),
        ("/v1/responses", {"input": "Hello"}, "max_output_tokens", ("usage", "output_tokens")),
    ],
)
def test_a_ceiling_for_output_is_kept(
    http: httpx.Client,
    path: str,
    fields: dict[str, Any],
    key: str,
    counted: tuple[str, ...],
    asked: int | None,
) -> None:
    body = {"model": "capped", **fields, **({} if asked is None else {key: asked})}
    answer = http.post(path, json={**body, **CIRCLES, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    value = answer.json()
    for name in counted:
        value = value[name]
    assert value == (2 if asked == 2 else CAPPED_TOKENS)


def test_a_scoped_key_reaches_its_model_alone(live_gateway: LiveGateway) -> None:
    with live_gateway.client("scoped") as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["embed"]
        assert http.get("/v1/models/embed").status_code == 200
        assert http.get("/v1/models/tiny").status_code == 404
        assert http.post("/v1/embeddings", json={"model": "embed", "input": "a"}).status_code == 200
        for model in ("tiny", "gpt-4o-mini"):
            refused = http.post(CHAT, json={"model": model, "messages": WORDS})
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "model_not_allowed"
            assert "x-llmgw-backend" not in refused.headers


def test_all_slots_of_a_model_are_used_and_no_more(live_gateway: LiveGateway, http: httpx.Client) -> None:
    body = {"model": "tiny", **ENDLESS, "stream": True}
    with ExitStack() as open_streams:
        backends: Counter[str] = Counter()
        for _ in range(6):
            answer = open_streams.enter_context(http.stream("POST", CHAT, json=body))
            assert answer.status_code == 200
            backends[answer.headers["x-llmgw-backend"]] += 1
        refused = http.post(CHAT, json={"model": "tiny", "messages": WORDS})
        assert backends == {"wide": 4, "narrow": 2}
        assert (live_gateway.busy_slots("wide"), live_gateway.busy_slots("narrow")) == (4, 2)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) > 0
    assert wait_until(live_gateway.is_idle, 1)


# --- figures --------------------------------------------------------------------


def test_the_access_log_has_the_time_of_the_first_token(
    live_gateway: LiveGateway, http: httpx.Client
) -> None:
    body = {"model": "big", "messages": WORDS, "stream": True, "max_tokens": 200, "ignore_eos": True}
    started_s = time.monotonic()
    first_s = 0.0
    with http.stream("POST", CHAT, json=body, headers={"x-request-id": "first-token-1"}) as answer:
        for line in answer.iter_lines():
            if not first_s and line.startswith("data: ") and json.loads(line[6:])["choices"][0]["delta"]:
                first_s = time.monotonic() - started_s
    whole_s = time.monotonic() - started_s
    line = live_gateway.access_line("first-token-1")
    assert 0 < line["ttft_s"] <= first_s
    assert first_s - line["ttft_s"] < 0.1
    assert line["ttft_s"] < line["duration_s"] / 2
    assert line["duration_s"] <= whole_s
    assert 0 < line["overhead_s"] < 0.1
    assert line["output_tokens"] == 200
    assert (line["outcome"], line["status"], line["attempts"], line["backend"]) == ("done", 200, 1, "big")
    profile = live_gateway.backend("big")
    assert profile["ttft_samples"] > 0
    assert profile["token_rate"] > 0


def test_a_call_without_stream_has_one_too(live_gateway: LiveGateway, http: httpx.Client) -> None:
    body = {"model": "big", "messages": WORDS, "max_tokens": 100, "ignore_eos": True}
    answer = http.post(CHAT, json=body)
    line = live_gateway.access_line(answer.headers["x-request-id"])
    assert 0 < line["ttft_s"] < line["duration_s"] / 2
    assert "streaming" not in line
    usage = answer.json()["usage"]
    assert (line["prompt_tokens"], line["output_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]


def test_tokens_are_counted_on_every_route(live_gateway: LiveGateway, http: httpx.Client) -> None:
    asked: dict[str, str] = {}
    for path, fields in {
        "/v1/messages": {"messages": WORDS, "max_tokens": 9},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 9},
        CHAT: {"messages": WORDS, "max_tokens": 9},
        TEXT: {"prompt": "The", "max_tokens": 9},
        NATIVE: {"prompt": "The", "n_predict": 9},
    }.items():
        for stream in (False, True):
            body = {"model": "pair", **CIRCLES, **fields, "stream": stream, "ignore_eos": True}
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            asked[answer.headers["x-request-id"]] = path
    for request_id, path in asked.items():
        line = live_gateway.access_line(request_id)
        assert line["route"] == path
        assert line["output_tokens"] == 9, path
        assert line["prompt_tokens"] > 0


def test_metrics_state_and_access_log_agree(live_gateway: LiveGateway, http: httpx.Client) -> None:
    for body in ({"model": "tiny"}, {"model": "unheard-of"}, {"model": "big"}):
        http.post(CHAT, json={"messages": WORDS, "max_tokens": 2, **body})
    assert wait_until(live_gateway.is_idle)
    metrics = live_gateway.metrics()
    assert all(value == 0 for name, value in metrics.items() if name.startswith("llmgw_in_flight"))
    assert metrics["llmgw_requests_in_flight"] == 0
    assert metrics["llmgw_held_body_bytes"] == 0
    total = live_gateway.metric("llmgw_requests_total")
    assert wait_until(lambda: len(live_gateway.access_lines()) == total, 5, every_s=0.2)
    lines = live_gateway.access_lines()
    assert len({line["id"] for line in lines}) == len(lines)
    for backend in live_gateway.servers:
        counted = live_gateway.metric("llmgw_requests_total", f'backend="{backend}"')
        assert counted == sum(line.get("backend") == backend for line in lines)
    assert not any("unheard-of" in name for name in metrics)
    for backend_state in live_gateway.state()["backends"]:
        assert backend_state["available"]
        assert backend_state["breaker"] == "closed"
        assert backend_state["kind"] == "llama-server"


def test_slots_context_and_models_are_asked_of_the_servers(live_gateway: LiveGateway) -> None:
    found = {
        one["id"]: (one["slots"], one["cap"], one["context_length"])
        for one in live_gateway.state()["backends"]
    }
    assert found["wide"] == (4, 4, 2048)
    assert found["narrow"] == (2, 2, 2048)
    assert found["big"] == (1, 1, 16384)
    assert live_gateway.state()["models"]["tiny"] == ["wide", "narrow"]


def test_logs_hold_no_prompt_no_answer_and_no_key(live_gateway: LiveGateway) -> None:
    secret_prompt = "zanzibar-quetzal"
    wrong_key = "lgw_aaaaaaaa_" + "quetzal" * 6
    with live_gateway.client() as http:
        body = {"model": "pair", "messages": [{"role": "user", "content": secret_prompt}], **GREEDY}
        answer = http.post(CHAT, json=body)
        http.post(CHAT, json={**body, "stream": True})
        http.post(CHAT, json={**body, "grammar": secret_prompt})
        http.post(CHAT, content=b'{"model": "pair", "messages": "' + secret_prompt.encode())
        http.post(CHAT + f"?api_key={wrong_key}", json=body)
        last = http.post(CHAT, json=body, headers={"authorization": f"Bearer {wrong_key}"})
    assert last.status_code == 401
    live_gateway.access_line(last.headers["x-request-id"])
    said = answer.json()["choices"][0]["message"]["content"]
    logs = live_gateway.logs()
    assert {"access.log", "gateway.log"} <= logs.keys()
    for name, text in logs.items():
        for secret in (secret_prompt, said, wrong_key, "quetzal", *live_gateway.keys.values()):
            assert secret not in text, name


# --- clients that leave -----------------------------------------------------------


def _freed(gateway: LiveGateway) -> None:
    """The slot of ``big`` is free in time, and so is our count of it.

    One look only: looking often keeps llama-server from noticing that its client left.
    """
    left_s = time.monotonic()
    assert wait_until(gateway.is_idle, 1), gateway.state()
    time.sleep(max(0.0, FREED_WITHIN_S - (time.monotonic() - left_s)))
    assert gateway.busy_slots("big") == 0


PREFILL = {
    "model": "big",
    "messages": [{"role": "user", "content": LONG}],
    "max_tokens": 1,
    "cache_prompt": False,
}


@pytest.mark.parametrize(
    ("path", "body", "reset"),
    [
        (CHAT, {**ENDLESS, "stream": True}, False),
        (CHAT, {**ENDLESS, "stream": True}, True),
        (CHAT, ENDLESS, False),
        (CHAT, {**PREFILL, "stream": True}, False),
        (CHAT, PREFILL, False),
        ("/v1/messages", {"messages": WORDS, "stream": True, "max_tokens": 8000, **CIRCLES}, False),
        (NATIVE, {"prompt": "The", "ignore_eos": True}, False),
    ],
    ids=[
        "stream",
        "stream, reset",
        "no stream",
        "stream, prefill",
        "no stream, prefill",
        "messages",
        "native",
    ],
)
def test_a_client_that_leaves_frees_its_slot(
    live_gateway: LiveGateway, path: str, body: dict[str, Any], reset: bool
) -> None:
    gone_before = live_gateway.metric("llmgw_client_aborts_total")
    connection = live_gateway.send({"model": "big", **body}, path)
    live_gateway.wait_busy("big")
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    _freed(live_gateway)
    assert live_gateway.metric("llmgw_client_aborts_total") == gone_before + 1
    assert live_gateway.backend("big")["failure_streak"] == 0


def test_a_client_that_leaves_before_the_server_reads_leaves_no_work(
    live_gateway: LiveGateway, llama_servers: Callable[..., Any]
) -> None:
    big = ("--parallel", "1", "--ctx", "16384", "--batch", "256", "--alias", "big")
    server = llama_servers("chat", *big, layers=4, ff=1024)  # the one that the gateway has
    assert server.url == live_gateway.servers["big"]
    server.send(signal.SIGSTOP)
    try:
        connection = live_gateway.send({"model": "big", **ENDLESS})
        assert wait_until(lambda: live_gateway.backend("big")["in_flight"] == 1, 3)
        connection.close()
        assert wait_until(live_gateway.is_idle, 1)
    finally:
        server.send(signal.SIGCONT)
    _freed(live_gateway)
    assert wait_until(lambda: live_gateway.backend("big")["available"])


def test_a_client_that_leaves_within_its_request_holds_nothing(live_gateway: LiveGateway) -> None:
    connection = live_gateway.send(PREFILL, cut=10)
    assert wait_until(lambda: live_gateway.state()["held_bytes"] > 0, 3)
    connection.close()
    assert wait_until(live_gateway.is_idle, 1), live_gateway.state()
