"""Requests that come before every source of backends has reported what it has.

A gateway that has just started knows only the backends of its configuration file. A request
for another model is not refused because there is no such model: it waits a moment for the
sources, and is then told to come back.
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
"""Seconds after which a request that waited in vain is told to come back."""


class FirstWord:
    """The wait for the first report of every source.

    :param dice: spreads ``Retry-After``.
    """

    def __init__(self, reactor: IReactorTime, dice: Random) -> None:
        self._reactor = reactor
        self._dice = dice
        self._until_s = reactor.seconds() + WAIT_S
        self._waiting: list[Deferred[None]] = []
        self._said = False

    def said(self) -> None:
        """Every source has reported its backends."""
        self._said = True
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.callback(None)

    async def tried_again(self, attempt: Callable[[], T]) -> T:
        """Call ``attempt`` once every source has reported or the time is over, and return its
        result. Cancelling only ends the wait.

        :raise ModelNotFound: every source has reported, and nobody has the model.
        :raise NoBackend: nobody has it yet, and not every source has reported.
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
