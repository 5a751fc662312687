"""The breaker: the table, the ways round it that must be closed, and time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.breaker import TRANSITIONS, Breaker, BreakerRules, State, Tally, Trigger, ramp

STEADY = BreakerRules(jitter=0.0)


def breaker(rules: BreakerRules = STEADY) -> Breaker:
    return Breaker(rules, random.Random(1))


def fail(subject: Breaker, now_s: float, times: int = 1, **how: Any) -> None:
    for _ in range(times):
        subject.failure(now_s, subject.started(now_s), **how)


def succeed(subject: Breaker, now_s: float, times: int = 1) -> None:
    for _ in range(times):
        subject.success(now_s, subject.started(now_s))


def half_open(rules: BreakerRules = STEADY) -> Breaker:
    """Opened at 0, half-open at 5."""
    subject = breaker(rules)
    fail(subject, 0.0, rules.consecutive)
    assert subject.current(5.0) is State.HALF_OPEN
    return subject


# --- the table ----------------------------------------------------------------------


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("trigger", Trigger)
def test_an_illegal_transition_raises_and_changes_nothing(state: State, trigger: Trigger) -> None:
    subject = breaker()
    subject.state = state
    if (state, trigger) in TRANSITIONS:
        subject._transition(trigger, 0.0)
        assert subject.state is TRANSITIONS[state, trigger]
    else:
        with pytest.raises(KeyError):
            subject._transition(trigger, 0.0)
        assert subject.state is state


# --- opening ------------------------------------------------------------------------


def test_five_failures_in_a_row_open() -> None:
    subject = breaker()
    fail(subject, 0.0, 4)
    assert subject.allows(0.0)
    fail(subject, 0.0)
    assert subject.state is State.OPEN
    assert not subject.allows(0.0)


def test_a_success_between_starts_the_row_anew() -> None:
    subject = breaker()
    fail(subject, 0.0, 4)
    succeed(subject, 0.0)
    fail(subject, 0.0, 4)
    assert subject.state is State.CLOSED


def test_half_of_twenty_open() -> None:
    subject = breaker()
    for _ in range(9):
        succeed(subject, 0.0)
        fail(subject, 0.0)
    succeed(subject, 0.0)
    assert subject.state is State.CLOSED  # 19 results
    fail(subject, 0.0)
    assert subject.state is State.OPEN


def test_under_half_does_not_open() -> None:
    subject = breaker()
    for _ in range(100):
        succeed(subject, 0.0, 2)
        fail(subject, 0.0)
    assert subject.state is State.CLOSED


def test_a_success_never_opens() -> None:
    subject = breaker(BreakerRules(consecutive=100))
    fail(subject, 0.0, 10)
    succeed(subject, 0.0, 10)  # half of twenty, and getting better
    assert subject.state is State.CLOSED


def test_old_results_are_forgotten() -> None:
    subject = breaker(BreakerRules(consecutive=100))
    fail(subject, 0.0, 19)
    fail(subject, 31.0)
    assert subject.state is State.CLOSED


def test_the_pool_may_not_be_able_to_spare_it() -> None:
    subject = breaker()
    fail(subject, 0.0, 50, may_open=False)
    assert subject.state is State.CLOSED
    fail(subject, 0.0)
    assert subject.state is State.OPEN


def test_results_from_before_the_opening_change_nothing() -> None:
    """S-CB-3: hundreds of requests were under way when it opened."""
    subject = breaker()
    late = [subject.started(0.0) for _ in range(100)]
    fail(subject, 0.0, 5)
    for ticket in late[:50]:
        subject.failure(6.0, ticket)
    assert subject.current(6.0) is State.HALF_OPEN
    for ticket in late[50:]:
        subject.success(6.0, ticket)
    assert subject.current(6.0) is State.HALF_OPEN
    assert subject.allows(6.0)


def test_a_failure_while_open_is_no_second_opening() -> None:
    """In panic requests go to open ones too."""
    subject = breaker()
    fail(subject, 0.0, 5)
    fail(subject, 1.0, 20)
    succeed(subject, 1.0, 20)
    assert subject.state is State.OPEN
    assert subject.opens_again_s(1.0) == pytest.approx(4.0)


# --- times --------------------------------------------------------------------------


def test_openings_double_up_to_the_cap() -> None:
    subject, now_s, lengths = breaker(), 0.0, []
    fail(subject, now_s, 5)
    for _ in range(6):
        lengths.append(subject.opens_again_s(now_s))
        now_s += lengths[-1]
        fail(subject, now_s)  # the trial
    assert lengths == pytest.approx([5, 10, 20, 40, 60, 60])


def test_openings_are_held_against_it_for_ten_minutes() -> None:
    subject = breaker()
    fail(subject, 0.0, 5)
    assert subject.current(5.0) is State.HALF_OPEN
    fail(subject, 600.0)
    assert subject.opens_again_s(600.0) == pytest.approx(5.0)


def test_jitter_is_a_fifth_either_way() -> None:
    lengths = []
    for seed in range(200):
        subject = Breaker(BreakerRules(), random.Random(seed))
        fail(subject, 0.0, 5)
        lengths.append(subject.opens_again_s(0.0))
    assert 4.0 <= min(lengths) < 4.2
    assert 5.8 < max(lengths) <= 6.0


def test_thousands_of_openings_do_not_overflow() -> None:
    subject = breaker(BreakerRules(jitter=0.0, consecutive=1, open_s=1e-9))
    for number in range(3000):
        fail(subject, number * 1e-1)
        subject.current(number * 1e-1 + 0.05)
    assert subject.opens_again_s(300.0) <= 60.0


def test_nothing_is_closed_off_while_closed() -> None:
    assert breaker().opens_again_s(1.0) == 0.0


# --- half open ----------------------------------------------------------------------


def test_half_open_lets_one_through() -> None:
    subject = half_open()
    assert subject.allows(5.0)
    subject.started(5.0)
    assert not any(subject.allows(5.0 + n / 10) for n in range(500))


def test_one_failure_opens_again() -> None:
    subject = half_open()
    fail(subject, 5.0)
    assert subject.state is State.OPEN
    assert subject.opens_again_s(5.0) == pytest.approx(10.0)


def test_three_trials_lead_to_slow_start() -> None:
    subject = half_open()
    succeed(subject, 5.0, 2)
    assert subject.state is State.HALF_OPEN
    succeed(subject, 5.0)
    assert subject.state is State.SLOW_START


def test_a_first_token_passes_a_trial_once() -> None:
    subject = half_open()
    ticket = subject.started(5.0)
    subject.first_token(6.0, ticket)
    assert subject.allows(6.0)
    subject.success(60.0, ticket)  # the same request: no second success
    succeed(subject, 60.0)
    assert subject.state is State.HALF_OPEN
    succeed(subject, 60.0)
    assert subject.state is State.SLOW_START


def test_a_first_token_means_nothing_outside_a_trial() -> None:
    subject = breaker()
    fail(subject, 0.0, 4)
    subject.first_token(0.0, subject.started(0.0))
    fail(subject, 0.0)
    assert subject.state is State.OPEN


def test_an_aborted_trial_frees_its_place() -> None:
    """S-CB-4."""
    subject = half_open()
    before = subject.started(4.0)
    ticket = subject.started(5.0)
    subject.neutral(before)
    assert not subject.allows(5.0)
    subject.neutral(ticket)
    assert subject.allows(5.0)
    assert subject.state is State.HALF_OPEN


def test_without_traffic_it_stays_open_to_trials() -> None:
    """S-CB-4."""
    subject = half_open()
    assert subject.current(50_000.0) is State.HALF_OPEN
    assert subject.allows(50_000.0)


def test_a_trial_that_stays_silent_does_not_bar_the_way_for_ever() -> None:
    subject = half_open()
    silent = subject.started(5.0)
    assert not subject.allows(64.9)
    assert subject.allows(65.0)
    subject.started(65.0)
    subject.success(66.0, silent)  # not the trial any more
    assert not subject.allows(66.0)


def test_probes_stand_for_all_trials_but_the_last() -> None:
    """S-HLT-2: a healthy health endpoint is not enough."""
    subject = half_open()
    for _ in range(10):
        subject.probed(5.0)
    assert subject.state is State.HALF_OPEN
    succeed(subject, 5.0)
    assert subject.state is State.SLOW_START


def test_probes_mean_nothing_otherwise() -> None:
    subject = breaker()
    fail(subject, 0.0, 5)
    subject.probed(1.0)
    assert subject.state is State.OPEN


# --- slow start ---------------------------------------------------------------------


def test_warmth_climbs_from_a_tenth_to_one_in_thirty_seconds() -> None:
    subject = half_open()
    assert subject.warmth(5.0) == 1.0  # a trial is bounded by its number, not by weight
    succeed(subject, 10.0, 3)
    assert subject.warmth(10.0) == pytest.approx(0.1)
    assert subject.warmth(25.0) == pytest.approx(0.55)
    assert subject.warmth(40.0) == 1.0
    assert subject.state is State.CLOSED


def test_slow_start_forgives_old_failures_but_not_new_ones() -> None:
    subject = half_open()
    succeed(subject, 5.0, 3)
    fail(subject, 6.0, 4)
    assert subject.state is State.SLOW_START
    succeed(subject, 6.0)
    fail(subject, 6.0, 5)
    assert subject.state is State.OPEN


def test_no_slow_start_if_none_is_wanted() -> None:
    subject = half_open(BreakerRules(jitter=0.0, slow_start_s=0.0))
    succeed(subject, 5.0, 3)
    assert subject.warmth(5.0) == 1.0
    assert subject.current(5.0) is State.CLOSED


@pytest.mark.parametrize(("elapsed_s", "warmth"), [(-1, 0.1), (0, 0.1), (15, 0.55), (30, 1), (99, 1)])
def test_ramp(elapsed_s: float, warmth: float) -> None:
    assert ramp(elapsed_s, 30.0, 0.1) == pytest.approx(warmth)


# --- the only one of its pool -------------------------------------------------------


def test_the_only_one_never_opens_on_failures() -> None:
    subject = breaker()
    fail(subject, 0.0, 200, alone=True)
    assert subject.allows(0.0, alone=True)
    assert subject.state is State.CLOSED


def test_the_only_one_pauses_a_second_when_refused() -> None:
    subject = breaker()
    fail(subject, 0.0, alone=True, refused=True)
    assert not subject.allows(0.9, alone=True)
    assert subject.allows(1.0, alone=True)


def test_the_only_one_is_tried_by_one_until_it_is_seen_to_listen() -> None:
    """S-CB-3 with a single backend that comes back slowly."""
    subject = breaker()
    fail(subject, 0.0, alone=True, refused=True)
    assert subject.allows(1.0, alone=True)
    subject.started(1.0)
    assert not subject.allows(1.5, alone=True)
    assert subject.allows(2.0, alone=True)  # not refused for a second: it listens


def test_the_only_one_needs_one_success() -> None:
    subject = breaker()
    fail(subject, 0.0, alone=True, refused=True)
    succeed(subject, 1.0)
    assert subject.state is State.SLOW_START


def test_refusals_of_the_only_one_are_not_held_against_it() -> None:
    subject = breaker()
    for second in range(0, 100, 2):
        fail(subject, float(second), alone=True, refused=True)
        assert subject.allows(second + 1.0, alone=True)
    succeed(subject, 100.0)
    fail(subject, 200.0, 5)
    assert subject.opens_again_s(200.0) == pytest.approx(5.0)


def test_one_left_alone_while_open_is_asked_again() -> None:
    """Its pool shrank: an opinion no longer counts, a refusal counts for a second."""
    opinion = breaker()
    fail(opinion, 0.0, 5)
    assert opinion.allows(0.0, alone=True)
    refused = breaker()
    fail(refused, 0.0, 5, refused=True)
    assert not refused.allows(0.5, alone=True)
    assert refused.allows(1.0, alone=True)
    fail(refused, 1.0, alone=True, refused=True)
    assert not refused.allows(1.5, alone=True)


# --- rules and counting -------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("consecutive", 0),
        ("ratio_min", 0),
        ("successes", 0),
        ("fall", 0),
        ("rise", 0),
        ("window_s", 0.0),
        ("open_s", -1.0),
        ("open_cap_s", 0.0),
        ("decay_s", float("nan")),
        ("lone_open_s", 0.0),
        ("slow_start_floor", 0.0),
        ("slow_start_floor", 1.1),
        ("ratio", 1.5),
        ("jitter", -0.1),
        ("max_ejected", 2.0),
        ("panic", -1.0),
        ("slow_start_s", -1.0),
    ],
)
def test_senseless_rules_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        BreakerRules(**{field: value})  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.floats(0, 25), st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=80)
)
def test_the_tally_is_the_sum_over_nine_tenths_to_all_of_its_window(
    events: list[tuple[float, int, int, bool]],
) -> None:
    tally, now_s, kept = Tally(10.0), 0.0, []
    for pause_s, total, marked, directly in events:
        now_s += pause_s
        if directly:  # as hot paths do it
            if now_s >= tally.ends_s:
                tally.roll(now_s)
            tally.total += total
            tally.marked += marked
        else:
            tally.add(now_s, total, marked)
        kept.append((int(now_s // 1.0), total, marked))
        kept = [each for each in kept if each[0] > kept[-1][0] - 10]
        assert tally.total == sum(each[1] for each in kept)
        assert tally.marked == sum(each[2] for each in kept)


def test_a_cleared_tally_counts_on_within_its_step() -> None:
    tally = Tally(10.0)
    tally.add(0.1, 5, 5)
    tally.clear()
    tally.add(0.2, 1, 0)
    tally.roll(5.0)
    assert (tally.total, tally.marked) == (1, 0)
    tally.roll(10.0)
    assert (tally.total, tally.marked) == (0, 0)


def test_the_tally_moves_in_steps() -> None:
    tally = Tally(10.0)
    tally.add(0.0, 2, 1)
    tally.add(0.5, 1, 0)
    tally.add(5.0, 1, 1)
    assert (tally.total, tally.marked) == (4, 2)
    tally.roll(9.9)
    assert tally.total == 4
    tally.roll(10.0)
    assert (tally.total, tally.marked) == (1, 1)
    tally.clear()
    assert (tally.total, tally.marked) == (0, 0)
