"""Headers, hosts and credentials on their way through a gateway process (cases of section 6)."""

from __future__ import annotations

import base64
import itertools
import json
import re
import signal
import ssl
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from harness import (
    COMPLETION,
    LAST_CHUNK,
    SSE_HEAD,
    Answer,
    Client,
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
    free_port,
    gateway_with,
    json_response,
    post,
)

from llmgw.demo.certificate import ensure_certificate

ALICE = "alice-0123456789-secret"
BOB = "bob-0123456789-secret"
CARL = "carl-0123456789-secret"
DORA = "dora-0123456789-secret"
OWN = "the-backend-has-its-own-key"
ORIGIN = "https://app.example"

_addresses = (f"203.0.113.{number}" for number in itertools.count(1))


def key_table(id: str, secret: str, more: str = "") -> str:
    return f'[keys.{id}]\nname = "{id}"\nhash = "sha256:{sha256(secret.encode()).hexdigest()}"\n{more}\n'


def write_keys(path: Path, *tables: str) -> Path:
    path.write_text("\n".join(tables))
    path.chmod(0o600)
    return path


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


@pytest.fixture(scope="module")
def backend() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


@pytest.fixture(scope="module")
def keyed_backend() -> Iterator[Scripted]:
    """One that the gateway has a key for; it serves the model ``own``."""
    scripted = Scripted()
    yield scripted
    scripted.close()


class TlsBackend(Scripted):
    """One behind ``https``, with the names that clients asked for (SNI)."""

    def __init__(self, folder: Path) -> None:
        self.files = ensure_certificate(folder)
        self.names: list[str | None] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.files.certificate, self.files.key)
        context.sni_callback = lambda sock, name, context: self.names.append(name)
        super().__init__(tls=context)


@pytest.fixture(scope="module")
def tls_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsBackend]:
    scripted = TlsBackend(tmp_path_factory.mktemp("tls"))
    yield scripted
    scripted.close()


@pytest.fixture(scope="module")
def busy_backend() -> Iterator[Scripted]:
    """It serves the model ``busy`` and asks for a pause."""
    scripted = Scripted()
    yield scripted
    scripted.close()


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory,
    backend: Scripted,
    keyed_backend: Scripted,
    tls_backend: TlsBackend,
    busy_backend: Scripted,
) -> Iterator[Gateway]:
    """With keys, CORS, and a listener for the PROXY protocol (``proxy_port``)."""
    folder = tmp_path_factory.mktemp("headers")
    keys = write_keys(
        folder / "keys.toml",
        key_table("alice", ALICE, "show_backend = true\nshow_decision = true"),
        key_table("bob", BOB, 'models = ["m"]'),
        key_table("carl", CARL, "requests_per_minute = 1"),
        key_table("dora", DORA, "tokens_per_minute = 600"),
    )
    own = folder / "own.key"
    own.write_text(OWN + "\n")
    own.chmod(0o600)
    port, proxy_port = free_port(), free_port()
    config = f"""
    listen = ["tcp:{port}:interface=127.0.0.1", "haproxy:tcp:{proxy_port}:interface=127.0.0.1"]
    auth = ["keys:{keys}"]
    [cors]
    origins = ["{ORIGIN}"]
    [log]
    access = "access.log"
    [timeouts]
    connect_s = 5.0
    [[models]]
    name = "alias"
    target = "m"
    """
    config += backend_table(keyed_backend, "keyed", f'models = ["own"]\napi_key_file = "{own}"')
    config += backend_table(busy_backend, "busy", 'models = ["busy"]')
    config += backend_table(
        tls_backend, "tls", f'models = ["tls"]\n[backends.tls]\nca_file = "{tls_backend.files.authority}"'
    )
    with gateway_with(folder, backend, config=config) as running:
        running.port = port
        running.proxy_port = proxy_port  # type: ignore[attr-defined]
        yield running


@pytest.fixture(autouse=True)
def _start_afresh(backend: Scripted, gateway: Gateway) -> Iterator[None]:
    backend.play(answer_completion)
    yield
    eventually(gateway.is_idle)
    assert not backend.errors


def ask_from(gateway: Gateway, address: str, request: bytes, method: str = "POST") -> Answer:
    """Ask as a client of ``address``, behind a load balancer."""
    with Client(gateway.proxy_port) as client:  # type: ignore[attr-defined]
        client.send(f"PROXY TCP4 {address} 198.51.100.1 5000 443\r\n".encode() + request)
        return client.read_answer(method)


