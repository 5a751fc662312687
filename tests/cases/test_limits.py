"""What a gateway process refuses, when, and what it then gives back: deadlines of
clients, sizes, caps, rate limits, breakers (cases S-LIM, S-CB, S-HLT, S-ALL, S-MET, S-LOG)."""

from __future__ import annotations

import contextlib
import json
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

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
    Script,
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
from twisted.internet.address import IPv4Address
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from llmgw.config import Limits, Timeouts
from llmgw.listen.proxied import ProxiedFactory
from llmgw.wire.accepting import ClientFactory
from llmgw.wire.senders import Outbox
from llmgw.wire.server import ClientConnection
from llmgw.wire.site import Site
from llmgw.wire.sweep import Sweep

KEY = "a-key-of-0123456789-letters"
BEARER = f"Authorization: Bearer {KEY}\r\n"


def keys(folder: Path, more: str = "") -> str:
    """``auth`` with one key in a file."""
    path = folder / "keys.toml"
    path.write_text(f'[keys.one]\nname = "one"\nhash = "sha256:{sha256(KEY.encode()).hexdigest()}"\n{more}\n')
    path.chmod(0o600)
    return f'auth = ["keys:{path}"]\n'


@pytest.fixture
def backend() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()
    assert not scripted.errors


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: gw.example\r\n{BEARER}\r\n".encode()


def until_closed(client: Client, within_s: float = 5.0) -> tuple[float, bytes]:
    """When the gateway closed, and what it said before."""
    begun = time.monotonic()
    assert client.is_closed(within_s)
    return time.monotonic() - begun, client.buffer


def drip(client: Client, data: bytes, every_s: float) -> int:
    """Send byte by byte until there is an answer. :return: how many bytes were sent."""
    for number, byte in enumerate(data):
        client.send(bytes((byte,)))
        if select.select([client.sock], [], [], every_s)[0]:
            return number
    return len(data)


# --- deadlines of clients -------------------------------------------------------------


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with short patience."""
    config = """
    [timeouts]
    request_head_s = 0.6
    keepalive_s = 0.9
    keepalive_requests = 4
    keepalive_age_s = 0.6
    body_s = 0.7
    body_rate = 20000
    [limits]
    trusted_networks = ["10.0.0.0/8"]
    """
    backend = Scripted()
    with gateway_with(tmp_path_factory.mktemp("hasty"), backend, config=config) as gateway:
        yield gateway
    backend.close()


def test_s_slw_1_the_head_has_an_absolute_deadline(hasty: Gateway) -> None:
    """A byte now and then does not extend it."""
    with hasty.client() as client:
        begun = time.monotonic()
        sent = drip(client, post(), 0.05)
        assert (sent < 40, time.monotonic() - begun < 2) == (True, True)
        answer = client.read_answer()
        assert (answer.status, answer.json["error"]["code"]) == (408, "request_timeout")
        assert answer.get("connection") == "close"


def test_a_connection_without_a_byte_is_closed_without_a_byte(hasty: Gateway) -> None:
    with hasty.client() as client:
        elapsed_s, said = until_closed(client)
        assert (0.4 < elapsed_s < 3.0, said) == (True, b"")


def test_an_idle_connection_is_closed_without_a_word(hasty: Gateway) -> None:
    with hasty.client() as client:
        client.send(get("/health"))
        assert client.read_answer("GET").status == 200
        elapsed_s, said = until_closed(client)
        assert (0.7 < elapsed_s < 3.0, said) == (True, b"")


def test_the_next_head_has_its_own_deadline(hasty: Gateway) -> None:
    with hasty.client() as client:
        client.send(get("/health"))
        assert client.read_answer("GET").status == 200
        client.send(b"GET /hea")
        answer = client.read_answer("GET")
        assert answer.status == 408


def test_a_connection_serves_so_many_requests_and_says_so(hasty: Gateway) -> None:
    with hasty.client() as client:
        for number in range(4):
            client.send(get("/health"))
            assert client.read_answer("GET").get("connection") == ("close" if number == 3 else None)
        assert client.is_closed(1)


def test_an_old_connection_is_closed_with_its_next_answer(hasty: Gateway) -> None:
    with hasty.client() as client:
        client.send(get("/health"))
        assert client.read_answer("GET").get("connection") is None
        time.sleep(0.65)
        client.send(get("/health"))
        assert client.read_answer("GET").get("connection") == "close"
        assert client.is_closed(1)


@pytest.mark.parametrize("size", [100, 10_000_000])
def test_a_body_that_comes_too_slowly_is_a_408(hasty: Gateway, size: int) -> None:
    with hasty.client() as client:
        begun = time.monotonic()
        client.send(post(body=b"", length=size))
        drip(client, b"x" * 30, 0.1)
        assert 0.5 < time.monotonic() - begun < 2.5
        answer = client.read_answer()
        assert (answer.status, answer.json["error"]["code"]) == (408, "request_timeout")
        assert answer.get("connection") == "close"
    eventually(hasty.is_idle)


def test_a_body_that_keeps_the_rate_may_take_longer(hasty: Gateway) -> None:
    body = chat_body(user="x" * 60_000)
    with hasty.client() as client:
        client.send(post(body=body[:10_000], length=len(body)))
        for at in range(10_000, len(body), 2_500):
            time.sleep(0.06)
            client.send(body[at : at + 2_500])
        assert client.read_answer().status == 200


# --- sizes and expectations -------------------------------------------------------------


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with keys and a small budget for bodies."""
    folder = tmp_path_factory.mktemp("strict")
    config = (
        keys(folder)
        + """
    [limits]
    body_bytes = 2000000
    body_total_bytes = 3000000
    messages = 4
    tools = 2
    stop = 2
    n = 2
    """
    )
    backend = Scripted()
    with gateway_with(folder, backend, config=config) as gateway:
        gateway.backend = backend  # type: ignore[attr-defined]
        yield gateway
    backend.close()


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (post(headers="Expect: 200-ok\r\n"), 417, "expectation_failed"),
        (post(headers="Expect: 100-continue\r\n", body=b"", length=1200), 401, "invalid_api_key"),
        (
            post(headers="Expect: 100-continue\r\n" + BEARER, body=b"", length=2_000_001),
            413,
            "body_too_large",
        ),
        (post("/nowhere", headers="Expect: 100-continue\r\n" + BEARER, body=b"", length=9), 404, "not_found"),
        (
            post(headers="Expect: 100-continue\r\nContent-Encoding: br\r\n" + BEARER, body=b"", length=9),
            415,
            "unsupported_encoding",
        ),
    ],
)
def test_nobody_is_told_to_go_on_who_is_refused(
    strict: Gateway, request_: bytes, status: int, code: str
) -> None:
    with strict.client() as client:
        client.send(request_)
        found, headers = client.read_head()
        assert found == status
        length = int({name.lower(): value for name, value in headers}["content-length"])
        eventually(lambda: len(client.buffer) >= length or client.is_closed(0.01))
        assert json.loads(client.buffer[:length])["error"]["code"] == code
        assert client.is_closed(3)


