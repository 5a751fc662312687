"""The sink of a reader that has been closed: ignores everything.

A connection holds its reader, and the reader its sink, which is the connection. Left as
it is, this cycle stays in memory until the garbage collector finds it; so a reader that is
closed gets this sink instead.
"""

from __future__ import annotations


class _NullSink:
    """A sink for readers of requests and of responses."""

    def head_received(self, head: object) -> None:
        """Ignored."""

    def body_received(self, data: bytes) -> None:
        """Ignored."""

    def request_received(self) -> None:
        """Ignored."""

    def response_received(self) -> None:
        """Ignored."""


NULL_SINK = _NullSink()