def ask_anew(gateway: Gateway, request: bytes, method: str = "POST") -> Answer:
    """Ask from an address that has no failed login yet."""
    return ask_from(gateway, next(_addresses), request, method)


def access_line(gateway: Gateway, answer: Answer) -> dict[str, object]:
    wanted = answer.get("x-request-id")
    gateway.process.send_signal(signal.SIGHUP)  # a reload writes what waits
    return eventually(lambda: [line for line in gateway.access if line["id"] == wanted])[0]


# --- hop by hop --------------------------------------------------------------------

KNOWN_TO_BACKENDS = {
    "host",
    "user-agent",
    "accept-encoding",
    "content-type",
    "x-request-id",
    "content-length",
}
"""Without more from the client, a backend sees no other header."""


def test_s_hop_1_hop_by_hop_headers_of_a_client_stop_here(gateway: Gateway, backend: Scripted) -> None:
    headers = (
        "Connection: X-Secret, close\r\nX-Secret: 1\r\nTE: trailers\r\nKeep-Alive: 5\r\n"
        "Upgrade: foo\r\nProxy-Connection: x\r\nTrailer: x-t\r\nX-Whatever: 1\r\nCookie: a=b\r\n"
    )
    answer = gateway.ask(post(headers=bearer(ALICE) + headers))
    assert (answer.status, answer.get("connection")) == (200, "close")
    [request] = backend.requests
    assert {name.lower() for name, _ in request.headers} <= KNOWN_TO_BACKENDS


def test_s_hop_1_what_connection_nominates_is_not_passed_even_if_usually_passed(
    gateway: Gateway, backend: Scripted
) -> None:
    headers = "Accept: text/plain\r\nTraceparent: 00-a-b-01\r\nAnthropic-Version: 2023-06-01\r\n"
    gateway.ask(post(headers=bearer(ALICE) + headers))
    assert backend.requests[0].get("accept") == "text/plain"
    assert backend.requests[0].get("traceparent") == "00-a-b-01"
    assert backend.requests[0].get("anthropic-version") == "2023-06-01"
    gateway.ask(post(headers=bearer(ALICE) + headers + "Connection: accept, traceparent\r\n"))
    assert backend.requests[1].get("accept") is None
    assert backend.requests[1].get("traceparent") is None


def test_s_hop_1_hop_by_hop_headers_of_a_backend_stop_here(gateway: Gateway, backend: Scripted) -> None:
    hops = (
        "Connection: X-Secret, keep-alive\r\nX-Secret: 1\r\nKeep-Alive: timeout=5\r\nUpgrade: h2c\r\n"
        "Proxy-Authenticate: Basic\r\nProxy-Connection: x\r\nTrailer: x-t\r\nTE: x\r\nServer: llama.cpp\r\n"
        "Set-Cookie: a=b\r\nX-Kept: yes\r\n"
    )
    backend.play(lambda line, request: line.send(json_response(COMPLETION, headers=hops)))
    answer = gateway.ask(post(headers=bearer(ALICE)))
    assert {name for name, _ in answer.headers} == {
        "content-type",
        "content-length",
        "date",
        "x-kept",
        "x-request-id",
        "vary",
        "x-llmgw-backend",
        "x-llmgw-decision",
    }


def test_no_client_is_sent_to_a_backend(gateway: Gateway, backend: Scripted) -> None:
    """A redirect names a place behind the gateway, and some clients would follow it with their key."""
    place = f"http://127.0.0.1:{backend.port}/v1/"
    headers = f"Location: {place}\r\nContent-Location: {place}\r\nRefresh: 0; url={place}\r\n"
    backend.play(lambda line, request: line.send(json_response({"a": 1}, 307, headers)))
    answer = gateway.ask(post(headers=bearer(ALICE)))
    assert (answer.status, answer.json) == (307, {"a": 1})
    assert not {"location", "content-location", "refresh"} & {name for name, _ in answer.headers}


def test_no_backend_gives_orders_to_a_proxy_in_front(gateway: Gateway, backend: Scripted) -> None:
    """nginx would answer with a place of its own that ``X-Accel-Redirect`` names, others with a file."""
    orders = (
        "X-Accel-Redirect",
        "X-Accel-Limit-Rate",
        "X-Sendfile",
        "X-Sendfile-Type",
        "X-LIGHTTPD-send-file",
    )
    headers = "".join(f"{name}: /internal\r\n" for name in orders)
    backend.play(lambda line, request: line.send(json_response(COMPLETION, headers=headers)))
    answer = gateway.ask(post(headers=bearer(ALICE)))
    assert answer.json == COMPLETION
    assert not {name.lower() for name in orders} & {name for name, _ in answer.headers}