@pytest.mark.parametrize("chunked", [False, True])
def test_an_early_refusal_reaches_a_client_that_sends_much(strict: Gateway, chunked: bool) -> None:
    headers = "Transfer-Encoding: chunked\r\n" if chunked else ""
    piece = chunk(b"x" * 65_536) if chunked else b"x" * 65_536
    with strict.client() as client:
        client.send(post(headers=headers, body=b"", length=1_900_000))
        with contextlib.suppress(OSError):
            for _ in range(28):
                client.send(piece)
        answer = client.read_answer()
        assert (answer.status, answer.clean) == (401, True)
    eventually(lambda: strict.state["held_bytes"] == 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "a"}] * 5},
        {"tools": [{}] * 3},
        {"stop": ["a"] * 3},
        {"n": 3},
        {"n": 0},
    ],
)
def test_too_many_entries_are_a_400(strict: Gateway, fields: dict[str, Any]) -> None:
    answer = strict.ask(post(body=chat_body(**fields), headers=BEARER))
    assert answer.status == 400
    assert answer.json["error"]["param"] == next(iter(fields))


def test_bodies_over_the_memory_of_all_are_a_503(strict: Gateway) -> None:
    request = post(headers=BEARER, body=chat_body(user="x" * 1_900_000))
    with strict.client() as first:
        first.send(request[:1_800_000])
        eventually(lambda: strict.state["held_bytes"] > 1_700_000)
        with strict.client() as second:
            second.send(request[:1_800_000])
            answer = second.read_answer()
            assert (answer.status, answer.json["error"]["code"]) == (503, "overloaded")
            assert 1000 < int(answer.get("retry-after-ms") or "") <= 1250
        # The first one is not harmed, and what was held is free again.
        first.send(request[1_800_000:])
        assert first.read_answer().status == 200
    assert strict.state["held_bytes"] == 0
    assert strict.ask(request).status == 200


def test_a_client_that_leaves_frees_what_it_sent(strict: Gateway) -> None:
    with strict.client() as client:
        client.send(post(headers=BEARER, body=b"x" * 1_000_000, length=1_900_000))
        eventually(lambda: strict.state["held_bytes"] == 1_000_000)
    eventually(lambda: strict.state["held_bytes"] == 0)
    eventually(strict.is_idle)


# --- connections ------------------------------------------------------------------------


class Address:
    def __init__(self, host: str) -> None:
        self.host = host


def site_with(**limits: Any) -> tuple[Site, Clock]:
    clock = Clock()
    site = Site(
        sweep=Sweep(clock, clock.seconds),
        outbox=Outbox(clock),
        limits=Limits(**limits),
        timeouts=Timeouts(),
        serve=lambda incoming: None,
        fault_answer=lambda fault, peer: ([], b""),
    )
    return site, clock


def open_from(site: Site, *peers: str) -> list[ClientConnection]:
    """Connections from these peers, as many as may be opened."""
    made = []
    for peer in peers:
        if site.may_open(peer):
            connection = ClientConnection(site, peer)
            site.opened(connection)
            made.append(connection)
    return made


