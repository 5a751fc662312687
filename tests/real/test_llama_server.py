"""What the gateway relies on of the real llama.cpp server; a new release that breaks one shows here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.real

Start = Callable[..., Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def connect(url: str) -> HTTPConnection:
    return HTTPConnection(urlsplit(url).netloc, timeout=20)


def get(url: str, path: str) -> tuple[int, Any]:
    connection = connect(url)
    connection.request("GET", path)
    response = connection.getresponse()
    raw = response.read()
    connection.close()
    return response.status, json.loads(raw) if raw[:1] in b"[{" else raw.decode()


def post(url: str, path: str, body: object) -> HTTPResponse:
    """The caller reads it to its end, which closes it."""
    connection = connect(url)
    headers = {"content-type": "application/json", "connection": "close"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection.getresponse()


def chat(url: str, **fields: object) -> HTTPResponse:
    return post(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], **fields})


def events(response: HTTPResponse) -> Iterator[Any]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def until(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def busy_slots(url: str) -> int:
    return sum(slot["is_processing"] for slot in get(url, "/slots")[1])


def test_health_says_ok(llama_url: str) -> None:
    assert get(llama_url, "/health") == (200, {"status": "ok"})


def test_props_tell_slots_context_and_name(llama_url: str) -> None:
    _, props = get(llama_url, "/props")
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["model_alias"] == "tiny"
    assert "build_info" in props


def test_models_tell_the_context_of_a_slot(llama_url: str) -> None:
    _, models = get(llama_url, "/v1/models")
    assert [(model["id"], model["meta"]["n_ctx"]) for model in models["data"]] == [("tiny", 2048)]


def test_slots_tell_who_is_at_work(llama_url: str) -> None:
    _, slots = get(llama_url, "/slots")
    assert [slot["id"] for slot in slots] == [0, 1]
    assert all({"n_ctx", "is_processing", "speculative"} <= slot.keys() for slot in slots)


def test_metrics_count_busy_and_deferred(llama_url: str) -> None:
    _, text = get(llama_url, "/metrics")
    names = {line.split()[0] for line in text.splitlines() if line and line[0] != "#"}
    assert {"llamacpp:requests_processing", "llamacpp:requests_deferred"} <= names


def test_connections_are_kept_for_5_s_and_100_requests(llama_url: str) -> None:
    connection = connect(llama_url)
    closes = []
    for _ in range(100):
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        assert response.getheader("keep-alive") in ("timeout=5, max=100", None)
        closes.append(response.getheader("connection") == "close")
    assert closes == [False] * 99 + [True]


@pytest.mark.slow
def test_an_idle_connection_is_closed_after_5_s(llama_url: str) -> None:
    connection = connect(llama_url)
    connection.request("GET", "/health")
    connection.getresponse().read()
    assert connection.sock is not None
    started_s = time.monotonic()
    assert connection.sock.recv(1) == b""
    assert 4.5 < time.monotonic() - started_s < 6.5


def test_timings_stand_on_the_last_event(llama_url: str) -> None:
    seen = list(events(chat(llama_url, stream=True)))
    assert ["timings" in event for event in seen] == [False] * (len(seen) - 1) + [True]
    timings = seen[-1]["timings"]
    assert {"cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"} <= timings.keys()
    assert seen[-1]["choices"][0]["finish_reason"] == "stop"


def test_timings_stand_on_the_usage_event_where_one_is_asked_for(llama_url: str) -> None:
    *_, finish, last = events(chat(llama_url, stream=True, stream_options={"include_usage": True}))
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert "timings" not in finish
    assert last["choices"] == []
    timings, usage = last["timings"], last["usage"]
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"]


def test_a_stream_ends_with_done(llama_url: str) -> None:
    assert chat(llama_url, stream=True).read().endswith(b"data: [DONE]\n\n")


def test_the_role_comes_before_any_content(llama_url: str) -> None:
    first, second, *_ = events(chat(llama_url, stream=True))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert second["choices"][0]["delta"]["content"]


def test_progress_is_told_before_the_first_token(llama_url: str) -> None:
    prompt = "harbour " * 700
    messages = [{"role": "user", "content": prompt}]
    seen = list(events(chat(llama_url, messages=messages, stream=True, return_progress=True)))
    told = [at for at, event in enumerate(seen) if "prompt_progress" in event]
    content = [at for at, event in enumerate(seen) if event["choices"][0]["delta"].get("content")]
    assert told
    assert told[-1] < content[0]
    assert {"total", "cache", "processed", "time_ms"} <= seen[told[0]]["prompt_progress"].keys()


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_a_json_error(llama_url: str, stream: bool) -> None:
    response = chat(llama_url, messages=[{"role": "user", "content": "harbour " * 4000}], stream=stream)
    error = json.loads(response.read())["error"]
    assert response.status == 400
    assert response.getheader("connection") == "close"
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > error["n_ctx"] == 2048


def test_bad_json_is_400_and_an_unknown_path_404(llama_url: str) -> None:
    connection = connect(llama_url)
    connection.request("POST", "/v1/chat/completions", "{", {"content-type": "application/json"})
    assert connection.getresponse().status == 400
    assert get(llama_url, "/nothing")[0] == 404


def test_a_wrong_key_is_401_and_health_needs_none(llama_servers: Start) -> None:
    url = llama_servers("chat", "--api-key", "opensesame-opensesame").url
    assert get(url, "/health")[0] == 200
    assert chat(url).status == 401


def test_a_warm_prompt_is_read_from_the_cache(llama_servers: Start) -> None:
    url = llama_servers("chat", "--parallel", "1").url
    messages = [{"role": "user", "content": "A prompt of its own: " + "lighthouse " * 50}]
    first, second = (json.loads(chat(url, messages=messages).read())["timings"] for _ in range(2))
    assert first["prompt_n"] > 50
    # The last token is always read again.
    assert second["prompt_n"] == 1
    assert second["cache_n"] == first["cache_n"] + first["prompt_n"] - 1


def test_closing_a_stream_frees_its_slot(llama_servers: Start) -> None:
    url = llama_servers(shared=False, layers=4, ff=1024).url
    response = chat(url, stream=True, ignore_eos=True)
    next(events(response))
    assert busy_slots(url) == 1
    response.close()
    assert until(lambda: busy_slots(url) == 0, within_s=3)


def test_a_request_over_the_slots_waits_without_headers(llama_servers: Start) -> None:
    url = llama_servers("chat", "--parallel", "1", shared=False, layers=4, ff=1024).url
    first = chat(url, stream=True, ignore_eos=True)
    next(events(first))
    waiting = connect(url)
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "stream": True})
    waiting.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    assert until(lambda: "llamacpp:requests_deferred 1" in get(url, "/metrics")[1])
    assert waiting.sock is not None
    waiting.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        waiting.sock.recv(1)
    first.close()
    waiting.sock.settimeout(20)
    assert waiting.getresponse().status == 200


def test_id_slot_is_obeyed(llama_url: str) -> None:
    for slot in (1, 0, 1):
        answer = json.loads(chat(llama_url, id_slot=slot, max_tokens=1, verbose=True).read())
        assert answer["__verbose"]["id_slot"] == slot


def test_tools_give_a_tool_call_and_then_words(llama_url: str) -> None:
    # Greedy: with dice the tiny model may fill a string until its context is full.
    answer = json.loads(chat(llama_url, tools=[TOOL], temperature=0).read())["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    call = answer["message"]["tool_calls"][0]
    assert call["function"]["name"] == "weather"
    assert isinstance(json.loads(call["function"]["arguments"])["city"], str)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]
    answer = json.loads(chat(llama_url, messages=messages, tools=[TOOL], max_tokens=40).read())["choices"][0]
    assert answer["message"]["content"]


def test_embeddings_and_rerank_are_served_where_asked_for(llama_servers: Start) -> None:
    url = llama_servers("embedding").url
    answer = json.loads(post(url, "/v1/embeddings", {"input": ["fast server", "soup"]}).read())
    assert [len(entry["embedding"]) for entry in answer["data"]] == [896, 896]
    url = llama_servers("rerank").url
    body = {"query": "fast", "documents": ["the server is fast", "soup", "a child counts gulls"]}
    results = json.loads(post(url, "/v1/rerank", body).read())["results"]
    assert sorted(result["index"] for result in results) == [0, 1, 2]
    assert len({result["relevance_score"] for result in results}) == 3


def test_anthropic_messages_tell_usage_and_never_timings(llama_url: str) -> None:
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    seen = list(events(post(llama_url, "/v1/messages", body)))
    by_type = {event["type"]: event for event in seen}
    assert {"cache_read_input_tokens", "input_tokens"} <= by_type["message_start"]["message"]["usage"].keys()
    assert by_type["message_delta"]["usage"]["output_tokens"] > 0
    assert not any("timings" in event for event in seen)
