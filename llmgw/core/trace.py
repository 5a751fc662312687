"""A request's place in a distributed trace: the caller's span, and those of the attempts.

:source: W3C Trace Context, section 3.2 (``traceparent``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

SAMPLED = 1

# Versions after 00 may have more fields behind these (section 4.3); ff is no version.
_traceparent = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
).fullmatch


class Hop:
    """One attempt at a backend.

    :ivar ended_s: monotonic, ``None`` while it runs.
    :ivar error: the code of what went wrong, ``None`` when nothing did.
    """

    __slots__ = ("backend", "begun_s", "ended_s", "error", "span_id")

    def __init__(self, span_id: int, backend: str, begun_s: float) -> None:
        self.span_id = span_id
        self.backend = backend
        self.begun_s = begun_s
        self.ended_s: float | None = None
        self.error: str | None = None

    def end(self, now_s: float, error: str | None) -> None:
        """It is over. :param error: the code of its failure."""
        self.ended_s = now_s
        self.error = error


class Trace:
    """A traced request: its own span, and one for each attempt.

    :param parent_id: the caller's span; ``None`` begins a trace.
    :param dice: for ids.
    """

    __slots__ = ("_dice", "hops", "parent_id", "span_id", "trace_id")

    def __init__(self, trace_id: int, parent_id: int | None, dice: random.Random) -> None:
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.span_id = new_id(dice, 64)
        self.hops: list[Hop] = []
        self._dice = dice

    def hop(self, backend: str, now_s: float) -> Hop:
        """An attempt at ``backend`` begins."""
        hop = Hop(new_id(self._dice, 64), backend, now_s)
        self.hops.append(hop)
        return hop

    def header(self) -> bytes:
        """``traceparent`` for the last attempt's backend."""
        return b"00-%032x-%016x-%02x" % (self.trace_id, self.hops[-1].span_id, SAMPLED)


def begin(traceparent: bytes | None, share: float, dice: random.Random) -> Trace | None:
    """The trace of a new request; ``None`` if it is not recorded.

    The caller's ``traceparent`` decides that; without one, ``share`` does.

    :param traceparent: the request's header; a malformed one is ignored.
    :param share: the share of requests without one that are recorded, 0 to 1.
    """
    matched = _traceparent(traceparent) if traceparent is not None else None
    if matched is not None and not (matched[1] == b"00" and matched[5]):
        if not int(matched[4], 16) & SAMPLED:
            return None
        return Trace(int(matched[2], 16), int(matched[3], 16), dice)
    if share < 1 and dice.random() >= share:
        return None
    return Trace(new_id(dice, 128), None, dice)


def new_id(dice: random.Random, bits: int) -> int:
    """A random id, never zero."""
    return dice.getrandbits(bits) or 1
