"""The limiter ``redis`` on a model of its script, under a clock of the test's own."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from lease_model import Model, ModelStore
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from llmgw.ratelimit.plugin import RedisRateLimiterFactory
from llmgw.ratelimit.redis import RedisRateLimiter
from llmgw.testing.rate_limits import RateLimiterContract
from llmgw.values import Cost, Decision, Policy, Usage

ONE = Cost()


class TestContract(RateLimiterContract):
    """The contract of all limiters."""

    factory = RedisRateLimiterFactory()
    options: ClassVar[dict[str, Any]] = {}

    def build(self, options: Any, clock: Clock) -> Any:
        limiter = super().build(options, clock)
        limiter.use_store(ModelStore(Model(clock.seconds), clock))
        return limiter

    def pass_time(self, clock: Clock, seconds: float) -> None:
        clock.pump([0.005] * int(seconds / 0.005) + [seconds % 0.005])


# --- one gateway -------------------------------------------------------------------


class Gate:
    """A limiter on a model of the store, and its clock."""

    def __init__(
        self, *policies: Policy, rtt_s: float = 0.002, on_loss: str = "local", remembered: int = 100_000
    ) -> None:
        self.clock = Clock()
        self.clock.advance(1000.0)
        self.model = Model(self.clock.seconds)
        self.store = ModelStore(self.model, self.clock, rtt_s)
        self.policies = policies
        self.limiter = RedisRateLimiter(
            self.clock, on_loss=on_loss, dice=random.Random(1), remembered=remembered
        )
        self.limiter.use_store(self.store)  # type: ignore[arg-type]
        self.pass_time(0.05)

    def pass_time(self, seconds: float) -> None:
        self.clock.pump([0.002] * round(seconds / 0.002))

    def admit(self, cost: Cost = ONE, subject: str = "anna") -> Decision | list[Decision]:
        """The decision, or a list that will hold it."""
        answer = self.limiter.admit(subject, self.policies, cost)
        if isinstance(answer, Decision):
            return answer
        decided: list[Decision] = []
        answer.addCallback(decided.append)
        return decided

    def ask(self, cost: Cost = ONE, subject: str = "anna") -> Decision:
        answer = self.admit(cost, subject)
        if isinstance(answer, Decision):
            return answer
        self.pass_time(0.03)
        return answer[0]


PER_S = Policy("p", requests_per_minute=6000, burst_s=1.0)


def test_requests_of_one_turn_wait_for_one_call() -> None:
    gate = Gate(PER_S)
    before = gate.model.calls
    waiting = [gate.admit() for _ in range(50)]
    assert all(isinstance(answer, list) for answer in waiting)
    gate.pass_time(0.01)
    assert all(answer[0].allowed for answer in waiting if isinstance(answer, list))
    assert gate.model.calls == before + 1
    # From now on something is held.
    gate.pass_time(0.1)
    assert isinstance(gate.admit(), Decision)


def test_who_leaves_while_waiting_takes_nothing() -> None:
    gate = Gate(Policy("c", concurrent=1, requests_per_minute=60))
    answer = gate.limiter.admit("anna", gate.policies, ONE)
    assert isinstance(answer, Deferred)
    answer.addErrback(lambda failure: failure.trap(CancelledError))
    answer.cancel()
    gate.pass_time(0.2)
    first = gate.ask()
    assert first.allowed
    assert not gate.ask().allowed
    gate.limiter.settle(first.reservation, Usage())
    assert gate.ask().allowed


def test_nobody_waits_longer_than_twenty_milliseconds() -> None:
    gate = Gate(PER_S, rtt_s=1.0)
    waiting = gate.admit()
    assert isinstance(waiting, list)
    gate.pass_time(0.018)
    assert waiting == []
    gate.pass_time(0.006)
    assert waiting[0].allowed
    assert gate.limiter.late == 1
    assert gate.limiter.gauges()["llmgw_limiter_late"][1] == 1


def test_a_store_that_refuses_is_done_without_and_told_once(expected_failures: Any) -> None:
    gate = Gate(PER_S)
    assert gate.ask().allowed
    gate.store.refuses = "OOM command not allowed when used memory > 'maxmemory'."
    gate.pass_time(3.0)
    gate.ask()
    gate.pass_time(0.1)
    assert gate.limiter.degraded
    assert gate.limiter.gauges()["llmgw_limiter_degraded"][1] == 1
    failed = gate.limiter.gauges()["llmgw_limiter_calls_failed"][1]
    gate.pass_time(2.0)
    # It is tried twice a second and not more.
    assert gate.limiter.gauges()["llmgw_limiter_calls_failed"][1] - failed <= 6
    assert gate.ask().allowed
    gate.store.refuses = ""
    gate.pass_time(2.0)
    assert not gate.limiter.degraded


def test_a_reload_brings_other_figures() -> None:
    gate = Gate(Policy("p", requests_per_minute=6000, burst_s=1.0, concurrent=5))
    assert gate.ask().allowed
    gate.policies = (Policy("p", requests_per_minute=60, burst_s=3.0, tokens_per_minute=600),)
    passed = sum(gate.ask(Cost(1, 10)).allowed for _ in range(20))
    assert passed == 3
    gate.policies = (Policy("p", concurrent=2),)
    one, two = gate.ask(), gate.ask()
    assert one.allowed
    assert two.allowed
    assert not gate.ask().allowed
    gate.policies = (Policy("p", concurrent=1),)
    gate.limiter.settle(one.reservation, Usage())
    assert not gate.ask().allowed
    gate.limiter.settle(two.reservation, Usage())
    gate.limiter.settle(two.reservation, Usage())
    assert gate.ask().allowed


def test_each_policy_has_its_own_way_without_the_store() -> None:
    gate = Gate(
        Policy("closed", requests_per_minute=600, on_redis_loss="closed"),
        on_loss="open",
    )
    strict = gate.policies
    loose = (Policy("loose", requests_per_minute=6, burst_s=10.0, concurrent=1, tokens_per_minute=60),)
    gate.store.gone = True
    gate.store.go(False)
    gate.policies = loose
    decisions = [gate.ask(Cost(1, 1000)) for _ in range(20)]
    assert all(decision.allowed for decision in decisions)
    gate.policies = strict
    refused = gate.ask()
    assert not refused.allowed
    assert (refused.retry_after_s, refused.unit) == (1.0, "requests")
    gate.policies = (Policy("p", concurrent=2, on_redis_loss="closed"),)
    assert gate.ask().unit == "concurrent"
    gate.policies = (Policy("q", concurrent=8, on_redis_loss="local"),)
    assert [gate.ask().allowed for _ in range(3)] == [True, True, False]


def test_tokens_used_without_the_store_are_told_to_it_afterwards() -> None:
    gate = Gate(Policy("t", tokens_per_minute=60_000, burst_s=1.0))  # 1,000 a second
    held = gate.ask(Cost(1, 100))
    gate.limiter.settle(held.reservation, Usage(100))
    gate.pass_time(3.0)
    gate.store.gone = True
    gate.store.go(False)
    for _ in range(10):
        decision = gate.ask(Cost(1, 100))
        if decision.allowed:
            gate.limiter.settle(decision.reservation, Usage(40, 0, 40))
        gate.pass_time(0.1)
    gate.store.gone = False
    gate.store.go(True)
    gate.pass_time(0.5)
    [bucket] = gate.model.buckets.values()
    assert not gate.limiter.degraded
    assert bucket[0] < 1000


def test_policies_that_only_count() -> None:
    gate = Gate(
        Policy("real", requests_per_minute=600, burst_s=1.0),
        Policy("shadow", requests_per_minute=120, burst_s=1.0, enforce=False),
    )
    decisions = [gate.ask() for _ in range(10)]
    assert all(decision.allowed for decision in decisions)
    assert gate.limiter.shadow_refused["shadow"] >= 7
    assert decisions[0].requests is not None
    assert decisions[0].requests.limit == 600


def test_what_is_used_is_shown_to_people() -> None:
    gate = Gate(Policy("p", requests_per_minute=600, burst_s=1.0, concurrent=3, tokens_per_minute=6000))
    gate.ask(Cost(1, 5))
    [told] = gate.limiter.usage(["anna", "bert"], ["p", "q"])
    assert told["key"] == "anna"
    assert told["shared"] is True
    assert told["running"] == 1
    assert told["requests"] == {"left": 9, "limit": 10}
    assert 95 <= told["tokens"]["left"] <= 99


def test_idle_ledgers_are_forgotten() -> None:
    gate = Gate(PER_S, remembered=10)
    for number in range(50):
        decision = gate.ask(subject=f"key-{number}")
        gate.limiter.settle(decision.reservation, Usage())
    gate.pass_time(5.0)
    for number in range(50, 70):
        gate.ask(subject=f"key-{number}")
    assert len(gate.limiter) <= 35
    gate.pass_time(5.0)
    calls = gate.model.calls
    gate.pass_time(5.0)
    assert gate.model.calls == calls  # nobody asks, and nobody calls


def test_names_in_the_store_tell_no_key() -> None:
    gate = Gate(Policy("keys.anna", requests_per_minute=600), Policy("all", scope="global", concurrent=5))
    gate.ask()
    names = [*gate.model.buckets, *gate.model.places]
    assert names
    assert not any("anna" in name for name in names)
    assert "llmgw:rl:{all}:all:concurrent" in names
    other = Gate(Policy("keys.anna", requests_per_minute=600))
    other.ask()
    assert list(other.model.buckets) == list(gate.model.buckets)


def test_stopping_gives_everything_back_and_keeps_nobody_waiting() -> None:
    gate = Gate(Policy("p", requests_per_minute=6000, burst_s=1.0, concurrent=50))
    for _ in range(20):
        gate.limiter.settle(gate.ask().reservation, Usage())
        gate.pass_time(0.01)
    waiting = gate.limiter.admit("bert", gate.policies, ONE)
    assert isinstance(waiting, Deferred)
    failures: list[Any] = []
    waiting.addErrback(failures.append)
    stopped: list[Any] = []
    gate.limiter.stop().addCallback(stopped.append)
    assert len(failures) == 1
    gate.pass_time(0.1)
    assert stopped
    assert not any(gate.model.places.values())
    assert gate.clock.getDelayedCalls() == []
