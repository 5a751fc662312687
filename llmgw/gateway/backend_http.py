"""HTTP with a backend: what a request carries, and which of a response's headers pass."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_plus, urlsplit

import msgspec

from llmgw import __version__
from llmgw.errors import GatewayError, ResponseTooLarge, UpstreamError, UpstreamTimeout
from llmgw.wire.incoming import header_lines
from llmgw.wire.relay import BodyCollector
from llmgw.wire.sink import UpstreamFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmgw.config import BackendConfig
    from llmgw.core.http import RequestHead, ResponseHead
    from llmgw.wire.pool import Pool
    from llmgw.wire.upstream import UpstreamConnection

ERROR_BODY_BYTES = 1 << 20
TIMED_OUT = 408
LONG_BODY_BYTES = 1 << 17
"""A request body longer than this is not appended to the head, but sent by itself."""
PASSED_ON = (
    b"accept",
    b"traceparent",
    b"tracestate",
    b"anthropic-version",
    b"anthropic-beta",
    b"idempotency-key",
)
"""The only headers of a client that reach a backend, besides ``content-type``."""

_CREDENTIALS = frozenset(("api_key", "api-key", "apikey", "key", "access_token", "token"))
"""Query parameters that credentials are sent in; case does not matter."""

_TRACEPARENT = re.compile(rb"(?m)^traceparent: .*\r\n")
_AGENT = b"llmgw/" + __version__.encode("ascii")

_numbers = itertools.count()

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade content-length".split()
)
KEPT_BACK = HOP_BY_HOP | frozenset(
    b"server date set-cookie set-cookie2 x-powered-by x-request-id via alt-svc "
    b"strict-transport-security location content-location refresh".split()
)
"""Headers of a backend that never reach a client; it must not follow a ``location`` to a backend, for one."""
KEPT_BACK_PREFIXES = (
    b"x-llmgw-",
    b"access-control-",
    b"x-forwarded-",
    b"x-accel-",
    b"x-sendfile",
    b"x-lighttpd-send",
)
"""Prefixes of others. The last three are instructions to a proxy in front, which would send
something of its own in place of the answer."""


class Outbound:
    """What is the same for every request to one backend.

    :param config: the backend's table.
    """

    def __init__(self, config: BackendConfig) -> None:
        parts = urlsplit(config.url)
        self.base = parts.path.rstrip("/")
        host = parts.hostname or ""
        authority = f"[{host}]" if ":" in host else host
        default_port = 443 if parts.scheme == "https" else 80
        if parts.port is not None and parts.port != default_port:
            authority += f":{parts.port}"
        # The meter could not read a compressed answer (RFC 9110 section 12.5.3: no header would allow it).
        fixed = [
            (b"host", authority.encode("ascii")),
            (b"user-agent", _AGENT),
            (b"accept-encoding", b"identity"),
        ]
        if config.api_key is not None:
            fixed.append((b"authorization", b"Bearer " + config.api_key.reveal().encode("utf-8")))
        self._fixed = header_lines(fixed)
        self._place = f"outbound {next(_numbers)}"

    def request(
        self,
        path: str,
        head: RequestHead,
        content_type: bytes,
        request_id: str,
        body: bytes,
        traceparent: bytes | None = None,
    ) -> tuple[bytes, bytes]:
        """The bytes of a whole request, made from an allow-list, never copied from the client's.

        :param path: the backend's path.
        :param head: the client's, for its query and the few headers that pass.
        :param traceparent: replaces the client's.
        :return: what is sent first; and the body by itself if it is long, else ``b""``.
        """
        long = len(body) > LONG_BODY_BYTES
        begin: bytes | None = head.cache.get(self._place)
        if begin is None:
            begin = head.cache[self._place] = self._begin(path, head, content_type)
        if traceparent is not None:
            begin = b"%btraceparent: %b\r\n" % (_TRACEPARENT.sub(b"", begin), traceparent)
        first = b"%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            begin,
            request_id.encode("ascii"),
            len(body),
            b"" if long else body,
        )
        return first, body if long else b""

    def _begin(self, path: str, head: RequestHead, content_type: bytes) -> bytes:
        """The part of the head that is the same for all requests with the client's head ``head``."""
        target, query = self.base + path, head.query
        if query:
            query = _without_credentials(query)
            if query:
                target = f"{target}?{query}"
        passed = [(name, head.headers[name]) for name in PASSED_ON if name in head.headers]
        return b"POST %b HTTP/1.1\r\n%b%bcontent-type: %b\r\n" % (
            target.encode("latin-1"),
            self._fixed,
            header_lines(passed),
            content_type,
        )


