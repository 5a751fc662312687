"""One gateway's share of a token bucket that it has in common with others.

The bucket itself is in the shared store. A gateway takes units out of it in advance,
*before* it spends them, so whatever gateways do with what they hold, no more than the
bucket's content is ever spent. This module is one gateway's side of that: when to ask, for
how much, what to give back, and what to do when the store does not answer. Time is an
argument.

``held`` is the figure that matters: units that may be spent without asking. Below zero it
is a debt: units spent without permission (the store was away, or a request used more than
it had reserved), which are paid with the next call.

In doubt the caller loses, never the limit: if the answer to a call got lost, what the call
gave back counts as given back, a debt in it as still owed, and a grant as lost.

:source: leases with demand and give-back as in Doorman (github.com/youtube/doorman);
    the cache of refusals is Envoy's; figures in ``docs/rate-limits.md``.
"""

from __future__ import annotations

from math import ceil, exp, floor, inf

from msgspec import Struct

from llmgw.core.bucket import SLACK

SHARE = 0.1
"""The part of a bucket's size that all gateways together may hold in advance."""

PERIOD_S = 0.1
"""Average time between two calls for a bucket in use."""

HEADROOM = 1.5
"""A call asks for so many times the use of a period."""

LOW = 0.15
"""With less than this part left, the next call should not wait for the end of the period."""

IDLE_S = 2.0
"""After so long without use, everything is given back."""

CHECK_S = 1.0
"""How long a refusal is believed: others may give back at any time."""

PAUSE_S = 0.025
"""Minimum time between two calls for an empty bucket: one that fills quickly always has a
little for everybody, and need not be asked for each request."""

MEMORY_S = 5.0
"""Time constant of each gateway's part of the use; the same as in the script."""

TRUST_S = 1.0
"""How long gateways must have shared a limit before their parts of the use mean something."""

MIXED_IN = 0.2
"""Part of the rate that is divided evenly while everybody decides alone, for gateways that join late."""


class BucketAsk(Struct, frozen=True, array_like=True, tag=0):
    """What a call says about one bucket; the script reads the fields in this order.

    :param delta: units given back; below 0, a debt.
    :param need: units for waiting requests.
    :param head: of these, for the one that has waited longest.
    :param big: that one wants more than the whole bucket, and was cut to its size.
    :param want: units to hold in advance, if any are left.
    :param hint: what the bucket holds, going by the last answer.
    :param stale: that answer is from before the store last lost its memory, so that
        ``hint`` may know better than the store.
    """

    rate_per_s: float
    burst: float
    delta: float
    need: float
    head: float
    big: bool
    want: float
    hint: float
    stale: bool