def test_s_hop_2_proxy_authorization_is_not_forwarded(gateway: Gateway, backend: Scripted) -> None:
    answer = gateway.ask(post(headers=bearer(ALICE) + "Proxy-Authorization: Basic YTpi\r\n"))
    assert answer.status == 200
    assert b"YTpi" not in backend.requests[0].head
    assert ask_anew(gateway, post(headers=f"Proxy-Authorization: Bearer {ALICE}\r\n")).status == 401


# --- hosts -------------------------------------------------------------------------


def test_s_host_1_a_backend_sees_its_own_host(gateway: Gateway, backend: Scripted) -> None:
    assert gateway.ask(post(headers=bearer(ALICE))).status == 200
    assert backend.requests[0].get("host") == f"127.0.0.1:{backend.port}"
    assert {probe.get("host") for probe in backend.probed} == {f"127.0.0.1:{backend.port}"}


def test_s_host_1_and_over_tls_its_own_name(gateway: Gateway, tls_backend: TlsBackend) -> None:
    tls_backend.play(answer_completion)
    answer = gateway.ask(post(headers=bearer(ALICE), body=chat_body("tls")))
    assert answer.status == 200, answer
    assert tls_backend.requests[0].get("host") == f"localhost:{tls_backend.port}"
    assert {probe.get("host") for probe in tls_backend.probed} == {f"localhost:{tls_backend.port}"}
    assert set(tls_backend.names) == {"localhost"}


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://elsewhere.example/v1/chat/completions", "gw.example", 400),
        ("http://gw.example/v1/chat/completions", "gw.example", 200),
        ("http://user@gw.example/v1/chat/completions", "gw.example", 400),
        ("ftp://gw.example/v1/chat/completions", "gw.example", 400),
        ("gw.example:443", "gw.example", 400),
        ("http://gw.example", "gw.example", 404),
    ],
)
def test_s_host_2_an_absolute_target_is_routed_by_its_path_or_refused(
    gateway: Gateway, backend: Scripted, target: str, host: str, status: int
) -> None:
    request = post(target, headers=bearer(ALICE)).replace(b"Host: gw.example", f"Host: {host}".encode())
    assert gateway.ask(request).status == status
    if status == 200:
        assert backend.requests[0].target == "/v1/chat/completions"
        assert backend.requests[0].get("host") == f"127.0.0.1:{backend.port}"
    else:
        assert backend.requests == []


def test_s_xff_1_a_spoofed_address_is_dropped(gateway: Gateway, backend: Scripted) -> None:
    headers = (
        "X-Forwarded-For: 1.2.3.4\r\nForwarded: for=1.2.3.4\r\nX-Real-IP: 1.2.3.4\r\n"
        "X-Forwarded-Host: evil\r\nX-Forwarded-Proto: https\r\nX-Llmgw-Backend: x\r\n"
    )
    answer = gateway.ask(post(headers=bearer(ALICE) + headers))
    assert access_line(gateway, answer)["peer"] == "127.0.0.1"
    assert {name.lower() for name, _ in backend.requests[0].headers} <= KNOWN_TO_BACKENDS


def test_s_xff_1_the_proxy_protocol_names_the_client(gateway: Gateway) -> None:
    answer = ask_from(gateway, "192.0.2.77", post(headers=bearer(ALICE)))
    assert answer.status == 200
    assert access_line(gateway, answer)["peer"] == "192.0.2.77"
    with Client(gateway.proxy_port) as client:  # type: ignore[attr-defined]
        client.send(b"PROXY UNKNOWN 1 2 3 4\r\n" + post(headers=bearer(ALICE)))
        assert access_line(gateway, client.read_answer())["peer"] == "127.0.0.1"


# --- credentials -------------------------------------------------------------------


@pytest.mark.parametrize("model", ["m", "own"])
def test_s_key_1_the_callers_key_stays_here(
    gateway: Gateway, backend: Scripted, keyed_backend: Scripted, model: str
) -> None:
    keyed_backend.play(answer_completion)
    for headers in (bearer(ALICE), f"x-api-key: {ALICE}\r\n", f"api-key: {ALICE}\r\n"):
        assert gateway.ask(post(headers=headers, body=chat_body(model))).status == 200
    for request in backend.requests + keyed_backend.requests:
        assert ALICE.encode() not in request.head
    assert all(request.get("authorization") is None for request in backend.requests)
    assert all(request.get("authorization") == f"Bearer {OWN}" for request in keyed_backend.requests)
    assert len(backend.requests + keyed_backend.requests) == 3


