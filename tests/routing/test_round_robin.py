"""Round robin: everyone in turn, with no shared index to go wrong."""

from __future__ import annotations

import random

import pytest
from candidates import backend, pick, picks

from llmgw.routing.round_robin import RoundRobin
from llmgw.routing.turns import MOST_REMEMBERED

A, B, C, D = (backend(name) for name in "abcd")


def test_everyone_in_turn() -> None:
    router = RoundRobin.from_options({})
    assert "".join(pick(router, [A, B, C]) for _ in range(7)) == "abcabca"


def test_two_models_in_turn_reach_all_their_backends() -> None:
    router = RoundRobin()
    chosen = "".join(pick(router, each) for each in ([A, B], [C, D]) * 10)
    assert {name: chosen.count(name) for name in "abcd"} == {"a": 5, "b": 5, "c": 5, "d": 5}


def test_a_gap_skips_nobody_else() -> None:
    router = RoundRobin()
    assert [pick(router, each) for each in ([A, B, C], [A, C], [A, B, C])] == ["a", "c", "b"]


def test_random_gaps_leave_the_shares_equal() -> None:
    router, dice = RoundRobin(), random.Random(3)
    chosen = [pick(router, dice.sample([A, B, C, D], dice.randint(1, 4))) for _ in range(4000)]
    assert all(900 < chosen.count(name) < 1100 for name in "abcd")


def test_a_cold_backend_takes_its_share_of_turns() -> None:
    cold = backend("z", warmth=0.25)
    counts = picks(RoundRobin(), [A, B, cold], 900)
    assert counts["z"] == 100  # 1 of 4 of its turns: 0.25 / 2.25
    assert counts["a"] == counts["b"] == 400


@pytest.mark.parametrize("warmth", [0.0, 0.1])
def test_all_equally_cold_take_plain_turns(warmth: float) -> None:
    pool = [backend("y", warmth=warmth), backend("z", warmth=warmth)]
    assert picks(RoundRobin(), pool, 100) == {"y": 50, "z": 50}


def test_calls_for_a_warm_pool_do_not_starve_a_cold_one() -> None:
    router, cold = RoundRobin(), backend("z", warmth=0.5)
    chosen = [pick(router, pool) for pool in ([A, cold], [C, D]) * 60]
    assert chosen.count("z") == 20


def test_memory_of_cold_ones_is_bounded() -> None:
    router = RoundRobin()
    for number in range(3 * MOST_REMEMBERED):
        pick(router, [A, backend(f"passing-{number}", warmth=0.1)])
    assert len(router._credit) <= MOST_REMEMBERED + 1
