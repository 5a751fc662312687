"""What the meter learns, from recordings of the real server and from made-up streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core import payload
from llmgw.core.meter import Meter
from llmgw.core.payload import Said
from llmgw.core.sse import EVENT_LIMIT
from llmgw.core.usual import read_chunk, read_completion
from llmgw.values import Usage

RECORDINGS = Path(__file__).parent / "recordings"
"""Streams and bodies of llama.cpp's own server, build b11549, tiny model."""

SSE = b"text/event-stream"


def dialect_of(name: str) -> str:
    return name.partition("_")[0]


def events_of(stream: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]


def run(
    dialect: str,
    parts: list[bytes],
    content_type: bytes = SSE,
    *,
    end: bool = True,
    prompts: int = 1,
    n: int = 1,
) -> Meter:
    """Part number i arrives at second i + 1."""
    meter = Meter(dialect, prompts=prompts, n=n)
    meter.begin(200, content_type, 0.5)
    for i, part in enumerate(parts):
        meter.feed(part, i + 1.0)
    if end:
        meter.end(len(parts) + 1.0)
    return meter


def recorded(name: str, *, prompts: int = 1) -> Meter:
    stream = (RECORDINGS / f"{name}.sse").read_bytes()
    return run(dialect_of(name), events_of(stream), prompts=prompts)


def chunk(**delta: object) -> bytes:
    data = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("name", "first_s", "content_events", "usage"),
    [
        ("chat_plain", 4, 7, Usage(23, 0, 8)),
        ("chat_stop", 4, 6, Usage(23, 0, 8)),
        ("chat_logprobs", 4, 4, Usage(23, 0, 4)),
        ("chat_max1", 4, 1, Usage(23, 0, 1)),
        ("chat_empty", None, 0, Usage(23, 0, 1)),
        ("chat_timings_per_token", 4, 3, Usage(23, 0, 3)),
        ("chat_reasoning", 4, 6, Usage(29, 0, 13)),
        ("chat_tools", 4, 7, Usage(497, 0, 17)),
        ("chat_n2", 4, 12, Usage(23, 0, 10)),
        ("completion_plain", 3, 4, Usage(3, 0, 4)),
        ("completion_n2", 3, 9, Usage(3, 0, 8)),
        ("native_plain", 3, 4, Usage(3, 0, 4)),
        ("native_tokens", 3, 4, Usage(3, 0, 4)),
        ("native_fields", 3, 4, None),
        ("messages", 3, 7, Usage(23, 22, 8)),
        ("messages_think", 3, 9, Usage(29, 28, 8)),
        ("messages_call", 2, 8, Usage(497, 496, 17)),
        ("responses", 5, 7, Usage(23, 22, 8)),
        ("responses_call", 4, 7, Usage(482, 481, 17)),
    ],
)
def test_recorded_streams_are_read(
    name: str, first_s: float | None, content_events: int, usage: Usage | None
) -> None:
    meter = recorded(name)
    assert meter.first_content_s == first_s
    assert meter.content_events == content_events
    assert meter.usage == usage
    assert meter.finished
    assert not meter.incomplete
    assert not meter.cut_in_event
    assert meter.error is None
    assert meter.first_byte_s == 1.0
    assert meter.done_marker == (dialect_of(name) in ("chat", "completion"))
    events = len(events_of((RECORDINGS / f"{name}.sse").read_bytes()))
    assert meter.events == events
    assert meter.last_s == events + 1


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDINGS.glob("*.sse")))
@pytest.mark.parametrize("size", [1, 5, 13, 4000])
def test_how_a_recording_is_cut_does_not_matter(name: str, size: int) -> None:
    stream = (RECORDINGS / f"{name}.sse").read_bytes()
    whole = recorded(name)
    cut = run(dialect_of(name), [stream[i : i + size] for i in range(0, len(stream), size)])
    for field in ("events", "content_events", "usage", "finished", "done_marker", "prompt_s"):
        assert getattr(cut, field) == getattr(whole, field), field


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("chat_plain", Usage(23, 0, 8)),
        ("completion_plain", Usage(3, 0, 4)),
        ("native_plain", Usage(3, 0, 4)),
        ("native_multi", Usage(6, 0, 6)),
        ("messages", Usage(23, 22, 8)),
        ("responses", Usage(23, 0, 8)),
    ],
)
def test_recorded_bodies_are_read(name: str, usage: Usage) -> None:
    body = (RECORDINGS / f"{name}.json").read_bytes()
    half = len(body) // 2
    prompts = 2 if name == "native_multi" else 1
    content_type = b"application/json; charset=utf-8"
    meter = run(dialect_of(name), [body[:half], body[half:]], content_type, prompts=prompts)
    assert meter.kind == "json"
    assert meter.usage == usage
    assert (meter.first_byte_s, meter.first_content_s, meter.last_s) == (1.0, 1.0, 3.0)
    assert meter.finished
    assert not meter.incomplete
    assert meter.estimated_usage(99) == usage


