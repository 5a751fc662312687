"""Token-bucket arithmetic; the time is an argument.

A bucket holds up to ``burst`` units and gains ``rate_per_s`` of them each second. It may go into
debt, down to ``-burst``, since the use of a request is only known afterwards; then requests
wait until the debt is paid.

Units are whatever the caller counts: requests or tokens.

A limiter asks a bucket several things at the same moment, so a method only refills it if the
time has changed.

:source: token bucket as in RFC 2697 section 3 (one rate, one burst); debt and
    the rule for oversized requests are our own, see ``docs/rate-limits.md``.
"""

from __future__ import annotations

SLACK = 1e-6
"""Units. A request that waited for exactly the stated time must not fail by a rounding error."""


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

        If the clock jumped back, nothing is added. A jump forward looks like a long pause: debts are
        paid and the bucket is full, but not more than that.

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

        :return: what was charged: less than ``amount`` if the debt has reached its floor. Pass this
            figure to :meth:`give_back`.
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
        """Replace an earlier charge by the actual one.

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
        """Change rate and burst; a bucket a third full stays a third full.

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
