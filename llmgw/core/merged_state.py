"""Merges the states of several workers into that of one gateway, for ``/api/state``.

Figures of which each worker has a part are added up. What all workers see alike, such as
a backend's slots, is taken from the first one; of what they may see differently, such as a
breaker, the worst is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SUMMED = (
    *("in_flight", "waiting", "connections", "held_bytes"),
    *("requests", "errors", "retries", "client_aborts", "output_tokens"),
)
"""Figures of the gateway."""
COUNTED = ("refusals", "in_flight_by_key", "rejected", "holding")
"""Tables of figures by name."""
SUMMED_OF_BACKEND = ("in_flight", "idle_connections", "connects", "ttft_samples", "requests", "errors")
MEAN_OF_BACKEND = ("ttft_s", "token_rate", "prefill_rate", "score")
MAX_OF_BACKEND = ("failure_streak", "busy_slots", "deferred", "kv_use", "gpu_use", "loading", "draining")
MIN_OF_BACKEND = ("available", "warmth")
BREAKERS = ("closed", "slow_start", "half_open", "open")
"""From good to bad."""
STANDINGS = ("ready", "busy", "loading", "ejected", "down")


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state made of several, of at least one."""
    whole = dict(states[0])
    for key in SUMMED:
        whole[key] = sum(state.get(key, 0) for state in states)
    for key in COUNTED:
        whole[key] = _counted(state.get(key, {}) for state in states)
    if loading := [state["loading"] for state in states if state.get("loading")]:
        whole["loading"] = _loading(loading)
    whole["models"] = _models(states)
    names = {key: name for state in states for key, name in state.get("key_names", {}).items()}
    _put(whole, "key_names", names)
    _put(whole, "limits_used", _limits(states))
    _put(whole, "discovery", _discoveries(states))
    _put(whole, "contact_age_s", _oldest(state.get("contact_age_s", {}) for state in states))
    views: dict[str, list[Mapping[str, Any]]] = {}
    for state in states:
        for backend in state.get("backends", ()):
            views.setdefault(backend["id"], []).append(backend)
    whole["backends"] = [_backend(each) for each in views.values()]
    return whole


def _counted(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    counted: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            counted[name] = counted.get(name, 0) + value
    return counted


def _oldest(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    ages_s: dict[str, float] = {}
    for table in tables:
        for name, age_s in table.items():
            ages_s[name] = max(age_s, ages_s.get(name, 0.0))
    return ages_s


def _models(states: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    models: dict[str, list[str]] = {}
    for state in states:
        for name, ids in state.get("models", {}).items():
            known = models.setdefault(name, [])
            known += [each for each in ids if each not in known]
    return models


def _discoveries(states: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each source by the worker that has lost contact, if one has: that one's entry says more."""
    worst: dict[str, Mapping[str, Any]] = {}
    for state in states:
        for each in state.get("discovery", ()):
            if worst.setdefault(each["name"], each)["connected"]:
                worst[each["name"]] = each
    return list(worst.values())


def _limits(states: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    limits: dict[Any, dict[str, Any]] = {}
    for state in states:
        for each in state.get("limits_used", ()):
            place = (each["policy"], each["key"])
            limits[place] = _limit(limits[place], each) if place in limits else each
    return list(limits.values())


def _limit(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What two workers know of the same limit, which each counts by itself or all share."""
    whole = dict(one)
    if one.get("shared") and other.get("shared"):
        whole["running"] = one["running"] + other["running"]
        for unit in ("requests", "tokens"):
            if unit in one and unit in other:
                whole[unit] = min(one[unit], other[unit], key=lambda told: told["left"])
        return whole
    for key in ("running", "concurrent"):
        if one[key] is not None and other[key] is not None:
            whole[key] = one[key] + other[key]
    for unit in ("requests", "tokens"):
        if unit in one and unit in other:
            whole[unit] = {key: one[unit][key] + other[unit][key] for key in ("left", "limit")}
    return whole


def _loading(views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Models in memory as the first worker sees them, and the loads of all workers; of several
    loads of one model the one that has been placed on a backend."""
    under_way: dict[str, Any] = {}
    for view in views:
        for model, load in view["under_way"].items():
            if model not in under_way or load["backend"] is not None:
                under_way[model] = load
    return {**views[0], "under_way": under_way}


def _backend(views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    whole = dict(views[0])
    for key in SUMMED_OF_BACKEND:
        _put(whole, key, sum(_told(views, key)))
    for key in MEAN_OF_BACKEND:
        told = list(_told(views, key))
        _put(whole, key, sum(told) / len(told) if told else None)
    for key in MAX_OF_BACKEND:
        _put(whole, key, max(_told(views, key), default=None))
    for key in MIN_OF_BACKEND:
        _put(whole, key, min(_told(views, key), default=None))
    _put(whole, "breaker", _worst(BREAKERS, _told(views, "breaker")))
    _put(whole, "standing", _worst(STANDINGS, _told(views, "standing")))
    breakers: dict[str, list[str]] = {}
    for view in views:
        for model, state in view.get("breakers", {}).items():
            breakers.setdefault(model, []).append(state)
    _put(whole, "breakers", {model: _worst(BREAKERS, states) for model, states in breakers.items()})
    return whole


def _told(views: Iterable[Mapping[str, Any]], key: str) -> Iterable[Any]:
    return (view[key] for view in views if view.get(key) is not None)


def _put(whole: dict[str, Any], key: str, value: Any) -> None:
    """Set a key that is there: what a version of the gateway does not report is not added."""
    if key in whole:
        whole[key] = value


def _worst(order: Sequence[str], words: Iterable[str]) -> str | None:
    """The word that comes last in ``order``; an unknown one counts as worst."""
    return max(words, key=lambda word: order.index(word) if word in order else len(order), default=None)
