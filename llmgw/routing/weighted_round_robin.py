"""Smooth weighted round robin: turns in proportion to weight, well mixed.

With weights 5, 1, 1 the order is a a b a c a a, never five in a row.

:source: nginx commit 52327e0627f4 (2012), "smooth weighted round-robin".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from llmgw.routing.options import read_numbers
from llmgw.routing.turns import MOST_REMEMBERED, Turns
from llmgw.values import Backend, Event, Request


class WeightedRoundRobin:
    """At each call everyone gains its weight; the richest is chosen and pays the sum.

    Only those present gain and pay, so a changing set needs no care: one that
    was away comes back with the balance it left, which is less than one round.
    """

    observes = False

    def __init__(self) -> None:
        self._balance: dict[str, float] = {}
        self._turns = Turns()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> WeightedRoundRobin:
        """:raise ConfigError: there are no options; weights stand at the backends."""
        read_numbers(options, {})
        return cls()

    def choose(self, request: Request, candidates: Sequence[Backend], now_s: float) -> Backend:
        """O(n). Weight counts times warmth; where nobody has any, all take turns."""
        balance = self._balance
        if len(balance) > MOST_REMEMBERED:
            self._balance = balance = {each.id: balance.get(each.id, 0.0) for each in candidates}
        total = 0.0
        most = -inf
        chosen = candidates[0]
        for each in candidates:
            gain = max(0.0, each.weight * each.profile.warmth)
            total += gain
            has = balance[each.id] = balance.get(each.id, 0.0) + gain
            if has > most:
                most, chosen = has, each
        if total <= 0.0:
            return self._turns.next(candidates)
        balance[chosen.id] -= total
        return chosen

    def observe(self, event: Event) -> None:
        """Nothing to learn."""
