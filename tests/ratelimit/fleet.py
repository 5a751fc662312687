"""Many gateways on one model of the store: who was admitted when, held against a bucket of the test's own."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

from lease_model import Model, ModelStore
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from llmgw.ratelimit.redis import RedisRateLimiter
from llmgw.values import Cost, Decision, Policy, Usage

STEP_S = 0.002


def excess(times: Sequence[float], rate_per_s: float, amounts: Sequence[float] | None = None) -> float:
    """The most that came in any window beyond ``rate x window``: the burst that somebody really had.

    :param times: when each was admitted, rising.
    """
    most = level = 0.0
    last = times[0] if times else 0.0
    for index, at in enumerate(times):
        level = max(0.0, level - (at - last) * rate_per_s) + (1.0 if amounts is None else amounts[index])
        last = at
        most = max(most, level)
    return most


class Fleet:
    """``count`` gateways with the same policy, each with a way of its own to the store.

    :param arrivals: for each gateway, seconds of each request, rising.
    :ivar admitted: when, of all gateways together.
    """

    def __init__(
        self, count: int, policy: Policy, *, seed: int = 0, rtt_s: float = 0.002, on_loss: str = "local"
    ) -> None:
        self.clock = Clock()
        self.clock.advance(1000.0)
        self.dice = random.Random(seed)
        self.policy = policy
        self.model = Model(self.clock.seconds)
        self.stores = []
        self.limiters = []
        for number in range(count):
            limiter = RedisRateLimiter(self.clock, on_loss=on_loss, dice=random.Random(self.dice.random()))
            store = ModelStore(self.model, self.clock, rtt_s, seed=seed * 100 + number)
            limiter.use_store(store)  # type: ignore[arg-type]
            self.stores.append(store)
            self.limiters.append(limiter)
        self.admitted: list[float] = []
        self.by_gateway = [0] * count
        self.refused = 0
        self.offered = 0
        self.events: list[tuple[float, Callable[[], Any]]] = []
        self.stopped: set[int] = set()

    @property
    def now_s(self) -> float:
        """Since the begin."""
        return self.clock.seconds() - 1000.0

    def at(self, second: float, action: Callable[[], Any]) -> None:
        """Do something then."""
        self.events.append((second, action))

    def at_soon(self, seconds: float, action: Callable[[], Any]) -> None:
        """Do something so long after now; for what happens while it runs."""
        self.clock.callLater(seconds, action)

    def kill(self, number: int) -> None:
        """A gateway is gone, without a word."""
        self.stopped.add(number)
        store = self.stores[number]
        store.up = False
        store.watchers.clear()

    def go(self, up: bool) -> None:
        """The store goes away for all of them, or comes back."""
        for store in self.stores:
            store.gone = not up
            store.go(up)

    def run(self, arrivals: Sequence[Sequence[float]], until_s: float) -> None:
        """Let it happen."""
        queue = [(at, 1, number) for number, times in enumerate(arrivals) for at in times]
        queue += [(at, 0, index) for index, (at, _) in enumerate(self.events)]
        heapq.heapify(queue)
        while self.now_s < until_s:
            self.clock.advance(STEP_S)
            while queue and queue[0][0] <= self.now_s:
                _, kind, which = heapq.heappop(queue)
                if kind == 0:
                    self.events[which][1]()
                elif which not in self.stopped:
                    self.request(which)

    def run_keys(self, rates: Sequence[float], until_s: float) -> list[list[float]]:
        """A key for each rate, its requests spread over the gateways by chance.

        :return: admissions by key.
        """
        admitted: list[list[float]] = [[] for _ in rates]
        arrivals = [poisson(rate, until_s, self.dice) for rate in rates]
        queue = sorted(((at, key) for key, times in enumerate(arrivals) for at in times), reverse=True)

        def decided(decision: Decision, key: int, limiter: RedisRateLimiter) -> None:
            if decision.allowed:
                admitted[key].append(self.now_s)
                limiter.settle(decision.reservation, Usage())

        while self.now_s < until_s:
            self.clock.advance(STEP_S)
            while queue and queue[-1][0] <= self.now_s:
                _, key = queue.pop()
                limiter = self.dice.choice(self.limiters)
                answer = limiter.admit(f"key-{key}", [self.policy], Cost(1, 0))
                if isinstance(answer, Deferred):
                    answer.addCallback(decided, key, limiter).addErrback(left)
                else:
                    decided(answer, key, limiter)
        return admitted

    def request(self, number: int) -> None:
        """One arrives at that gateway."""
        self.offered += 1
        answer = self.limiters[number].admit("key", [self.policy], Cost(1, 0))
        if isinstance(answer, Deferred):
            answer.addCallback(self._decided, number).addErrback(left)
        else:
            self._decided(answer, number)

    def _decided(self, decision: Decision, number: int) -> None:
        if decision.allowed:
            self.admitted.append(self.now_s)
            self.by_gateway[number] += 1
            self.limiters[number].settle(decision.reservation, Usage())
        else:
            self.refused += 1

    def end(self) -> None:
        """Stop all of it; nothing may be left in the clock."""
        for number, limiter in enumerate(self.limiters):
            if number not in self.stopped:
                limiter.stop()


def left(failure: Failure) -> None:
    """Whose answer failed for this reason only."""
    failure.trap(CancelledError)  # it still waited at the end


def poisson(rate_per_s: float, until_s: float, dice: random.Random, from_s: float = 0.0) -> list[float]:
    """Arrivals of independent callers."""
    times = []
    at = from_s
    while rate_per_s > 0.0:
        at += dice.expovariate(rate_per_s)
        if at >= until_s:
            break
        times.append(at)
    return times