def test_s_key_2_no_credential_header_passes(gateway: Gateway, backend: Scripted) -> None:
    names = ["x-goog-api-key", "Ocp-Apim-Subscription-Key", "x-auth-token", "Cookie", "x-amz-security-token"]
    headers = bearer(ALICE) + f"x-api-key: {ALICE}\r\napi-key: {ALICE}\r\n"
    headers += "".join(f"{name}: other-secret\r\n" for name in names)
    assert gateway.ask(post(headers=headers)).status == 200
    assert {name.lower() for name, _ in backend.requests[0].headers} <= KNOWN_TO_BACKENDS


def test_s_key_2_where_no_keys_are_asked_for_none_is_looked_at(tmp_path: Path) -> None:
    """Clients send what they were set up with, and not always the same in each header; here
    it could only be a hindrance. None of it passes all the same."""
    backend = Scripted()
    headers = "".join(
        f"{name}: {value}\r\n"
        for name, value in (
            ("Authorization", "Bearer sk-one"),
            ("x-api-key", "sk-two"),
            ("api-key", "sk-three"),
            ("x-goog-api-key", "sk-four"),
        )
    )
    with gateway_with(tmp_path, backend) as gateway:
        for request in (post(headers=headers), post(headers="Authorization: Basic !\r\nx-api-key: a\r\n")):
            assert gateway.ask(request).status == 200
    assert len(backend.requests) == 2
    assert all({name.lower() for name, _ in each.headers} <= KNOWN_TO_BACKENDS for each in backend.requests)
    backend.close()


def test_s_key_3_no_key_in_logs_or_bodies(gateway: Gateway) -> None:
    wrong = "sk-wrong-0123456789-abcdef"
    basic = base64.b64encode(f"user:{wrong}".encode()).decode()
    told = b""
    for headers in (
        bearer(wrong),
        f"x-api-key: {wrong}\r\n",
        f"Authorization: Basic {basic}\r\n",
        f"Authorization: {wrong}\r\n",
        f"Authorization: Bearer {wrong}\r\nx-api-key: {wrong}2\r\n",
    ):
        answer = ask_anew(gateway, post(headers=headers))
        assert answer.status == 401
        told += answer.body + str(answer.headers).encode()
    access_line(gateway, answer)
    told += gateway.admin("/api/state")[1] + gateway.admin("/metrics")[1]
    everything = told.decode() + gateway.log + Path(gateway.folder, "access.log").read_text()
    for secret in (wrong, basic, ALICE, BOB, OWN):
        assert secret not in everything


def test_s_key_4_a_key_in_the_query_is_no_key_and_is_not_kept(gateway: Gateway, backend: Scripted) -> None:
    path = "/v1/chat/completions?key=abc-in-query&a=1&api_key=abc-in-query&API-KEY=abc-in-query"
    assert ask_anew(gateway, post(path)).status == 401
    answer = gateway.ask(post(path, headers=bearer(ALICE)))
    assert answer.status == 200
    assert backend.requests[0].target == "/v1/chat/completions?a=1"
    for query, kept in (
        ("%6bey=abc-in-query&b=%26key=1", "?b=%26key=1"),
        ("+key=abc-in-query&&b", "?&b"),
        ("token=abc-in-query", ""),
        ("keys=1&mykey=2", "?keys=1&mykey=2"),
    ):
        answer = gateway.ask(post(f"/v1/chat/completions?{query}", headers=bearer(ALICE)))
        assert (answer.status, backend.requests[-1].target) == (200, f"/v1/chat/completions{kept}")
    missing = gateway.ask(post("/v1/nothing?key=abc-in-query", headers=bearer(ALICE)))
    assert missing.status == 404
    access_line(gateway, missing)
    logs = gateway.log + Path(gateway.folder, "access.log").read_text()
    assert "abc-in-query" not in logs + missing.body.decode()