def test_the_backends_timings_are_read() -> None:
    meter = recorded("chat_plain")
    assert meter.prompt_s == pytest.approx(0.001903)
    assert meter.token_rate == pytest.approx(2818.035)
    assert recorded("messages").prompt_s is None


def test_a_single_token_has_no_rate() -> None:
    assert recorded("chat_max1").token_rate is None


def test_the_rate_comes_from_events_where_nothing_was_told() -> None:
    assert recorded("messages").token_rate == pytest.approx(1.0)
    meter = run("chat", [chunk(content="a"), b": x\n\n", b": x\n\n", chunk(content="b"), DONE])
    assert meter.token_rate == pytest.approx(1 / 3)
    assert run("chat", [chunk(content="a") * 5]).token_rate is None


@pytest.mark.parametrize(
    ("timings", "rate"),
    [
        ('{"predicted_n":10,"predicted_ms":100}', 100.0),
        ('{"predicted_n":10,"predicted_ms":100,"predicted_per_second":90.5}', 90.5),
        ('{"predicted_n":1,"predicted_ms":0.001,"predicted_per_second":0.0}', None),
        ('{"predicted_n":10,"predicted_ms":0}', None),
        ('{"predicted_n":10,"predicted_per_second":true}', None),
        ('{"predicted_n":10,"predicted_per_second":"fast"}', None),
    ],
)
def test_a_rate_is_made_of_what_the_timings_have(timings: str, rate: float | None) -> None:
    event = f'data: {{"choices":[],"timings":{timings}}}\n\n'.encode()
    assert run("chat", [event]).token_rate == rate


def test_usage_comes_from_timings_when_that_is_all() -> None:
    event = b'data: {"choices":[],"timings":{"cache_n":5,"prompt_n":7,"predicted_n":3,"prompt_ms":20}}\n\n'
    meter = run("chat", [event])
    assert meter.usage == Usage(12, 5, 3)
    assert meter.prompt_s == pytest.approx(0.02)


def test_timings_before_the_first_batch_tell_nothing() -> None:
    event = b'data: {"choices":[],"timings":{"cache_n":0,"prompt_n":0,"predicted_n":0,"prompt_ms":0}}\n\n'
    meter = run("chat", [event])
    assert meter.usage is None
    assert meter.prompt_s is None


def test_cached_tokens_are_taken_from_timings_where_usage_is_silent() -> None:
    event = (
        b'data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3},'
        b'"timings":{"cache_n":5,"prompt_n":7,"predicted_n":3}}\n\n'
    )
    assert run("chat", [event]).usage == Usage(12, 5, 3)


@pytest.mark.parametrize(
    ("name", "prompts", "usage"),
    [
        ("chat_n2", 1, Usage(23, 0, 10)),
        ("completion_n2", 1, Usage(3, 0, 8)),
        ("completion_multi", 2, Usage(6, 0, 8)),
        ("native_n2", 1, Usage(3, 0, 6)),
        ("native_multi", 2, Usage(6, 0, 6)),
    ],
)
def test_choices_add_up_and_a_prompt_counts_once(name: str, prompts: int, usage: Usage) -> None:
    assert recorded(name, prompts=prompts).usage == usage


