"""Costs lowered by what is known to be cached."""

from __future__ import annotations

import pytest

from llmgw.core.prefix import PrefixIndex
from llmgw.routing.affinity import credit, known
from llmgw.routing.ttft_model import Lane


def test_the_longest_beginning_counts_though_a_shorter_one_is_known_too() -> None:
    index = PrefixIndex(100)
    index.insert([1, 2, 3, 4], "a", 8)
    index.insert([1, 2], "b", 8)
    plateaus = index.match([1, 2, 3, 4, 5, 6, 7, 8], 5)
    assert [(length, set(readers)) for length, readers in plateaus] == [(4, {"a"}), (2, {"a", "b"})]
    lanes = {name: Lane(name, 0.0) for name in "ab"}
    for place, lane in enumerate(lanes.values()):
        lane.place, lane.per_token_s = place, 0.001
    costs = [0.8, 0.8]
    credit(index, plateaus, 0.0, 8, 800.0, lanes, list(lanes.values()), costs)
    assert costs == pytest.approx([0.4, 0.6])
    costs = [0.1, 0.2]
    credit(index, plateaus, 0.0, 8, 800.0, lanes, list(lanes.values()), costs)
    assert costs == [0.1, 0.2]  # were cheaper anyway
    assert known(index, plateaus, "a", 0.0, 8) == (0.5, 0, 0.5)
    assert known(index, plateaus, "b", 0.3, 8) == (0.25, 0, 0.3)
    assert known(index, plateaus, "c", 0.1, 8) == (0.1, 0, 0.1)