@pytest.mark.parametrize(
    ("peers", "opened"),
    [
        (["203.0.113.1"] * 5, 3),
        (["203.0.113.1", "203.0.113.2"] * 3, 6),
        (["2001:db8:0:1::1", "2001:db8:0:1::2", "2001:db8:0:1:ffff::3", "2001:db8:0:1::4"], 3),
        (["2001:db8:0:1::1", "2001:db8:0:2::1"] * 3, 6),
        (["fe80::1%eth0"] * 5, 3),
        (["::ffff:203.0.113.1"] * 5, 3),
        (["::ffff:203.0.113.1", "203.0.113.1"] * 3, 3),
        (["::ffff:203.0.113.1", "::ffff:203.0.113.2"] * 3, 6),
        (["127.0.0.1"] * 9, 9),
        (["127.9.9.9"] * 9, 9),
        (["::1"] * 9, 9),
        (["::ffff:127.0.0.1"] * 9, 9),
        (["unix"] * 9, 9),
        (["10.1.2.3"] * 9, 9),
        (["::ffff:10.1.2.3"] * 9, 9),
        (["2001:db8:ffff::9"] * 9, 9),
    ],
)
def test_connections_of_one_address_are_capped(peers: list[str], opened: int) -> None:
    """IPv6 counts by /64; loopback, unix sockets and trusted networks are free."""
    site, _ = site_with(connections_per_ip=3, trusted_networks=("10.0.0.0/8", "2001:db8:ffff::/48"))
    made = open_from(site, *peers)
    assert len(made) == opened
    for connection in made:
        site.closed(connection)
    assert len(open_from(site, *peers)) == opened


def test_new_connections_of_one_address_are_capped_per_second() -> None:
    site, clock = site_with(new_connections_per_ip_s=3)
    assert len(open_from(site, *["203.0.113.1"] * 5, "203.0.113.2", *["127.0.0.1"] * 5)) == 3 + 1 + 5
    clock.advance(1.0)
    assert len(open_from(site, *["203.0.113.1"] * 5)) == 3
    assert site.refusals == {"new_connections_per_ip": 4}


def test_connections_of_the_process_are_capped_for_everybody() -> None:
    site, _ = site_with(connections=4)
    assert len(open_from(site, *["127.0.0.1"] * 3, "203.0.113.1", "203.0.113.2", "::1")) == 4


def open_silent(site: Site, count: int) -> list[ClientConnection]:
    """Connections that have said nothing yet, each with a transport."""
    made = []
    for _ in range(count):
        if site.may_open("127.0.0.1"):
            connection = ClientConnection(site, "127.0.0.1")
            connection.makeConnection(StringTransport())
            made.append(connection)
    return made


def test_a_crowd_that_connects_at_once_is_let_in_while_there_is_room() -> None:
    """All clients of a fleet come back in the same moment, say; none has had time to ask yet."""
    site, _ = site_with(connections=10_000)
    made = open_silent(site, 6000)
    assert len(made) == len(site.connections) == 6000
    assert not site.refusals


def test_who_says_nothing_takes_no_place_from_those_who_ask() -> None:
    site, _ = site_with(connections=900)
    asking = open_silent(site, 300)
    for connection in asking:
        site.first_request(connection)
    silent = open_silent(site, 5000)
    assert len(silent) == 5000
    # There is always room: the silent have no more than twice the places that are free.
    assert len(site.connections) == 300 + 400
    assert site.refusals == {"awaiting_first_request": 5000 - 400}
    assert set(asking) < site.connections
    assert set(silent[-400:]) < site.connections


def test_the_client_behind_a_load_balancer_is_counted_by_its_own_address() -> None:
    site, clock = site_with(connections_per_ip=2, trusted_networks=("10.0.0.0/8",))
    factory = ProxiedFactory(ClientFactory(site), None, clock)

    def connect(balancer: str, client: str) -> ClientConnection | None:
        preface = factory.buildProtocol(IPv4Address("TCP", balancer, 1))
        if preface is None:
            return None
        known = set(site.connections)
        preface.makeConnection(StringTransport(peerAddress=IPv4Address("TCP", balancer, 1)))
        preface.dataReceived(f"PROXY TCP4 {client} 198.51.100.1 5000 443\r\n".encode())
        return next(iter(site.connections - known), None)

    balanced = [connect("10.0.0.1", "203.0.113.1") for _ in range(4)]
    assert [each is not None for each in balanced] == [True, True, False, False]
    assert balanced[0] is not None
    assert balanced[0].peer == "203.0.113.1"
    assert connect("10.0.0.1", "203.0.113.2") is not None
    site.closed(balanced[0])
    assert connect("10.0.0.1", "203.0.113.1") is not None
    # A stranger is not believed, and not served.
    assert connect("198.51.100.7", "203.0.113.9") is None


def test_a_reload_changes_who_is_exempt_and_no_count_goes_astray() -> None:
    site, clock = site_with(connections_per_ip=2)
    made = open_from(site, *["203.0.113.1"] * 3)
    assert len(made) == 2
    site.configure(Limits(connections_per_ip=2, trusted_networks=("203.0.113.0/24",)), Timeouts())
    made += open_from(site, *["203.0.113.1"] * 3)
    for connection in made:
        site.closed(connection)
    site.configure(Limits(connections_per_ip=2), Timeouts())
    clock.advance(1.0)
    assert len(open_from(site, *["203.0.113.1"] * 3)) == 2


# --- S-LIM -----------------------------------------------------------------------------

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings")


