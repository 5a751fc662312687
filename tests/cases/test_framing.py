"""HTTP/1.1 framing between a client, a gateway process and a backend (cases of section 5).

The rule behind most of these: what is not framed beyond doubt gets one 400 and a
closed connection, and nothing that follows it is ever taken for a request.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import (
    COMPLETION,
    LAST_CHUNK,
    SSE_HEAD,
    Client,
    Gateway,
    Line,
    Received,
    Scripted,
    TlsClient,
    answer_completion,
    chat_body,
    chunk,
    event,
    eventually,
    free_port,
    gateway_with,
    json_response,
    post,
)

from llmgw.demo.certificate import ensure_certificate

NEXT = post()
"""A good request, put behind a bad one."""


@pytest.fixture(scope="module")
def backend() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, backend: Scripted) -> Iterator[Gateway]:
    """With a plain and a TLS listener (``tls_port``)."""
    folder = tmp_path_factory.mktemp("framing")
    files = ensure_certificate(folder)
    port, tls_port = free_port(), free_port()
    config = f"""
    listen = ["tcp:{port}:interface=127.0.0.1",
              "ssl:{tls_port}:interface=127.0.0.1:privateKey={files.key}:certKey={files.certificate}"]
    [timeouts]
    close_grace_s = 0.5
    tls_handshake_s = 0.5
    [[models]]
    name = "short"
    target = "m"
    """
    with gateway_with(folder, backend, config=config) as running:
        running.port = port
        running.tls_port = tls_port  # type: ignore[attr-defined]
        yield running


@pytest.fixture(autouse=True)
def _start_afresh(backend: Scripted, gateway: Gateway) -> Iterator[None]:
    backend.play(answer_completion)
    yield
    eventually(gateway.is_idle)
    assert not backend.errors


def connect(gateway: Gateway, *, tls: bool) -> Client:
    return TlsClient(gateway.tls_port) if tls else gateway.client()  # type: ignore[attr-defined]


def with_headers(headers: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    """A POST with these header lines beside the usual ones."""
    return (
        b"POST /v1/chat/completions HTTP/%b\r\nHost: gw.example\r\nContent-Type: application/json\r\n%b\r\n%b"
        % (version, headers, body)
    )


def chunked(body: bytes) -> bytes:
    return with_headers(b"Transfer-Encoding: chunked\r\n", body)


def assert_refused(
    gateway: Gateway, backend: Scripted, data: bytes, *, tls: bool = False, statuses: tuple[int, ...] = (400,)
) -> None:
    """``data`` is answered once, by an error, and a good request behind it not at all."""
    with connect(gateway, tls=tls) as client:
        client.send(data + NEXT)
        answer = client.read_answer()
        assert answer.status in statuses, (answer, data[:200])
        assert answer.get("connection") == "close"
        assert answer.json["error"]["message"]
        with contextlib.suppress(OSError):
            for _ in range(3):  # each its own segment, or TLS record
                client.send(NEXT)
                time.sleep(0.005)
        if tls:
            with contextlib.suppress(OSError):
                client.sock.unwrap()  # type: ignore[attr-defined]
            client.close()
        else:
            client.sock.shutdown(socket.SHUT_WR)
            assert client.is_closed()
        assert client.buffer == b"", "more than one answer"
    assert backend.requests == [], "something was forwarded"


BAD_HEADS = {
    "smg_1_both_framings": b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
    "smg_1_both_framings_reversed": b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\nG",
    "smg_1_two_lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nAAAAA",
    "smg_1_two_equal_lengths": b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "smg_1_list_of_lengths": b"Content-Length: 2, 2\r\n\r\n{}",
    "smg_1_chunked_twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "smg_1_chunked_not_last": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "smg_1_identity": b"Transfer-Encoding: identity\r\nContent-Length: 2\r\n\r\n{}",
    "smg_1_vertical_tab": b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "smg_1_parameter": b"Transfer-Encoding: chunked;a=b\r\n\r\n0\r\n\r\n",
    "smg_2_space_before_colon": b"Content-Length : 1\r\n\r\n{",
    "smg_2_tab_before_colon": b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "smg_2_no_colon": b"Content-Length\r\n\r\n",
    "smg_2_empty_name": b": x\r\nContent-Length: 0\r\n\r\n",
    "smg_3_obs_fold": b"X-A: b\r\n Content-Length: 40\r\n\r\n",
    "smg_3_obs_fold_by_tab": b"X-A: b\r\n\tTransfer-Encoding: chunked\r\n\r\n",
    "smg_4_bare_lf_line_end": b"X-A: b\nContent-Length: 2\r\n\r\n{}",
    "smg_4_bare_lf_head_end": b"Content-Length: 2\r\n\n{}",
    "smg_6_plus": b"Content-Length: +5\r\n\r\nAAAAA",
    "smg_6_minus_zero": b"Content-Length: -0\r\n\r\n",
    "smg_6_two_numbers": b"Content-Length: 5 5\r\n\r\nAAAAA",
    "smg_6_underscore": b"Content-Length: 1_0\r\n\r\nAAAAAAAAAA",
    "smg_6_hex": b"Content-Length: 0x5\r\n\r\nAAAAA",
    "smg_6_other_digits": "Content-Length: \u0665\r\n\r\nAAAAA".encode(),
    "smg_6_empty": b"Content-Length: \r\n\r\n",
    "smg_6_9000_digits": b"Content-Length: " + b"0" * 7000 + b"5\r\n\r\nAAAAA",
    "smg_7_cr_in_value": b"X-Abc: \rxTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "smg_7_nul_in_value": b"X-Abc: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    "smg_7_del_in_value": b"X-Abc: a\x7fb\r\nContent-Length: 2\r\n\r\n{}",
}

BAD_CHUNKS = {
    "smg_4_bare_lf_in_extension": b"5;x\nAAAAA\r\n0\r\n\r\n",
    "smg_4_bare_lf_after_size": b"5\nAAAAA\r\n0\r\n\r\n",
    "smg_4_bare_cr_in_extension": b"5;\rx\r\nAAAAA\r\n0\r\n\r\n",
    "smg_5_no_crlf_after_data": b"5\r\nAAAAAXY0\r\n\r\n",
    "smg_5_bare_lf_after_data": b"5\r\nAAAAA\n0\r\n\r\n",
    "smg_6_size_0x": b"0x5\r\nAAAAA\r\n0\r\n\r\n",
    "smg_6_size_underscore": b"5_0\r\nAAAAA\r\n0\r\n\r\n",
    "smg_6_size_empty": b"\r\nAAAAA\r\n0\r\n\r\n",
    "smg_6_size_of_20_digits": b"00000000000000000005\r\nAAAAA\r\n0\r\n\r\n",
    "smg_6_size_minus": b"-5\r\nAAAAA\r\n0\r\n\r\n",
    "smg_6_size_space": b" 5\r\nAAAAA\r\n0\r\n\r\n",
    "trl_1_trailer_without_colon": b"2\r\n{}\r\n0\r\nX-T\r\n\r\n",
    "trl_1_trailer_bare_lf": b"2\r\n{}\r\n0\r\nX-T: 1\n\r\n",
}


BAD = {}
for _name, _text in BAD_HEADS.items():
    _lines, _, _body = _text.partition(b"\r\n\r\n")
    BAD[_name] = with_headers(_lines + b"\r\n", _body)
BAD |= {name: chunked(body) for name, body in BAD_CHUNKS.items()}


def bad(case: str) -> pytest.MarkDecorator:
    """Every bad request of one case."""
    return pytest.mark.parametrize("name", [name for name in BAD if name.startswith(case)])


@bad("smg_1")
def test_s_smg_1_two_framings(gateway: Gateway, backend: Scripted, name: str) -> None:
    assert_refused(gateway, backend, BAD[name])


@bad("smg_2")
def test_s_smg_2_space_before_the_colon(gateway: Gateway, backend: Scripted, name: str) -> None:
    assert_refused(gateway, backend, BAD[name])


@bad("smg_3")
def test_s_smg_3_folded_line(gateway: Gateway, backend: Scripted, name: str) -> None:
    assert_refused(gateway, backend, BAD[name])


@bad("smg_4")
def test_s_smg_4_bare_line_feed(gateway: Gateway, backend: Scripted, name: str) -> None:
    assert_refused(gateway, backend, BAD[name])


@bad("smg_5")
def test_s_smg_5_wrong_terminator_after_chunk_data(gateway: Gateway, backend: Scripted, name: str) -> None:
    assert_refused(gateway, backend, BAD[name])


@bad("smg_6")
def test_s_smg_6_numbers_that_are_none(gateway: Gateway, backend: Scripted, name: str) -> None:
    assert_refused(gateway, backend, BAD[name])


@bad("smg_7")
def test_s_smg_7_control_character_in_a_value(gateway: Gateway, backend: Scripted, name: str) -> None:
    assert_refused(gateway, backend, BAD[name])


@bad("trl_1")
def test_s_trl_1_malformed_trailer(gateway: Gateway, backend: Scripted, name: str) -> None:
    assert_refused(gateway, backend, BAD[name])


@pytest.mark.parametrize("name", BAD)
def test_s_smg_over_tls_nothing_is_dispatched_after_a_400(
    gateway: Gateway, backend: Scripted, name: str
) -> None:
    """Twisted goes on delivering TLS data after ``loseConnection``; it must go nowhere."""
    assert_refused(gateway, backend, BAD[name], tls=True)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET  /health HTTP/1.1", 400),
        (b"GET /health", 400),
        (b"GET /health HTTP/1.1 ", 400),
        (b"GET /health HTTP/2.0", 505),
        (b"G\x00T /health HTTP/1.1", 400),
        (b"GET /heal\xffth HTTP/1.1", 400),
        (b"PRI * HTTP/2.0", 505),
        (b"TRACE /health HTTP/1.1", 405),
        (b"CONNECT b.example:443 HTTP/1.1", 405),
        (b"PUT /v1/chat/completions HTTP/1.1", 405),
        (b"OPTIONS * HTTP/1.1", 405),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # TLS to the plain port
    ],
)
def test_a_request_line_that_is_none_is_refused(
    gateway: Gateway, backend: Scripted, line: bytes, status: int
) -> None:
    assert_refused(gateway, backend, line + b"\r\nHost: gw.example\r\n\r\n", statuses=(status,))


def test_what_is_no_request_is_counted_as_it_is_logged(gateway: Gateway) -> None:
    def counted(status: int) -> float:
        line = f'llmgw_requests_total{{route="other",model="other",backend="",status="{status}"}} '
        _, _, rest = gateway.admin("/metrics")[1].decode().partition(line)
        return float(rest.partition("\n")[0] or 0)

    def logged(status: int) -> int:
        lines = [line for line in gateway.access if line["route"] == "other"]
        return sum(line["status"] == status for line in lines)

    before = counted(400), counted(431)
    assert gateway.ask(b"GARBAGE\r\n\r\n").status == 400
    assert gateway.ask(with_headers(b"X: %b\r\n" % (b"x" * 9000))).status == 431
    assert (counted(400), counted(431)) == (before[0] + 1, before[1] + 1)
    eventually(lambda: (logged(400), logged(431)) == (counted(400), counted(431)))


def test_a_refused_method_tells_the_allowed_ones(gateway: Gateway) -> None:
    """RFC 9110 section 15.5.6: a 405 MUST carry ``Allow``."""
    for request in (b"PUT", b"DELETE"):
        answer = gateway.ask(request + b" /v1/chat/completions HTTP/1.1\r\nHost: gw.example\r\n\r\n")
        assert answer.status == 405
        assert "POST" in (answer.get("allow") or "")


@pytest.mark.parametrize(
    "headers", [b"", b"Host: a\r\nHost: b\r\n", b"Host: a b\r\n", b"Host: a@b\r\n", b"Host: a/b\r\n"]
)
def test_a_host_that_is_missing_doubled_or_odd_is_refused(
    gateway: Gateway, backend: Scripted, headers: bytes
) -> None:
    assert_refused(gateway, backend, b"GET /v1/models HTTP/1.1\r\n" + headers + b"\r\n")


def test_s_smg_8_chunk_extension_without_end(gateway: Gateway, backend: Scripted) -> None:
    with gateway.client() as client:
        client.send(chunked(b"5;"))
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 5_000_000:
                client.sock.sendall(b"a" * 100)
                sent += 100
                if sent > 2000 and client.sock.recv(1, socket.MSG_PEEK):
                    break
        assert sent < 10_000
        answer = client.read_answer()
        assert answer.status == 400
    assert backend.requests == []


def test_s_smg_8_many_small_extensions(gateway: Gateway, backend: Scripted) -> None:
    assert_refused(gateway, backend, chunked(b"1;abcdefghij\r\nA\r\n" * 1000 + LAST_CHUNK))


def test_s_smg_9_slow_answer_then_a_bad_request_in_one_segment(gateway: Gateway, backend: Scripted) -> None:
    def slowly(line: Line, request: Received) -> None:
        line.send(SSE_HEAD)
        for text in "abc":
            time.sleep(0.05)
            line.send(chunk(event(text)))
        line.send(chunk(b"data: [DONE]\n\n"), LAST_CHUNK)

    backend.play(slowly)
    with gateway.client() as client:
        client.send(post(body=chat_body(stream=True)) + b"BAD REQUEST LINE\r\n\r\n" + NEXT)
        first = client.read_answer()
        assert (first.status, first.clean) == (200, True)
        assert first.body == event("a") + event("b") + event("c") + b"data: [DONE]\n\n"
        second = client.read_answer()
        assert second.status == 400
        client.sock.shutdown(socket.SHUT_WR)
        assert client.is_closed()
        assert client.buffer == b""
    assert len(backend.requests) == 1


@pytest.mark.parametrize("tls", [False, True])
def test_fifty_pipelined_requests_are_answered_in_their_order(
    gateway: Gateway, backend: Scripted, tls: bool
) -> None:
    def echo(line: Line, request: Received) -> None:
        line.send(json_response({**COMPLETION, "id": request.json["messages"][0]["content"]}))

    backend.play(echo)
    requests = []
    for number in range(50):
        kind = number % 3
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"r{number}"}]}).encode()
        if kind == 0:
            requests.append(post(body=body))
        elif kind == 1:
            requests.append(chunked(chunk(body[:20]) + chunk(body[20:]) + LAST_CHUNK))
        else:
            requests.append(b"GET /health HTTP/1.1\r\nHost: gw.example\r\n\r\n")
    data = b"".join(requests)
    with connect(gateway, tls=tls) as client:
        client.send(*(data[at : at + 4097] for at in range(0, len(data), 4097)))
        for number in range(50):
            answer = client.read_answer()
            assert answer.status == 200
            found = answer.json.get("id", answer.json.get("status"))
            assert found == (f"r{number}" if number % 3 < 2 else "ok")
    assert len(backend.requests) == 34


def test_a_flood_of_pipelined_bytes_is_not_read_ahead(gateway: Gateway, backend: Scripted) -> None:
    """While one request is at work, the next ones wait in the client's socket, not in our memory."""
    release: list[bool] = []

    def held(line: Line, request: Received) -> None:
        eventually(lambda: release)
        answer_completion(line, request)

    backend.play(held)
    with gateway.client() as client:
        client.send(post())
        eventually(lambda: backend.requests)
        client.sock.settimeout(0.3)
        more = NEXT * 100
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 64 << 20:
                sent += client.sock.send(more)
        release.append(True)
        assert sent < 16 << 20
        client.sock.settimeout(10)
        assert client.read_answer().status == 200
        assert client.read_answer().status == 200


