"""The strict HTTP/1.1 profile: what a message head must look like, and what it says.

A message with ambiguous framing is refused, and nothing after it is parsed (RFC 9112 section
11.2). The rules here serve both readers, :mod:`.request_reader` and :mod:`.response_reader`.

Where this profile is stricter than the RFCs:

1. Lines end in CRLF; a lone CR or LF is refused (RFC 9112 section 2.2 allows it).
2. ``Content-Length`` may not be repeated, not even with the same value.
3. ``chunked`` is the only transfer coding, and HTTP/1.0 has none.
4. A GET or HEAD with content is refused.
5. Request fields with ``_`` in their name are dropped: CGI-like stacks take it for ``-``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from llmgw.core.target import Target, is_authority, parse_target


class HttpFault(Exception):
    """A peer sent something that this profile refuses. Nothing more may be parsed on the connection.

    :param status: what to answer, or what the client of a backend should see (502).
    :param code: machine-readable, as in the error body.
    :param message: for people; holds nothing that the peer has sent.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


Refuse = Callable[[str], HttpFault]
"""Makes the fault with a message: the same fault has another status in a request than in a response."""


def bad_request(message: str) -> HttpFault:
    """400: the request is malformed."""
    return HttpFault(400, "invalid_request", message)


def head_too_large(message: str) -> HttpFault:
    """431: the head is too large (RFC 6585 section 5)."""
    return HttpFault(431, "headers_too_large", message)


def bad_response(message: str) -> HttpFault:
    """502: a backend's response is malformed."""
    return HttpFault(502, "upstream_framing", message)


class HeadLimits(Struct, frozen=True):
    """Limits for everything in a message but its content. All in bytes, except ``count``.

    :param request_line: method, target and version, without its CRLF.
    :param header_line: one request header line, without its CRLF.
    :param headers: all header lines; for a response, the whole head.
    :param count: number of header lines, and of trailer lines.
    :param chunk_line: a chunk-size line with its extensions, without its CRLF.
    :param chunk_extensions: all chunk extensions of one body.
    :param trailers: the trailer section.
    """

    request_line: int = 4096
    header_line: int = 8192
    headers: int = 32768
    count: int = 100
    chunk_line: int = 256
    chunk_extensions: int = 4096
    trailers: int = 2048


DEFAULT_LIMITS = HeadLimits()


class RequestHead(Struct, frozen=True):
    """A request's head that meets every rule.

    Messages may share all of it (:class:`~llmgw.core.lines.HeadMemo`): only write to ``cache``.

    :param method: GET, HEAD, POST, OPTIONS or DELETE.
    :param path: as sent, percent-encoding kept; begins with ``/``.
    :param query: as sent, without the ``?``.
    :param version: 10 or 11.
    :param headers: lower-case names; repeated fields are joined with ``", "``.
        Without names with ``_``, without fields that ``Connection`` nominates, and without the
        length, so that messages that differ only in it share one dictionary.
    :param content_length: bytes of content; ``None`` if the field is absent.
    :param chunked: the content is chunked; if neither is given there is no content.
    :param keep_alive: the client allows another request on this connection.
    :param expect_continue: the client waits for ``100 Continue`` before its content.
    :param cache: for values that others derive from this head, each under a key of its own.
        Shared by all messages whose heads differ only in the digits of ``Content-Length``, on
        which values must not depend; what depends on anything else must be recognisably stale.
    """

    method: str
    path: str
    query: str
    version: int
    headers: dict[bytes, bytes]
    content_length: int | None
    chunked: bool
    keep_alive: bool
    expect_continue: bool
    cache: dict[str, Any]


class ResponseHead(Struct, frozen=True):
    """A final response's head that meets every rule; read-only like :class:`RequestHead`.

    :param status: 200 to 599.
    :param reason: as sent, may be empty.
    :param headers: lower-case names in the order sent, without what ``Connection`` nominates.
    :param content_length: the field's value; for HEAD and 304 no content follows.
    :param chunked: the same applies.
    :param keep_alive: the backend allows another request on this connection.
    :param cache: as in :class:`RequestHead`.
    """

    status: int
    reason: bytes
    headers: list[tuple[bytes, bytes]]
    content_length: int | None
    chunked: bool
    keep_alive: bool
    cache: dict[str, Any]

    def get(self, name: bytes) -> bytes | None:
        """The first value of a field.

        :param name: lower case.
        """
        for field, value in self.headers:
            if field == name:
                return value
        return None


