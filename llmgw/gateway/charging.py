"""Charges a request to the rate limits, before a backend is chosen."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from twisted.internet.defer import CancelledError, Deferred, TimeoutError

from llmgw.core.retry import spread
from llmgw.errors import PLUGIN_FAULTS, RateLimited
from llmgw.finite import is_finite_number
from llmgw.foreign import at_most, set_aside
from llmgw.values import Cost, Decision, LimitState

if TYPE_CHECKING:
    from llmgw.gateway.account import Account
    from llmgw.gateway.answering import Answering
    from llmgw.gateway.gateway import Gateway
    from llmgw.values import Caller, Request

OUTPUT_GUESS = 512
"""Output tokens reserved for a request that sets no limit of its own."""
MAX_LIMIT = 1 << 63
"""Larger integers are looked at twice: the largest are beyond every float, and ``str`` refuses them."""
LIMITER_WAIT_S = 0.1
"""A limiter that takes longer is not waited for: the request passes."""


async def charge_limits(
    gateway: Gateway, answering: Answering, account: Account, caller: Caller, request: Request
) -> None:
    """Charge a request to all limits that apply to it. Cancelling cancels the limiter's Deferred.

    If the limiter is late, fails, or answers nonsense, the request passes and is counted as
    degraded.

    :param account: gets the reservation, which it settles.
    :param answering: gets the decision, for the headers.
    :raise RateLimited: one of them is reached.
    """
    policies = gateway.policies + caller.policies
    if not policies:
        return
    output = OUTPUT_GUESS if request.max_tokens is None else request.max_tokens
    try:
        decision = gateway.limiter.admit(caller.id, policies, Cost(1, request.prompt_tokens + output))
    except PLUGIN_FAULTS:
        gateway.limiter_failed()
        return
    if type(decision) is not Decision and isinstance(decision, Deferred):
        try:
            decision = await at_most(LIMITER_WAIT_S, decision, gateway.reactor)
        except TimeoutError:
            gateway.limiter_failed(f"gave no answer within {LIMITER_WAIT_S} s")
            return
        except (CancelledError, GeneratorExit):
            raise
        except PLUGIN_FAULTS:
            gateway.limiter_failed()
            return
    if not isinstance(decision, Decision):
        gateway.limiter_failed(f"answered {set_aside(decision)}, which is no decision")
        return
    if not _is_sound(decision):
        gateway.limiter_failed("answered a decision of wrong types")
        return
    if not decision.allowed and not _is_complete(decision):
        gateway.limiter_failed("refused without a policy, a unit and a time that can be told")
        return
    answering.decision = decision
    if not decision.allowed:
        raise RateLimited(
            f"rate limit {decision.policy!r} reached: {decision.unit}",
            retry_after_s=spread(decision.retry_after_s, gateway.dice),
        )
    account.charged = decision.reservation
    if decision.tokens is not None:
        gateway.top_ups.watch(account, request.prompt_tokens + output)


def _is_complete(decision: Decision) -> bool:
    """Whether a refusal by a limiter, which may be a plugin, has all that the client is told."""
    return (
        type(decision.policy) is str
        and type(decision.unit) is str
        and is_finite_number(decision.retry_after_s)
    )


def _is_sound(decision: Decision) -> bool:
    """Whether the decision is a yes or no, and the states of its limits are numbers."""
    return type(decision.allowed) is bool and _is_state(decision.requests) and _is_state(decision.tokens)


def _is_state(state: LimitState | None) -> bool:
    if state is None:
        return True
    if type(state) is not LimitState:
        return False
    limit, remaining, reset_s = state.limit, state.remaining, state.reset_s
    if (
        type(limit) is type(remaining) is int
        and 0 <= remaining <= limit < MAX_LIMIT
        and type(reset_s) is float
    ):
        return isfinite(reset_s)  # as nearly always: one call, in place of three
    return is_finite_number(limit) and is_finite_number(remaining) and is_finite_number(reset_s)
