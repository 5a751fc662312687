"""Section 8 of the cases: silence, hung and moved backends, descriptors, idle clients, ports."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_names import Names
from fake_time import WallClock, faster
from harness import (
    COMPLETION,
    LAST_CHUNK,
    SSE_HEAD,
    TWISTD,
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
    free_port,
    gateway_with,
    json_response,
    post,
)

from cases.scenes import STEADY, ask_stream, ask_whole, silent
from llmgw.config import Timeouts

ONE = 'models = ["m"]\nmax_connections = 100'
LOOKED_AT_ONCE = '[[health]]\nplugin = "http"\ninterval_s = 600.0\n'
UNHURRIED = "[overload]\nshed_lag_s = 10000\nrefuse_lag_s = 10000\nclose_lag_s = 10000\n"


def has_ipv6() -> bool:
    """There is an IPv6 loopback here."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


class Shared:
    """A gateway that tests share, with a backend of its own for each model.

    :ivar well: of ``m``, answers.
    :ivar hung: of ``slow``, never answers.
    :ivar narrow: of ``two``, has two places.
    :ivar ipv6_port: where the gateway listens too, if there is an IPv6 loopback.
    """

    def __init__(self, folder: Path) -> None:
        self.well, self.hung, self.narrow = Scripted(), Scripted(silent), Scripted()
        port, self.ipv6_port = free_port(), free_port()
        listen = [f"tcp:{port}:interface=127.0.0.1"]
        if has_ipv6():
            listen.append(f"tcp:{self.ipv6_port}:interface=\\:\\:1")
        config = f"listen = {json.dumps(listen)}\n" + STEADY + '[log]\naccess = "access.log"\n'
        config += backend_table(self.well, "well", ONE)
        config += backend_table(self.hung, "hung", 'models = ["slow"]\nmax_connections = 200')
        config += backend_table(self.narrow, "narrow", 'models = ["two"]\nmax_connections = 2')
        self.gateway = Gateway(folder, config, port=port)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(tmp_path_factory.mktemp("shared"))
    yield shared
    shared.gateway.stop()
    for backend in (shared.well, shared.hung, shared.narrow):
        backend.close()
    assert "Traceback" not in shared.gateway.log, shared.gateway.log


@pytest.fixture
def shared(ended: Shared) -> Iterator[Shared]:
    """The shared gateway, at rest before and after."""
    ended.well.play(answer_completion)
    yield ended
    eventually(ended.gateway.is_idle)


class Named:
    """A gateway that tests share, whose backends are at names and addresses of several kinds.

    :ivar names: what its resolver knows: ``backend.test``, and ``localhost`` as in many containers.
    :ivar old: the backend at ``backend.test``; ``new`` has the same port on another address.
    :ivar ports: of the backends on ``[::1]``, by their model.
    :ivar heard: heads that came there.
    """

    def __init__(self, folder: Path) -> None:
        self.old = answer_as("old")
        self.new = same_port_on(
            "127.0.0.2",
            self.old,
            lambda line, request: line.send(json_response({**COMPLETION, "who": "new"})),
        )
        self.dead = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.listeners: list[socket.socket] = []
        self.heard: list[bytes] = []
        self.ports: dict[str, int] = {}
        self.names = Names(folder, backend_test=["127.0.0.1"], localhost=["127.0.0.1"])
        config = STEADY + LOOKED_AT_ONCE + "[retry]\nattempts = 0\n"
        config += "[timeouts]\nupstream_idle_s = 0.5\nresponse_head_s = 1.5\n"
        urls = {
            "moved": f"http://backend.test:{self.old.port}",
            "dead": f"http://127.0.0.1:{self.dead.getsockname()[1]}",
        }
        if has_ipv6():
            urls |= {model: url.format(port=self._listen(model)) for model, url in ON_IPV6.items()}
        for model, url in urls.items():
            config += f'[[backends]]\nid = "{model}"\nurl = "{url}"\nmodels = ["{model}"]\n'
        self.gateway = Gateway(folder, config, environment=self.names.environment)

    def _listen(self, model: str) -> int:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
        self.listeners.append(listener)
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        self.ports[model] = listener.getsockname()[1]
        return self.ports[model]

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                line = Line(sock, 0)
                request = line.read_request()
                if request is not None:
                    self.heard.append(request.head)
                    line.send(json_response(COMPLETION))
                line.close()

    def close(self) -> None:
        self.gateway.stop()
        for backend in (self.old, self.new):
            backend.close()
        for listener in (self.dead, *self.listeners):
            listener.close()


