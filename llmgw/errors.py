"""Errors: one class per decision that a caller or a client can take.

Each :class:`GatewayError` answers two questions: what does the client get, and may another
backend be tried. ``gateway.answers`` turns it into bytes in the dialect of the route;
nothing else builds error bodies.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from llmgw.plain_text import plain


class GatewayError(Exception):
    """An error that is sent to the client.

    :param message: for people; must not hold secrets or internal addresses.
    :param param: the request field at fault.
    :param retry_after_s: seconds, sent as ``Retry-After`` and ``retry-after-ms``.
    :param code: overrides the class's code.
    """

    status = 500
    code = "internal_error"
    type = "server_error"
    may_retry = False
    """Another backend may succeed where this one failed."""
    should_retry: bool | None = None
    """Sent as ``x-should-retry``, which the official clients obey."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        code: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers: list[tuple[str, str]] = []
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status


class InvalidRequest(GatewayError):
    """400: the request itself is wrong; sending it again cannot help."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """400: no backend of the model has a window that large."""

    code = "context_length_exceeded"
    should_retry = False


class InvalidApiKey(GatewayError):
    """401: no valid key."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"
    should_retry = False


class ModelNotAllowed(GatewayError):
    """403: the model is not in the key's scope."""

    status = 403
    code = "model_not_allowed"
    type = "permission_error"


class RequestRefused(GatewayError):
    """403: a request filter does not let it through."""

    status = 403
    code = "request_refused"
    type = "permission_error"
    should_retry = False


class NotFound(GatewayError):
    """404: no such path."""

    status = 404
    code = "not_found"
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    """404: nobody here serves that model."""

    code = "model_not_found"


class MethodNotAllowed(GatewayError):
    """405: the path exists, but not with this method."""

    status = 405
    code = "method_not_allowed"
    type = "invalid_request_error"


class RequestTimeout(GatewayError):
    """408: head or body came too slowly."""

    status = 408
    code = "request_timeout"
    type = "invalid_request_error"


class BodyTooLarge(GatewayError):
    """413: the body is longer than allowed."""

    status = 413
    code = "body_too_large"
    type = "invalid_request_error"


class UnsupportedEncoding(GatewayError):
    """415: a content coding or media type that is not supported."""

    status = 415
    code = "unsupported_encoding"
    type = "invalid_request_error"


class RateLimited(GatewayError):
    """429: a limit of the key or of all is reached; the message says which."""

    status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"


class UpstreamError(GatewayError):
    """502: the backend broke before its first byte and retries are spent."""

    status = 502
    code = "upstream_error"
    type = "upstream_error"
    may_retry = True


class ResponseTooLarge(GatewayError):
    """502: the answer is larger than this key, or this model, may have."""

    status = 502
    code = "response_too_large"
    type = "upstream_error"
    should_retry = False


class Overloaded(GatewayError):
    """503: every eligible backend is at its cap."""

    status = 503
    code = "overloaded"
    type = "overloaded_error"


class NoBackend(GatewayError):
    """503: the model is known, but no backend that serves it is alive."""

    status = 503
    code = "no_backend"
    type = "overloaded_error"


class ModelLoading(GatewayError):
    """503: the model is being loaded, and the request could not be held any longer."""

    status = 503
    code = "model_loading"
    type = "overloaded_error"


class LoadUndone(ModelLoading):
    """503: a load failed, but not because of the model: somebody undid it, or took the room first.
    It may be tried again."""


class ForeignServer(ModelLoading):
    """The server is not of the kind that the loader knows. No models are loaded there by name: it
    serves what it serves."""


class UpstreamTimeout(GatewayError):
    """504: the backend did not answer in time."""

    status = 504
    code = "upstream_timeout"
    type = "upstream_error"
    may_retry = True


OUR_FAULTS = (errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE)
"""No local port or descriptor is left, which says nothing about the backend."""

PLUGIN_FAULTS = (BaseException,)
"""What a plugin may raise without harm to the gateway: all there is. A library that it uses may call
``sys.exit``, or be one of asyncio, whose ``CancelledError`` is no ``Exception``; signals of the process do
not come this way, but through the reactor."""


WHERE_CHARACTERS, WHAT_CHARACTERS = 200, 1000
"""Longer texts of a fault are cut, as either may quote a file."""


class ConfigFault(Exception):
    """One fault of a configuration, as one line that is safe for logs and terminals.

    :param where: the path of the key, such as ``backends[1].url``; ``""`` for the whole file.
    """

    def __init__(self, where: str, what: str) -> None:
        where, what = plain(where, WHERE_CHARACTERS), plain(what, WHAT_CHARACTERS)
        super().__init__(f"{where}: {what}" if where else what)
        self.where = where
        self.what = what


class ConfigError(Exception):
    """A configuration is refused; ``faults`` holds every fault found, in order of appearance."""

    def __init__(self, faults: Sequence[ConfigFault], source: str = "") -> None:
        self.faults = tuple(faults)
        self.source = source
        head = f"{source}: " if source else ""
        super().__init__("\n".join(f"{head}{fault}" for fault in self.faults))


class PluginError(Exception):
    """A plugin is missing, broken, there twice, or of another contract version; the message is one line."""
