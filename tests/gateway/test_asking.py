"""Asking a backend: what is held while its answer is waited for, and when it is asked again."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.defer import CancelledError

from llmgw.gateway.backend_http import Deadlines, send_request
from llmgw.wire.coroutines import Future, Task
from llmgw.wire.sink import UpstreamFault

DEADLINES = Deadlines(1.0, 1.0, 1.0, 1.0)
HEAD = SimpleNamespace(status=200)


class Connection:
    """Takes requests, and lets the test answer them."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.aborted = False

    def request(self, method: str, payload: bytes, *, rest: bytes = b"", **deadlines: float) -> Future[Any]:
        assert (method, set(deadlines.values())) == ("POST", {1.0})
        self.asked.append((len(payload), len(rest)))
        self.answer: Future[Any] = Future(self.abort)
        return self.answer

    def abort(self) -> None:
        self.aborted = True


class Pool:
    """One kept connection, and new ones at will."""

    def __init__(self, kept: Connection | None) -> None:
        self.kept = kept
        self.made: list[Connection] = []

    def take(self) -> Connection | None:
        kept, self.kept = self.kept, None
        return kept

    def connect(self) -> Future[Connection]:
        self.made.append(Connection())
        done: Future[Connection] = Future()
        done.fire(self.made[-1])
        return done


class Asker:
    """Runs :func:`ask`, and keeps what it wrote and what came of it."""

    def __init__(self, pool: Pool) -> None:
        self.written: list[bytes] = []
        self.outcome: Any = None
        self.task = Task(self._run(pool))
        self.task.start()

    def _write(self) -> tuple[bytes, bytes]:
        self.written.append(bytes(1000))
        self.written.append(bytes(2000))
        return self.written[-2], self.written[-1]

    async def _run(self, pool: Any) -> None:
        try:
            self.outcome = await send_request(pool, self._write, DEADLINES)
        except (UpstreamFault, CancelledError) as error:
            self.outcome = type(error), str(error)


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_sent_is_not_held_while_the_answer_is_waited_for(kept: bool) -> None:
    pool = Pool(Connection() if kept else None)
    connection = pool.kept
    asker = Asker(pool)
    connection = connection or pool.made[0]
    assert connection.asked == [(1000, 2000)]
    # The list of this test, and the loop's name and the call's argument.
    assert [sys.getrefcount(each) for each in asker.written] == [3, 3]
    connection.answer.fire(HEAD)
    assert asker.outcome == (connection, HEAD)


def test_a_kept_connection_that_was_closed_is_replaced_by_a_fresh_one_once() -> None:
    first = Connection()
    pool = Pool(first)
    asker = Asker(pool)
    pool.kept = Connection()  # perhaps as stale as the first
    first.answer.fail(UpstreamFault("reset", stale=True))
    assert [fresh.asked for fresh in pool.made] == [[(1000, 2000)]]
    assert len(asker.written) == 4
    pool.made[0].answer.fail(UpstreamFault("reset", stale=True))
    assert asker.outcome == (UpstreamFault, "reset")
    assert len(pool.made) == 1


def test_another_fault_is_not_tried_again() -> None:
    first = Connection()
    asker = Asker(Pool(first))
    first.answer.fail(UpstreamFault("timeout_head"))
    assert asker.outcome == (UpstreamFault, "timeout_head")


def test_cancelling_closes_the_connection() -> None:
    first = Connection()
    asker = Asker(Pool(first))
    asker.task.cancel()
    assert first.aborted
    assert asker.outcome[0] is CancelledError
