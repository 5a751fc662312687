"""Section 1 of the cases: events pass as they came, when they came."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from cases.scenes import (
    DONE,
    LAST_CHUNK,
    SSE_HEAD,
    STEADY,
    STOP,
    USAGE,
    Line,
    Received,
    Scene,
    ask_stream,
    by_case,
    chunk,
    elapsed_since,
    event,
    eventually,
    request_id,
    scene,
    side_by_side,
    streaming,
)
from llmgw.config.schema import Timeouts

M = 'models = ["m"]'
PING = b": ping\n"
SOON_S = 0.5
"""What is passed on at once has arrived by then, on a busy machine too."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """As configured by default."""
    with scene(tmp_path_factory.mktemp("plain"), b=M) as found:
        yield found


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Asks for the usage event itself, since a limit is in tokens, and keeps quiet streams alive."""
    limits = "\n[[rate_limits]]\ntokens_per_minute = 100000000\n\n[timeouts]\nheartbeat_s = 1\n"
    with scene(tmp_path_factory.mktemp("counting"), STEADY + limits, b=M) as found:
        yield found


@pytest.fixture(params=["plain", "counting"])
def either(request: pytest.FixtureRequest) -> Scene:
    """Whatever holds with both."""
    found: Scene = request.getfixturevalue(request.param)
    return found


# --- bytes ---------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["a chunk for each piece", "one chunk, its framing cut too"])
def test_s_sse_1_event_split_over_segments(either: Scene, framing: str) -> None:
    """A read is an arbitrary range of bytes: they pass unchanged, and the usage counts once."""
    pieces = [USAGE[i : i + 5] for i in range(0, len(USAGE) - 2, 5)]
    pieces = [*pieces[:-1], pieces[-1].rstrip(b"\n"), b"\n", b"\n"]
    assert b"".join(pieces) == USAGE
    if framing.startswith("one"):
        raw = chunk(USAGE)
        sent = [raw[i : i + 5] for i in range(0, len(raw), 5)]
    else:
        sent = [chunk(piece) for piece in pieces]

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD)
        line.send(*sent, gap_s=0.004)
        line.send(LAST_CHUNK)

    either.backend.play(script)
    before = either.count("llmgw_tokens_total")
    id = request_id()
    answer = either.ask(ask_stream(id=id, stream_options={"include_usage": True}))
    assert (answer.status, answer.body, answer.clean) == (200, USAGE, True)
    either.expect(id, prompt_tokens=11, cached_tokens=5, output_tokens=7)
    # Prompt, cached part and output, each once.
    assert either.count("llmgw_tokens_total") - before in (11 + 7, 11 + 5 + 7)


def test_s_sse_2_crlf_in_different_segments(plain: Scene) -> None:
    """CR, LF and CRLF end a line, and the space after the colon may lack."""
    first = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\r'
    second = b"\n\r\n" + USAGE.replace(b"data: ", b"data:").rstrip(b"\n") + b"\r\n\r\n"
    seen = threading.Event()

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(first))
        assert seen.wait(5)
        line.send(chunk(second), LAST_CHUNK)

    plain.backend.play(script)
    id = request_id()
    with plain.client() as client:
        client.send(ask_stream(id=id))
        client.read_head()
        assert client.read_until(b"\r\n") == b"%x\r\n" % len(first)
        assert client.read_until(b"\r") == first  # at once, though the LF may follow
        seen.set()
        assert client.read_until(LAST_CHUNK) == b"\r\n" + chunk(second) + LAST_CHUNK
    line = plain.line(id)
    assert line["ttft_s"] > 0
    assert (line["prompt_tokens"], line["output_tokens"]) == (11, 7)


def test_s_sse_3_comments_stay_comments(either: Scene) -> None:
    pieces = [b": PROCESSING\n\n"] * 3 + [event("a"), STOP, DONE]
    either.backend.play(streaming(*pieces))
    answer = either.ask(ask_stream())
    assert (answer.body, answer.clean) == (b"".join(pieces), True)


