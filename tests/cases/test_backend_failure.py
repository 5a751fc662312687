"""Section 3 of the cases, and the deadlines of ``[timeouts]``: backends that die, stall or refuse."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness import COMPLETION, answer_completion, free_port, json_response

from cases.scenes import (
    DONE,
    LAST_CHUNK,
    SSE_HEAD,
    STEADY,
    STOP,
    USAGE,
    Answer,
    Line,
    Received,
    Scene,
    Script,
    answered,
    ask_stream,
    ask_whole,
    by_case,
    chunk,
    elapsed_since,
    event,
    eventually,
    nobody_accepts,
    request_id,
    scene,
    side_by_side,
    silent,
    streaming,
)
from llmgw.config.schema import Timeouts

HEAD_S, FIRST_S, IDLE_S, TOTAL_S = 0.4, 0.7, 0.5, 2.0
SWEEP_S = 0.25
"""Deadlines are looked at so often."""
SLACK_S = SWEEP_S + 0.6

CONFIG = f"""
[router]
plugin = "round-robin"

[timeouts]
connect_s = 0.3
response_head_s = {HEAD_S}
first_token_s = {FIRST_S}
stream_idle_s = {IDLE_S}
total_s = {TOTAL_S}

[retry]
ratio = 1.0
floor = 1000
backoff_min_s = 0.001
backoff_max_s = 0.002
"""
LLAMA = '\nkind = "llama-server"'


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """``a`` to ``d`` serve ``m``, and each a model of its own name; ``ls`` and ``lt`` are
    llama-servers that serve ``pair``; ``gone`` refuses and ``deaf`` never connects."""
    with nobody_accepts() as deaf_url:
        tables = f"""
[[backends]]
id = "gone"
url = "http://127.0.0.1:{free_port()}"
models = ["gone", "gone-or-e"]

[[backends]]
id = "deaf"
url = "{deaf_url}"
models = ["deaf", "deaf-or-e"]
"""
        with scene(
            tmp_path_factory.mktemp("fleet"),
            STEADY + CONFIG,
            tables=tables,
            **{id: f'models = ["m", "{id}"]' for id in "abcd"},
            e='models = ["gone-or-e", "deaf-or-e", "f-or-e"]',
            f='models = ["f", "f-or-e"]',
            ls='models = ["pair", "ls"]' + LLAMA,
            lt='models = ["pair", "lt"]' + LLAMA,
        ) as found:
            yield found


def error_in(answer: Answer) -> Any:
    """The ``error`` object of a JSON answer."""
    assert (answer.get("content-type") or "").startswith("application/json")
    return answer.json["error"]


def blame(fleet: Scene, id: str, request: bytes) -> tuple[Answer, int]:
    """The answer, and by how much the backend's streak of failures grew with it."""
    before = fleet.member(id)["failure_streak"]
    answer = fleet.ask(request)
    fleet.settled()
    return answer, max(0, fleet.member(id)["failure_streak"] - before)


# --- cut within the body ---------------------------------------------------------

CHAT = [event("a"), event("b")]
MESSAGES = [
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"x"}}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n',
]
RESPONSES = [
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n',
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"hi"}\n\n',
]
DIALECTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": [b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'],
    "/completion": [b'data: {"content":"a","stop":false}\n\n'],
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}


def last_event(body: bytes) -> tuple[str | None, Any]:
    """Name and data of the last event of an LF stream."""
    assert body.endswith(b"\n\n")
    lines = body[:-2].split(b"\n\n")[-1].lstrip(b"\n").split(b"\n")
    fields = dict(line.split(b": ", 1) for line in lines)
    assert set(fields) <= {b"event", b"data"}
    name = fields.get(b"event")
    return name.decode() if name else None, json.loads(fields[b"data"])


def is_error_of_responses(data: Any, code: str) -> bool:
    """Flat as in OpenAI's reference, and nested, which is what makes OpenAI's own clients raise it."""
    flat = {"type", "code", "message", "param", "sequence_number"}
    told = data["error"]
    return (
        set(data) == {*flat, "error"}
        and data["type"] == "error"
        and data["code"] == told["code"] == code
        and data["message"] == told["message"]
    )


def is_error_of(path: str, name: str | None, data: Any, code: str) -> bool:
    """The event tells of ``code`` as clients of ``path`` expect it."""
    if path == "/v1/messages":
        return name == "error" and data["type"] == "error" and {"type", "message"} <= set(data["error"])
    if path == "/v1/responses":
        return name == "error" and is_error_of_responses(data, code)
    return name is None and bool(data["error"]["code"] == code) and "message" in data["error"]


