"""When and how often to try again.

The budget keeps retries from becoming the outage: the backends get at most a fifth more
requests than the clients have sent. Over any period, retries are at most ``ratio`` times the
requests plus ``floor`` for each window, however fast attempts fail. (Counting only retries in
flight, as some proxies do, bounds nothing if every attempt fails within a millisecond.)
"""

from __future__ import annotations

from random import Random

from llmgw.core.breaker import Tally

RETRY_AFTER_JITTER = 0.25
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class RetryBudget:
    """Shared by all requests of one process.

    :param ratio: allowed retries per request, both counted over ``window_s``.
    :param floor: with few requests, so many retries per window are allowed beyond the ratio, and
        so many at once.
    """

    __slots__ = ("_floor", "_in_flight", "_ratio", "_tally")

    def __init__(self, ratio: float = 0.2, window_s: float = 10.0, floor: int = 3) -> None:
        self._ratio = ratio
        self._floor = floor
        self._tally = Tally(window_s)
        self._in_flight = 0

    def request(self, now_s: float) -> None:
        """Count a client's request; once, however often it is retried."""
        tally = self._tally
        if now_s >= tally.ends_s:
            tally.roll(now_s)
        tally.total += 1

    def take(self, now_s: float) -> bool:
        """Ask for one retry.

        :return: granted; then :meth:`done` must be called when that attempt is over.
        """
        tally = self._tally
        tally.roll(now_s)
        spent = tally.marked
        if spent + 1 > self._ratio * tally.total and (spent >= self._floor or self._in_flight >= self._floor):
            return False
        tally.add(now_s, 0, 1)
        self._in_flight += 1
        return True

    def done(self) -> None:
        """A granted retry is over."""
        self._in_flight -= 1


def backoff_s(attempt: int, dice: Random, least_s: float = 0.025, most_s: float = 0.250) -> float:
    """How long to wait before a retry: full jitter between ``least_s`` and a ceiling.

    :param attempt: 1 for the first retry, whose ceiling is half of ``most_s``.
    """
    ceiling_s = most_s if attempt > 1 else max(least_s, most_s / 2)
    return least_s + (ceiling_s - least_s) * dice.random()


def spread(seconds: float, dice: Random) -> float:
    """Seconds for a ``Retry-After`` that is certainly needed: plus 0 to 25 %, not bounded."""
    return seconds * (1.0 + RETRY_AFTER_JITTER * dice.random())


def retry_after(seconds: float, dice: Random) -> float:
    """Seconds for a ``Retry-After``: the computed time plus 0 to 25 %, within 1 to 60.

    The bound is applied before the jitter, so that clients with the longest wait are spread, too.
    """
    most_s = MAX_RETRY_AFTER_S / (1.0 + RETRY_AFTER_JITTER)
    base_s = min(max(seconds, MIN_RETRY_AFTER_S), most_s)
    return base_s * (1.0 + RETRY_AFTER_JITTER * dice.random())