@pytest.mark.parametrize("fields", [{"choices": []}, {}])
def test_timings_of_choices_add_up_too(fields: dict[str, object]) -> None:
    """Without ``include_usage`` they are all that llama-server tells of a chat."""

    def timed(index: int | None, output: int) -> bytes:
        timings = {"cache_n": 1, "prompt_n": 4, "predicted_n": output}
        said = fields if index is None else {"choices": [{"index": index, "delta": {}}]}
        return b"data: " + json.dumps({**said, "timings": timings}).encode() + b"\n\n"

    assert run("chat", [timed(1, 3), timed(0, 1), timed(0, 2), timed(1, 4), DONE]).usage == Usage(5, 1, 6)
    assert run("chat", [timed(1, 3), timed(0, 1), timed(None, 9), DONE]).usage == Usage(5, 1, 4)
    assert run("chat", [timed(None, 9), timed(None, 10), DONE]).usage == Usage(5, 1, 10)


@pytest.mark.parametrize("name", ["chat_n2", "completion_n2", "completion_multi"])
def test_in_one_piece_the_first_choice_stands_for_all(name: str) -> None:
    body = (RECORDINGS / f"{name}.json").read_bytes()
    told = json.loads(body)["usage"]
    prompts, n = (2, 1) if name.endswith("multi") else (1, 2)
    usage = run(dialect_of(name), [body], b"application/json", prompts=prompts, n=n).usage
    assert usage == Usage(told["prompt_tokens"] * prompts, 0, told["completion_tokens"] * 2)


def test_who_tells_the_sum_in_one_piece_is_believed() -> None:
    body = b'{"choices":[{},{}],"usage":{"prompt_tokens":5,"completion_tokens":30}}'
    assert run("chat", [body], b"application/json", n=2).usage == Usage(5, 0, 30)
    body = b'{"choices":[{},{}],"usage":{"completion_tokens":30},"timings":{"predicted_n":15}}'
    assert run("chat", [body], b"application/json", n=2).usage == Usage(0, 0, 60)


def test_a_last_sum_wins_over_running_figures() -> None:
    running = (
        b'data: {"choices":[{"index":%d,"delta":{"content":"a"}}],'
        b'"usage":{"prompt_tokens":5,"completion_tokens":%d}}\n\n'
    )
    total = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":30,"total_tokens":35}}\n\n'
    parts = [running % (0, 1), running % (1, 1), running % (0, 2), running % (1, 2)]
    assert run("chat", parts).usage == Usage(5, 0, 4)
    assert run("chat", [*parts, total]).usage == Usage(5, 0, 30)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"reasoning_content": "a"},
        {"reasoning": "a"},
        {"refusal": "a"},
        {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
        {"function_call": {"name": "f"}},
    ],
)
def test_each_sort_of_content_stops_the_clock(delta: dict[str, object]) -> None:
    role, empty = chunk(role="assistant", content=None), chunk(content="")
    progress = (
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}],"prompt_progress":{"total":9}}\n\n'
    )
    meter = run("chat", [b": ping\n\n", progress, role, empty, chunk(**delta), DONE])
    assert meter.first_byte_s == 1.0
    assert meter.first_content_s == 5.0
    assert meter.last_content_s == 5.0
    assert meter.events == 5
    assert meter.content_events == 1


@pytest.mark.parametrize(
    ("data", "content"),
    [
        ('{"type":"ping"}', False),
        ('{"type":"content_block_start","content_block":{"type":"text","text":""}}', False),
        ('{"type":"content_block_start","content_block":{"type":"tool_use","name":"f"}}', True),
        ('{"type":"content_block_delta","delta":{"type":"text_delta","text":""}}', False),
        ('{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"a"}}', True),
        ('{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}', True),
        ('{"type":"content_block_delta","delta":7}', False),
        ('{"type":"response.created","response":{}}', False),
        ('{"type":"response.output_text.delta","delta":""}', False),
        ('{"type":"response.reasoning_text.delta","delta":"a"}', True),
        ('{"type":"transcript.text.delta","delta":"a"}', True),
        ('{"content":"a","stop":false}', True),
        ('{"content":"","stop":false}', False),
        ('{"content":["a"],"stop":false}', False),
        ('{"response":"a","done":false}', True),
        ('{"thinking":"a","response":"","done":false}', True),
        ('{"message":{"role":"assistant","content":"a"},"done":false}', True),
        ('{"message":{"role":"assistant","content":"","thinking":"a"},"done":false}', True),
        ('{"message":{"role":"assistant","content":""},"done":false}', False),
        ('{"choices":[{"text":"a"}]}', True),
        ('{"choices":[{"text":""}]}', False),
        ('{"choices":[7]}', False),
        ("{}", False),
    ],
)
def test_content_is_known_by_its_shape(data: str, content: bool) -> None:
    meter = run("other", [f"data: {data}\n\n".encode()])
    assert meter.content_events == content
    assert (meter.first_content_s is not None) == content


