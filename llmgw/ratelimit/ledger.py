"""One subject under one policy shared by gateways: its shares, and how they are charged."""

from __future__ import annotations

from math import ceil, floor
from typing import TYPE_CHECKING, Any

from llmgw.core.bucket_share import BucketShare
from llmgw.core.concurrency_share import ConcurrencyShare
from llmgw.values import LimitState

if TYPE_CHECKING:
    from llmgw.values import Cost, Policy

CONCURRENT_RETRY_S = 1.0
"""``Retry-After`` for a concurrency limit: nobody knows when a stream will end."""

CLOSED_RETRY_S = 1.0
"""``Retry-After`` of a policy that is closed while the store is away: nobody knows for how long."""

ASK = (0.0, "")
"""Stands for an obstacle that is not certain yet: the store must be asked."""

Charge = tuple["Ledger", float | None, float | None]
"""What one request took: requests and tokens, ``None`` where nothing was taken."""


class Ledger:
    """One subject under one policy.

    :param names: the names of its requests, tokens and places in the store.
    :param on_loss: ``local``, ``open`` or ``closed``: the rule while the store is away.
    :ivar active: it is synchronised with the store.
    """

    __slots__ = (
        "active",
        "names",
        "on_loss",
        "places",
        "policy",
        "requests",
        "requests_limit",
        "tokens",
        "tokens_limit",
    )

    def __init__(self, policy: Policy, names: tuple[str, str, str], on_loss: str, now_s: float) -> None:
        self.policy = policy
        self.names = names
        self.on_loss = on_loss
        self.active = False
        self.requests: BucketShare | None = None
        self.tokens: BucketShare | None = None
        self.places: ConcurrencyShare | None = None
        self._take_over(policy, now_s)

    def follow(self, policy: Policy, on_loss: str, now_s: float) -> None:
        """The policy may have changed by a reload."""
        if policy != self.policy:
            self._take_over(policy, now_s)
        self.policy = policy
        self.on_loss = on_loss

    def _take_over(self, policy: Policy, now_s: float) -> None:
        self.requests = _holding(self.requests, policy.requests_per_minute, policy.burst_s, now_s)
        self.tokens = _holding(self.tokens, policy.tokens_per_minute, policy.burst_s, now_s)
        self.requests_limit = ceil(policy.requests_per_minute or 0)
        self.tokens_limit = ceil(policy.tokens_per_minute or 0)
        if policy.concurrent is None:
            self.places = None
        elif self.places is None:
            self.places = ConcurrencyShare(policy.concurrent)
        else:
            self.places.resize(policy.concurrent)

    def obstacle(self, cost: Cost, now_s: float, alone: bool, gateways: int) -> tuple[float, str] | None:
        """Why ``cost`` cannot pass now: seconds to wait and what ran out, or :data:`ASK`.

        :param alone: the store cannot be asked; never :data:`ASK` then.
        """
        found: tuple[float, str] | None = None
        places = self.places
        if places is not None and places.running >= places.held:
            if not alone:
                found = (CONCURRENT_RETRY_S, "concurrent") if now_s < places.full_until_s else ASK
            elif self.on_loss == "closed" or (
                self.on_loss == "local" and places.running >= places.alone(gateways)
            ):
                found = (CONCURRENT_RETRY_S, "concurrent")
        for holding, amount, unit in (
            (self.tokens, cost.tokens, "tokens"),
            (self.requests, cost.requests, "requests"),
        ):
            if holding is None:
                continue
            whole = amount if amount <= holding.whole else holding.whole
            if holding.held >= whole:
                continue
            if not alone:
                wait_s = holding.refusal_s(whole, amount > whole, now_s)
                found = max(found or ASK, (wait_s, unit) if wait_s > 0.0 else ASK)
            elif self.on_loss == "closed":
                found = max(found or ASK, (CLOSED_RETRY_S, unit))
            elif self.on_loss == "local":
                wait_s = holding.alone_s(whole, now_s, gateways)
                if wait_s > 0.0:
                    found = max(found or ASK, (wait_s, unit))
        return found

    def charge(self, cost: Cost) -> Charge:
        """Take what is held, and what must be there."""
        places = self.places
        if places is not None:
            places.running += 1
        requests = tokens = None
        holding = self.requests
        if holding is not None:
            requests = cost.requests
            holding.held -= requests
        holding = self.tokens
        if holding is not None:
            tokens = cost.tokens if cost.tokens <= holding.whole else holding.whole
            holding.held -= tokens
        return (self, requests, tokens)

    def charge_alone(self, cost: Cost, now_s: float, gateways: int) -> Charge:
        """Take what :meth:`obstacle` allowed while the store was away."""
        if self.places is not None:
            self.places.running += 1
        taken: list[float | None] = []
        for holding, amount in ((self.requests, cost.requests), (self.tokens, cost.tokens)):
            whole: float | None = None
            if holding is not None:
                whole = amount if amount <= holding.whole else holding.whole
                if self.on_loss == "local" or holding.held >= whole:
                    holding.take_alone(whole, now_s, gateways)
                else:
                    whole = None
            taken.append(whole)
        return (self, taken[0], taken[1])

    def picture(self, subject: str, now_s: float) -> dict[str, Any]:
        """What is used by all gateways, as far as known here, as plain values; ``running`` is ours alone."""
        told: dict[str, Any] = {
            "policy": self.policy.name,
            "key": subject or None,
            "running": 0 if self.places is None else self.places.running,
            "concurrent": self.policy.concurrent,
        }
        for unit, holding in (("requests", self.requests), ("tokens", self.tokens)):
            if holding is not None:
                left = floor(holding.left(now_s) + holding.held)
                told[unit] = {"left": left, "limit": holding.whole}
        return told

    def says_nothing(self, now_s: float) -> bool:
        """Whether a new ledger would be in the same state."""
        return (
            not self.active
            and (self.places is None or self.places.at_rest())
            and (self.requests is None or self.requests.says_nothing(now_s))
            and (self.tokens is None or self.tokens.says_nothing(now_s))
        )

    def at_rest(self, now_s: float) -> bool:
        """There is nothing to synchronise."""
        return (
            (self.places is None or self.places.at_rest())
            and (self.requests is None or self.requests.at_rest(now_s))
            and (self.tokens is None or self.tokens.at_rest(now_s))
        )


