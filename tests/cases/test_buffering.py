"""Section 2 of the cases: nothing is held back, and nothing piles up."""

from __future__ import annotations

import contextlib
import gzip
import select
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from harness import COMPLETION, Scripted, chat_body, gateway_with, json_response, post

from cases.scenes import (
    DONE,
    LAST_CHUNK,
    SSE_HEAD,
    STEADY,
    STOP,
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
    streaming,
)
from llmgw.demo.certificate import ensure_certificate

M = 'models = ["m"]'
STALL_S = 1.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """``b`` is an OpenAI server, ``ls`` a llama-server."""
    config = STEADY + f"\n[timeouts]\nwrite_stall_s = {STALL_S}\n\n[limits]\nbody_bytes = {24 * MIB}\n"
    with scene(
        tmp_path_factory.mktemp("buffering"),
        config,
        b=M + "\nmax_connections = 100",
        ls='models = ["ls"]\nkind = "llama-server"',
    ) as found:
        yield found


# --- in front of us and behind us ----------------------------------------------


@pytest.mark.parametrize("sent", ["", "X-Accel-Buffering: no\r\n", "X-Accel-Buffering: yes\r\n"])
def test_s_buf_1_nginx_in_front_is_told_not_to_buffer(here: Scene, sent: str) -> None:
    """Once, whatever the backend said of it; ``Cache-Control`` stays."""
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\n" + sent.encode() + b"\r\n")
    here.backend.play(streaming(event("a"), DONE, head=head))
    answer = here.ask(ask_stream())
    assert answer.get("x-accel-buffering") == "no"
    assert answer.get("cache-control") == "no-cache"
    assert answer.get("content-type") == "text/event-stream"


def test_s_buf_1_caches_are_told_where_the_backend_did_not(here: Scene) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    here.backend.play(streaming(event("a"), DONE, head=head))
    assert here.ask(ask_stream()).get("cache-control") == "no-cache"


def test_s_buf_1_an_answer_that_is_no_stream_is_left_alone(here: Scene) -> None:
    here.backend.play(answered(json_response(COMPLETION)))
    answer = here.ask(ask_whole())
    assert answer.get("x-accel-buffering") is None
    assert answer.get("cache-control") is None


def test_s_buf_2_streams_are_not_compressed(here: Scene) -> None:
    """Nor is the backend asked to: a coded stream could not be read on the way."""
    sent_s: list[float] = []

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD)
        for n in range(5):
            time.sleep(0.1)
            sent_s.append(time.monotonic())
            line.send(chunk(event(str(n))))
        line.send(LAST_CHUNK)

    here.backend.play(script)
    seen_s = []
    with here.client() as client:
        client.send(ask_stream(headers="Accept-Encoding: gzip, br\r\n"))
        status, headers = client.read_head()
        assert status == 200
        assert "content-encoding" not in {name.lower() for name, _ in headers}
        for n in range(5):
            client.read_until(event(str(n)))
            seen_s.append(time.monotonic())
    assert median(seen - sent for seen, sent in zip(seen_s, sent_s, strict=True)) < 0.1
    assert here.backend.requests[0].get("accept-encoding") == "identity"


CODED = gzip.compress(event("a") + STOP + DONE)


def test_s_buf_2_what_a_backend_compressed_passes_with_its_header(here: Scene) -> None:
    body = gzip.compress(b'{"choices":[]}')
    here.backend.play(answered(json_response(body, headers="Content-Encoding: gzip\r\n")))
    answer = here.ask(ask_whole())
    assert (answer.get("content-encoding"), answer.body) == ("gzip", body)


@pytest.mark.parametrize(("model", "stream"), [("m", True), ("m", False), ("ls", True)])
def test_s_buf_2_a_compressed_stream_passes_too(here: Scene, model: str, stream: bool) -> None:
    """It is not read, only passed on."""
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    for backend in here.backends.values():
        backend.play(streaming(CODED[:20], CODED[20:], head=head, gap_s=0.01))
    answer = here.ask(ask_whole(model=model, stream=stream))
    assert (answer.status, answer.get("content-encoding")) == (200, "gzip")
    assert (answer.body, answer.clean) == (CODED, True)
    assert "is compressed, though none was asked for: its tokens are not counted" in here.gateway.log


def test_s_buf_2_no_answer_can_be_put_together_from_a_compressed_stream(here: Scene) -> None:
    """Though we asked for none; an error is better than what the client can't read."""
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    here.backends["ls"].play(streaming(CODED, head=head))
    answer = here.ask(ask_whole(model="ls"))
    assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_error")