@pytest.fixture(scope="module")
def one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Whatever can be limited to one request is."""
    folder = tmp_path_factory.mktemp("one")
    config = (
        keys(folder, "concurrent = 1")
        + """
    [limits]
    in_flight = 1
    in_flight_per_key = 1
    [[rate_limits]]
    scope = "global"
    concurrent = 1
    [timeouts]
    response_head_s = 0.3
    stream_idle_s = 0.3
    write_stall_s = 0.5
    [breaker]
    consecutive = 1000
    ratio_min = 1000
    """
    )
    backend = Scripted()
    more = 'models = ["m"]\nmax_connections = 1'
    with gateway_with(folder, backend, config=config, more=more) as gateway:
        gateway.backend = backend  # type: ignore[attr-defined]
        yield gateway
    backend.close()


def silent(line: Line, request: Received) -> None:
    line.wait_closed()


def one_event_then_silence(line: Line, request: Received) -> None:
    line.send(SSE_HEAD, chunk(event("a")))
    line.wait_closed()


def one_event_then_cut(line: Line, request: Received) -> None:
    line.send(SSE_HEAD, chunk(event("a")))
    time.sleep(0.02)
    line.reset()


def endless(line: Line, request: Received) -> None:
    line.send(SSE_HEAD)
    with contextlib.suppress(OSError):
        while True:
            line.send(chunk(event("x" * 30_000)))


ENDINGS: dict[str, tuple[Script, Callable[[Client], object]]] = {
    "abort mid-stream": (one_event_then_silence, lambda client: client.read_until(b"data:")),
    "abort before the head": (silent, lambda client: time.sleep(0.1)),
    "400": (lambda line, _: line.send(json_response({"error": {"message": "no"}}, 400)), Client.read_answer),
    "500": (lambda line, _: line.send(json_response(b"oops", 500)), Client.read_answer),
    "503": (lambda line, _: line.send(json_response(b"oops", 503)), Client.read_answer),
    "429": (lambda line, _: line.send(json_response(b"oops", 429)), Client.read_answer),
    "junk": (lambda line, _: line.send(b"junk\r\n\r\n"), Client.read_answer),
    "reset": (lambda line, _: line.reset(), Client.read_answer),
    "cut": (one_event_then_cut, Client.read_answer),
    "head timeout": (silent, Client.read_answer),
    "idle timeout": (one_event_then_silence, Client.read_answer),
    "junk in the body": (
        lambda line, _: line.send(SSE_HEAD + chunk(event("a")) + b"zz\r\n"),
        Client.read_answer,
    ),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_s_lim_1_every_way_out_gives_the_slot_back(one_at_a_time: Gateway, how: str) -> None:
    gateway = one_at_a_time
    backend: Scripted = gateway.backend  # type: ignore[attr-defined]
    script, read = ENDINGS[how]
    for path in PATHS if "timeout" not in how else PATHS[:2]:
        for stream in (True, False) if "timeout" not in how else (True,):
            backend.play(script)
            with gateway.client() as client:
                client.send(post(path, chat_body(stream=stream), BEARER))
                if "abort" in how:
                    eventually(lambda: backend.requests)
                read(client)
            if "abort" in how:
                eventually(gateway.is_idle, 2)
            backend.play(answer_completion)
            assert gateway.ask(post(path, chat_body(stream=stream), BEARER)).status == 200
    assert not backend.errors


def test_s_lim_1_a_client_that_stops_reading_gives_its_slot_back(one_at_a_time: Gateway) -> None:
    backend: Scripted = one_at_a_time.backend  # type: ignore[attr-defined]
    backend.play(endless)
    with one_at_a_time.client() as client:
        client.send(post(body=chat_body(stream=True), headers=BEARER))
        client.read_head()
        eventually(one_at_a_time.is_idle, 5)
        backend.play(answer_completion)
        assert one_at_a_time.ask(post(headers=BEARER)).status == 200


@pytest.mark.parametrize(
    "request_",
    [
        post(body=chat_body("x"), headers=BEARER),
        post(body=b"{", headers=BEARER),
        post(headers=BEARER + "Content-Encoding: br\r\n"),
        post(headers=BEARER + "Transfer-Encoding: chunked\r\n", body=b"zz\r\n"),
        post(),
    ],
)
def test_s_lim_1_a_refused_request_holds_nothing(one_at_a_time: Gateway, request_: bytes) -> None:
    backend: Scripted = one_at_a_time.backend  # type: ignore[attr-defined]
    backend.play(answer_completion)
    assert one_at_a_time.ask(request_).status >= 400
    assert one_at_a_time.is_idle()
    assert one_at_a_time.ask(post(headers=BEARER)).status == 200


def held_by(release: threading.Event) -> Script:
    """Answers when told to."""

    def script(line: Line, request: Received) -> None:
        assert release.wait(10)
        answer_completion(line, request)

    return script


@contextlib.contextmanager
def occupied(gateway: Gateway, backend: Scripted, request: bytes) -> Iterator[None]:
    """One request is at work inside."""
    release = threading.Event()
    backend.play(held_by(release))
    with gateway.client() as client:
        client.send(request)
        eventually(lambda: backend.requests)
        yield
        release.set()
        assert client.read_answer().status == 200


@pytest.mark.parametrize(
    ("limits", "key", "status", "code"),
    [
        ("[limits]\nin_flight = 1", "", 503, "overloaded"),
        ("[limits]\nin_flight_per_key = 1", "", 429, "rate_limit_exceeded"),
        ("", "concurrent = 1", 429, "rate_limit_exceeded"),
        ("[[rate_limits]]\nscope = 'global'\nconcurrent = 1", "", 429, "rate_limit_exceeded"),
        ("", "", 503, "overloaded"),
    ],
    ids=["process", "per key", "policy of the key", "policy", "backend"],
)
def test_one_too_many_is_told_at_once_when_to_come_back(
    tmp_path: Path, backend: Scripted, limits: str, key: str, status: int, code: str
) -> None:
    more = 'models = ["m"]\nmax_connections = ' + ("100" if limits or key else "1")
    with gateway_with(tmp_path, backend, config=keys(tmp_path, key) + limits, more=more) as gateway:
        with occupied(gateway, backend, post(headers=BEARER)):
            begun = time.monotonic()
            answers = [
                gateway.ask(post(path, headers=BEARER)) for path in ("/v1/chat/completions", "/v1/messages")
            ]
            assert time.monotonic() - begun < 0.5
            for answer in answers:
                assert answer.status == status
                assert 1 <= int(answer.get("retry-after") or "") <= 60
                assert 0 < int(answer.get("retry-after-ms") or "") <= 60_000
            assert answers[0].json["error"]["code"] == code
            assert answers[1].json["error"]["type"] == (
                "overloaded_error" if status == 503 else "rate_limit_error"
            )
            for path in ("/health", "/v1/models"):
                assert gateway.ask(get(path), "GET").status == 200
        assert len(backend.requests) == 1
        assert gateway.ask(post(headers=BEARER)).status == 200


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":50,"completion_tokens":30,"total_tokens":80}}\n\n'
DONE = b"data: [DONE]\n\n"
FIELDS = {"stream": True, "max_tokens": 300, "messages": [{"role": "user", "content": "x" * 350}]}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that counts tokens, before a backend that is no llama-server."""
    config = """
    [[rate_limits]]
    tokens_per_minute = 100000
    burst_s = 3600
    """
    backend = Scripted()
    with gateway_with(tmp_path_factory.mktemp("counted"), backend, config=config) as gateway:
        gateway.backend = backend  # type: ignore[attr-defined]
        yield gateway
    backend.close()


