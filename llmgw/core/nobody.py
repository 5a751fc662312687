"""What a reader that was given up tells, it tells to nobody.

A connection holds its reader, and the reader its sink, the connection. Left as it
is, such a ring stays in memory until the garbage collector comes by; a reader that
is closed has this sink instead.
"""

from __future__ import annotations


class _Nobody:
    """A sink of both readers."""

    def head_received(self, head: object) -> None:
        """Not heard."""

    def body_received(self, data: bytes) -> None:
        """Not heard."""

    def request_received(self) -> None:
        """Not heard."""

    def response_received(self) -> None:
        """Not heard."""


NOBODY = _Nobody()