ON_IPV6 = {"number": "http://[::1]:{port}", "name": "http://localhost:{port}"}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Named]:
    named = Named(tmp_path_factory.mktemp("named"))
    yield named
    named.close()
    assert "Traceback" not in named.gateway.log, named.gateway.log


def test_s_tmo_1_the_defaults_leave_a_long_prefill_its_time() -> None:
    timeouts = Timeouts()
    assert timeouts.response_head_s >= 600
    assert timeouts.first_token_s >= 600
    assert timeouts.total_s > timeouts.first_token_s
    assert timeouts.connect_s <= 5


def test_s_tmo_1_and_2_silence_of_minutes_is_no_failure(tmp_path: Path) -> None:
    """S-TMO-2 too: 65, 305 and 905 s before the first byte, and 200 s inside a stream, with every
    timeout at its default, on a clock that runs 200 times as fast. All but that for connecting:
    its 2 s would be 10 ms here, which a busy machine takes."""
    speed = 200

    def patient(line: Line, request: Received) -> None:
        silence_s = request.json["silence_s"] / speed
        if request.json.get("stream"):
            line.send(SSE_HEAD, chunk(event("a")))
            time.sleep(silence_s)
            line.send(chunk(event("b")), chunk(b"data: [DONE]\n\n"), LAST_CHUNK)
        else:
            time.sleep(silence_s)
            line.send(json_response(COMPLETION))

    backend = Scripted(patient)
    config = UNHURRIED + "[timeouts]\nconnect_s = 600.0\n"
    config += '[[health]]\nplugin = "http"\ninterval_s = 3600.0\n'
    gateway = Gateway(tmp_path, config + backend_table(backend, more=ONE), environment=faster(speed))
    try:
        asked = [(65, False), (305, False), (905, False), (200, True)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(
                pool.map(
                    lambda each: gateway.ask(post(body=chat_body(silence_s=each[0], stream=each[1]))), asked
                )
            )
        assert [(each.status, each.clean) for each in answers] == [(200, True)] * 4
        assert answers[3].body.count(b'"content"') == 2
    finally:
        gateway.stop()
        backend.close()


def test_s_tmo_3_one_hung_backend_hangs_nobody_else(shared: Shared) -> None:
    """200 requests to a model whose backend never answers, and another model goes on."""
    gateway = shared.gateway
    clients = []
    for _ in range(200):
        client = gateway.client()
        client.send(ask_whole(model="slow"))
        clients.append(client)
    eventually(lambda: len(shared.hung.requests) == 200)
    for _ in range(50):
        assert gateway.ask(ask_whole()).status == 200
    assert gateway.ask(ask_whole(model="slow")).status == 503
    for client in clients:
        client.close()
    eventually(gateway.is_idle)


def test_s_tmo_4_a_backend_that_only_connects_is_504(named: Named) -> None:
    """The kernel of a dead process still completes handshakes."""
    answer = named.gateway.ask(ask_whole(model="dead"))
    assert (answer.status, answer.json["error"]["code"]) == (504, "upstream_timeout")
    eventually(named.gateway.is_idle)


def answer_as(name: str) -> Scripted:
    """A backend that says who it is."""
    return Scripted(lambda line, request: line.send(json_response({**COMPLETION, "who": name})))


def same_port_on(address: str, like: Scripted, script: object) -> Scripted:
    """A backend on another loopback address and the same port."""
    other = Scripted.__new__(Scripted)
    real = socket.create_server
    try:
        socket.create_server = lambda _, **options: real((address, like.port), **options)  # type: ignore[assignment]
        other.__init__(script)  # type: ignore[misc]
    finally:
        socket.create_server = real
    return other


def test_s_dns_1_a_backend_that_moved_is_found(named: Named) -> None:
    """A name is looked up for every connection; one that cannot be looked up any more
    keeps its last good addresses; a kept connection does not hold on to the old one for ever."""

    def who() -> str:
        answer = named.gateway.ask(ask_whole(model="moved"))
        return str(answer.json.get("who", answer.status))

    def is_unconnected() -> bool:
        found = {each["id"]: each for each in named.gateway.state["backends"]}
        return bool(found["moved"]["idle_connections"] == 0)

    assert who() == "old"
    named.names.set(localhost=["127.0.0.1"], backend_test=[])
    eventually(is_unconnected)
    assert who() == "old"  # the last good answer
    named.names.set(localhost=["127.0.0.1"], backend_test=["127.0.0.2"])
    eventually(is_unconnected)
    assert who() == "new"


@pytest.mark.parametrize("url", ON_IPV6.values())
def test_s_ip6_1_a_backend_on_ipv6(named: Named, url: str) -> None:
    """Brackets in ``Host``; of ``localhost`` both families are tried, and only one listens,
    though the hosts file, as in many containers, knows the other alone."""
    if not named.ports:
        pytest.skip("no IPv6 on loopback here")
    model = next(model for model, each in ON_IPV6.items() if each == url)
    answer = named.gateway.ask(ask_whole(model=model))
    assert answer.status == 200, answer
    host = f"host: {url.format(port=named.ports[model]).removeprefix('http://')}".encode()
    assert [host in head.lower() for head in named.heard if head.startswith(b"POST")][-1:] == [True]


def test_s_ip6_1_clients_on_ipv6_are_named_and_counted(shared: Shared) -> None:
    if not has_ipv6():
        pytest.skip("no IPv6 on loopback here")
    with socket.create_connection(("::1", shared.ipv6_port), 5) as sock:
        sock.sendall(ask_whole(id="over-ipv6"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
    lines = eventually(lambda: [line for line in shared.gateway.access if line["id"] == "over-ipv6"])
    assert [line["peer"] for line in lines] == ["::1"]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def limited(folder: Path, descriptors: int, config: str) -> Gateway:
    """A gateway that may have only so many descriptors."""
    real = resource.getrlimit(resource.RLIMIT_NOFILE)
    gateway = Gateway.__new__(Gateway)
    command = list(TWISTD)
    try:
        TWISTD[:] = ["prlimit", f"--nofile={descriptors}:{descriptors}", *command]
        gateway.__init__(folder, config)  # type: ignore[misc]
    finally:
        TWISTD[:] = command
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == real
    return gateway


def test_s_fd_1_descriptors_run_out(tmp_path: Path) -> None:
    """64 descriptors and 200 connections: streams go on, nothing spins, all is well afterwards."""
    release = threading.Event()

    def held(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("a")))
        release.wait(20)
        line.send(chunk(event("b")), chunk(b"data: [DONE]\n\n"), LAST_CHUNK)

    backend = Scripted(held)
    gateway = limited(tmp_path, 64, STEADY + backend_table(backend, more=ONE))
    crowd: list[socket.socket] = []
    try:
        streams = [gateway.client() for _ in range(3)]
        for client in streams:
            client.send(ask_stream())
            client.read_until(b"\n\n\r\n")
        for _ in range(200):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", gateway.port))
            crowd.append(sock)
        time.sleep(0.3)
        before_s = cpu_s(gateway.process.pid)
        time.sleep(0.7)
        assert cpu_s(gateway.process.pid) - before_s < 0.5, "it spins"
        release.set()
        for client in streams:
            assert b'"b"' in client.read_until(b"0\r\n\r\n")
            client.close()
        for sock in crowd:
            sock.close()
        backend.play(answer_completion)
        eventually(lambda: gateway.ask(ask_whole()).status == 200)
        eventually(gateway.is_idle)
        assert len(os.listdir(f"/proc/{gateway.process.pid}/fd")) < 40
    finally:
        for sock in crowd:
            sock.close()
        assert gateway.stop() == 0
        backend.close()
    assert "limits.connections lowered" in gateway.log
    assert "Unhandled" not in gateway.log


def test_connections_that_no_descriptor_is_left_for_are_told_once(tmp_path: Path) -> None:
    backend = Scripted()
    gateway = Gateway(tmp_path, backend_table(backend, more=ONE))
    try:
        pid = gateway.process.pid
        with gateway.client() as client:
            client.send(b"GET /health HTTP/1.1\r\nHost: gw\r\n\r\n")
            client.read_answer("GET")
            used = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, 20_000))
            for _ in range(50):
                with socket.create_connection(("127.0.0.1", gateway.port)) as refused:
                    refused.settimeout(5.0)
                    with contextlib.suppress(ConnectionResetError):
                        assert refused.recv(1) == b""
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (20_000, 20_000))
        assert gateway.ask(ask_whole()).status == 200
    finally:
        gateway.stop()
        backend.close()
    assert gateway.log.count("EMFILE") == 1
    assert "no descriptor is left (EMFILE): connections are closed as they come" in gateway.log


