"""The rate limiter ``redis``: one limit for all gateways that share a store.

Each gateway takes a little of every limit in advance and spends it without asking
(:mod:`llmgw.core.bucket_share`), so the common ``admit`` is three comparisons. Only a request
for which not enough is held waits for the store, for 20 ms at most. While the store is away,
each policy limits by itself (``local``), allows everything (``open``), or only what is held
(``closed``).
"""

from __future__ import annotations

import random
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from zope.interface import implementer

from llmgw.interfaces import IRateLimiter
from llmgw.ratelimit.asking import Waiting, parts_of
from llmgw.ratelimit.calls import Calls
from llmgw.ratelimit.ledger import ASK, Ledger, state_of, tightest
from llmgw.ratelimit.names import Names
from llmgw.values import Cost, Decision, Policy, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llmgw.ratelimit.calls import Part
    from llmgw.ratelimit.ledger import Charge
    from llmgw.store.store import Store

SHADOW = "Requests that limits which only count would have refused."

WAIT_S = 0.02
"""The longest wait for the store; then the decision is made by what is known here."""

SWEPT_PER_NEWCOMER = 4
"""As in the limiter ``local``: above 1, so that cleaning up is faster than growth."""


@implementer(IRateLimiter)
class RedisRateLimiter:
    """Limits over all gateways that use the same store.

    :param on_loss: for policies without an option of their own.
    :param remembered: number of ledgers above which idle ones are looked for and dropped.
    :ivar store: the one that came with its own options, if any.
    :ivar shadow_refused: by policy name, the requests that policies with
        ``enforce=False`` would have refused and nobody else did.
    :ivar waited: number of requests that waited for the store, ``late`` of them in vain.
    :ivar from_memory: number of refusals without asking the store.
    """

    def __init__(
        self,
        reactor: Any,
        *,
        on_loss: str = "local",
        store: Store | None = None,
        dice: random.Random | None = None,
        remembered: int = 100_000,
    ) -> None:
        self.store = store
        self.shadow_refused: dict[str, int] = {}
        self.waited = 0
        self.late = 0
        self.from_memory = 0
        self._reactor = reactor
        self._clock = reactor.seconds
        self._on_loss = on_loss
        self._dice = dice or random.Random()
        self._remembered = remembered
        self._ledgers: OrderedDict[tuple[str, str], Ledger] = OrderedDict()
        self._waiting: list[Waiting] = []
        self._expiry: Any = None
        self._turn: Any = None
        self._hurried: dict[Ledger, None] = {}
        self._calls: Calls
        self._names: Names
        if store is not None:
            self.use_store(store)

    def use_store(self, store: Store) -> None:
        """Share limits through ``store``; called before the reactor runs."""
        gateway = secrets.token_hex(6)
        self._calls = Calls(store, self._reactor, gateway, self._parts, self._answered, self._dice)
        self._names = Names(store)

    def __len__(self) -> int:
        """Ledgers held in memory."""
        return len(self._ledgers)

    @property
    def degraded(self) -> bool:
        """Decisions are made without the store."""
        return self._calls.alone

    def stop(self) -> Deferred[Any]:
        """Give back what is held. No ``admit`` after this."""
        for timer in (self._expiry, self._turn):
            if timer is not None:
                timer.cancel()
        self._expiry = self._turn = None
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.decided.cancel()
        return self._calls.stop()

    def gauges(self) -> Mapping[str, tuple[str, float]]:
        """Figures for a scrape: help text and value by name."""
        calls = self._calls
        return {
            "llmgw_limiter_degraded": ("1 while limits are decided without the store.", float(calls.alone)),
            "llmgw_limiter_gateways": ("Gateways that share the limits, by the last call.", calls.gateways),
            "llmgw_limiter_calls": ("Calls to the store for limits.", calls.made),
            "llmgw_limiter_calls_failed": ("Calls that got no answer.", calls.failed),
            "llmgw_limiter_waits": ("Requests that waited for the store.", self.waited),
            "llmgw_limiter_late": ("Requests that waited for the store in vain.", self.late),
            "llmgw_limiter_denied_from_cache": ("Refusals without asking the store.", self.from_memory),
            "llmgw_limiter_shadow_refused": (SHADOW, sum(self.shadow_refused.values())),
        }

    # --- the contract ---

    def admit(self, subject: str, policies: Sequence[Policy], cost: Cost) -> Decision | Deferred[Decision]:
        """Charge ``cost`` to all policies, or to none of them.

        Decides at once if enough of each is held in advance; else returns a Deferred that fires
        within 20 ms. Cancelling it charges nothing.

        A policy that is not enforced is charged only for what it would have allowed, so that it counts
        as if it were enforced.
        """
        now_s = self._clock()
        calls = self._calls
        known = self._ledgers
        asked_requests, asked_tokens = cost.requests, cost.tokens
        ledgers = []
        enough = not calls.alone
        newcomers = 0
        for policy in policies:
            name = (policy.name, "" if policy.scope == "global" else subject)
            ledger = known.get(name)
            if ledger is None:
                ledger = known[name] = self._ledger(policy, name[1], now_s)
                newcomers += 1
            elif ledger.policy is not policy:
                ledger.follow(policy, policy.on_redis_loss or self._on_loss, now_s)
            if not ledger.active:
                calls.activate(ledger)
            ledgers.append(ledger)
            holding = ledger.requests
            if holding is not None:
                holding.used += asked_requests
                if holding.held < asked_requests:
                    enough = False
            holding = ledger.tokens
            if holding is not None:
                holding.used += asked_tokens
                if holding.held < asked_tokens:
                    enough = False
            places = ledger.places
            if places is not None:
                places.started += 1
                if places.running >= places.held:
                    enough = False
        if newcomers:
            self._sweep(now_s, newcomers)
        if not enough:
            return self._decide_or_wait(ledgers, cost, now_s)
        # From here on it is `_decide`, inlined and reduced to the common case.
        charges: list[Charge] = []
        requests = tokens = None
        requests_left = tokens_left = 0.0
        requests_limit = tokens_limit = 0
        for ledger in ledgers:
            enforce = ledger.policy.enforce
            holding = ledger.requests
            taken_requests = taken_tokens = None
            if holding is not None:
                taken_requests = asked_requests
                held = holding.held = holding.held - asked_requests
                if held < holding.low:
                    calls.early(now_s)
                if enforce:
                    left = holding.level + (now_s - holding.at_s) * holding.rate_per_s
                    left = (left if left < holding.burst else holding.burst) + held
                    if requests is None or left < requests_left:
                        requests, requests_left, requests_limit = holding, left, ledger.requests_limit
            holding = ledger.tokens
            if holding is not None:
                taken_tokens = asked_tokens
                held = holding.held = holding.held - asked_tokens
                if held < holding.low:
                    calls.early(now_s)
                if enforce:
                    left = holding.level + (now_s - holding.at_s) * holding.rate_per_s
                    left = (left if left < holding.burst else holding.burst) + held
                    if tokens is None or left < tokens_left:
                        tokens, tokens_left, tokens_limit = holding, left, ledger.tokens_limit
            places = ledger.places
            if places is not None:
                places.running += 1
            charges.append((ledger, taken_requests, taken_tokens))
        return Decision(
            True,
            charges,
            0.0,
            "",
            "",
            None if requests is None else state_of(requests, requests_left, requests_limit),
            None if tokens is None else state_of(tokens, tokens_left, tokens_limit),
        )

    def settle(self, reservation: Any, used: Usage | None) -> None:
        """Release concurrency and correct the tokens; a second call does nothing.

        :param used: ``None``: give back all that was charged.
        """
        charges: list[Charge] = reservation
        if not charges:
            return
        spent = 0 if used is None else used.total
        for ledger, requests, tokens in charges:
            # A reload may have added or removed parts since.
            places = ledger.places
            if places is not None and places.running > 0:
                places.running -= 1
            holding = ledger.tokens
            if holding is not None and tokens is not None:
                if holding.alone is None:
                    holding.held += tokens - spent
                else:
                    holding.give_back(tokens - spent)
            if used is None and requests is not None and ledger.requests is not None:
                ledger.requests.give_back(requests)
            if not ledger.active:
                self._calls.activate(ledger)
        charges.clear()

    def top_up(self, reservation: Any, tokens: int) -> None:
        """Charge more tokens: from what is held, and the rest as a debt until the next call."""
        charges: list[Charge] = reservation
        for index, (ledger, requests, charged) in enumerate(charges):
            holding = ledger.tokens
            if holding is None or charged is None:
                continue
            holding.used += tokens
            holding.give_back(-tokens)
            charges[index] = (ledger, requests, charged + tokens)
            if not ledger.active:
                self._calls.activate(ledger)

    def usage(self, subjects: Iterable[str], policies: Iterable[str]) -> list[dict[str, Any]]:
        """How much of each limit is used, for people; as that of the limiter ``local``.

        ``shared`` is true while the store is asked: then ``left`` and ``limit`` are those of all gateways.
        """
        now_s = self._clock()
        names = [(policy, subject) for policy in policies for subject in ("", *subjects)]
        found = ((name, self._ledgers.get(name)) for name in names)
        shared = {"shared": not self._calls.alone}
        return [ledger.picture(name[1], now_s) | shared for name, ledger in found if ledger is not None]

    # --- deciding ---

    def _decide_or_wait(
        self, ledgers: list[Ledger], cost: Cost, now_s: float
    ) -> Decision | Deferred[Decision]:
        decision = self._decide(ledgers, cost, now_s, self._calls.alone)
        if decision is not None:
            if not decision.allowed:
                self.from_memory += 1
            return decision
        self.waited += 1
        decided: Deferred[Decision] = Deferred(self._forget)
        self._waiting.append(Waiting(ledgers, cost, now_s, decided))
        for ledger in ledgers:
            self._hurry(ledger)
        if self._expiry is None:
            self._expiry = self._reactor.callLater(WAIT_S, self._expire)
        return decided

    def _decide(self, ledgers: list[Ledger], cost: Cost, now_s: float, alone: bool) -> Decision | None:
        """:return: ``None``: the store must be asked first."""
        gateways = self._calls.others
        chargeable = []
        shadows = []
        refusal: tuple[float, str] | None = None
        refused_by = ""
        unknown = False
        for ledger in ledgers:
            obstacle = ledger.obstacle(cost, now_s, alone, gateways)
            if obstacle is None:
                chargeable.append(ledger)
            elif obstacle is ASK:
                chargeable.append(ledger)
                unknown = True
            elif ledger.policy.enforce:
                chargeable.append(ledger)
                if refusal is None or obstacle > refusal:
                    refusal = obstacle
                    refused_by = ledger.policy.name
            else:
                shadows.append(ledger.policy.name)
        if refusal is not None:
            requests, tokens = tightest(chargeable, now_s)
            return Decision(False, None, refusal[0], refused_by, refusal[1], requests, tokens)
        if unknown:
            return None
        charges = [
            ledger.charge_alone(cost, now_s, gateways) if alone else ledger.charge(cost)
            for ledger in chargeable
        ]
        for shadow in shadows:
            self.shadow_refused[shadow] = self.shadow_refused.get(shadow, 0) + 1
        requests, tokens = tightest(chargeable, now_s)
        return Decision(True, charges, 0.0, "", "", requests, tokens)

    # --- waiting ---

    def _forget(self, decided: Deferred[Decision]) -> None:
        """Its client has left."""
        self._waiting = [one for one in self._waiting if one.decided is not decided]

    def _expire(self) -> None:
        """Decide by what is known here for requests that have waited long enough."""
        self._expiry = None
        now_s = self._clock()
        due = [one for one in self._waiting if now_s - one.since_s >= WAIT_S - 0.001]
        if due:
            self._calls.decide_alone()
            self.late += len(due)
            self._serve(due, now_s, True)
        if self._waiting:
            wait_s = max(0.0, self._waiting[0].since_s + WAIT_S - now_s)
            self._expiry = self._reactor.callLater(wait_s, self._expire)

    def _answered(self, forgot: bool) -> None:
        """A call is over.

        :param forgot: the store has lost its memory: tell it what we remember.
        """
        if forgot:
            for ledger in self._ledgers.values():
                if not ledger.active:
                    self._calls.activate(ledger)
        if self._waiting:
            self._serve(self._waiting, self._clock(), self._calls.alone)
            for one in self._waiting:
                for ledger in one.ledgers:
                    self._hurry(ledger)

    def _serve(self, waiting: list[Waiting], now_s: float, alone: bool) -> None:
        """Decide for waiting requests as far as possible, in the order of arrival."""
        decisions = [(one, self._decide(one.ledgers, one.cost, now_s, alone)) for one in waiting]
        done = {id(one) for one, decision in decisions if decision is not None}
        self._waiting = [one for one in self._waiting if id(one) not in done]
        for one, decision in decisions:
            if decision is not None:
                one.decided.callback(decision)

    def _hurry(self, ledger: Ledger) -> None:
        """Call for ``ledger`` in the reactor's next turn."""
        self._hurried[ledger] = None
        if self._turn is None:
            self._turn = self._reactor.callLater(0, self._call)

    def _call(self) -> None:
        self._turn = None
        hurried, self._hurried = self._hurried, {}
        calls = self._calls
        if calls.possible:
            calls.send(self._parts(hurried, self._clock()))

    def _parts(self, ledgers: Iterable[Ledger], now_s: float) -> list[Part]:
        return parts_of(ledgers, self._waiting, self._calls, now_s)

    # --- ledgers ---

    def _ledger(self, policy: Policy, subject: str, now_s: float) -> Ledger:
        return Ledger(policy, self._names.of(policy, subject), policy.on_redis_loss or self._on_loss, now_s)

    def _sweep(self, now_s: float, newcomers: int) -> None:
        ledgers = self._ledgers
        for _ in range(newcomers):
            for _ in range(min(SWEPT_PER_NEWCOMER, len(ledgers) - self._remembered)):
                name, ledger = ledgers.popitem(last=False)
                if not ledger.says_nothing(now_s):
                    ledgers[name] = ledger
