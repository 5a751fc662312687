"""Finds the ends of lines and of field sections while their bytes arrive; caches whole heads.

Results never depend on how the bytes were cut into reads: a fault is a property of the
shortest prefix that shows it. So of two faults in one read the one that ends first is raised,
as if the bytes had come one by one.

:source: RFC 9112 sections 2.2 and 5.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import httptools

from llmgw.core.http import DEFAULT_LIMITS, TEXT, TOKEN, Fields, HeadLimits, Refuse

_NOT_TEXT = re.compile(rb"[^\t\x20-\x7e\x80-\xff]")
_NAME = re.compile(rb"%b+:" % TOKEN)
# No possessive group: before CPython 3.11.5 those match wrongly (python/cpython#106052).
# TOKEN excludes ":" and TEXT excludes CR, so backtracking never finds another match.
_WHOLE_LINES = re.compile(rb"(?:%b+:%b*\r\n)*" % (TOKEN, TEXT))
_CR, _LF = 13, 10
_LENGTH = b"\r\nContent-Length: "
_LOWER_LENGTH = b"\r\ncontent-length: "
_MAX_DIGITS = 15
_SEEN_ONCE = 8  # times as many hashes are kept as heads

MAX_BYTES = 2048
"""Larger heads are neither parsed in one piece nor cached."""


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

    :param seen: where to begin: the start of the line, or what an earlier call returned.
    :param limit_at: the CR must be at or before this index.
    :param illegal: matches the bytes that are not allowed in the line, CR and LF included.
    :param what: the name of the line in messages.
    :return: the index of the CR and ``True``; or, if more bytes are needed, the index to pass as
        ``seen`` and ``False``.
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
    """Finds the end of a header or trailer section in a buffer that only grows at its end.

    :param line_limit: bytes of one line without CRLF.
    :param total_at: index at which the section must have ended.
    :param count_limit: number of lines.
    :param what: the name of the lines in messages.
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
        """The index after the empty line that ends the section; -1 if more bytes are needed.

        :raise HttpFault: at the first byte that cannot be part of a valid section.
        """
        line = self._line
        if self._seen == line:
            # The common case in one match: whole valid lines, together shorter than one line may be.
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


def whole_section(buffer: bytes, start: int, end: int, count_limit: int) -> bool:
    """Whether a :class:`FieldSection` would accept these lines; ``False`` decides nothing.

    :param end: the index after the empty line; the section must be within the limits of size.
    """
    lines = _WHOLE_LINES.match(buffer, start)
    return lines.end() + 2 == end and buffer.count(b"\n", start, end) <= count_limit + 1  # type: ignore[union-attr]


Cut = tuple[bytes, bytes]
"""The bytes of a head before and after the digits of its length; all of it and ``b""`` if nothing is cut."""

NO_CUT: Cut = (b"", b"")

Entry = TypeVar("Entry")


