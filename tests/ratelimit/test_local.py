"""The limiter that counts in its own process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.task import Clock
from twisted.plugin import IPlugin
from zope.interface.verify import verifyObject

from llmgw.errors import ConfigError
from llmgw.interfaces import CONTRACT, IRateLimiter, IRateLimiterFactory
from llmgw.ratelimit.local import LocalRateLimiter, LocalRateLimiterFactory
from llmgw.values import Cost, LimitState, Policy, Usage

ONE = Cost()


def limiter(**options: Any) -> tuple[LocalRateLimiter, Clock]:
    clock = Clock()
    clock.advance(1000.0)
    return LocalRateLimiter(clock.seconds, **options), clock


def test_provides_its_interface() -> None:
    verifyObject(IRateLimiter, limiter()[0])


def test_without_policies_everybody_passes() -> None:
    limits, _ = limiter()
    decision = limits.admit("k", (), ONE)
    assert decision.allowed
    assert (decision.requests, decision.tokens) == (None, None)
    limits.settle(decision.reservation, None)
    assert len(limits) == 0


@pytest.mark.parametrize(
    ("policy", "cost", "passes", "unit", "retry_after_s"),
    [
        (Policy("p", requests_per_minute=60, burst_s=3), ONE, 3, "requests", 1.0),
        (Policy("p", requests_per_minute=6, burst_s=30), ONE, 3, "requests", 10.0),
        (Policy("p", tokens_per_minute=600, burst_s=10), Cost(tokens=40), 2, "tokens", 2.0),
        (Policy("p", concurrent=2), ONE, 2, "concurrent", 1.0),
        # Less than one request a burst still means one at a time, and no more than the rate.
        (Policy("p", requests_per_minute=0.5, burst_s=1), ONE, 1, "requests", 120.0),
        # Larger than the bucket: once, then in debt.
        (Policy("p", tokens_per_minute=60, burst_s=10), Cost(tokens=15), 1, "tokens", 5.0),
        (Policy("p", requests_per_minute=60, burst_s=10), Cost(requests=15), 1, "requests", 5.0),
    ],
)
def test_each_dimension_refuses_with_the_exact_wait(
    policy: Policy, cost: Cost, passes: int, unit: str, retry_after_s: float
) -> None:
    limits, _ = limiter()
    for _ in range(passes):
        assert limits.admit("k", [policy], cost).allowed
    refused = limits.admit("k", [policy], cost)
    assert (refused.allowed, refused.policy, refused.unit) == (False, "p", unit)
    assert refused.reservation is None
    assert refused.retry_after_s == pytest.approx(retry_after_s)


@pytest.mark.parametrize(
    ("policy", "cost"),
    [
        (Policy("p", requests_per_minute=7, burst_s=60), ONE),
        (Policy("p", tokens_per_minute=1234, burst_s=10), Cost(tokens=70)),
        (Policy("p", tokens_per_minute=1234, burst_s=10), Cost(tokens=10_000)),
    ],
)
def test_whoever_waits_as_told_passes_and_not_before(policy: Policy, cost: Cost) -> None:
    limits, clock = limiter()
    while (decision := limits.admit("k", [policy], cost)).allowed:
        pass
    clock.advance(decision.retry_after_s * 0.99)
    assert not limits.admit("k", [policy], cost).allowed
    clock.advance(decision.retry_after_s * 0.01 + 1e-9)
    assert limits.admit("k", [policy], cost).allowed


def test_longest_wait_is_told_when_several_limits_refuse() -> None:
    limits, _ = limiter()
    policies = [
        Policy("quick", requests_per_minute=60, burst_s=1, concurrent=1),
        Policy("slow", requests_per_minute=2, burst_s=30),
        Policy("middle", tokens_per_minute=60, burst_s=10),
    ]
    assert limits.admit("k", policies, Cost(tokens=10)).allowed
    refused = limits.admit("k", policies, Cost(tokens=10))
    assert (refused.policy, refused.unit) == ("slow", "requests")
    assert refused.retry_after_s == pytest.approx(30.0)


def test_a_refusal_charges_nobody() -> None:
    limits, _ = limiter()
    wide = Policy("wide", requests_per_minute=100, tokens_per_minute=1000, concurrent=10)
    narrow = Policy("narrow", concurrent=1)
    limits.admit("k", [wide, narrow], Cost(tokens=10))
    for _ in range(50):
        assert not limits.admit("k", [wide, narrow], Cost(tokens=10)).allowed
    decision = limits.admit("k", [wide], Cost(tokens=10))
    assert decision.requests is not None
    assert decision.tokens is not None
    assert (decision.requests.remaining, decision.tokens.remaining) == (98, 980)


def test_keys_do_not_share_a_key_policy_and_do_share_a_global_one() -> None:
    limits, _ = limiter()
    own = Policy("own", concurrent=1)
    everyone = Policy("everyone", scope="global", concurrent=2)
    assert limits.admit("a", [own, everyone], ONE).allowed
    assert not limits.admit("a", [own, everyone], ONE).allowed
    assert limits.admit("b", [own, everyone], ONE).allowed
    refused = limits.admit("c", [own, everyone], ONE)
    assert (refused.allowed, refused.policy) == (False, "everyone")


@pytest.mark.parametrize("used", [None, Usage(), Usage(prompt_tokens=3, output_tokens=500)])
def test_concurrency_comes_back_however_the_request_ended(used: Usage | None) -> None:
    limits, _ = limiter()
    policy = Policy("p", concurrent=1)
    for _ in range(20):
        decision = limits.admit("k", [policy], ONE)
        assert decision.allowed
        limits.settle(decision.reservation, used)


def test_settling_twice_gives_back_once() -> None:
    limits, _ = limiter()
    policy = Policy("p", requests_per_minute=60, tokens_per_minute=600, concurrent=2)
    first = limits.admit("k", [policy], Cost(tokens=100))
    limits.admit("k", [policy], Cost(tokens=100))
    for _ in range(3):
        limits.settle(first.reservation, None)
    third = limits.admit("k", [policy], Cost(tokens=100))
    assert third.requests is not None
    assert third.tokens is not None
    assert (third.requests.remaining, third.tokens.remaining) == (58, 400)
    assert not limits.admit("k", [policy], Cost(tokens=100)).allowed


@pytest.mark.parametrize(
    ("used", "requests", "tokens"),
    [
        (None, 60, 600),  # never reached a backend
        (Usage(), 59, 600),
        (Usage(prompt_tokens=20, cached_tokens=15, output_tokens=30), 59, 550),
        (Usage(prompt_tokens=300, output_tokens=900), 59, 0),  # outgrew the estimate: debt
    ],
)
def test_tokens_are_settled_to_what_was_used(used: Usage | None, requests: int, tokens: int) -> None:
    limits, _ = limiter()
    policy = Policy("p", requests_per_minute=60, tokens_per_minute=600)
    decision = limits.admit("k", [policy], Cost(tokens=200))
    assert decision.tokens == LimitState(600, 400, 20.0)
    limits.settle(decision.reservation, used)
    state = limits.admit("k", [policy], Cost(requests=0, tokens=0))
    assert state.requests is not None
    assert state.tokens is not None
    assert (state.requests.remaining, state.tokens.remaining) == (requests, tokens)


def test_debt_is_paid_before_the_next_request_passes() -> None:
    limits, clock = limiter()
    policy = Policy("p", tokens_per_minute=600, burst_s=60)
    decision = limits.admit("k", [policy], Cost(tokens=600))
    limits.settle(decision.reservation, Usage(output_tokens=900))
    refused = limits.admit("k", [policy], Cost(tokens=10))
    assert refused.retry_after_s == pytest.approx(31.0)
    assert refused.tokens == LimitState(600, 0, 90.0)
    clock.advance(31.0)
    assert limits.admit("k", [policy], Cost(tokens=10)).allowed


def test_headers_tell_of_the_tightest_policy_and_stay_within_its_limit() -> None:
    limits, _ = limiter()
    policies = [
        Policy("long", requests_per_minute=60, tokens_per_minute=1000, burst_s=300),
        Policy("tight", scope="global", requests_per_minute=600, tokens_per_minute=900, burst_s=6),
        Policy("streams", concurrent=5),
    ]
    decision = limits.admit("k", policies, Cost(tokens=50))
    assert decision.tokens == LimitState(900, 40, pytest.approx(50 / 15))
    assert decision.requests == LimitState(600, 59, pytest.approx(0.1))
    decision = limits.admit("k", policies[:1], ONE)
    assert decision.requests is not None
    assert decision.requests.remaining == 60


def test_shadow_policy_counts_and_lets_pass() -> None:
    limits, _ = limiter()
    shadow = Policy("trial", requests_per_minute=60, burst_s=2, enforce=False)
    decisions = [limits.admit("k", [shadow], ONE) for _ in range(5)]
    assert all(decision.allowed for decision in decisions)
    assert limits.shadow_refused == {"trial": 3}
    assert decisions[-1].requests is None


def test_shadow_policy_is_charged_as_if_it_were_enforced() -> None:
    limits, _ = limiter()
    shadow = Policy("trial", concurrent=1, enforce=False)
    first = limits.admit("k", [shadow], ONE)
    refused_in_theory = limits.admit("k", [shadow], ONE)
    limits.settle(refused_in_theory.reservation, Usage())
    limits.admit("k", [shadow], ONE)
    assert limits.shadow_refused == {"trial": 2}
    limits.settle(first.reservation, Usage())
    limits.admit("k", [shadow], ONE)
    assert limits.shadow_refused == {"trial": 2}


def test_shadow_policy_does_not_count_what_another_policy_refused() -> None:
    limits, _ = limiter()
    real = Policy("real", concurrent=0)
    shadow = Policy("trial", concurrent=0, enforce=False)
    assert not limits.admit("k", [shadow, real], ONE).allowed
    assert limits.shadow_refused == {}


def test_new_figures_keep_the_level_in_proportion() -> None:
    limits, _ = limiter()
    old = Policy("p", requests_per_minute=60, tokens_per_minute=1000, concurrent=3)
    for _ in range(3):
        limits.admit("k", [old], Cost(requests=10, tokens=250))
    new = Policy("p", requests_per_minute=120, tokens_per_minute=400, concurrent=4)
    decision = limits.admit("k", [new], Cost(requests=0))
    assert decision.requests is not None
    assert decision.tokens is not None
    assert (decision.requests.remaining, decision.tokens.remaining) == (60, 100)
    assert limits.admit("k", [new], ONE).unit == "concurrent"


def test_a_reload_that_changes_nothing_changes_nothing() -> None:
    limits, _ = limiter()
    for _ in range(3):
        assert limits.admit("k", [Policy("p", concurrent=3)], ONE).allowed
    assert not limits.admit("k", [Policy("p", concurrent=3)], ONE).allowed


def test_dimensions_that_come_or_go_while_a_request_runs_are_left_alone() -> None:
    limits, _ = limiter()
    bare = Policy("p", concurrent=9)
    full = Policy("p", concurrent=9, requests_per_minute=60, tokens_per_minute=600)
    before = limits.admit("k", [bare], Cost(tokens=100))
    during = limits.admit("k", [full], Cost(tokens=100))
    limits.settle(before.reservation, Usage(output_tokens=400))
    state = limits.admit("k", [full], Cost(requests=0))
    assert state.tokens is not None
    assert state.tokens.remaining == 500
    limits.admit("k", [bare], ONE)
    limits.settle(during.reservation, None)
    limits.settle(state.reservation, None)
    assert limits.admit("k", [full], Cost(tokens=600)).allowed


def test_idle_ledgers_are_forgotten() -> None:
    limits, clock = limiter(remembered=100)
    policy = Policy("p", requests_per_minute=60, tokens_per_minute=600, concurrent=1)
    for number in range(5000):
        decision = limits.admit(f"k{number}", [policy], Cost(tokens=10))
        limits.settle(decision.reservation, Usage(output_tokens=10))
        clock.advance(0.1)
    assert len(limits) <= 200


def test_ledgers_with_something_to_say_are_kept() -> None:
    limits, _ = limiter(remembered=10)
    policy = Policy("p", concurrent=1)
    assert limits.admit("streaming", [policy], ONE).allowed
    other = Policy("q", requests_per_minute=0.5)
    assert limits.admit("spent", [other], ONE).allowed
    for number in range(500):
        limits.settle(limits.admit(f"k{number}", [policy], ONE).reservation, Usage())
    assert not limits.admit("streaming", [policy], ONE).allowed
    assert not limits.admit("spent", [other], ONE).allowed
    assert len(limits) <= 20


def test_forgetting_never_drops_what_the_same_request_is_charged_to() -> None:
    limits, _ = limiter(remembered=1)
    first, second = Policy("first", concurrent=1), Policy("second", concurrent=9)
    limits.settle(limits.admit("k", [first], ONE).reservation, Usage())
    assert limits.admit("k", [first, second], ONE).allowed
    assert not limits.admit("k", [first, second], ONE).allowed


@pytest.mark.parametrize("jump_s", [86_400.0, -900.0])
def test_limits_recover_from_a_clock_that_jumps(jump_s: float) -> None:
    limits, clock = limiter()
    policy = Policy("p", requests_per_minute=60, burst_s=5)
    for _ in range(5):
        limits.admit("k", [policy], ONE)
    clock.rightNow += jump_s
    passed = sum(limits.admit("k", [policy], ONE).allowed for _ in range(20))
    assert passed == (5 if jump_s > 0 else 0)
    clock.advance(1.0)
    assert [limits.admit("k", [policy], ONE).allowed for _ in range(2)] == [True, False]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(0, 300),
            st.none() | st.integers(0, 600),
            st.floats(0.0, 5.0),
        ),
        max_size=60,
    )
)
def test_nothing_leaks_over_any_run_of_requests(
    runs: list[tuple[str, int, int | None, float]],
) -> None:
    limits, clock = limiter(remembered=0)
    policies = [
        Policy("own", requests_per_minute=60, tokens_per_minute=6000, concurrent=3, burst_s=10),
        Policy("all", scope="global", tokens_per_minute=6000, concurrent=4, burst_s=5),
        Policy("trial", requests_per_minute=6, concurrent=1, enforce=False),
    ]
    open_ones = []
    for subject, tokens, used, wait_s in runs:
        decision = limits.admit(subject, policies, Cost(tokens=tokens))
        assert decision.allowed == (decision.reservation is not None)
        assert decision.allowed == (decision.retry_after_s == 0.0)
        if decision.allowed:
            open_ones.append((decision.reservation, used))
        if len(open_ones) > 2:
            reservation, spent = open_ones.pop(0)
            limits.settle(reservation, None if spent is None else Usage(output_tokens=spent))
        clock.advance(wait_s)
    for reservation, spent in open_ones:
        limits.settle(reservation, None if spent is None else Usage(output_tokens=spent))
    clock.advance(3600.0)
    for number in range(10):
        limits.admit(f"newcomer{number}", [Policy("idle")], ONE)
    # All that the runs left behind was forgotten: nothing was still counted as under way.
    assert all(name[0] == "idle" for name in limits._ledgers)


def test_factory_builds_it() -> None:
    factory = LocalRateLimiterFactory()
    verifyObject(IRateLimiterFactory, factory)
    verifyObject(IPlugin, factory)
    assert (factory.name, factory.contract) == ("local", CONTRACT)
    assert factory.description
    clock = Clock()
    limits = factory.build({}, clock)
    policy = Policy("p", requests_per_minute=60, burst_s=1)
    assert [limits.admit("k", [policy], ONE).allowed for _ in range(2)] == [True, False]
    clock.advance(1.0)
    assert limits.admit("k", [policy], ONE).allowed


def test_factory_names_each_unknown_option() -> None:
    with pytest.raises(ConfigError) as caught:
        LocalRateLimiterFactory().build({"url": "redis://", "burst": 3}, Clock())
    assert [fault.where for fault in caught.value.faults] == ["url", "burst"]


def test_usage_tells_what_is_left_to_those_who_came() -> None:
    limits, clock = limiter()
    policies = [
        Policy("fair", requests_per_minute=60, tokens_per_minute=6000, concurrent=4),
        Policy("all", scope="global", requests_per_minute=600),
    ]
    limits.admit("ada", policies, Cost(1, 1000))
    limits.admit("ada", policies, Cost(1, 1000))
    told = limits.usage(["ada", "nobody"], ["fair", "all", "keys.ada"])
    assert told == [
        {
            "policy": "fair",
            "key": "ada",
            "running": 2,
            "concurrent": 4,
            "requests": {"left": 58, "limit": 60},
            "tokens": {"left": 4000, "limit": 6000},
        },
        {
            "policy": "all",
            "key": None,
            "running": 2,
            "concurrent": None,
            "requests": {"left": 598, "limit": 600},
        },
    ]
    clock.advance(60)
    assert limits.usage(["ada"], ["fair"])[0]["tokens"] == {"left": 6000, "limit": 6000}
