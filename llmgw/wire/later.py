"""Coroutines carried without a Deferred per step.

An exchange waits two or three times, and a Deferred with its callbacks costs
more than all it does between. A :class:`Later` is the least thing that can be
awaited once; a :class:`Task` carries one coroutine over Laters and, where a
plugin or Twisted gives one, over Deferreds.

Rules: a Later fires once and is awaited by at most one coroutine; whoever fires
it runs the coroutine on, up to its next wait, before ``fire`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

T = TypeVar("T")


class Later(Generic[T]):
    """A value, or an error, that will come.

    :param cancel: called when the waiting task is cancelled; stops the work. It is let go
        once that cannot be, since its owner mostly holds the Later: a ring of references
        would keep all of a request until the next collection.
    :ivar done: it has come.
    """

    __slots__ = ("_error", "_task", "_value", "cancel", "done")

    def __init__(self, cancel: Callable[[], None] | None = None) -> None:
        self.cancel = cancel
        self.done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._task: Task | None = None

    def fire(self, value: T) -> None:
        """The value is here. A second call does nothing."""
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
        """It will not come, for this reason. A second call does nothing."""
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
    """Carries one coroutine to its end.

    :param on_end: called with the task when the coroutine has ended, unless it
        ended within :meth:`start`.
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

        Does nothing when it has ended, or is running just now.
        """
        waiting = self._waiting
        if waiting is None:
            return
        if isinstance(waiting, Deferred):
            # Cancelling may make it fail in words of its own; here it is still a cancel.
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
            if type(waiting) is Later:
                waiting._task = self
            else:
                waiting.addBoth(self._resume)

    def _resume(self, result: Any) -> Any:
        """A Deferred has fired. Awaiting takes a value from it; a failure it can't hand
        over while its callbacks run, so that is thrown."""
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
