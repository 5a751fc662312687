"""Models that a backend has and has not in memory: who is asked, and what is said when nobody can be."""

from __future__ import annotations

from typing import Any

import pytest
from fleets import fail, fleet, report, request

from llmgw.core.fleet import Fleet, Standing
from llmgw.core.stock import Stock, states_of
from llmgw.errors import ModelLoading, ModelNotFound, NoBackend, Overloaded
from llmgw.testing.fakes import request as request_for
from llmgw.values import HealthReport


def stocked(subject: Fleet, id: str, *cold: str, names: tuple[str, ...] = ("m", "n"), **slots: int) -> None:
    subject.stock(id, Stock(names, frozenset(cold), slots), 0.0)


def ids(subject: Fleet, model: str = "m") -> list[str]:
    return [backend.id for backend in subject.candidates(request_for(model=model), 0.0)]


def test_only_those_that_have_the_model_in_memory_are_asked() -> None:
    subject = fleet(2, models=None)
    stocked(subject, "b0", "m")
    stocked(subject, "b1", "n")
    assert ids(subject, "m") == ["b1"]
    assert ids(subject, "n") == ["b0"]
    assert subject.cold("m")
    assert subject.cold("n")
    assert not subject.cold("x")
    assert subject.models() == {"m": ("b0", "b1"), "n": ("b0", "b1")}
    with pytest.raises(ModelNotFound):
        ids(subject, "x")


def test_a_model_that_nobody_has_in_memory_is_known_and_not_loaded() -> None:
    subject = fleet(1, models=None)
    stocked(subject, "b0", "m", "n")
    assert subject.serves("m")
    assert subject.knows("m")
    assert not subject.takers("m")
    with pytest.raises(ModelLoading, match="not loaded") as raised:
        ids(subject)
    assert raised.value.retry_after_s
    stocked(subject, "b0", "n")
    assert ids(subject) == ["b0"]
    assert not subject.cold("m")


def test_drained_ones_neither_serve_nor_load() -> None:
    subject = fleet(1, models=None)
    stocked(subject, "b0", "m")
    subject.drain("b0")
    assert not subject.cold("m")
    with pytest.raises(NoBackend):
        ids(subject)


def test_when_all_that_have_it_are_out_it_may_be_loaded_elsewhere() -> None:
    subject = fleet(2)
    stocked(subject, "b1", "m", names=("m",))
    assert subject.prospect("m", 0.0) is Standing.READY
    for _ in range(3):
        report(subject, "b0", HealthReport(alive=False, refused=True))
    assert subject.prospect("m", 0.0) is None
    with pytest.raises(ModelLoading):
        ids(subject)
    report(subject, "b0", HealthReport(alive=True, loading=True))
    report(subject, "b0", HealthReport(alive=True, loading=True))
    assert subject.prospect("m", 0.0) is Standing.LOADING
    assert subject.prospect("unknown", 0.0) is None


def test_a_models_own_slots_bound_it() -> None:
    subject = fleet(1, models=None, max_connections=10)
    stocked(subject, "b0", m=2)
    leases = [subject.lease("b0", request_for(model="m"), 1.0) for _ in range(2)]
    with pytest.raises(Overloaded):
        ids(subject)
    assert ids(subject, "n") == ["b0"], "the other model has slots of its own"
    leases[0].finish(2.0, True, "done")
    assert ids(subject) == ["b0"]
    assert subject.members["b0"].busy_with("m") == 1


def test_use_is_remembered_while_a_model_stays() -> None:
    subject = fleet(1, models=None)
    stocked(subject, "b0", "n")
    member = subject.members["b0"]
    subject.lease("b0", request_for(model="m"), 7.0)
    stocked(subject, "b0")
    assert member.stock is not None
    assert member.stock.used == {"m": 7.0, "n": 0.0}
    stocked(subject, "b0", "m")
    assert member.stock.used == {"n": 0.0}


def test_without_a_loader_whatever_is_served_is_served() -> None:
    subject = fleet(1)
    told: list[str] = []
    stocked(subject, "b0", "m", names=("m",))
    subject.freed = told.append
    stocked(subject, "b0", "m", names=("m",))
    assert told == [], "the same again is no news"
    subject.stock("b0", None, 0.0)
    subject.stock("b0", None, 0.0)
    subject.stock("gone", None, 0.0)
    assert told == ["b0"]
    assert ids(subject) == ["b0"]
    assert not subject.members["b0"].is_cold("m")


def test_one_that_was_just_started_is_not_down_any_more() -> None:
    subject = fleet(1)
    for _ in range(3):
        report(subject, "b0", HealthReport(alive=False, refused=True))
    subject.revive("b0", 5.0)
    subject.revive("gone", 5.0)
    assert ids(subject) == ["b0"]
    subject.revive("b0", 6.0)
    fail(subject, "b0", refused=True)
    subject.lease("b0", request(), 6.0)


def test_the_picture_names_what_is_not_in_memory() -> None:
    subject = fleet(1, models=None)
    stocked(subject, "b0", "n", "m")
    (picture,) = subject.snapshot(0.0)
    assert picture["cold"] == ["m", "n"]
    assert picture["models"] == ["m", "n"]


@pytest.mark.parametrize("told", [["m"], None, {"m": "ready"}, {"m": ["loaded"]}, {3: "loaded"}])
def test_what_is_no_state_of_models_is_refused(told: Any) -> None:
    with pytest.raises(ValueError, match="its loader told"):
        states_of(told)


def test_states_of_models_are_taken_as_they_are() -> None:
    told = {"m": "loaded", "n": "failed"}
    assert states_of(told) is told
