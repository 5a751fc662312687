"""Decodes chunked content, for both directions.

A decoder of our own, since llhttp cannot tell where exactly the message ends, nor limit the
length of a size line, of all extensions, and of the trailers. Nothing with ambiguous framing
is passed on.

:source: RFC 9112 section 7.1; CVE-2024-27982 and CVE-2025-55315 for the bare LF,
    CVE-2025-43859 for the unchecked end of a chunk.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from llmgw.core.http import TEXT, HeadLimits, Refuse
from llmgw.core.lines import FieldSection

# int(x, 16) alone would accept "0x5", "+5" and "5_0".
_PLAIN_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
_PLAIN_DIGITS = 15
_NEVER = re.compile(rb"(?!)")
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(;%b*+)?" % TEXT)
_CR, _LF = 13, 10
_CHUNK_END = b"\r\n"
# Reads of token streams are usually exactly one chunk. The length of such a read determines its
# size line, so two comparisons suffice to recognise it; by length of the read. Only the shortest
# spelling of a size is recognised, which is also ours: such a chunk can be forwarded as it is.
_ALONE = {len(b"%x\r\n\r\n" % size) + size: b"%x\r\n" % size for size in range(1, 2048)}
_ALONE_DIGITS = 3


def _ignore(data: bytes) -> None:
    pass


class ChunkedDecoder:
    """Takes chunked bytes and delivers their content.

    Extensions and trailers are checked and dropped. At most one size line or one trailer
    section is buffered.

    :param deliver: gets the content in slices, in order, none of them empty.
    :param refuse: makes the fault, :func:`~.http.bad_request` or :func:`~.http.bad_response`.
    """

    __slots__ = (
        "_alone",
        "_at_size",
        "_chunk_line",
        "_deliver",
        "_extensions_left",
        "_held",
        "_limits",
        "_plain",
        "_refuse",
        "_remaining",
        "_trailers",
    )

    def __init__(self, deliver: Callable[[bytes], None], limits: HeadLimits, refuse: Refuse) -> None:
        self._deliver = deliver
        self._limits = limits
        self._refuse = refuse
        self._chunk_line = limits.chunk_line
        # With a limit below the length of these lines all reads take the careful path.
        self._plain = _PLAIN_SIZE_LINE if limits.chunk_line >= _PLAIN_DIGITS else _NEVER
        self._alone = _ALONE if limits.chunk_line >= _ALONE_DIGITS else {}
        self._extensions_left = limits.chunk_extensions
        self._at_size = True
        self._remaining = 0
        self._held = b""
        self._trailers: FieldSection | None = None

    def stop(self) -> None:
        """Deliver nothing more, not even the rest of the current read."""
        self._deliver = _ignore
        self._alone = {}

    def alone_at(self, data: bytes) -> int:
        """Recognise a read that is exactly one whole chunk, as most reads of a token stream are.

        Nothing is consumed: the caller takes the content, or passes the read to :meth:`feed`.

        :return: the offset of the content, which ends two bytes before the end of the read;
            0 for any other read.
        """
        if self._at_size and not self._held and self._trailers is None:
            size_line = self._alone.get(len(data))
            if size_line is not None and data.startswith(size_line) and data.endswith(_CHUNK_END):
                return len(size_line)
        return 0

    def feed(self, data: bytes) -> int:
        """Take the next bytes.

        :return: -1 while the message goes on; at its end the number of bytes of ``data`` that
            follow it.
        :raise HttpFault: by ``refuse``.
        """
        if self._held:
            data = self._held + data
            self._held = b""
        position = 0
        size_of_data = len(data)
        if not self._at_size:
            position = self._continue_chunk(data)
            if position < 0:
                return -1
        while self._trailers is None:
            found = self._plain.match(data, position)
            if found is None:
                size, start = self._read_size_line(data, position)
                if start < 0:
                    self._held = data[position:]
                    return -1
            else:
                size = int(found[1], 16)
                start = found.end()
            if size:
                position = start + size
                if data[position : position + 2] == _CHUNK_END:
                    self._deliver(data[start:position])
                    position += 2
                    if position == size_of_data:
                        return -1
                    continue
                self._at_size = False
                self._remaining = size
                self._continue_chunk(data, start)  # consumes all, or raises: the CRLF is missing
                return -1
            else:
                if data[start : start + 2] == _CHUNK_END:
                    return size_of_data - start - 2
                data = data[start:]
                limit = self._limits.trailers
                self._trailers = FieldSection(
                    0, limit, limit, self._limits.count, self._refuse, self._refuse, "trailer"
                )
        end = self._trailers.end(data)
        if end < 0:
            self._held = data
            return -1
        return len(data) - end

    def _continue_chunk(self, data: bytes, start: int = 0) -> int:
        """Take content of the current chunk, and the CRLF after it.

        :return: the offset of the next size line; -1 if all of ``data`` was taken.
        """
        remaining = self._remaining
        if remaining:
            here = len(data) - start
            if here <= remaining:
                self._remaining = remaining - here
                if here:
                    self._deliver(data[start:])  # a whole slice of bytes is the same object
                return -1
            self._remaining = 0
            end = start + remaining
            self._deliver(data[start:end])
            start = end
        for position, expected in ((start, _CR), (start + 1, _LF)):
            if position == len(data):
                self._held = data[start:]
                return -1
            if data[position] != expected:
                raise self._refuse("chunk data without CRLF behind it")
        self._at_size = True
        return start + 2

    def _read_size_line(self, data: bytes, start: int) -> tuple[int, int]:
        """Read a size line that is incomplete, has extensions, or is malformed.

        :return: the size, and the offset of its chunk (-1 if more bytes are needed).
        """
        found = _SIZE_LINE.match(data, start)
        if found is None:
            if start == len(data):
                return 0, -1
            raise self._refuse("malformed chunk size")
        stop = found.end()
        if stop - start > self._chunk_line:
            raise self._refuse("chunk-size line too long")
        for position, expected in ((stop, _CR), (stop + 1, _LF)):
            if position == len(data):
                return 0, -1
            if data[position] != expected:
                raise self._refuse("malformed chunk-size line")
        self._extensions_left -= len(found[2] or b"")
        if self._extensions_left < 0:
            raise self._refuse("too many chunk extensions")
        return int(found[1], 16), stop + 2