def test_s_ant_1_anthropic_credentials(gateway: Gateway, backend: Scripted) -> None:
    def ask(headers: str) -> Answer:
        return ask_anew(gateway, post("/v1/messages", headers=headers))

    assert ask(f"x-api-key: {ALICE}\r\n").status == 200
    assert ask(bearer(ALICE)).status == 200
    assert ask(bearer(ALICE) + f"x-api-key: {ALICE}\r\n").status == 200
    backend.requests.clear()
    for headers in (
        bearer(ALICE) + f"x-api-key: {BOB}\r\n",
        bearer(ALICE) + "x-api-key: wrong\r\n",
        bearer("wrong") + f"x-api-key: {ALICE}\r\n",
        "",
    ):
        answer = ask(headers)
        assert answer.status == 401
        assert answer.json["type"] == "error"
        assert answer.json["error"]["type"] == "authentication_error"
        assert answer.get("www-authenticate") == "Bearer"
    assert backend.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        "",
        "Authorization: Bearer\r\n",
        "Authorization: Bearer \r\n",
        "Authorization: Bearer wrong\r\n",
        "Authorization: Basic !!!\r\n",
        "Authorization: Basic YWxpY2U6eA==\r\n",
        "x-api-key: \u00fc\r\n",
        "x-api-key:\r\n",
        f"Authorization: Bearer {ALICE} x\r\n",
        f"Authorization: {ALICE}\r\n",
    ],
)
def test_a_wrong_or_missing_key_is_401(gateway: Gateway, backend: Scripted, headers: str) -> None:
    answer = ask_anew(gateway, post(headers=headers))
    assert answer.status == 401
    assert answer.json["error"]["code"] == "invalid_api_key"
    assert answer.get("www-authenticate") == "Bearer"
    # Some clients sign in anew upon a 401, and go on for minutes.
    assert answer.get("x-should-retry") == "false"
    assert backend.requests == []


# --- errors and their headers ----------------------------------------------------------

ERRORS = [
    ("no key", post(), 401, "invalid_api_key", "authentication_error"),
    (
        "not its model",
        post(headers=bearer(BOB), body=chat_body("own")),
        403,
        "model_not_allowed",
        "permission_error",
    ),
    (
        "no such model",
        post(headers=bearer(ALICE), body=chat_body("x")),
        404,
        "model_not_found",
        "not_found_error",
    ),
    ("no JSON", post(headers=bearer(ALICE), body=b"{"), 400, "invalid_request", "invalid_request_error"),
    (
        "no such method",
        post(headers=bearer(ALICE)).replace(b"POST", b"GET", 1),
        405,
        "method_not_allowed",
        None,
    ),
    (
        "compressed",
        post(headers=bearer(ALICE) + "Content-Encoding: br\r\n"),
        415,
        "unsupported_encoding",
        "invalid_request_error",
    ),
]


@pytest.mark.parametrize(
    ("request_", "status", "code", "kind"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS]
)
def test_errors_have_the_form_of_their_route(
    gateway: Gateway, request_: bytes, status: int, code: str, kind: str | None
) -> None:
    if code == "method_not_allowed":  # a GET has no content
        request_ = re.sub(rb"Content-Length.*", b"\r\n", request_, flags=re.S)
    openai = ask_anew(gateway, request_)
    assert openai.status == status
    assert set(openai.json["error"]) == {"message", "type", "code", "param"}
    assert openai.json["error"]["code"] == code
    anthropic = ask_anew(gateway, request_.replace(b"/v1/chat/completions", b"/v1/messages"))
    assert anthropic.status == status
    assert anthropic.json["type"] == "error"
    assert anthropic.json["error"]["message"]
    assert kind is None or anthropic.json["error"]["type"] == kind
    ollama = ask_anew(gateway, request_.replace(b"/v1/chat/completions", b"/api/chat"))
    # Nobody here speaks Ollama's own dialect, so no key can be for a model of it.
    assert ollama.status in (status, 404)
    assert list(ollama.json) == ["error"]
    assert isinstance(ollama.json["error"], str)
    for answer in (openai, anthropic, ollama):
        assert (answer.get("content-type") or "").startswith("application/json")
        assert answer.get("x-request-id")
        assert answer.get("date")


