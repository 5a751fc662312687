"""The states of several workers as one."""

from __future__ import annotations

from random import Random
from typing import Any

from llmgw.core.breaker import BreakerRules, State
from llmgw.core.fleet import BackendSpec, Fleet
from llmgw.core.merged_state import BREAKERS, STANDINGS, merge_states
from llmgw.core.standing import Standing


def state(**fields: Any) -> dict[str, Any]:
    return {"in_flight": 0, "waiting": 0, "connections": 0, "held_bytes": 0, "backends": [], **fields}


def test_parts_are_added_up_and_the_rest_is_the_firsts() -> None:
    whole = merge_states(
        [
            state(in_flight=2, router="adaptive", refusals={"a": 1}, in_flight_by_key={"k": 1}),
            state(in_flight=3, router="other", refusals={"a": 2, "b": 1}, connections=4),
        ]
    )
    assert whole["in_flight"] == 5
    assert whole["connections"] == 4
    assert whole["router"] == "adaptive"
    assert whole["refusals"] == {"a": 3, "b": 1}
    assert whole["in_flight_by_key"] == {"k": 1}


def test_models_are_those_that_anybody_knows() -> None:
    whole = merge_states([state(models={"m": ["a"]}), state(models={"m": ["a", "b"], "n": ["b"]})])
    assert whole["models"] == {"m": ["a", "b"], "n": ["b"]}


def test_backends_are_one_each_with_the_worst_that_anybody_sees() -> None:
    one = {"id": "b", "in_flight": 1, "breaker": "closed", "breakers": {"m": "closed"}, "ttft_s": 1.0,
           "available": True, "standing": "ready", "kv_use": None, "cap": 4}  # fmt: skip
    two = {**one, "in_flight": 2, "breaker": "open", "breakers": {"m": "open", "n": "slow_start"},
           "ttft_s": None, "available": False, "standing": "what is new"}  # fmt: skip
    whole = merge_states([state(backends=[one]), state(backends=[two, {"id": "c", "in_flight": 1}])])
    assert whole["backends"] == [
        {"id": "b", "in_flight": 3, "breaker": "open", "breakers": {"m": "open", "n": "slow_start"},
         "ttft_s": 1.0, "available": False, "standing": "what is new", "kv_use": None, "cap": 4},
        {"id": "c", "in_flight": 1},
    ]  # fmt: skip


def test_the_words_are_those_of_the_fleet() -> None:
    assert set(BREAKERS) == {each.value for each in State}
    assert set(STANDINGS) == {each.value for each in Standing}


def test_a_fleets_own_picture_comes_through() -> None:
    fleet = Fleet(BreakerRules(), Random(1))
    fleet.put(BackendSpec("b", "http://b", models=("m",)), 0.0)
    picture = fleet.snapshot(1.0)
    whole = merge_states([state(backends=picture), state(backends=picture)])
    assert whole["backends"] == picture


def test_of_each_discovery_the_worker_that_is_out_of_touch_is_believed() -> None:
    def state(*found: tuple[str, bool]) -> dict[str, Any]:
        return {"discovery": [{"name": name, "connected": connected} for name, connected in found]}

    whole = merge_states([state(("etcd", True), ("dns", False)), state(("etcd", False), ("dns", True))])
    assert whole["discovery"] == [{"name": "etcd", "connected": False}, {"name": "dns", "connected": False}]
    assert merge_states([state(("etcd", True))])["discovery"] == [{"name": "etcd", "connected": True}]


def test_traffic_limits_and_names_of_all_workers() -> None:
    one = {
        "policy": "fair",
        "key": "k",
        "running": 1,
        "concurrent": None,
        "requests": {"left": 3, "limit": 9},
    }
    two = {**one, "running": 2, "requests": {"left": 1, "limit": 9}}
    other = {"policy": "cap", "key": None, "running": 1, "concurrent": 4, "tokens": {"left": 1, "limit": 2}}
    whole = merge_states(
        [
            state(requests=2, rejected={"overloaded": 1}, key_names={"k": "ada"}, limits_used=[one]),
            state(requests=3, rejected={"overloaded": 2}, key_names={"l": "grace"}, limits_used=[two, other]),
            state(limits_used=[other]),
        ]
    )
    assert whole["requests"] == 5
    assert whole["rejected"] == {"overloaded": 3}
    assert whole["key_names"] == {"k": "ada", "l": "grace"}
    assert whole["limits_used"] == [
        {**one, "running": 3, "requests": {"left": 4, "limit": 18}},
        {**other, "running": 2, "concurrent": 8, "tokens": {"left": 2, "limit": 4}},
    ]


def test_a_limit_that_all_workers_count_together_is_not_added_up() -> None:
    one = {"policy": "fair", "key": "k", "shared": True, "running": 1, "concurrent": 6}
    two = {**one, "running": 2, "requests": {"left": 1, "limit": 9}}
    one["requests"] = {"left": 3, "limit": 9}
    whole = merge_states([{"limits_used": [each]} for each in (one, two)])
    assert whole["limits_used"] == [{**one, "running": 3, "requests": {"left": 1, "limit": 9}}]
    alone = merge_states([{"limits_used": [each]} for each in (one, {**two, "shared": False})])
    assert alone["limits_used"][0]["requests"] == {"left": 4, "limit": 18}


def test_loads_under_way_are_those_of_all_workers() -> None:
    waits = {"backend": None, "for_s": None, "expected_s": 9.0}
    runs = {"backend": "b0", "for_s": 1.0, "expected_s": 8.0}
    shelf = [{"backend": "b0", "models": {"m": {"state": "loading"}}}]
    states: list[dict[str, Any]] = [
        {"loading": {"backends": shelf, "under_way": {"m": waits, "n": waits}}, "holding": {"m": 2}},
        {"loading": {"backends": [], "under_way": {"m": runs}}, "holding": {"m": 1, "n": 1}},
        {"loading": {"backends": [], "under_way": {"m": waits}}},
        {},
    ]
    whole = merge_states(states)
    assert whole["loading"] == {"backends": shelf, "under_way": {"m": runs, "n": waits}}
    assert whole["holding"] == {"m": 3, "n": 1}


def test_the_longest_silence_is_told() -> None:
    states: list[dict[str, Any]] = [{"contact_age_s": {"a": 1.0, "b": 5.0}}, {"contact_age_s": {"a": 2.0}}]
    assert merge_states(states)["contact_age_s"] == {"a": 2.0, "b": 5.0}
