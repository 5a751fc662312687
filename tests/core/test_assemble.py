"""The assembled object is the one that the server itself would have sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core import assemble
from llmgw.core.assemble import Assembler

RECORDINGS = Path(__file__).parent / "recordings"
"""Streams, asked for with ``return_progress`` and ``include_usage``, and the
bodies of the same requests without ``stream``; llama.cpp build b11549,
temperature 0, a fixed seed and a tiny model."""

MEASURED = {
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}
VARYING = MEASURED | {"id", "created", "id_slot"}
"""What differs between any two runs of one request."""

NAMES = sorted(
    path.stem
    for path in RECORDINGS.glob("*.sse")
    if path.stem.partition("_")[0] in ("chat", "completion", "native")
)


def settled(value: Any) -> Any:
    """A body without what varies: such values become their type's name."""
    if isinstance(value, dict):
        return {
            name: type(inner).__name__ if name in VARYING and not is_token(value) else settled(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [settled(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


def is_token(value: dict[str, Any]) -> bool:
    """A token's ``id`` in logprobs does not vary."""
    return "token" in value


def assembled(
    dialect: str, *parts: bytes, end: bool = True, extras: bool = True, tokens: bool = False
) -> Assembler:
    assembler = Assembler(dialect, include_extras=extras, return_tokens=tokens)
    for part in parts:
        assembler.feed(part)
    if end:
        assembler.end()
    return assembler


def body(*args: Any, **options: Any) -> Any:
    return json.loads(assembled(*args, **options).result())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 37, 100_000])
def test_it_is_the_servers_own_answer(name: str, size: int) -> None:
    stream = (RECORDINGS / f"{name}.sse").read_bytes()
    parts = [stream[i : i + size] for i in range(0, len(stream), size)]
    assembler = assembled(name.partition("_")[0], *parts, tokens=name == "native_tokens")
    assert assembler.complete
    assert assembler.error is None
    assert assembler.fault is None
    expected = json.loads((RECORDINGS / f"{name}.json").read_bytes())
    assert settled(json.loads(assembler.result())) == settled(expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_cut_short_is_not_complete(name: str) -> None:
    stream = (RECORDINGS / f"{name}.sse").read_bytes()
    events = stream.split(b"\n\n")
    half = b"\n\n".join(events[: len(events) // 2]) + b"\n\n"
    assembler = assembled(name.partition("_")[0], half, end=False)
    assert not assembler.complete


def test_numbers_are_passed_as_they_were_written() -> None:
    stream = (RECORDINGS / "chat_plain.sse").read_bytes()
    assert b'"prompt_per_token_ms":0.0827391304347826' in assembled("chat", stream).result()


def test_extras_can_be_left_out() -> None:
    stream = (RECORDINGS / "chat_plain.sse").read_bytes()
    assert set(body("chat", stream, extras=False)) == {
        "id",
        "object",
        "created",
        "model",
        "choices",
        "usage",
        "system_fingerprint",
    }


def chunk(choice: dict[str, Any] | None = None, **top: Any) -> bytes:
    choices = [] if choice is None else [choice]
    return b"data: " + json.dumps({"choices": choices, **top}).encode() + b"\n\n"


def delta(_index: int = 0, **fields: Any) -> bytes:
    return chunk({"index": _index, "delta": fields, "finish_reason": None})


def finish(index: int = 0, reason: str = "stop") -> bytes:
    return chunk({"index": index, "delta": {}, "finish_reason": reason})


DONE = b"data: [DONE]\n\n"


def message(*parts: bytes) -> dict[str, Any]:
    found: dict[str, Any] = body("chat", *parts)["choices"][0]["message"]
    return found


def test_texts_grow_and_null_adds_nothing() -> None:
    assert message(
        delta(role="assistant", content=None),
        delta(reasoning_content="th"),
        delta(reasoning_content="ink"),
        delta(content="a", refusal=None),
        delta(content=None),
        delta(role="assistant", content="b"),
        finish(),
    ) == {"role": "assistant", "content": "ab", "reasoning_content": "think", "refusal": None}


def test_a_refusal_and_audio_grow() -> None:
    assert message(
        delta(refusal="n", audio={"id": "a1", "data": "AA", "transcript": "he"}),
        delta(refusal="o", audio={"id": "a1", "data": "BB", "transcript": "y", "expires_at": 7}),
        finish(),
    ) == {
        "role": "assistant",
        "content": "",
        "refusal": "no",
        "audio": {"id": "a1", "data": "AABB", "transcript": "hey", "expires_at": 7},
    }


def test_unknown_fields_of_a_delta_are_kept() -> None:
    found = message(
        delta(content="a", annotations=[1], flag=1), delta(annotations=[2], flag=2, odd={"x": 1}), finish()
    )
    assert (found["annotations"], found["flag"], found["odd"]) == ([1, 2], 2, {"x": 1})


def test_an_old_function_call_grows() -> None:
    found = message(
        delta(function_call={"name": "f", "arguments": ""}),
        delta(function_call={"arguments": "{}"}),
        finish(),
    )
    assert found["function_call"] == {"name": "f", "arguments": "{}"}


def piece(index: int | None = None, id: str | None = None, name: str | None = None, args: Any = None) -> Any:
    function = {key: value for key, value in (("name", name), ("arguments", args)) if value is not None}
    whole = {"index": index, "id": id, "function": function}
    return {key: value for key, value in whole.items() if value is not None}


def calls(*pieces: Any) -> list[tuple[Any, Any, Any]]:
    found = message(*(delta(tool_calls=[one]) for one in pieces), finish(reason="tool_calls"))
    return [
        (call.get("id"), call["function"].get("name"), call["function"]["arguments"])
        for call in found["tool_calls"]
    ]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param(
            [piece(0, "a", "f", ""), piece(0, args='{"x"'), piece(0, args=":1}")],
            [("a", "f", '{"x":1}')],
            id="one",
        ),
        pytest.param(
            [piece(0, "a", "f", ""), piece(1, "b", "g", ""), piece(0, args="1"), piece(1, args="2")],
            [("a", "f", "1"), ("b", "g", "2")],
            id="parallel",
        ),
        pytest.param(
            [piece(1, "b", "g", "2"), piece(0, "a", "f", "1")],
            [("a", "f", "1"), ("b", "g", "2")],
            id="out of order",
        ),
        pytest.param(
            [piece(0, "a", "f", "1"), piece(0, "b", "g", "2"), piece(0, args="3")],
            [("a", "f", "1"), ("b", "g", "23")],
            id="both index 0",
        ),
        pytest.param(
            [piece(0, None, "f", "1"), piece(0, None, "g", "2")],
            [(None, "f", "1"), (None, "g", "2")],
            id="both index 0, no id",
        ),
        pytest.param(
            [piece(0, "a", "f", "1"), piece(0, "a", "f", "2")], [("a", "f", "12")], id="id and name repeated"
        ),
        pytest.param(
            [piece(0, None, "f", "1"), piece(0, None, "f", "2"), piece(0, "a", None, "3")],
            [("a", "f", "123")],
            id="late id",
        ),
        pytest.param(
            [piece(None, "a", "f", "1"), piece(None, "b", "g", "2"), piece(None, "a", None, "3")],
            [("a", "f", "13"), ("b", "g", "2")],
            id="no index",
        ),
        pytest.param(
            [piece(None, None, "f", "1"), piece(None, None, None, "2"), piece(None, None, "f", "3")],
            [(None, "f", "12"), (None, "f", "3")],
            id="no index, no id",
        ),
        pytest.param([piece(None, None, None, "1")], [(None, None, "1")], id="arguments only"),
        pytest.param([piece(0, "a", "f")], [("a", "f", "")], id="no arguments"),
    ],
)
def test_pieces_find_their_tool_call(pieces: list[Any], expected: list[Any]) -> None:
    assert calls(*pieces) == expected


def test_a_tool_call_has_a_type_and_no_index() -> None:
    found = message(delta(tool_calls=[piece(0, "a", "f", "{}"), 7]), delta(tool_calls=None), finish())
    assert found["tool_calls"] == [
        {"type": "function", "id": "a", "function": {"name": "f", "arguments": "{}"}}
    ]


def test_a_custom_tool_call_grows() -> None:
    first = {"index": 0, "id": "a", "type": "custom", "custom": {"name": "c", "input": "x"}}
    found = message(
        delta(tool_calls=[first]), delta(tool_calls=[{"index": 0, "custom": {"input": "y"}}]), finish()
    )
    assert found["tool_calls"] == [{"id": "a", "type": "custom", "custom": {"name": "c", "input": "xy"}}]


def test_logprobs_go_on() -> None:
    def with_logprobs(logprobs: Any) -> bytes:
        return chunk({"index": 0, "delta": {"content": "a"}, "logprobs": logprobs})

    found = body(
        "chat",
        with_logprobs({"content": [{"token": "a"}], "refusal": None}),
        with_logprobs(None),
        with_logprobs({"content": [{"token": "b"}], "refusal": None}),
        finish(),
    )
    assert found["choices"][0]["logprobs"] == {"content": [{"token": "a"}, {"token": "b"}], "refusal": []}
    assert "logprobs" not in body("chat", delta(content="a"), finish())["choices"][0]


def test_old_completion_logprobs_go_on() -> None:
    def with_logprobs(token: str, offset: int) -> bytes:
        logprobs = {"tokens": [token], "text_offset": [offset]}
        return chunk({"index": 0, "text": token, "logprobs": logprobs, "finish_reason": None})

    found = body("completion", with_logprobs("a", 0), with_logprobs("b", 1), DONE)
    assert found["choices"] == [
        {
            "index": 0,
            "text": "ab",
            "logprobs": {"tokens": ["a", "b"], "text_offset": [0, 1]},
            "finish_reason": None,
        }
    ]
    assert found["object"] == "text_completion"


def test_other_fields_of_a_choice_are_kept() -> None:
    found = body(
        "chat", chunk({"index": 0, "delta": {"content": "a"}, "stop_reason": 7}), chunk({"stop_reason": None})
    )
    assert found["choices"][0]["stop_reason"] == 7


def test_the_first_choice_speaks_for_the_whole() -> None:
    found = body(
        "chat",
        delta(1, content="b"),
        delta(0, content="a"),
        finish(1),
        chunk(usage={"of": 1}, timings={"of": 1}),
        finish(0),
        chunk(usage={"of": 0}, timings={"of": 0}),
        DONE,
    )
    assert [choice["message"]["content"] for choice in found["choices"]] == ["a", "b"]
    assert found["usage"] == found["timings"] == {"of": 0}
    found = body(
        "chat", finish(0), chunk(usage={"of": 0}), finish(1), chunk(usage={"of": 1}), chunk(usage=None)
    )
    assert found["usage"] == {"of": 0}


def test_top_level_fields_are_kept_and_null_does_not_erase() -> None:
    found = body(
        "chat",
        chunk(
            {"delta": {"content": "a"}}, id="c1", usage=None, service_tier="x", prompt_progress={"total": 1}
        ),
        chunk(id="c1", usage={"total_tokens": 3}, weather="fine"),
        chunk(id="c1", usage=None),
    )
    assert found == {
        "choices": [
            {"index": 0, "finish_reason": None, "message": {"role": "assistant", "content": "a"}},
        ],
        "id": "c1",
        "object": "chat.completion",
        "usage": {"total_tokens": 3},
        "service_tier": "x",
        "weather": "fine",
    }


@pytest.mark.parametrize(
    ("parts", "complete"),
    [
        ([DONE], False),
        ([chunk(usage={"prompt_tokens": 1}), DONE], False),
        ([b"data: null\n\n", DONE], False),
        ([], False),
        ([delta(content="a")], False),
        ([delta(content="a"), finish()], True),
        ([delta(content="a"), DONE], True),
        ([delta(0, content="a"), delta(1, content="a"), finish(1)], False),
        ([delta(0, content="a"), delta(1, content="a"), finish(1), finish(0)], True),
        ([delta(content="a"), finish(reason="")], False),
        ([delta(content="a"), finish()[:-2]], True),
        ([delta(content="a"), b"data: [DONE] \n\n"], True),
    ],
)
def test_the_end_is_known(parts: list[bytes], complete: bool) -> None:
    assert assembled("chat", *parts).complete == complete


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ('{"code":400,"message":"too long","type":"exceed_context_size_error","n_ctx":2048}', 400),
        ('{"code":503,"message":"Loading model"}', 503),
        ('{"code":200,"message":"odd"}', 500),
        ('{"code":"invalid","message":"odd"}', 500),
        ('{"message":"odd"}', 500),
        ('"odd"', 500),
    ],
)
@pytest.mark.parametrize("dialect", ["chat", "completion", "native"])
def test_an_error_in_the_stream_is_handed_on(dialect: str, error: str, status: int) -> None:
    event = f'data: {{"error":{error},"noise":1}}\n\n'.encode()
    assembler = assembled(dialect, event, delta(content="late"), DONE)
    assert assembler.error == (status, f'{{"error":{error}}}'.encode())
    assert not assembler.complete


def test_a_null_error_is_none() -> None:
    assert assembled("chat", chunk({"delta": {"content": "a"}}, error=None), DONE).complete


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"de\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"\xff"}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"\\ud800"}}]}\n\n',
        b'data: {"choices":' + b"[" * 100_000 + b"\n\n",
    ],
)
def test_an_event_that_is_no_sound_json_is_a_fault(event: bytes) -> None:
    assembler = assembled("chat", delta(content="a"), event, delta(content="b"), DONE)
    assert assembler.fault == "the backend sent an event that is not JSON"
    assert assembler.error is None
    assert not assembler.complete


