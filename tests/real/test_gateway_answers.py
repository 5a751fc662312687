"""Through the gateway real llama.cpp servers answer as by themselves, streams and refusals included."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from live_gateway import LiveGateway

pytestmark = pytest.mark.real

WORDS = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "seed": 1}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture
def ask_directly(live_gateway: LiveGateway) -> Callable[..., httpx.Response]:
    """``(backend, path, body)``: the server's own answer."""

    def ask(backend: str, path: str, body: object) -> httpx.Response:
        return httpx.post(live_gateway.servers[backend] + path, json=body, trust_env=False, timeout=30)

    return ask


CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
PARITY = {
    "chat": (CHAT, {}),
    "chat: max_tokens": (CHAT, {"max_tokens": 1}),
    "chat: logprobs": (CHAT, {"logprobs": True, "top_logprobs": 3, "max_tokens": 6}),
    "chat: n": (CHAT, {"n": 2, "max_tokens": 6}),
    "chat: n with logprobs": (CHAT, {"n": 2, "max_tokens": 4, "logprobs": True}),
    "chat: tools": (CHAT, {"tools": [TOOL], "max_tokens": 60}),
    "chat: a tool that must be called": (
        CHAT,
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
    ),
    "chat: stop": (CHAT, {"stop": ["the"]}),
    "chat: schema": (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    "chat: stream is false": (CHAT, {"stream": False, "stream_options": None, "max_tokens": 4}),
    "chat: progress": (CHAT, {"return_progress": True, "max_tokens": 4}),
    "chat: timings of each token": (CHAT, {"timings_per_token": True, "max_tokens": 4}),
    "chat: unicode": (CHAT, {"messages": [{"role": "user", "content": "Grüße \U0001f44b"}]}),
    "text": (TEXT, {"prompt": "The gateway"}),
    "text: logprobs": (TEXT, {"prompt": "The gateway", "logprobs": 2, "max_tokens": 5}),
    "text: n": (TEXT, {"prompt": "The gateway", "n": 2, "max_tokens": 5}),
    "text: prompts": (TEXT, {"prompt": ["The gateway", "A server"], "max_tokens": 5}),
    "text: tokens": (TEXT, {"prompt": [5, 6, 7], "max_tokens": 5}),
    "text: stop": (TEXT, {"prompt": "The gateway", "stop": ["."]}),
    "native": (NATIVE, {"prompt": "The gateway"}),
    "native: a limit": (NATIVE, {"prompt": "The gateway", "n_predict": 5}),
    "native: tokens": (NATIVE, {"prompt": "The gateway", "n_predict": 5, "return_tokens": True}),
    "native: probabilities": (NATIVE, {"prompt": "The gateway", "n_predict": 5, "n_probs": 2}),
    "native: prompts": (NATIVE, {"prompt": ["The gateway", "A server"], "n_predict": 5}),
    "native: fields": (NATIVE, {"prompt": "The", "n_predict": 5, "response_fields": ["content", "stop"]}),
    "native: tokens of parts of letters": (
        NATIVE,
        {"prompt": "The", "return_tokens": True, "grammar": 'root ::= "日本 é"'},
    ),
    "native: another path": ("/completions", {"prompt": "The gateway", "n_predict": 5}),
    "tokenize: pieces": ("/tokenize", {"content": "The gateway", "with_pieces": True}),
    "tokenize": ("/tokenize", {"content": "The gateway"}),
    "detokenize": ("/detokenize", {"tokens": [5, 6, 7, 8]}),
    "template": ("/apply-template", {"messages": WORDS}),
    "responses": ("/v1/responses", {"input": "Hello", "max_output_tokens": 5}),
    "messages": ("/v1/messages", {"messages": WORDS, "max_tokens": 5}),
    "messages: tools": (
        "/v1/messages",
        {
            "messages": WORDS,
            "max_tokens": 50,
            "tools": [{"name": "weather", "input_schema": TOOL["function"]["parameters"]}],  # type: ignore[index]
        },
    ),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": WORDS}),
}
TO_THE_END = {"max_tokens": 60, "grammar": 'root ::= "It is."', "logprobs": True}
UNSTREAMED = {
    "chat: logprobs of the end": (CHAT, TO_THE_END),
    "chat: logprobs before a stop": (CHAT, {"logprobs": True, "stop": ["the"]}),
    "chat: n_probs": (CHAT, {"n_probs": 2, "stop": ["the"]}),
    "chat: logprobs beside tools": (CHAT, {"logprobs": True, "tools": [TOOL]}),
    "chat: an answer that is begun": (
        CHAT,
        {"messages": [*WORDS, {"role": "assistant", "content": "The"}], "max_tokens": 4},
    ),
    "chat: an answer to be continued": (
        CHAT,
        {
            "messages": [*WORDS, {"role": "assistant", "content": "The"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    "chat: verbose": (CHAT, {"verbose": True, "max_tokens": 4}),
    "chat: reasoning among the words": (
        CHAT,
        {"reasoning_format": "deepseek-legacy", "grammar": 'root ::= "<think>a</think>b"', "max_tokens": 60},
    ),
    "text: logprobs before a stop": (TEXT, {"prompt": "The gateway", "logprobs": 1, "stop": ["answer"]}),
    "text: lines that are not indented": (
        TEXT,
        {"prompt": "The", "grammar": 'root ::= "a\\n b\\nd"', "n_indent": 1, "max_tokens": 60},
    ),
    "native: probabilities before a stop": (
        NATIVE,
        {"prompt": "The gateway", "n_probs": 1, "stop": ["answer"]},
    ),
    "native: probabilities alone": (
        NATIVE,
        {"prompt": "The gateway", "n_probs": 1, "response_fields": ["completion_probabilities"]},
    ),
    "native: one figure alone": (NATIVE, {"prompt": "The", "response_fields": ["tokens_predicted"]}),
    "native: settings of several": (
        NATIVE,
        {"prompt": ["The", "A"], "response_fields": ["generation_settings/n_predict", "tokens"]},
    ),
}
"""What the server says in an answer in one piece and not in a stream, or not in the same way."""


def _base(path: str) -> dict[str, Any]:
    """What makes an answer short and the same each time. A greedy bigram model may go in circles."""
    limit = {"n_predict": 12} if path in (NATIVE, "/completions", "/infill") else {"max_tokens": 12}
    return {"model": "pair", **GREEDY, **limit, **({"messages": WORDS} if path == CHAT else {})}


@pytest.mark.parametrize("name", [*PARITY, *UNSTREAMED])
def test_an_answer_is_the_servers_own(
    name: str, http: httpx.Client, ask_directly: Callable[..., httpx.Response]
) -> None:
    path, fields = {**PARITY, **UNSTREAMED}[name]
    body = {**_base(path), **fields}
    ask_directly("narrow", path, body)  # both calls below find the same in the cache
    own = ask_directly("narrow", path, body)
    ours = http.post(path, json=body)
    assert own.status_code == 200
    assert ours.status_code == own.status_code, ours.text
    assert ours.headers["content-type"] == own.headers["content-type"]
    assert _lasting(ours.json()) == _lasting(own.json())


@pytest.mark.parametrize("name", [name for name, (path, _) in PARITY.items() if path in (CHAT, TEXT, NATIVE)])
def test_a_stream_is_the_servers_own(
    name: str, http: httpx.Client, ask_directly: Callable[..., httpx.Response]
) -> None:
    path, fields = PARITY[name]
    body = {**_base(path), **fields, "stream": True}
    body.pop("stream_options", None)
    ask_directly("narrow", path, body)
    own = ask_directly("narrow", path, body)
    ours = http.post(path, json=body)
    assert ours.status_code == own.status_code == 200
    assert ours.headers["content-type"] == own.headers["content-type"]
    assert ours.headers["x-accel-buffering"] == "no"
    # Choices of one request are generated side by side: their order is nobody's promise.
    assert sorted(_events(ours.text)) == sorted(_events(own.text))


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize(
    "fields",
    [{"stream": "true"}, {"stream": 1}, {"return_progress": "x"}, {"stream_options": {"include_usage": 1}}],
    ids=str,
)
def test_what_the_gateway_would_write_over_is_refused_by_the_server(
    path: str, fields: dict[str, Any], http: httpx.Client, ask_directly: Callable[..., httpx.Response]
) -> None:
    body = {**_base(path), "prompt": "The", **fields}
    own, ours = ask_directly("narrow", path, body), http.post(path, json=body)
    assert ours.status_code == own.status_code == 400
    assert ours.json() == own.json()


def test_embeddings_are_the_servers_own(
    http: httpx.Client, ask_directly: Callable[..., httpx.Response]
) -> None:
    for path in ("/v1/embeddings", "/embedding"):
        body = {"model": "embed", "input": ["fast server", "soup"]}
        assert http.post(path, json=body).json() == ask_directly("embed", path, body).json()


def test_reranking_is_the_servers_own(
    http: httpx.Client, ask_directly: Callable[..., httpx.Response]
) -> None:
    body = {"model": "rank", "query": "fast", "documents": ["the server is fast", "soup"], "top_n": 1}
    for path in ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking"):
        ours = http.post(path, json=body)
        assert ours.status_code == 200
        assert ours.json() == ask_directly("rank", path, body).json()
    assert len(ours.json()["results"]) == 1
    # Cohere's clients of today ask there, and a llama-server has no such path.
    assert http.post("/v2/rerank", json=body).json() == ours.json()


def test_infill_is_answered_as_the_server_does(
    http: httpx.Client, ask_directly: Callable[..., httpx.Response]
) -> None:
    body = {"model": "pair", "input_prefix": "The ", "input_suffix": " works", "n_predict": 4, **GREEDY}
    own, ours = ask_directly("narrow", "/infill", body), http.post("/infill", json=body)
    # The tiny model has no tokens for it, and says so.
    assert ours.status_code == own.status_code
    assert _lasting(ours.json()) == _lasting(own.json())


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "harbour " * 4000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "harbour " * 4000}], "stream": True}),
        (CHAT, {"messages": "nothing of the kind"}),
        (CHAT, {"messages": [{"role": "user"}]}),
        (CHAT, {"messages": WORDS, "logit_bias": 5, "grammar": "root ::= ("}),
        (CHAT, {"messages": WORDS, "response_format": {"type": "nonsense"}}),
        (TEXT, {}),
        (NATIVE, {"prompt": {"no": 1}}),
        ("/v1/messages", {"max_tokens": 5}),
        ("/v1/responses", {"input": 5}),
        ("/v1/embeddings", {"input": "not here"}),
        ("/v1/rerank", {"query": "not here", "documents": ["a"]}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": "a"}),
        ("/apply-template", {}),
    ],
)
def test_a_refusal_is_the_servers_own(
    path: str, fields: dict[str, Any], http: httpx.Client, ask_directly: Callable[..., httpx.Response]
) -> None:
    body = {"model": "pair", **fields}
    own, ours = ask_directly("narrow", path, body), http.post(path, json=body)
    assert ours.status_code == own.status_code
    assert _lasting(ours.json()) == _lasting(own.json())
    assert http.post(CHAT, json={"model": "pair", "messages": WORDS, "max_tokens": 1}).status_code == 200


# --- our own ----------------------------------------------------------------------

_PASSING = {"id", "created", "created_at", "completed_at", "system_fingerprint", "id_slot"}


def _lasting(value: Any) -> Any:
    """``value`` without what differs from call to call: ids, moments, milliseconds, rates."""
    if isinstance(value, list):
        return [_lasting(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: "…" if name in _PASSING or name.endswith(("_ms", "_per_second", "_id")) else _lasting(item)
        for name, item in value.items()
    }


def _events(text: str) -> list[str]:
    """The events of a stream without what differs from call to call."""
    assert text.endswith("\n\n")
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, mark, data = event.rpartition("data: ")
        assert mark, event
        found.append(
            name + (data if data == "[DONE]" else json.dumps(_lasting(json.loads(data)), sort_keys=True))
        )
    return found
