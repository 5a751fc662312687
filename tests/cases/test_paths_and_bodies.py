"""Paths, queries, bodies and models through a gateway process (cases of section 7)."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import (
    COMPLETION,
    LAST_CHUNK,
    SSE_HEAD,
    Answer,
    Gateway,
    Line,
    Received,
    Scripted,
    answer_completion,
    backend_table,
    chat_body,
    chunk,
    event,
    eventually,
    gateway_with,
    json_response,
    post,
)

LIMIT = 30_000_000
"""The body limit of the gateway here."""
NAMES = ["m", "org/model:tag@v1.2", "with space", "\u6a21\u578b", "M", 'quo"te', "back\\slash"]


@pytest.fixture(scope="module")
def backend() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


@pytest.fixture(scope="module")
def spare() -> Iterator[Scripted]:
    """A second backend of the same models, to see what is retried."""
    scripted = Scripted()
    yield scripted
    scripted.close()


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, backend: Scripted, spare: Scripted
) -> Iterator[Gateway]:
    config = f"""
    [limits]
    body_bytes = {LIMIT}
    [[models]]
    name = "alias"
    target = "m"
    """
    more = f"models = {json.dumps(NAMES, ensure_ascii=False)}\nmax_connections = 100"
    folder = tmp_path_factory.mktemp("paths")
    with gateway_with(folder, backend, spare, config=config, more=more) as running:
        yield running


@pytest.fixture(autouse=True)
def _start_afresh(backend: Scripted, spare: Scripted, gateway: Gateway) -> Iterator[None]:
    backend.play(answer_completion)
    spare.play(answer_completion)
    yield
    eventually(gateway.is_idle)
    assert not backend.errors + spare.errors
    assert gateway.state["held_bytes"] == 0


@pytest.fixture
def received(backend: Scripted, spare: Scripted) -> list[Received]:
    """What either backend gets from now on."""
    both: list[Received] = []
    backend.requests = spare.requests = both
    return both


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: gw.example\r\n\r\n".encode()


def assert_error(answer: Answer, status: int, code: str, *, about: str = "") -> None:
    assert answer.status == status, answer
    assert (answer.get("content-type") or "").startswith("application/json")
    assert answer.json["error"]["code"] == code
    assert about in answer.json["error"]["message"]


# --- paths -------------------------------------------------------------------------


def test_s_path_1_base_urls_are_joined_without_doubling(tmp_path: Path) -> None:
    bases = {
        "b": "",
        "b-slash": "/",
        "b-v1": "/v1",
        "b-v1-slash": "/v1/",
        "b-prefix": "/prefix/",
        "b-p1": "/p/v1",
    }
    backends = {id: Scripted() for id in bases}
    config = ""
    for id, backend in backends.items():
        backend.url += bases[id]
        config += backend_table(backend, id, f'models = ["{id}"]')
    with gateway_with(tmp_path, config='[log]\naccess = "access.log"\n' + config) as gateway:
        for id in bases:
            for path in ("/v1/chat/completions", "/chat/completions", "/v1/embeddings", "/tokenize"):
                gateway.ask(post(path, chat_body(id)))
    seen = {
        id: [request.target for request in backend.requests if request.method == "POST"]
        for id, backend in backends.items()
    }
    plain = ["/v1/chat/completions", "/chat/completions", "/v1/embeddings", "/tokenize"]
    prefixes = {"b-prefix": "/prefix", "b-p1": "/p"}
    for id in bases:
        assert seen[id] == [prefixes.get(id, "") + path for path in plain]
        probes = {request.target for request in backends[id].requests + backends[id].probed}
        assert prefixes.get(id, "") + "/health" in probes
        assert not any("//" in probe or "/v1/v1" in probe for probe in probes)
        backends[id].close()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/../../slots",
        "/v1/%2e%2e/metrics",
        "/v1/%2E%2E/metrics",
        "/v1/....//admin",
        "/..",
        "/v1/chat%2fcompletions",
        "/v1%2Fmodels",
        "/v1/models%00",
        "/v1\\models",
        "/v1/models/..%2f..%2fslots",
        "/v1/%zz",
        "/./v1/models",
        "/%76%31/models",
        "/v1/models/../../slots",
        "/slots",
        "/props",
        "/metrics",
        "/lora-adapters",
        "/models/load",
        "/api/state",
        "/",
        "",
    ],
)
def test_s_path_2_no_way_round_the_list_of_paths(
    gateway: Gateway, received: list[Received], backend: Scripted, path: str
) -> None:
    probes = len(backend.probed)
    for request in (get(path), post(path or "x")):
        answer = gateway.ask(request, "GET")
        assert answer.status in (400, 404), (path, answer)
        assert answer.json["error"]["message"]
    assert received == []
    assert len(backend.probed) - probes < 8  # its own health checks at most


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1//models", "/v1/models/", "/v1/chat/completions/", "///"]
)
def test_s_path_3_extra_slashes_are_a_404_in_json(
    gateway: Gateway, received: list[Received], path: str
) -> None:
    for request in (get(path), post(path)):
        assert_error(gateway.ask(request, "GET"), 404, "not_found")
    assert received == []


@pytest.mark.parametrize("path", ["/api/embed", "/api/show", "/api/version", "/api/ps", "/api/pull"])
def test_what_ollama_has_and_we_do_not_is_told_in_its_form(
    gateway: Gateway, received: list[Received], path: str
) -> None:
    """Its clients show ``error`` as it is; an object there is ``[object Object]``."""
    for request in (get(path), post(path)):
        answer = gateway.ask(request, "GET")
        assert (answer.status, answer.json) == (404, {"error": f"no such path: {path}"})
    assert received == []


@pytest.mark.parametrize("base", ["", "/v1/v1"])
def test_a_wrong_base_url_is_told_in_the_form_of_the_client(gateway: Gateway, base: str) -> None:
    """What cannot read an error shows ``Not Found``, and not the path that would explain it."""
    for path in ("/messages", "/messages/count_tokens"):
        answer = gateway.ask(post(base + path))
        assert (answer.status, answer.json["type"]) == (404, "error")
        assert answer.json["error"]["message"] == f"no such path: {base}{path}"
    assert_error(gateway.ask(post("/v1/v1/chat/completions")), 404, "not_found")
    assert_error(gateway.ask(post("/v1/threads/t/messages")), 404, "not_found")
    assert gateway.ask(post("/v1/api/chat")).json == {"error": "no such path: /v1/api/chat"}


def test_every_error_on_a_path_quotes_it_safely(gateway: Gateway) -> None:
    answer = gateway.ask(get("/" + "<script>" * 400))
    assert answer.status == 404
    assert len(answer.body) < 1000
    assert (answer.get("content-type") or "").startswith("application/json")


@pytest.mark.parametrize(
    "query", ["a=b%20c&a=2&e=", "x", "=", "a=1&", "&&a", "a=%E2%82%AC&b=+", "?", "a=?b/c;d"]
)
def test_s_qry_1_the_query_is_passed_byte_for_byte(
    gateway: Gateway, received: list[Received], query: str
) -> None:
    assert gateway.ask(post(f"/v1/chat/completions?{query}")).status == 200
    assert received[0].target == f"/v1/chat/completions?{query}"


def test_s_qry_2_only_the_body_names_the_model(gateway: Gateway, received: list[Received]) -> None:
    answer = gateway.ask(post("/v1/chat/completions?model=M", headers="x-model: M\r\nx-llmgw-model: M\r\n"))
    assert answer.status == 200
    assert received[0].json["model"] == "m"
    assert received[0].get("x-model") is None
    lines = eventually(lambda: [line for line in gateway.access if line["id"] == answer.get("x-request-id")])
    assert lines[0]["model"] == "m"
    assert_error(gateway.ask(post("/v1/chat/completions?model=m", chat_body("x"))), 404, "model_not_found")


# --- the model's name ----------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"model":null}',
        b'{"model":""}',
        b'{"model":1}',
        b'{"model":["m"]}',
        b'{"model":{"m":1}}',
        b"null",
        b"",
        b"[]",
        b'"m"',
        b"{",
        b'{"Model":"m"}',
        b"\xff\xfe",
        b'{"model":"\\ud800"}',
    ],
)
def test_s_mod_1_no_model_is_a_400_that_says_so(
    gateway: Gateway, received: list[Received], body: bytes
) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/v1/responses"):
        answer = gateway.ask(post(path, body))
        assert answer.status == 400, answer
        assert answer.json["error"]["message"]
    assert received == []


@pytest.mark.parametrize("body", [b"{}", b'{"model":null}', b'{"model":""}', b"null", b""])
def test_s_mod_1_the_message_names_model(gateway: Gateway, body: bytes) -> None:
    assert "model" in gateway.ask(post(body=body)).json["error"]["message"]


def test_s_mod_2_an_unknown_model(gateway: Gateway, received: list[Received]) -> None:
    name = 'x\r\n"<script>\u6a21' + "y" * 200
    answer = gateway.ask(post(body=chat_body(name)))
    assert_error(answer, 404, "model_not_found")
    assert "\n" not in answer.json["error"]["message"]
    assert len(answer.json["error"]["message"]) < 400
    assert answer.json["error"]["param"] == "model"
    for long in ("y" * 257, "y" * 10_000, "模" * 5000, "y" * 5_000_000):
        answer = gateway.ask(post(body=chat_body(long)))
        assert_error(answer, 404, "model_not_found")
        assert 200 < len(answer.json["error"]["message"]) < 600
    assert received == []
    metrics = gateway.admin("/metrics")[1]
    assert b"<script" not in metrics
    assert b"yyyy" not in metrics
    assert all(set(backend["breakers"]) <= set(NAMES) for backend in gateway.state["backends"])


def test_a_long_prompt_of_token_numbers_is_no_bomb(gateway: Gateway, received: list[Received]) -> None:
    """Its commas are no structure, wherever a prompt may be given so."""
    numbers = b",".join([b"7"] * 150_000)
    for path, member in (
        ("/v1/completions", b"prompt"),
        ("/completion", b"prompt"),
        ("/completions", b"prompt"),
        ("/v1/embeddings", b"input"),
        ("/detokenize", b"tokens"),
    ):
        body = b'{"model":"m","%b":[%b]}' % (member, numbers)
        assert gateway.ask(post(path, body)).status == 200
        assert received[-1].body == body
    flat = b'{"model":"m","messages":[],"x":[%b]}' % numbers
    assert_error(gateway.ask(post("/v1/chat/completions", flat)), 400, "invalid_request")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","model":"M","messages":[]}',
        b'{"model":"M","messages":[],"model":"m"}',
        b'{"model":"m","mod\\u0065l":"M","messages":[]}',
        b'{"model":"m","Model":"M","messages":[]}',
        b'{"model":"m","stream":true,"stream":false,"messages":[]}',
        b'{"model":"m","messages":[],"stream_options":{"include_usage":true,"include_usage":false}}',
        b'{"model":"m","max_tokens":1,"messages":[],"max_tokens":100000}',
        b'{"model":"m","messages":[{"role":"user","content":"a","content":"b"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": [{"text": "a", "text": "b"}]}]}',
        b'{"model":"m","messages":[{"content":"%b"},{"content":"a","content":"b"}]}' % (b"x" * 3_000_000),
    ],
    ids=lambda body: body[:60],
)
def test_s_mod_3_doubled_keys_are_refused(gateway: Gateway, received: list[Received], body: bytes) -> None:
    assert_error(gateway.ask(post(body=body)), 400, "invalid_request")
    assert received == []


PINGER = """
import select, socket, sys, time
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
worst = 0.0
print("on", flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    begun = time.monotonic()
    sock.sendall(b"GET /health HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
    sock.recv(65536)
    worst = max(worst, time.monotonic() - begun)
print(worst)
"""


def worst_delay(gateway: Gateway, request: bytes) -> float:
    """The longest that others wait while ``request`` is served, as a process of its own sees it."""
    pinger = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", PINGER, str(gateway.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert pinger.stdout is not None
    pinger.stdout.readline()
    assert gateway.ask(request).status == 200
    return float(pinger.communicate("")[0])


def test_s_mod_4_a_model_behind_20_mb_does_not_hold_up_others(
    gateway: Gateway, received: list[Received]
) -> None:
    """The best of some tries counts: the machine may be busy with something else."""
    image = b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:;base64,'
    request = post(body=image + b"QUJD" * 5_000_000 + b'"}}]}],"model":"m"}')
    delays = [worst_delay(gateway, request)]
    while min(delays) >= 0.05 and len(delays) < 25:
        delays.append(worst_delay(gateway, request))
    assert min(delays) < 0.05, delays
    assert received[-1].body == request.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("name", NAMES)
def test_s_mod_5_names_are_compared_after_decoding(
    gateway: Gateway, received: list[Received], name: str
) -> None:
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in name)
    bodies = [
        chat_body(name),
        json.dumps({"model": name, "messages": []}, ensure_ascii=False).encode(),
        f'{{"mod\\u0065l":"{escaped}","messages":[]}}'.encode(),
    ]
    for body in bodies:
        assert gateway.ask(post(body=body)).status == 200
    assert [request.body for request in received] == bodies


@pytest.mark.parametrize("name", ["m ", " m", "m\x00", "org/model:tag", "WITH SPACE", "\u6a21", "m\u0301"])
def test_s_mod_5_and_exactly(gateway: Gateway, received: list[Received], name: str) -> None:
    assert_error(gateway.ask(post(body=chat_body(name))), 404, "model_not_found")
    assert received == []


# --- multipart -----------------------------------------------------------------------

BOUNDARY = "------------------------d74496d66958873e"


def form(*parts: tuple[str, bytes], boundary: str = BOUNDARY) -> bytes:
    out = b""
    for disposition, content in parts:
        head = f"--{boundary}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n"
        out += head.encode() + content + b"\r\n"
    return out + f"--{boundary}--\r\n".encode()


def post_form(body: bytes, content_type: str = f"multipart/form-data; boundary={BOUNDARY}") -> bytes:
    head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: gw.example\r\nContent-Type: {content_type}\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_s_mpt_1_a_form_is_routed_by_its_field(gateway: Gateway, received: list[Received]) -> None:
    sound = os.urandom(1 << 20) * 10
    body = form(('name="file"; filename="a.wav"', sound), ('name="model"', b"m"))
    answer = gateway.ask(post_form(body))
    assert answer.status == 200
    assert received[0].body == body
    assert received[0].get("content-type") == f"multipart/form-data; boundary={BOUNDARY}"
    assert received[0].get("content-length") == str(len(body))


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ([('name="model"', b"no-such")], 404, "model_not_found"),
        ([('name="file"; filename="a"', b"x")], 400, "invalid_request"),
        ([('name="model"', b"m"), ('name="model"', b"M")], 400, "invalid_request"),
        ([('name="model"', b"")], 400, "invalid_request"),
    ],
)
def test_s_mpt_1_a_form_without_one_clear_model(
    gateway: Gateway, received: list[Received], parts: list[tuple[str, bytes]], status: int, code: str
) -> None:
    assert_error(gateway.ask(post_form(form(*parts))), status, code)
    assert received == []


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data", "text/plain", ""])
def test_s_mpt_1_no_form_at_all(gateway: Gateway, received: list[Received], content_type: str) -> None:
    assert gateway.ask(post_form(chat_body(), content_type)).status in (400, 415)
    assert received == []


def test_s_mpt_2_an_alias_changes_one_field_and_no_more(gateway: Gateway, received: list[Received]) -> None:
    parts = [('name="file"; filename="a.wav"', os.urandom(100_000)), ('name="language"', b"de")]
    body = form(*parts, ('name="model"', b"alias"), ('name="stream"', b"false"))
    before = set(os.listdir("/tmp"))
    assert gateway.ask(post_form(body)).status == 200
    assert received[0].body == form(*parts, ('name="model"', b"m"), ('name="stream"', b"false"))
    assert received[0].get("content-length") == str(len(received[0].body))
    with gateway.client() as client:  # and one that is broken off
        client.send(post_form(body)[:50_000])
    assert not [name for name in set(os.listdir("/tmp")) - before if "llmgw" in name]


# --- bodies --------------------------------------------------------------------------


def body_of(size: int) -> bytes:
    """A chat body of exactly ``size`` bytes."""
    empty = len(chat_body(user=""))
    return chat_body(user="x" * (size - empty))


def chunked_post(body: bytes, size: int = 65_536) -> Iterator[bytes]:
    yield (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: gw.example\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    for at in range(0, len(body), size):
        yield chunk(body[at : at + size])
    yield LAST_CHUNK


def test_s_body_1_one_byte_under_and_over_the_limit(gateway: Gateway, received: list[Received]) -> None:
    assert gateway.ask(post(body=body_of(LIMIT))).status == 200
    assert len(received[0].body) == LIMIT
    answer = gateway.ask(post(body=b"", length=LIMIT + 1))  # before a byte of it is there
    assert_error(answer, 413, "body_too_large", about=str(LIMIT))
    assert answer.get("connection") == "close"
    assert len(received) == 1


def test_s_body_1_a_chunked_body_is_counted_while_it_is_read(
    gateway: Gateway, received: list[Received]
) -> None:
    with gateway.client() as client:
        with contextlib.suppress(OSError):
            client.send(*chunked_post(body_of(LIMIT + 1), 1 << 20))
        assert_error(client.read_answer(), 413, "body_too_large", about=str(LIMIT))
    with gateway.client() as client:
        client.send(post("/v1/messages", b"", length=LIMIT + 1))
        assert client.read_answer().json["error"]["type"] == "request_too_large"
    assert received == []


def test_s_body_1_the_answer_is_read_by_a_client_that_sends_on(gateway: Gateway) -> None:
    """It would be lost to a reset if the gateway just closed (RFC 9112 section 9.6)."""
    with gateway.client() as client:
        with contextlib.suppress(OSError):
            client.send(post(body=b"", length=LIMIT + 1))
            for _ in range(LIMIT >> 20):
                client.send(b"x" * (1 << 20))
        assert client.read_answer().status == 413


def test_a_small_refused_body_leaves_the_connection_usable(
    gateway: Gateway, received: list[Received]
) -> None:
    with gateway.client() as client:
        for _ in range(3):
            request = post("/no/such/path", body_of(20_000))
            client.send(request[:500])
            assert client.read_answer().status == 404
            client.send(request[500:] + post())
            assert client.read_answer().status == 200


SIZES = [6_200, 62_000, 65_535, 65_536, 65_537, 131_072, 1_048_576]


@pytest.mark.parametrize("size", SIZES)
def test_s_body_2_all_of_a_body_arrives(gateway: Gateway, received: list[Received], size: int) -> None:
    body = body_of(size)
    with gateway.client() as client:
        client.send(post(body=body))
        assert client.read_answer().status == 200
        client.send(*chunked_post(body))
        assert client.read_answer().status == 200
        request = post(body=body)
        client.send(request[:300], request[300:-1], request[-1:], gap_s=0.01)
        assert client.read_answer().status == 200
    assert [request.body for request in received] == [body] * 3


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "deflate", "x-unknown", "gzip, identity", ""])
def test_s_enc_1_compressed_bodies_are_415(gateway: Gateway, received: list[Received], coding: str) -> None:
    body = gzip.compress(chat_body()) if "gzip" in coding else chat_body()
    answer = gateway.ask(post(body=body, headers=f"Content-Encoding: {coding}\r\n"))
    if not coding:
        assert answer.status in (200, 415)
        return
    assert_error(answer, 415, "unsupported_encoding")
    assert received == []


def test_s_enc_1_identity_is_no_coding(gateway: Gateway, received: list[Received]) -> None:
    assert gateway.ask(post(headers="Content-Encoding: Identity\r\n")).status == 200
    assert received[0].get("content-encoding") is None


def test_s_enc_2_a_byte_order_mark_is_a_400(gateway: Gateway) -> None:
    for body in (b"\xef\xbb\xbf" + chat_body(), chat_body().decode().encode("utf-16")):
        assert_error(gateway.ask(post(body=body)), 400, "invalid_request")


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json; charset=unknown",
        "application/json;charset=utf-16",
        "text/plain",
        "application/json;;",
        "\u00fc",
    ],
)
def test_s_enc_3_the_charset_is_not_looked_up(
    gateway: Gateway, received: list[Received], content_type: str
) -> None:
    request = post().replace(b"application/json", content_type.encode())
    assert gateway.ask(request).status in (200, 415)
    assert [got.get("content-type") for got in received] in ([], ["application/json"])


@pytest.mark.parametrize(
    "value", [b"NaN", b"Infinity", b"-Infinity", b"1" * 5000, b"01", b"1.", b".5", b"+1", b"0x1"]
)
def test_s_enc_4_numbers_that_are_none(gateway: Gateway, received: list[Received], value: bytes) -> None:
    for name in (b"temperature", b"max_tokens", b"n"):
        body = b'{"model":"m","messages":[],"%b":%b}' % (name, value)
        assert_error(gateway.ask(post(body=body)), 400, "invalid_request")
    assert received == []


@pytest.mark.parametrize("value", [b"1e999", b"-0", b"1E5", b"0.1e-7", b"123456789012345678901234567890"])
def test_s_enc_4_odd_numbers_pass_as_they_are(
    gateway: Gateway, received: list[Received], value: bytes
) -> None:
    body = b'{"model":"m","messages":[],"temperature":%b}' % value
    assert gateway.ask(post(body=body)).status == 200
    assert received[0].body == body


@pytest.mark.parametrize(
    "value", [b"1e999", b"99999999999999999999", b"1.5", b'"7"', b"true", b"[]", b"-1e400"]
)
def test_s_enc_4_odd_limits_are_not_a_500(gateway: Gateway, value: bytes) -> None:
    for name in (b"max_tokens", b"max_completion_tokens", b"n", b"n_predict", b"stream_options", b"stop"):
        for path in ("/v1/chat/completions", "/completion", "/v1/messages"):
            body = b'{"model":"m","messages":[],"%b":%b}' % (name, value)
            assert gateway.ask(post(path, body)).status in (200, 400)


@pytest.mark.parametrize(
    "value",
    [
        b"[" * 20_000,
        b'{"a":' * 20_000,
        b"[" * 20_000 + b"]" * 20_000,
        b"[" * 65 + b"]" * 65,
        b"[{}" + b",{}" * 60_000 + b"]",
    ],
    ids=["open", "objects", "closed", "65", "wide"],
)
def test_s_json_1_deep_and_wide_bodies_are_a_400(
    gateway: Gateway, received: list[Received], value: bytes
) -> None:
    assert_error(gateway.ask(post(body=b'{"model":"m","x":%b}' % value)), 400, "invalid_request")
    assert received == []


@pytest.mark.parametrize(
    "stream", [b"", b',"stream":"true"', b',"stream":1', b',"stream":null', b',"stream":[]']
)
@pytest.mark.parametrize("streamed", [False, True])
def test_s_str_1_the_response_decides_what_is_a_stream(
    gateway: Gateway,
    backend: Scripted,
    spare: Scripted,
    received: list[Received],
    stream: bytes,
    streamed: bool,
) -> None:
    def play(line: Line, request: Received) -> None:
        if streamed:
            line.send(SSE_HEAD + chunk(event("a")) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
        else:
            line.send(json_response(COMPLETION))

    backend.script = spare.script = play
    body = b'{"model":"m","messages":[]%b}' % stream
    answer = gateway.ask(post(body=body))
    assert answer.status == 200
    assert received[0].body == body
    if streamed:
        assert answer.body == event("a") + b"data: [DONE]\n\n"
        assert answer.get("content-type") == "text/event-stream"
    else:
        assert answer.json == COMPLETION


# --- lists, and large answers ----------------------------------------------------------


def model_list(*names: str) -> dict[str, bytes]:
    return {"/v1/models": json_response({"object": "list", "data": [{"id": name} for name in names]})}


def models_at(gateway: Gateway) -> list[str]:
    answer = gateway.ask(get("/v1/models"), "GET")
    assert answer.status == 200
    return [entry["id"] for entry in answer.json["data"]]


def test_s_mdl_1_no_list_is_made_of_silence(tmp_path: Path) -> None:
    """Nobody who could tell was heard of: that is no empty list. What was told once is kept."""
    dead = {"/health": json_response({"error": "dead"}, 500)}
    late, mute = Scripted(probes=dead), Scripted(probes=dead)
    with gateway_with(tmp_path, late, mute, more="") as gateway:
        for path in ("/v1/models", "/v1/models/m", "/api/tags"):
            answer = gateway.ask(get(path), "GET")
            assert answer.status == 503
            assert int(answer.get("retry-after") or 0) >= 1
        assert_error(gateway.ask(get("/v1/models"), "GET"), 503, "no_backend")
        # One that lives and does not tell what it serves serves nothing that could be listed.
        mute.probes = {"/health": json_response({"status": "ok"})}
        assert eventually(lambda: gateway.ask(get("/v1/models"), "GET").status == 200, 6)
        assert models_at(gateway) == []
        late.probes = {**mute.probes, **model_list("m")}
        assert eventually(lambda: models_at(gateway) == ["m"], 6)
    late.close()
    mute.close()


def test_s_mdl_1_the_list_is_the_union_of_all_that_answer(tmp_path: Path) -> None:
    page = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>"
    backends = [
        Scripted(probes=model_list("a", "b")),
        Scripted(probes=model_list("b", "c")),
        Scripted(probes={"/health": b"", "/v1/models": b""}),
        Scripted(probes={"/v1/models": page}),
    ]
    config = """
    [[models]]
    name = "alias"
    target = "c"
    [[models]]
    name = "of-nobody"
    target = "zzz"
    """
    begun = time.monotonic()
    with gateway_with(tmp_path, *backends, config=config, more="") as gateway:
        assert eventually(lambda: models_at(gateway) == ["a", "alias", "b", "c"], 6)
        assert time.monotonic() - begun < 6
        # They go away: the list stays, and asking for one of them is a 503.
        for backend in backends[:2]:
            backend.close()
        assert models_at(gateway) == ["a", "alias", "b", "c"]
        tags = gateway.ask(get("/api/tags"), "GET").json
        assert [entry["name"] for entry in tags["models"]] == ["a", "alias", "b", "c"]
        assert gateway.ask(get("/v1/models/alias"), "GET").json["id"] == "alias"
    for backend in backends:
        backend.close()


def test_ollamas_list_has_what_can_be_asked_by_ollamas_paths(tmp_path: Path) -> None:
    one, two = Scripted(), Scripted()
    tables = backend_table(one, "llama", 'kind = "llama-server"\nmodels = ["l", "both"]')
    tables += backend_table(two, "ollama", 'kind = "ollama"\nloader = "none"\nmodels = ["o", "both"]')
    for alias, target in (("to-l", "l"), ("to-o", "o")):
        tables += f'[[models]]\nname = "{alias}"\ntarget = "{target}"\n'
    gateway = Gateway(tmp_path, tables)
    try:
        assert models_at(gateway) == ["both", "l", "o", "to-l", "to-o"]
        tags = gateway.ask(get("/api/tags"), "GET").json
        assert [entry["name"] for entry in tags["models"]] == ["both", "o", "to-o"]
        for name in ("l", "to-l"):
            refused = gateway.ask(post("/api/chat", chat_body(name)))
            assert refused.status == 404
            assert refused.json == {
                "error": f"no Ollama serves {name!r}; it can be asked for by /v1/chat/completions"
            }
        assert "no such model" in gateway.ask(post("/api/chat", chat_body("none"))).json["error"]
        assert gateway.ask(post("/api/chat", chat_body("to-o"))).status == 200
    finally:
        gateway.stop()
        one.close()
        two.close()


def test_s_emb_1_a_large_answer_is_streamed_through_with_its_length(
    gateway: Gateway, backend: Scripted, spare: Scripted, received: list[Received]
) -> None:
    size = 60_000_000
    piece = b",".join(b"%d" % number for number in range(10_000))

    def large(line: Line, request: Received) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % size
        line.send(head)
        left = size
        while left:
            data = piece[:left]
            line.send(data)
            left -= len(data)

    backend.script = spare.script = large
    inputs = json.dumps({"model": "m", "input": [f"text {number}" for number in range(2048)]}).encode()
    before = resident(gateway)
    with gateway.client() as client:
        client.send(post("/v1/embeddings", inputs))
        status, headers = client.read_head()
        assert (status, dict(headers)["content-length"]) == (200, str(size))
        got = client.buffer
        count, client.buffer = len(got), b""
        assert piece.startswith(got[: len(piece)])
        while count < size:
            data = client.sock.recv(1 << 20)
            assert data
            at = count % len(piece)
            assert data[: len(piece) - at] == piece[at : at + len(data)][: len(piece) - at]
            count += len(data)
        client.send(get("/health"))
        assert client.read_answer("GET").status == 200
    assert count == size
    assert resident(gateway) - before < 20 << 20


def resident(gateway: Gateway) -> int:
    """Bytes of memory that the gateway's process holds."""
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10
