"""Token-bucket arithmetic."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.bucket import SLACK, Bucket

DAY_S = 86_400.0


def test_a_new_bucket_is_full() -> None:
    bucket = Bucket(1.0, 5.0, now_s=100.0)
    assert bucket.refill(100.0) == 5.0


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, -2.0)])
@pytest.mark.parametrize("how", ["new", "resize"])
def test_figures_must_be_positive(how: str, rate: float, burst: float) -> None:
    bucket = Bucket(1.0, 1.0)
    with pytest.raises(ValueError, match="must be above 0"):
        Bucket(rate, burst) if how == "new" else bucket.resize(rate, burst, 0.0)
    assert (bucket.rate_per_s, bucket.burst) == (1.0, 1.0)


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_figures_must_be_finite(figure: float) -> None:
    with pytest.raises(ValueError, match="rate_per_s must be"):
        Bucket(figure, 1.0)
    with pytest.raises(ValueError, match="burst must be"):
        Bucket(1.0, figure)


@pytest.mark.parametrize(
    ("spent", "waited_s", "level"),
    [
        (0.0, 10.0, 10.0),  # never above the burst
        (10.0, 0.0, 0.0),
        (10.0, 1.5, 3.0),
        (10.0, 5.0, 10.0),
        (15.0, 0.0, -5.0),  # debt
        (25.0, 0.0, -10.0),  # its floor
        (25.0, 5.0, 0.0),
        (25.0, 10.0, 10.0),  # a debt is paid by waiting, however long the silence
        (25.0, DAY_S, 10.0),
        (4.0, DAY_S, 10.0),  # a jump forward is worth one full bucket
        (4.0, -DAY_S, 6.0),  # a jump back adds nothing
    ],
)
def test_level_after_spending_and_waiting(spent: float, waited_s: float, level: float) -> None:
    bucket = Bucket(2.0, 10.0, now_s=1000.0)
    bucket.take(spent, 1000.0)
    assert bucket.refill(1000.0 + waited_s) == pytest.approx(level)


def test_refilling_goes_on_at_once_after_the_clock_jumped_back() -> None:
    bucket = Bucket(2.0, 10.0, now_s=DAY_S)
    bucket.take(10.0, DAY_S)
    bucket.refill(0.0)
    assert bucket.refill(2.0) == 4.0


@pytest.mark.parametrize(
    ("level", "amount", "allowed"),
    [
        (10.0, 10.0, True),
        (9.0, 10.0, False),
        (0.0, 0.0, True),
        (-1.0, 0.0, False),
        (1.0, 11.0, True),  # larger than the bucket: enough that nothing is owed
        (0.0, 11.0, False),
        (-1.0, 11.0, False),
    ],
)
def test_what_may_be_taken(level: float, amount: float, allowed: bool) -> None:
    bucket = Bucket(1.0, 10.0)
    bucket.level = level
    assert (bucket.deficit_s(amount, 0.0) == 0.0) is allowed
    assert bucket.level == level


def test_a_charge_that_hits_the_floor_of_debt_gives_back_only_what_it_took() -> None:
    bucket = Bucket(1.0, 10.0)
    bucket.take(5.0, 0.0)
    charged = bucket.take(1000.0, 0.0)
    assert charged == 15.0
    bucket.give_back(charged, 0.0)
    assert bucket.level == 5.0


def test_giving_back_never_overfills() -> None:
    bucket = Bucket(1.0, 10.0)
    charged = bucket.take(6.0, 0.0)
    bucket.give_back(charged, 5.0)
    assert bucket.level == 10.0


@pytest.mark.parametrize(
    ("reserved", "used", "level"),
    [
        (8.0, 3.0, 7.0),
        (3.0, 8.0, 2.0),
        (8.0, 0.0, 10.0),
        (3.0, 500.0, -10.0),
        (500.0, 12.0, -2.0),
        (1.0, -4.0, 10.0),
    ],
)
def test_correction_leaves_the_level_as_if_the_truth_had_been_known(
    reserved: float, used: float, level: float
) -> None:
    bucket = Bucket(1.0, 10.0)
    charged = bucket.take(reserved, 0.0)
    bucket.correct(charged, used, 0.0)
    assert bucket.level == level


def test_correction_is_not_repaid_by_time_that_passed_before_it() -> None:
    bucket = Bucket(1.0, 10.0)
    charged = bucket.take(1.0, 0.0)
    bucket.correct(charged, 9.0, 100.0)
    assert bucket.refill(100.0) == 2.0


def test_seconds_until_full() -> None:
    bucket = Bucket(2.0, 10.0)
    assert bucket.full_in_s(0.0) == 0.0
    bucket.take(15.0, 0.0)
    assert bucket.full_in_s(1.0) == 6.5


@pytest.mark.parametrize(("spent", "level"), [(0.0, 100.0), (5.0, 50.0), (10.0, 0.0), (15.0, -50.0)])
def test_new_figures_keep_the_level_in_proportion(spent: float, level: float) -> None:
    bucket = Bucket(1.0, 10.0)
    bucket.take(spent, 0.0)
    bucket.resize(7.0, 100.0, 0.0)
    assert (bucket.level, bucket.rate_per_s, bucket.burst) == (level, 7.0, 100.0)


rates = st.floats(1e-3, 1e4)
bursts = st.floats(0.1, 1e6)
amounts = st.floats(0.0, 2e6)
steps = st.lists(st.tuples(st.floats(-1e5, 1e5), amounts, st.booleans()), max_size=40)


@given(rates, bursts, steps)
def test_level_stays_between_debt_floor_and_burst_whatever_the_clock_does(
    rate: float, burst: float, moves: list[tuple[float, float, bool]]
) -> None:
    bucket = Bucket(rate, burst)
    now_s = 0.0
    for step_s, amount, back in moves:
        now_s += step_s
        if back:
            bucket.give_back(amount, now_s)
        else:
            bucket.take(amount, now_s)
        assert -burst <= bucket.level <= burst


@given(rates, bursts, st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 1.0)), max_size=60))
def test_never_admits_more_than_burst_and_rate(
    rate: float, burst: float, asks: list[tuple[float, float]]
) -> None:
    bucket = Bucket(rate, burst)
    now_s = admitted = 0.0
    for wait_s, share in asks:
        now_s += wait_s
        amount = share * burst
        if bucket.deficit_s(amount, now_s) == 0.0:
            admitted += bucket.take(amount, now_s)
    assert admitted <= (burst + rate * now_s) * (1 + 1e-9) + SLACK * (len(asks) + 1)


@given(rates, bursts, amounts, amounts, st.floats(0.0, 1e5))
def test_whoever_waits_for_the_told_time_passes(
    rate: float, burst: float, spent: float, amount: float, start_s: float
) -> None:
    bucket = Bucket(rate, burst, start_s)
    bucket.take(spent, start_s)
    wait_s = bucket.deficit_s(amount, start_s)
    # Floats this far from zero are some 1e-11 s apart; the slack covers that up to 1e4 units/s.
    assert bucket.deficit_s(amount, start_s + wait_s + 1e-9) == 0.0
