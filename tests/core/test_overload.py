"""The ladder: which figures name which level, how it is entered and left."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.overload import CALM_S, Ladder, Level, OverloadRules

BEAT_S = 0.25


def climb(lags: Iterable[float], memory: float | None = None) -> Ladder:
    ladder = Ladder(OverloadRules())
    for number, lag_s in enumerate(lags):
        ladder.beat(number * BEAT_S, lag_s, memory)
    return ladder


@pytest.mark.parametrize(
    ("lag_s", "level"),
    [
        (0.0, Level.CALM),
        (0.1, Level.CALM),
        (0.11, Level.SHEDDING),
        (0.26, Level.REFUSING),
        (1.01, Level.CLOSED),
        (60.0, Level.CLOSED),
    ],
)
def test_lag_names_a_level(lag_s: float, level: Level) -> None:
    ladder = climb([lag_s] * 2)
    assert (ladder.level, ladder.lag_s) == (level, lag_s)


@pytest.mark.parametrize(
    ("memory", "level"),
    [
        (None, Level.CALM),
        (0.84, Level.CALM),
        (0.85, Level.SHEDDING),
        (0.92, Level.REFUSING),
        (0.95, Level.CLOSED),
        (0.98, Level.CUTTING),
        (1.3, Level.CUTTING),
    ],
)
def test_memory_names_a_level_at_once(memory: float | None, level: Level) -> None:
    ladder = climb([0.0], memory)
    assert (ladder.level, ladder.memory) == (level, memory)


def test_the_higher_figure_holds() -> None:
    assert climb([0.3] * 2, 0.86).level == Level.REFUSING
    assert climb([0.11] * 2, 0.96).level == Level.CLOSED


def test_it_knows_what_memory_has_to_do_with_it() -> None:
    assert [
        climb([lag_s] * 2, memory).by_memory for lag_s, memory in ((0.3, 0.2), (0.0, 0.81), (0.3, None))
    ] == [
        False,
        True,
        False,
    ]


def test_one_late_beat_is_over_when_it_is_seen() -> None:
    assert climb([0.0, 0.0, 5.0, 0.0, 0.0]).level == Level.CALM
    assert climb([5.0]).level == Level.CALM
    assert climb([0.0, 5.0, 0.0, 0.3]).level == Level.REFUSING


def test_late_beats_far_apart_do_not_add_up() -> None:
    assert climb([5.0, *[0.0] * 7, 5.0]).level == Level.CALM


def test_a_level_is_left_after_calm_and_no_earlier() -> None:
    ladder = climb([2.0] * 2)
    begun_s = now_s = BEAT_S
    while ladder.level is Level.CLOSED:
        now_s += BEAT_S
        ladder.beat(now_s, 0.0, None)
    assert (ladder.level, now_s - begun_s) == (Level.CALM, CALM_S)


def test_it_falls_only_as_far_as_the_calm_was_calm() -> None:
    ladder = climb([2.0] * 2)
    for number in range(2, 2 + int(CALM_S / BEAT_S)):
        ladder.beat(number * BEAT_S, 0.3 if number == 5 else 0.0, None)
    assert ladder.level == Level.REFUSING


def test_a_late_beat_holds_the_level() -> None:
    ladder = climb([0.3] * 2)
    for number in range(2, 100):
        ladder.beat(number * BEAT_S, 0.3 if number % 5 == 0 else 0.0, None)
    assert ladder.level == Level.REFUSING


def test_memory_must_fall_five_points_below() -> None:
    ladder = climb([0.0], 0.93)
    for number in range(1, 40):
        ladder.beat(number * BEAT_S, 0.0, 0.88)
    assert ladder.level == Level.REFUSING
    for number in range(40, 60):
        ladder.beat(number * BEAT_S, 0.0, 0.79)
    assert ladder.level == Level.CALM


def test_memory_that_is_no_more_known_does_not_hold() -> None:
    ladder = climb([0.0], 0.99)
    for number in range(1, 12):
        ladder.beat(number * BEAT_S, 0.0, None)
    assert ladder.level == Level.CALM


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.none() | st.floats(0, 1.2)),
        max_size=60,
    )
)
def test_calm_always_ends_in_calm(figures: list[tuple[float, float | None]]) -> None:
    ladder = Ladder(OverloadRules())
    now_s = 0.0
    for lag_s, memory in figures:
        now_s += BEAT_S
        ladder.beat(now_s, lag_s, memory)
    for _ in range(2 * int(CALM_S / BEAT_S) + 1):
        now_s += BEAT_S
        ladder.beat(now_s, 0.0, 0.0)
    assert ladder.level is Level.CALM
