"""A task over Twisted's Deferreds: what they end with arrives where the coroutine waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred, fail, succeed

from llmgw.wire.coroutines import Future, Task


def waiting_for(awaited: Any) -> tuple[Task, list[Any]]:
    """A started task and what it has seen so far."""
    seen: list[Any] = []

    async def run() -> None:
        try:
            seen.append(await awaited)
        except Exception as error:
            seen.append(type(error))

    task = Task(run())
    task.start()
    return task, seen


def test_a_value_that_comes_later() -> None:
    awaited: Deferred[int] = Deferred()
    task, seen = waiting_for(awaited)
    assert (task.done, seen) == (False, [])
    awaited.callback(7)
    assert (task.done, seen) == (True, [7])


def test_a_failure_that_comes_later() -> None:
    awaited: Deferred[int] = Deferred()
    task, seen = waiting_for(awaited)
    awaited.errback(KeyError("x"))
    assert (task.done, seen) == (True, [KeyError])


def test_a_failure_out_of_another_deferred() -> None:
    outer: Deferred[Any] = Deferred()
    inner: Deferred[Any] = Deferred()
    outer.addCallback(lambda _: inner)
    task, seen = waiting_for(outer)
    outer.callback(None)
    assert not task.done
    inner.errback(KeyError("x"))
    assert seen == [KeyError]


def test_a_failure_of_an_errback_itself() -> None:
    def translate(_: Any) -> None:
        raise ValueError

    awaited: Deferred[Any] = Deferred()
    awaited.addErrback(translate)
    _, seen = waiting_for(awaited)
    awaited.errback(KeyError("x"))
    assert seen == [ValueError]


@pytest.mark.parametrize(
    ("make", "expected"), [(lambda: succeed(3), 3), (lambda: fail(KeyError()), KeyError)]
)
def test_what_is_there_already(make: Callable[[], Any], expected: Any) -> None:
    task, seen = waiting_for(make())
    assert (task.done, seen) == (True, [expected])


def test_cancelling_cancels_the_deferred_and_tells_the_coroutine() -> None:
    stopped: list[Any] = []
    awaited: Deferred[Any] = Deferred(stopped.append)
    task, seen = waiting_for(awaited)
    task.cancel()
    assert stopped == [awaited]
    assert (task.done, seen) == (True, [CancelledError])


def test_a_coroutine_may_wait_on_after_a_failure() -> None:
    first: Deferred[Any] = Deferred()
    second: Future[int] = Future()
    seen: list[Any] = []

    async def run() -> None:
        try:
            await first
        except KeyError:
            seen.append("again")
        seen.append(await second)

    task = Task(run())
    task.start()
    first.errback(KeyError())
    assert seen == ["again"]
    second.fire(5)
    assert (task.done, seen) == (True, ["again", 5])
