"""The rate limiter ``local``: counts in this process alone.

One :class:`_Ledger` per policy and subject holds a bucket of requests, one of tokens, and the
number of running requests. Ledgers without information (buckets full, nothing running) are
dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from math import ceil, floor, inf
from typing import TYPE_CHECKING, Any

from twisted.plugin import IPlugin
from zope.interface import implementer

from llmgw.core.bucket import Bucket
from llmgw.errors import ConfigError, ConfigFault
from llmgw.interfaces import CONTRACT, IRateLimiter, IRateLimiterFactory
from llmgw.values import Cost, Decision, LimitState, Policy, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from twisted.internet.interfaces import IReactorTime

Charge = tuple["_Ledger", float | None, float | None]
"""What one request took from one ledger: requests and tokens, ``None`` where there
was no bucket. The reservation is the list of them, empty once settled."""

CONCURRENT_RETRY_S = 1.0
"""``Retry-After`` for a concurrency limit: nobody knows when a stream will end."""

SWEPT_PER_NEWCOMER = 4
"""Old ledgers checked for each new one: above 1, so that cleaning up is faster than growth, and
small, so that no request pays for all of it."""


class _Ledger:
    """What one subject has left under one policy."""

    __slots__ = ("concurrent", "policy", "requests", "requests_limit", "running", "tokens", "tokens_limit")

    def __init__(self, policy: Policy, now_s: float) -> None:
        self.policy = policy
        self.running = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self._take_over(policy, now_s)

    def follow(self, policy: Policy, now_s: float) -> None:
        """The policy may have changed by a reload: keep the levels in proportion."""
        if policy != self.policy:
            self._take_over(policy, now_s)
        self.policy = policy

    def _take_over(self, policy: Policy, now_s: float) -> None:
        self.requests = _bucket(self.requests, policy.requests_per_minute, policy.burst_s, now_s)
        self.tokens = _bucket(self.tokens, policy.tokens_per_minute, policy.burst_s, now_s)
        # For the headers and the comparison; not used where there is no bucket.
        self.requests_limit = ceil(policy.requests_per_minute or 0)
        self.tokens_limit = ceil(policy.tokens_per_minute or 0)
        self.concurrent = inf if policy.concurrent is None else policy.concurrent

    def obstacle(self, cost: Cost, now_s: float) -> tuple[float, str] | None:
        """Why ``cost`` cannot pass: seconds to wait and what ran out, the longest wait if several."""
        found = None
        if self.running >= self.concurrent:
            found = (CONCURRENT_RETRY_S, "concurrent")
        # Usually there is enough, which the level alone shows.
        bucket, amount = self.tokens, cost.tokens
        if bucket is not None and bucket.refill(now_s) < amount:
            wait_s = bucket.deficit_s(amount, now_s)
            if wait_s > 0.0:
                found = max(found or (0.0, ""), (wait_s, "tokens"))
        bucket, amount = self.requests, cost.requests
        if bucket is not None and bucket.refill(now_s) < amount:
            wait_s = bucket.deficit_s(amount, now_s)
            if wait_s > 0.0:
                found = max(found or (0.0, ""), (wait_s, "requests"))
        return found

    def charge(self, cost: Cost, now_s: float) -> Charge:
        """Count a request in and take what it costs."""
        self.running += 1
        requests, tokens = self.requests, self.tokens
        return (
            self,
            None if requests is None else requests.take(cost.requests, now_s),
            None if tokens is None else tokens.take(cost.tokens, now_s),
        )

    def picture(self, subject: str, now_s: float) -> dict[str, Any]:
        """What is used, as plain values."""
        told: dict[str, Any] = {
            "policy": self.policy.name,
            "key": subject or None,
            "running": self.running,
            "concurrent": self.policy.concurrent,
        }
        for unit, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                told[unit] = {"left": floor(bucket.refill(now_s)), "limit": floor(bucket.burst)}
        return told

    def says_nothing(self, now_s: float) -> bool:
        """Whether a new ledger would be in the same state."""
        return (
            self.running == 0
            and (self.requests is None or self.requests.full_in_s(now_s) <= 0.0)
            and (self.tokens is None or self.tokens.full_in_s(now_s) <= 0.0)
        )


@implementer(IRateLimiter)
class LocalRateLimiter:
    """Limits within this process; answers at once.

    :param clock: returns seconds, best monotonic; a jump does no lasting harm.
    :param remembered: number of ledgers above which idle ones are looked for and dropped.

    :ivar shadow_refused: by policy name, the requests that policies with
        ``enforce=False`` would have refused and nobody else did.
    """

    def __init__(self, clock: Callable[[], float], remembered: int = 100_000) -> None:
        self.shadow_refused: dict[str, int] = {}
        self._clock = clock
        self._remembered = remembered
        # Oldest first. Ordered, because repeatedly taking the oldest entry of a plain dict walks
        # over the holes that earlier ones have left.
        self._ledgers: OrderedDict[tuple[str, str], _Ledger] = OrderedDict()

    def __len__(self) -> int:
        """Ledgers held in memory."""
        return len(self._ledgers)

    def admit(self, subject: str, policies: Sequence[Policy], cost: Cost) -> Decision:
        """Charge ``cost`` to all policies, or to none of them.

        A policy that is not enforced is charged only for what it would have allowed, so that it counts
        as if it were enforced.

        :raise ValueError: a policy has a figure of 0 or less; the config refuses those.
        """
        now_s = self._clock()
        ledgers = self._ledgers
        # The ledgers to be charged if none refuses; headers are made from them, too.
        chargeable = []
        shadows = None
        newcomers = 0
        refusal: tuple[float, str] | None = None
        refused_by = ""
        for policy in policies:
            name = (policy.name, "" if policy.scope == "global" else subject)
            ledger = ledgers.get(name)
            if ledger is None:
                ledger = ledgers[name] = _Ledger(policy, now_s)
                newcomers += 1
            elif ledger.policy is not policy:
                ledger.follow(policy, now_s)
            obstacle = ledger.obstacle(cost, now_s)
            if obstacle is None:
                chargeable.append(ledger)
            elif policy.enforce:
                chargeable.append(ledger)
                if refusal is None or obstacle > refusal:
                    refusal = obstacle
                    refused_by = policy.name
            else:
                shadows = [*(shadows or ()), policy.name]
        charges: list[Charge] = []
        if refusal is None:
            for ledger in chargeable:
                charges.append(ledger.charge(cost, now_s))
        if newcomers:
            # Only now: before being charged, a ledger created above looks idle.
            self._sweep(now_s, newcomers)
        requests, tokens = _tightest(chargeable)
        if refusal is not None:
            wait_s, unit = refusal
            return Decision(False, None, wait_s, refused_by, unit, requests, tokens)
        if shadows is not None:
            for shadow in shadows:
                self.shadow_refused[shadow] = self.shadow_refused.get(shadow, 0) + 1
        return Decision(True, charges, 0.0, "", "", requests, tokens)

    def settle(self, reservation: Any, used: Usage | None) -> None:
        """Release concurrency and correct the tokens; a second call does nothing.

        :param used: ``None``: give back all that was charged.
        """
        charges: list[Charge] = reservation
        if not charges:
            return
        now_s = self._clock()
        spent = 0 if used is None else used.total
        for ledger, requests, tokens in charges:
            ledger.running -= 1
            # A reload may have added or removed a bucket since: only what was
            # charged is corrected.
            bucket = ledger.tokens
            if bucket is not None and tokens is not None:
                bucket.correct(tokens, spent, now_s)
            if used is None and ledger.requests is not None and requests is not None:
                ledger.requests.give_back(requests, now_s)
        charges.clear()

    def top_up(self, reservation: Any, tokens: int) -> None:
        """Charge so many tokens more, down to the floor of debt; after ``settle`` nothing."""
        charges: list[Charge] = reservation
        now_s = self._clock()
        for index, (ledger, requests, charged) in enumerate(charges):
            if ledger.tokens is not None and charged is not None:
                charges[index] = (ledger, requests, charged + ledger.tokens.take(tokens, now_s))

    def gauges(self) -> Mapping[str, tuple[str, float]]:
        """Figures for a scrape: help text and value by name."""
        text = "Requests that limits which only count would have refused."
        return {"llmgw_limiter_shadow_refused": (text, sum(self.shadow_refused.values()))}

    def usage(self, subjects: Iterable[str], policies: Iterable[str]) -> list[dict[str, Any]]:
        """How much of each limit is used, for people: of those ``subjects`` that have a ledger.

        :param policies: names of policies; a policy of all together is told once, with no subject.
        :return: plain values; ``left`` and ``limit`` of a dimension that is limited, ``running`` requests.
        """
        now_s = self._clock()
        names = [(policy, subject) for policy in policies for subject in ("", *subjects)]
        found = ((name, self._ledgers.get(name)) for name in names)
        return [ledger.picture(name[1], now_s) for name, ledger in found if ledger is not None]

    def _sweep(self, now_s: float, newcomers: int) -> None:
        ledgers = self._ledgers
        for _ in range(newcomers):
            for _ in range(min(SWEPT_PER_NEWCOMER, len(ledgers) - self._remembered)):
                name, ledger = ledgers.popitem(last=False)
                if not ledger.says_nothing(now_s):
                    # Dropping it would give its subject a full bucket for free.
                    ledgers[name] = ledger


def _bucket(old: Bucket | None, per_minute: float | None, burst_s: float, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    rate_per_s = per_minute / 60.0
    # With a burst below one unit, each request would hit the floor of the debt and be charged only
    # in part: more than the rate would pass.
    burst = max(1.0, rate_per_s * burst_s)
    if old is None:
        return Bucket(rate_per_s, burst, now_s)
    old.resize(rate_per_s, burst, now_s)
    return old


def _tightest(ledgers: list[_Ledger]) -> tuple[LimitState | None, LimitState | None]:
    """The request and the token limit with the least left, of the policies that are enforced.

    :param ledgers: their buckets are up to date.
    """
    requests = tokens = None
    requests_limit = tokens_limit = 0
    for ledger in ledgers:
        if ledger.policy.enforce:
            bucket = ledger.requests
            if bucket is not None and (requests is None or bucket.level < requests.level):
                requests, requests_limit = bucket, ledger.requests_limit
            bucket = ledger.tokens
            if bucket is not None and (tokens is None or bucket.level < tokens.level):
                tokens, tokens_limit = bucket, ledger.tokens_limit
    return (
        None if requests is None else _state(requests, requests_limit),
        None if tokens is None else _state(tokens, tokens_limit),
    )


def _state(bucket: Bucket, limit: int) -> LimitState:
    level = bucket.level
    remaining = limit if level > limit else floor(level) if level > 0.0 else 0
    return LimitState(limit, remaining, (bucket.burst - level) / bucket.rate_per_s)


@implementer(IPlugin, IRateLimiterFactory)
class LocalRateLimiterFactory:
    """Builds :class:`LocalRateLimiter`; it has no options."""

    name = "local"
    description = "Counts in this process alone; exact for one worker."
    contract = CONTRACT

    def build(self, options: Mapping[str, Any], reactor: IReactorTime) -> LocalRateLimiter:
        """:raise ConfigError: there are options."""
        if options:
            raise ConfigError(
                [ConfigFault(str(key), "unknown option: the limiter `local` has none") for key in options]
            )
        return LocalRateLimiter(reactor.seconds)
