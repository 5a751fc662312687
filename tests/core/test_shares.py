"""How gateways divide the caps of their backends."""

from __future__ import annotations

from random import Random

import pytest

from llmgw.core.breaker import OPEN, BreakerRules
from llmgw.core.fleet import BackendSpec, Fleet
from llmgw.core.lease import Lease
from llmgw.core.shares import Shares, may_get_room, opinions, take_hints
from llmgw.errors import Overloaded
from llmgw.values import Request


def a_fleet(cap: int = 4, *ids: str) -> Fleet:
    fleet = Fleet(BreakerRules(), Random(1))
    for id in ids or ("b",):
        fleet.put(BackendSpec(id, f"http://{id}", models=("m",), max_connections=cap), 0.0)
    return fleet


def request() -> Request:
    return Request(id="r", model="m", prompt_tokens=1)


def at_work(fleet: Fleet, count: int, id: str = "b") -> list[Lease]:
    return [fleet.lease(id, request(), 0.0) for _ in range(count)]


def is_free(fleet: Fleet) -> bool:
    try:
        return bool(fleet.candidates(request(), 0.0))
    except Overloaded:
        return False


def test_alone_all_is_ours() -> None:
    fleet = a_fleet()
    shares = Shares(fleet)
    shares.take({}, {}, 0)
    at_work(fleet, 3)
    assert is_free(fleet)
    at_work(fleet, 1)
    assert not is_free(fleet)
    assert not may_get_room(fleet, "m")


def test_who_has_nothing_may_have_one_and_then_what_was_granted() -> None:
    fleet = a_fleet()
    shares = Shares(fleet)
    shares.take({}, {"b": 2}, 1)
    assert not shares.contended
    assert fleet.members["b"].view.peers_in_flight == 2
    assert is_free(fleet)
    at_work(fleet, 1)
    assert not is_free(fleet)
    assert may_get_room(fleet, "m")
    shares.take({"b": 2}, {"b": 2}, 1)
    assert is_free(fleet)
    at_work(fleet, 1)
    assert not is_free(fleet)
    assert shares.contended
    assert not may_get_room(fleet, "m")  # two of theirs and two of ours: that is the cap


def test_nothing_is_free_where_the_others_fill_the_cap() -> None:
    fleet = a_fleet()
    Shares(fleet).take({}, {"b": 4}, 1)
    assert not is_free(fleet)
    assert not may_get_room(fleet, "m")


def test_a_share_is_never_more_than_the_cap() -> None:
    fleet = a_fleet(cap=2)
    Shares(fleet).take({"b": 9}, {}, 1)
    assert fleet.members["b"].room == 2


def test_what_is_at_work_is_wished_for_and_what_was_missed_until_it_is_there() -> None:
    fleet = a_fleet(64)
    shares = Shares(fleet)
    fleet.pressed = shares.press
    shares.take({}, {}, 1, ["b"])  # somebody else is short of it
    assert shares.demands() == {}
    held = at_work(fleet, 1)
    assert shares.demands() == {"b": (1, 1, 64)}
    assert not shares.unmet
    for _ in range(5):
        assert not is_free(fleet)
    assert shares.unmet
    assert shares.demands() == {"b": (1, 6, 64)}
    shares.take({"b": 4}, {}, 1, ["b"])
    assert shares.unmet
    assert shares.demands() == {"b": (1, 6, 64)}
    shares.take({"b": 6}, {}, 1, ["b"])
    assert not shares.unmet
    assert shares.demands() == {"b": (1, 1, 64)}
    shares.take({"b": 40}, {}, 1)
    held += at_work(fleet, 39)
    assert not is_free(fleet)
    assert shares.demands() == {"b": (40, 51, 64)}  # nobody is short: ten in reserve
    shares.give_up()
    assert shares.demands() == {"b": (40, 50, 64)}
    for lease in held:
        lease.finish(0.0, True, "done")
    assert shares.demands() == {"b": (0, 16, 64)}