NDJSON = [
    b'{"model":"m","message":{"role":"assistant","content":"Hel"},"done":false}\n',
    b'{"model":"m","message":{"role":"assistant","content":"lo"},"done":false}\n',
    b'{"model":"m","message":{"role":"assistant","content":""},"done":true,"done_reason":"stop","prompt_eval_count":11,'
    b'"prompt_eval_duration":130000000,"eval_count":18,"eval_duration":250000000}\n',
]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_ollama_streams_lines(size: int) -> None:
    stream = b"\n".join(NDJSON)[:-1]
    meter = run("other", [stream[i : i + size] for i in range(0, len(stream), size)], b"application/x-ndjson")
    assert meter.kind == "ndjson"
    assert (meter.events, meter.content_events) == (3, 2)
    assert meter.usage == Usage(11, 0, 18)
    assert meter.prompt_s == pytest.approx(0.13)
    assert meter.token_rate == pytest.approx(72.0)
    assert meter.finished
    assert not meter.incomplete


def test_a_cut_ollama_stream_is_incomplete() -> None:
    meter = run("other", [NDJSON[0], NDJSON[1][:20]], b"application/x-ndjson", end=False)
    assert meter.incomplete
    assert meter.cut_in_event
    assert not meter.at_line_start
    assert meter.estimated_usage(9) == Usage(9, 0, 1)


def test_an_ollama_line_too_long_is_passed_over() -> None:
    long = b'{"x":"' + b"A" * EVENT_LIMIT + b'"}'
    for parts in ([long + b"\n" + NDJSON[0]], [long[:-2], b"A" * 9, long[-2:], b"\n" + NDJSON[0]]):
        meter = run("other", parts, b"application/x-ndjson", end=False)
        assert (meter.events, meter.content_events) == (1, 1)
        assert not meter.cut_in_event
        assert not meter.incomplete  # nobody can tell
    meter = run("other", [long + b"x"], b"application/x-ndjson", end=False)
    assert meter.cut_in_event


def test_ollama_without_durations_has_no_rate() -> None:
    line = b'{"response":"","done":true,"eval_count":0,"prompt_eval_count":3}\n'
    meter = run("other", [line], b"application/x-ndjson")
    assert meter.usage == Usage(3, 0, 0)
    assert meter.token_rate is None


def test_a_stream_that_only_stops_is_incomplete() -> None:
    meter = run("chat", [chunk(content="half")])
    assert meter.incomplete
    assert not meter.finished
    assert not meter.cut_in_event


def test_done_alone_finishes() -> None:
    meter = run("chat", [chunk(content="a"), DONE], end=False)
    assert meter.done_marker
    assert meter.finished
    assert not meter.incomplete


def test_a_finish_reason_finishes_without_done() -> None:
    meter = run("chat", [chunk(content="a"), FINISH])
    assert meter.finished
    assert not meter.done_marker


def test_an_empty_finish_reason_is_none() -> None:
    meter = run("chat", [chunk(content="a"), FINISH.replace(b'"stop"', b'""')])
    assert meter.incomplete


def test_a_cut_inside_an_event_is_known() -> None:
    meter = run("chat", [chunk(content="a"), chunk(content="b")[:20]], end=False)
    assert meter.cut_in_event
    assert not meter.at_line_start
    assert meter.incomplete
    assert run("chat", [chunk(content="a")], end=False).at_line_start


