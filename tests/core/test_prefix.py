"""Hashes of beginnings, and the index of who read which."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.prefix import (
    DENSE,
    DISTANCES,
    FAR,
    MAX_LANDMARKS,
    MAX_PLATEAUS,
    PLACES,
    PrefixIndex,
    blocks_covered,
    hash_blocks,
    landmarks,
)

# --- hash_blocks ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "block", "most", "count"),
    [(0, 4, 8, 0), (3, 4, 8, 0), (4, 4, 8, 1), (11, 4, 8, 2), (400, 4, 8, 8), (400, 4, 0, 0)],
)
def test_only_whole_blocks_count_and_no_more_than_the_bound(
    length: int, block: int, most: int, count: int
) -> None:
    assert len(hash_blocks(b"x" * length, block, most)) == count


@given(st.binary(max_size=200), st.binary(max_size=200), st.integers(1, 9))
def test_equal_beginnings_have_equal_hashes_and_others_differ(head: bytes, tail: bytes, block: int) -> None:
    whole = hash_blocks(head + tail, block, 1000)
    part = hash_blocks(head, block, 1000)
    assert whole[: len(part)] == part


def test_a_hash_covers_all_that_stands_before_it() -> None:
    first, second = hash_blocks(b"aaaabbbb", 4, 9), hash_blocks(b"ccccbbbb", 4, 9)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_hashes_are_the_same_in_every_process() -> None:
    assert hash_blocks(b"abcdefgh", 4, 9) == (3984772369, 2934909520)


def test_what_stands_beyond_the_bound_is_not_looked_at() -> None:
    assert hash_blocks(b"a" * 64 + b"b" * 10_000, 16, 4) == hash_blocks(b"a" * 64, 16, 4)


# --- landmarks --------------------------------------------------------------------


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_landmarks_stand_where_they_stand_however_long_the_prompt_is(one: int, other: int) -> None:
    shorter, longer = sorted((one, other))
    marks = list(landmarks(range(longer)))
    assert marks[: len(landmarks(range(shorter)))] == list(landmarks(range(shorter)))
    assert len(marks) <= MAX_LANDMARKS


def test_the_first_blocks_are_all_landmarks_and_then_ever_fewer() -> None:
    assert PLACES[:DENSE] == tuple(range(DENSE))
    gaps = [later - sooner for sooner, later in pairwise(PLACES)]
    assert gaps == sorted(gaps)
    assert len(PLACES) == MAX_LANDMARKS


def test_covered_blocks_are_those_up_to_the_last_landmark() -> None:
    assert [blocks_covered(marks) for marks in (0, 1, DENSE, MAX_LANDMARKS)] == [0, 1, DENSE, PLACES[-1] + 1]


# --- the index --------------------------------------------------------------------


def found(index: PrefixIndex, marks: list[int], crowd: int = 99) -> list[tuple[int, set[str]]]:
    return [(length, set(readers)) for length, readers in index.match(marks, crowd)]


def test_the_longest_common_beginning_is_found_and_shorter_ones_after_it() -> None:
    index = PrefixIndex(1000)
    index.insert([1, 2, 3, 4, 5, 6], "a", 4)
    index.insert([1, 2, 3, 40], "b", 4)
    index.insert([1, 20], "c", 4)
    assert found(index, [1, 2, 3, 4, 5, 99]) == [(5, {"a"}), (3, {"a", "b"})]
    assert found(index, [7, 8]) == []
    assert found(index, []) == []


def test_a_crowd_ends_the_search() -> None:
    index = PrefixIndex(1000)
    for name in "abc":
        index.insert([1, 2], name, 4)
    index.insert([1, 2, 3], "a", 4)
    index.insert([1], "d", 4)
    assert found(index, [1, 2, 3], crowd=2) == [(3, {"a"}), (2, {"a", "b", "c"})]


def test_no_more_lengths_are_told_than_are_worth_telling_apart() -> None:
    index = PrefixIndex(1000)
    for number in range(10):
        index.insert(list(range(20 - number)), f"b{number}", 4)
    assert len(found(index, list(range(20)))) == MAX_PLATEAUS


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=30
    ),
    st.lists(st.integers(0, 2), max_size=6),
)
def test_matching_agrees_with_looking_at_everything(
    inserted: list[tuple[str, list[int]]], asked: list[int]
) -> None:
    def chained(text: list[int]) -> list[int]:
        return [hash(tuple(text[: end + 1])) for end in range(len(text))]

    index = PrefixIndex(10_000)
    for name, text in inserted:
        index.insert(chained(text), name, 4)
    longest: dict[str, int] = {}
    for name, text in inserted:
        same = 0
        while same < min(len(text), len(asked)) and text[same] == asked[same]:
            same += 1
        longest[name] = max(longest.get(name, 0), same)
    marks = chained(asked)
    for name, length in longest.items():
        assert index.length(marks, name) == length
    plateaus = index.match(marks, 99)
    assert (plateaus[0][0] if plateaus else 0) == max(longest.values(), default=0)
    for length, readers in plateaus:
        assert set(readers) == {name for name, same in longest.items() if same >= length}


def test_memory_is_bounded_and_the_latest_stay() -> None:
    index = PrefixIndex(100)
    for number in range(0, 10_000, 10):
        index.insert(list(range(number, number + 10)), "a", 4)
        assert len(index) <= 110
    assert index.length(list(range(9990, 10_000)), "a") == 10
    assert index.length(list(range(10)), "a") == 0


def test_what_is_read_again_and_again_is_not_forgotten() -> None:
    index = PrefixIndex(40)
    for number in range(0, 1000, 5):
        index.insert([-1, -2, *range(number, number + 5)], "a", 4)
    assert index.length([-1, -2], "a") == 2


def test_belief_starts_at_the_slots_and_follows_what_backends_tell() -> None:
    index = PrefixIndex(100)
    index.insert([1], "a", 4)
    belief = index.held["a"].belief
    assert belief[:4] == [1.0, 1.0, 1.0, FAR]
    for _ in range(50):
        index.correct("a", 1, 0.0)
        index.correct("a", DISTANCES - 1, 1.0)
    assert belief[1] < 0.01
    assert belief[-1] > 0.99
    index.correct("nobody", 0, 0.0)


def test_each_prompt_read_makes_earlier_ones_older() -> None:
    index = PrefixIndex(100)
    index.insert([1], "a", 4)
    index.insert([2], "a", 4)
    ((_, readers),) = index.match([1], 99)
    assert index.held["a"].read - readers["a"] == 1


def test_one_that_was_restarted_holds_nothing() -> None:
    index = PrefixIndex(6)
    index.insert([1, 2, 3], "a", 4)
    index.insert([1, 2], "b", 4)
    index.insert([1, 5], "a", 4)
    index.forget("a")
    index.forget("never seen")
    assert found(index, [1, 2, 3]) == [(2, {"b"})]
    assert index.length([1, 2, 3], "a") == 0
    index.insert([1, 2, 3], "a", 4)
    assert found(index, [1, 2, 3]) == [(3, {"a"}), (2, {"a", "b"})]
