"""Parses the responses of one backend connection, however the bytes were cut into reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import httptools

from llmgw.core.chunked import ChunkedDecoder
from llmgw.core.http import (
    DEFAULT_LIMITS,
    HeadLimits,
    HttpFault,
    ResponseHead,
    bad_response,
    make_response_head,
    parse_status_line,
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

_NOT_TEXT = re.compile(rb"[^\t\x20-\x7e\x80-\xff]")
_PREFIX = b"HTTP/1."
_MAX_INTERIM = 10
_UNDER_WAY = -1
_known_line = lru_cache(maxsize=256)(parse_status_line)  # pure; faults are not cached

ResponseMemo = HeadMemo[tuple[ResponseHead, int]]
"""Keeps with each head the index of the length among its fields."""


class ResponseSink(Protocol):
    """What a :class:`ResponseReader` calls. Anything a method raises is raised by ``feed`` or ``eof``."""

    def head_received(self, head: ResponseHead) -> None:
        """The head of the final response is complete; interim responses are not passed on."""

    def body_received(self, data: bytes) -> None:
        """A piece of its content, never empty."""

    def response_received(self) -> None:
        """The response is complete."""


def _take_nothing(data: bytes) -> int:
    return _UNDER_WAY


class ResponseReader:
    """Parses a backend's bytes into responses.

    ``begin`` is called before a request is written, then ``feed`` for each read. Bytes that
    belong to no request make the connection unusable for another one, and never reach the sink.
    After a fault, and after ``close``, the reader is dead.

    :param memo: shared by all readers of one backend, so that each head is parsed once.
    :ivar started: a byte of the response has come. If not at ``eof``, the backend has closed the
        connection while it was idle.
    :ivar reusable: the last response has ended by its own framing, both sides allow another one,
        and no byte followed it. ``False`` while a response is incomplete.
    """

    __slots__ = (
        "_body_left",
        "_buffer",
        "_chunks",
        "_cut",
        "_dead",
        "_fresh",
        "_head",
        "_interim",
        "_limits",
        "_memo",
        "_most",
        "_no_content",
        "_section",
        "_section_at",
        "_seen",
        "_sink",
        "_status",
        "_take",
        "reusable",
        "started",
    )

    def __init__(
        self,
        sink: ResponseSink,
        limits: HeadLimits = DEFAULT_LIMITS,
        memo: ResponseMemo | None = None,
    ) -> None:
        if memo is not None and memo.limits != limits:
            raise ValueError("a memo serves readers of its own limits")
        self._sink = sink
        self._limits = limits
        self._memo = memo
        self._most = most_bytes(limits)
        self._cut: Cut = NO_CUT if memo is None else memo.last
        self._fresh = True
        self._dead = False
        self._chunks: ChunkedDecoder | None = None
        self._head: ResponseHead | None = None
        # Takes the next bytes and returns how many of them follow the end of the response, or
        # _UNDER_WAY. An attribute, so that content passes through as few calls as possible.
        self._take: Callable[[bytes], int] = self._take_excess
        self.reusable = False
        self.started = False

    def begin(self, method: str) -> None:
        """A request is about to be written.

        :param method: of the request; a HEAD has no content in its response.
        :raise RuntimeError: the connection must not be used for another request.
        """
        if not (self.reusable or self._fresh):
            raise RuntimeError("begin() on a connection that cannot be used again")
        self._fresh = False
        self._no_content = method == "HEAD"
        self._interim = 0
        self._head = None
        self.started = False
        self.reusable = False
        self._await_head()

    def _await_head(self) -> None:
        self._buffer = b""
        self._seen = 0
        self._section: FieldSection | None = None
        self._take = self._take_head

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the connection.

        :raise HttpFault: 502 ``upstream_framing``.
        """
        try:
            behind = self._take(data)
            if behind >= 0:
                self._end(behind)
        except BaseException:
            self.close()
            raise

    @property
    def alone_at(self) -> Callable[[bytes], int] | None:
        """For chunked content, :meth:`ChunkedDecoder.alone_at
        <llmgw.core.chunked.ChunkedDecoder>`, which recognises a read that is exactly one chunk.

        With it the fast path of token streams bypasses :meth:`feed` and the sink.
        """
        chunks = self._chunks
        return None if chunks is None else chunks.alone_at

    def eof(self) -> None:
        """The backend has closed the connection. Has no effect after the end of a response.

        :raise HttpFault: 502 ``upstream_truncated``, the current response is incomplete.
        """
        take = self._take
        self.reusable = self._fresh = False
        if take == self._take_until_eof:
            self._take = self._take_excess
            self._sink.response_received()
        elif take != self._take_excess and not self._dead:
            self.close()
            where = "head" if self._head is None else "body"
            raise HttpFault(
                502, "upstream_truncated", f"the backend closed within the {where} of its response"
            )

    def close(self) -> None:
        """The connection is closed: do not call the sink any more, from this moment on."""
        self.reusable = self._fresh = False
        self._dead = True
        self._take = _take_nothing
        self._sink = NULL_SINK
        if self._chunks is not None:
            self._chunks.stop()

    def _take_excess(self, data: bytes) -> int:
        if data:
            self.reusable = self._fresh = False
        return _UNDER_WAY

    def _take_head(self, data: bytes) -> int:
        buffer = self._buffer + data if self._buffer else data
        while buffer:
            self.started = True
            found = None
            if self._section is None and not self._seen:
                found = self._take_whole_head(buffer)
            if found is None:
                found = self._take_lines(buffer)
                if found is None:
                    self._buffer = buffer
                    return _UNDER_WAY
            head, end = found
            buffer = buffer[end:]
            if head.status >= 200:
                self._buffer = b""
                return self._begin_body(head, buffer)
            self._await_head()
            self._interim += 1
            if self._interim > _MAX_INTERIM:
                raise bad_response(f"more than {_MAX_INTERIM} interim responses from the backend")
        return _UNDER_WAY

    def _take_lines(self, buffer: bytes) -> tuple[ResponseHead, int] | None:
        """:return: the head and the offset of its end; ``None`` if more bytes are needed."""
        section = self._section
        if section is None:
            section = self._take_status_line(buffer)
            if section is None:
                return None
        end = section.end(buffer)
        if end < 0:
            return None
        return self._read_head(buffer[:end]), end

    def _take_whole_head(self, buffer: bytes) -> tuple[ResponseHead, int] | None:
        """Take a valid head that has arrived in one piece, as most do. Never refuses.

        :return: the head and the offset of its end. ``None`` leaves it to parsing line by line,
            which finds and names faults.
        """
        found = cut_head(buffer, self._most, self._cut)
        if found is None:
            return None
        cut, end, digits, length = found
        memo = self._memo
        if memo is not None:
            remembered = memo.find(cut)
            if remembered is not None:
                self._cut = memo.last = cut
                head, place = remembered
                if length:
                    headers = head.headers.copy()
                    headers[place] = (b"content-length", digits)
                    head = ResponseHead(
                        head.status, head.reason, headers, length, False, head.keep_alive, head.cache
                    )
                return head, end
        fresh = self._read_whole_head(buffer, end)
        if fresh is None:
            return None
        if memo is not None:
            field = (b"content-length", digits)
            if not length:
                memo.keep(cut, (fresh, -1))
            elif field in fresh.headers:  # else Connection has nominated it away
                memo.keep(cut, (fresh, fresh.headers.index(field)))
        return fresh, end

    def _read_whole_head(self, buffer: bytes, end: int) -> ResponseHead | None:
        stop = buffer.find(b"\r\n")
        if not whole_section(buffer, stop + 2, end, self._limits.count):
            return None
        try:
            line = _known_line(buffer[:stop])
            fields, objection = tokenise(buffer[:end], stop + 2, httptools.HttpResponseParser)
            return make_response_head(*line, fields) if objection is None else None
        except HttpFault:
            return None

    def _take_status_line(self, buffer: bytes) -> FieldSection | None:
        if not buffer.startswith(_PREFIX[: len(buffer)]):
            raise bad_response("the backend does not speak HTTP/1")
        total = self._limits.headers
        stop, whole = line_end(
            buffer, self._seen, total, _NOT_TEXT, bad_response, bad_response, "status line of the backend"
        )
        if not whole:
            self._seen = stop
            return None
        self._status = parse_status_line(buffer[:stop])
        self._section_at = start = stop + 2
        self._section = FieldSection(
            start, total, total, self._limits.count, bad_response, bad_response, "response header"
        )
        return self._section

    def _read_head(self, head_bytes: bytes) -> ResponseHead:
        fields, objection = tokenise(head_bytes, self._section_at, httptools.HttpResponseParser)
        head = make_response_head(*self._status, fields)
        if objection is not None:
            raise bad_response("the response head of the backend is not well formed")
        return head

    def _begin_body(self, head: ResponseHead, data: bytes) -> int:
        """:param data: the bytes that followed the head in the same read."""
        sink = self._sink
        self._head = head
        self._chunks = None
        # A response without content is ended here and not by _take: the sink may begin the next
        # request from response_received, and unexpected bytes must be known by then.
        empty = False
        if self._no_content or head.status in (204, 304):
            empty = True
        elif head.chunked:
            self._chunks = ChunkedDecoder(sink.body_received, self._limits, bad_response)
            self._take = self._chunks.feed
        elif head.content_length is None:
            self._take = self._take_until_eof
        elif head.content_length:
            self._body_left = head.content_length
            self._take = self._take_counted
        else:
            empty = True
        if empty:
            self._take = self._take_excess
            sink.head_received(head)
            return len(data)
        sink.head_received(head)
        return self._take(data) if data else _UNDER_WAY

    def _take_counted(self, data: bytes) -> int:
        left = self._body_left
        size = len(data)
        if size <= left:
            self._body_left = left - size
            if size:
                self._sink.body_received(data)
            if size < left:
                return _UNDER_WAY
        else:
            self._sink.body_received(data[:left])
        return size - left

    def _take_until_eof(self, data: bytes) -> int:
        if data:
            self._sink.body_received(data)
        return _UNDER_WAY

    def _end(self, behind: int) -> None:
        """:param behind: number of bytes that followed the response."""
        if self._dead:
            return
        assert self._head is not None
        self._chunks = None
        self._take = self._take_excess
        self.reusable = self._head.keep_alive and not behind
        self._sink.response_received()
