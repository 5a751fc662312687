"""When a request body is given up as too slow."""

from __future__ import annotations

import pytest

from llmgw.core.body_pace import is_too_slow


@pytest.mark.parametrize(
    ("received", "declared", "elapsed_s", "slow"),
    [
        (5_000, None, 5.0, False),
        (4_999, None, 5.0, True),  # below the minimum rate
        (29_999, None, 29.9, False),
        (40_000, None, 30.0, False),  # so much may take 40 s
        (40_000, None, 40.0, True),
        (30_000, 100_000, 30.0, False),  # by what was declared it may take 100 s
        (30_000, 20_000, 30.0, True),
        (0, 0, 30.0, True),
    ],
)
def test_the_minimum_rate_and_the_whole_time_both_count(
    received: int, declared: int | None, elapsed_s: float, slow: bool
) -> None:
    assert is_too_slow(received, declared, elapsed_s, body_s=30.0, rate=1000.0) is slow