@pytest.mark.parametrize("end", ["FIN", "RST", "junk for a chunk"])
@pytest.mark.parametrize("path", DIALECTS)
def test_s_die_1_s_die_5_cut_between_events(fleet: Scene, path: str, end: str) -> None:
    """An error event in the dialect of the route, and then no last chunk: both tell."""

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, *[chunk(piece) for piece in DIALECTS[path]])
        time.sleep(0.02)
        if end == "RST":
            line.reset()
        elif end == "FIN":
            line.close()
        else:
            line.send(b"zz\r\n")
            line.wait_closed(2.0)
            line.close()

    fleet.backends["a"].play(script)
    id = request_id()
    answer, blamed = blame(fleet, "a", ask_stream(path, id=id, model="a"))
    came = b"".join(DIALECTS[path])
    assert (answer.status, answer.clean) == (200, False)
    assert answer.body.startswith(came)
    assert is_error_of(path, *last_event(answer.body), code="upstream_error")
    assert answer.body.count(b"\n\n") == len(DIALECTS[path]) + 1
    assert b"[DONE]" not in answer.body
    if path == "/v1/responses":
        assert last_event(answer.body)[1]["sequence_number"] == len(RESPONSES)
    assert blamed == 1
    fleet.expect(id, outcome="cut", status=200)


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize(
    "fragment",
    [b'data: {"choices":[{"ind', b"data: {}\n", b"data", b"data: {}\r\n", b"data: {}\r"],
    ids=["in a line", "before the blank line", "in a name", "after a CRLF", "after a CR"],
)
def test_s_die_2_cut_inside_an_event(fleet: Scene, path: str, fragment: bytes) -> None:
    """A blank line keeps the error event apart from the fragment."""

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(DIALECTS[path][0]), chunk(fragment))
        line.close()

    fleet.backends["a"].play(script)
    answer = fleet.ask(ask_stream(path, model="a"))
    assert answer.body.startswith(DIALECTS[path][0] + fragment + b"\n\n")
    assert is_error_of(path, *last_event(answer.body), code="upstream_error")
    assert not answer.clean


def test_s_die_1_an_ollama_stream_is_told_of_the_cut_on_a_line_of_its_own(
    fleet: Scene, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with scene(tmp_path_factory.mktemp("ollama"), STEADY, o='models = ["m"]\nkind = "ollama"') as here:

        def script(line: Line, request: Received) -> None:
            head = SSE_HEAD.replace(b"text/event-stream", b"application/x-ndjson")
            line.send(head, chunk(b'{"message":{"content":"a"},"done":false}\n'), chunk(b'{"mess'))
            line.close()

        here.backend.play(script)
        answer = here.ask(ask_stream("/api/chat"))
        assert not answer.clean
        lines = answer.body.split(b"\n")
        assert lines[1] == b'{"mess'
        assert "error" in json.loads(lines[2])
        assert lines[3:] == [b""]


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n14\r\n",
    ],
    ids=["counted", "chunked"],
)
def test_s_die_1_an_answer_that_is_no_stream_is_cut_visibly(fleet: Scene, head: bytes) -> None:
    """No event can be sent there: the framing alone tells."""

    def script(line: Line, request: Received) -> None:
        line.send(head + b'{"choices":[{"index"')
        time.sleep(0.05)
        line.close()

    fleet.backends["a"].play(script)
    answer = fleet.ask(ask_whole(model="a"))
    assert (answer.status, answer.body, answer.clean) == (200, b'{"choices":[{"index"', False)


@pytest.mark.parametrize("stream", [True, False])
def test_s_die_1_a_body_ended_by_close_is_whole_after_fin_and_cut_after_rst(
    fleet: Scene, stream: bool
) -> None:
    """Without framing only the way of closing tells (RFC 9112 section 8)."""
    kind = b"text/event-stream" if stream else b"application/json"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nConnection: close\r\n\r\n" % kind
    body = event("a") if stream else b'{"choices":[]}'
    for end in ("FIN", "RST"):

        def script(line: Line, request: Received, end: str = end) -> None:
            line.send(head + body)
            time.sleep(0.05)
            (line.close if end == "FIN" else line.reset)()

        fleet.backends["a"].play(script)
        answer = fleet.ask(ask_whole(model="a", stream=stream))
        assert answer.clean == (end == "FIN")
        assert answer.body.startswith(body)


def test_s_die_1_after_done_the_missing_last_chunk_is_no_loss(fleet: Scene) -> None:
    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("a") + STOP + DONE))
        line.close()

    fleet.backends["a"].play(script)
    answer, blamed = blame(fleet, "a", ask_stream(model="a"))
    assert (answer.body, answer.clean, blamed) == (event("a") + STOP + DONE, True, 0)