def test_s_100_1_continue_is_sent_at_once_and_before_the_body(gateway: Gateway, backend: Scripted) -> None:
    body = chat_body(user="x" * 1100)
    with gateway.client() as client:
        begun = time.monotonic()
        head = post(body=b"", length=len(body), headers="Expect: 100-continue\r\n")
        client.send(head)
        status, _ = client.read_head()
        assert (status, time.monotonic() - begun < 0.5) == (100, True)
        client.send(body)
        assert client.read_answer().status == 200
        assert time.monotonic() - begun < 0.9
        # The connection goes on, also for a client that does not wait.
        client.send(post(body=body, headers="expect: 100-Continue\r\n"))
        status, _ = client.read_head()
        assert status in (100, 200)
    assert backend.requests[0].body == body
    assert backend.requests[0].get("expect") is None


def test_s_100_1_no_continue_for_http_1_0_or_without_a_body(gateway: Gateway) -> None:
    for request in (
        post(version="1.0", headers="Expect: 100-continue\r\n"),
        b"GET /health HTTP/1.1\r\nHost: gw.example\r\nExpect: 100-continue\r\n\r\n",
    ):
        with gateway.client() as client:
            client.send(request)
            assert client.read_head()[0] == 200


def test_s_1xx_1_interim_responses_of_a_backend_are_not_the_answer(
    gateway: Gateway, backend: Scripted
) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n"

    def early(line: Line, request: Received) -> None:
        line.send(interim + hints, json_response(COMPLETION), gap_s=0.02)

    backend.play(early)
    with gateway.client() as client:
        for _ in range(2):
            client.send(post())
            answer = client.read_answer()
            assert (answer.status, answer.json["id"]) == (200, "c1")


