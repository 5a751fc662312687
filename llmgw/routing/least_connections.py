"""Least connections: the backend with the fewest requests of ours.

It needs no knowledge of speed: a slow backend keeps its requests longer and so
gets fewer. Requests of other gateways are not counted: their numbers come late,
and gateways that act on the same late number all run to the same backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from llmgw.routing.options import read_numbers
from llmgw.routing.turns import Turns
from llmgw.values import Backend, Choice, Event, Request


class LeastConnections:
    """The fewest requests, with the one to place, over warmth; among equals whoever waited longest.

    :cvar weighted: each backend's weight divides its load too.
    """

    observes = False
    weighted = False

    def __init__(self) -> None:
        self._turns = Turns()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> LeastConnections:
        """:raise ConfigError: there are no options."""
        read_numbers(options, {})
        return cls()

    def choose(self, request: Request, candidates: Sequence[Backend], now_s: float) -> Choice:
        """O(n)."""
        lowest = inf
        equals: list[Backend] = []
        weighted = self.weighted
        for each in candidates:
            profile = each.profile
            share = each.weight * profile.warmth if weighted else profile.warmth
            cost = (profile.in_flight + 1) / share if share > 0.0 else inf
            if cost < lowest:
                lowest = cost
                equals = [each]
            elif cost == lowest:
                equals.append(each)
        chosen = self._turns.next(equals)
        return Choice(chosen, None, lowest, f"load {lowest:.3g}, lowest of {len(candidates)}")

    def observe(self, event: Event) -> None:
        """Nothing to learn: the counts are in the profiles."""
