"""Two choices: repeatable, fair, and never the worst."""

from __future__ import annotations

from candidates import ASK, backend, pick, picks

from llmgw.routing.power_of_two import PowerOfTwo


def test_the_most_loaded_is_never_chosen() -> None:
    pool = [backend("a", in_flight=1), backend("b", in_flight=2), backend("c", in_flight=9)]
    counts = picks(PowerOfTwo(1), pool, 3000)
    assert counts["c"] == 0
    assert 1800 < counts["a"] < 2200  # two of three draws show it


def test_equals_share_alike() -> None:
    counts = picks(PowerOfTwo(2), [backend(name) for name in "abcd"], 4000)
    assert all(850 < counts[name] < 1150 for name in "abcd")


def test_the_two_are_different() -> None:
    """Of two candidates the better always wins: both were drawn."""
    pool = [backend("a", in_flight=5), backend("b")]
    assert picks(PowerOfTwo(3), pool, 500) == {"b": 500}


def test_weight_and_warmth_count() -> None:
    pool = [backend("a", 4.0, in_flight=2), backend("b", 1.0, in_flight=0)]
    assert pick(PowerOfTwo(4), pool) == "a"
    pool = [backend("a", 4.0, in_flight=2, warmth=0.1), backend("b", 1.0, in_flight=0)]
    assert pick(PowerOfTwo(4), pool) == "b"


def test_one_candidate_needs_no_dice() -> None:
    choice = PowerOfTwo().choose(ASK, [backend("a")], 0.0)
    assert (choice.backend.id, choice.why) == ("a", "load 1, lower of two drawn from 1")


def test_a_seed_repeats_a_run() -> None:
    pool = [backend(name) for name in "abcde"]
    first, second = (PowerOfTwo.from_options({"seed": 7}) for _ in range(2))
    assert [pick(first, pool) for _ in range(100)] == [pick(second, pool) for _ in range(100)]
