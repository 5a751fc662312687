"""The default router behind the real gateway: one backend fails, or is restarted."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import (
    Gateway,
    Line,
    Received,
    Scripted,
    answer_completion,
    chat_body,
    eventually,
    gateway_with,
    json_response,
    post,
)

CALLERS = 4
FAST_S, SLOWER_S = 0.004, 0.012


class Server(Scripted):
    """Answers after ``taken_s``, or with 503 as often as ``failing`` says; may be restarted."""

    def __init__(self, taken_s: float) -> None:
        super().__init__(self._answer)
        self.taken_s = taken_s
        self.failing = 0.0
        self._dice = random.Random(1)

    def _answer(self, line: Line, request: Received) -> None:
        if self._dice.random() < self.failing:
            line.send(json_response({"error": {"message": "out of order"}}, 503))
            return
        time.sleep(self.taken_s)
        answer_completion(line, request)

    def stop(self) -> None:
        """Die."""
        self.close()
        for line in list(self.open_lines):
            line.reset()

    def start(self) -> None:
        """Be there again, at the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
        threading.Thread(target=self._accept, daemon=True).start()


class Callers:
    """Ask one request after the other each, until they are told to end.

    :ivar statuses: of all answers so far.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.statuses: list[int] = []
        self._gateway = gateway
        self._over = False
        self._threads = [threading.Thread(target=self._ask) for _ in range(CALLERS)]
        for each in self._threads:
            each.start()

    def _ask(self) -> None:
        with self._gateway.client() as client:
            while not self._over:
                client.send(post(body=chat_body()))
                self.statuses.append(client.read_answer().status)

    def serve(self, count: int) -> None:
        """Wait until so many more are answered."""
        most = len(self.statuses) + count
        eventually(lambda: len(self.statuses) >= most, 60.0)

    def end(self) -> None:
        self._over = True
        for each in self._threads:
            each.join()


def share(fleet: list[Server], callers: Callers, count: int) -> float:
    """Of the attempts for the next ``count`` answers, those at the first server."""
    before = [len(each.requests) for each in fleet]
    callers.serve(count)
    more = [len(each.requests) - was for each, was in zip(fleet, before, strict=True)]
    return more[0] / sum(more)


@contextmanager
def at_work(folder: Path) -> Iterator[tuple[list[Server], Callers]]:
    fleet = [Server(FAST_S), Server(SLOWER_S), Server(SLOWER_S)]
    with gateway_with(folder, *fleet, config='[[health]]\nplugin = "llamacpp"\ninterval_s = 2\n') as gateway:
        callers = Callers(gateway)
        try:
            callers.serve(150)
            yield fleet, callers
        finally:
            callers.end()
            for each in fleet:
                each.close()


def test_one_that_fails_six_times_in_ten_gets_next_to_nothing(tmp_path: Path) -> None:
    with at_work(tmp_path) as (fleet, callers):
        assert share(fleet, callers, 100) > 0.4
        fleet[0].failing = 0.6
        assert share(fleet, callers, 400) <= 0.03
    assert set(callers.statuses) == {200}


def test_one_that_is_restarted_is_back_at_half_its_share_within_ten_seconds(tmp_path: Path) -> None:
    with at_work(tmp_path) as (fleet, callers):
        before = share(fleet, callers, 200)
        fleet[0].stop()
        callers.serve(100)
        assert share(fleet, callers, 50) == 0.0
        fleet[0].start()
        eventually(lambda: share(fleet, callers, 50) >= before / 2, 10.0)
    assert set(callers.statuses) == {200}