def test_a_last_event_without_a_newline_is_read() -> None:
    meter = run("chat", [chunk(content="a"), FINISH[:-2]])
    assert meter.finished


def test_events_in_one_read_are_counted_one_by_one() -> None:
    first, *rest = [chunk(content=c) for c in "abcdef"]
    meter = run("chat", [first, b"".join(rest) + FINISH + DONE])
    assert (meter.events, meter.content_events) == (8, 6)
    assert meter.finished


@pytest.mark.parametrize(
    ("dialect", "event", "message"),
    [
        ("chat", b'data: {"error":{"code":500,"message":"boom","type":"server_error"}}\n\n', "boom"),
        ("chat", b'data: {"error":"boom"}\n\n', "boom"),
        ("chat", b'data: {"error":{"type":"server_error"}}\n\n', "server_error"),
        ("chat", b'data: {"error":{"message":7}}\n\n', "error"),
        ("chat", b'data: {"error":[1]}\n\n', "error"),
        ("chat", b'data: {"error":null,"choices":[]}\n\n', None),
        ("chat", b'data: {"object":"error","message":"boom"}\n\n', "boom"),
        ("messages", b'event: error\ndata: {"type":"error","error":{"message":"boom"}}\n\n', "boom"),
        ("responses", b'event: error\ndata: {"type":"error","message":"boom"}\n\n', "boom"),
        ("responses", b'event: error\ndata: {"type":"error"}\n\n', "error"),
        (
            "responses",
            b'data: {"type":"response.failed","response":{"error":{"code":"x","message":"boom"}}}\n\n',
            "boom",
        ),
        ("responses", b'data: {"type":"response.failed","response":{"error":null}}\n\n', "error"),
        ("responses", b'data: {"type":"response.created","response":{"error":null}}\n\n', None),
        ("chat", b'data: {"error":"' + b"x" * 999 + b'"}\n\n', "x" * 200),
    ],
)
def test_errors_inside_a_stream_are_seen(dialect: str, event: bytes, message: str | None) -> None:
    assert run(dialect, [event]).error == message


def test_an_error_after_content_is_seen() -> None:
    meter = run("chat", [chunk(content="a"), b'data: {"error":{"message":"boom"}}\n\n'])
    assert meter.error == "boom"
    assert meter.content_events == 1
    assert meter.incomplete


def test_an_error_body_is_seen() -> None:
    meter = Meter("chat")
    meter.begin(400, b"application/problem+json", 0.0)
    meter.feed(b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}', 1.0)
    meter.end(2.0)
    assert meter.status == 400
    assert meter.error == "too long"
    assert meter.usage is None


@pytest.mark.parametrize(
    ("content_type", "kind"),
    [
        (b"text/event-stream; charset=utf-8", "sse"),
        (b" Text/Event-Stream ", "sse"),
        (b"application/x-ndjson", "ndjson"),
        (b"application/json", "json"),
        (b"application/problem+json", "json"),
        (b"audio/mpeg", "other"),
        (None, "other"),
    ],
)
def test_the_content_type_tells_the_kind(content_type: bytes | None, kind: str) -> None:
    meter = Meter("chat")
    meter.begin(200, content_type, 3.0)
    assert meter.kind == kind
    assert meter.head_s == 3.0


def test_other_bodies_are_only_timed() -> None:
    meter = run("other", [b"\x00\x01", b"", b"\xff"], b"audio/mpeg")
    assert (meter.first_byte_s, meter.first_content_s, meter.last_content_s) == (1.0, 1.0, 3.0)
    assert meter.finished
    assert meter.usage is None
    assert not meter.incomplete


def test_an_empty_read_is_no_first_byte() -> None:
    meter = run("chat", [b"", b": x\n\n"])
    assert meter.first_byte_s == 2.0


def test_an_estimate_stands_in_where_nothing_was_told() -> None:
    parts = [chunk(content=c) for c in "abc"]
    assert run("chat", parts).estimated_usage(40) == Usage(40, 0, 3)
    assert run("chat", []).estimated_usage(40) == Usage(40, 0, 0)