def tightest(ledgers: list[Ledger], now_s: float) -> tuple[LimitState | None, LimitState | None]:
    """The request and the token limit with the least left, of the policies that are enforced."""
    requests = tokens = None
    requests_left = tokens_left = 0.0
    requests_limit = tokens_limit = 0
    for ledger in ledgers:
        if ledger.policy.enforce:
            holding = ledger.requests
            if holding is not None:
                left = holding.left(now_s) + holding.held
                if requests is None or left < requests_left:
                    requests, requests_left, requests_limit = holding, left, ledger.requests_limit
            holding = ledger.tokens
            if holding is not None:
                left = holding.left(now_s) + holding.held
                if tokens is None or left < tokens_left:
                    tokens, tokens_left, tokens_limit = holding, left, ledger.tokens_limit
    return (
        None if requests is None else state_of(requests, requests_left, requests_limit),
        None if tokens is None else state_of(tokens, tokens_left, tokens_limit),
    )


def state_of(holding: BucketShare, left: float, limit: int) -> LimitState:
    """``left`` of a limit, for the headers."""
    remaining = limit if left > limit else floor(left) if left > 0.0 else 0
    reset_s = (holding.burst - left) / holding.rate_per_s
    return LimitState(limit, remaining, reset_s if reset_s > 0.0 else 0.0)


def _holding(
    old: BucketShare | None, per_minute: float | None, burst_s: float, now_s: float
) -> BucketShare | None:
    if per_minute is None:
        return None
    rate_per_s = per_minute / 60.0
    # Less than one request of burst would never let one pass.
    burst = max(1.0, rate_per_s * burst_s)
    if old is None:
        return BucketShare(rate_per_s, burst, now_s)
    old.resize(rate_per_s, burst)
    return old