def test_s_sse_5_last_line_without_newline(either: Scene) -> None:
    pieces = [event("a"), b'data: {"err":1}']
    either.backend.play(streaming(*pieces))
    answer = either.ask(ask_stream())
    assert (answer.body, answer.clean) == (b"".join(pieces), True)


@pytest.mark.parametrize("rest", [b'data: {"err":1}', b"data: [DONE]", b"data: [DONE]\n"])
def test_s_sse_5_the_end_of_the_body_may_come_by_itself(either: Scene, rest: bytes) -> None:
    """Also where events are held until they are whole: what is left then is the client's."""

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("a")), chunk(rest), LAST_CHUNK, gap_s=0.05)

    either.backend.play(script)
    answer = either.ask(ask_stream())
    assert (answer.body, answer.clean) == (event("a") + rest, True)


def test_s_sse_6_connection_lingers_after_done(plain: Scene) -> None:
    """After ``[DONE]`` the backend has one second to end its body; then it is done without it."""
    plain.backend.play(lambda line, request: line.send(SSE_HEAD, chunk(event("a") + STOP + DONE)))
    begun_s = time.monotonic()
    with plain.client() as client:
        client.send(ask_stream())
        client.read_until(DONE)
        assert elapsed_since(begun_s) < SOON_S
        client.read_until(LAST_CHUNK)
    assert elapsed_since(begun_s) < 2.5
    eventually(lambda: not plain.backend.open_lines)
    plain.settled()
    assert plain.member("b")["failure_streak"] == 0


def test_s_sse_7_done_missing_at_clean_end(either: Scene) -> None:
    """Nothing is made up; the access log calls it ``incomplete``. No error event is added: what
    came ended as its framing says, and some backends never send ``[DONE]``."""
    either.backend.play(streaming(event("half")))
    id = request_id()
    answer = either.ask(ask_stream(id=id))
    assert (answer.status, answer.body, answer.clean) == (200, event("half"), True)
    either.expect(id, outcome="incomplete")


def test_s_sse_8_neighbours_of_a_read_event(either: Scene) -> None:
    """Reading one event leaves those beside it alone."""
    segment = event("last") + USAGE + DONE
    either.backend.play(streaming(segment))
    id = request_id()
    answer = either.ask(ask_stream(id=id, stream_options={"include_usage": True}))
    assert (answer.body, answer.clean) == (segment, True)
    either.expect(id, output_tokens=7, outcome="done")


@pytest.mark.parametrize("cut", [None, 1, 7])
def test_s_sse_8_only_the_uninvited_usage_event_goes(counting: Scene, cut: int | None) -> None:
    """The gateway asked for it, not the client: it goes, and no other byte with it."""
    whole = event("last") + USAGE + DONE
    pieces = [whole] if cut is None else [whole[i : i + cut] for i in range(0, len(whole), cut)]
    counting.backend.play(streaming(*pieces))
    answer = counting.ask(ask_stream())
    assert (answer.body, answer.clean) == (event("last") + DONE, True)
    assert counting.backend.requests[0].json["stream_options"] == {"include_usage": True}