@pytest.mark.parametrize("content_type", [b"application/json", b"text/html", None])
def test_a_refused_request_used_nothing(content_type: bytes | None) -> None:
    meter = Meter("chat")
    meter.begin(422, content_type, 0.5)
    meter.feed(b'{"error":{"message":"no"}}', 1.0)
    meter.end(1.0)
    assert meter.estimated_usage(40) == Usage()


def test_an_estimate_uses_what_was_told_before_the_cut() -> None:
    stream = events_of((RECORDINGS / "messages.sse").read_bytes())
    assert run("messages", stream[:5], end=False).estimated_usage(40) == Usage(23, 22, 3)
    stream = events_of((RECORDINGS / "chat_timings_per_token.sse").read_bytes())
    assert run("chat", stream[:5], end=False).estimated_usage(40) == Usage(23, 0, 2)
    early = run("chat", [*stream[:4], chunk(content="a"), chunk(content="b")], end=False)
    assert early.usage == Usage(23, 0, 1)
    assert early.estimated_usage(40) == Usage(23, 0, 3)


@pytest.mark.parametrize("where", ["first", "last"])
def test_usage_is_found_in_a_body_too_large_to_keep(where: str) -> None:
    usage = b'"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":3}}'
    data = b'"data":[{"embedding":[' + b"0.125," * 600_000 + b"0]}]"
    body = b"{" + (usage + b"," + data if where == "first" else data + b"," + usage) + b"}"
    meter = run("embedding", [body[i : i + 60_000] for i in range(0, len(body), 60_000)], b"application/json")
    assert meter.usage == Usage(7, 3, 2)
    assert meter.finished


def test_memory_is_bounded_on_a_large_body() -> None:
    meter = Meter("embedding")
    meter.begin(200, b"application/json", 0.0)
    for _ in range(100):
        meter.feed(b"1" * 65536, 1.0)
    assert len(meter._body) + len(meter._head) <= 4 * 65536
    meter.end(2.0)
    assert meter.usage is None


@pytest.mark.parametrize(
    "body", [b"", b"[", b"null", b"[1]", b'{"usage":7}', b"\xff", b'{"a":' + b"[" * 200_000]
)
def test_a_broken_body_tells_nothing(body: bytes) -> None:
    meter = run("chat", [body], b"application/json")
    assert meter.usage is None
    assert meter.error is None


def test_a_list_of_embeddings_tells_nothing() -> None:
    assert run("other", [b'[{"index":0,"embedding":[[0.5]]}]'], b"application/json").usage is None


@pytest.mark.parametrize(
    "usage",
    [
        b'{"prompt_tokens":true,"completion_tokens":-1}',
        b'{"prompt_tokens":"7"}',
        b'{"prompt_tokens":99999999999999999999999}',
        b'{"prompt_tokens":null,"prompt_tokens_details":7}',
    ],
)
def test_figures_that_cannot_be_are_not_believed(usage: bytes) -> None:
    meter = run("chat", [b'data: {"choices":[],"usage":' + usage + b"}\n\n"])
    assert meter.usage == Usage(0, 0, 0)


@pytest.mark.parametrize(
    "usage",
    [
        (
            b'{"input_tokens":3,"cache_read_input_tokens":5,"cache_creation_input_tokens":7,"output_tokens":2}',
            Usage(15, 5, 2),
        ),
        (b'{"cache_read_input_tokens":5,"output_tokens":2}', Usage(5, 5, 2)),
        (b'{"input_tokens":9,"output_tokens":2,"input_tokens_details":{"cached_tokens":4}}', Usage(9, 4, 2)),
        (b'{"prompt_tokens":9,"total_tokens":9}', Usage(9, 0, 0)),
        (b'{"prompt_tokens":9.0,"completion_tokens":2}', Usage(9, 0, 2)),
    ],
)
def test_every_dialects_usage_is_understood(usage: tuple[bytes, Usage]) -> None:
    assert run("other", [b'{"usage":' + usage[0] + b"}"], b"application/json").usage == usage[1]


