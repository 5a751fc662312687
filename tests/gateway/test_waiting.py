"""The bounded wait: who waits, for how long, who goes next, and that nobody is left behind."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import (
    Answer,
    Client,
    Gateway,
    Line,
    Received,
    Scripted,
    answer_completion,
    backend_table,
    chat_body,
    eventually,
    json_response,
    post,
)
from ordering_router import installed

ONE = 'models = ["m"]\nmax_connections = 1'
STEADY = "[breaker]\nfall = 100000\nconsecutive = 100000\nratio_min = 1000000\n"
AT_ONCE_S = 0.5


class Held(Scripted):
    """Answers a request when it is released; knows who is inside.

    :ivar order: the ``max_tokens`` of requests as they came.
    :ivar most: so many were inside at a time.
    """

    def __init__(self) -> None:
        super().__init__(self._hold)
        self.order: list[int] = []
        self.most = 0
        self._inside = 0
        self._lock = threading.Lock()
        self._released = threading.Semaphore(0)

    def release(self, many: int = 1) -> None:
        for _ in range(many):
            self._released.release()

    def _hold(self, line: Line, request: Received) -> None:
        with self._lock:
            self.order.append(request.json.get("max_tokens", 0))
            self._inside += 1
            self.most = max(self.most, self._inside)
        self._released.acquire()
        with self._lock:
            self._inside -= 1
        answer_completion(line, request)


@contextlib.contextmanager
def gateway_of(
    folder: Path, admission: str, *backends: Scripted, config: str = "", more: str = ONE, **environment: str
) -> Iterator[Gateway]:
    """A gateway whose requests may wait; at its end nobody waits, and no error of ours is in the log."""
    text = f"{config}\n[admission]\n{admission}\n{STEADY}"
    text += '[drain]\nlame_duck_s = 0\n[log]\naccess = "access.log"\n'
    for index, backend in enumerate(backends):
        text += backend_table(backend, f"b{index}", more)
    gateway = Gateway(folder, text, environment=environment)
    try:
        yield gateway
        if gateway.process.poll() is None:
            eventually(gateway.is_idle)
            assert gateway.state["waiting"] == 0
    finally:
        gateway.stop()
        for backend in backends:
            backend.close()
    for word in ("Traceback", "Unhandled"):
        assert word not in gateway.log, gateway.log


class Asking:
    """Requests under way, each on its connection."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.clients: list[Client] = []
        self._pool = ThreadPoolExecutor(32)

    def ask(self, number: int, headers: str = "", **fields: Any) -> Future[Answer]:
        """Send a request with ``max_tokens = number``, and see it counted."""
        before = self.gateway.state["in_flight"]
        client = self.gateway.client()
        self.clients.append(client)
        client.send(post(body=chat_body(**{"max_tokens": number, **fields}), headers=headers))
        eventually(lambda: self.gateway.state["in_flight"] > before)
        return self._pool.submit(client.read_answer)

    def enter(self, number: int) -> Client:
        """As :meth:`ask`, for one whose answer is not read."""
        before = self.gateway.state["in_flight"]
        client = self.gateway.client()
        client.send(post(body=chat_body(max_tokens=number), headers=f"x-request-id: r{number}\r\n"))
        eventually(lambda: self.gateway.state["in_flight"] > before)
        return client


def metric(gateway: Gateway, name: str) -> float:
    lines = gateway.admin("/metrics")[1].decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.split(" ")[0] == name)


def is_refused(answer: Answer, code: str = "overloaded") -> None:
    assert (answer.status, answer.json["error"]["code"]) == (503, code)
    assert 1 <= int(answer.get("retry-after") or "") <= 60
    assert 0 < int(answer.get("retry-after-ms") or "") <= 75_000


def lines(gateway: Gateway) -> dict[str, dict[str, Any]]:
    return {line["id"]: line for line in gateway.access}


# --- one backend that takes one request at a time -----------------------------------