class HeadMemo(Generic[Entry]):
    """A cache of heads that were parsed and found valid, so that the same bytes are parsed once.

    Clients and backends send the same head again and again; only the digits of
    ``Content-Length`` differ. So these are cut out, and the bytes around them are the key of the
    parsed head. This is exact, since

    1. only whole heads that met every rule are kept, and no head that is looked up exceeds a
       limit of size;
    2. the digits are cut after a ``Content-Length: `` at the start of a line, of which a valid
       head has one: heads with the same :data:`Cut` differ only in these digits;
    3. they are cut only if they are 1 to 15 digits up to the CRLF, and not zero: no rule
       distinguishes two such lengths. A zero is not cut, and with anything else in that place
       the head is not looked up.

    Heads contain credentials, which therefore stay in memory for longer than their connections:
    up to ``most_heads`` heads of up to :data:`MAX_BYTES`, for each reader the last head of its
    connection, and the last one found. A head is kept when it comes for the second time; of a
    head that is never repeated (with an identifier in it, for instance) only a hash is kept.

    Users of the same memo also share :attr:`RequestHead.cache <llmgw.core.http.RequestHead>`:
    each listener and each backend needs a memo of its own.

    :param limits: those of all readers that share this memo.
    :param most_heads: when so many are kept, all are dropped; the frequent ones soon return.
    :ivar last: the cut that a reader found last, which a new reader probably sees first.
    """

    __slots__ = ("_entries", "_most_heads", "_once", "find", "last", "limits")

    def __init__(self, limits: HeadLimits = DEFAULT_LIMITS, most_heads: int = 512) -> None:
        self.limits = limits
        self._most_heads = most_heads
        self._once: set[int] = set()
        self._entries: dict[Cut, Entry] = {}
        self.find = self._entries.get
        self.last: Cut = NO_CUT

    def keep(self, cut: Cut, entry: Entry) -> None:
        """Keep a parsed head, if it has come before."""
        sign = hash(cut)
        if sign not in self._once:
            if len(self._once) >= self._most_heads * _SEEN_ONCE:
                self._once.clear()
            self._once.add(sign)
            return
        if len(self._entries) >= self._most_heads:
            self._entries.clear()
        self._entries[cut] = entry


def most_bytes(limits: HeadLimits) -> int:
    """The size up to which a head cannot exceed any limit but that of its first line."""
    return min(MAX_BYTES, limits.header_line, limits.headers)


def cut_head(buffer: bytes, most: int, last: Cut) -> tuple[Cut, int, bytes, int] | None:
    """Find a whole head and cut out the digits of its length, see :class:`HeadMemo`.

    :param most: from :func:`most_bytes`.
    :param last: the cut of the previous head, which is probably the same; saves half of the work.
    :return: the cut, the end of the head, the digits or ``b""``, and their value. ``None``: the head
        is incomplete, too large, or has to be parsed line by line for another reason.
    """
    before, after = last
    if before and buffer.startswith(before):
        at = len(before)
        if not after:
            return last, at, b"", 0
        stop = buffer.find(after, at, at + _MAX_DIGITS + len(after))
        if stop > 0:
            digits = buffer[at:stop]
            end = stop + len(after)
            if digits.isdigit() and end <= most:
                length = int(digits)
                if length:
                    return last, end, digits, length
    end = buffer.find(b"\r\n\r\n", 0, most) + 4
    if end == 3:
        return None
    at = buffer.rfind(_LENGTH, 0, end)
    if at < 0:
        at = buffer.rfind(_LOWER_LENGTH, 0, end)
    if at < 0:
        return (buffer[:end], b""), end, b"", 0
    at += len(_LENGTH)
    stop = buffer.find(b"\r\n", at)
    digits = buffer[at:stop]
    if not digits.isdigit() or stop - at > _MAX_DIGITS:
        return None
    length = int(digits)
    if not length:
        return (buffer[:end], b""), end, b"", 0
    return (buffer[:at], buffer[stop:end]), end, digits, length


class _Collector:
    """Collects the fields of one head from httptools."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: Fields = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value.rstrip(b" \t")))


def split_fields(lines: bytes) -> Fields:
    """Split header lines that a :class:`FieldSection` has accepted.

    :param lines: without the empty line.
    """
    fields = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        fields.append((name.lower(), value.strip(b" \t")))
    return fields


def tokenise(head: bytes, section: int, parser: type[Any]) -> tuple[Fields, str | None]:
    """Let llhttp parse a whole head that our own scan has accepted.

    Two parsers must agree before a message is accepted. If llhttp objects, its message is
    returned with the fields of our own parser, so that our rules can name the fault first, and
    more exactly.

    :param section: offset of the header lines.
    :param parser: ``httptools.HttpRequestParser`` or ``HttpResponseParser``.
    :return: the fields, and llhttp's objection or ``None``.
    """
    collector = _Collector()
    try:
        parser(collector).feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # raised after the head; upgrades are ignored here
    except httptools.HttpParserError as error:
        return split_fields(head[section:-2]), str(error)
    return collector.fields, None
