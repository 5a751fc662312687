"""What vanishes is believed late, and what vanishes often later still."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.hold_down import HoldDown, HoldRules

RULES = HoldRules(hold_s=5, most_s=60, mass_s=100, calm_s=600)


def told(*ids: str) -> dict[str, str]:
    return {id: id.upper() for id in ids}


def hold(*ids: str, rules: HoldRules = RULES) -> HoldDown[str]:
    found: HoldDown[str] = HoldDown(rules)
    found.update(told(*ids), 0)
    return found


def test_what_is_added_or_changed_counts_at_once() -> None:
    found = hold("a")
    found.update({"b": "B", "a": "A2"}, 1)
    assert list(found.present.items()) == [("b", "B"), ("a", "A2")]
    assert not found.held
    assert found.next_s() is None


def test_one_that_vanishes_is_kept_for_a_while() -> None:
    found = hold("a", "b", "c")
    found.update(told("a", "b"), 10)
    assert found.held == told("c")
    assert found.next_s() == 15
    found.expire(14.9)
    assert found.held
    found.expire(15)
    assert not found.held
    assert found.present == told("a", "b")


def test_one_that_comes_back_in_time_was_never_gone() -> None:
    found = hold("a", "b", "c")
    found.update(told("a", "b"), 10)
    found.update({**told("a", "b"), "c": "new"}, 12)
    assert not found.held
    assert found.present["c"] == "new"
    found.expire(100)
    assert found.present["c"] == "new"


def test_each_vanishing_doubles_the_time_up_to_a_bound_until_it_keeps_still() -> None:
    found = hold("a", "b", "c")
    times = []
    now_s = 0.0
    for _ in range(6):
        found.update(told("a", "b"), now_s)
        due = found.next_s()
        assert due is not None
        times.append(due - now_s)
        now_s += 1
        found.update(told("a", "b", "c"), now_s)
    assert times == [5, 10, 20, 40, 60, 60]
    found.expire(now_s + 700)
    found.update(told("a", "b"), now_s + 700)
    assert found.next_s() == now_s + 705


def test_vanishing_after_a_long_calm_counts_anew_though_nobody_looked_meanwhile() -> None:
    found = hold("a", "b", "c")
    found.update(told("a", "b"), 0)
    found.update(told("a", "b", "c"), 1)
    found.update(told("a", "b"), 2000)
    assert found.next_s() == 2005


def test_more_than_half_at_a_time_is_not_believed_for_long() -> None:
    found = hold("a", "b", "c", "d")
    found.update(told("a"), 10)
    assert found.in_mass
    assert found.next_s() == 110
    found.expire(50)
    assert set(found.held) == {"b", "c", "d"}
    found.expire(110)
    assert not found.held
    assert found.present == told("a")


def test_half_may_go_and_one_alone_may_always_go() -> None:
    found = hold("a", "b", "c", "d")
    found.update(told("a", "b"), 10)
    assert not found.in_mass
    assert found.next_s() == 15
    lone = hold("a")
    lone.update({}, 10)
    assert not lone.in_mass
    assert lone.next_s() == 15


def test_a_hold_of_nothing_lets_one_go_at_once_and_still_not_all() -> None:
    rules = HoldRules(hold_s=0, mass_s=100)
    found = hold("a", "b", "c", rules=rules)
    found.update(told("a", "b"), 10)
    assert not found.held
    found.update({}, 20)
    assert set(found.held) == {"a", "b"}


def test_one_that_is_held_can_be_let_go() -> None:
    found = hold("a", "b", "c")
    found.update(told("a", "b"), 10)
    found.drop("c")
    found.drop("no such")
    assert not found.held


def test_what_is_held_keeps_its_count_however_long_it_is_held() -> None:
    found = hold("a", "b", "c", rules=HoldRules(hold_s=5, mass_s=5000, calm_s=600))
    found.update({}, 0)
    found.expire(2000)
    assert set(found.held) == {"a", "b", "c"}
    assert found.next_s() == 5000


IDS = st.sets(st.sampled_from("abcdef"))


@given(st.lists(st.tuples(IDS, st.floats(min_value=0, max_value=400)), max_size=30))
def test_nobody_is_lost_early_and_nobody_stays_for_ever(steps: list[tuple[set[str], float]]) -> None:
    found: HoldDown[str] = HoldDown(RULES)
    now_s = 0.0
    last: dict[str, float] = {}
    for ids, pause_s in steps:
        now_s += pause_s
        found.update(told(*sorted(ids)), now_s)
        for id in ids:
            last[id] = now_s
        assert set(found.present) == ids
        assert not set(found.held) & ids
    due = found.next_s()
    assert (due is None) == (not found.held)
    found.expire(now_s + RULES.mass_s)
    assert not found.held


def test_a_great_many_vanishings_are_no_more_than_the_bound() -> None:
    found = hold("a", "b", "c")
    for turn in range(5000):
        found.update(told("a", "b"), turn * 0.1)
        found.update(told("a", "b", "c"), turn * 0.1)
    found.update(told("a", "b"), 500)
    assert found.next_s() == 560