def test_who_waits_is_served_in_the_order_of_coming(tmp_path: Path) -> None:
    backend = Held()
    with gateway_of(tmp_path, "max_wait_s = 30\nmax_waiting = 8", backend) as gateway:
        asking = Asking(gateway)
        answers = [asking.ask(number) for number in range(1, 7)]
        assert (gateway.state["waiting"], metric(gateway, "llmgw_waiting")) == (5, 5)
        eventually(lambda: backend.order == [1])
        backend.release(6)
        assert [each.result(10).status for each in answers] == [200] * 6
        assert (backend.order, backend.most) == ([1, 2, 3, 4, 5, 6], 1)
        assert metric(gateway, "llmgw_wait_seconds_count") == 5
        # The wait is not in the gateway's own hands.
        assert metric(gateway, "llmgw_overhead_seconds_sum") < metric(gateway, "llmgw_wait_seconds_sum") / 2


def test_s_can_3_who_leaves_is_forgotten_at_once_and_never_sent(tmp_path: Path) -> None:
    backend = Held()
    with gateway_of(tmp_path, "max_wait_s = 30\nmax_waiting = 8", backend) as gateway:
        asking = Asking(gateway)
        running = asking.ask(1)
        leaving, staying = asking.enter(2), asking.ask(3)
        leaving.close()
        eventually(lambda: gateway.state["waiting"] == 1, AT_ONCE_S)
        assert gateway.state["in_flight"] == 2
        backend.release(2)
        assert (running.result(10).status, staying.result(10).status) == (200, 200)
        assert backend.order == [1, 3]
        last = asking.enter(4)
        eventually(lambda: backend.order[2:] == [4])
        only = asking.enter(5)
        only.close()
        eventually(lambda: gateway.state["waiting"] == 0, AT_ONCE_S)
        last.close()
        backend.release()
    found = lines(gateway)
    for number in (2, 5):
        line = found[f"r{number}"]
        assert (line["outcome"], line["status"], line.get("attempts", 0)) == ("client_gone", 499, 0)
    assert backend.order == [1, 3, 4]


def test_s_cap_1_who_has_waited_long_enough_is_told_when_to_come_back(tmp_path: Path) -> None:
    backend = Held()
    with gateway_of(tmp_path, "max_wait_s = 0.6", backend) as gateway:
        asking = Asking(gateway)
        running = asking.ask(1)
        begun_s = time.monotonic()
        waiting = asking.ask(2)
        for path in ("/health", "/v1/models"):
            request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            assert gateway.ask(request, "GET").status == 200
        is_refused(waiting.result(10))
        assert 0.6 <= time.monotonic() - begun_s < 0.6 + AT_ONCE_S
        assert gateway.state["waiting"] == 0
        assert gateway.admin("/metrics")[1].count(b'llmgw_rejected_total{reason="overloaded"} 1\n') == 1
        backend.release()
        assert running.result(10).status == 200
        assert backend.order == [1]


def test_a_request_with_a_nearer_deadline_waits_no_longer(tmp_path: Path) -> None:
    backend = Held()
    with gateway_of(tmp_path, "max_wait_s = 30", backend) as gateway:
        asking = Asking(gateway)
        running = asking.ask(1)
        begun_s = time.monotonic()
        is_refused(asking.ask(2, "x-llmgw-timeout: 0.3\r\n").result(10))
        assert 0.2 < time.monotonic() - begun_s < 0.3 + AT_ONCE_S
        backend.release()
        assert running.result(10).status == 200


@pytest.mark.parametrize(("admission", "most"), [("", 2), ("max_waiting = 3", 3)])
def test_no_more_wait_than_may(tmp_path: Path, admission: str, most: int) -> None:
    """By default twice as many as are served at a time."""
    backend = Held()
    with gateway_of(tmp_path, f"max_wait_s = 30\n{admission}", backend) as gateway:
        asking = Asking(gateway)
        answers = [asking.ask(number) for number in range(1 + most)]
        begun_s = time.monotonic()
        is_refused(gateway.ask(post()))
        assert time.monotonic() - begun_s < AT_ONCE_S
        assert gateway.state["waiting"] == most
        backend.release(1 + most)
        assert [each.result(10).status for each in answers] == [200] * (1 + most)


