"""Where a model is loaded, and what goes for it."""

from __future__ import annotations

import itertools
import random
from math import inf

import pytest

from llmgw.core.placement import LOOK_AGAIN_S, Instance, Nowhere, Place, Resident, Wait, cost, place

NOW = 1000.0
STAY = 10.0


def decide(*instances: Instance, size: int = 0) -> Place | Wait | Nowhere:
    return place(size, instances, NOW, STAY)


def old(model: str, idle_s: float = 100.0, **fields: object) -> Resident:
    return Resident(model, **{"used_s": NOW - idle_s, "since_s": NOW - 500.0, "load_s": 10.0, **fields})  # type: ignore[arg-type]


def fresh(model: str, age_s: float = 4.0, **fields: object) -> Resident:
    return old(model, 0.0, since_s=NOW - age_s, **fields)


def test_room_is_taken_before_anything_goes() -> None:
    full = Instance("a", (old("x"),), most=1)
    empty = Instance("b", (), most=1, in_flight=3)
    assert decide(full, empty) == Place("b")


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"in_flight": 0}, {"in_flight": 2}),
        ({"load_s": 3.0}, {"load_s": 20.0}),
        ({"most": 4}, {"most": 2}),
        ({"memory": 900}, {"memory": 800}),
        ({"most": None}, {"most": 2}),
    ],
)
def test_of_instances_with_room_the_idlest_quickest_and_emptiest_is_taken(
    better: dict[str, int], worse: dict[str, int]
) -> None:
    assert decide(Instance("a", **worse), Instance("b", **better), size=100) == Place("b")  # type: ignore[arg-type]


def test_equal_instances_are_taken_by_id_so_that_two_gateways_agree() -> None:
    for order in itertools.permutations([Instance("c"), Instance("a"), Instance("b")]):
        assert decide(*order) == Place("a")


def test_the_model_that_costs_least_to_lose_goes() -> None:
    recent, longest, dear = old("recent", 5.0), old("longest", 900.0), old("dear", 900.0, load_s=500.0)
    assert decide(Instance("a", (recent, dear, longest), most=3)) == Place("a", ("longest",))
    assert cost(longest, NOW) < cost(dear, NOW) < cost(old("now", 0.0, load_s=500.0), NOW)


def test_the_cheapest_instance_is_chosen_when_all_are_full() -> None:
    dear = Instance("a", (old("x", 0.0, load_s=60.0),), most=1)
    cheap = Instance("b", (old("y", 300.0),), most=1)
    assert decide(dear, cheap) == Place("b", ("y",))


def test_a_busy_model_is_let_run_out_and_only_where_nothing_idle_can_go() -> None:
    busy = Instance("a", (old("x", busy=2),), most=1)
    assert decide(busy) == Place("a", ("x",), drain=True)
    assert decide(busy, Instance("b", (old("y", 0.0),), most=1)) == Place("b", ("y",))
    assert decide(Instance("a", (old("x", busy=1), old("y")), most=2)) == Place("a", ("y",))


def test_a_fresh_model_keeps_its_place_for_its_minimum_stay() -> None:
    assert decide(Instance("a", (fresh("x"),), most=1)) == Wait(NOW + 6.0, "no instance has room yet")
    assert decide(Instance("a", (fresh("x", 10.0),), most=1)) == Place("a", ("x",))
    # A wait of known length is better than emptying a busy one.
    busy = Instance("b", (old("y", busy=1),), most=1)
    assert decide(Instance("a", (fresh("x"),), most=1), busy) == Wait(NOW + 6.0, "no instance has room yet")
    # But not to wait for one that is busy as well.
    assert decide(Instance("a", (fresh("x", busy=1),), most=1), busy) == Place("b", ("y",), drain=True)


def test_pinned_and_loading_models_never_go() -> None:
    assert decide(Instance("a", (old("x", fixed=True),), most=1)) == Nowhere(
        inf, "no instance can make room for it"
    )
    assert decide() == Nowhere(inf, "no instance that has it can be reached")
    assert decide(Instance("a", (old("x", fixed=True), old("y")), most=2)) == Place("a", ("y",))


