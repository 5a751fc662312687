"""What plugins hand over: answers that nobody asked for, and Deferreds of unknown manners."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from llmgw.errors import PLUGIN_FAULTS

T = TypeVar("T")


def set_aside(answer: Any) -> str:
    """``answer``, which is of no use, in words for the log; nothing is heard of it any more.

    Left alone, a Deferred that fails is logged by Twisted each time one is thrown away,
    and a coroutine is warned of by Python; neither names the plugin.
    """
    if isinstance(answer, Deferred):
        answer.addErrback(lambda _: None)
        return "a Deferred"
    if isinstance(answer, Coroutine):
        answer.close()
        return "a coroutine, as if it were written with `async def`"
    if isinstance(answer, Generator):
        return "a generator, as if it held a `yield`"
    return type(answer).__name__


def unwanted(method: str, answer: Any) -> str:
    """That a plugin's ``method`` returned something, in words for the log; see :func:`set_aside`."""
    return f"returned from {method} {set_aside(answer)}, where nothing is expected"


def at_most(seconds: float, waited: Deferred[T], reactor: IReactorTime) -> Deferred[T]:
    """What becomes of ``waited``, for so long.

    Unlike :meth:`Deferred.addTimeout` it ends in time, too, where cancelling raises; so it
    does when it is cancelled itself. It fails with ``CancelledError`` only then.

    :raise TimeoutError: it was cancelled, as ``seconds`` have passed.
    """

    late = left = False

    def leave() -> None:
        nonlocal left
        left = True
        try:
            waited.cancel()
        except PLUGIN_FAULTS:
            pass  # who waits is told of the time that has passed

    def too_late() -> None:
        nonlocal late
        late = True
        leave()
        if not outcome.called:
            outcome.errback(TimeoutError(seconds, "Deferred"))

    def over(result: Any) -> None:
        if timer.active():
            timer.cancel()
        if not outcome.called and not late:
            if isinstance(result, Failure) and not left and result.check(CancelledError):
                result = Failure(RuntimeError("it was cancelled, and not by us"))
            outcome.callback(result)

    outcome: Deferred[T] = Deferred(lambda _: leave())
    timer = reactor.callLater(seconds, too_late)
    waited.addBoth(over)
    return outcome
