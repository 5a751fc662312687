"""Server-sent events: finding them in a stream of bytes, and removing usage events.

:class:`EventSplitter` only looks: the bytes are forwarded elsewhere, untouched.
:class:`UsageStripper` is the only place that removes bytes from a stream.

:source: WHATWG HTML standard, "Interpreting an event stream": CRLF, LF and CR
    all end a line, a byte order mark may lead, one space after the colon is
    not part of the value.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw, Struct

Event = tuple[bytes | None, bytes]
"""An event's name (``None`` when unnamed) and its data, lines joined by LF."""

EVENT_LIMIT = 1 << 20
"""Bytes of one event that are buffered before the event is given up."""

_BOM = b"\xef\xbb\xbf"


class EventSplitter:
    """Byte ranges in, whole events out; how the bytes were cut never matters.

    Events without data lines (comments, ``id:`` alone) are not returned, as a browser would not
    dispatch them. ``id`` and ``retry`` are ignored.

    :param limit: bytes that an event may have. A longer one is skipped and counted.
    """

    __slots__ = ("_dropping", "_first", "_limit", "_pending", "_searched", "_skip_lf", "idle", "oversize")

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self._limit = limit
        self._pending = bytearray()
        self._searched = 0
        self._skip_lf = False
        self._dropping = False
        self._first = True
        self.oversize = 0
        """Number of events skipped because they were too long."""
        self.idle = False
        """Between two events of an LF stream that has begun: if the next bytes are exactly one
        event, the caller may read it itself, without passing it to :meth:`feed`."""

    @property
    def in_event(self) -> bool:
        """Bytes have come since the last blank line."""
        return bool(self._pending)

    @property
    def at_line_start(self) -> bool:
        """A line of our own may be inserted here.

        False after a lone CR: an LF that follows it would end the event of our line.
        """
        return not self._skip_lf and (not self._pending or self._pending.endswith(b"\n"))

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes; return the events that ended in them."""
        if not self._pending and not self._skip_lf and data.endswith(b"\n\n") and b"\r" not in data:
            events = self._events(data[:-2].split(b"\n\n"))
            self.idle = not self._first
            return events
        if self._skip_lf and data:
            self._skip_lf = False
            if data.startswith(b"\n"):
                data = data[1:]
        if b"\r" in data:
            # A CR ends the line at once, since the next byte may never come; an LF that follows
            # belongs to it.
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events = self._search(data)
        self.idle = not self._pending and not self._skip_lf and not self._first
        return events

    def flush(self) -> list[Event]:
        """At a clean end: the last event, if the blank line after it is missing."""
        block, dropping = bytes(self._pending), self._dropping
        self._pending.clear()
        self._searched = 0
        self._skip_lf = self._dropping = False
        return self._events([block]) if block and not dropping else []

    def _search(self, data: bytes) -> list[Event]:
        pending = self._pending
        pending += data
        end = pending.rfind(b"\n\n", self._searched)
        events: list[Event] = []
        if end >= 0:
            blocks = bytes(pending[:end]).split(b"\n\n")
            if self._dropping:
                self._dropping = False
                del blocks[0]
            events = self._events(blocks)
            del pending[: end + 2]
        if pending.startswith(b"\n") and not self._dropping:
            self._first = False
            del pending[: len(pending) - len(pending.lstrip(b"\n"))]
        if len(pending) > self._limit and len(pending) - pending.endswith(b"\n") > self._limit:
            if not self._dropping:
                self._dropping = True
                self._first = False
                self.oversize += 1
            del pending[:-1]  # the last byte tells whether a blank line follows
        self._searched = max(0, len(pending) - 1)
        return events

    def _events(self, blocks: list[bytes]) -> list[Event]:
        events: list[Event] = []
        for block in blocks:
            if self._first:
                self._first = False
                block = block.removeprefix(_BOM)
            if len(block) > self._limit and len(block.strip(b"\n")) > self._limit:
                self.oversize += 1
            elif block.startswith(b"data: ") and b"\n" not in block:
                events.append((None, block[6:]))
            else:
                event = _parse(block)
                if event is not None:
                    events.append(event)
        return events


def _parse(block: bytes) -> Event | None:
    name: bytes | None = None
    data: list[bytes] = []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ") or None
    return (name, b"\n".join(data)) if data else None


_HOLD_LIMIT = 1 << 16
"""A usage event has a few hundred bytes; a longer event is not one, and is passed on."""

_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")


class _UsageOnly(Struct):
    choices: list[Raw]
    usage: dict[str, Raw]


_usage_only = msgspec.json.Decoder(_UsageOnly)


def _is_usage_only(event: bytes) -> bool:
    if b'"usage"' not in event:
        return False
    parsed = _parse(event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").removeprefix(_BOM))
    if parsed is None:
        return False
    try:
        return not _usage_only.decode(parsed[1]).choices
    except (ValueError, RecursionError):
        return False


class UsageStripper:
    """Removes the usage event that a client did not ask for.

    For streams for which the gateway has added ``stream_options.include_usage`` to the request:
    events with ``"choices":[]`` and a usage object are removed (llama-server sends one per
    choice, others one in all). Everything else stays byte for byte, including comments and
    ``"usage":null`` fields. An incomplete event is held back until it is complete.

    :ivar held: the bytes held back.
    """

    __slots__ = ("_passing", "_skip_lf", "held")

    def __init__(self) -> None:
        self.held = b""
        self._passing = False
        self._skip_lf = False

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream; return those that may be forwarded."""
        if not self.held and not self._skip_lf and data.endswith(b"\n\n") and b'"usage"' not in data:
            return data
        if self._skip_lf and data:
            # The second half of a CRLF whose first half was removed.
            self._skip_lf = False
            if data.startswith(b"\n"):
                data = data[1:]
        seen = len(self.held)
        data = self.held + data
        out: list[bytes] = []
        start = 0
        # An event's end that was not found before includes at least one of the new bytes.
        for end in _EVENT_END.finditer(data, max(0, seen - 3)):
            event = data[start : end.end()]
            start = end.end()
            if not self._passing and _is_usage_only(event):
                out += _kept(event)
                self._skip_lf = start == len(data) and data.endswith(b"\r")
            else:
                out.append(event)
            self._passing = False
        self.held = data[start:]
        if self._passing or len(self.held) > _HOLD_LIMIT:
            # The last bytes are held back: they may be the first half of a blank line.
            self._passing = True
            out.append(self.held[:-3])
            self.held = self.held[-3:]
        return b"".join(out)

    def end(self) -> bytes:
        """The stream is over; return what was held back, unless it is a usage event."""
        held, self.held = self.held, b""
        if not self._passing and _is_usage_only(held):
            return b"".join(_kept(held))
        return held


def _kept(event: bytes) -> list[bytes]:
    """What is kept of a removed event: comments, and the line ends before it, of which the first
    may be the second half of a CRLF."""
    blank = event[: len(event) - len(event.lstrip(b"\r\n"))]
    return [blank, *(line for line in event.splitlines(keepends=True) if line.startswith(b":"))]