def test_s_1xx_1_endless_interim_responses_are_a_502(gateway: Gateway, backend: Scripted) -> None:
    backend.play(lambda line, request: line.send(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50))
    assert gateway.ask(post()).status == 502


def test_s_head_1_head_has_the_length_and_no_body(gateway: Gateway, backend: Scripted) -> None:
    with gateway.client() as client:
        for path in (b"/v1/models", b"/health", b"/v1/models/m", b"/nothing-here"):
            client.send(b"HEAD %b HTTP/1.1\r\nHost: gw.example\r\n\r\n" % path)
            head = client.read_answer("HEAD")
            client.send(b"GET %b HTTP/1.1\r\nHost: gw.example\r\n\r\n" % path)
            got = client.read_answer("GET")
            assert head.status == got.status
            assert int(head.get("content-length") or 0) == len(got.body) > 0
        client.send(b"HEAD /v1/models HTTP/1.1\r\nHost: gw.example\r\n\r\n" * 3)
        assert [client.read_answer("HEAD").status for _ in range(3)] == [200, 200, 200]


def test_s_204_1_options_then_post_on_one_connection(gateway: Gateway, backend: Scripted) -> None:
    with gateway.client() as client:
        for _ in range(3):
            client.send(b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: gw.example\r\n\r\n")
            answer = client.read_answer("OPTIONS")
            assert answer.status == 204
            assert answer.get("transfer-encoding") is None
            assert answer.get("content-length") is None
            client.send(post())
            assert client.read_answer().json["id"] == "c1"


@pytest.mark.parametrize("status", [204, 304])
def test_s_204_1_a_backend_answers_204_or_304(gateway: Gateway, backend: Scripted, status: int) -> None:
    def empty(line: Line, request: Received) -> None:
        length = "Content-Length: 20\r\n" if status == 304 else ""
        line.send(f"HTTP/1.1 {status} X\r\n{length}\r\n".encode())

    backend.play(empty)
    with gateway.client() as client:
        for _ in range(2):
            client.send(post())
            answer = client.read_answer()
            assert answer.status == status
            assert answer.get("transfer-encoding") is None
        backend.script = answer_completion
        client.send(post())
        assert client.read_answer().json["id"] == "c1"


def test_s_trl_1_trailers_of_a_backend_leave_the_body_clean(gateway: Gateway, backend: Scripted) -> None:
    backend.play(lambda line, request: line.send(SSE_HEAD + chunk(event("a")) + b"0\r\nX-T: 1\r\n\r\n"))
    with gateway.client() as client:
        for _ in range(2):
            client.send(post(body=chat_body(stream=True)))
            answer = client.read_answer()
            assert (answer.clean, answer.body) == (True, event("a"))
            assert answer.get("x-t") is None
        backend.script = answer_completion
        client.send(post())
        assert client.read_answer().status == 200


def test_s_trl_1_trailers_of_a_client_are_dropped(gateway: Gateway, backend: Scripted) -> None:
    answer = gateway.ask(chunked(chunk(chat_body()) + b"0\r\nX-T: 1\r\nAuthorization: Bearer x\r\n\r\n"))
    assert answer.status == 200
    assert backend.requests[0].get("x-t") is None
    assert backend.requests[0].get("authorization") is None


def test_s_trl_1_ten_megabytes_of_trailers(gateway: Gateway, backend: Scripted) -> None:
    with gateway.client() as client:
        client.send(chunked(chunk(chat_body()) + b"0\r\n"))
        with contextlib.suppress(OSError):
            for _ in range(100):
                client.send(b"X-Trailer: 0123456789\r\n" * 4500)
        answer = client.read_answer()
        assert answer.status in (400, 431)
        assert gateway.state["held_bytes"] < 1 << 20
    assert backend.requests == []


# --- responses -------------------------------------------------------------------


BODY = json.dumps(COMPLETION).encode()
UNCLEAR_RESPONSES = {
    "te_twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunk(BODY)
    + LAST_CHUNK,
    "te_and_length": b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n" + chunk(BODY) + LAST_CHUNK,
    "two_lengths": b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "smg_5_wrong_terminator": b"Transfer-Encoding: chunked\r\n\r\n5\r\nAAAAAXY0\r\n\r\n",
    "smg_6_size": b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nAAAAA\r\n0\r\n\r\n",
    "smg_4_bare_lf": b"Transfer-Encoding: chunked\r\n\r\n5;a\nAAAAA\r\n0\r\n\r\n",
    "smg_3_obs_fold": b"X-A: b\r\n Content-Length: 40\r\n\r\n",
    "smg_7_cr": b"X-A: b\rSet-Cookie: a=b\r\nContent-Length: 2\r\n\r\n{}",
    "bad_length": b"Content-Length: +2\r\n\r\n{}",
}


@pytest.mark.parametrize("name", UNCLEAR_RESPONSES)
def test_s_rsp_1_a_backend_with_unclear_framing_is_a_502_or_a_cut(
    gateway: Gateway, backend: Scripted, name: str
) -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + UNCLEAR_RESPONSES[name]
    backend.play(lambda line, request: line.send(raw))
    with gateway.client() as client:
        client.send(post())
        answer = client.read_answer()
        assert answer.status == 502 or not answer.clean, answer
        framings = [key for key, _ in answer.headers if key in ("transfer-encoding", "content-length")]
        assert len(framings) == 1
        if answer.status == 502:
            assert answer.json["error"]["code"] == "upstream_error"
        else:
            assert client.is_closed()
    # That backend connection is never used again, and the backend is.
    backend.script = answer_completion
    assert gateway.ask(post()).json["id"] == "c1"
    assert backend.requests[-1].head != b""
    assert backend.lines[0] is not backend.lines[-1]


def test_s_rsp_1_one_framing_header_is_ours(gateway: Gateway, backend: Scripted) -> None:
    def close_delimited(line: Line, request: Received) -> None:
        line.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + BODY)
        line.close()

    for script, body in (
        (close_delimited, BODY),
        (lambda line, request: line.send(SSE_HEAD + chunk(b"a") + chunk(b"b") + LAST_CHUNK), b"ab"),
    ):
        backend.play(script)
        answer = gateway.ask(post(body=chat_body(stream=True)))
        assert (answer.clean, answer.body) == (True, body)
        assert answer.get("transfer-encoding") == "chunked"
        assert answer.get("content-length") is None


