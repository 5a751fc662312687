"""Round robin: everyone in turn, whatever it can carry.

For backends of one speed and requests of one size. Slow ones of a mixed fleet
fill up to their cap while fast ones idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmgw.routing.options import read_numbers
from llmgw.routing.turns import MOST_REMEMBERED, Turns
from llmgw.values import Backend, Event, Request


class RoundRobin:
    """The backend that waited longest is next.

    One in slow start takes only the share of its turns that its warmth says.
    """

    observes = False

    def __init__(self) -> None:
        self._turns = Turns()
        self._credit: dict[str, float] = {}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> RoundRobin:
        """:raise ConfigError: there are no options."""
        read_numbers(options, {})
        return cls()

    def choose(self, request: Request, candidates: Sequence[Backend], now_s: float) -> Backend:
        """O(n); with a cold backend among them O(n log n)."""
        for each in candidates:
            if each.profile.warmth < 1.0:
                return self._choose_among_cold(candidates)
        return self._turns.next(candidates)

    def observe(self, event: Event) -> None:
        """Nothing to learn."""

    def _choose_among_cold(self, candidates: Sequence[Backend]) -> Backend:
        warmest = max(each.profile.warmth for each in candidates)
        queue = self._turns.queue(candidates)
        return next(each for each in queue if self._takes_its_turn(each, warmest, candidates))

    def _takes_its_turn(self, backend: Backend, warmest: float, candidates: Sequence[Backend]) -> bool:
        """Its turn is over either way; it is served once its credit is a whole one, the warmest always."""
        self._turns.took(backend, candidates)
        gain = backend.profile.warmth / warmest if warmest > 0.0 else 1.0
        if gain >= 1.0:
            return True
        if len(self._credit) > MOST_REMEMBERED:
            self._credit.clear()
        credit = self._credit.get(backend.id, 0.0) + gain
        served = credit >= 1.0
        self._credit[backend.id] = credit - 1.0 if served else credit
        return served
