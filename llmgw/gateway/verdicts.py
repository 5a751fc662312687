"""What a backend's refusal, error or fault means: for the backend's record, and for the client.

An answer is judged before anything has been sent to the client: the attempt's lease
is told how it went, and the client gets what comes of it if nobody else does better.
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

COLLECTED = frozenset({429, 500, 502, 503, 504})
"""A backend's answers that are read whole before it is decided who gets them."""
ELSEWHERE = frozenset({429, 502, 503, 504})
BUSY_MOST_S = 60.0
SHORT_DEADLINE_S = 5.0
NOT_LOADED = b"model is not loaded"
"""What a llama-server in router mode says that loads nothing by itself."""
PROXY_ERROR = b"proxy error:"
"""What it says, as plain text with status 500, when the process of a model has ended before an answer."""


class _TooLongError(msgspec.Struct):
    type: str = ""
    n_prompt_tokens: int | None = None


class _TooLong(msgspec.Struct):
    error: _TooLongError


def refused(attempt: Attempt, head: ResponseHead, body: bytes) -> Failed:
    """A 400 is the client's affair, and it gets the backend's own words; but one for
    a prompt that is too long tells its exact length, and another backend may have
    a larger window."""
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
    """No stream, for a client whose stream has begun: it is told by an event of its own."""
    reason = "done" if head.status < 400 else f"status_{head.status}"
    attempt.lease.finish(attempt.gateway.clock(), ok=True, reason=reason)
    error = UpstreamError(f"the backend answered {head.status} in place of a stream")
    error.may_retry = False
    return Failed(error, (head, body))


def judge(attempt: Attempt, head: ResponseHead, body: bytes) -> Failed:
    """What a backend's 429 or 5xx means: for the lease, and for the client."""
    now_s = attempt.gateway.clock()
    lease, status, name = attempt.lease, head.status, attempt.request.model
    answer = (head, body)
    wait_s = seconds_of(head.get(b"retry-after"))
    if status in (429, 503) and wait_s is not None:
        lease.finish(now_s, ok=True, reason="busy", busy_until_s=now_s + min(wait_s, BUSY_MOST_S))
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
    no_verdict = status == 429 or (status == 500 and _is_json_error(body))
    lease.finish(now_s, ok=no_verdict, reason=f"status_{status}")
    error = UpstreamError(f"the backend of {name!r} answered {status}")
    error.may_retry = status in ELSEWHERE
    return Failed(error, answer)


def verdict(attempt: Attempt, fault: UpstreamFault) -> tuple[bool, str]:
    """What ``fault`` says about the backend, as :meth:`Lease.finish` takes it.

    A fault of our own says nothing. Nor does the end of the request's own time when
    it was short, else one impatient caller could take the backend from all others;
    nor when the answer was coming along, since a long one is no failure.
    """
    lease = attempt.lease
    if fault.reason == "local":
        return True, "dropped"
    if fault.reason == "response_limit":
        return True, "response_limit"
    if fault.reason == "timeout_total" and (
        lease.ttft_s is not None or attempt.until_s - lease.started_s < SHORT_DEADLINE_S
    ):
        return True, "deadline"
    return False, fault.reason


def _is_gone(attempt: Attempt, *, noticed: bool = True) -> bool:
    """The model is not in memory there any more. See :meth:`llmgw.loads.Loads.is_gone`."""
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
    """The exact length of a prompt that was too long for a llama-server, by its error
    (``type`` ``exceed_context_size_error``, ``n_prompt_tokens``); ``None`` for other errors."""
    try:
        error = msgspec.json.decode(body, type=_TooLong).error
    except (msgspec.DecodeError, RecursionError):
        return None
    return error.n_prompt_tokens if error.type == "exceed_context_size_error" else None


def _is_loading(body: bytes) -> bool:
    """llama-server's 503 while it reads its model: a state, not a failure."""
    return b"Loading model" in body


def _is_json_error(body: bytes) -> bool:
    """A well-formed JSON 500: llama-server answers so to a message it can't use."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(parsed, dict) and "error" in parsed