def charged(gateway: Gateway, script: Script, fields: dict[str, Any], read: Callable[[Client], Any]) -> float:
    """Tokens that a request is charged in the end."""
    backend: Scripted = gateway.backend  # type: ignore[attr-defined]
    metric = total_tokens(gateway)
    backend.play(script)
    with gateway.client() as client:
        client.send(post(body=chat_body(**fields)))
        read(client)
    eventually(gateway.is_idle)
    return total_tokens(gateway) - metric


def total_tokens(gateway: Gateway) -> float:
    text = gateway.admin("/metrics")[1].decode()
    return sum(
        float(value)
        for kind, value in re.findall(r'llmgw_tokens_total\{model="m",kind="(\w+)"\} (\S+)', text)
        if kind in ("prompt", "output")
    )


def stream_of(*events: bytes) -> Script:
    return lambda line, _: line.send(SSE_HEAD, *(chunk(each) for each in events), LAST_CHUNK)


def test_s_lim_2_usage_is_asked_for_and_the_extra_event_removed(counted: Gateway) -> None:
    backend: Scripted = counted.backend  # type: ignore[attr-defined]
    nulls = b'data: {"choices":[{"index":0,"delta":{"content":"b"}}],"usage":null}\n\n'
    backend.play(stream_of(event("a"), nulls, USAGE, DONE))
    before = total_tokens(counted)
    answer = counted.ask(post(body=chat_body(**FIELDS)))
    assert backend.requests[0].json["stream_options"] == {"include_usage": True}
    assert answer.body == event("a") + nulls + DONE
    assert total_tokens(counted) - before == 80


def test_s_lim_2_a_client_that_asks_for_usage_gets_it(counted: Gateway) -> None:
    backend: Scripted = counted.backend  # type: ignore[attr-defined]
    backend.play(stream_of(event("a"), USAGE, DONE))
    options = {"include_usage": True, "more": 1}
    answer = counted.ask(post(body=chat_body(**FIELDS, stream_options=options)))
    assert answer.body == event("a") + USAGE + DONE
    assert backend.requests[0].json["stream_options"] == options


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"continuous_usage_stats": True}])
def test_s_lim_2_a_client_cannot_keep_the_count_from_its_limit(
    counted: Gateway, options: dict[str, bool] | None
) -> None:
    backend: Scripted = counted.backend  # type: ignore[attr-defined]
    backend.play(stream_of(event("a"), USAGE, DONE))
    before = total_tokens(counted)
    answer = counted.ask(post(body=chat_body(**FIELDS, stream_options=options)))
    assert backend.requests[0].json["stream_options"] == {"include_usage": True}
    assert answer.body == event("a") + DONE
    assert total_tokens(counted) - before == 80


def test_s_lim_2_without_usage_an_estimate_is_charged(counted: Gateway) -> None:
    script = stream_of(*(event("a") for _ in range(20)), DONE)
    found = charged(counted, script, FIELDS, Client.read_answer)
    assert 100 <= found <= 250  # 350 letters are about 100 tokens (with the JSON around), and 20 came


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 501])
def test_s_lim_2_what_the_backend_refuses_costs_no_tokens(counted: Gateway, status: int) -> None:
    refusal = json_response({"error": {"message": "no"}}, status)
    assert charged(counted, lambda line, _: line.send(refusal), FIELDS, Client.read_answer) == 0


