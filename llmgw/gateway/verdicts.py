"""What a backend's refusal, error or fault means: for the backend's record, and for the client.

A response is judged before anything has been sent to the client: the attempt's lease is
told how it went, and the client gets the resulting error unless another backend does better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from llmgw.core.retry import retry_after
from llmgw.errors import (
    ContextLengthExceeded,
    GatewayError,
    InvalidRequest,
    ModelLoading,
    Overloaded,
    UpstreamError,
)
from llmgw.gateway.backend_http import seconds_of
from llmgw.gateway.failed import Failed
from llmgw.values import Usage

if TYPE_CHECKING:
    from llmgw.core.http import ResponseHead
    from llmgw.gateway.attempt import Attempt
    from llmgw.wire.sink import UpstreamFault

COLLECTED = frozenset({401, 429, 500, 502, 503, 504})
"""Statuses whose body is read whole before it is decided whether the client gets it."""
ELSEWHERE = frozenset({401, 429, 502, 503, 504})
"""Statuses after which another backend may be asked. 401 is about the gateway's own key, since no
other reaches a backend; but it is not held against it: what is asked for may be why."""
MAX_BUSY_S = 60.0
"""The longest pause that a backend's ``Retry-After`` can ask for."""
SHORT_DEADLINE_S = 5.0
"""A request with less time than this says nothing about the backend when its time is over."""
NOT_LOADED = b"model is not loaded"
"""From a llama-server in router mode that does not load models by itself."""
PROXY_ERROR = b"proxy error:"
"""From the same, as plain text with status 500, if the process of a model ended before it answered."""


class _TooLongError(msgspec.Struct):
    type: str = ""
    n_prompt_tokens: int | None = None


class _TooLong(msgspec.Struct):
    error: _TooLongError


def refused(attempt: Attempt, head: ResponseHead, body: bytes) -> Failed:
    """A 400 is the client's fault, and the client gets it as it came. But the one for a prompt
    that is too long tells its exact length, and another backend may have a larger window."""
    attempt.lease.finish(attempt.gateway.clock(), ok=True, reason="status_400")
    attempt.account.usage = Usage()
    if NOT_LOADED in body and _is_gone(attempt):
        return Failed(_gone(attempt))
    tokens = _exceeding_tokens(body)
    error = InvalidRequest("the backend refused the request")
    if tokens is not None:
        error = ContextLengthExceeded("the prompt is longer than the backend's window")
        error.may_retry = True
    return Failed(error, (head, body), exact_tokens=tokens)


def unfit(attempt: Attempt, head: ResponseHead, body: bytes) -> Failed:
    """A response that is not a stream, for a client whose stream has begun: an error event tells it."""
    reason = "done" if head.status < 400 else f"status_{head.status}"
    attempt.lease.finish(attempt.gateway.clock(), ok=True, reason=reason)
    error = UpstreamError(f"the backend answered {head.status} in place of a stream")
    error.may_retry = False
    return Failed(error, (head, body))


def judge(attempt: Attempt, head: ResponseHead, body: bytes) -> Failed:
    """What a 401, a 429 or a 5xx means: for the lease, and for the client."""
    now_s = attempt.gateway.clock()
    lease, status, name = attempt.lease, head.status, attempt.request.model
    answer = (head, body)
    wait_s = seconds_of(head.get(b"retry-after"))
    if status in (429, 503) and wait_s is not None:
        lease.finish(now_s, ok=True, reason="busy", busy_until_s=now_s + min(wait_s, MAX_BUSY_S))
        error: GatewayError = Overloaded(f"the backend of {name!r} is busy", retry_after_s=wait_s)
        error.may_retry = True
        return Failed(error, answer)
    if status == 503 and _is_loading(body):
        lease.finish(now_s, ok=True, reason="loading")
        error = ModelLoading(
            f"{name!r} is being loaded", retry_after_s=retry_after(2.0, attempt.gateway.dice)
        )
        error.may_retry = True
        return Failed(error)
    if status == 500 and attempt.llama_server and body.startswith(PROXY_ERROR):
        lease.finish(now_s, ok=False, reason="reset")
        if _is_gone(attempt, noticed=False):
            return Failed(_gone(attempt))
        error = UpstreamError(f"the backend of {name!r} has lost its process")
        error.may_retry = True
        return Failed(error, answer)
    no_verdict = status in (401, 429) or (status == 500 and _is_json_error(body))
    lease.finish(now_s, ok=no_verdict, reason=f"status_{status}")
    error = UpstreamError(f"the backend of {name!r} answered {status}")
    error.may_retry = status in ELSEWHERE
    if status == 401:
        error.should_retry = False
    return Failed(error, answer)


def verdict(attempt: Attempt, fault: UpstreamFault) -> tuple[bool, str]:
    """What ``fault`` says about the backend: ``ok`` and ``reason`` of :meth:`Lease.finish`.

    Our own faults are not held against it. Nor is a request that ran out of time, if the time
    was short (one impatient caller could take the backend away from all others) or the answer
    had begun (a long answer is not a failure).
    """
    lease = attempt.lease
    if fault.reason == "local":
        return True, "local"
    if fault.reason == "response_limit":
        return True, "response_limit"
    if fault.reason == "timeout_total" and (
        lease.ttft_s is not None or attempt.until_s - lease.started_s < SHORT_DEADLINE_S
    ):
        return True, "deadline"
    return False, fault.reason


def _is_gone(attempt: Attempt, *, noticed: bool = True) -> bool:
    """The model is no longer in memory there. See :meth:`llmgw.loads.Loads.is_gone`."""
    loads, name = attempt.gateway.holding.loads, attempt.request.model
    return loads is not None and loads.is_gone(attempt.choice.backend.id, name, noticed=noticed)


def _gone(attempt: Attempt) -> ModelLoading:
    error = ModelLoading(
        f"{attempt.request.model!r} is not loaded any more",
        retry_after_s=retry_after(1.0, attempt.gateway.dice),
    )
    error.may_retry = True
    return error


def _exceeding_tokens(body: bytes) -> int | None:
    """The length in tokens of a prompt that was too long, from llama-server's error (``type``
    ``exceed_context_size_error``, ``n_prompt_tokens``); ``None`` for other errors."""
    try:
        error = msgspec.json.decode(body, type=_TooLong).error
    except (msgspec.DecodeError, RecursionError):
        return None
    return error.n_prompt_tokens if error.type == "exceed_context_size_error" else None


def _is_loading(body: bytes) -> bool:
    """llama-server's 503 while it loads its model: a state, not a failure."""
    return b"Loading model" in body


def _is_json_error(body: bytes) -> bool:
    """A 500 with a JSON error: llama-server answers like this to a message it cannot use."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(parsed, dict) and "error" in parsed
