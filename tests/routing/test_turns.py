"""Turns: fair whatever the list."""

from __future__ import annotations

from candidates import backend

from llmgw.routing.turns import MOST_REMEMBERED, Turns

A, B, C, D = (backend(name) for name in "abcd")


def test_a_steady_list_is_a_ring() -> None:
    turns = Turns()
    assert "".join(turns.next([C, A, B]).id for _ in range(7)) == "abcabca"


def test_the_order_of_the_list_does_not_matter() -> None:
    turns = Turns()
    assert "".join(turns.next(each).id for each in ([A, B, C], [C, B, A], [B, C, A], [C, A, B])) == "abca"


def test_two_lists_in_turn_do_not_disturb_each_other() -> None:
    turns = Turns()
    assert "".join(turns.next(each).id for each in ([A, B], [C, D]) * 4) == "acbdacbd"


def test_one_that_was_away_has_one_turn_not_many() -> None:
    turns = Turns()
    for _ in range(10):
        turns.next([A, B])
    assert "".join(turns.next([A, B, C]).id for _ in range(6)) == "cabcab"


def test_the_queue_shows_who_waited_longest() -> None:
    turns = Turns()
    turns.next([B])
    turns.next([A])
    assert turns.queue([A, B, C, D]) == [C, D, B, A]


def test_memory_is_bounded() -> None:
    turns = Turns()
    for number in range(3 * MOST_REMEMBERED):
        turns.next([A, backend(f"passing-{number}")])
    assert len(turns._last) <= MOST_REMEMBERED + 1