def test_s_rsp_1_more_bytes_than_promised_reach_nobody(gateway: Gateway, backend: Scripted) -> None:
    stray = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nstray"
    backend.play(lambda line, request: line.send(json_response(COMPLETION) + stray))
    with gateway.client() as client:
        for _ in range(3):
            client.send(post())
            assert client.read_answer().json["id"] == "c1"
    assert len(backend.lines) == 3


@pytest.mark.parametrize(
    "headers",
    [
        "x-request-id: a%0d%0aSet-Cookie: b=c\r\n",
        "x-request-id: a\u00e9\r\n",
        "x-request-id: " + "a" * 129 + "\r\n",
        "x-request-id: a b\r\n",
        "x-request-id: a\r\nx-request-id: b\r\n",
    ],
)
def test_s_rsp_2_what_is_echoed_cannot_split_a_response(
    gateway: Gateway, backend: Scripted, headers: str
) -> None:
    answer = gateway.ask(post(headers=headers, body=chat_body("m\r\nSet-Cookie: b=c")))
    assert answer.status == 404
    assert answer.get("set-cookie") is None
    assert (answer.get("x-request-id") or "").isalnum()
    answer = gateway.ask(post(headers=headers))
    assert answer.status == 200
    assert answer.get("set-cookie") is None
    assert backend.requests[0].get("x-request-id") == answer.get("x-request-id")


