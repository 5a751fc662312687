"""One request as the gateway sees it, and the way back to its client.

``wire.server`` makes an :class:`Incoming` for each request head. The exchange reads the
head, takes the body, and answers piece by piece (:meth:`Incoming.start`,
:meth:`~Incoming.send`, :meth:`~Incoming.finish`). The framing towards the client is
decided here and nowhere else, so a backend's framing can never reach a client (RFC 9112
section 6).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from twisted.internet.defer import CancelledError

from llmgw.errors import BodyTooLarge, Overloaded
from llmgw.wire.coroutines import Future

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmgw.core.http import RequestHead
    from llmgw.wire.coroutines import Task
    from llmgw.wire.server import ClientConnection

SKIP_BYTES = 65536
"""The rest of a refused body up to this size is read, so that the connection can be kept."""

Headers = list[tuple[bytes, bytes]]

STATUS_LINES: dict[int, bytes] = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode("ascii"))
    for status in HTTPStatus
}


class Source(Protocol):
    """Where a streamed answer comes from: paused while the client is slow."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Go on reading."""


def status_line(status: int) -> bytes:
    """The status line; an unregistered status has an empty reason phrase (RFC 9112 section 4)."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The lines of ``headers``, each with its CRLF."""
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])


def last_answer(status: int, headers: Headers, date: bytes, body: bytes) -> bytes:
    """A whole answer, after which the connection is closed."""
    return b"%b%bdate: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        status_line(status),
        header_lines(headers),
        date,
        len(body),
        body,
    )


