"""How often a fault that any stranger can cause is worth a line in the log."""

from __future__ import annotations

from collections.abc import Callable

MOST = 10
PER_S = 10.0


class Complaints:
    """At most :data:`MOST` lines in :data:`PER_S` seconds.

    :param clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s = float("-inf")
        self._told = 0
        self._swallowed = 0

    def may_tell(self) -> int | None:
        """How many were swallowed since the last line that was told; ``None``: this one is to be as well."""
        now_s = self._clock()
        if now_s - self._since_s >= PER_S:
            self._since_s = now_s
            self._told = 0
        if self._told >= MOST:
            self._swallowed += 1
            return None
        self._told += 1
        swallowed, self._swallowed = self._swallowed, 0
        return swallowed