def test_a_request_id_of_the_client_is_kept(gateway: Gateway, backend: Scripted) -> None:
    answer = gateway.ask(post(headers="x-request-id: req-1:a_b.C\r\n"))
    assert answer.get("x-request-id") == "req-1:a_b.C" == backend.requests[0].get("x-request-id")


def test_every_answer_has_a_request_id(gateway: Gateway) -> None:
    """Also the one to bytes that are no request."""
    for data in (b"BAD\r\n\r\n", b"GET /no HTTP/1.1\r\nHost: a\r\n\r\n", chunked(b"0x5\r\n")):
        answer = gateway.ask(data)
        assert answer.status >= 400
        assert answer.get("x-request-id")


def test_s_req_1_a_chunked_request_goes_on_with_a_length(gateway: Gateway, backend: Scripted) -> None:
    body = chat_body(user="\u00e9" * 50)
    pieces = [chunk(body[at : at + 7]) for at in range(0, len(body), 7)]
    with gateway.client() as client:
        client.send(chunked(b""))
        client.send(*pieces, gap_s=0.001)
        client.send(LAST_CHUNK)
        assert client.read_answer().status == 200
    [request] = backend.requests
    assert request.body == body
    assert request.get("content-length") == str(len(body))
    assert request.get("transfer-encoding") is None


