"""The article's router: its formula to the letter, and one test for each repair."""

from __future__ import annotations

from typing import Any

import pytest
from candidates import ASK, backend, pick, picks
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import ConfigError
from llmgw.routing.adaptive import Adaptive
from llmgw.routing.turns import MOST_REMEMBERED


def article_score(weight: float, in_flight: int, ttft_ms: float, alpha: float) -> float:
    """The formula as printed, with the code's floor."""
    ttft_ms = max(ttft_ms, 10.0)
    return weight / ((in_flight + 1) * (alpha * ttft_ms / 50.0 + (1 - alpha)))


# --- the formula --------------------------------------------------------------------


@given(
    st.floats(0.1, 100),
    st.integers(0, 500),
    st.floats(0, 1e6),
    st.floats(0, 1),
)
def test_the_score_is_the_articles(weight: float, in_flight: int, ttft_ms: float, alpha: float) -> None:
    one = backend("a", weight, in_flight=in_flight, ttft_s=ttft_ms / 1000, ttft_samples=50)
    choice = Adaptive(alpha=alpha).choose(ASK, [one], 0.0)
    assert choice.score == pytest.approx(article_score(weight, in_flight, ttft_ms, alpha))


def test_the_articles_example() -> None:
    """A100, 4090 and Xeon of its picture; by the default, which is its code (alpha 1)."""
    pool = [
        backend("a100", 10.0, in_flight=4, ttft_s=0.042, ttft_samples=50),
        backend("4090", 4.0, in_flight=8, ttft_s=0.110, ttft_samples=50),
        backend("xeon", 1.0, in_flight=1, ttft_s=0.380, ttft_samples=50),
    ]
    choice = Adaptive.from_options({}).choose(ASK, pool, 0.0)
    assert choice.backend.id == "a100"
    assert choice.score == pytest.approx(10 / (5 * 0.84))
    assert choice.why == "score 2.38, best of 3"


def test_without_samples_100_ms_are_assumed() -> None:
    choice = Adaptive().choose(ASK, [backend("a", 10.0)], 0.0)
    assert choice.score == pytest.approx(5.0)


def test_alpha_zero_is_weighted_least_connections() -> None:
    pool = [backend("slow", 2.0, ttft_s=60.0), backend("fast", 1.0, ttft_s=0.01)]
    assert pick(Adaptive(alpha=0.0), pool) == "slow"
    assert pick(Adaptive(alpha=1.0), pool) == "fast"


def test_options_change_the_figures() -> None:
    options = {"baseline_ms": 100, "default_ttft_ms": 400, "floor_ms": 200}
    router = Adaptive.from_options(options)
    assert router.choose(ASK, [backend("a")], 0.0).score == pytest.approx(0.25)
    assert router.choose(ASK, [backend("a", ttft_s=0.001)], 0.0).score == pytest.approx(0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 1.01},
        {"alpha": -0.1},
        {"baseline_ms": 0},
        {"default_ttft_ms": 0},
        {"floor_ms": 0},
        {"streak": 0},
        {"streak": 2.5},
        {"trial_s": 0},
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Adaptive.from_options(options)
    assert [fault.where for fault in caught.value.faults] == list(options)


def test_three_failures_in_a_row_score_zero() -> None:
    pool = [backend("bad", 100.0, failure_streak=3), backend("good", 1.0, in_flight=9)]
    assert picks(Adaptive(), pool, 50) == {"good": 50}
    pool[0].profile.failure_streak = 2
    assert pick(Adaptive(), pool) == "bad"


# --- repair 1: a way back -----------------------------------------------------------


def test_a_backend_at_zero_gets_a_trial_now_and_then() -> None:
    router, pool = Adaptive(), [backend("bad", failure_streak=3), backend("good")]
    chosen = [(now_s, pick(router, pool, float(now_s))) for now_s in range(17)]
    assert [now_s for now_s, name in chosen if name == "bad"] == [5, 10, 15]