def test_message_start_without_usage_is_harmless() -> None:
    meter = run("messages", [b'data: {"type":"message_start","message":7}\n\n'])
    assert meter.usage is None


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n',
        b'data: {"usage":{"prompt_tokens":1}}\n\n',
    ],
)
def test_usage_is_seen_with_choices_empty_or_missing(event: bytes) -> None:
    assert run("chat", [chunk(content="a"), event, DONE]).usage == Usage(1, 0, 0)


def test_null_choices_are_harmless() -> None:
    assert run("chat", [chunk(content="a"), b'data: {"choices":null}\n\n', DONE]).finished


def test_an_event_too_long_costs_only_itself() -> None:
    long = b'data: {"choices":[{"delta":{"content":"' + b"A" * (3 << 20) + b'"}}]}\n\n'
    meter = run("chat", [long[i : i + 65536] for i in range(0, len(long), 65536)] + [chunk(content="a")])
    assert meter.content_events == 1
    assert not meter.incomplete


def test_names_are_read_from_the_data_where_no_event_line_says_them() -> None:
    delta = b'data: {"type":"response.output_text.delta","delta":"a"}\n\n'
    meter = run("responses", [delta, delta, b'data: {"type":"response.completed","response":{}}\n\n'])
    assert (meter.events, meter.content_events) == (3, 2)
    assert meter.finished


@given(
    dialect=st.sampled_from(["chat", "completion", "native", "responses", "messages", "embedding", "other"]),
    data=st.lists(st.binary(max_size=60) | st.sampled_from([*NDJSON, FINISH, DONE, chunk(content="a")])),
)
def test_no_bytes_make_it_raise(dialect: str, data: list[bytes]) -> None:
    for content_type in (SSE, b"application/json", b"application/x-ndjson"):
        meter = run(dialect, data, content_type)
        assert meter.estimated_usage(1).total >= 0
        assert meter.token_rate is None or meter.token_rate > 0


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*payload._Object.__struct_fields__, "finish_reason", "text"]), inner
            )
        ),
        max_leaves=20,
    )
)
def test_no_object_makes_it_raise(value: object) -> None:
    data = json.dumps(value).encode()
    for dialect in ("chat", "native", "messages", "responses", "other"):
        run(
            dialect,
            [chunk(content="a"), b'data: {"content":"a","stop":false}\n\n', b"data: " + data + b"\n\n"],
        )
        run(dialect, [data], b"application/json")
    payload.read_fragment(b'"usage":' + data + b'"timings":' + data)


def test_deep_nesting_is_harmless() -> None:
    deep = b"[" * 100_000
    meter = run("chat", [b'data: {"usage":' + deep + b"\n\n", b'data: {"choices":' + deep + b"\n\n", DONE])
    assert meter.events == 3


def test_text_that_is_no_utf_8_is_harmless() -> None:
    meter = run("chat", [b'data: {"choices":[],"usage":"\xff"}\n\n', b'data: {"choices":"\xff"}\n\n', DONE])
    assert meter.usage is None
    assert meter.finished


# --- the usual objects --------------------------------------------------------

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.sampled_from([1.5, 3.0, 1e19, 1 << 40, "", "a", "error"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(payload._Object.__struct_fields__), inner, max_size=3)
    ),
    max_leaves=6,
)
extras = st.just({}) | st.dictionaries(
    st.sampled_from(payload._Object.__struct_fields__), anything, max_size=2
)
counts = st.integers(0, 50) | st.sampled_from([None, True, -1, 2.0, 2.5, 1 << 40, 1 << 70, "7"])
figures = st.floats(0, 1000) | st.sampled_from([None, 0, 7, -1.0, True, 1e300, 10**25, "x"])
kinds = st.sampled_from([None, "chat.completion", "chat.completion.chunk", "text_completion", "error"])


