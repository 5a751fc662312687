"""Finds the ends of lines and of field sections while their bytes arrive.

Everything here answers the same for every way of cutting the bytes: a fault is
a property of the shortest prefix that shows it. So of two faults in one read
the one that ends first is raised, as if the bytes had come one by one.

:source: RFC 9112 sections 2.2 and 5.
"""

from __future__ import annotations

import re
from typing import Any

import httptools

from llmgw.core.http import TEXT, TOKEN, Fields, Refuse

_NOT_TEXT = re.compile(rb"[^\t\x20-\x7e\x80-\xff]")
_NAME = re.compile(rb"%b+:" % TOKEN)
_WHOLE_LINES = re.compile(rb"(?:%b++:%b*+\r\n)*+" % (TOKEN, TEXT))
_CR, _LF = 13, 10


def line_end(
    buffer: bytes,
    seen: int,
    limit_at: int,
    illegal: re.Pattern[bytes],
    refuse: Refuse,
    too_long: Refuse,
    what: str,
) -> tuple[int, bool]:
    """Look for the end of a line.

    :param seen: where to begin: the line's start, or what an earlier call returned.
    :param limit_at: the CR must stand at or before this index.
    :param illegal: matches the bytes that may not stand in the line; CR and LF among them.
    :param what: names the line in messages.
    :return: index of the CR and ``True``; or, when more bytes are needed, the index to
        hand in as ``seen`` and ``False``.
    :raise HttpFault: by ``too_long`` or ``refuse``.
    """
    found = illegal.search(buffer, seen)
    stop = len(buffer) if found is None else found.start()
    if stop > limit_at:
        raise too_long(f"{what} too long")
    if found is None:
        return stop, False
    if buffer[stop] != _CR:
        raise refuse(f"{what} holds a control character or a lone LF")
    if stop + 1 == len(buffer):
        return stop, False
    if buffer[stop + 1] != _LF:
        raise refuse(f"{what} holds a lone CR")
    return stop, True


class FieldSection:
    """Finds the end of a header or trailer section; its buffer may only grow at its end.

    :param line_limit: bytes of one line without CRLF.
    :param total_limit: bytes of the section.
    :param count_limit: lines.
    :param what: names the section's lines in messages.
    """

    __slots__ = (
        "_count",
        "_count_limit",
        "_line",
        "_line_limit",
        "_refuse",
        "_seen",
        "_too_large",
        "_total_at",
        "_what",
    )

    def __init__(
        self,
        start: int,
        line_limit: int,
        total_at: int,
        count_limit: int,
        refuse: Refuse,
        too_large: Refuse,
        what: str,
    ) -> None:
        self._line = start
        self._seen = start
        self._count = 0
        self._line_limit = line_limit
        self._total_at = total_at
        self._count_limit = count_limit
        self._refuse = refuse
        self._too_large = too_large
        self._what = what

    def end(self, buffer: bytes) -> int:
        """Index just behind the empty line that ends the section, or -1 when more bytes are needed.

        :raise HttpFault: at the first byte that cannot be part of a good section.
        """
        line = self._line
        if self._seen == line:
            # The usual case in one match: whole good lines, together shorter than each one may be.
            end = _WHOLE_LINES.match(buffer, line).end()  # type: ignore[union-attr]
            count = self._count + buffer.count(b"\n", line, end)
            if end - line <= self._line_limit and end <= self._total_at and count <= self._count_limit:
                self._count = count
                self._line = self._seen = line = end
                if buffer.startswith(b"\r\n", line):
                    return line + 2
        while True:
            line_at = line + self._line_limit
            stop, whole = line_end(
                buffer,
                self._seen,
                min(line_at, self._total_at),
                _NOT_TEXT,
                self._refuse,
                self._too_large,
                f"{self._what} line" if line_at < self._total_at else f"{self._what} section",
            )
            if not whole:
                self._seen = stop
                return -1
            if stop == line:
                return stop + 2
            if not _NAME.match(buffer, line, stop):
                raise self._refuse(f"{self._what} line without a name, or folded")
            self._count += 1
            if self._count > self._count_limit:
                raise self._too_large(f"more than {self._count_limit} {self._what} lines")
            self._line = self._seen = line = stop + 2


class _Collector:
    """What httptools calls: keeps the fields of one head."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: Fields = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value.rstrip(b" \t")))


def split_fields(lines: bytes) -> Fields:
    """Take apart header lines that a :class:`FieldSection` has passed.

    :param lines: without the empty line.
    """
    fields = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        fields.append((name.lower(), value.strip(b" \t")))
    return fields


def tokenise(head: bytes, section: int, parser: type[Any]) -> tuple[Fields, str | None]:
    """Let llhttp read a whole head that our own scan has passed.

    Two parsers must agree before a message is taken. Where llhttp objects, its
    words come back beside fields of our own reading, so that the rules can name
    the fault more exactly first.

    :param section: where the header lines begin.
    :param parser: ``httptools.HttpRequestParser`` or ``HttpResponseParser``.
    :return: the fields, and llhttp's objection or ``None``.
    """
    collector = _Collector()
    try:
        parser(collector).feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # raised behind the head; upgrades are ignored here
    except httptools.HttpParserError as error:
        return split_fields(head[section:-2]), str(error)
    return collector.fields, None
