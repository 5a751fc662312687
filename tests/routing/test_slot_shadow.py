"""Which slot to ask for."""

from __future__ import annotations

from llmgw.routing.slot_shadow import SlotShadow, saved_of


def held(*prompts: tuple[int, ...]) -> SlotShadow:
    """A shadow whose slots hold these prompts, used one second after the other."""
    shadow = SlotShadow(len(prompts))
    for slot, marks in enumerate(prompts):
        assert shadow.take(slot, f"r{slot}", marks, 0.0)
    for slot in range(len(prompts)):
        shadow.free(slot, f"r{slot}", float(slot))
    return shadow


def test_a_conversation_gets_the_slot_of_its_last_turn() -> None:
    shadow = held((1, 2, 3), (1, 5, 6), (7,))
    assert shadow.choose((1, 5, 6, 8), 3.0) == 1


def test_a_stranger_overwrites_what_is_least_worth_keeping() -> None:
    shadow = held((1, 2, 3), (4,), (5, 6, 7))
    assert shadow.choose((9, 9), 3.0) == 1
    assert held((1, 2), (3, 4)).choose((9,), 2.0) == 0
    assert held((), (), ()).choose((), 9.0) == 0


def test_a_system_prompt_is_no_reason_to_overwrite_a_conversation_just_used() -> None:
    shadow = held((1, 2, 3, 4, 5, 6, 7, 8), ())
    assert shadow.choose((1, 20), 1.0) == 1
    assert shadow.choose((1, 20), 10_000.0) == 0


def test_slots_at_work_are_not_chosen() -> None:
    shadow = SlotShadow(2)
    assert shadow.take(0, "a", (1,), 0.0)
    assert not shadow.take(0, "b", (1,), 0.0)
    assert not shadow.take(7, "b", (1,), 0.0)
    assert shadow.choose((1,), 0.0) == 1
    assert shadow.take(1, "b", (2,), 0.0)
    assert shadow.choose((1,), 0.0) is None
    assert (shadow.slots, shadow.taken) == (2, 2)
    shadow.free(0, "b", 1.0)
    shadow.free(7, "a", 1.0)
    assert shadow.taken == 2
    shadow.free(0, "a", 1.0)
    assert (shadow.taken, shadow.choose((9,), 2.0)) == (1, 0)


def test_what_is_saved_is_all_that_begins_alike() -> None:
    assert saved_of((1, 2, 3, 4), (1, 2, 3, 4, 5)) == 4
    assert saved_of((1, 2), (8, 9)) == 0
    assert saved_of((), (1,)) == 0
    for held in range(1, 20):
        for alike in range(held + 1):
            other = (*range(alike), *range(100, 110))
            assert saved_of(tuple(range(held)), other) == alike


def test_one_of_the_same_system_prompt_is_overwritten_where_what_follows_it_never_comes_back() -> None:
    """Else each new question would be read with its system prompt in a slot without it."""
    system = tuple(range(100, 109))
    shadow = held((*system, 1, 2, 3, 4), ())
    assert shadow.choose((*system, 9, 9), 10.0) == 0
    shadow = held((*system, *range(11)), ())  # less than half of it is the system prompt
    assert shadow.choose((*system, 99), 10.0) == 1
    for number in range(200):
        assert shadow.take(0, "x", (*system, *range(1000 + 20 * number, 1011 + 20 * number)), 10.0)
        shadow.free(0, "x", 10.0)
    assert shadow.choose((*system, 99), 20.0) == 0


def test_how_long_what_is_held_is_worth_keeping_follows_the_pauses_of_conversations() -> None:
    def after(pause_s: float) -> int | None:
        """A stranger comes 30 s after two long turns of conversations that pause so long."""
        shadow = SlotShadow(2)
        now_s, talk = 0.0, [1]
        for number in range(200):
            now_s += pause_s
            talk = [*talk[-3:], 10 + number]
            assert shadow.take(0, "x", tuple(talk), now_s)
            shadow.free(0, "x", now_s)
        assert shadow.take(1, "y", (7, 8, 9), now_s + 30.0)
        shadow.free(1, "y", now_s + 30.0)
        return shadow.choose((5, 5), now_s + 30.0)

    assert after(0.5) == 0  # it will not come back now, though it is longer
    assert after(60.0) == 1


def test_one_of_two_slots_with_the_same_prompt_is_given_while_the_other_works() -> None:
    shadow = held((1, 2, 3), (1, 2, 3))
    first = shadow.choose((1, 2, 3, 4), 2.0)
    assert first is not None
    assert shadow.take(first, "x", (1, 2, 3, 4), 0.0)
    assert shadow.choose((1, 2, 3, 5), 2.0) == 1 - first
    shadow.free(first, "x", 3.0)
    assert shadow.choose((1, 2, 3, 4, 5), 3.0) == first