def some(**members: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries({}, optional=members)


whole_usage = st.fixed_dictionaries(
    {"prompt_tokens": st.integers(0, 50), "completion_tokens": st.integers(0, 50)},
    optional={
        "prompt_tokens_details": st.none() | some(cached_tokens=counts),
        "input_tokens": counts,
        "cache_read_input_tokens": counts,
    },
)
whole_timings = st.fixed_dictionaries(
    {"cache_n": st.integers(0, 9), "prompt_n": st.integers(0, 9), "predicted_n": st.integers(0, 9)},
    optional={"prompt_ms": figures, "predicted_ms": figures, "predicted_per_second": figures},
)
choices = st.lists(
    some(
        index=st.integers(0, 2),
        delta=anything
        | some(
            content=st.sampled_from(["a", "", None]), reasoning=st.sampled_from(["r", None]), audio=anything
        ),
        text=st.sampled_from(["a", "", None, 7]),
        finish_reason=st.sampled_from([None, None, None, "stop", ""]),
    ),
    max_size=2,
)


@given(choices, some(object=kinds), extras)
def test_a_usual_chunk_says_what_the_general_reader_says(
    choices: object, named: dict[str, object], extra: dict[str, object]
) -> None:
    event = json.dumps({"choices": choices, **named, **extra}).encode()
    content = read_chunk(event)
    if content is not None:
        said = payload.read(event)
        assert said is not None
        assert said == Said(content=content, choice=said.choice)


@given(
    whole_usage | some(prompt_tokens=counts, completion_tokens=counts, output_tokens=counts),
    some(timings=whole_timings | some(prompt_n=counts, predicted_n=counts), object=kinds),
    extras,
)
def test_a_usual_answer_says_what_the_general_reader_says(
    usage: object, named: dict[str, object], extra: dict[str, object]
) -> None:
    body = json.dumps({"usage": usage, **named, **extra}).encode()
    said = read_completion(body)
    if said is not None:
        assert [said] == payload.read_body(body)


@pytest.mark.parametrize(
    ("event", "content"),
    [
        ('{"choices":[{"delta":{"content":"a"}}]}', True),
        ('{"choices":[{"delta":{"role":"assistant","content":null}}],"usage":null}', False),
        ('{"choices":[{"text":""},{"text":"a"}],"object":"text_completion"}', True),
        ('{"choices":[{"delta":{"refusal":"no"}}]}', True),
        ('{"choices":[{"delta":{"tool_calls":[{}]}}]}', None),
        ('{"choices":[{"text":"a","finish_reason":"stop"}]}', None),
        ('{"choices":[{"text":"a"}],"object":"error"}', None),
        ('{"choices":[{"text":"a"}],"tokens_predicted":null}', None),
        ('{"choices":[{"text":"a"}],"eval_count":null}', None),
        ('{"choices":[]}', None),
        ("[DONE]", None),
    ],
)
def test_what_is_not_usual_is_left_to_the_general_reader(event: str, content: bool | None) -> None:
    assert read_chunk(event.encode()) is content


@pytest.mark.parametrize(
    "rest",
    [
        '"usage":{"prompt_tokens":1,"completion_tokens":2,"input_tokens":null}',
        '"usage":{"prompt_tokens":1,"completion_tokens":2,"cache_read_input_tokens":null}',
        '"usage":{"prompt_tokens":1}',
        '"usage":{"prompt_tokens":1,"completion_tokens":2},"error":"boom"',
        '"usage":{"prompt_tokens":1,"completion_tokens":2},"object":"error"',
        '"choices":[]',
    ],
)
def test_an_answer_that_is_not_usual_is_left_to_the_general_reader(rest: str) -> None:
    assert read_completion(b"{%b}" % rest.encode()) is None


def test_white_space_between_field_and_data_is_no_whole_event() -> None:
    odd = b'data: \n{"choices":[{"delta":{"content":"a"}}]}\n\n'
    meter = run("chat", [chunk(content="a"), odd, chunk(content="b")])
    assert (meter.events, meter.content_events) == (3, 2)


def test_a_native_end_that_says_nothing_else_finishes() -> None:
    """It reads like a piece until its ``stop`` is looked at."""
    meter = Meter("native")
    meter.begin(200, b"text/event-stream", 0.0)
    for n in range(3):
        meter.feed(b'data: {"content":"a","stop":false}\n\n', float(n))
    end = b'data: {"content":"","stop":true}\n\n'
    assert not meter.takes_plain(end, 0, len(end), 3.0)
    meter.feed(end, 3.0)
    assert (meter.finished, meter.content_events) == (True, 3)