def test_s_buf_2_no_plain_error_event_in_a_compressed_stream(here: Scene) -> None:
    """When it is cut, the missing last chunk has to tell."""
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")

    def script(line: Line, request: Received) -> None:
        line.send(head, chunk(CODED[:20]))
        line.close()

    here.backend.play(script)
    answer = here.ask(ask_stream())
    assert (answer.status, answer.body, answer.clean) == (200, CODED[:20], False)


def test_s_buf_3_the_head_does_not_wait_for_the_body(here: Scene) -> None:
    go = threading.Event()

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD)
        assert go.wait(5)
        line.send(chunk(event("a")), LAST_CHUNK)

    here.backend.play(script)
    with here.client(0.5) as client:
        client.send(ask_stream())
        assert client.read_head()[0] == 200
        go.set()
        assert client.read_until(LAST_CHUNK) == chunk(event("a")) + LAST_CHUNK


def test_s_buf_4_no_bursts(here: Scene) -> None:
    """Each small event by itself, without Nagle's wait for an acknowledgement (40 ms)."""
    sent_s: list[float] = []
    events = [event(f"{n:03}") for n in range(100)]

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD)
        for each in events:
            time.sleep(0.005)
            sent_s.append(time.monotonic())
            line.send(chunk(each))
        line.send(LAST_CHUNK)

    here.backend.play(script)
    late_s = []
    with here.client() as client:
        client.send(ask_stream())
        client.read_head()
        for n, each in enumerate(events):
            client.read_until(each)
            late_s.append(time.monotonic() - sent_s[n])
    assert median(late_s) < 0.01
    assert sum(late > 0.035 for late in late_s) < 10


# --- back-pressure -------------------------------------------------------------


def flood(size: int, sent: list[int], ended: threading.Event) -> Script:
    """A script: ``size`` bytes of events as fast as they are taken; ``sent`` grows meanwhile."""
    block = chunk(event("x" * 1000) * 60)

    def script(line: Line, request: Received) -> None:
        try:
            line.send(SSE_HEAD)
            while sum(sent) < size:
                line.send(block)
                sent.append(len(block))
            line.send(LAST_CHUNK)
        finally:
            ended.set()

    return script


def test_s_bp_1_a_client_that_stops_reading(here: Scene) -> None:
    """Its backend is read no further, memory stays, and after the write stall both are cut."""
    sent: list[int] = []
    ended = threading.Event()
    here.backend.play(flood(200 * MIB, sent, ended))
    before = here.memory("VmRSS")
    id = request_id()
    with here.client() as client:
        client.send(ask_stream(id=id))
        assert client.read_head()[0] == 200
        begun_s = time.monotonic()
        assert ended.wait(STALL_S + 3.0)  # its backend was cut
        assert elapsed_since(begun_s) > STALL_S - 0.3
        assert sum(sent) < 40 * MIB  # what the sockets' buffers took
        assert here.memory("VmRSS") - before < 4
        assert client.is_closed(2.0)
    here.settled()
    here.expect(id, outcome="client_gone")
    assert here.member("b")["failure_streak"] == 0


def test_s_bp_1_a_client_that_reads_again_in_time(here: Scene) -> None:
    """Pausing loses nothing."""
    sent: list[int] = []
    ended = threading.Event()
    here.backend.play(flood(30 * MIB, sent, ended))
    with here.client() as client:
        client.send(ask_stream())
        client.read_head()
        got = client.buffer
        client.buffer = b""
        pieces = [got]
        pauses = iter([0.5, 0.5])
        size = 0
        while not pieces[-1].endswith(LAST_CHUNK):
            if size > 12 * MIB and (pause_s := next(pauses, None)):
                time.sleep(pause_s)
            pieces.append(client.sock.recv(MIB))
            assert pieces[-1]
            size += len(pieces[-1])
    block = event("x" * 1000) * 60
    # Our chunks are cut elsewhere than the backend's: take the framing away.
    assert dechunk(b"".join(pieces)) == block * len(sent)


