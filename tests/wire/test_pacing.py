"""So many requests begin in a turn: none is lost, none overtakes another."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Client, Gateway, Scripted, answer_completion, eventually, gateway_with, post
from twisted.internet.defer import CancelledError

from llmgw.wire import pacing as module
from llmgw.wire.incoming import Incoming
from llmgw.wire.pacing import STARTS_PER_TURN, StartPacer


class Turns:
    """The ends of a reactor's turns, when the test says so."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def begin(self, call: Callable[[], None]) -> None:
        self.due.append(call)

    def end(self) -> None:
        due, self.due = self.due, []
        for call in due:
            call()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    turns = Turns()
    monkeypatch.setattr(module, "end_of_turn", lambda reactor: turns.begin)
    return turns


def test_a_crowd_begins_in_its_order_a_few_in_a_turn(turns: Turns) -> None:
    begun: list[Any] = []
    pacer = StartPacer(begun.append, None)
    for number in range(2 * STARTS_PER_TURN + 5):
        pacer.start(number)  # type: ignore[arg-type]
    assert begun == list(range(STARTS_PER_TURN))
    turns.end()
    assert begun == list(range(2 * STARTS_PER_TURN))
    pacer.start("one more")  # type: ignore[arg-type]
    turns.end()
    assert begun == [*range(2 * STARTS_PER_TURN + 5), "one more"]
    pacer.start("and another")  # type: ignore[arg-type]
    assert begun[-1] == "and another"


def test_when_nobody_comes_no_turn_is_waited_for(turns: Turns) -> None:
    begun: list[Any] = []
    pacer = StartPacer(begun.append, None)
    pacer.start(1)  # type: ignore[arg-type]
    assert len(turns.due) == 1
    turns.end()
    assert turns.due == []
    pacer.start(2)  # type: ignore[arg-type]
    assert (begun, len(turns.due)) == ([1, 2], 1)


def test_who_is_told_twice_while_waiting_begins_once(turns: Turns) -> None:
    begun: list[Any] = []
    pacer = StartPacer(begun.append, None)
    for number in (*range(STARTS_PER_TURN), "late", "late"):
        pacer.start(number)  # type: ignore[arg-type]
    turns.end()
    assert begun.count("late") == 1


def test_who_begins_another_from_within_its_start_waits_its_turn(turns: Turns) -> None:
    begun: list[Any] = []

    def serve(incoming: Any) -> None:
        begun.append(incoming)
        if incoming < 50:
            pacer.start(incoming + 1)

    pacer = StartPacer(serve, None)
    pacer.start(0)  # type: ignore[arg-type]
    assert len(begun) == STARTS_PER_TURN
    while turns.due:
        turns.end()
    assert begun == list(range(51))


def test_a_body_is_not_for_who_has_left() -> None:
    incoming = Incoming.__new__(Incoming)
    incoming.gone = True
    with pytest.raises(CancelledError):
        incoming.body()


def test_those_of_a_crowd_who_leave_before_their_turn_are_told_as_gone(tmp_path: Path) -> None:
    backend = Scripted()
    backend.play(answer_completion)
    many, leaving = 5 * STARTS_PER_TURN, range(4 * STARTS_PER_TURN, 5 * STARTS_PER_TURN)
    with gateway_with(tmp_path, backend) as gateway:
        clients = [Client(gateway.port) for _ in range(many)]
        for client in clients:  # all are let in, so that no accepting comes between
            client.send(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
            assert client.read_answer("GET").status == 200
        os.kill(gateway.process.pid, signal.SIGSTOP)
        try:
            for number, client in enumerate(clients):
                client.send(post(headers=f"X-Request-Id: crowd-{number}\r\n"))
                if number in leaving:
                    client.close()
        finally:
            os.kill(gateway.process.pid, signal.SIGCONT)
        for number in set(range(many)) - set(leaving):
            assert clients[number].read_answer().status == 200
        told = eventually(lambda: outcomes(gateway, many))
        assert {told[f"crowd-{number}"] for number in leaving} == {"client_gone"}
        assert list(told.values()).count("done") == many - len(leaving)
        eventually(gateway.is_idle)


def outcomes(gateway: Gateway, many: int) -> dict[str, str] | None:
    """Of the crowd, by request id, when all lines have been written."""
    told = {line["id"]: line["outcome"] for line in gateway.access if line["id"].startswith("crowd")}
    return told if len(told) == many else None
