"""Power of two choices: draw two at random, take the one with less load.

Many gateways that see the same numbers do not all run to the same backend,
which is what it is for; one gateway alone does better with least connections.

:source: M. Mitzenmacher, "The Power of Two Choices in Randomized Load
    Balancing", IEEE TPDS 12 (2001).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from random import Random
from typing import Any

from llmgw.routing.options import Number, read_numbers
from llmgw.values import Backend, Choice, Event, Request

OPTIONS = {"seed": Number(default=None, whole=True)}


class PowerOfTwo:
    """Load is counted as weighted least connections does.

    :param seed: for repeatable runs; ``None`` takes the system's randomness.
    """

    observes = False

    def __init__(self, seed: int | None = None) -> None:
        self._dice = Random(seed)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> PowerOfTwo:
        """:raise ConfigError: anything but a whole ``seed``."""
        return cls(**read_numbers(options, OPTIONS))

    def choose(self, request: Request, candidates: Sequence[Backend], now_s: float) -> Choice:
        """O(1) in the number of candidates."""
        count = len(candidates)
        dice = self._dice.random
        first = int(dice() * count)
        chosen = candidates[first]
        cost = _load(chosen)
        if count > 1:
            second = (first + 1 + int(dice() * (count - 1))) % count
            other = candidates[second]
            other_cost = _load(other)
            if other_cost < cost:
                chosen, cost = other, other_cost
        return Choice(chosen, None, cost, f"load {cost:.3g}, lower of two drawn from {count}")

    def observe(self, event: Event) -> None:
        """Nothing to learn: the counts are in the profiles."""


def _load(backend: Backend) -> float:
    """``(in_flight + 1) / (weight x warmth)``; without any weight it is infinite."""
    profile = backend.profile
    share = backend.weight * profile.warmth
    return (profile.in_flight + 1) / share if share > 0.0 else inf
