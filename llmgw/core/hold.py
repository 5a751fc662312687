"""What is known of loads, and how long a request may wait for one.

A load takes about as long as the last ones of that model on that backend; where
none was seen, as those of the model elsewhere, or of other models there. A load
that failed is not tried again at that backend for a while, which doubles with
each further failure. Both are remembered for a bounded number of pairs, since
names of models may come and go with their backends.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

from msgspec import Struct

LOAD_S = 15.0
"""How long a load is thought to take before one was seen."""

SHARE = 0.3
"""Weight of the newest load in the exponential mean (the first one is the mean)."""

MOST_PAIRS = 1024
"""Pairs of backend and model that are remembered; the one longest untouched goes first."""

BACKOFF_MOST_S = 300.0
"""The longest pause after failures."""

MOST_SIGNALS = 5
"""So many interim responses at most for one request."""


class Bounds(Struct, frozen=True):
    """``[hold]``: ``factor`` x the expected time, from ``min_s`` to ``max_s``."""

    min_s: float = 15.0
    max_s: float = 45.0
    factor: float = 1.5

    def wait_s(self, expected_s: float) -> float:
        """How long a request is held that is expected to need ``expected_s``."""
        return min(self.max_s, max(self.min_s, self.factor * expected_s))


def signal_every_s(wait_s: float, least_s: float) -> float:
    """Seconds between signs of life, so that :data:`MOST_SIGNALS` of them span a hold of
    ``wait_s``; no less than ``least_s``."""
    return max(least_s, wait_s / (MOST_SIGNALS + 1))


class LoadTimes:
    """How long loads took."""

    def __init__(self) -> None:
        self._means: OrderedDict[tuple[str, str], float] = OrderedDict()

    def learn(self, backend_id: str, model: str, took_s: float) -> None:
        """A load has ended well after ``took_s``."""
        key = (backend_id, model)
        mean_s = self._means.get(key)
        self._means[key] = took_s if mean_s is None else mean_s + SHARE * (took_s - mean_s)
        self._means.move_to_end(key)
        if len(self._means) > MOST_PAIRS:
            self._means.popitem(last=False)

    def expected_s(self, model: str, backend_id: str | None = None) -> float:
        """Seconds that loading ``model`` will take, there or at the best place."""
        if backend_id is not None:
            known = self._means.get((backend_id, model))
            if known is not None:
                return known
        same = [mean_s for (_, name), mean_s in self._means.items() if name == model]
        if same:
            return min(same)
        there = [mean_s for (id, _), mean_s in self._means.items() if id == backend_id]
        return sum(there) / len(there) if there else LOAD_S


class Setback(Struct):
    """Failures of one model at one backend.

    :param until_s: not to be tried before.
    :param reason: the last one, for people.
    """

    count: int
    until_s: float
    reason: str


class Setbacks:
    """Loads that failed, and until when each is not tried again.

    :param first_s: pause after the first failure.
    """

    def __init__(self, first_s: float) -> None:
        self.first_s = first_s
        self._held: OrderedDict[tuple[str, str], Setback] = OrderedDict()

    def failed(
        self, backend_id: str, model: str, reason: str, now_s: float, pause_s: float | None = None
    ) -> float:
        """One more failure. :return: seconds until the next try.

        :param pause_s: by somebody else's count; only ever longer than ours.
        """
        key = (backend_id, model)
        old = self._held.pop(key, None)
        count = 1 if old is None else old.count + 1
        own_s = min(BACKOFF_MOST_S, self.first_s * 2.0 ** min(count - 1, 30))
        wait_s = own_s if pause_s is None else max(own_s, pause_s)
        self._held[key] = Setback(count, now_s + wait_s, reason)
        if len(self._held) > MOST_PAIRS:
            self._held.popitem(last=False)
        return wait_s

    def forget(self, backend_id: str, model: str) -> None:
        """It went well, or an operator wants it tried."""
        self._held.pop((backend_id, model), None)

    def until_s(self, backend_id: str, model: str) -> float:
        """Not before then; ``-inf`` when it has not failed."""
        held = self._held.get((backend_id, model))
        return -inf if held is None else held.until_s

    def reason(self, backend_id: str, model: str) -> str:
        """Why it failed last, or nothing."""
        held = self._held.get((backend_id, model))
        return "" if held is None else held.reason


def remaining_s(expected_s: float, elapsed_s: float) -> float:
    """Seconds that a load will go on, which is expected to take ``expected_s`` in all. One
    that is overdue is thought to need half as long again as it has taken: who is told
    "one second" over and over comes back for nothing."""
    left_s = expected_s - elapsed_s
    return max(1.0, left_s if left_s > 0 else elapsed_s / 2)
