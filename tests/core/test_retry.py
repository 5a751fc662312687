"""The retry budget keeps its promise in every window; waits are spread."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.core.retry import RetryBudget, backoff_s, retry_after, spread

MOVES = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=60)


@settings(max_examples=200)
@given(MOVES)
def test_amplification_is_at_most_one_point_two(moves: list[tuple[float, int, int]]) -> None:
    """Whatever the traffic, however fast attempts fail: retries <= 0.2 x requests."""
    budget, now_s, requests, retries = RetryBudget(floor=0), 0.0, 0, 0
    for pause_s, asked, wanted in moves:
        now_s += pause_s
        requests += asked
        for _ in range(asked):
            budget.request(now_s)
        for _ in range(wanted):
            if budget.take(now_s):
                retries += 1
                budget.done()
        assert requests + retries <= 1.2 * requests + 1e-9


def test_a_total_outage_costs_a_fifth() -> None:
    """100 requests a second for a minute, each failing at once and asking twice more."""
    budget, sent, requests = RetryBudget(), 0, 0
    for tick in range(6000):
        now_s = tick / 100
        requests += 1
        sent += 1
        budget.request(now_s)
        for _ in range(2):
            if budget.take(now_s):
                sent += 1
                budget.done()
    assert 1.15 < sent / requests <= 1.2


def test_few_requests_may_still_retry() -> None:
    budget = RetryBudget()
    budget.request(0.0)
    assert [budget.take(0.0) for _ in range(5)] == [True, True, True, False, False]


def test_the_floor_counts_what_is_in_flight() -> None:
    budget = RetryBudget()
    for _ in range(3):
        assert budget.take(0.0)
    assert not budget.take(20.0)  # a new window, but three are still under way
    budget.done()
    assert budget.take(20.0)


def test_the_floor_is_no_loophole_for_attempts_that_fail_at_once() -> None:
    budget, granted = RetryBudget(), 0
    for _ in range(1000):
        if budget.take(0.0):
            granted += 1
            budget.done()
    assert granted == 3


def test_above_the_floor_the_ratio_rules() -> None:
    budget = RetryBudget()
    for _ in range(100):
        budget.request(0.0)
    assert sum(budget.take(0.0) for _ in range(100)) == 20


@pytest.mark.parametrize(("attempt", "most_s"), [(1, 0.125), (2, 0.25), (9, 0.25)])
def test_backoff_is_spread_between_its_bounds(attempt: int, most_s: float) -> None:
    dice = random.Random(1)
    waits = [backoff_s(attempt, dice) for _ in range(2000)]
    assert 0.025 <= min(waits) < 0.03
    assert most_s * 0.98 < max(waits) <= most_s


def test_backoff_bounds_may_be_close() -> None:
    assert backoff_s(1, random.Random(1), 0.1, 0.1) == pytest.approx(0.1)


def test_a_spread_wait_is_never_too_short() -> None:
    answers = [spread(300.0, random.Random(seed)) for seed in range(200)]
    assert 300 <= min(answers) <= 305
    assert 370 <= max(answers) <= 375


@pytest.mark.parametrize(
    ("seconds", "least", "most"),
    [(-5, 1, 1.25), (0, 1, 1.25), (10, 10, 12.5), (47, 47, 58.75), (60, 48, 60), (1e9, 48, 60)],
)
def test_retry_after_is_jittered_within_one_and_sixty(seconds: float, least: float, most: float) -> None:
    dice = random.Random(1)
    answers = [retry_after(seconds, dice) for _ in range(2000)]
    assert least <= min(answers)
    assert max(answers) <= most
    assert max(answers) - min(answers) > 0.2 * least
