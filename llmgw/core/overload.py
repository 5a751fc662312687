"""How overloaded this process is, and what it stops doing because of that.

Two figures decide: the lag of the event loop that is of its own making, and the use of
memory. Each yields a :class:`Level`; the higher one applies. A level is entered at once, and
left only after both figures have stayed below it for :data:`CALM_S`, memory by
:data:`MEMORY_MARGIN`, so that a gateway at the edge does not flap.

A single late beat says that something is over (a long garbage collection, a stopped process),
not that there is too much to do. Therefore the second largest lag of the last :data:`BEATS`
counts, which is large only if the loop is late again and again.

:source: the ladder is Envoy's overload manager with thresholds in place of
    scaled triggers; shedding by criticality is chapter 21 of Google's *Site
    Reliability Engineering*.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum

from msgspec import Struct

BEATS = 8
"""Measurements of the lag that are looked at."""
CALM_S = 2.0
MEMORY_MARGIN = 0.05


class Level(IntEnum):
    """What is no longer done; each level includes the ones before it."""

    CALM = 0
    SHEDDING = 1
    """Idle connections are kept for 5 s, no new request may wait for a slot, sheddable callers get 503."""
    REFUSING = 2
    """New requests get 503, except those of critical callers."""
    CLOSED = 3
    """No new connections; idle ones are closed."""
    CUTTING = 4
    """Of the answers that their clients do not read, the largest are cut."""


class OverloadRules(Struct, frozen=True):
    """Where each level begins. Seconds of lag; shares of memory, 0 to 1."""

    shed_lag_s: float = 0.1
    refuse_lag_s: float = 0.25
    close_lag_s: float = 1.0
    shed_memory: float = 0.85
    refuse_memory: float = 0.92
    close_memory: float = 0.95
    cut_memory: float = 0.98


class Ladder:
    """Turns figures into a level.

    :ivar level: the level now.
    :ivar lag_s: the lag that counts.
    :ivar memory: the last share of memory; ``None`` if it is not known.
    """

    def __init__(self, rules: OverloadRules) -> None:
        self.rules = rules
        self.level = Level.CALM
        self.lag_s = 0.0
        self.memory: float | None = None
        self._lags: deque[float] = deque(maxlen=BEATS)
        self._held_s = 0.0
        self._since = Level.CALM

    def beat(self, now_s: float, lag_s: float, memory: float | None) -> Level:
        """Take the figures of one beat.

        :param now_s: monotonic seconds.
        :param lag_s: the lag of this beat, as far as it is of the process's own making.
        :param memory: share of the memory limit in use, ``None`` if there is none.
        :return: the level from now on.
        """
        lags = self._lags
        lags.append(lag_s)
        self.lag_s = sorted(lags)[-2] if len(lags) > 1 else 0.0
        self.memory = memory
        reached = self._reached(self.lag_s, memory, 0.0)
        now_at = self._reached(lag_s, memory, MEMORY_MARGIN)
        if reached > self.level:
            self._stand(reached, now_s)
        elif now_at >= self.level:
            self._stand(self.level, now_s)
        else:
            self._since = max(self._since, now_at)
            if now_s - self._held_s >= CALM_S:
                lags.clear()
                self._stand(self._since, now_s)
        return self.level

    def _stand(self, level: Level, now_s: float) -> None:
        self.level = level
        self._held_s = now_s
        self._since = Level.CALM

    @property
    def by_memory(self) -> bool:
        """Whether memory alone, with its margin, is enough for some level."""
        return self._reached(0.0, self.memory, MEMORY_MARGIN) > Level.CALM

    def _reached(self, lag_s: float, memory: float | None, margin: float) -> Level:
        """The level for these figures; ``margin`` lowers the thresholds of memory."""
        rules = self.rules
        share = -1.0 if memory is None else memory + margin
        if share >= rules.cut_memory:
            return Level.CUTTING
        if lag_s > rules.close_lag_s or share >= rules.close_memory:
            return Level.CLOSED
        if lag_s > rules.refuse_lag_s or share >= rules.refuse_memory:
            return Level.REFUSING
        if lag_s > rules.shed_lag_s or share >= rules.shed_memory:
            return Level.SHEDDING
        return Level.CALM
