"""Section 4 of the cases: a client that leaves frees everything, wherever its request is."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import COMPLETION, answer_completion, json_response, post

from cases.scenes import (
    DONE,
    SSE_HEAD,
    STEADY,
    STOP,
    Client,
    Line,
    Received,
    Scene,
    Script,
    answered,
    ask_stream,
    ask_whole,
    chunk,
    elapsed_since,
    event,
    eventually,
    request_id,
    scene,
    silent,
)

AT_ONCE_S = 0.5
"""What follows a client's leaving without a wait has happened by then."""
LLAMA = '\nkind = "llama-server"'


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """``b`` is an OpenAI server, ``ls`` a llama-server; ``one`` takes one request at a time."""
    with scene(
        tmp_path_factory.mktemp("cancellation"),
        STEADY,
        b='models = ["m"]',
        ls='models = ["ls"]' + LLAMA,
        one='models = ["one"]\nmax_connections = 1',
    ) as found:
        yield found


def leave(client: Client, how: str) -> None:
    """End the client's connection: by FIN, by RST, or by shutting only its sending side."""
    if how == "RST":
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half-close":
        client.sock.shutdown(socket.SHUT_WR)
    else:
        client.close()


WAYS = ["FIN", "RST", "half-close"]


def paths() -> list[str]:
    return ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"]


@pytest.mark.parametrize("how", WAYS)
def test_s_can_1_client_gone_in_mid_stream(here: Scene, how: str) -> None:
    """The backend learns it within the second, and everything is given back."""
    closed_s: list[float] = []

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("a")))
        line.wait_closed(5.0)
        closed_s.append(time.monotonic())

    here.backend.play(script)
    aborts = here.count("llmgw_client_aborts_total")
    id = request_id()
    with here.client() as client:
        client.send(ask_stream(id=id))
        client.read_until(event("a"))
        left_s = time.monotonic()
        leave(client, how)
        eventually(lambda: closed_s)
        here.settled(AT_ONCE_S)
    assert closed_s[0] - left_s < AT_ONCE_S
    assert here.member("b")["idle_connections"] == 0
    assert here.count("llmgw_client_aborts_total") == aborts + 1
    here.expect(id, outcome="client_gone", status=200, backend="b")
    if how == "FIN":
        assert here.line(id)["ttft_s"] > 0


LAST_EVENTS = {
    "/v1/chat/completions": event("a") + STOP + DONE,
    "/v1/completions": b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\n' + DONE,
    "/v1/messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    "/v1/responses": b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n',
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("path", LAST_EVENTS)
def test_s_can_1_who_has_the_last_event_has_not_left(here: Scene, path: str, how: str) -> None:
    """Clients close at ``[DONE]``, before the last chunk: that is no abort."""
    here.play(stalls_after(SSE_HEAD, chunk(LAST_EVENTS[path])))
    aborts, id = here.count("llmgw_client_aborts_total"), request_id()
    with here.client() as client:
        client.send(ask_stream(path, id=id, max_tokens=9))
        client.read_until(LAST_EVENTS[path])
        leave(client, how)
        here.settled(AT_ONCE_S)
    eventually(lambda: not here.backend.open_lines, AT_ONCE_S)
    assert here.count("llmgw_client_aborts_total") == aborts
    here.expect(id, outcome="done", status=200, backend="b")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", ["m", "ls"])
def test_s_can_2_client_gone_while_the_prompt_is_read(
    here: Scene, model: str, stream: bool, how: str
) -> None:
    """Nothing is written to the client meanwhile; that it left is seen all the same."""
    here.play(silent)
    id = request_id()
    with here.client() as client:
        client.send(ask_whole(id=id, model=model, stream=stream))
        eventually(here.asked)
        begun_s = time.monotonic()
        leave(client, how)
        here.settled(AT_ONCE_S)
        backend = next(each for each in here.backends.values() if each.requests)
        eventually(lambda: not backend.open_lines, AT_ONCE_S)
        assert elapsed_since(begun_s) < 2 * AT_ONCE_S
    here.expect(id, outcome="client_gone", status=499, attempts=1)


@pytest.mark.parametrize("path", paths())
def test_s_can_2_on_every_kind_of_route(here: Scene, path: str) -> None:
    here.play(silent)
    with here.client() as client:
        client.send(ask_whole(path, input="x"))
        eventually(here.asked)
    here.settled(AT_ONCE_S)
    eventually(lambda: not here.backend.open_lines, AT_ONCE_S)


def test_s_can_2_a_client_that_had_sent_its_next_request_already(here: Scene) -> None:
    """A pipelined request does not hide that its sender has left."""
    here.play(silent)
    with here.client() as client:
        client.send(ask_whole() + ask_whole())
        eventually(here.asked)
    here.settled(AT_ONCE_S)
    assert here.asked() == {"b": 1}


def test_s_can_3_a_full_backend_is_not_sent_more(here: Scene) -> None:
    """There is no queue unless asked for: the second request is refused at once, never sent,
    and its leaving changes nothing for the first."""
    here.play(silent)
    with here.client() as running, here.client() as second:
        running.send(ask_whole(model="one"))
        eventually(here.asked)
        begun_s = time.monotonic()
        second.send(ask_whole(model="one"))
        answer = second.read_answer()
        assert (answer.status, answer.json["error"]["code"]) == (503, "overloaded")
        assert int(answer.get("retry-after") or "0") >= 1
        assert elapsed_since(begun_s) < AT_ONCE_S
        second.close()
        time.sleep(0.1)
        assert here.asked() == {"one": 1}
        assert here.member("one")["in_flight"] == 1
    here.settled(AT_ONCE_S)
    here.play(answer_completion)
    assert here.ask(ask_whole(model="one")).status == 200


def test_s_can_4_a_half_read_connection_is_never_kept(here: Scene) -> None:
    """After a cancelled body the next request gets a connection of its own, and its own answer."""

    def half(line: Line, request: Received) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        line.send(head + b"{" + b" " * 500)
        line.wait_closed(5.0)

    here.drop_kept()
    here.play(half)
    for _ in range(5):
        with here.client() as client:
            client.send(ask_whole())
            client.read_until(b"{ ")
        here.settled(AT_ONCE_S)
        eventually(lambda: not here.backend.open_lines, AT_ONCE_S)
    assert len(here.backend.lines) == 5
    here.play(answer_completion)
    assert here.ask(ask_whole()).json == COMPLETION


def test_s_can_4_leaving_at_the_very_end(here: Scene) -> None:
    """Whatever of cancelling, finishing and keeping the connection comes first."""
    here.play(answer_completion)

    def rush(n: int) -> None:
        with here.client() as client:
            client.send(ask_whole(stream=bool(n % 2)))
            time.sleep((n % 20) / 4000)
            leave(client, WAYS[n % 2])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(rush, range(200)))
    here.settled()
    for _ in range(10):
        assert here.ask(ask_whole()).json == COMPLETION