def test_s_ra_1_a_backends_429_keeps_its_headers(gateway: Gateway, busy_backend: Scripted) -> None:
    headers = (
        "Retry-After: 30\r\nanthropic-ratelimit-unified-status: rejected\r\nx-ratelimit-limit-requests: 7\r\n"
    )
    body = {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}
    busy_backend.play(lambda line, request: line.send(json_response(body, 429, headers)))
    request = post("/v1/messages", headers=bearer(ALICE), body=chat_body("busy"))
    answer = gateway.ask(request)
    assert (answer.status, answer.json) == (429, body)
    assert answer.get("retry-after") == "30"
    assert answer.get("anthropic-ratelimit-unified-status") == "rejected"
    assert answer.get("x-ratelimit-limit-requests") == "7"
    # From now on it is let alone, and the answer is our own.
    answer = gateway.ask(request)
    assert (answer.status, answer.json["error"]["type"]) == (503, "overloaded_error")
    assert 1 <= int(answer.get("retry-after") or "") <= 60
    assert int(answer.get("retry-after-ms") or "") > 0
    assert len(busy_backend.requests) == 1


def assert_limit_headers(answer: Answer, unit: str) -> None:
    limit, left = (int(answer.get(f"x-ratelimit-{name}-{unit}") or "") for name in ("limit", "remaining"))
    assert 0 <= left <= limit
    assert re.fullmatch(r"(\d+h)?(\d+m)?\d+s|\d+ms", answer.get(f"x-ratelimit-reset-{unit}") or "")
    # The draft's form of the same.
    assert answer.get("ratelimit-policy") == f'"{unit}";q={limit};w=60'
    state = re.fullmatch(rf'"{unit}";r={left};t=(\d+)', answer.get("ratelimit") or "")
    assert state is not None
    if answer.status == 429:
        assert int(state[1]) <= int(answer.get("retry-after") or "")


def test_s_ra_1_our_own_429_tells_when_to_come_back(gateway: Gateway, backend: Scripted) -> None:
    # The backend's limits are not the caller's.
    backend.play(
        lambda line, request: line.send(
            json_response(COMPLETION, headers="x-ratelimit-limit-requests: 7\r\nRateLimit: 1\r\n")
        )
    )
    good = gateway.ask(post(headers=bearer(CARL)))
    assert good.status == 200
    assert good.get("x-ratelimit-limit-requests") == "1"
    assert_limit_headers(good, "requests")
    for path, kind in (("/v1/chat/completions", "rate_limit_error"), ("/v1/messages", "rate_limit_error")):
        answer = gateway.ask(post(path, headers=bearer(CARL)))
        assert answer.status == 429
        assert answer.json["error"]["type"] == kind
        assert answer.json["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(answer.get("retry-after") or "") <= 80
        wait_ms = int(answer.get("retry-after-ms") or "")
        assert 0 < wait_ms <= 1000 * int(answer.get("retry-after") or "")
        assert answer.get("x-ratelimit-remaining-requests") == "0"
        assert_limit_headers(answer, "requests")
    assert len(backend.requests) == 1


def test_a_limit_in_tokens_is_told_in_tokens(gateway: Gateway, backend: Scripted) -> None:
    answer = gateway.ask(post(headers=bearer(DORA), body=chat_body(max_tokens=400)))
    assert answer.status == 200
    assert answer.get("x-ratelimit-limit-tokens") == "600"
    assert_limit_headers(answer, "tokens")
    # The real use was 4 tokens, so the reserve is back.
    assert gateway.ask(post(headers=bearer(DORA), body=chat_body(max_tokens=400))).status == 200


def test_the_flood_limit_is_for_wrong_keys_of_one_address(gateway: Gateway, backend: Scripted) -> None:
    address = "192.0.2.99"
    statuses = [ask_from(gateway, address, post(headers=bearer("wrong"))).status for _ in range(12)]
    assert statuses == [401] * 10 + [429] * 2
    answer = ask_from(gateway, address, post("/v1/messages", headers=bearer("wrong")))
    assert (answer.status, answer.json["error"]["type"]) == (429, "rate_limit_error")
    waits_ms = [int(answer.get("retry-after-ms") or "")]
    for _ in range(9):
        answer = ask_from(gateway, address, post(headers=bearer("wrong")))
        waits_ms.append(int(answer.get("retry-after-ms") or ""))
    assert all(1000 <= wait_ms <= 7500 for wait_ms in waits_ms)
    assert waits_ms != sorted(waits_ms, reverse=True)  # spread, where the time itself only shrinks
    # A good key is not held up by its neighbours, nor is another address.
    assert ask_from(gateway, address, post(headers=bearer(ALICE))).status == 200
    assert ask_anew(gateway, post(headers=bearer("wrong"))).status == 401


def test_no_key_is_no_wrong_key(gateway: Gateway) -> None:
    """Who has forgotten it is told so each time, and takes no tries from those who have one."""
    address = "192.0.2.98"
    statuses = [ask_from(gateway, address, post()).status for _ in range(12)]
    statuses += [ask_from(gateway, address, post(headers=bearer("wrong"))).status for _ in range(10)]
    assert statuses == [401] * 22


# --- CORS --------------------------------------------------------------------------

PREFLIGHT = (
    b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: gw.example\r\nOrigin: %b\r\n"
    b"Access-Control-Request-Method: POST\r\n"
    b"Access-Control-Request-Headers: authorization, x-stainless-os\r\n\r\n"
)


def test_s_cors_1_a_preflight_needs_no_key(gateway: Gateway, backend: Scripted) -> None:
    answer = gateway.ask(PREFLIGHT % ORIGIN.encode(), "OPTIONS")
    assert (answer.status, answer.body) == (204, b"")
    assert answer.get("access-control-allow-origin") == ORIGIN
    assert "authorization" in (answer.get("access-control-allow-headers") or "")
    assert "x-stainless-os" in (answer.get("access-control-allow-headers") or "")
    assert "POST" in (answer.get("access-control-allow-methods") or "")
    assert "origin" in (answer.get("vary") or "").lower()
    assert backend.requests == []


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://app.example.evil", "null", "http://app.example"]
)
def test_s_cors_1_another_origin_gets_nothing(gateway: Gateway, origin: str) -> None:
    answer = gateway.ask(PREFLIGHT % origin.encode(), "OPTIONS")
    assert answer.get("access-control-allow-origin") is None
    assert answer.get("access-control-allow-headers") is None
    answer = gateway.ask(post(headers=bearer(ALICE) + f"Origin: {origin}\r\n"))
    assert answer.status == 200
    assert answer.get("access-control-allow-origin") is None