def test_s_req_2_a_rewritten_body_has_its_own_length(gateway: Gateway, backend: Scripted) -> None:
    body = chat_body("short")
    for request in (post(body=body), chunked(chunk(body) + LAST_CHUNK)):
        backend.play(answer_completion)
        assert gateway.ask(request).status == 200
        [sent] = backend.requests
        assert sent.json == json.loads(body) | {"model": "m"}
        assert sent.get("content-length") == str(len(sent.body))


# --- HTTP/1.0, and sizes -----------------------------------------------------------


def test_s_10_1_an_old_client_gets_a_stream_ended_by_close(gateway: Gateway, backend: Scripted) -> None:
    with gateway.client() as client:
        client.send(post(body=chat_body(stream=True), version="1.0"))
        answer = client.read_answer()
        assert answer.status == 200
        assert answer.get("transfer-encoding") is None
        assert answer.get("connection") == "close"
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert answer.clean


def test_s_10_1_an_old_client_sees_that_a_stream_was_cut(gateway: Gateway, backend: Scripted) -> None:
    """Without framing only a reset tells it (RFC 9112 section 8)."""

    def cut(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("a")))
        time.sleep(0.05)
        line.close()

    backend.play(cut)
    with gateway.client() as client:
        client.send(post(body=chat_body(stream=True), version="1.0"))
        answer = client.read_answer()
        assert answer.status == 200
        assert not answer.clean or b'"error"' in answer.body