@pytest.mark.parametrize("stream", [True, False])
def test_s_can_5_half_close_is_leaving(here: Scene, stream: bool) -> None:
    """Documented in ``wire/server.py``: a client that shuts its sending side gets no answer
    (RFC 9112 section 9.6 leaves that to the server). It is told by a close, and never waits."""
    here.play(silent)
    with here.client() as client:
        client.send(ask_whole(stream=stream))
        eventually(here.asked)
        leave(client, "half-close")
        assert client.is_closed(AT_ONCE_S)
        assert client.buffer == b""
    here.settled(AT_ONCE_S)


def test_s_can_5_half_close_in_mid_stream_ends_it_visibly(here: Scene) -> None:
    """No last chunk: what came is no whole answer."""

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("a")))
        line.wait_closed(5.0)

    here.play(script)
    with here.client() as client:
        client.send(ask_stream())
        client.read_until(event("a"))
        leave(client, "half-close")
        assert client.is_closed(AT_ONCE_S)
        assert b"0\r\n\r\n" not in client.buffer
    here.settled(AT_ONCE_S)


def test_s_can_6_aborts_are_no_failures_of_the_backend(here: Scene) -> None:
    here.play(silent)
    aborts = here.count("llmgw_client_aborts_total")
    clients = [here.client() for _ in range(50)]
    for client in clients:
        client.send(ask_whole())
    eventually(lambda: len(here.backend.requests) == 50)
    for n, client in enumerate(clients):
        leave(client, WAYS[n % 2])
    here.settled(AT_ONCE_S * 2)
    member = here.member("b")
    assert (member["breaker"], member["failure_streak"]) == ("closed", 0)
    assert here.count("llmgw_client_aborts_total") == aborts + 50
    here.play(answer_completion)
    assert here.ask(ask_whole()).status == 200


def test_s_can_6_an_aborted_trial_frees_its_place(tmp_path_factory: pytest.TempPathFactory) -> None:
    """While half-open one request tries the backend; one that is aborted proves nothing, and
    the next one tries."""
    config = """
[router]
plugin = "round-robin"
[breaker]
consecutive = 2
open_s = 0.3
jitter = 0.0
successes = 1
slow_start_s = 0.1
fall = 100000
[retry]
backoff_min_s = 0.001
backoff_max_s = 0.002
"""
    models = 'models = ["m"]'
    with scene(tmp_path_factory.mktemp("trial"), config, a=models, b=models) as gw:
        a, b = gw.backends["a"], gw.backends["b"]
        b.play(answer_completion)
        a.play(lambda line, request: line.close())
        while gw.member("a")["breaker"] == "closed":
            assert gw.ask(ask_whole()).status in (200, 502)
        for _ in range(3):
            a.play(silent)
            eventually(lambda: gw.member("a")["breaker"] == "half_open")
            # Some of these go to b; the one that hangs is the trial.
            with gw.client(0.3) as client:
                while not a.requests:
                    client.send(ask_whole())
                    try:
                        assert client.read_answer().status == 200
                    except TimeoutError:
                        assert a.requests
            gw.settled(AT_ONCE_S)
            assert gw.member("a")["breaker"] == "half_open"
        a.play(answer_completion)
        eventually(lambda: gw.ask(ask_whole()).status == 200 and a.requests)
        eventually(lambda: gw.member("a")["breaker"] == "closed")