def test_s_cors_1_refusals_can_be_read_by_the_page_too(gateway: Gateway, backend: Scripted) -> None:
    allowed = f"Origin: {ORIGIN}\r\n"
    for request, status in (
        (post(headers=allowed), 401),
        (post(headers=allowed + bearer(ALICE), body=chat_body("x")), 404),
        (post("/no/such/path", headers=allowed + bearer(ALICE)), 404),
        (post(headers=allowed + bearer(BOB), body=chat_body("own")), 403),
        (post(headers=allowed + bearer(ALICE), body=b"{"), 400),
    ):
        answer = ask_anew(gateway, request)
        assert answer.status == status
        assert answer.get("access-control-allow-origin") == ORIGIN
        exposed = (answer.get("access-control-expose-headers") or "").lower()
        assert "retry-after" in exposed
        assert "x-request-id" in exposed


@pytest.mark.parametrize("stream", [False, True])
def test_s_cors_1_the_backends_own_cors_is_not_doubled(
    gateway: Gateway, backend: Scripted, stream: bool
) -> None:
    own = "Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\n"

    def open_to_all(line: Line, request: Received) -> None:
        if stream:
            head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\n" + own.encode() + b"\r\n")
            line.send(head + chunk(event("a")) + LAST_CHUNK)
        else:
            line.send(json_response(COMPLETION, headers=own))

    backend.play(open_to_all)
    body = chat_body(stream=stream)
    answer = gateway.ask(post(headers=bearer(ALICE) + f"Origin: {ORIGIN}\r\n", body=body))
    assert answer.get("access-control-allow-origin") == ORIGIN
    assert answer.get("access-control-allow-credentials") is None
    answer = gateway.ask(post(headers=bearer(ALICE), body=body))
    assert answer.get("access-control-allow-origin") is None


# --- models, per key -----------------------------------------------------------------


def models_of(gateway: Gateway, key: str) -> list[str]:
    answer = gateway.ask(f"GET /v1/models HTTP/1.1\r\nHost: gw.example\r\n{bearer(key)}\r\n".encode(), "GET")
    assert answer.json["object"] == "list"
    return [entry["id"] for entry in answer.json["data"]]


def test_a_key_sees_the_models_it_may_use(gateway: Gateway) -> None:
    assert models_of(gateway, ALICE) == ["alias", "busy", "m", "own", "tls"]
    assert models_of(gateway, BOB) == ["alias", "m"]
    for key, model, status in ((BOB, "m", 200), (BOB, "own", 404), (ALICE, "own", 200), (ALICE, "zzz", 404)):
        request = f"GET /v1/models/{model} HTTP/1.1\r\nHost: gw.example\r\n{bearer(key)}\r\n".encode()
        assert gateway.ask(request, "GET").status == status
    assert ask_anew(gateway, b"GET /v1/models HTTP/1.1\r\nHost: gw.example\r\n\r\n", "GET").status == 401


