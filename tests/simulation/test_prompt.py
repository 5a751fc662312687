"""Prompts without text: what they share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.simulation.prompt import block_hashes, common, length

PIECES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 300)), max_size=6).map(tuple)


@pytest.mark.parametrize(
    ("one", "other", "tokens"),
    [
        ((), ((1, 5),), 0),
        (((1, 5),), ((1, 5),), 5),
        (((1, 5), (2, 9)), ((1, 5), (3, 9)), 5),
        (((1, 5), (2, 9)), ((1, 5), (2, 4), (3, 9)), 9),
        (((1, 5), (2, 9)), ((1, 3), (2, 9)), 3),
        (((2, 5),), ((1, 5),), 0),
    ],
)
def test_common_beginnings(one, other, tokens):
    assert common(one, other) == common(other, one) == tokens


def test_every_whole_block_has_a_hash_and_the_rest_has_none():
    assert len(block_hashes(((1, 255),), 128)) == 1
    assert len(block_hashes(((1, 100), (2, 156)), 128)) == 2
    assert block_hashes((), 128) == ()


@given(PIECES, PIECES)
def test_equal_hashes_are_equal_beginnings(one, other):
    mine, theirs = block_hashes(one, 16), block_hashes(other, 16)
    equal = 0
    while equal < min(len(mine), len(theirs)) and mine[equal] == theirs[equal]:
        equal += 1
    assert equal == common(one, other) // 16
    assert len(mine) == length(one) // 16


def test_hashes_are_the_same_in_every_process():
    assert block_hashes(((1, 20),), 16) == (block_hashes(((1, 300),), 16)[0],)
    assert block_hashes(((1, 16),), 16)[0] == 13856874215623277020