def test_s_lim_2_an_aborted_stream_is_charged_for_what_was_sent(counted: Gateway) -> None:
    def some(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, *(chunk(event("a")) for _ in range(40)))
        line.wait_closed()

    found = charged(counted, some, FIELDS, lambda client: client.read_until(event("a")))
    assert 105 <= found <= 280


def test_s_lim_2_what_no_backend_answered_costs_nothing(tmp_path: Path) -> None:
    """The reserve comes back in full, so the limit can not be used up by failures."""
    config = "[[rate_limits]]\ntokens_per_minute = 1000\n[breaker]\nconsecutive = 1000\nratio_min = 1000\n"
    backend = Scripted(lambda line, _: line.reset())
    with gateway_with(tmp_path, backend, config=config) as gateway:
        for _ in range(5):
            assert gateway.ask(post(body=chat_body(max_tokens=900))).status == 502
        backend.play(answer_completion)
        answer = gateway.ask(post(body=chat_body(max_tokens=900)))
        assert answer.status == 200
        assert int(answer.get("x-ratelimit-remaining-tokens") or "") < 100
        assert gateway.ask(post(body=chat_body(max_tokens=900))).status == 200  # 4 were used
    backend.close()


# --- breakers and health ---------------------------------------------------------------

QUICK = """
[breaker]
open_s = 0.5
jitter = 0.0
[retry]
attempts = 0
"""


@contextlib.contextmanager
def pair(
    folder: Path,
    first: Script,
    second: Script = answer_completion,
    config: str = QUICK,
    caps: tuple[int, int] = (100, 100),
) -> Iterator[tuple[Gateway, Scripted, Scripted]]:
    """A gateway before two backends, asked in turn."""
    backends = (Scripted(first), Scripted(second))
    config = '[router]\nplugin = "round-robin"\n[log]\naccess = "access.log"\n' + config
    for index, backend in enumerate(backends):
        config += backend_table(backend, f"b{index}", f'models = ["m"]\nmax_connections = {caps[index]}')
    with gateway_with(folder, config=config) as gateway:
        yield gateway, *backends
    for backend in backends:
        backend.close()
        assert not backend.errors


def member(gateway: Gateway, id: str = "b0") -> dict[str, Any]:
    return next(found for found in gateway.state["backends"] if found["id"] == id)


def assert_no_address(answer: Answer) -> None:
    assert "127.0.0.1" not in answer.body.decode() + str(answer.headers)
    assert "http:" not in answer.body.decode()


def test_s_cb_1_errors_of_clients_do_not_open_the_breaker(tmp_path: Path) -> None:
    bad = json_response({"error": {"message": "no", "code": 400}}, 400)
    with pair(tmp_path, lambda line, _: line.send(bad), lambda line, _: line.send(bad)) as (
        gateway,
        *backends,
    ):
        with gateway.client() as client:
            for _ in range(50):
                client.send(post())
                assert client.read_answer().status == 400
        assert {found["breaker"] for found in gateway.state["backends"]} == {"closed"}
        for backend in backends:
            backend.script = answer_completion
        for _ in range(4):
            assert gateway.ask(post()).status == 200


def test_s_cb_1_nor_do_json_500s_but_others_do(tmp_path: Path) -> None:
    about_message = json_response(
        {"error": {"code": 500, "message": "bad chat template", "type": "server_error"}}, 500
    )
    with pair(tmp_path, lambda line, _: line.send(about_message)) as (gateway, first, _):
        for _ in range(20):
            gateway.ask(post())
        assert member(gateway)["breaker"] == "closed"
        first.script = lambda line, _: line.send(json_response(b"<h1>oops</h1>", 500))
        statuses = [gateway.ask(post()).status for _ in range(20)]
        assert statuses.count(500) == 5
        assert member(gateway)["breaker"] in ("open", "half_open")


def test_s_cb_2_busy_is_not_dead(tmp_path: Path) -> None:
    busy_until = time.monotonic() + 60

    def busy(status: int) -> Script:
        def script(line: Line, request: Received) -> None:
            if time.monotonic() < busy_until:
                line.send(json_response({"error": {"message": "busy"}}, status, "Retry-After: 1\r\n"))
            else:
                answer_completion(line, request)

        return script

    with pair(tmp_path, busy(503), busy(429)) as (gateway, first, second):
        answers = [gateway.ask(post()) for _ in range(20)]
        assert {answer.status for answer in answers} <= {429, 503}
        assert len(first.requests + second.requests) == 2  # asked once each, then let alone
        assert all(int(answer.get("retry-after") or "") >= 1 for answer in answers)
        assert {found["breaker"] for found in gateway.state["backends"]} == {"closed"}
        busy_until = time.monotonic()
        eventually(lambda: gateway.ask(post()).status == 200, 1.5)
        assert {found["breaker"] for found in gateway.state["backends"]} == {"closed"}