def test_s_fd_1_no_descriptor_for_a_backend_is_our_fault_and_not_its(tmp_path: Path) -> None:
    """EMFILE on connect: 502 that says ``local``, the backend stays in, and it recovers. A gateway of
    its own: one that has had many connections has free numbers below the limit."""
    backend = Scripted()
    quick = '[log]\naccess = "access.log"\n[breaker]\nfall = 1\n'
    quick += '[[health]]\nplugin = "llamacpp"\ninterval_s = 2.0\n'
    gateway = Gateway(tmp_path, quick + backend_table(backend, more=ONE))
    try:
        assert gateway.ask(ask_whole()).status == 200
        pid = gateway.process.pid
        with gateway.client() as client:
            client.send(b"GET /health HTTP/1.1\r\nHost: gw\r\n\r\n")
            client.read_answer("GET")
            for line in list(backend.open_lines):
                line.close()
            used = len(os.listdir(f"/proc/{pid}/fd"))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used - 2, 20_000))
            for _ in range(8):
                client.send(ask_whole())
                answer = client.read_answer()
                if answer.status != 200:
                    assert (answer.status, "local" in answer.body.decode()) == (502, True)
            assert answer.status == 502
            eventually(lambda: "backend b: cannot be looked at" in gateway.log)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (20_000, 20_000))
            client.send(ask_whole())
            assert client.read_answer().status == 200
        [seen] = gateway.state["backends"]
        assert (seen["failure_streak"], seen["standing"]) == (0, "ready")
        eventually(lambda: [line["failed"] for line in gateway.access if "failed" in line])
        assert {line["failed"] for line in gateway.access if "failed" in line} == {"b: local"}
        assert gateway.log.count("for a lack of this machine's own, and of no backend") == 1
        assert "fails its health checks" not in gateway.log
    finally:
        gateway.stop()
        backend.close()


