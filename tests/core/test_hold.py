"""How long loads take, how long a request is held for one, and when a failed one is tried again."""

from __future__ import annotations

from math import inf

import pytest

from llmgw.core import hold
from llmgw.core.hold import (
    LOAD_S,
    MAX_BACKOFF_S,
    Bounds,
    LoadTimes,
    Setbacks,
    remaining_s,
    signal_every_s,
)


@pytest.mark.parametrize(
    ("expected_s", "wait_s"),
    [(0.0, 15.0), (10.0, 15.0), (12.0, 18.0), (20.0, 30.0), (30.0, 45.0), (600.0, 45.0)],
)
def test_a_request_is_held_for_half_as_long_again_as_the_load_within_bounds(
    expected_s: float, wait_s: float
) -> None:
    assert Bounds().wait_s(expected_s) == wait_s


def test_signs_of_life_span_the_hold_and_are_five_at_most() -> None:
    assert signal_every_s(45.0, 2.0) * hold.MAX_SIGNALS < 45.0
    assert signal_every_s(45.0, 2.0) == 7.5
    assert signal_every_s(6.0, 2.0) == 2.0


def test_a_load_is_expected_to_take_what_the_last_ones_took() -> None:
    times = LoadTimes()
    assert times.expected_s("m", "a") == times.expected_s("m") == LOAD_S
    times.learn("a", "m", 10.0)
    assert times.expected_s("m", "a") == 10.0
    times.learn("a", "m", 20.0)
    assert times.expected_s("m", "a") == 13.0


def test_what_was_not_seen_is_guessed_from_what_is_alike() -> None:
    times = LoadTimes()
    times.learn("a", "m", 10.0)
    times.learn("b", "m", 4.0)
    times.learn("c", "other", 2.0)
    times.learn("c", "third", 4.0)
    assert times.expected_s("m") == times.expected_s("m", "c") == 4.0  # the model, at its best place
    assert times.expected_s("new", "c") == 3.0  # the place, over its models
    assert times.expected_s("new", "d") == LOAD_S


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "MAX_PAIRS", 2)
    times, setbacks = LoadTimes(), Setbacks(10.0)
    for number, model in enumerate(("x", "y", "z")):
        times.learn("a", model, float(number + 1))
        setbacks.failed("a", model, "no", 0.0)
    assert times.expected_s("y", "a") == 2.0
    assert times.expected_s("x", "a") == 2.5
    assert [setbacks.until_s("a", model) for model in "xyz"] == [-inf, 10.0, 10.0]


def test_the_pause_after_failures_doubles_up_to_five_minutes() -> None:
    setbacks = Setbacks(10.0)
    assert setbacks.until_s("a", "m") == -inf
    assert setbacks.reason("a", "m") == ""
    waits = [setbacks.failed("a", "m", f"try {number}", 100.0) for number in range(7)]
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, MAX_BACKOFF_S, MAX_BACKOFF_S]
    assert setbacks.until_s("a", "m") == 100.0 + MAX_BACKOFF_S
    assert setbacks.until_s("b", "m") == -inf
    assert setbacks.reason("a", "m") == "try 6"
    setbacks.forget("a", "m")
    setbacks.forget("a", "never")
    assert setbacks.failed("a", "m", "again", 0.0) == 10.0


def test_a_pause_that_somebody_else_counted_is_kept_when_it_is_longer() -> None:
    setbacks = Setbacks(10.0)
    assert setbacks.failed("a", "m", "no", 0.0, pause_s=35.0) == 35.0
    assert setbacks.failed("a", "m", "no", 0.0, pause_s=5.0) == 20.0


@pytest.mark.parametrize(
    ("expected_s", "elapsed_s", "left_s"),
    [(20.0, 5.0, 15.0), (20.0, 19.5, 1.0), (20.0, 20.0, 10.0), (20.0, 60.0, 30.0)],
)
def test_a_load_that_is_overdue_is_not_said_to_be_over_at_any_moment(
    expected_s: float, elapsed_s: float, left_s: float
) -> None:
    assert remaining_s(expected_s, elapsed_s) == left_s
