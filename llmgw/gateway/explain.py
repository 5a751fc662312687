"""``POST /api/explain``: what would happen to a request, without sending it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from llmgw.core.body import estimate_tokens, read_json
from llmgw.core.prompt import prefix_of
from llmgw.dropins import one_line
from llmgw.errors import PLUGIN_FAULTS, GatewayError, InvalidRequest, ModelNotFound
from llmgw.foreign import set_aside
from llmgw.gateway.gateway import fault_of
from llmgw.values import Backend, Choice, Request

if TYPE_CHECKING:
    from llmgw.gateway.gateway import Gateway


def explain(body: bytes, gateway: Gateway) -> dict[str, Any]:
    """The candidates with score and reason, the backends left out and why, and the choice.

    A copy of the router is asked, so that nothing changes: first for the choice, then for each
    candidate as if it were the only one.

    :raise GatewayError: the request would be refused with this error.
    """
    parsed = read_json(body, gateway.body_limits)
    target = gateway.target_of(parsed.model)
    fleet, now_s = gateway.fleet, gateway.clock()
    if not fleet.serves(target):
        raise ModelNotFound(f"no such model: {parsed.model[:256]!r}", param="model")
    request = Request(
        id="explain",
        model=target,
        prompt_tokens=estimate_tokens(parsed),
        max_tokens=parsed.max_tokens,
        prefix=prefix_of(body, target) if gateway.wants_prefix(target) else (),
        session=parsed.session,
        streaming=parsed.stream,
    )
    candidates: list[Backend] = []
    refusal: GatewayError | None = None
    try:
        candidates = fleet.candidates(request, now_s)
    except InvalidRequest:
        raise
    except GatewayError as error:
        refusal = error
    router = _copy(gateway.router, {id(c.profile): c.profile for c in candidates})
    choice = _ask(router, request, candidates, now_s) if candidates else None
    chosen = {backend.id for backend in candidates}
    return {
        "model": parsed.model,
        "target": target,
        "prompt_tokens": request.prompt_tokens,
        "candidates": [_judged(router, request, backend, now_s) for backend in candidates],
        "left_out": [
            {"backend": member["id"], "why": _why_out(member, request)}
            for member in fleet.snapshot(now_s)
            if member["id"] not in chosen
        ],
        "choice": None if choice is None else choice.backend.id,
        "why": None if choice is None else choice.why,
        "refusal": None if refusal is None else {"code": refusal.code, "message": refusal.message},
    }


def _copy(router: Any, kept: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(router, kept)
    except PLUGIN_FAULTS as fault:
        what = f"the router cannot be copied, and asking itself would change it: {one_line(fault)}"
        raise GatewayError(what, code="router_failed") from None


def _ask(router: Any, request: Request, candidates: list[Backend], now_s: float) -> Choice | None:
    """:raise GatewayError: the router fails; requests go by least connections then."""
    try:
        answer = router.choose(request, candidates[:], now_s)
    except PLUGIN_FAULTS as fault:
        raise GatewayError(f"the router raised {one_line(fault)}", code="router_failed") from None
    if answer is None:
        return None
    choice = answer if isinstance(answer, Choice) else Choice(answer)
    if not any(choice.backend is each for each in candidates):
        raise GatewayError(
            f"the router chose {set_aside(choice.backend)}, no candidate", code="router_failed"
        )
    wrong = fault_of(choice)
    if wrong is not None:
        raise GatewayError(f"the router chose {choice.backend.id} with {wrong}", code="router_failed")
    return choice


def _judged(router: Any, request: Request, backend: Backend, now_s: float) -> dict[str, Any]:
    """One candidate as the router judges it if it is the only one."""
    choice = _ask(router, request, [backend], now_s)
    profile = backend.profile
    return {
        "backend": backend.id,
        "score": None if choice is None else choice.score,
        "why": None if choice is None else choice.why,
        "in_flight": profile.in_flight,
        "max_connections": backend.max_connections,
        "ttft_s": profile.ttft_s,
    }


def _why_out(member: dict[str, Any], request: Request) -> str:
    models, model, window = member.get("models"), request.model, member.get("context_length")
    if models is not None and model not in models:
        return "does not serve the model"
    if member.get("draining"):
        return "draining"
    if model in (member.get("cold") or ()):
        return "the model is not loaded there"
    if member.get("cap") is not None and member["in_flight"] >= member["cap"]:
        return "at its cap"
    standing = str(member.get("standing") or "not available")
    if standing == "ready":
        if window is not None and window < request.prompt_tokens:
            return f"its window of {window} tokens is too small"
        return "no place is free there"
    return f"{standing}: {member['detail']}" if standing == "ejected" else standing