def test_s_10_1_keep_alive_for_an_old_client_that_asks_for_it(gateway: Gateway, backend: Scripted) -> None:
    with gateway.client() as client:
        for _ in range(3):
            client.send(post(version="1.0", headers="Connection: keep-alive\r\n"))
            answer = client.read_answer()
            assert answer.get("connection") == "keep-alive"
            assert answer.get("content-length")
        client.send(post(version="1.0"))
        assert client.read_answer().get("connection") == "close"
        assert client.is_closed()


@pytest.mark.parametrize(
    "value",
    ["close", "keep-alive,close", "keep-alive, close", "Close", "x, close, y", "close\r\nConnection: x"],
)
def test_connection_close_is_found_wherever_it_stands(
    gateway: Gateway, backend: Scripted, value: str
) -> None:
    with gateway.client() as client:
        client.send(post(headers=f"Connection: {value}\r\n"))
        assert client.read_answer().get("connection") == "close"
        assert client.is_closed()


LONG = {
    "uri": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    "query": (b"GET /v1/models?" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    "cookie": (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nCookie: " + b"c" * 20_000 + b"\r\n\r\n", 431),
    "count": (b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + b"X-A: 1\r\n" * 600 + b"\r\n", 431),
    "all": (
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + (b"X-A: " + b"b" * 5000 + b"\r\n") * 8 + b"\r\n",
        431,
    ),
}


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("name", LONG)
def test_s_hdr_1_a_long_head_is_answered_then_closed(
    gateway: Gateway, backend: Scripted, name: str, tls: bool
) -> None:
    data, status = LONG[name]
    assert_refused(gateway, backend, data, tls=tls, statuses=(status,))


@pytest.mark.parametrize("tls", [False, True])
def test_s_hdr_1_the_answer_is_not_lost_to_a_reset(gateway: Gateway, backend: Scripted, tls: bool) -> None:
    """The client sends megabytes that nobody wants, and reads only then."""
    with connect(gateway, tls=tls) as client:
        client.send(b"GET /" + b"a" * 20_000)
        with contextlib.suppress(OSError):
            for _ in range(32):
                client.send(b"a" * 65_536)
        assert client.read_answer().status == 414


def test_s_hdr_2_long_header_of_a_backend(gateway: Gateway, backend: Scripted) -> None:
    def with_header(size: int) -> Callable[[Line, Received], None]:
        return lambda line, request: line.send(json_response(COMPLETION, headers=f"X-Long: {'a' * size}\r\n"))

    backend.play(with_header(20_000))
    answer = gateway.ask(post())
    assert (answer.status, len(answer.get("x-long") or "")) == (200, 20_000)
    backend.play(with_header(40_000))
    answer = gateway.ask(post())
    assert answer.status == 502
    assert "header" in answer.json["error"]["message"]
    assert any("b0" in line and "header" in line for line in gateway.log.splitlines()), gateway.log


# --- closing -----------------------------------------------------------------------


def half_open_tls(gateway: Gateway) -> tuple[socket.socket, ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    """TLS by hand, so that nothing is answered that we do not answer."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    raw = socket.create_connection(("127.0.0.1", gateway.tls_port), 10)  # type: ignore[attr-defined]
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            raw.sendall(outgoing.read())
            incoming.write(raw.recv(65536))
    raw.sendall(outgoing.read())
    return raw, tls, incoming, outgoing


def until_gone(raw: socket.socket) -> float:
    begun = time.monotonic()
    with contextlib.suppress(ConnectionResetError):
        while raw.recv(65536):
            pass
    return time.monotonic() - begun


@pytest.mark.parametrize("request_", [b"BAD\r\n\r\n", post(headers="Connection: close\r\n")])
def test_a_tls_peer_that_never_says_goodbye_is_gone_after_the_grace(
    gateway: Gateway, request_: bytes
) -> None:
    raw, tls, _, outgoing = half_open_tls(gateway)
    tls.write(request_)
    raw.sendall(outgoing.read())
    assert until_gone(raw) < 2.5
    raw.close()
    eventually(lambda: gateway.state["connections"] == 0, 2)


def test_a_handshake_that_never_ends_is_gone_after_its_time(gateway: Gateway) -> None:
    raw = socket.create_connection(("127.0.0.1", gateway.tls_port), 10)  # type: ignore[attr-defined]
    raw.sendall(b"\x16\x03\x01")
    assert until_gone(raw) < 2.5
    raw.close()


def test_a_client_that_shuts_its_side_down_has_left(gateway: Gateway, backend: Scripted) -> None:
    backend.play(lambda line, request: line.wait_closed())
    with gateway.client() as client:
        client.send(post())
        eventually(lambda: backend.requests)
        client.sock.shutdown(socket.SHUT_WR)
        assert client.is_closed(2)
    assert (Path(gateway.folder) / "access.log").exists()
