"""How a question to the shared store can fail: one class per decision the asker can take."""

from __future__ import annotations


class StoreError(Exception):
    """The store did not do it; the message says why, for people."""


class StoreDown(StoreError):
    """Not sent: there is no connection. It has certainly not been done."""


class StoreLost(StoreError):
    """Sent, and no answer came in time or at all. It may have been done."""


class StoreRefused(StoreError):
    """The server answered with an error; ``code`` is its first word, such as ``OOM`` or ``WRONGTYPE``."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.partition(" ")[0]