def _without_credentials(query: str) -> str:
    """``query`` without credentials. Names are compared as a backend may read them, percent-decoded."""
    return "&".join(
        each
        for each in query.split("&")
        if unquote_plus(each.partition("=")[0]).strip().lower() not in _CREDENTIALS
    )


class Deadlines(msgspec.Struct, frozen=True):
    """How long an attempt may take; see ``UpstreamConnection.request``."""

    head_s: float
    first_token_s: float
    idle_s: float
    until_s: float


async def send_request(
    pool: Pool, write: Callable[[], tuple[bytes, bytes]], deadlines: Deadlines
) -> tuple[UpstreamConnection, ResponseHead]:
    """Send a request, and wait for the response head. Cancelling closes the connection.

    If the backend closed a kept connection without sending a byte, the request is sent again
    once, on a new connection: nobody has seen it (RFC 9112 section 9.3.1). So it is if a 408
    crossed the request on such a connection (RFC 9110 section 15.5.9).

    :param write: makes the request, see :meth:`Outbound.request`. Its result is as long as the
        prompt, and is not kept while the response is waited for, which may take minutes.
    :raise UpstreamFault: what went wrong.
    """
    may_be_kept = True
    while True:
        payload, rest = write()
        connection = pool.take() if may_be_kept else None
        fresh = connection is None
        if connection is None:
            connection = await pool.connect()
        answer = connection.request(
            "POST",
            payload,
            head_s=deadlines.head_s,
            first_token_s=deadlines.first_token_s,
            idle_s=deadlines.idle_s,
            until_s=deadlines.until_s,
            rest=rest,
        )
        del payload, rest
        try:
            head = await answer
        except UpstreamFault as fault:
            if fresh or not fault.stale:
                raise
        else:
            if fresh or head.status != TIMED_OUT:
                return connection, head
            connection.abort()
        finally:
            del answer  # it holds a fault, whose traceback holds this frame
        may_be_kept = False


async def read_body(connection: UpstreamConnection) -> bytes:
    """The whole of a short body. Cancelling closes the connection.

    :raise UpstreamFault: it was cut off, or is longer than :data:`ERROR_BODY_BYTES`.
    """
    collector = BodyCollector(connection, ERROR_BODY_BYTES)
    connection.deliver(collector)
    fault = await collector.done
    if fault is not None:
        raise fault
    return collector.body


def error_of(fault: UpstreamFault, model: str) -> GatewayError:
    """The error that tells the client of ``fault``; it never says where the backend is."""
    reason = fault.reason
    if reason.startswith("timeout") and reason != "timeout_connect":
        return UpstreamTimeout(f"the backend of {model!r} did not answer in time ({reason})")
    if reason == "response_limit":
        return ResponseTooLarge(f"the answer of {model!r} is larger than this key or model may have")
    if reason == "framing":
        return UpstreamError(f"the backend of {model!r} sent a malformed response: {fault.detail}")
    return UpstreamError(f"the backend of {model!r} could not be used ({reason})")


def passed_headers(head: ResponseHead) -> list[tuple[bytes, bytes]]:
    """The headers of a backend's response that the client gets."""
    nominated = head.get(b"connection")
    drop = KEPT_BACK
    if nominated:
        drop = drop | {token.strip().lower() for token in nominated.split(b",")}
    return [
        (name, value)
        for name, value in head.headers
        if name not in drop and not name.startswith(KEPT_BACK_PREFIXES)
    ]


def without_limits(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """``headers`` without the rate limits that a backend imposes on us: the caller has its own."""
    return [header for header in headers if not header[0].startswith((b"x-ratelimit-", b"ratelimit"))]


def passed_lines(head: ResponseHead, *, streamed: bool, limits: bool = True) -> bytes:
    """:func:`passed_headers` as header lines.

    :param streamed: the body is a stream; an nginx in front would buffer it unless told not to.
    :param limits: the backend's rate limits may pass.
    """
    place = f"passed {streamed} {limits}"
    lines: bytes | None = head.cache.get(place)
    if lines is None:
        headers = passed_headers(head)
        if not limits:
            headers = without_limits(headers)
        if streamed:
            headers.append((b"x-accel-buffering", b"no"))
            if not any(name == b"cache-control" for name, _ in headers):
                headers.append((b"cache-control", b"no-cache"))
        lines = head.cache[place] = header_lines(headers)
    return lines


def is_encoded(head: ResponseHead) -> bool:
    """Whether the body is compressed: then it passes, but the meter cannot read it."""
    coding = head.get(b"content-encoding")
    return coding is not None and coding.strip().lower() != b"identity"


def seconds_of(value: bytes | None) -> float | None:
    """The value of a header in seconds; ``None`` for a date or nonsense."""
    if value is None or not re.fullmatch(rb"\d{1,9}(?:\.\d{1,6})?", value.strip()):
        return None
    return float(value)
