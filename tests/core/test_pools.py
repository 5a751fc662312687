"""Who serves what, gathered when somebody asks."""

from __future__ import annotations

from random import Random

import pytest

from llmgw.core import pools
from llmgw.core.breaker import BreakerRules
from llmgw.core.member import Member
from llmgw.core.pools import Pool, Pools
from llmgw.core.spec import BackendSpec


class House:
    """Members that come, change and go."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.pools = Pools(self.members)

    def put(self, id: str, *models: str, silent: bool = False) -> Member:
        spec = BackendSpec(id=id, url=f"http://{id}", models=None if silent else models)
        member = self.members[id] = Member(spec, BreakerRules(), Random(1))
        self.pools.note(id)
        return member

    def of(self, model: str) -> list[str]:
        pool = self.pools.of(model)
        return [] if pool is None else [member.spec.id for member in pool.members]


def test_a_member_is_in_the_pools_of_its_names_and_a_silent_one_in_all() -> None:
    house = House()
    assert (house.of("m"), house.pools.ids(), house.pools.serves("m")) == ([], {}, False)
    house.put("b", "m", "n", "m")
    house.put("a", "n")
    for _ in "12":
        assert house.pools.ids() == {"m": ("b",), "n": ("b", "a")}
    assert (house.of("m"), house.of("n"), house.of("x")) == (["b"], ["b", "a"], [])
    silent = house.put("c", silent=True)
    assert (house.of("m"), house.of("x")) == (["b", "c"], ["c"])
    assert house.pools.of("x") is house.pools.of("y"), "names of callers fill no memory"
    assert (house.pools.knows("x"), house.pools.serves("x"), house.pools.knows("m")) == (False, True, True)
    silent.models = ("x",)
    house.pools.note("c")
    assert (house.of("m"), house.of("x"), house.of("y")) == (["b"], ["c"], [])


def test_the_last_one_takes_its_names_along() -> None:
    house = House()
    house.put("a", "m", "n")
    house.put("b", "n").removed = True
    house.pools.note("b")
    assert house.of("n") == ["a"]
    del house.members["a"]
    house.pools.note("a")
    house.pools.note("a")
    assert house.pools.ids() == {}
    assert not house.pools.knows("n")
    assert house.pools.of("n") is None


def test_a_change_forgets_the_pools_of_its_own_names_alone() -> None:
    house = House()
    house.put("a", "m")
    other = house.put("b", "n")
    kept = house.pools.of("m")
    gathered = house.pools.of("n")
    other.draining = True
    house.pools.note("b")
    assert house.pools.of("m") is kept
    assert (house.pools.of("n") is gathered, house.of("n")) == (False, [])


def test_a_thousand_that_come_at_once_are_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, each costs what its own names cost."""
    gathered: list[str] = []
    gather = pools._pool

    def counted(members: list[Member], name: str = "") -> Pool:
        gathered.append(name)
        return gather(members, name)

    monkeypatch.setattr(pools, "_pool", counted)
    house = House()
    for number in range(1000):
        house.put(f"b{number}", "m")
    assert gathered == []
    assert len(house.of("m")) == 1000
    assert len(house.of("m")) == 1000
    assert gathered == ["m"]