# --- every state of an answer that is put together ----------------------------------


def stalls_after(*pieces: bytes) -> Script:
    """A script: ``pieces``, and then nothing until the gateway closes."""

    def script(line: Line, request: Received) -> None:
        line.send(*pieces)
        line.wait_closed(8.0)

    return script


STATES: dict[str, Script] = {
    "no head": silent,
    "half a head": stalls_after(SSE_HEAD[:40]),
    "a head": stalls_after(SSE_HEAD),
    "progress": stalls_after(SSE_HEAD, chunk(b'data: {"choices":[],"prompt_progress":{"total":9}}\n\n')),
    "half an event": stalls_after(SSE_HEAD, chunk(b'data: {"choices":[{"ind')),
    "half a chunk": stalls_after(SSE_HEAD, chunk(event("a"))[:20]),
    "tokens": stalls_after(SSE_HEAD, chunk(event("a")), chunk(event("b"))),
    "its end, but for usage": stalls_after(SSE_HEAD, chunk(event("a") + STOP)),
    "its end, but for the last chunk": stalls_after(SSE_HEAD, chunk(event("a") + STOP + DONE)),
    "half an error": stalls_after(
        b"HTTP/1.1 503 X\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    ),
    "half of a whole answer": stalls_after(
        b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    ),
}


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("stream", [False, True], ids=["put together", "streamed"])
@pytest.mark.parametrize("state", STATES)
def test_leaving_in_every_state_of_the_answer(here: Scene, state: str, stream: bool, how: str) -> None:
    """The backend's connection closes at once, and nobody is blamed."""
    here.drop_kept()
    here.play(STATES[state])
    backend = here.backends["ls"]
    with here.client() as client:
        client.send(ask_whole(model="ls", stream=stream))
        eventually(lambda: backend.requests)
        time.sleep(0.03)
        assert here.member("ls")["in_flight"] == 1
        leave(client, how)
        here.settled(AT_ONCE_S)
    eventually(lambda: not backend.open_lines, AT_ONCE_S)
    assert len(backend.requests) == 1
    member = here.member("ls")
    assert (member["failure_streak"], member["idle_connections"]) == (0, 0)
    here.play(answer_completion)
    assert here.ask(ask_whole(model="ls")).status == 200


@pytest.mark.parametrize("sent", ["half a head", "head", "half a body", "half a chunk"])
def test_leaving_before_the_request_is_whole(here: Scene, sent: str) -> None:
    """No backend hears of it, and the body's bytes are let go."""
    here.play(answer_completion)
    whole = post(body=b"x" * 100_000)
    head = whole[: whole.index(b"\r\n\r\n") + 4]
    chunked = post(body=chunk(b"y" * 50_000)[:30_000], headers="Transfer-Encoding: chunked\r\n")
    data = {"half a head": head[:50], "head": head, "half a body": whole[:50_000], "half a chunk": chunked}
    with here.client() as client:
        client.send(data[sent])
        time.sleep(0.05)
    here.settled(AT_ONCE_S)
    eventually(lambda: here.gateway.state["held_bytes"] == 0, AT_ONCE_S)
    assert here.asked() == {}


def test_leaving_while_a_long_body_is_sent_to_the_backend(here: Scene) -> None:
    """Half a request may reach the backend, but then its connection ends."""
    closed = threading.Event()

    def script(line: Line, request: Received) -> None:
        time.sleep(0.3)  # takes nothing meanwhile
        line.wait_closed(5.0)
        closed.set()
        line.close()

    here.drop_kept()
    here.play(script)
    here.backend.reads_bodies = False
    try:
        with here.client() as client:
            client.send(ask_whole(image="QUJD" * (3 << 20)))
            eventually(here.asked)
        here.settled(AT_ONCE_S)
        assert closed.wait(2.0)
    finally:
        here.backend.reads_bodies = True
    eventually(lambda: here.gateway.state["held_bytes"] == 0, AT_ONCE_S)
    here.play(answer_completion)
    assert here.ask(ask_whole()).status == 200


def cut_stream(line: Line, request: Received) -> None:
    """A script: half a stream."""
    line.send(SSE_HEAD, chunk(event("a")))
    line.close()


FAILURES: dict[str, Script] = {
    "an error": answered(json_response({"error": {"message": "no"}}, 500)),
    "a close": lambda line, request: line.close(),
    "a cut": cut_stream,
    "junk": answered(b"SSH-2.0-x\r\n"),
}


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("failure", FAILURES)
def test_the_one_slot_is_free_after_every_failure(here: Scene, failure: str, path: str) -> None:
    """A client that has seen its answer's end finds the slot free: no wait, no second try."""
    for stream in (True, False):
        here.play(FAILURES[failure])
        here.ask(ask_whole(path, model="one", stream=stream, input="x"))
        here.play(answer_completion)
        assert here.ask(ask_whole(path, model="one", input="x")).status == 200
