"""The live picture: means that do not drift, and ``None`` for what is not known."""

from __future__ import annotations

import random
from math import inf, nan
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.profile import SHARE, WINDOW, LiveProfile
from llmgw.values import HealthReport, Usage


def test_nothing_is_known_at_first() -> None:
    live = LiveProfile()
    view = live.view
    assert (view.ttft_s, view.ttft_samples, view.token_rate, view.prefill_rate) == (None, 0, None, None)
    assert live.duration_s is None


def test_the_view_is_one_object_for_life() -> None:
    live = LiveProfile()
    view = live.view
    live.started(1.0)
    live.first_token(0.1, 2.0)
    live.ended(3.0)
    assert live.view is view
    assert view.updated_s == 3.0


def test_in_flight_goes_up_and_down() -> None:
    live = LiveProfile()
    live.started(1.0)
    live.started(1.0)
    assert live.view.in_flight == 2
    live.ended(2.0)
    assert live.view.in_flight == 1


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=170))
def test_ttft_is_the_mean_of_the_last_fifty(samples: list[float]) -> None:
    live = LiveProfile()
    for sample in samples:
        live.first_token(sample, 0.0)
    window = samples[-WINDOW:]
    assert live.view.ttft_samples == len(window)
    assert live.view.ttft_s == pytest.approx(fmean(window), abs=1e-9)


def test_the_mean_does_not_drift() -> None:
    live, dice = LiveProfile(), random.Random(1)
    for _ in range(20_000):
        live.first_token(dice.choice((1e-6, 1e5)), 0.0)
    for _ in range(WINDOW):
        live.first_token(0.25, 0.0)
    assert live.view.ttft_s == 0.25


def test_a_negative_sample_counts_as_zero() -> None:
    live = LiveProfile()
    live.first_token(-0.5, 0.0)
    assert live.view.ttft_s == 0.0


def test_the_streak_grows_and_only_a_whole_answer_clears_it() -> None:
    live = LiveProfile()
    live.failed(1.0)
    live.failed(2.0)
    live.first_token(0.1, 3.0)
    assert live.view.failure_streak == 2
    live.succeeded(4.0, 5.0)
    assert live.view.failure_streak == 0
    assert live.duration_s == 4.0


def test_durations_and_rates_are_exponential_means() -> None:
    live = LiveProfile()
    live.succeeded(10.0, 0.0)
    live.succeeded(20.0, 0.0)
    assert live.duration_s == pytest.approx(10.0 + SHARE * 10.0)
    live.measured(0.0, token_rate=100.0)
    live.measured(0.0, token_rate=50.0)
    assert live.view.token_rate == pytest.approx(100.0 - SHARE * 50.0)


def test_prompt_rate_counts_uncached_tokens_only() -> None:
    live = LiveProfile()
    live.measured(1.0, usage=Usage(prompt_tokens=1000, cached_tokens=800), prompt_s=0.5)
    assert live.view.prefill_rate == pytest.approx(400.0)


def test_a_tiny_prompt_hardly_moves_the_prompt_rate() -> None:
    live = LiveProfile()
    live.measured(1.0, usage=Usage(prompt_tokens=2000), prompt_s=2.0)
    live.measured(1.0, usage=Usage(prompt_tokens=3), prompt_s=0.03)  # 100 tokens/s, all overhead
    assert live.view.prefill_rate == pytest.approx(1000.0, rel=0.05)


@pytest.mark.parametrize("rate", [0.0, -1.0, inf, nan])
def test_senseless_rates_are_left_out(rate: float) -> None:
    live = LiveProfile()
    live.measured(1.0, token_rate=rate, usage=Usage(prompt_tokens=10), prompt_s=rate)
    assert live.view.token_rate is None
    assert live.view.prefill_rate is None


def test_a_prompt_read_from_cache_says_nothing_about_reading() -> None:
    live = LiveProfile()
    live.measured(1.0, usage=Usage(prompt_tokens=10, cached_tokens=10), prompt_s=0.1)
    assert live.view.prefill_rate is None


def test_a_report_fills_in_and_what_it_leaves_out_is_not_known_any_more() -> None:
    live = LiveProfile()
    live.reported(HealthReport(alive=True, busy_slots=2, deferred=1, kv_use=0.5, gpu_use=0.9), 7.0)
    view = live.view
    assert (view.busy_slots, view.deferred, view.kv_use, view.gpu_use) == (2, 1, 0.5, 0.9)
    live.reported(HealthReport(alive=True), 8.0)
    view = live.view
    assert (view.busy_slots, view.deferred, view.kv_use, view.gpu_use) == (None, None, None, None)
    assert view.updated_s == 8.0