def test_s_cb_3_half_open_takes_one_and_no_herd(tmp_path: Path) -> None:
    """One backend is open, the other at its cap, and then many come at once."""
    release = threading.Event()
    with pair(tmp_path, lambda line, _: line.reset(), caps=(100, 1)) as (gateway, first, second):
        eventually(lambda: gateway.ask(post()).status and member(gateway)["breaker"] == "open")
        first.play(held_by(release))
        second.play(held_by(release))
        clients = [gateway.client() for _ in range(40)]
        eventually(lambda: member(gateway)["breaker"] == "half_open")
        for client in clients:
            client.send(post())
        eventually(lambda: first.requests and second.requests)
        by_socket = {client.sock: client for client in clients}
        eventually(lambda: len(select.select(by_socket, [], [], 0)[0]) == 38, 2)
        answered = [by_socket[sock].read_answer() for sock in select.select(by_socket, [], [], 0)[0]]
        assert (len(first.requests), len(second.requests)) == (1, 1)
        for answer in answered:
            assert answer.status == 503
            assert 1 <= int(answer.get("retry-after") or "") <= 60
        assert len({answer.get("retry-after-ms") for answer in answered}) > 5  # jittered
        release.set()
        eventually(gateway.is_idle)
        for client in clients:
            client.close()


def test_s_cb_3_a_late_result_from_before_does_not_close_it(tmp_path: Path) -> None:
    release = threading.Event()

    def first_good_then_broken(line: Line, request: Received) -> None:
        if b"early" in request.body:
            assert release.wait(10)
            answer_completion(line, request)
        else:
            line.reset()

    with pair(tmp_path, first_good_then_broken, config=QUICK.replace("0.5", "30.0")) as (gateway, first, _):
        clients = [gateway.client() for _ in range(2)]
        for client in clients:  # one of them goes to the first backend
            client.send(post(body=chat_body(user="early")))
        eventually(lambda: any(b"early" in request.body for request in first.requests))
        eventually(lambda: gateway.ask(post()).status and member(gateway)["breaker"] == "open")
        release.set()
        for client in clients:
            assert client.read_answer().status == 200
            client.close()
        assert member(gateway)["breaker"] == "open"


def test_s_cb_4_a_trial_that_its_client_left_is_tried_again(tmp_path: Path) -> None:
    with pair(tmp_path, lambda line, _: line.reset(), caps=(100, 1)) as (gateway, first, second):
        eventually(lambda: gateway.ask(post()).status and member(gateway)["breaker"] == "open")
        first.play(silent)
        second.play(silent)
        eventually(lambda: member(gateway)["breaker"] == "half_open")
        for _ in range(3):
            first.requests.clear()
            with gateway.client() as client, gateway.client() as other:
                client.send(post())
                other.send(post())
                eventually(lambda: first.requests, 2)
            eventually(gateway.is_idle)
        first.play(answer_completion)
        second.play(answer_completion)
        eventually(
            lambda: gateway.ask(post()).status and member(gateway)["breaker"] in ("slow_start", "closed")
        )


def test_s_hlt_1_a_busy_backend_with_moving_streams_is_not_removed(tmp_path: Path) -> None:
    """Its health checks time out, while its streams go on."""
    stop = threading.Event()

    def moving(line: Line, request: Received) -> None:
        if b"stream" not in request.body:
            answer_completion(line, request)
            return
        line.send(SSE_HEAD)
        while not stop.wait(0.1):
            line.send(chunk(event("a")))
        line.send(chunk(DONE), LAST_CHUNK)

    backends = [Scripted(moving), Scripted()]
    config = '[[health]]\nplugin = "llamacpp"\ninterval_s = 2.0\ntimeout_s = 0.2\n[breaker]\nfall = 1\n'
    config += '[router]\nplugin = "round-robin"\n'
    with gateway_with(tmp_path, *backends, config=config) as gateway:
        clients = [gateway.client() for _ in range(2)]
        for client in clients:
            client.send(post(body=chat_body(stream=True)))
        eventually(lambda: backends[0].requests)
        for backend in backends:
            backend.probes["/health"] = b""  # nobody answers
        eventually(lambda: member(gateway, "b1")["standing"] != "ready", 6)
        # Both were looked at; the one at work is still asked.
        eventually(lambda: len(backends[0].probed) > 3, 6)
        time.sleep(0.5)
        assert member(gateway, "b0")["standing"] == "ready"
        assert gateway.ask(post()).status == 200
        stop.set()
        bodies = [client.read_answer() for client in clients]
        assert all(answer.clean and answer.body.endswith(DONE) for answer in bodies)
    for backend in backends:
        backend.close()


def test_s_hlt_2_a_good_health_page_does_not_cover_a_broken_port(tmp_path: Path) -> None:
    with pair(tmp_path, lambda line, _: line.reset(), config=QUICK.replace("0.5", "30.0")) as (
        gateway,
        first,
        _,
    ):
        statuses = [gateway.ask(post()).status for _ in range(30)]
        assert statuses.count(502) == 5
        assert statuses[-15:] == [200] * 15
        assert len(first.requests) == 5
        assert member(gateway)["standing"] == "ejected"


