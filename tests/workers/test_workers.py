"""A parent and its workers, as real processes under load."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Client,
    Gateway,
    Line,
    Received,
    Scripted,
    backend_table,
    chat_body,
    chunk,
    event,
    eventually,
    post,
)
from streaming_load import StreamingLoad, short_streams

DRAIN = "[drain]\nlame_duck_s = 0.3\nfinish_s = 10.0\nabort_s = 1.0\n"


def is_alive(pid: int) -> bool:
    try:
        return "\tZ" not in Path(f"/proc/{pid}/status").read_text().split("State:")[1].split("\n")[0]
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers(gateway: Gateway) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gateway.state["workers"]
    return found


def serving(gateway: Gateway) -> dict[int, int]:
    """Place to process id, of those that serve."""
    return {each["number"]: each["pid"] for each in workers(gateway) if each["state"] == "serving"}


def all_serve(gateway: Gateway, count: int = 2) -> dict[int, int]:
    eventually(lambda: len(serving(gateway)) == count, 20)
    return serving(gateway)


def counted(gateway: Gateway, name: str) -> float:
    lines = gateway.admin("/metrics")[1].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@pytest.fixture(scope="module")
def backend() -> Iterator[Scripted]:
    scripted = Scripted(short_streams())  # type: ignore[arg-type]
    yield scripted
    scripted.close()


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory, backend: Scripted) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("crew")
    gateway = Gateway(
        folder, "workers = 2\n" + DRAIN + backend_table(backend, more='models = ["m"]\nmax_connections = 500')
    )
    try:
        all_serve(gateway)
        yield gateway
        assert gateway.stop() == 0
    finally:
        gateway.stop()
    assert "Traceback" not in gateway.log, gateway.log
    assert "Unhandled" not in gateway.log, gateway.log


@pytest.fixture
def gateway(crew: Gateway, backend: Scripted) -> Gateway:
    """The one of this module, with both workers at work and nothing under way."""
    backend.play(short_streams())  # type: ignore[arg-type]
    all_serve(crew)
    eventually(crew.is_idle)
    eventually(lambda: len(workers(crew)) == 2)
    return crew


def held(stop: threading.Event) -> Any:
    """A script: ticks until ``stop``."""

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD)
        while not stop.wait(0.02):
            line.send(chunk(event("tick")))
        line.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    return script


def begun(client: Client) -> int:
    """Ask for a stream. :return: the status."""
    client.send(post(body=chat_body(stream=True)))
    return client.read_head()[0]


def open_streams(gateway: Gateway, count: int) -> list[Client]:
    """So many streams, each past its first event."""
    clients = [gateway.client(20.0) for _ in range(count)]
    for client in clients:
        client.send(post(body=chat_body(stream=True)))
    for client in clients:
        assert client.read_head()[0] == 200
        client.read_until(b"tick")
    return clients


def ends_well(client: Client) -> bool:
    try:
        client.read_until(b"[DONE]\n\n")
        client.read_until(LAST_CHUNK)
    except (AssertionError, OSError):
        return False
    finally:
        client.close()
    return True


def test_workers_are_shown_and_counted_as_one_gateway(gateway: Gateway) -> None:
    pids = serving(gateway)
    assert set(children_of(gateway.process.pid)) > set(pids.values())  # and the store
    before = counted(gateway, "llmgw_requests_total")
    with StreamingLoad(gateway.port, 8) as load:
        load.wait_done(24)
    load.check()
    eventually(lambda: counted(gateway, "llmgw_requests_total") - before == load.counts["done"])
    text = gateway.admin("/metrics")[1].decode()
    assert text.count("# TYPE llmgw_requests_total counter") == 1
    assert "llmgw_workers_serving 2" in text
    assert counted(gateway, "llmgw_in_flight") == 0
    state = gateway.state
    assert [each["id"] for each in state["backends"]] == ["b"]
    assert state["models"] == {"m": ["b"]}
    explained = gateway.admin("/api/explain", "POST")
    assert explained[0] == 400  # the empty body's own error, as one gateway would answer
    assert json.loads(explained[1])["error"]["code"] == "invalid_request"


def test_the_figures_of_each_worker_are_of_the_same_moment_as_those_of_all(
    gateway: Gateway, backend: Scripted
) -> None:
    stop = threading.Event()
    backend.play(held(stop))
    clients: list[Client] = []
    try:
        for _ in range(6):
            clients += open_streams(gateway, 3)
            state = gateway.state
            parts = [each["in_flight"] for each in state["workers"]]
            assert sum(parts) == state["in_flight"] == len(clients), parts
            assert sum(each["connections"] for each in state["workers"]) == len(clients)
        assert counted(gateway, "llmgw_worker_in_flight") == len(clients)
    finally:
        stop.set()
    assert all(ends_well(client) for client in clients)


def test_exemplars_are_the_last_ones_of_any_worker(tmp_path: Path) -> None:
    backend = Scripted()
    text = "workers = 2\n[metrics]\nexemplars = true\n" + backend_table(backend, "b", 'models = ["m"]')
    gateway = Gateway(tmp_path, text)
    accept = "accept: application/openmetrics-text; version=1.0.0\r\n"

    def told() -> str:
        with gateway.admin_client() as client:
            client.send(f"GET /metrics HTTP/1.1\r\nhost: localhost\r\n{accept}\r\n".encode())
            return client.read_answer("GET").body.decode()

    def ids() -> set[str]:
        return set(re.findall(r'llmgw_ttft_seconds_bucket{.*request_id="([^"]+)"', told()))

    try:
        asked = [f"r{number}" for number in range(12)]
        for id in asked:
            gateway.ask(post(body=chat_body(stream=True), headers=f"x-request-id: {id}\r\n"))
            eventually(lambda id=id: id in ids())
        assert told().endswith("# EOF\n")
    finally:
        gateway.stop()
        backend.close()


def test_both_workers_serve_the_socket(gateway: Gateway, backend: Scripted) -> None:
    stop = threading.Event()
    backend.play(held(stop))
    clients: list[Client] = []

    try:
        # The kernel chooses, so now and then one has them all.
        while len(clients) < 200 and not (clients and all(each["in_flight"] for each in workers(gateway))):
            clients += open_streams(gateway, 8)
            eventually(lambda: sum(each["in_flight"] for each in workers(gateway)) == len(clients))  # noqa: B023
        assert all(each["in_flight"] for each in workers(gateway)), workers(gateway)
    finally:
        stop.set()
    assert all(ends_well(client) for client in clients)


def test_kill_9_of_a_worker_costs_its_own_streams_and_no_connect(gateway: Gateway, backend: Scripted) -> None:
    stop = threading.Event()
    backend.play(held(stop))
    before = serving(gateway)
    clients = open_streams(gateway, 24)
    eventually(lambda: sum(each["in_flight"] for each in workers(gateway)) == 24)
    lost = {each["pid"]: each["in_flight"] for each in workers(gateway)}
    os.kill(before[1], signal.SIGKILL)
    for _ in range(20):  # nobody is refused, whoever is gone
        gateway.client().close()
    eventually(lambda: serving(gateway).get(1, before[1]) != before[1], 20)
    assert serving(gateway)[2] == before[2]
    stop.set()
    cut = sum(not ends_well(client) for client in clients)
    assert cut == lost[before[1]]
    assert "worker 1 ended (signal 9)" in gateway.log


def test_a_rolling_restart_cuts_nothing_and_refuses_nobody(gateway: Gateway) -> None:
    before = serving(gateway)
    with StreamingLoad(gateway.port, 6) as load, StreamingLoad(gateway.port, 4, keep=True) as kept:
        for _ in range(2):
            load.wait_done(6)
            status, body = gateway.admin("/api/restart", "POST")
            assert status == 200, body
        load.wait_done(6)
        kept.wait_done(4)
    load.check()
    kept.check()
    after = serving(gateway)
    assert json.loads(body)["workers"] == list(after.values())
    assert not set(before.values()) & set(after.values())
    eventually(lambda: not any(is_alive(pid) for pid in before.values()))


def test_a_worker_that_somebody_ends_is_relieved_at_once(gateway: Gateway, backend: Scripted) -> None:
    """Its streams run on while its successor serves."""
    stop = threading.Event()
    backend.play(held(stop))
    clients = open_streams(gateway, 16)
    pid = serving(gateway)[1]
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: serving(gateway).get(1, pid) != pid, 20)
    stop.set()
    assert all(ends_well(client) for client in clients)
    eventually(lambda: not is_alive(pid))


def test_a_reload_reaches_all_or_nobody(gateway: Gateway, backend: Scripted) -> None:
    backend.play(short_streams(2))  # type: ignore[arg-type]
    good = gateway.config_path.read_text()
    aliases = '[[models]]\nname = "alias"\ntarget = "m"\n'

    def statuses() -> set[int]:
        return {gateway.ask(post(body=chat_body("alias", stream=True))).status for _ in range(12)}

    try:
        assert statuses() == {404}
        gateway.config_path.write_text(good + aliases + "[limits]\nbody_bytes = -1\n")
        status, body = gateway.admin("/api/reload", "POST")
        assert status == 400
        assert b"limits.body_bytes" in body
        assert statuses() == {404}
        gateway.config_path.write_text(good + aliases + "[breaker]\nconsecutive = 7\n")
        with StreamingLoad(gateway.port, 4) as load:
            load.wait_done(4)
            status, body = gateway.admin("/api/reload", "POST")
            assert (status, json.loads(body)["needs_restart"]) == (200, ["breaker"])
            load.wait_done(4)
        load.check()
        assert statuses() == {200}
        # One that starts anew begins with what was verified, not with what is being edited.
        gateway.config_path.write_text("half a fi")
        pid = serving(gateway)[2]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: serving(gateway).get(2, pid) != pid, 20)
        assert statuses() == {200}
    finally:
        gateway.config_path.write_text(good)
        gateway.process.send_signal(signal.SIGHUP)
    eventually(lambda: statuses() == {404})


def test_a_drained_backend_stays_drained_in_new_workers(gateway: Gateway, backend: Scripted) -> None:
    backend.play(short_streams(2))  # type: ignore[arg-type]
    assert gateway.admin("/api/backends/none/drain", "POST")[0] == 404
    assert gateway.admin("/api/backends/b/drain", "POST")[0] == 200
    try:
        assert gateway.admin("/api/restart", "POST")[0] == 200
        assert {gateway.ask(post(body=chat_body(stream=True))).status for _ in range(8)} == {503}
    finally:
        assert gateway.admin("/api/backends/b/undrain", "POST")[0] == 200
    assert gateway.ask(post(body=chat_body(stream=True))).status == 200


def test_the_end_of_all(tmp_path: Path) -> None:
    """SIGTERM: not ready, accepting for the lame duck time, streams finish, exit 0."""
    stop = threading.Event()
    backend = Scripted(held(stop))
    gateway = Gateway(tmp_path, "workers = 2\n" + DRAIN + backend_table(backend))
    try:
        all_serve(gateway)
        clients = open_streams(gateway, 8)
        pids = serving(gateway)
        gateway.process.send_signal(signal.SIGTERM)
        eventually(lambda: gateway.admin("/readyz")[0] == 503)

        def is_refused() -> bool:
            try:
                gateway.client().close()
            except ConnectionRefusedError:
                return True
            return False

        eventually(is_refused)
        assert gateway.admin("/livez")[0] == 200
        stop.set()
        assert all(ends_well(client) for client in clients)
        assert gateway.process.wait(10) == 0
        assert not any(is_alive(pid) for pid in pids.values())
        assert "Traceback" not in gateway.log
    finally:
        stop.set()
        gateway.stop()
        backend.close()


def test_kill_9_of_the_parent_leaves_no_listener(tmp_path: Path) -> None:
    """The workers notice, take nobody any more, and finish what they have."""
    stop = threading.Event()
    backend = Scripted(held(stop))
    gateway = Gateway(tmp_path, "workers = 2\n" + DRAIN + backend_table(backend))
    try:
        pids = all_serve(gateway)
        clients = open_streams(gateway, 4)
        gateway.process.kill()
        gateway.process.wait()

        def is_refused() -> bool:
            try:
                gateway.client().close()
            except (ConnectionRefusedError, ConnectionResetError):
                return True
            return False

        eventually(is_refused)
        stop.set()
        assert all(ends_well(client) for client in clients)
        eventually(lambda: not any(is_alive(pid) for pid in pids.values()))
    finally:
        stop.set()
        gateway.stop()
        backend.close()


def test_a_second_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    stop = threading.Event()
    backend = Scripted(held(stop))
    slow = "[drain]\nlame_duck_s = 30.0\nfinish_s = 30.0\n"
    gateway = Gateway(tmp_path, "workers = 2\n" + slow + backend_table(backend))
    try:
        all_serve(gateway)
        clients = open_streams(gateway, 4)
        gateway.process.send_signal(signal.SIGTERM)
        eventually(lambda: gateway.admin("/readyz")[0] == 503)
        begun_s = time.monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(15) == 0
        assert time.monotonic() - begun_s < 15
        assert not any(ends_well(client) for client in clients)
        assert "Traceback" not in gateway.log
    finally:
        stop.set()
        gateway.stop()
        backend.close()


def test_caps_hold_across_workers_and_fall_back_without_the_store(tmp_path: Path) -> None:
    """With three workers, two requests more at most than the cap of four: docs/workers.md."""
    stop = threading.Event()
    backend = Scripted(held(stop))
    gateway = Gateway(
        tmp_path, "workers = 3\n" + DRAIN + backend_table(backend, more='models = ["m"]\nmax_connections = 4')
    )
    clients: list[Client] = []
    try:
        pids = all_serve(gateway, 3)
        eventually(lambda: gateway.state["peers"]["others"] == 2)
        assert gateway.state["store"]["up"]

        # One after another, whichever worker gets them, all of the cap is used.
        def one_more() -> bool:
            client = gateway.client(20.0)
            if begun(client) == 200:
                clients.append(client)
            else:
                client.close()
            return len(clients) >= 4

        eventually(one_more)
        eventually(lambda: gateway.state["backends"][0]["in_flight"] == 4)

        def refused(_: object) -> bool:
            client = gateway.client(20.0)
            if begun(client) == 503:
                client.close()
                return True
            clients.append(client)
            return False

        with ThreadPoolExecutor(8) as pool:
            eventually(lambda: all(list(pool.map(refused, range(8)))))
        assert len(clients) <= 4 + 2
        stop.set()
        assert all(ends_well(client) for client in clients)
        eventually(gateway.is_idle)
        # All at once, when each has heard that the others are at rest.
        time.sleep(0.6)
        stop.clear()
        clients = [gateway.client(20.0) for _ in range(24)]
        with ThreadPoolExecutor(24) as pool:
            statuses = list(pool.map(begun, clients))
        # The fourth is given to whom the store answers before its callers have waited too long.
        assert 3 <= statuses.count(200) <= 4 + 2
        assert set(statuses) == {200, 503}
        # The store dies: everything goes on, each worker with the whole cap.
        [store] = set(children_of(gateway.process.pid)) - set(pids.values())
        os.kill(store, signal.SIGKILL)
        stop.set()
        eventually(gateway.is_idle)
        # One that had no share holds to what it heard last for two seconds: docs/workers.md.
        eventually(lambda: gateway.ask(post(body=chat_body(stream=True))).status == 200, 5)
        eventually(lambda: gateway.state["store"]["up"] and gateway.state["peers"]["others"] == 2, 20)
        assert gateway.stop() == 0
        assert "Traceback" not in gateway.log, gateway.log
    finally:
        stop.set()
        gateway.stop()
        backend.close()
