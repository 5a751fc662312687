"""NDJSON: one JSON object a line, as Ollama streams its answers."""

from __future__ import annotations

from llmgw.core.sse import EVENT_LIMIT, Event


class LineSplitter:
    """Byte ranges in, whole lines out, in the form of :data:`~llmgw.core.sse.Event` without a
    name; how the bytes were cut never matters. Lines above :data:`~llmgw.core.sse.EVENT_LIMIT`
    are dropped and counted, blank ones left out.

    :cvar idle: as of :class:`~llmgw.core.sse.EventSplitter`; there is no short cut for lines.
    :ivar oversize: lines dropped because they were too long.
    """

    __slots__ = ("_dropping", "_pending", "oversize")

    idle = False

    def __init__(self) -> None:
        self._pending = b""
        self._dropping = False
        self.oversize = 0

    @property
    def in_event(self) -> bool:
        """A line has begun."""
        return bool(self._pending) or self._dropping

    @property
    def at_line_start(self) -> bool:
        """A line of our own could be put in here."""
        return not self.in_event

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes; return the lines that ended in them."""
        *lines, rest = data.split(b"\n")
        if not lines:
            rest = b"" if self._dropping else self._pending + rest
        elif self._dropping:
            self._dropping = False
            del lines[0]
        else:
            lines[0] = self._pending + lines[0]
        if len(rest) > EVENT_LIMIT:
            self.oversize += 1
            self._dropping = True
            rest = b""
        self._pending = rest
        self.oversize += sum(len(line) > EVENT_LIMIT for line in lines)
        return [(None, line) for line in lines if len(line) <= EVENT_LIMIT and line.strip()]

    def flush(self) -> list[Event]:
        """At a clean end: the last line, if its line end was left out."""
        pending, self._pending = self._pending, b""
        return [(None, pending)] if pending.strip() else []