def well_of(gateway: Gateway) -> dict[str, Any]:
    """The state of the backend that answers."""
    return next(each for each in gateway.state["backends"] if each["id"] == "well")


def test_s_port_1_many_short_requests_use_few_ports(shared: Shared) -> None:
    before = well_of(shared.gateway)["connects"]
    with shared.gateway.client() as client:
        for _ in range(500):
            client.send(ask_whole())
            assert client.read_answer().status == 200
    # Its health looks have a connection each.
    assert well_of(shared.gateway)["connects"] - before <= 3


def test_s_idl_1_a_thousand_who_say_nothing_go_by_themselves(tmp_path: Path) -> None:
    backend = Scripted()
    config = "[timeouts]\nrequest_head_s = 1.0\n"
    with gateway_with(tmp_path, backend, config=config) as gateway:
        idle = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(1000)]
        eventually(lambda: gateway.state["connections"] >= 900)
        assert gateway.state["in_flight"] == 0
        assert gateway.ask(ask_whole()).status == 200
        eventually(lambda: gateway.state["connections"] == 0)
        assert all(sock.recv(10) == b"" for sock in idle)
        for sock in idle:
            sock.close()
    backend.close()


def test_s_h2_1_http_2_is_not_offered_and_its_preface_refused(shared: Shared) -> None:
    """By ALPN: ``test_tls.py``. Without TLS the preface is bytes that are no request."""
    with shared.gateway.client() as client:
        client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        answer = client.read_answer()
        assert answer.status in (400, 405, 505)
        assert client.is_closed()
        assert shared.well.requests == []
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    assert shared.gateway.ask(post(headers=upgrade)).status == 200


