"""A member of the fleet in plain values, for ``/api/state`` and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmgw.core.breaker import CLOSED, HALF_OPEN, OPEN, SLOW_START
from llmgw.core.standing import Standing

if TYPE_CHECKING:
    from llmgw.core.fleet import Fleet
    from llmgw.core.member import Member

WORST_FIRST = (OPEN, HALF_OPEN, SLOW_START, CLOSED)


def member_snapshot(fleet: Fleet, member: Member, now_s: float) -> dict[str, Any]:
    """Everything about ``member``."""
    spec, view, models = member.spec, member.profile.view, member.models
    states = {name: breaker.current(now_s) for name, breaker in member.breakers.items()}
    standings = [member.standing(name, now_s, fleet.room(member, name)[0]) for name in models or ("",)]
    standing = Standing.READY if Standing.READY in standings else standings[0]
    overall = next(each for each in WORST_FIRST if each in states.values() or each is CLOSED)
    detail = "" if member.health is None else member.health.detail
    if standing is Standing.EJECTED and member.down is None:
        detail = f"its requests failed, the last one: {member.fault}"
    available = standing is Standing.READY and not member.draining and not member.removed
    return {
        "id": spec.id,
        "url": spec.url,
        "models": None if models is None else list(models),
        "in_flight": view.in_flight,
        "cap": member.cap,
        "slots": member.backend.slots,
        "busy_slots": view.busy_slots,
        "deferred": view.deferred,
        "kv_use": view.kv_use,
        "gpu_use": view.gpu_use,
        "ttft_s": view.ttft_s,
        "ttft_samples": view.ttft_samples,
        "token_rate": view.token_rate,
        "prefill_rate": view.prefill_rate,
        "failure_streak": view.failure_streak,
        "breaker": overall.value,
        "breakers": {name: state.value for name, state in states.items()},
        "standing": standing.value,
        "available": available,
        "warmth": view.warmth,
        "draining": member.draining,
        "removed": member.removed,
        "loading": standing is Standing.LOADING,
        "kind": member.kind,
        "cold": None if member.stock is None else sorted(member.stock.cold),
        "context_length": member.backend.context_length,
        "weight": spec.weight,
        "labels": dict(spec.labels),
        "detail": detail,
    }
