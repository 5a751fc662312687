"""Parses the requests of one client connection, one at a time.

Bytes go in through ``feed``, and a sink is called. Neither the calls nor their content nor the
fault depends on how the bytes were cut into reads.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, Protocol

import httptools

from llmgw.core.chunked import ChunkedDecoder
from llmgw.core.http import (
    DEFAULT_LIMITS,
    HeadLimits,
    HttpFault,
    RequestHead,
    bad_request,
    head_too_large,
    make_request_head,
    other_protocol,
    parse_request_line,
)
from llmgw.core.lines import (
    NO_CUT,
    Cut,
    FieldSection,
    HeadMemo,
    cut_head,
    line_end,
    most_bytes,
    tokenise,
    whole_section,
)
from llmgw.core.null_sink import NULL_SINK
from llmgw.core.target import Target

_NOT_PRINTABLE = re.compile(rb"[^\x20-\x7e]")
_MAX_EMPTY_LINES = 4
RequestMemo = HeadMemo[RequestHead]
_known_line = lru_cache(maxsize=256)(parse_request_line)  # pure; faults are not cached


class RequestSink(Protocol):
    """What a :class:`RequestReader` calls. Anything a method raises is raised by ``feed`` or ``resume``."""

    def head_received(self, head: RequestHead) -> None:
        """The head of a request is complete."""

    def body_received(self, data: bytes) -> None:
        """A piece of its content, never empty."""

    def request_received(self) -> None:
        """The request is complete. ``resume`` may be called from here."""


def _with_length(head: RequestHead, length: int) -> RequestHead:
    """The same head with another length; headers and cache are shared."""
    return RequestHead(
        head.method,
        head.path,
        head.query,
        head.version,
        head.headers,
        length,
        False,
        head.keep_alive,
        head.expect_continue,
        head.cache,
    )


def _line_too_long(message: str) -> HttpFault:
    return HttpFault(414, "uri_too_long", message)


class RequestReader:
    """Parses a client's bytes into requests.

    After ``request_received`` nothing more is parsed until ``resume``: answers are sent in the
    order of requests, and a fault in the second request appears only after the first one has
    been answered (RFC 9112 section 9.3.2). Bytes that come meanwhile are buffered; the caller
    must stop reading when ``buffered`` grows.

    After ``feed`` or ``resume`` has raised anything, and after ``close``, the reader is dead: it
    ignores all bytes and does not call the sink any more.

    :param memo: shared by all readers of one listener, so that each head is parsed once.
    :ivar state: ``"idle"`` before the first byte of a request, ``"head"``, ``"body"``, then
        ``"done"`` until ``resume``.
    """

    __slots__ = (
        "_body_left",
        "_buffer",
        "_busy",
        "_chunks",
        "_cut",
        "_dead",
        "_empty_lines",
        "_limits",
        "_line",
        "_memo",
        "_most",
        "_section",
        "_section_at",
        "_seen",
        "_sink",
        "state",
    )

    def __init__(
        self,
        sink: RequestSink,
        limits: HeadLimits = DEFAULT_LIMITS,
        memo: RequestMemo | None = None,
    ) -> None:
        if memo is not None and memo.limits != limits:
            raise ValueError("a memo serves readers of its own limits")
        self._sink = sink
        self._limits = limits
        self._memo = memo
        self._most = most_bytes(limits)
        self._cut: Cut = NO_CUT if memo is None else memo.last
        self._buffer = b""
        self._busy = False
        self._dead = False
        self._chunks: ChunkedDecoder | None = None
        self._await_request()

    def _await_request(self) -> None:
        self.state: Literal["idle", "head", "body", "done"] = "idle"
        self._empty_lines = 0
        self._seen = 0
        self._line: tuple[str, Target, int] | None = None
        self._section: FieldSection | None = None

    @property
    def buffered(self) -> int:
        """Bytes buffered: of an incomplete head, or of pipelined requests."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the connection.

        :raise HttpFault: the error to answer with before closing.
        """
        if self._dead:
            return
        self._buffer = self._buffer + data if self._buffer else data
        if not self._busy:
            self._run()

    def resume(self) -> None:
        """The request has been answered: go on with the next one, which may be buffered already.

        :raise HttpFault: as ``feed``.
        :raise RuntimeError: there is no request in state ``"done"``.
        """
        if self._dead:
            return
        if self.state != "done":
            raise RuntimeError("resume() without a request received")
        self._await_request()
        if not self._busy:
            self._run()

    def close(self) -> None:
        """The connection is closed: do not call the sink any more, from this moment on."""
        self._dead = True
        self._buffer = b""
        self._sink = NULL_SINK
        if self._chunks is not None:
            self._chunks.stop()

    def _run(self) -> None:
        # A loop instead of recursion: a sink that answers at once calls resume() from
        # request_received, and a peer may pipeline hundreds of requests.
        self._busy = True
        try:
            while self._buffer and self.state != "done":
                if self.state == "body":
                    self._take_body()
                elif not self._take_head():
                    break
        except BaseException:
            self.close()
            raise
        finally:
            self._busy = False

    def _take_head(self) -> bool:
        """:return: whether the head was complete and has been passed to the sink."""
        if self._line is None and not self._seen and self._take_whole_head():
            return True
        while self._line is None:
            if self._seen == 0 and self._buffer.startswith(b"\r\n"):
                # RFC 9112 section 2.2: some old clients send CRLF after a request.
                self._empty_lines += 1
                if self._empty_lines > _MAX_EMPTY_LINES:
                    raise bad_request("too many empty lines before a request")
                self._buffer = self._buffer[2:]
                if not self._buffer:
                    self.state = "idle"
                    return False
            elif not self._take_request_line():
                return False
        assert self._section is not None
        buffer = self._buffer
        end = self._section.end(buffer)
        if end < 0:
            return False

        whole = end == len(buffer)
        head_bytes = buffer if whole else buffer[:end]
        fields, objection = tokenise(head_bytes, self._section_at, httptools.HttpRequestParser)
        head = make_request_head(*self._line, fields)
        if objection is not None:
            raise bad_request("the request head is not well formed")
        self._buffer = b"" if whole else buffer[end:]
        self._begin_body(head)
        return True

    def _take_whole_head(self) -> bool:
        """Take a valid head that has arrived in one piece, as most do. Never refuses.

        :return: ``False`` leaves it to parsing line by line, which finds and names faults.
        """
        buffer = self._buffer
        found = cut_head(buffer, self._most, self._cut)
        if found is None:
            return False
        cut, end, _, length = found
        memo = self._memo
        head = memo.find(cut) if memo is not None else None
        if memo is None or head is None:
            head = self._read_whole_head(buffer, end)
            if head is None:
                return False
            if memo is not None:
                memo.keep(cut, head)
        else:
            self._cut = memo.last = cut
            if length:
                head = _with_length(head, length)
        self._buffer = buffer[end:]
        self._begin_body(head)
        return True

    def _read_whole_head(self, buffer: bytes, end: int) -> RequestHead | None:
        stop = buffer.find(b"\r\n")
        limits = self._limits
        if stop > limits.request_line or not whole_section(buffer, stop + 2, end, limits.count):
            return None
        try:
            line = _known_line(buffer[:stop])
            fields, objection = tokenise(buffer[:end], stop + 2, httptools.HttpRequestParser)
            return make_request_head(*line, fields) if objection is None else None
        except HttpFault:
            return None

    def _take_request_line(self) -> bool:
        buffer = self._buffer
        if buffer != b"\r":  # may become an empty line, which does not begin a request
            self.state = "head"
        limit = self._limits.request_line
        try:
            stop, whole = line_end(
                buffer, self._seen, limit, _NOT_PRINTABLE, bad_request, _line_too_long, "request line"
            )
        except HttpFault as fault:
            raise other_protocol(buffer, self._empty_lines) or fault from None
        if not whole:
            self._seen = stop
            return False
        self._line = parse_request_line(buffer[:stop])
        self._section_at = start = stop + 2
        limits = self._limits
        self._section = FieldSection(
            start,
            limits.header_line,
            start + limits.headers,
            limits.count,
            bad_request,
            head_too_large,
            "header",
        )
        return True

    def _begin_body(self, head: RequestHead) -> None:
        sink = self._sink
        self.state = "body"
        if head.chunked:
            self._chunks = ChunkedDecoder(sink.body_received, self._limits, bad_request)
            sink.head_received(head)
            return
        self._chunks = None
        self._body_left = head.content_length or 0
        sink.head_received(head)
        if not self._body_left:
            self._end_request()

    def _take_body(self) -> None:
        data = self._buffer
        self._buffer = b""
        if self._chunks is not None:
            behind = self._chunks.feed(data)
            if behind < 0:
                return
            rest = data[len(data) - behind :]
        else:
            left = self._body_left
            if len(data) < left:
                self._body_left = left - len(data)
                self._sink.body_received(data)
                return
            rest = data[left:]
            self._sink.body_received(data[:left])  # a slice of all bytes is the same object, not a copy
        if rest and not self._dead:
            self._buffer = rest + self._buffer
        self._end_request()

    def _end_request(self) -> None:
        if not self._dead:
            self.state = "done"
            self._sink.request_received()