def test_a_stream_too_large_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "SIZE_LIMIT", 1 << 20)
    assembler = assembled("chat", *[delta(content="A" * 60_000) for _ in range(20)], DONE)
    assert assembler.fault == "the answer is larger than 1 MiB"
    assert not assembler.complete
    assert not assembler._choices


@pytest.mark.parametrize(
    "event",
    [
        b"data: null\n\n",
        b"data: [1]\n\n",
        b'data: {"choices":null}\n\n',
        b'data: {"choices":[7]}\n\n',
        b'data: {"choices":[{"index":0,"delta":7}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[7]}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"logprobs":7}]}\n\n',
        b'data: {"choices":[{"index":"x","delta":{}}]}\n\n',
        b": ping\n\n",
        b"event: x\n\n",
    ],
)
def test_odd_events_are_passed_over(event: bytes) -> None:
    assembler = assembled("chat", delta(content="a"), event, finish(), DONE)
    assert assembler.complete
    assert json.loads(assembler.result())["choices"][0]["message"]["content"] == "a"


def test_a_call_whose_function_is_odd_is_kept() -> None:
    found = message(delta(tool_calls=[{"index": 0, "function": 7}, {"index": 1}]), finish())
    assert found["tool_calls"] == [{"type": "function", "function": 7}, {"type": "function"}]