def test_s_cap_1_all_slots_busy_and_the_rest_still_answers(shared: Shared) -> None:
    gateway, release = shared.gateway, threading.Event()

    def held(line: Line, request: Received) -> None:
        release.wait(20)
        answer_completion(line, request)

    def ask() -> Answer:
        return gateway.ask(ask_whole(model="two"))

    shared.narrow.play(held)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask) for _ in range(2)]
        eventually(lambda: gateway.state["in_flight"] == 2)
        answer = ask()
        assert (answer.status, answer.json["error"]["code"]) == (503, "overloaded")
        assert 1 <= int(answer.get("retry-after") or 0) <= 60
        for path in ("/health", "/v1/models"):
            request = f"GET {path} HTTP/1.1\r\nHost: gw\r\n\r\n".encode()
            assert gateway.ask(request, "GET").status == 200
        release.set()
        assert [each.result().status for each in running] == [200, 200]


def test_s_clk_1_and_s_cb_5_the_wall_clock_jumps(tmp_path: Path) -> None:
    """A day forward and an hour back, while a stream runs, a limit is spent and a breaker
    is open: nothing ends, nothing hangs, and limits and cool-downs run on."""
    clock = WallClock(tmp_path)
    release = threading.Event()

    def script(line: Line, request: Received) -> None:
        if request.json.get("stream"):
            line.send(SSE_HEAD, chunk(event("a")))
            release.wait(20)
            line.send(chunk(event("b")), chunk(b"data: [DONE]\n\n"), LAST_CHUNK)
        else:
            answer_completion(line, request)

    def broken(line: Line, request: Received) -> None:
        line.reset()

    good, bad = Scripted(script), Scripted(broken)
    config = """
    [[rate_limits]]
    name = "few"
    requests_per_minute = 120
    burst_s = 4
    [breaker]
    consecutive = 2
    open_s = 1.0
    jitter = 0.0
    successes = 1
    slow_start_s = 0.1
    [retry]
    attempts = 0
    [log]
    access = "access.log"
    """
    config += backend_table(good, "good") + backend_table(bad, "bad", 'models = ["n"]')
    config += f'[[backends]]\nid = "bad2"\nurl = "http://127.0.0.1:{free_port()}"\nmodels = ["n"]\n'
    gateway = Gateway(tmp_path, config, environment=clock.environment)
    try:
        days: set[str] = set()
        with gateway.client() as stream:
            stream.send(ask_stream())
            stream.read_until(b"\n\n\r\n")
            for _ in range(2):
                assert gateway.ask(ask_whole(model="n")).status in (502, 503)
            for offset in ("+1d", "-1h", "+0"):
                clock.set(offset)
                health = b"GET /health HTTP/1.1\r\nHost: gw\r\n\r\n"
                days.add((gateway.ask(health, "GET").get("date") or "")[:16])
                assert gateway.admin("/readyz")[0] == 200
                # The limit was not filled by the jump more than once, nor emptied.
                statuses = [gateway.ask(ask_whole()).status for _ in range(12)]
                assert set(statuses) <= {200, 429}
                assert 429 in statuses
                eventually(lambda: gateway.ask(ask_whole()).status == 200, 5.0)
            assert len(days) > 1, "the clock did not jump"
            bad.play(answer_completion)
            eventually(lambda: gateway.ask(ask_whole(model="n")).status == 200, 8.0)
            release.set()
            assert b'"b"' in stream.read_until(b"0\r\n\r\n")
        eventually(gateway.is_idle)
        eventually(lambda: len(gateway.access) > 30)
        assert all(0 <= line["duration_s"] < 20 for line in gateway.access if "duration_s" in line)
    finally:
        gateway.stop()
        good.close()
        bad.close()
    assert "Traceback" not in gateway.log