@pytest.mark.parametrize("router", ["least-connections", "adaptive"])
def test_s_hlt_3_a_backend_that_fails_fast_draws_no_load(tmp_path: Path, router: str) -> None:
    def slow(line: Line, request: Received) -> None:
        time.sleep(0.1)
        answer_completion(line, request)

    backends = [Scripted(lambda line, _: line.send(json_response(b"oops", 500))), Scripted(slow)]
    config = f'[router]\nplugin = "{router}"\n' + QUICK.replace("0.5", "30.0")
    with gateway_with(tmp_path, *backends, config=config) as gateway:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(gateway.client()) for _ in range(8)]
            statuses = []
            for _ in range(4):
                for client in clients:
                    client.send(post())
                statuses += [client.read_answer().status for client in clients]
        assert statuses.count(500) <= 8
        assert statuses[-16:] == [200] * 16
        found = member(gateway)
        assert (
            found["standing"] == "ejected" or found["failure_streak"] >= 3
        )  # the adaptive router is quicker
    for backend in backends:
        backend.close()


def test_s_all_1_all_backends_down(tmp_path: Path) -> None:
    backends = [Scripted(), Scripted()]
    with gateway_with(
        tmp_path, *backends, config='[[health]]\nplugin = "llamacpp"\ninterval_s = 2.0\n'
    ) as gateway:
        assert gateway.ask(post()).status == 200
        for backend in backends:
            backend.close()
            for line in backend.lines:
                line.close()
        first = [gateway.ask(post(path)) for path in ("/v1/chat/completions", "/v1/messages") * 2]
        assert {answer.status for answer in first} <= {502, 503}
        down = eventually(lambda: (answer := gateway.ask(post())).status == 503 and answer, 8)
        assert down.json["error"]["code"] == "no_backend"
        assert "'m'" in down.json["error"]["message"]
        assert 1 <= int(down.get("retry-after") or "") <= 60
        anthropic = gateway.ask(post("/v1/messages"))
        assert (anthropic.status, anthropic.json["error"]["type"]) == (503, "overloaded_error")
        for answer in (*first, down, anthropic):
            assert_no_address(answer)
            assert answer.json["error"]["message"]
        assert gateway.ask(get("/health"), "GET").status == 200
        assert [model["id"] for model in gateway.ask(get("/v1/models"), "GET").json["data"]] == ["m"]


# --- what is told ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    backend = Scripted()
    config = "[[models]]\nname = 'alias'\ntarget = 'm'\n"
    with gateway_with(tmp_path_factory.mktemp("plain"), backend, config=config) as gateway:
        gateway.backend = backend  # type: ignore[attr-defined]
        yield gateway
    backend.close()


def test_s_met_1_labels_are_of_configured_things_only(plain: Gateway) -> None:
    backend: Scripted = plain.backend  # type: ignore[attr-defined]
    assert plain.ask(post(body=chat_body("alias"))).status == 200
    for number in range(20):
        plain.ask(post(body=chat_body(f"made-up-{number}")))
        plain.ask(post(f"/made-up-{number}"))
        plain.ask(get(f"/v1/models/made-up-{number}"), "GET")
        plain.ask(f"MADEUP{number} / HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    for status in (299, 418, 599):
        backend.play(lambda line, _, status=status: line.send(json_response(COMPLETION, status)))
        plain.ask(post())
    text = plain.admin("/metrics")[1].decode()
    assert "made-up" not in text.lower()
    assert "MADEUP" not in text
    labels = set(re.findall(r'llmgw_requests_total\{route="([^"]*)",model="([^"]*)"', text))
    assert {model for _, model in labels} <= {"m", "other"}
    assert {route for route, _ in labels} <= {"/v1/chat/completions", "/v1/models/{id}", "other"}
    assert len(re.findall(r"^llmgw_requests_total", text, re.M)) < 20


def test_s_log_1_one_request_is_one_line(plain: Gateway) -> None:
    backend: Scripted = plain.backend  # type: ignore[attr-defined]
    backend.play(answer_completion)
    before = len(plain.access)
    evil = "x\nlevel=error \u001b[31m\u2028 \u0085 msg=forged"
    asked = [
        post(body=chat_body(evil)),
        post("/v1/chat/completions%0a%0dforged=1"),
        post("/v1/chat/completions?x=%0aforged"),
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nUser-Agent: \xc2\x85\xe2\x80\xa8forged\xff\r\n"
        b"Content-Length: 2\r\n\r\n{}",
        post(headers="User-Agent: " + "a" * 4000 + "\r\n"),
        post(headers="x-request-id: a\tb\r\n"),
    ]
    ids = [plain.ask(request).get("x-request-id") for request in asked]
    plain.process.send_signal(signal.SIGHUP)  # a reload writes what waits
    lines = eventually(lambda: len(found := plain.access) >= before + len(asked) and found[before:], 4)
    assert sorted(line["id"] for line in lines if line["id"] in ids) == sorted(ids)
    raw = Path(plain.folder, "access.log").read_bytes()
    assert all(json.loads(line) for line in raw.split(b"\n")[:-1])
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", raw)
    assert max(map(len, raw.split(b"\n"))) < 1200
    assert "forged" not in plain.log


def test_s_log_1_bytes_that_are_no_request_have_a_line_too(plain: Gateway) -> None:
    answer = plain.ask(b"BAD\r\n\r\n")
    plain.process.send_signal(signal.SIGHUP)
    line = eventually(lambda: [line for line in plain.access if line["id"] == answer.get("x-request-id")], 4)[
        0
    ]
    assert (line["status"], line["outcome"], line["peer"]) == (400, "invalid_request", "127.0.0.1")