def test_s_die_1_an_http_1_0_client_sees_the_cut_too(fleet: Scene) -> None:
    """Its answer ends by close, so a cut one must end by reset."""

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("a")))
        time.sleep(0.05)
        line.close()

    fleet.backends["a"].play(script)
    answer = fleet.ask(ask_stream(model="a").replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    assert not answer.clean


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_s_die_3_all_promised_bytes_and_then_rst(fleet: Scene, kind: str) -> None:
    body = b'{"choices":[],"x":1}'
    assert len(body) == 20

    def script(line: Line, request: Received) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: 20\r\n\r\n"
        line.send(head.encode() + body)
        line.reset()

    fleet.backends["a"].play(script)
    for _ in range(10):
        answer, blamed = blame(fleet, "a", ask_whole(model="a"))
        assert (answer.status, answer.body, answer.clean, blamed) == (200, body, True, 0)


# --- errors of the backend's own ---------------------------------------------------


@pytest.mark.parametrize("model", ["a", "ls"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 501, 503, 529])
def test_s_die_4_an_error_status_is_no_stream(fleet: Scene, status: int, stream: bool, model: str) -> None:
    """Nothing is promised to the client before the backend has spoken."""
    body = b'{"error": {"code": %d, "message": "no", "type": "x"}}' % status
    fleet.backends[model].play(answered(json_response(body, status, "X-Reason: some\r\n")))
    answer = fleet.ask(ask_whole(model=model, stream=stream))
    assert (answer.status, answer.body, answer.clean) == (status, body, True)
    assert answer.get("content-type") == "application/json"
    assert answer.get("x-reason") == "some"


# --- retries ---------------------------------------------------------------------


def test_s_rty_1_no_retry_after_a_byte(fleet: Scene) -> None:
    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("one")))
        line.close()

    fleet.play(script)
    answer = fleet.ask(ask_stream())
    assert answer.body.startswith(event("one"))
    assert not answer.clean
    assert sum(fleet.asked().values()) == 1


def test_s_rty_1_no_retry_after_a_head(fleet: Scene) -> None:
    """A head that was passed on counts as said."""

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD)
        time.sleep(0.05)
        line.close()

    fleet.play(script)
    answer = fleet.ask(ask_stream())
    assert (answer.status, answer.clean) == (200, False)
    assert last_event(answer.body)[1]["error"]["code"] == "upstream_error"
    assert sum(fleet.asked().values()) == 1


@pytest.mark.parametrize("model", ["gone-or-e", "deaf-or-e"])
def test_s_rty_2a_a_refused_connection_is_tried_elsewhere(fleet: Scene, model: str) -> None:
    """Refused, or not made in ``connect_s``: nobody has seen the request."""
    fleet.backends["e"].play(answer_completion)
    ids = [request_id() for _ in range(2)]
    assert [fleet.ask(ask_whole(id=id, model=model)).status for id in ids] == [200, 200]
    assert {fleet.line(id)["attempts"] for id in ids} >= {2}


@pytest.mark.parametrize("model", ["gone", "deaf"])
def test_s_rty_2a_no_address_in_the_answer(fleet: Scene, model: str) -> None:
    answer = fleet.ask(ask_whole(model=model))
    assert (answer.status, error_in(answer)["code"]) in [(502, "upstream_error"), (503, "no_backend")]
    assert b"127.0.0.1" not in answer.body


@pytest.mark.parametrize("model", ["a", "ls"])
def test_s_rty_2b_a_kept_connection_that_closes_without_a_byte(fleet: Scene, model: str) -> None:
    """The request goes again over a fresh one, once, without counting as an attempt."""

    def script(line: Line, request: Received) -> None:
        if fleet.backends[model].lines.index(line) == 0 and len(fleet.backends[model].requests) > 1:
            line.close()
        else:
            answer_completion(line, request)

    fleet.backends[model].play(script)
    assert fleet.ask(ask_whole(model=model)).status == 200
    id = request_id()
    answer, blamed = blame(fleet, model, ask_whole(id=id, model=model))
    assert (answer.status, blamed) == (200, 0)
    assert len(fleet.backends[model].requests) == 3
    fleet.expect(id, attempts=1)


def test_s_rty_2b_not_when_a_byte_came(fleet: Scene) -> None:
    """Then somebody was at work on it."""

    def script(line: Line, request: Received) -> None:
        if len(fleet.backends["a"].requests) > 1:
            line.send(b"HTTP/1.1 20")
            line.close()
        else:
            answer_completion(line, request)

    fleet.backends["a"].play(script)
    assert fleet.ask(ask_whole(model="a")).status == 200
    assert fleet.ask(ask_whole(model="a")).status == 502
    assert len(fleet.backends["a"].requests) == 2