Fields = list[tuple[bytes, bytes]]
"""Header fields in the order sent: lower-case name, value without outer white space."""

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
TEXT = rb"[\t\x20-\x7e\x80-\xff]"

_SERVED = frozenset(("GET", "HEAD", "POST", "OPTIONS", "DELETE"))
_ONCE = frozenset(
    (
        b"authorization",
        b"content-length",
        b"content-type",
        b"host",
        b"transfer-encoding",
        b"x-api-key",
    )
)
_REQUEST_LINE = re.compile(rb"(%b+) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])" % TOKEN)
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: (%b*))?" % TEXT)
LENGTH = re.compile(rb"[0-9]{1,15}")
"""A lawful Content-Length, on every listener."""
_OPTION = re.compile(rb"%b+" % TOKEN)
_HOPS = {b"keep-alive": frozenset((b"keep-alive",)), b"close": frozenset((b"close",))}
_NO_OPTIONS: frozenset[bytes] = frozenset()


def other_protocol(begin: bytes, empty_lines: int) -> HttpFault | None:
    """What is spoken in place of HTTP by who took this listener for another; ``None``: nobody knows.

    :param begin: of what stands in place of a request line.
    :param empty_lines: that stood before it.
    :source: the PROXY protocol 2.2, sections 2.1 and 2.2; RFC 8446 section 5.1.
    """
    # The second version begins with two empty lines and a NUL. More may not be here yet, and no request
    # begins so, nor with the first byte of TLS.
    if begin.startswith(b"PROXY ") or (empty_lines == 2 and begin.startswith(b"\x00")):
        message = "a PROXY header, which this listener does not take (`proxied:` does)"
        return HttpFault(400, "unexpected_proxy_header", message)
    if begin.startswith(b"\x16"):
        return HttpFault(400, "unexpected_tls", "TLS, which this listener does not speak")
    return None


def parse_request_line(line: bytes) -> tuple[str, Target, int]:
    """Parse a request line.

    :param line: without its CRLF.
    :return: method, target, version (10 or 11).
    :raise HttpFault: 400 malformed, 405 a method (or ``*``) that is not served, 505 another
        version.
    :source: RFC 9112 section 3.
    """
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise other_protocol(line, 0) or bad_request("malformed request line")
    name, target, major, minor = found.groups()
    if major != b"1" or minor not in b"01":
        raise HttpFault(505, "http_version", "only HTTP/1.1 and HTTP/1.0 are spoken here")
    method = name.decode("ascii")
    if method not in _SERVED or target == b"*":
        raise HttpFault(405, "method_not_allowed", "this method is not allowed here")
    try:
        return method, parse_target(target.decode("ascii")), 11 if minor == b"1" else 10
    except ValueError as error:
        raise bad_request(str(error)) from None


def connection_options(value: bytes) -> frozenset[bytes]:
    """The options of all ``Connection`` fields, lower case.

    :param value: of all instances, joined with commas.
    :raise ValueError: a member is not a token.
    :source: RFC 9110 section 7.6.1.
    """
    value = value.lower()
    usual = _HOPS.get(value)
    if usual is not None:
        return usual
    options = []
    for member in value.split(b","):
        option = member.strip(b" \t")
        if option:
            if not _OPTION.fullmatch(option):
                raise ValueError("malformed Connection header")
            options.append(option)
    return frozenset(options)


def _keep_alive(version: int, options: frozenset[bytes]) -> bool:
    """Whether the connection may be kept (RFC 9112 section 9.3)."""
    return b"close" not in options and (version == 11 or b"keep-alive" in options)


def keep_alive_timeout(value: bytes | None) -> float | None:
    """Seconds of ``Keep-Alive: timeout=5, max=100`` (RFC 2068 section 19.7.1.1); ``None`` if not given."""
    match = re.search(rb"timeout=(\d{1,6})", value or b"")
    return float(match[1]) if match else None


def _framing(
    version: int, length: bytes | None, coding: bytes | None, refuse: Refuse, unknown: Refuse
) -> tuple[int | None, bool]:
    """How the content is delimited: its length, whether it is chunked.

    :raise HttpFault: by ``unknown`` for a single coding that is not supported, else by ``refuse``.
    :source: RFC 9112 sections 6.1 to 6.3.
    """
    if coding is not None:
        if length is not None:
            raise refuse("both Content-Length and Transfer-Encoding")
        if version == 10:
            raise refuse("Transfer-Encoding on HTTP/1.0")
        coding = coding.lower()
        if coding != b"chunked":
            if _OPTION.fullmatch(coding) and coding != b"identity":
                raise unknown("a transfer coding other than chunked")
            raise refuse("Transfer-Encoding must be chunked, once")
        return None, True
    if length is None:
        return None, False
    if not LENGTH.fullmatch(length):
        raise refuse("malformed Content-Length")
    return int(length), False


