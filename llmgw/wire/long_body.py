"""A long request body on its way to a backend, a slice at a time.

Handing a body of several megabytes to the transport in one piece would copy it twice: once
for the transport's buffer, once for what the socket did not take at the first try. A pull
producer writes slices as the buffer empties, so the copy that retries need is the only one.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.interfaces import IPullProducer
from zope.interface import implementer

SLICE_BYTES = 1 << 18


@implementer(IPullProducer)
class LongBody:
    """Writes ``body`` to ``transport`` at the transport's pace; :meth:`start` once.

    The transport stops it when the connection is lost.
    """

    def __init__(self, transport: Any, body: bytes) -> None:
        self._transport = transport
        self._body = body
        self._at = 0

    @property
    def done(self) -> bool:
        """The last slice has been written."""
        return self._at >= len(self._body)

    def start(self) -> None:
        """Begin. Anything written before must have been flushed to the transport."""
        self._transport.registerProducer(self, False)

    def resumeProducing(self) -> None:
        """The transport has room."""
        start = self._at
        self._at = start + SLICE_BYTES
        self._transport.write(self._body[start : self._at])
        if self.done:
            self._body = b""
            self._transport.unregisterProducer()

    def stopProducing(self) -> None:
        """The connection is lost: release the body."""
        self._at = 0
        self._body = b""