TIMED_OUT = json_response(b"timed out", 408, "Connection: close\r\n")


def test_s_rty_2b_a_kept_connection_that_was_timed_out(fleet: Scene) -> None:
    """Some servers say so with 408 before they close, and it meets the next request on its way."""

    def script(line: Line, request: Received) -> None:
        if fleet.backends["a"].lines.index(line) == 0 and len(fleet.backends["a"].requests) > 1:
            line.send(TIMED_OUT)
            line.close()
        else:
            answer_completion(line, request)

    fleet.backends["a"].play(script)
    assert fleet.ask(ask_whole(model="a")).status == 200
    id = request_id()
    assert blame(fleet, "a", ask_whole(id=id, model="a"))[0].json == COMPLETION
    assert len(fleet.backends["a"].requests) == 3
    fleet.expect(id, attempts=1)


def test_a_fresh_connection_that_times_out_is_the_clients_affair(fleet: Scene) -> None:
    fleet.drop_kept()
    fleet.backends["a"].play(answered(TIMED_OUT))
    answer = fleet.ask(ask_whole(model="a"))
    assert (answer.status, answer.body) == (408, b"timed out")
    assert len(fleet.backends["a"].requests) == 1


@pytest.mark.parametrize("model", ["m", "pair"])
@pytest.mark.parametrize("end", ["close", "reset"])
def test_s_rty_2c_closed_before_the_head_is_tried_elsewhere(fleet: Scene, end: str, model: str) -> None:
    """Our policy; never twice at the same backend, and at most ``retry.attempts`` times."""

    def script(line: Line, request: Received) -> None:
        getattr(line, end)()

    fleet.drop_kept()
    fleet.play(script)
    id = request_id()
    answer = fleet.ask(ask_whole(id=id, model=model))
    assert (answer.status, error_in(answer)["code"]) == (502, "upstream_error")
    served_by = 4 if model == "m" else 2
    assert fleet.asked() == dict.fromkeys(fleet.asked(), 1)
    assert len(fleet.asked()) == min(3, served_by)
    fleet.expect(id, attempts=min(3, served_by), outcome="upstream_error")


def test_s_rty_2c_one_that_dies_and_one_that_lives(fleet: Scene) -> None:
    fleet.play(answer_completion)
    fleet.backends["a"].play(lambda line, request: line.close())
    for _ in range(4):
        assert fleet.ask(ask_whole()).status == 200
    assert len(fleet.backends["a"].requests) == 1


def test_s_rty_2d_busy_with_retry_after(fleet: Scene) -> None:
    """Tried elsewhere; with nobody else, the backend's own words."""
    body = {"error": {"message": "busy", "type": "x", "code": 503}}
    fleet.play(answer_completion)
    fleet.backends["f"].play(answered(json_response(body, 503, "Retry-After: 1\r\n")))
    assert [fleet.ask(ask_whole(model="f-or-e")).status for _ in range(3)] == [200] * 3
    # It asked for a pause: it is given one before it is asked again.
    answer = fleet.ask(ask_whole(model="f"))
    assert (answer.status, error_in(answer)["code"]) == (503, "overloaded")
    assert int(answer.get("retry-after") or "0") >= 1
    assert len(fleet.backends["f"].requests) == 1
    time.sleep(1.1)
    answer, blamed = blame(fleet, "f", ask_whole(model="f"))
    assert (answer.status, answer.json, blamed) == (503, body, 0)
    assert answer.get("retry-after") == "1"


@pytest.mark.parametrize(("id", "model"), [("a", "m"), ("ls", "pair")])
def test_a_backend_that_wants_another_key_of_ours(fleet: Scene, id: str, model: str) -> None:
    """It never sees the client's key, so its 401 is no word on that: another backend is asked. But
    who may decide by what is asked for could have it taken from all others, so it is no failure."""
    body = {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}}
    fleet.play(answer_completion)
    fleet.backends[id].play(answered(json_response(body, 401)))
    alone = request_id()
    answer, blamed = blame(fleet, id, ask_whole(id=alone, model=id))
    assert (answer.status, answer.json, blamed) == (401, body, 0)
    assert answer.get("x-should-retry") == "false"
    fleet.expect(alone, attempts=1, status=401)
    for _ in range(4):
        answer, blamed = blame(fleet, id, ask_stream(model=model))
        assert (answer.status, blamed) == (200, 0)
    assert len(fleet.backends[id].requests) > 1