class Incoming:
    """A request and its answer.

    :ivar head: the parsed request head.
    :ivar peer: the client's address without port, for limits and the log.
    :ivar arrived_s: monotonic time at which the head was complete.
    :ivar complete: the whole body has arrived.
    :ivar gone: the client has left; writing has no effect.
    :ivar started: a status line was sent; no other status can be sent.
    :ivar sent_bytes: body bytes sent so far.
    :ivar task: the exchange that serves it; cancelled when the client leaves.
    """

    __slots__ = (
        "_connection",
        "_framing",
        "_out",
        "_parts",
        "_size",
        "_waiter",
        "arrived_s",
        "close_after",
        "complete",
        "ended",
        "fault",
        "gone",
        "head",
        "limit_bytes",
        "peer",
        "sent_bytes",
        "started",
        "status",
        "task",
    )

    def __init__(self, connection: ClientConnection, head: RequestHead, arrived_s: float) -> None:
        self._connection = connection
        self.head = head
        self.peer = connection.peer
        self.arrived_s = arrived_s
        self._parts: list[bytes] = []
        self._size = 0
        self._waiter: Future[bytes] | None = None
        self._out: list[bytes] = []
        self._framing = b""
        self.limit_bytes: float = connection.site.limits.body_bytes
        self.complete = False
        self.gone = False
        self.started = False
        self.ended = False
        self.close_after = not head.keep_alive
        self.fault: Exception | None = None
        self.sent_bytes = 0
        self.status = 0
        self.task: Task | None = None

    @property
    def certificate(self) -> str | None:
        """The subject of the client's certificate, if one was requested."""
        return self._connection.certificate

    # --- the body, coming in ---

    @property
    def body_size(self) -> int:
        """Bytes of body received so far."""
        return self._size

    def body(self) -> bytes | Future[bytes]:
        """The whole body: at once if it is here, else a Future.

        Cancelling the Future only ends the wait. The caller calls :meth:`forget_body` when
        the bytes are no longer needed.

        :raise CancelledError: the client has left already.
        :raise BodyTooLarge: (or the Future fails with it) it is larger than ``limit_bytes``.
        :raise Overloaded: (so, too) this process holds as many body bytes as it may.
        """
        if self.gone:
            raise CancelledError
        if self.fault is not None:
            raise self.fault
        declared = self.head.content_length
        if declared is not None and declared > self.limit_bytes:
            raise self._too_large()
        if self.complete:
            return self._whole()
        self._waiter = Future()
        self._connection.reading_body()
        return self._waiter

    def forget_body(self) -> None:
        """Release the body's bytes."""
        self._connection.site.held_bytes -= self._size
        self._size = 0
        self._parts = []

    def proceed(self) -> None:
        """Answer ``Expect: 100-continue`` (RFC 9110 section 10.1.1)."""
        if not self.gone and not self.complete and not self._size:
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def body_received(self, data: bytes) -> None:
        """From the connection: more body."""
        if self.fault is not None or self.ended:
            return
        size = len(data)
        self._size += size
        site = self._connection.site
        site.held_bytes += size
        if self._size > self.limit_bytes:
            self.body_failed(self._too_large())
        elif site.held_bytes > site.limits.body_total_bytes:
            self.body_failed(Overloaded("too many request bodies are being read"))
        else:
            self._parts.append(data)

    def body_received_all(self) -> None:
        """From the connection: the body is complete."""
        self.complete = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.fire(self._whole())

    def body_failed(self, fault: Exception) -> None:
        """From the connection: no more body will come, or it must not."""
        self.fault = fault
        self.forget_body()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.fail(fault)

    def _whole(self) -> bytes:
        """The body in one piece, which replaces its parts."""
        parts = self._parts
        if len(parts) != 1:
            parts[:] = [b"".join(parts)]
        return parts[0]

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the request body is larger than {int(self.limit_bytes)} bytes")

    # --- the answer, going out ---

    def interim(self, status: int) -> None:
        """Send an interim response such as 102, for a client that asked for it (RFC 9110 section
        15.2). Nothing is sent once the answer has begun, nor over HTTP/1.0."""
        if not self.gone and not self.started and self.head.version == 11:
            self._connection.write(status_line(status) + b"\r\n")

    def start(self, status: int, lines: bytes, length: int | None) -> None:
        """Start the answer; the head is sent with the first :meth:`flush` or piece of body.

        :param lines: header lines, each with its CRLF; none about framing.
        :param length: the body's size in bytes; ``None`` if it is not known yet: then it is
            chunked for HTTP/1.1, and ended by a close for HTTP/1.0.
        """
        self.started = True
        self.status = status
        connection = self._connection
        if not self.complete and not self._can_skip_body():
            self.close_after = True
        framing = b""
        if status == 204 or status == 304 or status < 200:
            self._framing = b"none"
        elif length is not None:
            framing = b"content-length: %d\r\n" % length
            self._framing = b"none" if self.head.method == "HEAD" else b"length"
        elif self.head.version == 11:
            framing = b"transfer-encoding: chunked\r\n"
            self._framing = b"none" if self.head.method == "HEAD" else b"chunked"
        else:
            self._framing = b"none" if self.head.method == "HEAD" else b"close"
            self.close_after = True
        if connection.must_close():
            self.close_after = True
        if self.close_after:
            framing += b"connection: close\r\n"
        elif self.head.version == 10:
            framing += b"connection: keep-alive\r\n"
        self._out.append(
            b"%b%bdate: %b\r\n%b\r\n" % (status_line(status), lines, connection.site.http_date, framing)
        )

    def _can_skip_body(self) -> bool:
        """The rest of an unwanted body is short enough to be read."""
        length = self.head.content_length
        return length is not None and length <= SKIP_BYTES and not self.head.expect_continue

    def send(self, data: bytes) -> None:
        """Send a piece of the body, and whatever is pending, in one write. ``data`` is not empty."""
        if self.gone:
            return
        self.sent_bytes += len(data)
        framing = self._framing
        if framing == b"chunked":
            data = b"%x\r\n%b\r\n" % (len(data), data)
        elif framing == b"none":
            data = b""
        if self._out:
            self._out.append(data)
            data = b"".join(self._out)
            self._out = []
        self._connection.write(data)

    @property
    def is_chunked(self) -> bool:
        """The answer has begun, in chunked framing."""
        return self._framing == b"chunked"

    def send_framed(self, data: bytes, size: int) -> None:
        """Like :meth:`send`, for a chunked answer with nothing pending: ``data`` is one chunk with
        its framing, which holds ``size`` bytes of body."""
        self.sent_bytes += size
        self._connection.write(data)

    def hold(self, data: bytes) -> None:
        """Like :meth:`send`, but the bytes are sent with the next write, which must follow."""
        self.sent_bytes += len(data)
        if self._framing == b"chunked":
            self._out.append(b"%x\r\n%b\r\n" % (len(data), data))
        elif self._framing != b"none":
            self._out.append(data)

    def flush(self) -> None:
        """Send what is pending, such as a head without a body yet."""
        if self._out and not self.gone:
            self._connection.write(b"".join(self._out))
            self._out = []

    def finish(self) -> None:
        """The answer is complete. Idempotent."""
        if self.ended:
            return
        self.ended = True
        if self.gone:
            return
        if self._framing == b"chunked":
            self._out.append(b"0\r\n\r\n")
        self.flush()
        self._connection.answered(self)

    def abort(self) -> None:
        """End the answer so that nobody can take it for complete (RFC 9112 section 8).

        Where the framing shows it (no last chunk, too few bytes) an orderly close is enough,
        and what was sent last still arrives; an answer that ends by a close must be reset.
        """
        if self.ended:
            return
        self.ended = True
        if not self.gone:
            self.flush()
            self._connection.cut(orderly=self._framing in (b"chunked", b"length"))

    def stream_from(self, source: Source) -> None:
        """Pause and resume ``source`` as the client takes the bytes, until :meth:`finish`."""
        if not self.gone and not self.ended:
            self._connection.stream_from(source)