ODD = {
    "choices empty": USAGE,
    "choices missing": b'data: {"usage":{"prompt_tokens":11,"completion_tokens":7}}\n\n',
    "choices null": b'data: {"choices":null}\n\n',
    "usage null": b'data: {"choices":[],"usage":null}\n\n',
    "usage of words": b'data: {"choices":[],"usage":"none"}\n\n',
    "counts of words": b'data: {"choices":[],"usage":{"prompt_tokens":"x","completion_tokens":[]}}\n\n',
    "an array": b"data: []\n\n",
    "null": b"data: null\n\n",
    "no JSON": b"data: {not json\n\n",
    "no UTF-8": b'data: {"choices":[{"delta":{"content":"\xff\xfe"}}]}\n\n',
    "deep": b"data: " + b"[" * 30_000 + b"\n\n",
    "a huge number": b'data: {"choices":[],"usage":{"completion_tokens":' + b"9" * 5000 + b"}}\n\n",
    "no data": b"event: x\nid: 1\nretry: 5\n\n",
    "only line ends": b"\r\r\n\n\n\r",
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_s_sse_9_odd_events_never_end_the_stream(either: Scene, odd: bytes) -> None:
    pieces = [odd, event("a"), odd, STOP, DONE]
    either.backend.play(streaming(*pieces, gap_s=0.001))
    answer = either.ask(ask_stream(stream_options={"include_usage": True}))
    assert (answer.status, answer.body, answer.clean) == (200, b"".join(pieces), True)


def test_s_sse_10_tool_calls_are_not_touched(either: Scene) -> None:
    """Without ``index`` or ``id``, or two with the same one: no business of ours."""
    pieces = [
        b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"name":"a","arguments":"{"}}]}}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"id":"x","function":{"name":"a"}},'
        b'{"index":0,"function":{"name":"b","arguments":""}}]}}]}\n\n',
        STOP,
        DONE,
    ]
    either.backend.play(streaming(*pieces))
    answer = either.ask(ask_stream())
    assert (answer.body, answer.clean) == (b"".join(pieces), True)


def test_s_sse_11_one_very_long_line(either: Scene) -> None:
    """It passes; only its own usage is given up, not the next event's, nor the memory for it."""
    size = 16 << 20
    long = b'data: {"choices":[],"image":"' + b"QUJD" * (size // 4) + b'"}\n\n'
    pieces = [event("a"), *[long[i : i + 65536] for i in range(0, len(long), 65536)], USAGE, STOP, DONE]
    either.backend.play(streaming(*pieces))
    either.ask(ask_stream())  # whatever is allocated once is allocated now
    either.forget_peak()
    before = either.memory("VmRSS")
    id = request_id()
    answer = either.ask(ask_stream(id=id, stream_options={"include_usage": True}))
    assert answer.clean
    assert answer.body == b"".join(pieces)
    assert either.memory("VmHWM") - before < 8
    either.expect(id, output_tokens=7, outcome="done")


def test_s_sse_12_named_events_of_the_responses_api(either: Scene) -> None:
    """``event:`` lines stay, usage stands in ``response.completed``, and there is no ``[DONE]``."""
    pieces = [
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"hi"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":'
        b'{"input_tokens":11,"output_tokens":7,"input_tokens_details":{"cached_tokens":5}}}}\n\n',
    ]
    either.backend.play(streaming(*pieces))
    id = request_id()
    answer = either.ask(ask_stream("/v1/responses", id=id, input="hi"))
    assert (answer.body, answer.clean) == (b"".join(pieces), True)
    either.expect(id, outcome="done", prompt_tokens=11, output_tokens=7)


def test_every_prompt_of_a_list_and_every_choice_is_counted(either: Scene) -> None:
    """llama-server tells each choice's tokens by itself: of two prompts, and of two answers to one."""
    texts = [
        b'data: {"choices":[{"index":%d,"text":"a","finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":%d,"completion_tokens":3}}\n\n' % (index, tokens)
        for index, tokens in ((0, 4), (1, 7))
    ]
    either.backend.play(streaming(*texts, DONE))
    id = request_id()
    assert either.ask(ask_stream("/v1/completions", id=id, prompt=["a", "b"])).body == b"".join(
        [*texts, DONE]
    )
    either.expect(id, prompt_tokens=11, output_tokens=6)
    chats = [
        b'data: {"choices":[{"index":%d,"delta":{},"finish_reason":"stop"}],'
        b'"timings":{"cache_n":1,"prompt_n":4,"predicted_n":3}}\n\n' % index
        for index in (1, 0)
    ]
    either.backend.play(streaming(*chats, DONE))
    id = request_id()
    assert either.ask(ask_stream(id=id, n=2)).status == 200
    either.expect(id, prompt_tokens=5, cached_tokens=1, output_tokens=6)


# --- time ----------------------------------------------------------------------


def test_s_sse_13_head_and_comments_pass_when_sent(either: Scene) -> None:
    """Nothing waits for "something visible"."""
    go = threading.Semaphore(0)

    def script(line: Line, request: Received) -> None:
        for piece in (SSE_HEAD, chunk(b": one\n\n"), chunk(b": two\n\n"), chunk(event("a")) + LAST_CHUNK):
            assert go.acquire(timeout=5)
            line.send(piece)

    either.backend.play(script)
    with either.client(SOON_S) as client:
        client.send(ask_stream())
        go.release()
        assert client.read_head()[0] == 200
        for mark in (b": one\n\n\r\n", b": two\n\n\r\n", LAST_CHUNK):
            go.release()
            client.read_until(mark)


def test_s_sse_13_head_passes_though_the_first_event_is_held(counting: Scene) -> None:
    """An event that may have to go is held until it is whole; the head is not held with it."""
    go = threading.Event()

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD + chunk(b'data: {"choices'))
        assert go.wait(5)
        line.send(chunk(b'":[]}\n\n') + LAST_CHUNK)

    counting.backend.play(script)
    with counting.client(SOON_S) as client:
        client.send(ask_stream())
        assert client.read_head()[0] == 200
        go.set()
        client.read_until(LAST_CHUNK)