def test_a_pause_that_a_backend_asked_for_is_waited_out(tmp_path: Path) -> None:
    """Nothing happens at its end but time."""
    busy = json_response({"error": {"message": "busy"}}, 503, "Retry-After: 1\r\n")
    backend = Scripted(lambda line, request: line.send(busy))
    with gateway_of(tmp_path, "max_wait_s = 30", backend) as gateway:
        assert gateway.ask(post()).status == 503
        backend.play(answer_completion)
        begun_s = time.monotonic()
        assert gateway.ask(post()).status == 200
        assert 0.5 < time.monotonic() - begun_s < 1.5 + AT_ONCE_S


def test_who_waits_gets_the_slot_of_one_whose_backend_broke(tmp_path: Path) -> None:
    backend = Scripted()
    inside = threading.Event()

    def breaks(line: Line, request: Received) -> None:
        if request.json["max_tokens"] == 2:
            answer_completion(line, request)
        else:
            inside.wait(10)
            line.reset()

    backend.play(breaks)
    with gateway_of(tmp_path, "max_wait_s = 30", backend) as gateway:
        asking = Asking(gateway)
        first, second = asking.ask(1), asking.ask(2)
        inside.set()
        assert (first.result(10).status, second.result(10).status) == (502, 200)


# --- the fleet changes meanwhile -----------------------------------------------------


def test_a_backend_that_comes_back_takes_who_waits(tmp_path: Path) -> None:
    busy, drained = Held(), Held()
    with gateway_of(tmp_path, "max_wait_s = 30", busy, drained) as gateway:
        assert gateway.admin("/api/backends/b1/drain", "POST")[0] == 200
        asking = Asking(gateway)
        first, second = asking.ask(1), asking.ask(2)
        assert gateway.state["waiting"] == 1
        assert gateway.admin("/api/backends/b1/undrain", "POST")[0] == 200
        eventually(lambda: drained.order == [2], AT_ONCE_S)
        busy.release()
        drained.release()
        assert (first.result(10).status, second.result(10).status) == (200, 200)


def test_where_no_backend_is_left_nobody_waits_on(tmp_path: Path) -> None:
    backend = Held()
    with gateway_of(tmp_path, "max_wait_s = 30", backend) as gateway:
        asking = Asking(gateway)
        first, *others = [asking.ask(number) for number in range(3)]
        assert gateway.admin("/api/backends/b0/drain", "POST")[0] == 200
        for each in others:
            is_refused(each.result(AT_ONCE_S), "no_backend")
        backend.release()
        assert first.result(10).status == 200


def test_a_reload_gives_room_or_takes_the_model_away(tmp_path: Path) -> None:
    backend = Held()
    with gateway_of(tmp_path, "max_wait_s = 30", backend) as gateway:
        asking = Asking(gateway)
        answers = [asking.ask(number) for number in range(3)]
        text = gateway.config_path.read_text()
        gateway.config_path.write_text(text.replace("max_connections = 1", "max_connections = 2"))
        assert gateway.admin("/api/reload", "POST")[0] == 200
        eventually(lambda: backend.order == [0, 1], AT_ONCE_S)
        assert gateway.state["waiting"] == 1
        gateway.config_path.write_text(text.replace('models = ["m"]', 'models = ["other"]'))
        assert gateway.admin("/api/reload", "POST")[0] == 200
        assert answers.pop().result(AT_ONCE_S).status == 404
        backend.release(2)
        assert [each.result(10).status for each in answers] == [200, 200]


def test_after_a_reload_without_waiting_nobody_joins_the_line(tmp_path: Path) -> None:
    backend = Held()
    with gateway_of(tmp_path, "max_wait_s = 30\nmax_waiting = 8", backend) as gateway:
        asking = Asking(gateway)
        answers = [asking.ask(number) for number in range(2)]
        text = gateway.config_path.read_text()
        gateway.config_path.write_text(text.replace("max_wait_s = 30", "max_wait_s = 0"))
        assert gateway.admin("/api/reload", "POST")[0] == 200
        is_refused(gateway.ask(post()))
        assert gateway.state["waiting"] == 1
        backend.release(2)
        assert [each.result(10).status for each in answers] == [200, 200]