def test_what_was_missed_meanwhile_is_asked_for_the_next_time() -> None:
    fleet = a_fleet(64)
    shares = Shares(fleet)
    fleet.pressed = shares.press
    shares.take({}, {}, 1, ["b"])
    at_work(fleet, 1)
    assert not is_free(fleet)
    assert shares.demands() == {"b": (1, 2, 64)}
    assert not is_free(fleet)  # while the store is asked
    shares.take({"b": 2}, {}, 1, ["b"])
    assert shares.unmet


def test_one_more_is_asked_for_where_somebody_goes_elsewhere() -> None:
    fleet = a_fleet(64, "a", "b")
    shares = Shares(fleet)
    fleet.pressed = shares.press
    shares.take({}, {}, 1, ["a", "b"])
    at_work(fleet, 1, "a")
    for _ in range(3):
        assert [each.id for each in fleet.candidates(request(), 0.0)] == ["b"]
    assert shares.demands() == {"a": (1, 2, 64)}


def test_what_is_given_back_is_not_used_from_the_asking_on() -> None:
    """The store may give it to others before its answer is here."""
    fleet = a_fleet(4)
    shares = Shares(fleet)
    shares.take({"b": 3}, {"b": 1}, 1, ["b"])
    at_work(fleet, 1)
    assert fleet.members["b"].room == 3
    shares.demands()
    assert fleet.members["b"].room == 1


def test_who_is_idle_keeps_half_of_an_equal_part_unless_somebody_is_short_of_it() -> None:
    fleet = a_fleet(64, "a", "b")
    shares = Shares(fleet)
    shares.take({}, {}, 3, ["b"])
    assert shares.demands() == {"a": (0, 8, 64)}
    shares.take({"a": 8}, {}, 3)
    assert shares.demands() == {"a": (0, 8, 64), "b": (0, 8, 64)}


def test_while_the_store_is_silent_what_is_known_counts() -> None:
    fleet = a_fleet(64)
    shares = Shares(fleet)
    shares.take({"b": 5}, {"b": 20}, 1)
    shares.loosen()
    assert (fleet.members["b"].room, fleet.members["b"].view.peers_in_flight) == (44, 20)


def test_no_more_is_wished_for_than_the_cap() -> None:
    fleet = a_fleet(2)
    shares = Shares(fleet)
    fleet.pressed = shares.press
    at_work(fleet, 2)
    assert not is_free(fleet)  # the cap itself is used up: nothing to ask for
    assert not shares.unmet
    assert shares.demands() == {"b": (2, 2, 2)}


def test_without_the_others_each_has_the_whole_cap_again() -> None:
    fleet = a_fleet()
    shares = Shares(fleet)
    shares.take({"b": 1}, {"b": 3}, 1)
    assert shares.shared == {"b": 1}
    shares.forget()
    assert (fleet.members["b"].room, fleet.members["b"].view.peers_in_flight) == (4, 0)
    assert shares.shared == {}


def test_whoever_waits_is_told_of_more_room() -> None:
    fleet = a_fleet()
    told: list[str] = []
    shares = Shares(fleet)
    shares.take({}, {}, 1)
    fleet.freed = told.append
    shares.take({"b": 1}, {}, 1)
    assert told == []
    shares.take({"b": 3}, {}, 1)
    assert told == ["b"]


def test_new_settings_keep_the_share() -> None:
    fleet = a_fleet()
    Shares(fleet).take({"b": 2}, {}, 1)
    fleet.put(BackendSpec("b", "http://b", models=("m",), max_connections=8), 0.0)
    assert (fleet.members["b"].cap, fleet.members["b"].room) == (8, 2)


def opened(fleet: Fleet, id: str) -> None:
    for _ in range(5):
        fleet.lease(id, request(), 0.0).finish(0.0, False, "reset")
    assert fleet.members[id].breakers["m"].state is OPEN


