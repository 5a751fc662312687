"""Futures and tasks: coroutines run without a Deferred per step.

An exchange waits two or three times, and a Deferred with its callbacks costs more than
everything done in between. A :class:`Future` is the least that can be awaited once; a
:class:`Task` runs one coroutine over Futures and, where a plugin or Twisted returns one,
over Deferreds.

Unlike those of asyncio, a Future is awaited by at most one coroutine, and resumes it at
once: whoever fires it runs the coroutine up to its next wait before ``fire`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

T = TypeVar("T")


class Future(Generic[T]):
    """A value, or an error, that is not there yet.

    :param cancel: called when the waiting task is cancelled; stops the work. Dropped as soon
        as it can no longer be called: its owner usually holds the Future, and the reference
        cycle would keep all of a request in memory until the next garbage collection.
    :ivar done: it has its value or error, or was cancelled.
    """

    __slots__ = ("_error", "_task", "_value", "cancel", "done")

    def __init__(self, cancel: Callable[[], None] | None = None) -> None:
        self.cancel = cancel
        self.done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._task: Task | None = None

    def fire(self, value: T) -> None:
        """Set the value, and resume whoever waits. Does nothing if it is done."""
        if self.done:
            return
        self.done = True
        self.cancel = None
        self._value = value
        task = self._task
        if task is not None:
            self._task = None
            task._step(None)

    def fail(self, error: BaseException) -> None:
        """Set an error, which is raised where the coroutine waits. Does nothing if it is done."""
        if self.done:
            return
        self.done = True
        self.cancel = None
        self._error = error
        task = self._task
        if task is not None:
            self._task = None
            task._step(None)

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done:
            yield self
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value


class Task:
    """Runs one coroutine to its end.

    :param on_end: called with the task when the coroutine has ended, unless that was
        within :meth:`start`.
    :ivar done: the coroutine has ended.
    """

    log = Logger()

    __slots__ = ("_cancelled", "_coroutine", "_on_end", "_waiting", "done")

    def __init__(
        self, coroutine: Coroutine[Any, None, None], on_end: Callable[[Task], None] | None = None
    ) -> None:
        self._coroutine = coroutine
        self._on_end = on_end
        self._waiting: Any = None
        self._cancelled = False
        self.done = False

    def start(self) -> bool:
        """Run up to the first wait. :return: whether it has ended already."""
        on_end, self._on_end = self._on_end, None
        self._step(None)
        self._on_end = on_end
        return self.done

    def cancel(self) -> None:
        """Stop what it waits for, and raise ``CancelledError`` where it waits.

        Does nothing if it has ended, or is just being run.
        """
        waiting = self._waiting
        if waiting is None:
            return
        if isinstance(waiting, Deferred):
            # It may fail with an error of its own when cancelled; for the coroutine it is a cancel.
            self._cancelled = True
            waiting.cancel()
            return
        waiting._task = None
        waiting.done = True
        stop, waiting.cancel = waiting.cancel, None
        if stop is not None:
            stop()
        self._step(CancelledError())

    def _step(self, error: BaseException | None) -> None:
        """Run to the next wait."""
        self._waiting = None
        try:
            waiting = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
        except StopIteration:
            self._end()
        except BaseException:
            self.log.failure("a coroutine ended with an error of ours")
            self._end()
        else:
            self._waiting = waiting
            if type(waiting) is Future:
                waiting._task = self
            else:
                waiting.addBoth(self._resume)

    def _resume(self, result: Any) -> Any:
        """A Deferred has fired. ``await`` takes a value from it; a failure cannot be taken from
        it while its callbacks run, so that is thrown into the coroutine."""
        if self._cancelled:
            self._cancelled = False
            self._step(CancelledError())
        else:
            self._step(result.value if isinstance(result, Failure) else None)
        return None

    def _end(self) -> None:
        self.done = True
        if self._on_end is not None:
            self._on_end(self)