@pytest.mark.parametrize("model", ["m", "pair"])
def test_s_rty_2e_no_head_in_time_is_tried_once_more(fleet: Scene, model: str) -> None:
    """After the first attempt was cancelled; the next second chance would take as long again."""
    fleet.play(silent)
    id = request_id()
    begun_s = time.monotonic()
    answer = fleet.ask(ask_whole(id=id, model=model))
    took_s = elapsed_since(begun_s)
    assert (answer.status, error_in(answer)["code"]) == (504, "upstream_timeout")
    fleet.expect(id, attempts=2, outcome="upstream_timeout")
    assert len(fleet.asked()) == 2
    assert 2 * HEAD_S <= took_s < 2 * (HEAD_S + SLACK_S)
    lines = [line for backend in fleet.backends.values() for line in backend.lines]
    eventually(lambda: all(line.sock.fileno() < 0 for line in lines), 1.0)


def test_s_rty_2e_elapsed_time_is_capped(fleet: Scene) -> None:
    """No attempt begins after the request's own end."""
    fleet.play(silent)
    begun_s = time.monotonic()
    answer = fleet.ask(ask_whole(headers="x-llmgw-timeout: 0.3\r\n"))
    assert (answer.status, error_in(answer)["code"]) == (504, "upstream_timeout")
    assert elapsed_since(begun_s) < 0.3 + SLACK_S
    assert sum(fleet.asked().values()) == 1


def test_s_rty_3_no_retry_for_a_client_that_left(fleet: Scene) -> None:
    fleet.play(silent)
    id = request_id()
    with fleet.client() as client:
        client.send(ask_stream(id=id))
        eventually(fleet.asked)
        time.sleep(0.1)
    [asked] = fleet.asked()
    assert fleet.backends[asked].lines[0].wait_closed(1.0) < 0.5
    fleet.settled(0.5)
    time.sleep(HEAD_S + SLACK_S)
    assert sum(fleet.asked().values()) == 1
    fleet.expect(id, status=499, outcome="client_gone", attempts=1)


def test_s_rty_3_a_client_that_leaves_while_we_connect(fleet: Scene) -> None:
    """Giving up a connection that is being made is no failure of the backend's, and no
    reason to ask another one."""
    fleet.backends["e"].play(answer_completion)
    before = fleet.member("deaf")["failure_streak"]
    left = None
    while left is None:
        id = request_id()
        with fleet.client(0.1) as client:
            client.send(ask_whole(id=id, model="deaf-or-e"))
            try:
                assert client.read_answer().status == 200
            except TimeoutError:
                left = id
    served = len(fleet.backends["e"].requests)
    fleet.settled(0.25)
    time.sleep(0.4)  # connect_s is over
    fleet.expect(left, outcome="client_gone", attempts=1, backend="deaf")
    assert len(fleet.backends["e"].requests) == served
    assert fleet.member("deaf")["failure_streak"] == before


def test_s_rty_3_a_client_that_leaves_between_two_attempts(tmp_path: Any) -> None:
    """The pause is over for it, and what it took of the retry budget is given back."""
    config = """
[router]
plugin = "round-robin"
[retry]
ratio = 0.0
floor = 3
window_s = 0.4
backoff_min_s = 0.5
backoff_max_s = 0.5
"""
    with scene(tmp_path, STEADY + config, a='models = ["m"]', b='models = ["m"]') as here:
        busy = answered(json_response({"error": {"message": "no"}}, 503))
        here.play(busy)
        clients = [here.client() for _ in range(3)]
        for client in clients:
            client.send(ask_whole())
        eventually(lambda: sum(here.asked().values()) == 3)
        time.sleep(0.1)
        for client in clients:
            client.close()
        here.settled(0.25)
        time.sleep(0.6)
        assert sum(here.asked().values()) == 3
        here.backends["a"].play(answer_completion)
        begun_s = time.monotonic()
        assert [here.ask(ask_whole()).status for _ in range(2)] == [200, 200]
        assert 0.5 <= elapsed_since(begun_s) < 2.0


def test_retries_stay_within_their_budget(tmp_path: Any) -> None:
    """When everything fails, backends get at most a fifth more than the clients sent; what is
    not retried any more says so to the clients' own retry code."""
    config = """
[retry]
backoff_min_s = 0.001
backoff_max_s = 0.002
"""
    requests = 300
    with scene(tmp_path, STEADY + config, **dict.fromkeys("abc", 'models = ["m"]')) as here:
        here.play(answered(json_response({"error": {"message": "no"}}, 503)))
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: here.ask(ask_whole()), range(requests)))
        assert {answer.status for answer in answers} == {503}
        asked = sum(here.asked().values())
        assert requests < asked <= 1.2 * requests + 3
        discouraged = sum(answer.get("x-should-retry") == "false" for answer in answers)
        assert discouraged > 0.6 * requests
        assert here.count("llmgw_retries_total") == asked - requests


