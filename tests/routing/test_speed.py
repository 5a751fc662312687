"""How fast a backend reads, by what it tells and by what is seen."""

from __future__ import annotations

import pytest

from llmgw.routing.pace import Flight, Pace
from llmgw.routing.speed import SEEN_MOST, SEEN_MOST_S, Speed
from llmgw.values import Profile


def speed(profile: Profile | None = None, answers: int = 0) -> Speed:
    """Of a machine that has read so many prompts of 400 tokens, a millisecond each."""
    made = Speed()
    made.of(Pace(), 1.0, profile or Profile())
    for _ in range(answers):
        made.answered(Flight("a", 400.0, 400.0, ttft_s=0.4), 400.0, 0.4, None)
    return made


def at_400(made: Speed) -> float:
    return made.reading.base + 400.0 * made.reading.slope


def test_first_tokens_that_come_later_than_the_server_says_count_within_bounds() -> None:
    told, late, far_too_late = speed(), speed(), speed()
    told.answered(Flight("a", 400.0, 400.0, ttft_s=0.4), 400.0, 0.4, None)
    late.answered(Flight("a", 400.0, 400.0, ttft_s=1.2), 400.0, 0.4, None)
    far_too_late.answered(Flight("a", 400.0, 400.0, ttft_s=500.0), 400.0, 0.4, None)
    assert at_400(told) == pytest.approx(0.4)
    assert at_400(late) == pytest.approx(1.2)
    assert at_400(far_too_late) == pytest.approx(SEEN_MOST * 0.4 + SEEN_MOST_S, rel=0.1)


def test_waiting_for_a_slot_is_not_reading() -> None:
    made = speed()
    made.answered(Flight("a", 400.0, 400.0, ttft_s=3.0, waited=True), 400.0, 0.4, None)
    assert at_400(made) == pytest.approx(0.4)


@pytest.mark.parametrize(("taken_s", "least_s", "most_s"), [(40.0, 0.4, 0.6), (0.001, 0.3, 0.4)])
def test_one_answer_out_of_line_hardly_moves_a_line_that_is_known(
    taken_s: float, least_s: float, most_s: float
) -> None:
    made = speed(answers=20)
    made.answered(Flight("a", 400.0, 400.0), 400.0, taken_s, None)
    assert least_s < at_400(made) < most_s


def test_before_anybody_has_told_whose_speed_it_is_answers_are_only_kept() -> None:
    made = Speed()
    made.answered(Flight("a", 400.0, 400.0, ttft_s=0.4), 400.0, 0.4, 0.02)
    assert made.reading.slope == 0.0
    made.of(Pace(), 1.0, Profile())
    assert at_400(made) == pytest.approx(0.4)


def test_another_weight_lays_the_lines_anew_and_the_same_does_not() -> None:
    made = speed()
    first = made.reading.slope
    made.of(Pace(), 1.0, Profile(prefill_rate=5000.0))
    assert made.reading.slope == first
    made.of(Pace(), 2.0, Profile(prefill_rate=5000.0))
    assert made.reading.slope == pytest.approx(1.0 / 5000.0)


def test_who_waited_and_tells_nothing_teaches_nothing() -> None:
    made = speed()
    made.answered(Flight("a", 400.0, 400.0, ttft_s=3.0, waited=True), 400.0, None, None)
    assert made.reading.samples == 0


def test_what_was_told_of_an_answer_in_one_piece_is_not_weighed_against_what_nobody_saw() -> None:
    made = speed()
    made.answered(Flight("a", 400.0, 400.0, ttft_s=3.0, whole=True), 400.0, 0.4, None)
    assert at_400(made) == pytest.approx(0.4)
