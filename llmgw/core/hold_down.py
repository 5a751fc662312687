"""The set of backends of a source that may be wrong for a moment.

Additions and changes are applied at once, removals late: a registration that expired because
its keeper was slow, or a store that came back empty, must not remove a server that works.
Whether a server works is decided by health checks, not by a list.

- An entry that vanishes is **held** for ``hold_s``. If it returns in that time, nothing has
  happened.
- An entry that vanishes repeatedly is held twice as long each time, up to ``most_s``, until it
  has stayed for ``calm_s``.
- If more than half of a set of two or more vanishes at a time, all of these are held for at
  least ``mass_s``: an outage of the source is more likely than one of the servers. A single
  entry may always go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")


class HoldRules(Struct, frozen=True):
    """How long what vanished is kept; seconds.

    :param hold_s: the first time; 0 lets it go at once.
    :param most_s: the most that repeated vanishing can come to.
    :param mass_s: when more than half vanishes at a time.
    :param calm_s: vanishing is counted anew after so long without.
    """

    hold_s: float = 5.0
    most_s: float = 60.0
    mass_s: float = 60.0
    calm_s: float = 600.0


class _Vanishing(Struct):
    """How often, and when the last time."""

    times: int
    at_s: float


class HoldDown(Generic[T]):
    """One source's set: those it tells of, and those that are held."""

    def __init__(self, rules: HoldRules) -> None:
        self.rules = rules
        self._present: dict[str, T] = {}
        self._held: dict[str, T] = {}
        self._vanishings: dict[str, _Vanishing] = {}

    @property
    def present(self) -> Mapping[str, T]:
        """What the source told last, in its order."""
        return self._present

    @property
    def held(self) -> Mapping[str, T]:
        """What it does not tell any more, and what is kept for now."""
        return self._held

    def update(self, told: Mapping[str, T], now_s: float) -> None:
        """The source tells its whole set."""
        for id, item in self._present.items():
            if id not in told:
                self._held[id] = item
                self._count(id, now_s)
        for id in told:
            self._held.pop(id, None)
        self._present = dict(told)
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Let go of those whose time is over."""
        for id in [id for id in self._held if now_s >= self._ends_s(id)]:
            del self._held[id]
        calm_s = now_s - self.rules.calm_s
        for id in [id for id, each in self._vanishings.items() if each.at_s < calm_s]:
            if id not in self._held:
                del self._vanishings[id]

    def drop(self, id: str) -> None:
        """Hold it no longer; somebody else has taken its place."""
        self._held.pop(id, None)

    def next_s(self) -> float | None:
        """When to call :meth:`expire` next, ``None`` while nothing is held."""
        return min((self._ends_s(id) for id in self._held), default=None)

    @property
    def in_mass(self) -> bool:
        """More than half is gone."""
        gone = len(self._held)
        return gone > 1 and gone > len(self._present)

    def _count(self, id: str, now_s: float) -> None:
        before = self._vanishings.get(id)
        if before is None or now_s - before.at_s > self.rules.calm_s:
            self._vanishings[id] = _Vanishing(1, now_s)
        else:
            before.times += 1
            before.at_s = now_s

    def _ends_s(self, id: str) -> float:
        rules, vanishing = self.rules, self._vanishings[id]
        hold_s: float = rules.hold_s
        if hold_s:
            # 2 ** 20 is above any bound, and more would overflow.
            hold_s = max(hold_s, min(rules.most_s, hold_s * 2 ** min(20, vanishing.times - 1)))
        if self.in_mass:
            hold_s = max(hold_s, rules.mass_s)
        return vanishing.at_s + hold_s
