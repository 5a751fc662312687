"""Requests that come before every source of backends has told what it has.

A gateway that has just started knows only the backends of its file. A request
for another model is not told that there is no such model: it waits a moment for
the sources, and then is told to come back.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, TypeVar

from twisted.internet.defer import Deferred, TimeoutError

from llmgw.core.retry import retry_after
from llmgw.errors import ModelNotFound, NoBackend

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

T = TypeVar("T")

WAIT_S = 3.0
"""How long after the start requests wait."""
BACK_S = 5.0


class FirstWord:
    """:param dice: for the spread of ``Retry-After``."""

    def __init__(self, reactor: IReactorTime, dice: Random) -> None:
        self._reactor = reactor
        self._dice = dice
        self._until_s = reactor.seconds() + WAIT_S
        self._waiting: list[Deferred[None]] = []
        self._said = False

    def said(self) -> None:
        """Every source has told its set."""
        self._said = True
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.callback(None)

    async def tried_again(self, attempt: Callable[[], T]) -> T:
        """``attempt()``, once all have told or the time is over. Cancelling forgets the wait.

        :raise ModelNotFound: all have told, and nobody has it.
        :raise NoBackend: not all have told.
        """
        left_s = self._until_s - self._reactor.seconds()
        if left_s > 0 and not self._said:
            word: Deferred[None] = Deferred(self._forget)
            self._waiting.append(word)
            try:
                await word.addTimeout(left_s, self._reactor)
            except TimeoutError:
                pass
        try:
            return attempt()
        except ModelNotFound:
            if self._said:
                raise
            raise NoBackend(
                "Not every source of backends has told yet what it has.",
                retry_after_s=retry_after(BACK_S, self._dice),
            ) from None

    def _forget(self, word: Deferred[None]) -> None:
        if word in self._waiting:
            self._waiting.remove(word)