def test_a_backend_that_is_gone_costs_no_answer(tmp_path: Any) -> None:
    """However few the requests, and with no budget for retries: nobody has seen those that went elsewhere."""
    gone = f'[[backends]]\nid = "gone"\nurl = "http://127.0.0.1:{free_port()}"\nmodels = ["m"]\n'
    config = """
[router]
plugin = "round-robin"
[retry]
ratio = 0.0
floor = 0
backoff_min_s = 0.001
backoff_max_s = 0.002
"""
    with scene(tmp_path, STEADY + config, tables=gone, a='models = ["m"]') as here:
        here.play(answer_completion)
        ids = [request_id() for _ in range(8)]
        assert [here.ask(ask_whole(id=id)).status for id in ids] == [200] * 8
        assert sum(here.line(id)["attempts"] for id in ids) >= 12
        assert sum(here.asked().values()) == 8


# --- deadlines ---------------------------------------------------------------------


def drip(piece: bytes, every_s: float, *, head: bytes = SSE_HEAD) -> Script:
    """A script: ``piece`` again and again, until the gateway closes."""

    def script(line: Line, request: Received) -> None:
        line.send(head)
        while True:
            line.send(chunk(piece))
            time.sleep(every_s)

    return script


def timed(fleet: Scene, request: bytes) -> tuple[Answer, float]:
    begun_s = time.monotonic()
    answer = fleet.ask(request)
    return answer, elapsed_since(begun_s)


def test_s_tmo_response_head_in_time_or_504(fleet: Scene) -> None:
    fleet.backends["a"].play(silent)
    begun_s = time.monotonic()
    answer, blamed = blame(fleet, "a", ask_stream(model="a"))
    assert (answer.status, error_in(answer)["code"], blamed) == (504, "upstream_timeout", 1)
    assert HEAD_S <= elapsed_since(begun_s) < HEAD_S + SLACK_S


def test_first_token_in_time_or_an_error_event(fleet: Scene) -> None:
    """Comments and empty deltas are life, but no token."""
    pieces = {"comments": b": reading\n\n", "deltas": b'data: {"choices":[{"index":0,"delta":{}}]}\n\n'}
    fleet.backends["a"].play(by_case({name: drip(piece, 0.1) for name, piece in pieces.items()}))
    before = fleet.member("a")["failure_streak"]
    ask = lambda name: timed(fleet, ask_stream(model="a", case=name))  # noqa: E731
    for answer, took_s in side_by_side(ask, pieces):
        assert FIRST_S <= took_s < FIRST_S + SLACK_S
        assert (answer.status, answer.clean) == (200, False)
        assert "timeout_first_token" in last_event(answer.body)[1]["error"]["message"]
    assert fleet.member("a")["failure_streak"] == before + 2


def test_after_the_first_token_its_deadline_is_over(fleet: Scene) -> None:
    """And any byte, comments too, sets the idle deadline anew."""
    pieces = [event("a"), *[b": still\n\n"] * 3, event("b"), DONE]
    assert FIRST_S < 5 * 0.3
    fleet.backends["a"].play(streaming(*pieces, gap_s=0.3))
    answer = fleet.ask(ask_stream(model="a"))
    assert (answer.body, answer.clean) == (b"".join(pieces), True)


def test_silence_within_a_stream_is_cut_with_an_error_event(fleet: Scene) -> None:
    """In the dialect of the route."""

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, *[chunk(piece) for piece in DIALECTS[request.target]])
        line.wait_closed(5.0)

    fleet.backends["a"].play(script)
    begun_s = time.monotonic()
    before = fleet.member("a")["failure_streak"]
    answers = side_by_side(lambda path: fleet.ask(ask_stream(path, model="a")), DIALECTS)
    assert IDLE_S <= elapsed_since(begun_s) < IDLE_S + SLACK_S
    for path, answer in zip(DIALECTS, answers, strict=True):
        assert not answer.clean
        assert is_error_of(path, *last_event(answer.body), code="upstream_timeout")
    assert fleet.member("a")["failure_streak"] == before + len(answers)


def test_silence_within_a_whole_answer_cuts_it(fleet: Scene) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"

    def script(line: Line, request: Received) -> None:
        line.send(head + b"{")
        line.wait_closed(5.0)

    fleet.backends["a"].play(script)
    answer, took_s = timed(fleet, ask_whole(model="a"))
    assert (answer.body, answer.clean) == (b"{", False)
    assert took_s < IDLE_S + SLACK_S


