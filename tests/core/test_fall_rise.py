"""Up or down by several checks in a row."""

from __future__ import annotations

import pytest

from llmgw.core.fall_rise import FallRise


@pytest.mark.parametrize(
    ("looks", "ups"),
    [
        ("+", "+"),
        ("-", "-"),
        ("+--+--", "++++++"),
        ("+---", "+++-"),
        ("+---+", "+++--"),
        ("+---++", "+++--+"),
        ("+---+-++", "+++----+"),
        ("-+-++", "----+"),
    ],
)
def test_it_takes_three_to_fall_and_two_to_rise(looks: str, ups: str) -> None:
    state = FallRise(fall=3, rise=2)
    assert state.up is None
    seen = ""
    before: bool | None = None
    for look in looks:
        changed = state.check(look == "+")
        seen += "+" if state.up else "-"
        assert changed == (state.up is not before)
        before = state.up
    assert seen == ups
