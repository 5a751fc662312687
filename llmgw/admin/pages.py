"""Pages of the admin listener: one path, one method, one function that answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request

from llmgw.errors import ConfigError, GatewayError, MethodNotAllowed, PluginError

JSON = b"application/json; charset=utf-8"
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Nothing inline, nothing from elsewhere (W3C Content Security Policy Level 3)."""
encode = msgspec.json.Encoder(enc_hook=str).encode


class Answer(NamedTuple):
    """What a page says; JSON unless it says otherwise."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON


class Page(Resource):
    """Answers ``method``, and HEAD where that is GET.

    :param answer: given the request; may raise, and may be asynchronous. What it
        raises is told to the client without a traceback, see :func:`fault_answer`.
        A client that leaves does not cancel it.
    """

    isLeaf = True

    def __init__(
        self, answer: Callable[[Request], Answer | Deferred[Answer]], method: bytes = b"GET"
    ) -> None:
        super().__init__()
        self._answer = answer
        self._allowed = (b"GET", b"HEAD") if method == b"GET" else (method,)

    def render(self, request: Request) -> int:
        if request.method not in self._allowed:
            return send(request, not_allowed(request, self._allowed))
        gone = request.notifyFinish()
        gone.addErrback(lambda _: None)
        answering: Deferred[Any] = maybeDeferred(self._answer, request)
        answering.addErrback(fault_answer)
        answering.addCallback(lambda answer: NOT_DONE_YET if gone.called else send(request, answer))
        return NOT_DONE_YET


def send(request: Request, answer: Answer, *, keep: bool = False) -> int:
    """Answer ``request`` in full.

    :param keep: the headers are set already.
    """
    request.setResponseCode(answer.status)
    if not keep:
        set_headers(request, answer.content_type)
    request.setHeader(b"content-length", b"%d" % len(answer.body))
    request.write(b"" if request.method == b"HEAD" else answer.body)
    request.finish()
    return NOT_DONE_YET


def set_headers(request: Request, content_type: bytes) -> None:
    """Those that every answer has. A page is nobody's frame and loads nothing from elsewhere."""
    request.responseHeaders.removeHeader(b"server")
    request.setHeader(b"content-type", content_type)
    request.setHeader(b"cache-control", b"no-store")
    request.setHeader(b"x-content-type-options", b"nosniff")
    request.setHeader(b"referrer-policy", b"no-referrer")
    request.setHeader(b"content-security-policy", POLICY)


def not_allowed(request: Request, allowed: tuple[bytes, ...]) -> Answer:
    """405, with what is allowed."""
    request.setHeader(b"allow", b", ".join(allowed))
    return error_answer(MethodNotAllowed(f"use {allowed[0].decode('ascii')} here"))


def error_answer(error: GatewayError, **more: Any) -> Answer:
    """The form that the public listener's errors have."""
    fields: Mapping[str, Any] = {
        "message": error.message,
        "type": error.type,
        "code": error.code,
        "param": error.param,
    }
    return Answer(encode({"error": {**fields, **more}}), error.status)


_log = Logger()


def fault_answer(failure: Failure) -> Answer:
    """What a page raised, as an answer. Only what is not foreseen is logged."""
    fault = failure.value
    if isinstance(fault, GatewayError):
        return error_answer(fault)
    if isinstance(fault, ConfigError):
        faults = [{"where": each.where, "what": each.what} for each in fault.faults]
        error = GatewayError(str(fault), status=400, code="invalid_config")
        error.type = "invalid_request_error"
        return error_answer(error, faults=faults)
    if isinstance(fault, PluginError):
        return error_answer(GatewayError(str(fault), status=400, code="invalid_plugin"))
    _log.failure("a page of the admin listener", failure)
    return error_answer(GatewayError("The gateway's log has the reason."))