class BucketShare:
    """One gateway's share of one bucket.

    :param rate_per_s: of the whole bucket; ``burst`` too.
    :ivar held: units that may be spent at once; below 0, a debt.
    :ivar whole: the most that one request is charged in advance; one that wants more than the
        whole bucket passes when nothing is owed, and pays the rest afterwards.
    :ivar low: with less than this held, the next call should not wait for the end of the period.
    :ivar used: units asked for by requests in this period, allowed or not; the limiter adds to it.
    :ivar asked: the call that is under way. There is never a second one.
    :ivar alone: since the last answer something was decided without the store.
    :ivar epoch: of the store, at the last answer; ``None``: there was none yet.
    """

    __slots__ = (
        "_average",
        "_flow",
        "_flow_at_s",
        "_recent",
        "_rolled_s",
        "_share",
        "_since_s",
        "alone",
        "asked",
        "at_s",
        "burst",
        "dry_until_s",
        "epoch",
        "held",
        "last_use_s",
        "level",
        "low",
        "rate_per_s",
        "used",
        "whole",
    )

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self.rate_per_s = rate_per_s
        self.burst = burst
        self.whole = floor(burst)
        self.held = 0.0
        self.low = 0.0
        self.used = 0.0
        self.asked: BucketAsk | None = None
        self.epoch: str | None = None
        self.level = burst
        self.at_s = now_s
        self.dry_until_s = -inf
        self.last_use_s = -inf
        self._rolled_s = now_s
        self._recent = 0.0
        self._average = 0.0
        self._flow = 0.0
        self._flow_at_s = now_s
        self._share: float | None = None
        self._since_s = now_s
        self.alone: _Alone | None = None

    def resize(self, rate_per_s: float, burst: float) -> None:
        """Change the limit; the store learns it with the next call."""
        self.rate_per_s = rate_per_s
        self.burst = burst
        self.whole = floor(burst)
        self.level = min(self.level, burst)
        self.alone = None

    # --- deciding ---

    def left(self, now_s: float) -> float:
        """What the shared bucket holds, going by the last answer, if nobody has used it since."""
        level = self.level + (now_s - self.at_s) * self.rate_per_s
        return level if level < self.burst else self.burst

    def refusal_s(self, amount: float, big: bool, now_s: float) -> float:
        """For an ``amount`` above what is held: seconds until asking is worth while; 0: ask now."""
        if self.epoch is None or now_s - self.at_s >= CHECK_S:
            return 0.0
        # A request for more than the whole bucket passes as soon as nothing is owed.
        missing = (2.0 * SLACK if big else amount - self.held) - self.left(now_s)
        if missing > SLACK:
            return missing / self.rate_per_s
        if now_s < self.dry_until_s and amount < PAUSE_S * self.rate_per_s:
            return self.dry_until_s - now_s
        return 0.0

    def alone_s(self, amount: float, now_s: float, gateways: int) -> float:
        """The same while the store cannot be asked, going by our usual part of the rate; 0: take it.

        :param gateways: how many there were last; 0: never known.
        """
        if self.held >= amount:
            return 0.0
        return self._by_itself(now_s, gateways).wait_s(amount, now_s)

    def take_alone(self, amount: float, now_s: float, gateways: int) -> None:
        """Take what :meth:`alone_s` has allowed; what was not held is owed."""
        if self.held < amount:
            self._by_itself(now_s, gateways).level -= amount
        self.held -= amount

    def give_back(self, amount: float) -> None:
        """A request used less than was taken for it (or more: below 0)."""
        self.held += amount
        if self.alone is not None:
            self.alone.level += amount

    def _by_itself(self, now_s: float, gateways: int) -> _Alone:
        """The bucket for deciding alone: our part of what was left, and of the rate since then.

        Together these buckets fill at the rate of the shared one, and hold a
        :data:`SHARE` of its size.
        """
        if self.alone is None:
            part = 1.0
            most = self.burst
            if gateways:  # else nobody was ever heard of: we are all there is
                part /= gateways
                if self._share is not None:
                    # A gateway that has not asked for a while has lost some of its part to others.
                    share = self._share * exp((self.at_s - now_s) / MEMORY_S)
                    # As far as the store knows, the first gateway to ask has used everything so far.
                    trust = (1.0 - MIXED_IN) * min(1.0, (self.at_s - self._since_s) / TRUST_S)
                    part = (1.0 - trust) * part + trust * share
                most = max(1.0, SHARE * self.burst * part)
            # What the last answer left belongs to all gateways.
            level = most if self.epoch is None else min(most, part * self.level)
            self.alone = _Alone(self.rate_per_s * part, most, level, self.at_s)
        return self.alone

    # --- calling ---

    def ask(
        self,
        now_s: float,
        gateways: int,
        epoch: str | None,
        *,
        waiting: float = 0.0,
        head: float = 0.0,
        big: bool = False,
        taking: bool = True,
    ) -> BucketAsk | None:
        """What to say in a call that goes out now; ``None`` if there is nothing to say.

        What it gives back is not held from here on. :meth:`answered` or :meth:`failed` must follow.

        :param gateways: how many there are; 0: not known, nothing is taken in advance.
        :param epoch: the store's, as far as we know.
        :param waiting: units that requests wait for; ``head`` of them for the first one.
        :param big: that one wants more than the whole bucket.
        :param taking: if false, only settle debts and give back.
        """
        self._roll(now_s)
        most = floor(SHARE * self.burst / gateways) if gateways else 0
        idle = now_s - self.last_use_s >= IDLE_S
        target = 0.0
        if most and taking and not idle:
            target = min(most, max(1.0, ceil(HEADROOM * max(self._recent, self._average))))
        held = max(0.0, self.held)
        need = max(0.0, waiting - held)
        delta = self.held if self.held < 0.0 else max(0.0, held - max(waiting, 0.0 if idle else most))
        stays = self.held - delta
        want = max(0.0, target - stays)
        stale = self.epoch is not None and self.epoch != epoch
        dry = want > 0.0 and self.refusal_s(self.held + 1.0, False, now_s) > 0.0
        self.low = 0.0 if dry else target * LOW
        if need == 0.0 and delta == 0.0 and not stale and (dry or want == 0.0):
            return None
        self.held = stays
        hint = self.left(now_s)
        head = min(need, max(0.0, head - held))
        self.asked = BucketAsk(self.rate_per_s, self.burst, delta, need, head, big, want, hint, stale)
        return self.asked

    def answered(self, now_s: float, grant: float, level: float, flow: float, epoch: str) -> None:
        """The answer to the last :meth:`ask`.

        :param level: what the shared bucket holds after it.
        :param flow: units a second that all gateways took lately, after it.
        """
        ask = self.asked
        assert ask is not None
        self.asked = None
        self.held += grant
        self.level = level
        self.at_s = now_s
        self.alone = None
        if epoch != self.epoch:
            # The store has lost its counts and starts again, and so must we.
            self._flow = 0.0
            self._since_s = now_s
        self.epoch = epoch
        self._flow *= exp((self._flow_at_s - now_s) / MEMORY_S)
        self._flow_at_s = now_s
        self._flow += (grant + max(0.0, -ask.delta)) / MEMORY_S
        self._share = min(1.0, self._flow / flow) if flow > 0.0 else None
        if grant < ask.need + ask.want:
            self.low = 0.0
            self.dry_until_s = now_s + min(PAUSE_S, self.burst / self.rate_per_s / 4.0)

    def failed(self, sent: bool) -> None:
        """There will be no answer.

        :param sent: the call may have been executed all the same.
        """
        ask = self.asked
        assert ask is not None
        self.asked = None
        if not sent or ask.delta < 0.0:
            self.held += ask.delta

    def at_rest(self, now_s: float) -> bool:
        """Nothing is held, owed or under way, and no request has asked for it lately."""
        return self.held == 0.0 and self.asked is None and now_s - self.last_use_s >= IDLE_S

    def says_nothing(self, now_s: float) -> bool:
        """A new one would be in the same state."""
        return self.at_rest(now_s) and self.left(now_s) >= self.burst

    def _roll(self, now_s: float) -> None:
        """Add this period's use to the average."""
        elapsed_s = now_s - self._rolled_s
        if self.used:
            self.last_use_s = now_s
        if elapsed_s >= PERIOD_S / 2.0:
            self._recent = self.used * PERIOD_S / elapsed_s
            self._average += 0.3 * (self._recent - self._average)
            self._rolled_s = now_s
            self.used = 0.0


class _Alone:
    """A token bucket that may go below zero, by debts that the shared one has not seen yet."""

    __slots__ = ("at_s", "level", "most", "rate_per_s")

    def __init__(self, rate_per_s: float, most: float, level: float, at_s: float) -> None:
        self.rate_per_s = rate_per_s
        self.most = most
        self.level = level
        self.at_s = at_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until ``amount`` may be taken; more than the bucket's size passes when nothing is owed."""
        self.level = min(self.most, self.level + (now_s - self.at_s) * self.rate_per_s)
        self.at_s = now_s
        missing = (2.0 * SLACK if amount > self.most else amount) - self.level
        return missing / self.rate_per_s if missing > SLACK else 0.0