def test_the_total_ends_a_stream_that_never_ends(fleet: Scene) -> None:
    """No client can raise it. Long answers are no fault of the backend's: it is not blamed."""
    values = ["100000", "999999999.99999999999999999"]
    fleet.backends["a"].play(drip(event("a"), 0.1))
    before = fleet.member("a")["failure_streak"]
    requests = [ask_stream(model="a")]
    requests += [ask_stream(model="a", headers=f"x-llmgw-timeout: {value}\r\n") for value in values]
    for answer, took_s in side_by_side(lambda request: timed(fleet, request), requests):
        assert TOTAL_S <= took_s < TOTAL_S + SLACK_S
        assert not answer.clean
        assert "timeout_total" in last_event(answer.body)[1]["error"]["message"]
    assert fleet.member("a")["failure_streak"] == before


@pytest.mark.parametrize("model", ["a", "ls"])
def test_a_client_may_lower_the_total(fleet: Scene, model: str) -> None:
    """And a deadline below five seconds says nothing about the backend: else one impatient
    caller could take it from all others."""
    scripts = {"no head": silent, "no token": drip(b": \n\n", 0.1), "tokens": drip(event("a"), 0.1)}
    fleet.backends[model].play(by_case(scripts))
    before = fleet.member(model)["failure_streak"]
    cases = [(when, stream) for when in scripts for stream in (True, False)]

    def ask(case: tuple[str, bool]) -> Answer:
        when, stream = case
        headers = "x-llmgw-timeout: 0.3\r\n"
        answer, took_s = timed(fleet, ask_whole(model=model, stream=stream, headers=headers, case=when))
        assert 0.3 <= took_s < 0.3 + SLACK_S
        return answer

    for (when, stream), answer in zip(cases, side_by_side(ask, cases), strict=True):
        if when == "no head" or (model == "ls" and not stream):
            assert (answer.status, error_in(answer)["code"]) == (504, "upstream_timeout")
        else:
            assert not answer.clean
            assert "timeout_total" in last_event(answer.body)[1]["error"]["message"]
    assert fleet.member(model)["failure_streak"] == before


def stream_then(how: str) -> Script:
    """A script: a stream that comes to a bad end."""

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD)
        if how == "no token":
            for _ in range(15):
                line.send(chunk(b'data: {"choices":[],"prompt_progress":{}}\n\n'))
                time.sleep(0.1)
        line.send(chunk(event("a")))
        if how == "silence":
            line.wait_closed(5.0)
        elif how == "incomplete":
            line.send(LAST_CHUNK)
        elif how == "junk":
            line.send(chunk(b"data: {not json\n\n") + LAST_CHUNK)
        else:
            line.close()

    return script


def test_an_answer_put_together_fails_as_a_whole(fleet: Scene) -> None:
    """What was gathered is dropped; the client gets a status, and another backend a chance."""
    scripts = {how: stream_then(how) for how in ("silence", "no token", "cut", "incomplete", "junk")}
    fleet.play(by_case(scripts))
    before = fleet.member("ls")["failure_streak"]
    answers = side_by_side(lambda how: fleet.ask(ask_whole(model="ls", case=how)), scripts)
    for how, answer in zip(scripts, answers, strict=True):
        assert answer.clean
        late = how in ("silence", "no token")
        told = (504, "upstream_timeout") if late else (502, "upstream_error")
        assert (answer.status, error_in(answer)["code"]) == told, how
    assert fleet.member("ls")["failure_streak"] == before + len(scripts)
    fleet.backends["lt"].play(streaming(event("hi"), STOP, USAGE, DONE))
    for answer in side_by_side(lambda how: fleet.ask(ask_whole(model="pair", case=how)), scripts):
        assert answer.status == 200
        assert answer.json["choices"][0]["message"]["content"] == "hi"


def test_an_answer_put_together_does_not_wait_for_the_last_chunk(fleet: Scene) -> None:
    fleet.backends["ls"].play(lambda line, request: line.send(SSE_HEAD, chunk(event("hi") + STOP + DONE)))
    answer, took_s = timed(fleet, ask_whole(model="ls"))
    assert answer.json["choices"][0]["message"]["content"] == "hi"
    assert took_s < 1.0 + SLACK_S


def test_what_a_stream_does_not_tell_is_asked_for_in_one_piece(fleet: Scene) -> None:
    """But a client that asked for no stream gets none, whatever the backend makes of it."""
    ls = fleet.backends["ls"]
    ls.play(answered(json_response(COMPLETION)))
    assert fleet.ask(ask_whole(model="ls", logprobs=True)).json == COMPLETION
    assert not ls.requests[-1].json.get("stream")
    ls.play(streaming(event("hi"), STOP, USAGE, DONE))
    answer = fleet.ask(ask_whole(model="ls", logprobs=True))
    assert answer.json["choices"][0]["message"]["content"] == "hi"


