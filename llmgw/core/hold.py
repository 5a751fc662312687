"""How long model loads take, which ones failed, and how long a request may wait for one.

A load is expected to take as long as the last ones of that model on that backend; if there
were none, as those of the model elsewhere, or of other models there. A load that failed is not
tried again at that backend for a while, which doubles with each further failure. Both are kept
for a bounded number of pairs of backend and model.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

from msgspec import Struct

LOAD_S = 15.0
"""The expected time of a load before any was seen."""

SHARE = 0.3
"""Weight of the newest load in the exponential mean (the first one is the mean)."""

MAX_PAIRS = 1024
"""Pairs of backend and model that are kept; the least recently used one is dropped first."""

MAX_BACKOFF_S = 300.0
"""The longest pause after failures."""

MAX_SIGNALS = 5
"""Interim responses per request."""


class Bounds(Struct, frozen=True):
    """``[hold]``: ``factor`` x the expected time, from ``min_s`` to ``max_s``."""

    min_s: float = 15.0
    max_s: float = 45.0
    factor: float = 1.5

    def wait_s(self, expected_s: float) -> float:
        """How long a request is held if its load is expected to take ``expected_s``."""
        return min(self.max_s, max(self.min_s, self.factor * expected_s))


def signal_every_s(wait_s: float, least_s: float) -> float:
    """Seconds between signs of life: :data:`MAX_SIGNALS` of them span ``wait_s``, but never less than
    ``least_s``."""
    return max(least_s, wait_s / (MAX_SIGNALS + 1))


class LoadTimes:
    """How long loads took."""

    def __init__(self) -> None:
        self._means: OrderedDict[tuple[str, str], float] = OrderedDict()

    def learn(self, backend_id: str, model: str, took_s: float) -> None:
        """A load has succeeded after ``took_s``."""
        key = (backend_id, model)
        mean_s = self._means.get(key)
        self._means[key] = took_s if mean_s is None else mean_s + SHARE * (took_s - mean_s)
        self._means.move_to_end(key)
        if len(self._means) > MAX_PAIRS:
            self._means.popitem(last=False)

    def expected_s(self, model: str, backend_id: str | None = None) -> float:
        """The expected seconds for loading ``model``, at that backend or at the quickest one."""
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

    :param until_s: monotonic time before which it is not tried.
    :param reason: of the last failure, for people.
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
        """A load has failed. :return: seconds until the next try.

        :param pause_s: the pause of another gateway, which is used if it is longer than ours.
        """
        key = (backend_id, model)
        old = self._held.pop(key, None)
        count = 1 if old is None else old.count + 1
        own_s = min(MAX_BACKOFF_S, self.first_s * 2.0 ** min(count - 1, 30))
        wait_s = own_s if pause_s is None else max(own_s, pause_s)
        self._held[key] = Setback(count, now_s + wait_s, reason)
        if len(self._held) > MAX_PAIRS:
            self._held.popitem(last=False)
        return wait_s

    def forget(self, backend_id: str, model: str) -> None:
        """It has succeeded, or an operator wants it to be tried."""
        self._held.pop((backend_id, model), None)

    def until_s(self, backend_id: str, model: str) -> float:
        """Monotonic time before which it is not tried; ``-inf`` if it has not failed."""
        held = self._held.get((backend_id, model))
        return -inf if held is None else held.until_s

    def reason(self, backend_id: str, model: str) -> str:
        """Why it failed last; empty if it has not."""
        held = self._held.get((backend_id, model))
        return "" if held is None else held.reason


def remaining_s(expected_s: float, elapsed_s: float) -> float:
    """The expected remaining seconds of a load. An overdue one is expected to need half as long
    again as it has taken: clients that are told "one second" again and again come back in vain."""
    left_s = expected_s - elapsed_s
    return max(1.0, left_s if left_s > 0 else elapsed_s / 2)
