"""What a backend's connection expects of the receiver of its response, and how it reports faults."""

from __future__ import annotations

from typing import Protocol


class UpstreamFault(Exception):
    """The backend, or the way to it, failed.

    :ivar reason: ``refused``, ``connect``, ``dns``, ``tls``, ``local`` (our own fault, such
        as no descriptor or port left), ``timeout_connect``, ``reset`` (closed before a
        head), ``timeout_head``, ``timeout_first_token``, ``timeout_idle``,
        ``timeout_total``, ``cut`` (closed inside the body), ``framing``, ``closed``.
    :ivar stale: a kept connection was closed before one byte came back: the request has not
        been processed, and sending it again is safe (RFC 9112 section 9.3.1).
    """

    def __init__(self, reason: str, detail: str = "", *, stale: bool = False) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.stale = stale


class Sink(Protocol):
    """Receives the body of a response."""

    def received(self, data: bytes, now_s: float, last: bool) -> None:
        """Body bytes, never empty, as they arrived at ``now_s``.

        :param last: :meth:`ended` follows at once.
        """

    def flush(self) -> None:
        """The backend has sent all it has for now."""

    def ended(self) -> None:
        """The body is complete; the connection is already free for other requests."""

    def failed(self, fault: UpstreamFault) -> None:
        """The body is incomplete, and no more will come."""