def dechunk(data: bytes) -> bytes:
    """The content of a chunked body."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        at = end + 4 + size


def test_s_bp_1_a_stalled_client_gives_its_connection_back_clean(here: Scene) -> None:
    """Other clients of the same backend are served meanwhile."""
    ended = threading.Event()
    here.backend.play(flood(50 * MIB, [], ended))
    with here.client() as stalled:
        stalled.send(ask_stream())
        stalled.read_head()
        here.backend.script = answered(json_response(COMPLETION))
        for _ in range(5):
            assert here.ask(ask_whole()).json == COMPLETION
        assert ended.wait(STALL_S + 3.0)
    here.settled()


@pytest.mark.parametrize("framing", ["counted", "chunked"])
def test_s_bp_2_copies_of_a_request_body(here: Scene, framing: str) -> None:
    """Ten bodies of 20 MB at once stay near twice their size: what was read, and what the
    kernel has not taken yet."""
    size, many = 20_000_000, 10
    body = chat_body(image="QUJD" * ((size - 100) // 4))
    gate = threading.Barrier(many)

    def script(line: Line, request: Received) -> None:
        gate.wait(20)  # all bodies are in the gateway at one time
        assert request.body == body
        line.send(json_response(COMPLETION))

    here.backend.play(script)
    here.forget_peak()
    before = here.memory("VmRSS")
    if framing == "chunked":
        pieces = b"".join(chunk(body[i : i + 65536]) for i in range(0, len(body), 65536)) + LAST_CHUNK
        request = post(body=pieces, headers="Transfer-Encoding: chunked\r\n")
    else:
        request = post(body=body)
    answers: list[int] = []

    def ask() -> None:
        with here.client(30.0) as client:
            client.send(request)
            answers.append(client.read_answer().status)

    threads = [threading.Thread(target=ask) for _ in range(many)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * many
    assert here.memory("VmHWM") - before < 2.3 * many * size / MIB
    here.settled()
    eventually(lambda: here.gateway.state["held_bytes"] == 0)


def test_s_bp_2_a_running_stream_holds_no_copy_of_its_request(here: Scene) -> None:
    """Once the backend answers nobody is asked again, so the prompt may go: many long ones
    with long answers would fill the memory otherwise."""
    size, many = 20_000_000, 6
    gate = threading.Event()

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("a")))
        gate.wait(30)
        line.send(chunk(event("b")), chunk(DONE), LAST_CHUNK)

    here.backend.play(script)
    before = here.memory("VmRSS")
    request = ask_stream(image="QUJD" * (size // 4))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(here.client(30.0)) for _ in range(many)]
        for client in clients:
            client.send(request)
            client.read_until(event("a"))
        assert here.gateway.state["held_bytes"] == 0
        # What two of them took the allocator may keep, until it is told to give it back.
        eventually(lambda: here.memory("VmRSS") - before < 1.5 * size / MIB)
        gate.set()
        for client in clients:
            client.read_until(event("b"))
    here.settled()


def test_s_bp_2_a_long_body_over_tls(tmp_path: Path) -> None:
    """Whole and in order there too, twice over one connection."""
    files = ensure_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    body = chat_body(image="".join(f"{n:07}" for n in range(500_000)))
    backend = Scripted(answered(json_response(COMPLETION)), tls=context)
    tables = M + "\n[backends.tls]\nverify = false"
    with gateway_with(tmp_path, backend, more=tables) as gateway:
        for _ in range(2):
            assert gateway.ask(post(body=body)).json == COMPLETION
    backend.close()
    assert [request.body == body for request in backend.requests] == [True, True]
    assert len(backend.lines) == 1


def test_s_bp_2_a_body_over_the_cap_is_refused_unread(here: Scene) -> None:
    here.backend.play(answered(json_response(COMPLETION)))
    with here.client() as client:
        client.send(post(body=b"{", length=24 * MIB + 1))
        answer = client.read_answer()
    assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")
    assert str(24 * MIB) in answer.json["error"]["message"]
    assert here.backend.requests == []


def test_s_bp_2_a_chunked_body_over_the_cap_is_refused_at_the_cap(here: Scene) -> None:
    here.forget_peak()
    before = here.memory("VmRSS")
    block = chunk(b" " * MIB)
    with here.client() as client:
        client.send(post(body=b"", headers="Transfer-Encoding: chunked\r\n"))
        for _ in range(25):
            client.send(block)
        answer = client.read_answer()
    assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")
    assert here.memory("VmHWM") - before < 40
    eventually(lambda: here.gateway.state["held_bytes"] == 0)


def test_s_bp_2_a_backend_that_answers_before_it_has_read(here: Scene) -> None:
    """Its answer passes, and the connection with the unsent rest is reset, neither kept nor
    held open until somebody takes the rest."""
    reset: list[bool] = []

    def script(line: Line, request: Received) -> None:
        line.send(json_response({"error": {"message": "too long"}}, 413))
        poller = select.poll()
        poller.register(line.sock, 0)  # only what comes unasked: errors and hang-ups
        reset.append(bool(poller.poll(2000)))
        line.close()

    here.drop_kept()
    here.backend.play(script)
    here.backend.reads_bodies = False
    try:
        answer = here.ask(post(body=chat_body(image="QUJD" * (5 * MIB))))
        assert (answer.status, answer.json) == (413, {"error": {"message": "too long"}})
        assert eventually(lambda: reset, 3.0) == [True]
    finally:
        here.backend.reads_bodies = True
    here.settled()
