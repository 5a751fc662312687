"""Future and Task: one coroutine carried over waits, cancelled anywhere."""

import pytest
from twisted.internet.defer import CancelledError, Deferred

from llmgw.wire.coroutines import Future, Task


def carried(coroutine, on_end=None):
    task = Task(coroutine, on_end)
    task.start()
    return task


def test_a_value_resumes_the_coroutine_at_once():
    seen = []
    future = Future()

    async def work():
        seen.append(await future)

    task = carried(work())
    assert not task.done
    future.fire(7)
    assert seen == [7]
    assert task.done


def test_a_value_that_is_there_already_needs_no_wait():
    future = Future()
    future.fire("x")
    seen = []

    async def work():
        seen.append(await future)

    assert carried(work()).done
    assert seen == ["x"]


def test_an_error_is_raised_where_the_coroutine_waits():
    future = Future()
    seen = []

    async def work():
        try:
            await future
        except ValueError as error:
            seen.append(str(error))

    carried(work())
    future.fail(ValueError("no"))
    assert seen == ["no"]


def test_only_the_first_outcome_counts():
    future = Future()
    seen = []

    async def work():
        seen.append(await future)

    carried(work())
    future.fire(1)
    future.fire(2)
    future.fail(ValueError())
    assert seen == [1]


def test_cancel_stops_the_work_and_raises_at_the_wait():
    stopped, seen = [], []
    future = Future(lambda: stopped.append(True))

    async def work():
        try:
            await future
        except CancelledError:
            seen.append("cancelled")
            raise
        finally:
            seen.append("finally")

    with pytest.MonkeyPatch.context() as patch:
        faults = []
        patch.setattr(Task, "log", type("Log", (), {"failure": lambda self, text: faults.append(text)})())
        task = carried(work())
        task.cancel()
    assert stopped == [True]
    assert seen == ["cancelled", "finally"]
    assert task.done
    assert len(faults) == 1  # whoever lets CancelledError through is at fault
    future.fire("too late")
    task.cancel()


def test_a_cancelled_coroutine_may_still_say_goodbye():
    seen = []

    async def work():
        try:
            await Future()
        except CancelledError:
            seen.append("goodbye")

    task = carried(work())
    task.cancel()
    assert seen == ["goodbye"]
    assert task.done


def test_deferreds_of_others_are_awaited_too():
    deferred = Deferred()
    seen = []

    async def work():
        seen.append(await deferred)
        seen.append(await Deferred.fromCoroutine(immediate()))

    async def immediate():
        return 2

    task = carried(work())
    deferred.callback(1)
    assert seen == [1, 2]
    assert task.done


def test_a_failing_deferred_raises_and_is_not_reported_as_lost():
    deferred = Deferred()
    seen = []

    async def work():
        try:
            await deferred
        except KeyError:
            seen.append("key")

    carried(work())
    deferred.errback(KeyError("x"))
    assert seen == ["key"]


def test_cancelling_a_task_that_waits_for_a_deferred_cancels_the_deferred():
    cancelled = []
    deferred = Deferred(lambda _: cancelled.append(True))
    seen = []

    async def work():
        try:
            await deferred
        except CancelledError:
            seen.append("cancelled")

    carried(work()).cancel()
    assert cancelled == [True]
    assert seen == ["cancelled"]


def test_a_deferred_that_fails_in_words_of_its_own_when_cancelled_is_cancelled_all_the_same():
    deferred = Deferred(lambda waiting: waiting.errback(OSError("no address")))
    seen = []

    async def work():
        try:
            await deferred
        except CancelledError:
            seen.append("cancelled")

    carried(work()).cancel()
    assert seen == ["cancelled"]


def test_the_end_is_told_once_and_not_when_it_came_within_start():
    ended = []
    future = Future()

    async def waits():
        await future

    async def does_not():
        pass

    first = carried(waits(), ended.append)
    carried(does_not(), ended.append)
    assert ended == []
    future.fire(None)
    assert ended == [first]


def test_an_error_of_ours_is_logged_and_ends_the_task(expected_failures):
    ended = []
    future = Future()

    async def work():
        await future
        raise ZeroDivisionError

    carried(work(), ended.append)
    future.fire(None)
    assert len(ended) == 1
    assert len(expected_failures(ZeroDivisionError)) == 1