def native(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_native_tokens_are_told_only_when_asked_for() -> None:
    parts = [
        native(index=0, content="", tokens=[0], stop=False, prompt_progress={"total": 3}),
        native(index=0, content="a", tokens=[5], stop=False),
        native(index=0, content="", tokens=[], stop=True),
    ]
    assert body("native", *parts) == {"index": 0, "content": "a", "tokens": [], "stop": True}
    assert body("native", *parts, tokens=True) == {"index": 0, "content": "a", "tokens": [5], "stop": True}


def test_native_settings_say_what_the_client_asked() -> None:
    last = native(index=0, content="", stop=True, generation_settings={"stream": True, "seed": 7})
    assert body("native", last)["generation_settings"] == {"stream": False, "seed": 7}
    assert body("native", native(stop=True, generation_settings=7))["generation_settings"] == 7


def test_native_fields_that_were_chosen_are_all_there_is() -> None:
    first, second = native(index=0, content="a", stop=False), native(index=1, content="b", stop=False)
    assert body("native", first, second, native(content=""), native(content="")) == [
        {"content": "a"},
        {"content": "b"},
    ]
    assert body("native", first, native(stop_type="eos")) == {"stop_type": "eos"}
    assert body("native", first, native(stop_type="eos"), native(stop_type="late")) == {"stop_type": "late"}


@pytest.mark.parametrize(
    ("parts", "complete"),
    [
        ([], False),
        ([native(index=0, content="a", stop=False)], False),
        ([native(index=0, content="a", stop=False), native(index=0, content="", stop=True)], True),
        ([native(index=0, content="", stop=True), native(index=1, prompt_progress={})], False),
    ],
)
def test_native_is_complete_when_every_prompt_ended(parts: list[bytes], complete: bool) -> None:
    assert assembled("native", *parts).complete == complete


FIELDS = [
    "choices",
    "index",
    "delta",
    "text",
    "logprobs",
    "tool_calls",
    "function",
    "id",
    "name",
    "arguments",
    "content",
    "stop",
    "tokens",
    "error",
    "code",
    "usage",
    "finish_reason",
]


@given(
    st.sampled_from(["chat", "completion", "native"]),
    st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(FIELDS),
                    inner,
                )
            ),
            max_leaves=25,
        ),
        max_size=4,
    ),
)
def test_no_objects_make_it_raise(dialect: str, values: list[Any]) -> None:
    parts = [b"data: " + json.dumps(value).encode() + b"\n\n" for value in values]
    assembler = assembled(dialect, *parts)
    json.loads(assembler.result())


@given(st.sampled_from(["chat", "completion", "native"]), st.lists(st.binary(max_size=30)))
def test_no_bytes_make_it_raise(dialect: str, parts: list[bytes]) -> None:
    assembled(dialect, *(b"data: " + part + b"\n\n" for part in parts)).result()