def test_a_breakers_opinion_is_a_hint_that_one_failure_confirms() -> None:
    here, there = a_fleet(64, "a", "b", "c"), a_fleet(64, "a", "b", "c")
    opened(there, "a")
    at_work(here, 1, "c")
    assert opinions(here, 1.0) == {}
    told = opinions(there, 1.0)
    assert list(told) == ["a"]
    assert 2.0 < told["a"]["m"] < 6.0
    for each in (told, {"nobody": {"m": 1.0}}, {"a": {"another's": 1.0}}):
        take_hints(here, each, 1.0)
    assert [each.id for each in here.candidates(request(), 1.0)] == ["a", "b", "c"]
    here.lease("a", request(), 1.0).finish(1.5, False, "reset")
    assert here.members["a"].breakers["m"].state is OPEN
    # And without a hint, or after it has run out, one failure is nothing.
    here.lease("b", request(), 1.0).finish(1.5, False, "reset")
    assert "b" in [each.id for each in here.candidates(request(), 1.6)]


def test_a_hint_runs_out() -> None:
    fleet = a_fleet(64, "a", "b")
    take_hints(fleet, {"a": {"m": 1.0}}, 10.0)
    fleet.lease("a", request(), 11.0).finish(11.5, False, "reset")
    assert "a" in [each.id for each in fleet.candidates(request(), 11.6)]


def test_a_backend_that_has_not_told_its_models_takes_hints_too() -> None:
    fleet = Fleet(BreakerRules(), Random(1))
    for id in ("a", "b"):
        fleet.put(BackendSpec(id, f"http://{id}"), 0.0)
    take_hints(fleet, {"a": {"": 5.0}}, 0.0)
    fleet.lease("a", request(), 0.0).finish(0.5, False, "reset")
    assert opinions(fleet, 0.6)["a"].keys() == {""}


@pytest.mark.parametrize("peers", [2, 4, 8])
@pytest.mark.parametrize("cap", [1, 4, 16])
def test_together_they_stay_within_cap_and_slack(peers: int, cap: int) -> None:
    """Gateways that look at different moments, against the store's arithmetic."""
    dice = Random(cap * 100 + peers)
    fleets = [a_fleet(cap) for _ in range(peers)]
    shares = [Shares(fleet) for fleet in fleets]
    stored = [(0, 0, False) for _ in fleets]  # at work, granted, short
    for fleet, share in zip(fleets, shares, strict=True):
        fleet.pressed = share.press

    asked: dict[int, tuple[int, int, int]] = {}
    answers: dict[int, tuple[int, int, list[str]]] = {}

    def step(me: int) -> None:
        """Ask, be heard by the store, hear its answer: other things happen in between."""
        if me in answers:
            granted, busy, short = answers.pop(me)
            shares[me].take({"b": granted}, {"b": busy}, peers - 1, short)
        elif me in asked:
            wish = asked.pop(me)
            rest = [each for n, each in enumerate(stored) if n != me]
            granted = max(wish[0], min(wish[1], wish[2] - sum(each[1] for each in rest)))
            stored[me] = (wish[0], granted, granted < wish[1])
            short = ["b"] if any(each[2] for each in rest) else []
            answers[me] = (granted, sum(each[0] for each in rest), short)
        else:
            asked[me] = shares[me].demands().get("b", (0, 0, cap))
            if dice.random() < 0.3:
                shares[me].give_up()

    def look(me: int) -> None:
        step(me)
        while me in asked or me in answers:
            step(me)

    for me in range(peers):
        look(me)
    leases: list[list[Lease]] = [[] for _ in fleets]
    worst = served = 0
    for _ in range(4000):
        me = dice.randrange(peers)
        event = dice.random()
        if event < 0.55 and is_free(fleets[me]):
            leases[me] += at_work(fleets[me], 1)
            served += 1
        elif event < 0.7 and leases[me]:
            leases[me].pop(dice.randrange(len(leases[me]))).finish(0.0, True, "done")
        else:
            step(me)
        worst = max(worst, sum(map(len, leases)))
    assert worst <= cap + peers - 1
    assert worst >= cap
    # One who wants all of it gets all of it, when the others want nothing.
    for mine in leases:
        for lease in mine:
            lease.finish(0.0, True, "done")
    for share in shares:
        share.give_up()
    for _ in range(4 * cap):
        while is_free(fleets[0]):
            at_work(fleets[0], 1)
        for me in range(peers):
            look(me)
    assert fleets[0].members["b"].view.in_flight == cap