def test_what_is_being_loaded_does_not_go_yet() -> None:
    loading = fresh("x", loading=True)
    assert decide(Instance("a", (loading,), most=1)) == Wait(NOW + LOOK_AGAIN_S, "no instance has room yet")
    assert decide(Instance("a", (loading,), most=2)) == Place("a"), "two may be loaded side by side"
    assert decide(Instance("a", (loading, old("y")), most=2)) == Place("a", ("y",))


def test_memory_is_freed_as_far_as_needed() -> None:
    models = (old("small", 900.0, size=10), old("middle", 300.0, size=60), old("large", 5.0, size=100))
    there = Instance("a", models, memory=200)
    assert decide(there, size=30) == Place("a")
    assert decide(there, size=40) == Place("a", ("small",))
    assert decide(there, size=60) == Place("a", ("small", "middle"))
    assert decide(there, size=500) == Nowhere(inf, "no instance can make room for it")
    unknown = Instance("a", (old("x", 900.0, size=0), old("y", size=100)), memory=100)
    assert decide(unknown, size=50) == Place("a", ("y",)), "what frees nothing does not go"


def test_where_something_changes_it_is_looked_again() -> None:
    assert decide(Instance("a", changing=True)) == Wait(NOW + LOOK_AGAIN_S, "no instance has room yet")
    assert decide(Instance("a", changing=True), Instance("b", in_flight=9)) == Place("b")


def test_nothing_goes_where_others_wait_for_what_is_there() -> None:
    kept = Instance("a", (old("x"),), most=1, kept=True)
    assert decide(kept) == Wait(NOW + LOOK_AGAIN_S, "no instance has room yet")
    assert decide(kept, Instance("b", (old("y", busy=1),), most=1)) == Place("b", ("y",), drain=True)
    assert decide(Instance("a", (old("x"),), most=2, kept=True)) == Place("a"), "but there may be room"


def test_where_it_failed_lately_it_is_not_tried() -> None:
    failed = Instance("a", not_before_s=NOW + 5.0)
    assert decide(failed, Instance("b", not_before_s=NOW + 3.0)) == Nowhere(NOW + 3.0, "loading it failed")
    assert decide(failed, Instance("b", in_flight=9)) == Place("b")
    assert decide(Instance("a", not_before_s=NOW)) == Place("a")
    assert decide(failed, Instance("b", (fresh("x"),), most=1)) == Wait(NOW + 6.0, "no instance has room yet")


def test_no_decision_breaks_the_rules_whatever_the_fleet_is() -> None:
    dice = random.Random(5)
    for _ in range(3000):
        instances = [_instance(dice, f"i{number}") for number in range(dice.randrange(4))]
        size = dice.choice((0, 10, 60))
        found = place(size, instances, NOW, STAY)
        if not isinstance(found, Place):
            assert found.until_s > NOW
            continue
        there = next(each for each in instances if each.id == found.instance)
        gone = [each for each in there.residents if each.model in found.victims]
        left = [each for each in there.residents if each.model not in found.victims]
        assert not there.changing
        assert there.not_before_s <= NOW
        assert not any(each.fixed or each.loading or each.since_s + STAY > NOW for each in gone)
        assert found.drain == any(each.busy for each in gone)
        assert there.most is None or len(left) < there.most
        assert there.memory is None or sum(each.size for each in left) + size <= there.memory


def _instance(dice: random.Random, id: str) -> Instance:
    residents = tuple(
        Resident(
            f"r{number}",
            busy=dice.choice((0, 0, 3)),
            used_s=NOW - dice.uniform(0, 1000),
            since_s=NOW - dice.choice((1.0, 500.0)),
            load_s=dice.uniform(0, 60),
            size=dice.choice((0, 20, 50)),
            fixed=dice.random() < 0.2,
            loading=dice.random() < 0.2,
        )
        for number in range(dice.randrange(4))
    )
    return Instance(
        id,
        residents,
        most=dice.choice((None, 1, 2, 3)),
        memory=dice.choice((None, 60, 200)),
        in_flight=sum(each.busy for each in residents),
        load_s=dice.uniform(0, 60),
        not_before_s=dice.choice((-inf, NOW + 5)),
        changing=dice.random() < 0.1,
        kept=dice.random() < 0.2,
    )