def test_backend_and_decision_are_told_to_those_who_may_know(gateway: Gateway) -> None:
    answer = gateway.ask(post(headers=bearer(ALICE)))
    assert answer.get("x-llmgw-backend") == "b0"
    assert (answer.get("x-llmgw-decision") or "").startswith("b0; ")
    answer = gateway.ask(post(headers=bearer(BOB)))
    assert answer.get("x-llmgw-backend") is None
    assert answer.get("x-llmgw-decision") is None


# --- upgrades ------------------------------------------------------------------------


def test_s_ws_1_a_websocket_is_refused_clearly(gateway: Gateway, backend: Scripted) -> None:
    upgrade = (
        f"GET /v1/realtime HTTP/1.1\r\nHost: gw.example\r\n{bearer(ALICE)}Connection: keep-alive, Upgrade\r\n"
        "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ).encode()
    begun = time.monotonic()
    answer = gateway.ask(upgrade, "GET")
    assert answer.status in (404, 426, 501)
    assert answer.json["error"]["message"]
    assert answer.get("upgrade") is None
    assert time.monotonic() - begun < 1
    assert backend.requests == []


def test_s_ws_2_an_upgrade_with_a_body_does_not_spill_over(gateway: Gateway, backend: Scripted) -> None:
    smuggled = b"GET /health HTTP/1.1\r\nHost: gw.example\r\n\r\n"
    headers = bearer(ALICE) + "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    with gateway.client() as client:
        client.send(post("/v1/realtime", smuggled, headers) + post(headers=bearer(ALICE)))
        assert client.read_answer().status == 404
        answer = client.read_answer()
        assert (answer.status, answer.json["id"]) == (200, "c1")
    # On a route that exists the upgrade is ignored (RFC 9110 section 7.8).
    backend.requests.clear()
    h2c = (
        bearer(ALICE) + "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    )
    assert gateway.ask(post(headers=h2c)).status == 200
    assert json.loads(backend.requests[0].body) == json.loads(chat_body())
    assert backend.requests[0].get("upgrade") is None


# --- what a plugin says ----------------------------------------------------------------

ROUTER = r"""
from twisted.plugin import IPlugin
from zope.interface import implementer
from llmgw.interfaces import CONTRACT, IRouter, IRouterFactory
from llmgw.values import Choice

@implementer(IRouter)
class Talkative:
    def choose(self, request, candidates, now_s):
        why = f"chosen for {request.session}\r\nSet-Cookie: a=b\r\n\r\n\x00\u2028"
        return Choice(candidates[0], None, 1.0, why)
    def observe(self, event):
        pass

@implementer(IPlugin, IRouterFactory)
class Factory:
    name = "talkative"
    description = "says too much"
    contract = CONTRACT
    def build(self, options):
        return Talkative()

factory = Factory()
"""


def test_s_rsp_2_the_reason_of_a_router_cannot_split_a_response(tmp_path: Path, backend: Scripted) -> None:
    plugins = tmp_path / "twisted" / "plugins"
    plugins.mkdir(parents=True)
    (plugins / "talkative_router.py").write_text(ROUTER)
    keys = write_keys(tmp_path / "keys.toml", key_table("alice", ALICE, "show_decision = true"))
    config = f'auth = ["keys:{keys}"]\n[router]\nplugin = "talkative"\n[log]\naccess = "access.log"\n'
    gateway = Gateway(tmp_path, config + backend_table(backend), environment={"PYTHONPATH": str(tmp_path)})
    try:
        answer = gateway.ask(post(headers=bearer(ALICE), body=chat_body(session_id="x\r\nSet-Cookie: c=d")))
        assert (answer.status, answer.clean, answer.json["id"]) == (200, True, "c1")
        assert answer.get("set-cookie") is None
        # A reason that is no printable line is a failure of the router, and shown nowhere.
        told = "least connections: the router failed"
        assert answer.get("x-llmgw-decision") == f"b; {told}"
        assert access_line(gateway, answer)["why"] == told
        assert b"Set-Cookie" not in (tmp_path / "access.log").read_bytes()
    finally:
        gateway.stop()
    assert "Traceback" not in gateway.log