# --- kept connections ----------------------------------------------------------------


def test_s_ka_1_the_backend_closes_when_we_send(fleet: Scene) -> None:
    """Two hundred requests around the very moment at which the backend drops idle connections."""
    keep_s = 0.15

    def script(line: Line, request: Received) -> None:
        line.send(json_response(COMPLETION))
        line.sock.settimeout(keep_s)

    fleet.backends["a"].play(script)

    def rounds(seed: int) -> list[int]:
        statuses = []
        with fleet.client() as client:
            for n in range(10):
                client.send(ask_whole(model="a"))
                statuses.append(client.read_answer().status)
                time.sleep(keep_s + ((n * 7 + seed) % 20 - 10) / 2000)
        return statuses

    found = [status for part in side_by_side(rounds, range(20)) for status in part]
    assert found == [200] * 200
    assert fleet.member("a")["failure_streak"] == 0


@pytest.mark.parametrize(
    ("advertised", "kept_s"), [("timeout=2, max=100", 1.0), ("timeout=60", 4.0), ("timeout=1", 0.0)]
)
def test_s_ka_1_kept_for_less_than_the_backend_says(fleet: Scene, advertised: str, kept_s: float) -> None:
    """One second less than advertised, and never more than ``upstream_idle_s``."""
    closed_s: list[float] = []

    def script(line: Line, request: Received) -> None:
        line.send(json_response(COMPLETION, headers=f"Keep-Alive: {advertised}\r\n"))
        closed_s.append(line.wait_closed(8.0))

    fleet.drop_kept()
    fleet.backends["b"].play(script)
    fleet.ask(ask_whole(model="b"))
    if kept_s > 1.0:
        assert fleet.member("b")["idle_connections"] == 1
        assert Timeouts().upstream_idle_s == kept_s
        fleet.backends["b"].lines[0].close()
        return
    eventually(lambda: closed_s, 3.0)
    assert kept_s - 0.05 <= closed_s[0] < kept_s + SLACK_S
    assert fleet.member("b")["idle_connections"] == 0


def test_s_ka_1_the_last_response_of_a_connection(fleet: Scene) -> None:
    """llama-server's hundredth says ``Connection: close``: the next request takes another one."""

    def script(line: Line, request: Received) -> None:
        count = len(fleet.backends["c"].requests)
        line.send(json_response(COMPLETION, headers="Connection: close\r\n" if count == 3 else ""))
        if count == 3:
            line.close()

    fleet.drop_kept()
    fleet.backends["c"].play(script)
    for _ in range(6):
        assert fleet.ask(ask_whole(model="c")).status == 200
    assert [fleet.backends["c"].lines.index(line) for line in fleet.backends["c"].lines] == [0, 1]


@pytest.mark.parametrize("when", ["with the response", "later"])
def test_bytes_that_nobody_asked_for_end_a_connection(fleet: Scene, when: str) -> None:
    """They can be nothing but the wrong answer to the next request."""

    def script(line: Line, request: Received) -> None:
        extra = json_response({"error": "not yours"})
        if when == "later":
            line.send(json_response(COMPLETION))
            time.sleep(0.1)
            line.send(extra)
        else:
            line.send(json_response(COMPLETION) + extra)

    fleet.drop_kept()
    fleet.backends["c"].play(script)
    for _ in range(3):
        assert fleet.ask(ask_whole(model="c")).json == COMPLETION
        time.sleep(0.2)
    assert len(fleet.backends["c"].lines) == 3


def test_s_ka_2_idle_clients_may_stay_longer_than_75_s() -> None:
    """As long as the usual proxies in front keep their side (60 s and less), with some to spare."""
    assert Timeouts().keepalive_s > 75


def test_s_ka_2_the_last_response_announces_the_close(tmp_path: Any) -> None:
    config = "\n[timeouts]\nkeepalive_s = 0.8\nkeepalive_requests = 3\n"
    with scene(tmp_path, STEADY + config, b='models = ["m"]') as here:
        with here.client() as client:
            said = []
            for _ in range(3):
                client.send(ask_whole())
                said.append(client.read_answer().get("connection"))
            assert said == [None, None, "close"]
            assert client.is_closed(1.0)
        with here.client() as client:
            client.send(ask_whole())
            client.read_answer()
            begun_s = time.monotonic()
            assert client.is_closed(3.0)
            assert 0.75 <= elapsed_since(begun_s) < 0.8 + SLACK_S
            assert client.buffer == b""