def test_a_gateway_that_stops_sends_away_who_waits(tmp_path: Path) -> None:
    backend = Held()
    with gateway_of(tmp_path, "max_wait_s = 30", backend) as gateway:
        asking = Asking(gateway)
        running, waiting = asking.ask(1), asking.ask(2)
        gateway.process.send_signal(signal.SIGTERM)
        is_refused(waiting.result(2 * AT_ONCE_S))
        backend.release()
        assert running.result(10).status == 200
        assert gateway.process.wait(10) == 0
    assert backend.order == [1]


# --- who goes next --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "order", "faults"), [("", [9, 1, 2, 3, 4], 0), ("fails = true", [9, 3, 1, 4, 2], 3)]
)
def test_a_router_may_order_who_waits(tmp_path: Path, options: str, order: list[int], faults: int) -> None:
    """One that fails to costs nothing: they go in the order of coming."""
    backend = Held()
    router = f'[router]\nplugin = "smallest-first"\n{options}'
    with gateway_of(
        tmp_path, "max_wait_s = 30\nmax_waiting = 8", backend, config=router, **installed(tmp_path)
    ) as gateway:
        asking = Asking(gateway)
        answers = [asking.ask(number) for number in (9, 3, 1, 4, 2)]
        backend.release(5)
        assert [each.result(10).status for each in answers] == [200] * 5
        assert backend.order == order
        assert metric(gateway, "llmgw_router_faults") == faults


def test_a_small_one_is_not_kept_back_by_those_who_do_not_fit(tmp_path: Path) -> None:
    """``b0`` has a small window; who needs the large one's waits, and overtaken it is not."""
    small, large = Held(), Held()
    table = backend_table(small, "small", ONE + "\ncontext_length = 100")
    table += backend_table(large, "large", ONE + "\ncontext_length = 100000")
    long = [{"role": "user", "content": "x" * 2000}]
    with gateway_of(tmp_path, "max_wait_s = 30\nmax_waiting = 1", config=table) as gateway:
        asking = Asking(gateway)
        first, second = asking.ask(1, messages=long), asking.ask(2, messages=long)
        eventually(lambda: large.order == [1])
        assert (small.order, gateway.state["waiting"]) == ([], 1)
        third = asking.ask(3)  # the line is full, but not for one who goes at once
        eventually(lambda: small.order == [3], AT_ONCE_S)
        small.release()
        large.release(2)
        assert [each.result(10).status for each in (first, second, third)] == [200] * 3


# --- all at once ----------------------------------------------------------------------


def test_a_crowd_is_served_whole_and_never_two_at_a_time(tmp_path: Path) -> None:
    backend = Held()
    backend.release(10_000)
    with gateway_of(tmp_path, "max_wait_s = 30\nmax_waiting = 100", backend) as gateway:

        def one(_: int) -> list[int]:
            with gateway.client() as client:
                statuses = []
                for _ in range(10):
                    client.send(post())
                    statuses.append(client.read_answer().status)
                return statuses

        with ThreadPoolExecutor(16) as pool:
            assert [status for found in pool.map(one, range(16)) for status in found] == [200] * 160
        assert backend.most == 1


def test_whoever_leaves_and_whenever_nothing_is_left_behind(tmp_path: Path) -> None:
    backend = Held()
    backend.release(10_000)
    with gateway_of(tmp_path, "max_wait_s = 30\nmax_waiting = 100", backend) as gateway:

        def one(number: int) -> None:
            for turn in range(10):
                with gateway.client() as client:
                    client.send(post())
                    if (number + turn) % 3:
                        time.sleep((number * 7 + turn) % 10 / 1000)
                    else:
                        assert client.read_answer().status == 200

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(one, range(16)))
        eventually(gateway.is_idle)
        assert gateway.state["waiting"] == 0
        assert gateway.ask(post()).status == 200
