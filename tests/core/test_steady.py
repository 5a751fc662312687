"""Up or down by several looks in a row."""

from __future__ import annotations

import pytest

from llmgw.core.steady import Steady


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
    steady = Steady(fall=3, rise=2)
    assert steady.up is None
    seen = ""
    before: bool | None = None
    for look in looks:
        changed = steady.look(look == "+")
        seen += "+" if steady.up else "-"
        assert changed == (steady.up is not before)
        before = steady.up
    assert seen == ups