QUIET_S = 1.7
"""Longer than the heartbeat and the sweep that looks for it."""


def test_s_sse_4_no_heartbeat_by_default() -> None:
    assert Timeouts().heartbeat_s == 0


def whole_answer_with_a_pause(line: Line, request: Received) -> None:
    line.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{")
    time.sleep(QUIET_S)
    line.send(b"}")


def late_status(line: Line, request: Received) -> None:
    time.sleep(QUIET_S)
    line.send(b"HTTP/1.1 418 X\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")


FIRST, SECOND = b"id: 1\n" + event("a"), b"id: 2\n" + event("b")
INSIDE = {
    "in a line": (b'id: 1\ndata: {"choices":[{"index":0,"delta":', b'{"content":"a"}}]}\n\n'),
    "between lines": (b"id: 1\n", event("a")),
    "before the blank line": (event("a")[:-1], b"\n"),
    "in a CRLF": (event("a")[:-2] + b"\r\n\r", b"\n" + event("b")),
    "in a usage event that is held": (event("a") + USAGE[:30], USAGE[30:]),
}


def test_s_sse_4_heartbeats(counting: Scene) -> None:
    """``: ping`` and one line end, without the blank line that strict SDKs take for an event;
    only between events of a stream, and never before the status, which it would fix at 200."""
    scripts = {
        "between events": streaming(FIRST, SECOND, DONE, gap_s=QUIET_S),
        "before the status": late_status,
        "no stream": whole_answer_with_a_pause,
        **{name: streaming(a, b + DONE, gap_s=QUIET_S) for name, (a, b) in INSIDE.items()},
    }
    counting.backend.play(by_case(scripts))
    options = {"include_usage": True}
    answers = dict(
        zip(
            scripts,
            side_by_side(lambda name: counting.ask(ask_stream(case=name, stream_options=options)), scripts),
            strict=True,
        )
    )
    late, whole, pinged = (answers.pop(name) for name in ("before the status", "no stream", "between events"))
    assert (late.status, late.body) == (418, b"{}")
    assert (whole.body, whole.clean) == (b"{}", True)
    assert pinged.clean
    assert pinged.body.startswith(FIRST + PING)
    assert pinged.body.count(PING) >= 2
    assert pinged.body.replace(PING, b"") == FIRST + SECOND + DONE
    for name, answer in answers.items():
        assert (answer.body, answer.clean) == (b"".join(INSIDE[name]) + DONE, True), name