def test_a_trial_is_one_request() -> None:
    router, pool = Adaptive(), [backend("bad", failure_streak=4), backend("good")]
    pick(router, pool, 0.0)
    choice = router.choose(ASK, pool, 5.0)
    assert (choice.backend.id, choice.score, choice.why) == ("bad", 0.0, "trial after 4 failures")
    assert [pick(router, pool, 5.0) for _ in range(20)] == ["good"] * 20


def test_a_passed_trial_brings_it_back() -> None:
    router, pool = Adaptive(), [backend("back", 9.0, failure_streak=3), backend("good")]
    pick(router, pool, 0.0)
    pool[0].profile.failure_streak = 0
    assert pick(router, pool, 0.0) == "back"
    pool[0].profile.failure_streak = 3
    assert pick(router, pool, 6.0) == "good"  # its waiting time begins anew


def test_each_has_its_own_trials() -> None:
    router = Adaptive()
    pool = [backend("a", failure_streak=3), backend("b", failure_streak=3), backend("c")]
    pick(router, pool, 0.0)
    assert [pick(router, pool, 5.0) for _ in range(3)] == ["a", "b", "c"]


def test_memory_of_trials_is_bounded() -> None:
    router, good = Adaptive(), backend("good")
    for number in range(2 * MOST_REMEMBERED):
        pick(router, [backend(f"passing-{number}", failure_streak=3), good])
    assert len(router._next_trial_s) <= MOST_REMEMBERED + 1


# --- repair 2: never refuse for ever ------------------------------------------------


def test_all_at_zero_still_serve() -> None:
    pool = [
        backend("worst", 100.0, failure_streak=9),
        backend("slow", failure_streak=4, ttft_s=0.5),
        backend("fast", failure_streak=4, ttft_s=0.05),
    ]
    choice = Adaptive().choose(ASK, pool, 0.0)
    assert (choice.backend.id, choice.score) == ("fast", 0.0)
    assert choice.why == "all 3 at 0, least bad after 4 failures"


def test_the_least_bad_take_turns() -> None:
    pool = [backend("a", failure_streak=3), backend("b", failure_streak=3)]
    assert picks(Adaptive(), pool, 10) == {"a": 5, "b": 5}


# --- repair 3: warm start -----------------------------------------------------------


def test_the_score_is_scaled_by_warmth() -> None:
    pool = [backend("cold", 10.0, ttft_s=0.05, warmth=0.1), backend("warm", 2.0, ttft_s=0.05)]
    choice = Adaptive().choose(ASK, pool, 0.0)
    assert (choice.backend.id, choice.score) == ("warm", pytest.approx(2.0))
    assert Adaptive().choose(ASK, pool[:1], 0.0).score == pytest.approx(1.0)


# --- repair 4: 100 ms is not always modest ------------------------------------------


def test_a_newcomer_is_not_thought_faster_than_the_median() -> None:
    pool = [
        backend("new", in_flight=1),
        backend("x", ttft_s=2.0),
        backend("y", ttft_s=3.0),
        backend("z", ttft_s=9.0),
    ]
    assert pick(Adaptive(), pool) == "x"  # by 100 ms the newcomer would win at ten in flight
    assert Adaptive().choose(ASK, [pool[0], pool[3]], 0.0).score == pytest.approx(1 / 180)


def test_beside_fast_ones_a_newcomer_is_thought_to_take_100_ms() -> None:
    pool = [backend("new", 3.0), backend("old", 1.0, ttft_s=0.04)]
    assert Adaptive().choose(ASK, pool, 0.0).score == pytest.approx(1.5)


def test_several_newcomers_are_guessed_alike() -> None:
    pool = [backend("n1"), backend("n2"), backend("old", in_flight=9, ttft_s=1.0)]
    assert picks(Adaptive(), pool, 10) == {"n1": 5, "n2": 5}


# --- repair 5: equals take turns ----------------------------------------------------


def test_equal_scores_take_turns() -> None:
    pool = [backend("a"), backend("b"), backend("c")]
    assert picks(Adaptive(), pool, 30) == {"a": 10, "b": 10, "c": 10}


def test_without_any_weight_all_take_turns() -> None:
    pool = [backend("a", 0.0), backend("b", 0.0)]
    assert picks(Adaptive(), pool, 10) == {"a": 5, "b": 5}
