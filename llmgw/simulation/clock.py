"""Simulated time: calls in order of time, and in order of booking when times are equal."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Runs calls at their time.

    There is no cancelling: whoever changes its mind lets the call come and
    ignores it, which costs less than searching the queue.

    :ivar now_s: simulated seconds.
    """

    __slots__ = ("_booked", "_queue", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._booked = 0

    def at(self, at_s: float, call: Callable[..., object], *args: Any) -> None:
        """Book ``call(*args)``; a time that is past means now."""
        self._booked = number = self._booked + 1
        now_s = self.now_s
        heappush(self._queue, (at_s if at_s > now_s else now_s, number, call, args))

    def step(self) -> bool:
        """Run the next call. :return: there was one."""
        if not self._queue:
            return False
        self.now_s, _, call, args = heappop(self._queue)
        call(*args)
        return True
