"""Builds the bytes of errors and rate limits, in the dialect of the route.

Forms: OpenAI ``{"error": {"message", "type", "code", "param"}}``; Anthropic
``{"type": "error", "error": {"type", "message"}}``; Ollama ``{"error": "…"}``.
Headers that the official clients obey: ``Retry-After`` (whole seconds,
RFC 9110 section 10.2.3), ``retry-after-ms``, ``x-should-retry``, and the six
``x-ratelimit-*`` with durations such as ``1s`` or ``6m0s``, and ``RateLimit``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from llmgw.errors import GatewayError
from llmgw.gateway.routes import ANTHROPIC, OLLAMA

if TYPE_CHECKING:
    from llmgw.values import Decision

_encode = msgspec.json.Encoder().encode

JSON = (b"content-type", b"application/json; charset=utf-8")

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: GatewayError, dialect: str) -> bytes:
    """The body of an error answer."""
    if dialect == ANTHROPIC:
        return _encode({"type": "error", "error": _anthropic(error)})
    if dialect == OLLAMA:
        return _encode({"error": error.message})
    return _encode({"error": _openai(error)})


def error_from_answer(status: int, body: bytes) -> GatewayError:
    """A backend's answer that is not a stream, as an error for a client whose stream has begun."""
    message, code = f"the backend answered {status} in place of a stream", None
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        said = None
    error = said.get("error") if isinstance(said, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        message = error["message"]
        kind = error.get("code") if isinstance(error.get("code"), str) else error.get("type")
        code = kind if isinstance(kind, str) else None
    return GatewayError(message, status=status if status >= 400 else 502, code=code or "upstream_error")


def error_headers(error: GatewayError) -> list[tuple[bytes, bytes]]:
    """The headers of an error answer, ``content-type`` included."""
    headers = [JSON]
    if error.retry_after_s is not None:
        wait_s = max(0.001, error.retry_after_s)
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(wait_s))))
        headers.append((b"retry-after-ms", b"%d" % math.ceil(wait_s * 1000)))
    if error.should_retry is not None:
        headers.append((b"x-should-retry", b"true" if error.should_retry else b"false"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    headers += [(name.encode("ascii"), value.encode("ascii", "replace")) for name, value in error.headers]
    return headers


def error_event(
    error: GatewayError, dialect: str, meter_dialect: str, *, inside_event: bool, number: int = 0
) -> bytes:
    """An error as the last event of a stream.

    In ``/v1/responses`` it says all twice: flat, as the API's reference has it, and within ``error``,
    as OpenAI sends it and its clients look for what they raise.

    :param inside_event: the backend was cut inside an event; a blank line first
        ends that fragment, so that the error is an event of its own.
    :param number: how many events came before, which ``/v1/responses`` counts from 0.
    """
    start = b"\n\n" if inside_event else b""
    if dialect == OLLAMA:
        return start[:1] + error_body(error, dialect) + b"\n"
    if dialect == ANTHROPIC:
        return start + b"event: error\ndata: " + error_body(error, dialect) + b"\n\n"
    if meter_dialect == "responses":
        told = _openai(error)
        body = {**told, "type": "error", "sequence_number": number, "error": told}
        return start + b"event: error\ndata: " + _encode(body) + b"\n\n"
    return start + b"data: " + error_body(error, dialect) + b"\n\n"


_REQUEST_LIMIT = (
    b"x-ratelimit-limit-requests: %d\r\nx-ratelimit-remaining-requests: %d\r\n"
    b"x-ratelimit-reset-requests: %b\r\n"
)
_TOKEN_LIMIT = _REQUEST_LIMIT.replace(b"requests", b"tokens")
_REQUEST_POLICY = b'"requests";q=%d;w=60'
_TOKEN_POLICY = b'"tokens";q=%d;w=60'
_REQUESTS_LEFT = b'"requests";r=%d;t=%d'
_TOKENS_LEFT = b'"tokens";r=%d;t=%d'


def limit_lines(decision: Decision) -> bytes:
    """The header lines for a limiter's decision: OpenAI's ``x-ratelimit-*``, and the
    ``RateLimit`` and ``RateLimit-Policy`` of draft-ietf-httpapi-ratelimit-headers.

    The draft's ``t`` must not be later than ``Retry-After``, so a refused request gets that for it.
    """
    requests, tokens = decision.requests, decision.tokens
    wait_s = math.ceil(decision.retry_after_s)
    if requests is not None:
        limit, left, reset_s = requests.limit, max(0, requests.remaining), requests.reset_s
        lines = _REQUEST_LIMIT % (limit, left, duration(reset_s))
        policy = _REQUEST_POLICY % limit
        state = _REQUESTS_LEFT % (left, wait_s or math.ceil(reset_s))
        if tokens is None:
            return b"%bratelimit-policy: %b\r\nratelimit: %b\r\n" % (lines, policy, state)
    elif tokens is None:
        return b""
    limit, left, reset_s = tokens.limit, max(0, tokens.remaining), tokens.reset_s
    own = _TOKEN_LIMIT % (limit, left, duration(reset_s))
    own_policy = _TOKEN_POLICY % limit
    own_state = _TOKENS_LEFT % (left, wait_s or math.ceil(reset_s))
    if requests is None:
        return b"%bratelimit-policy: %b\r\nratelimit: %b\r\n" % (own, own_policy, own_state)
    return b"%b%bratelimit-policy: %b, %b\r\nratelimit: %b, %b\r\n" % (
        *(lines, own, policy, own_policy),
        *(state, own_state),
    )


def duration(seconds: float) -> bytes:
    """Seconds in OpenAI's form: ``350ms``, ``1s``, ``6m0s``, ``1h2m3s``."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000) if seconds > 0 else b"0ms"
    whole = math.ceil(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return b"%dh%dm%ds" % (hours, minutes, left)
    if minutes:
        return b"%dm%ds" % (minutes, left)
    return b"%ds" % left


def _openai(error: GatewayError) -> dict[str, object]:
    return {"message": error.message, "type": error.type, "code": error.code, "param": error.param}


def _anthropic(error: GatewayError) -> dict[str, object]:
    kind = _ANTHROPIC_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    return {"type": kind, "message": error.message, "code": error.code}
