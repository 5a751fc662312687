"""Prefix hash: equal beginnings to equal backends, within bounds of load.

Each request has a key: its session, or else its prompt up to the ``blocks``-th
block. Each backend draws a lot for the key, weighted so that it wins its share of
keys, and the best lot wins. Nothing is remembered, so any number of gateways
agree without a word, and a backend that comes or goes moves its own keys only.

No backend may have more than ``bound`` times its fair share of what is in flight;
the key then goes to its next best lot. So a popular key spreads instead of
drowning its backend. Load is this gateway's own count.

:source: D. Thaler, C. Ravishankar, "Using Name-Based Mappings to Increase Hit
    Rates", IEEE/ACM ToN 6 (1998), rendezvous hashing, with the weighted lots of
    J. Schindelhauer, G. Schomaker (2005); V. Mirrokni, M. Thorup, M. Zadimoghaddam,
    "Consistent Hashing with Bounded Loads", SODA 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log
from typing import Any
from zlib import crc32

from llmgw.routing.options import Number, read_numbers
from llmgw.routing.turns import MOST_REMEMBERED
from llmgw.values import Backend, Choice, Event, Request

OPTIONS = {
    "bound": Number(default=1.25, least=1.0, most=100.0),
    "blocks": Number(default=4, least=1, whole=True),
}

_ALL = (1 << 64) - 1


class PrefixHash:
    """See the module.

    :cvar observes: whether :meth:`observe` does anything with events.
    :param bound: the most a backend may have, as a multiple of its fair share.
    :param blocks: how many first blocks of the prompt make the key.
    """

    observes = False
    wants_prefix = True

    def __init__(self, bound: float = 1.25, blocks: int = 4) -> None:
        self._bound = bound
        self._blocks = blocks
        self._seeds: dict[str, int] = {}  # hashes of ids, only to save their making

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> PrefixHash:
        """:raise ConfigError: each fault names its option."""
        return cls(**read_numbers(options, OPTIONS))

    def choose(self, request: Request, candidates: Sequence[Backend], now_s: float) -> Choice:
        """O(n). If the bounds leave nobody, the best lot wins in spite of them."""
        total, weights = 1, 0.0
        for each in candidates:
            total += each.profile.in_flight or 0
            weights += each.weight * each.profile.warmth
        per_weight = self._bound * total / weights if weights > 0.0 else 0.0
        key, seeds = self._key(request), self._seeds
        chosen: Backend | None = None
        best = home = -1.0
        wanted = candidates[0]
        for each in candidates:
            seed = seeds.get(each.id)
            if seed is None:
                seed = self._seed(each.id)
            share = each.weight * each.profile.warmth
            lot = share / -log(_lot(key ^ seed)) if share > 0.0 else 0.0
            if lot > home:
                home, wanted = lot, each
            if lot > best and (each.profile.in_flight or 0) < ceil(per_weight * share):
                best, chosen = lot, each
        if chosen is wanted:
            return Choice(chosen, None, best, f"home of the key, of {len(candidates)}")
        if chosen is None:
            return Choice(wanted, None, home, "home of the key, all at their bound")
        return Choice(chosen, None, best, f"next best, as {wanted.id} is at its bound")

    def observe(self, event: Event) -> None:
        """Nothing to learn."""

    def _key(self, request: Request) -> int:
        if request.session is not None:
            return _mix(crc32(request.session.encode("utf-8", "surrogatepass")) | 1 << 32)
        prefix = request.prefix
        if prefix:
            return _mix(prefix[min(len(prefix), self._blocks) - 1] & _ALL)
        return _mix(crc32(request.id.encode("utf-8", "surrogatepass")) | 1 << 33)

    def _seed(self, backend_id: str) -> int:
        seeds = self._seeds
        if len(seeds) > MOST_REMEMBERED:
            seeds.clear()
        seed = seeds[backend_id] = _mix(crc32(backend_id.encode("utf-8", "surrogatepass")))
        return seed


def _mix(value: int) -> int:
    """SplitMix64's finaliser: every bit of ``value`` changes every bit of the result."""
    value = (value + 0x9E3779B97F4A7C15) & _ALL
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _ALL
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _ALL
    return value ^ value >> 31


def _lot(value: int) -> float:
    """A number between 0 and 1, neither included, from all bits of ``value``."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _ALL
    return ((value ^ value >> 29) >> 11 | 1) / (1 << 53)
