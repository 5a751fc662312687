"""When a process that has ended by itself is restarted.

After the first time at once, then with growing pauses. One that ends again and again stays
down: another restart would not fix it, and each one takes CPU time from the others.
"""

from __future__ import annotations

from collections import deque

FIRST_S = 0.1
LONGEST_S = 5.0
MOST = 5
"""After more ends than this within :data:`WINDOW_S` it stays down."""
WINDOW_S = 60.0


class Restarts:
    """The ends of one place's processes.

    :ivar total: ends since the beginning.
    :ivar given_up: it stays down until :meth:`forgive`.
    """

    def __init__(self) -> None:
        self.total = 0
        self.given_up = False
        self._ends: deque[float] = deque()

    def ended(self, now_s: float) -> float | None:
        """A process ended without being asked to.

        :return: seconds until the next start, four times as long with each end in
            :data:`WINDOW_S`; ``None``: it stays down.
        """
        ends = self._ends
        while ends and ends[0] <= now_s - WINDOW_S:
            ends.popleft()
        ends.append(now_s)
        self.total += 1
        if len(ends) > MOST:
            self.given_up = True
            return None
        delay_s: float = min(LONGEST_S, FIRST_S * 2.0 ** (2 * (len(ends) - 1)))
        return delay_s

    def forgive(self) -> None:
        """The operator wants another try."""
        self.given_up = False
        self._ends.clear()
