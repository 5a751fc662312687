"""Smooth weighted round robin: shares by weight, well mixed."""

from __future__ import annotations

import random

from candidates import backend, pick, picks

from llmgw.routing.turns import MOST_REMEMBERED
from llmgw.routing.weighted_round_robin import WeightedRoundRobin


def test_it_is_as_smooth_as_nginx() -> None:
    router = WeightedRoundRobin.from_options({})
    pool = [backend("a", 5), backend("b", 1), backend("c", 1)]
    assert "".join(pick(router, pool) for _ in range(14)) == "aabacaaaabacaa"


def test_shares_are_the_weights() -> None:
    pool = [backend("a", 10.0), backend("b", 4.0), backend("c", 1.0)]
    assert picks(WeightedRoundRobin(), pool, 1500) == {"a": 1000, "b": 400, "c": 100}


def test_shares_hold_while_the_set_changes() -> None:
    router, dice = WeightedRoundRobin(), random.Random(1)
    pool = [backend("a", 4), backend("b", 2), backend("c", 1), backend("d", 1)]
    chosen = "".join(pick(router, dice.sample(pool, 3)) for _ in range(8000))
    assert chosen.count("a") > 1.6 * chosen.count("b")
    assert chosen.count("b") > 1.6 * chosen.count("c")
    assert abs(chosen.count("c") - chosen.count("d")) < 0.1 * chosen.count("d")


def test_one_that_was_away_is_not_flooded() -> None:
    router, pool = WeightedRoundRobin(), [backend("a"), backend("b"), backend("c")]
    picks(router, pool, 10)
    picks(router, pool[:2], 1000)
    assert picks(router, pool, 30)["c"] <= 11


def test_warmth_counts_as_weight() -> None:
    pool = [backend("a", 1.0), backend("b", 4.0, warmth=0.25)]
    assert picks(WeightedRoundRobin(), pool, 100) == {"a": 50, "b": 50}


def test_without_any_weight_all_take_turns() -> None:
    pool = [backend("a", 0.0), backend("b", -1.0), backend("c", 0.0)]
    assert picks(WeightedRoundRobin(), pool, 30) == {"a": 10, "b": 10, "c": 10}


def test_memory_is_bounded() -> None:
    router, stays = WeightedRoundRobin(), backend("stays")
    for number in range(3 * MOST_REMEMBERED):
        pick(router, [stays, backend(f"passing-{number}")])
    assert len(router._balance) <= MOST_REMEMBERED + 2
