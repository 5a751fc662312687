"""What a backend's connection asks of whoever takes its response, and tells of its end."""

from __future__ import annotations

from typing import Protocol


class UpstreamFault(Exception):
    """The backend, or the way to it, failed.

    :ivar reason: ``refused``, ``connect``, ``dns``, ``tls``, ``local`` (our own fault:
        no descriptor or port left), ``timeout_connect``, ``reset`` (closed before a
        head), ``timeout_head``, ``timeout_first_token``, ``timeout_idle``,
        ``timeout_total``, ``cut`` (closed inside the body), ``framing``, ``closed``.
    :ivar stale: a kept connection was closed before one byte came back: nobody
        has worked on the request, and sending it again is safe (RFC 9112 section 9.3.1).
    """

    def __init__(self, reason: str, detail: str = "", *, stale: bool = False) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.stale = stale


class Sink(Protocol):
    """Who takes a response's body."""

    def received(self, data: bytes, now_s: float, last: bool) -> None:
        """Body bytes, never empty, as they arrived at ``now_s``.

        :param last: :meth:`ended` follows at once.
        """

    def flush(self) -> None:
        """The backend has nothing more to say for now."""

    def ended(self) -> None:
        """The body is complete; the connection is already free for others."""

    def failed(self, fault: UpstreamFault) -> None:
        """No more will come, and what came is not the whole."""