def _unknown_coding(message: str) -> HttpFault:
    return HttpFault(501, "unknown_transfer_coding", message)


def _join_repeated(fields: Fields) -> dict[bytes, bytes]:
    """Combine repeated fields (RFC 9110 section 5.3).

    :raise HttpFault: 400, a field that must not be repeated came twice.
    """
    headers: dict[bytes, bytes] = {}
    for name, value in fields:
        if name not in headers:
            headers[name] = value
        elif name in _ONCE:
            raise bad_request(f"more than one {name.decode('ascii')} header")
        else:
            headers[name] += b", " + value
    return headers


def make_request_head(method: str, target: Target, version: int, fields: Fields) -> RequestHead:
    """Interpret the fields of a request by the rules of this module.

    :raise HttpFault: 400, 417 or 501.
    """
    headers = dict(fields)
    if len(headers) != len(fields):
        headers = _join_repeated(fields)
    if b"_" in b"".join(headers):  # one search of all names takes a fifth of the time of a search of each
        headers = {name: value for name, value in headers.items() if b"_" not in name}

    length, chunked = _framing(
        version,
        headers.pop(b"content-length", None),
        headers.get(b"transfer-encoding"),
        bad_request,
        _unknown_coding,
    )
    has_content = chunked or bool(length)
    if has_content and method in ("GET", "HEAD"):
        raise bad_request(f"a {method} request has no content")

    host = headers.get(b"host")
    if host is None:
        if version == 11 or target.authority is not None:
            raise bad_request("no Host header")
    elif not is_authority(host):
        raise bad_request("malformed Host header")
    elif target.authority is not None and target.authority.lower() != host.lower():
        raise bad_request("the request target names another host than the Host header")

    expects = headers.get(b"expect")
    if expects is not None and expects.lower() != b"100-continue":
        raise HttpFault(417, "expectation_failed", "the only expectation met here is 100-continue")

    options = _NO_OPTIONS
    hops = headers.get(b"connection")
    if hops is not None:
        try:
            options = connection_options(hops)
        except ValueError as error:
            raise bad_request(str(error)) from None
        for option in options:
            headers.pop(option, None)

    return RequestHead(
        method,
        target.path,
        target.query,
        version,
        headers,
        length,
        chunked,
        _keep_alive(version, options),
        # HTTP/1.0 has no interim responses: RFC 9110 section 10.1.1.
        expects is not None and has_content and version == 11,
        {},
    )


def parse_status_line(line: bytes) -> tuple[int, int, bytes]:
    """Parse a status line; the reason may be missing together with its space.

    :return: version (10 or 11), status (100 to 599), reason.
    :raise HttpFault: 502.
    :source: RFC 9112 section 4.
    """
    found = _STATUS_LINE.fullmatch(line)
    if found is None:
        raise bad_response("malformed status line from the backend")
    return 10 + int(found[1]), int(found[2]), found[3] or b""


def make_response_head(version: int, status: int, reason: bytes, fields: Fields) -> ResponseHead:
    """Interpret the fields of a response by the rules of this module.

    :raise HttpFault: 502.
    """
    if status == 101:
        raise bad_response("the backend switched protocols unasked")
    length: bytes | None = None
    coding: bytes | None = None
    hops: bytes | None = None
    for name, value in fields:
        if name == b"content-length":
            if length is not None:
                raise bad_response("more than one Content-Length from the backend")
            length = value
        elif name == b"transfer-encoding":
            coding = value if coding is None else coding + b", " + value
        elif name == b"connection":
            hops = value if hops is None else hops + b", " + value
    size, chunked = _framing(version, length, coding, bad_response, bad_response)
    if (status < 200 or status == 204) and (size or chunked):
        raise bad_response(f"content announced in a {status} response of the backend")

    keep_alive = version == 11
    if hops is not None:
        try:
            options = connection_options(hops)
        except ValueError:
            keep_alive = False
        else:
            keep_alive = _keep_alive(version, options)
            if options not in _HOPS.values():
                fields = [field for field in fields if field[0] not in options]
    return ResponseHead(status, reason, fields, size, chunked, keep_alive, {})
