"""Least connections, plain and weighted."""

from __future__ import annotations

import pytest
from candidates import ASK, backend, pick, picks, serve

from llmgw.routing.least_connections import LeastConnections
from llmgw.routing.weighted_least_connections import WeightedLeastConnections


def test_the_fewest_requests_win() -> None:
    pool = [backend("a", in_flight=3), backend("b", in_flight=1), backend("c", in_flight=2)]
    choice = LeastConnections.from_options({}).choose(ASK, pool, 0.0)
    assert (choice.backend.id, choice.score, choice.why) == ("b", 2.0, "load 2, lowest of 3")


def test_weights_do_not_matter_to_the_plain_one() -> None:
    pool = [backend("a", 100.0, in_flight=1), backend("b", 1.0, in_flight=0)]
    assert pick(LeastConnections(), pool) == "b"


@pytest.mark.parametrize("router", [LeastConnections(), WeightedLeastConnections()])
def test_equals_take_turns(router: LeastConnections) -> None:
    pool = [backend("a"), backend("b"), backend("c"), backend("d", in_flight=5)]
    assert picks(router, pool, 30) == {"a": 10, "b": 10, "c": 10}


def test_the_fewest_for_its_weight_wins() -> None:
    router = WeightedLeastConnections.from_options({})
    pool = [backend("a", 10.0, in_flight=4), backend("b", 4.0, in_flight=2), backend("c", 1.0, in_flight=0)]
    choice = router.choose(ASK, pool, 0.0)  # 0.5, 0.75, 1
    assert (choice.backend.id, choice.score) == ("a", 0.5)


def test_load_settles_in_proportion_to_weight() -> None:
    pool = [backend("a", 10.0), backend("b", 4.0), backend("c", 1.0)]
    counts = serve(WeightedLeastConnections(), pool, 150)
    assert abs(counts["a"] - 100) <= 1
    assert abs(counts["b"] - 40) <= 1
    assert abs(counts["c"] - 10) <= 1


def test_a_cold_backend_counts_as_small() -> None:
    pool = [backend("a"), backend("b", warmth=0.1)]
    assert serve(LeastConnections(), pool, 11)["b"] == 1


@pytest.mark.parametrize("router", [LeastConnections(), WeightedLeastConnections()])
def test_without_any_weight_somebody_is_chosen(router: LeastConnections) -> None:
    pool = [backend("a", 0.0, warmth=0.0), backend("b", 0.0, warmth=0.0)]
    assert picks(router, pool, 10) == {"a": 5, "b": 5}
