"""Token-bucket arithmetic; the time is an argument.

A bucket holds up to ``burst`` units and gains ``rate_per_s`` of them each
second. It may owe: what a request really used is known only afterwards, so the
level goes down to ``-burst``, and whoever is in debt waits until it is paid.

Units are whatever the caller counts: requests or tokens.

A limiter asks one bucket several things at one moment, so each method refills
only when the time is another than the last one.

:source: token bucket as in RFC 2697 section 3 (one rate, one burst); debt and
    the rule for oversized requests are our own, see ``docs/rate-limits.md``.
"""

from __future__ import annotations

SLACK = 1e-6
"""Units. Whoever waited for exactly the told time must not fail by a rounding of floats."""


class Bucket:
    """One bucket; it starts full.

    :param rate_per_s: units gained per second, above 0.
    :param burst: units it holds at most, above 0.
    :raise ValueError: a figure is not a positive finite number.
    """

    __slots__ = ("at_s", "burst", "level", "rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, now_s: float = 0.0) -> None:
        _check(rate_per_s, burst)
        self.rate_per_s = rate_per_s
        self.burst = burst
        self.level = float(burst)
        self.at_s = now_s

    def refill(self, now_s: float) -> float:
        """Bring the level up to ``now_s``.

        A clock that jumped back adds nothing and is followed from there; one that
        jumped forward looks like a long silence: debts are paid and the bucket
        is full, once and no more than that.

        :return: the level, which may be negative.
        """
        elapsed_s = now_s - self.at_s
        if elapsed_s > 0.0:
            level = self.level + elapsed_s * self.rate_per_s
            self.level = level if level < self.burst else self.burst
        self.at_s = now_s
        return self.level

    def take(self, amount: float, now_s: float) -> float:
        """Charge ``amount``, allowed or not.

        :return: what was really charged: less than ``amount`` where the debt
            reached its floor. Hand this figure to :meth:`give_back`.
        """
        before = self.level if now_s == self.at_s else self.refill(now_s)
        after = before - amount
        if after < -self.burst:
            after = -self.burst
        self.level = after
        return before - after

    def give_back(self, amount: float, now_s: float) -> None:
        """Undo a charge of ``amount``; the bucket never holds more than ``burst``."""
        level = (self.level if now_s == self.at_s else self.refill(now_s)) + amount
        self.level = level if level < self.burst else self.burst

    def correct(self, charged: float, amount: float, now_s: float) -> None:
        """Replace an earlier charge by the true one.

        :param charged: what :meth:`take` returned.
        :param amount: what should have been charged.
        """
        level = self.level if now_s == self.at_s else self.refill(now_s)
        level = level + charged - amount
        burst = self.burst
        if level > burst:
            level = burst
        elif level < -burst:
            level = -burst
        self.level = level

    def deficit_s(self, amount: float, now_s: float) -> float:
        """Seconds until ``amount`` may be taken if nobody else takes any; 0 if it may now.

        An amount larger than the whole bucket could never be covered. It may be taken as soon
        as nothing is owed, and is paid for afterwards.
        """
        level = self.level if now_s == self.at_s else self.refill(now_s)
        if level + SLACK >= amount or (amount > self.burst and level > 0.0):
            return 0.0
        missing = (SLACK if amount > self.burst else amount) - level
        return missing / self.rate_per_s

    def full_in_s(self, now_s: float) -> float:
        """Seconds until the bucket is full if nobody takes any."""
        level = self.level if now_s == self.at_s else self.refill(now_s)
        return (self.burst - level) / self.rate_per_s

    def resize(self, rate_per_s: float, burst: float, now_s: float) -> None:
        """Go on with other figures; a bucket a third full stays a third full.

        :raise ValueError: as in the constructor; the bucket is unchanged then.
        """
        _check(rate_per_s, burst)
        self.level = self.refill(now_s) / self.burst * burst
        self.rate_per_s = rate_per_s
        self.burst = burst


def _check(rate_per_s: float, burst: float) -> None:
    # The comparison with infinity also refuses NaN, which fails every comparison.
    if not 0.0 < rate_per_s < float("inf"):
        raise ValueError(f"rate_per_s must be above 0 and finite, not {rate_per_s}")
    if not 0.0 < burst < float("inf"):
        raise ValueError(f"burst must be above 0 and finite, not {burst}")
