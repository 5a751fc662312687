"""The states of several workers as that of one gateway, for ``/api/state``.

A figure that each worker has a part of is added up. Of what all of them see, such
as a backend's slots, the first worker's word is taken, and of what they may see
differently, such as a breaker, the worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SUMMED = (
    *("in_flight", "waiting", "connections", "held_bytes"),
    *("requests", "errors", "retries", "client_aborts", "output_tokens"),
)
"""Of the whole."""
COUNTED = ("refusals", "in_flight_by_key", "rejected", "holding")
"""Tables of figures."""
SUMMED_OF_BACKEND = ("in_flight", "idle_connections", "connects", "ttft_samples", "requests", "errors")
MEAN_OF_BACKEND = ("ttft_s", "token_rate", "prefill_rate", "score")
MOST_OF_BACKEND = ("failure_streak", "busy_slots", "deferred", "kv_use", "gpu_use", "loading", "draining")
LEAST_OF_BACKEND = ("available", "warmth")
BREAKERS = ("closed", "slow_start", "half_open", "open")
"""From good to bad."""
STANDINGS = ("ready", "busy", "loading", "ejected", "down")


def united(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of several, one at least."""
    whole = dict(states[0])
    for key in SUMMED:
        whole[key] = sum(state.get(key, 0) for state in states)
    for key in COUNTED:
        counted: dict[str, Any] = {}
        for state in states:
            for name, value in state.get(key, {}).items():
                counted[name] = counted.get(name, 0) + value
        whole[key] = counted
    if any(state.get("loading") for state in states):
        whole["loading"] = _loading([state["loading"] for state in states if state.get("loading")])
    models: dict[str, list[str]] = {}
    for state in states:
        for name, ids in state.get("models", {}).items():
            known = models.setdefault(name, [])
            known += [each for each in ids if each not in known]
    whole["models"] = models
    _put(
        whole,
        "key_names",
        {key: name for state in states for key, name in state.get("key_names", {}).items()},
    )
    limits: dict[Any, dict[str, Any]] = {}
    for state in states:
        for each in state.get("limits_used", ()):
            place = (each["policy"], each["key"])
            limits[place] = _limit(limits[place], each) if place in limits else each
    _put(whole, "limits_used", list(limits.values()))
    # Every worker asks for itself: the word of one that is out of touch says more.
    found = [each for state in states for each in state.get("discovery", ())]
    worst: dict[str, Mapping[str, Any]] = {}
    for each in found:
        if worst.setdefault(each["name"], each)["connected"]:
            worst[each["name"]] = each
    _put(whole, "discovery", list(worst.values()))
    ages_s: dict[str, float] = {}
    for state in states:
        for name, age_s in state.get("contact_age_s", {}).items():
            ages_s[name] = max(age_s, ages_s.get(name, 0.0))
    _put(whole, "contact_age_s", ages_s)
    views: dict[str, list[Mapping[str, Any]]] = {}
    for state in states:
        for backend in state.get("backends", ()):
            views.setdefault(backend["id"], []).append(backend)
    whole["backends"] = [_backend(each) for each in views.values()]
    return whole


def _limit(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What two workers know of the same limit, which each counts by itself, or all of them together."""
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
    """What is in memory, by the first one's word; loads under way are those of all, and of
    several the one that has a place."""
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
    for key in MOST_OF_BACKEND:
        _put(whole, key, max(_told(views, key), default=None))
    for key in LEAST_OF_BACKEND:
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
    """Change what was there; a version that does not tell something does not begin to."""
    if key in whole:
        whole[key] = value


def _worst(order: Sequence[str], words: Iterable[str]) -> str | None:
    """The last in ``order`` of those said; a word that is not in it is worse than all."""
    return max(words, key=lambda word: order.index(word) if word in order else len(order), default=None)
