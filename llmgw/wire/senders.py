"""Writing at the end of the reactor's turn, straight to the socket.

Twisted's ``transport.write`` buffers, asks the reactor to watch for writability and
sends in the next turn: two ``epoll_ctl`` calls and one more turn for each event of a
stream. A gateway's sockets are nearly always writable, so we try ``send`` first.

Not at once, though, but when everything that arrived in this turn of the reactor has been
handled: the readers of many streams are then woken together. Waking a sleeping peer costs
the sender more than the rest of the event.

1. Only for plain TCP and Unix transports, and for our own TLS on top of these; others
   use ``write``.
2. What the socket does not take goes to ``write``, so ordering, back-pressure
   (``registerProducer``) and error reporting stay with Twisted.
3. Before a transport is closed its :class:`Sender` must be flushed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llmgw.wire.twisted_internals import end_of_turn, has_unsent, is_plain_socket

if TYPE_CHECKING:
    from collections.abc import Callable


class Outbox:
    """The senders that have data to send at the end of the turn.

    :ivar waiting: flushed when this turn's events have been handled; whoever appends the
        first one calls :meth:`wake`.
    """

    def __init__(self, reactor: Any) -> None:
        self.waiting: list[_Batching] = []
        self._later = end_of_turn(reactor)

    def wake(self) -> None:
        """Schedule the flush."""
        self._later(self._flush)

    def _flush(self) -> None:
        waiting, self.waiting = self.waiting, []
        for sender in waiting:
            sender.flush()


class _Batching:
    """Joins what is written in one turn, and sends it at the end of the turn."""

    __slots__ = ("_outbox", "_pending", "_transport")

    def __init__(self, transport: Any, outbox: Outbox) -> None:
        self._transport = transport
        self._outbox = outbox
        self._pending = b""

    def __call__(self, data: bytes) -> None:
        """Send ``data`` at the end of this turn."""
        if self._pending:
            self._pending += data
            return
        self._pending = data
        outbox = self._outbox
        waiting = outbox.waiting
        if not waiting:
            outbox.wake()
        waiting.append(self)

    def flush(self) -> None:
        """Send what is pending now."""
        raise NotImplementedError


class Sender(_Batching):
    """Writes to a plain socket. Call it with bytes; it never raises for anything the peer did."""

    __slots__ = ("_buffered", "_send")

    def __init__(self, transport: Any, outbox: Outbox) -> None:
        super().__init__(transport, outbox)
        self._send = transport.socket.send
        self._buffered = has_unsent(transport)  # by the transport, when we last looked

    def flush(self) -> None:
        """Send what is pending now."""
        data = self._pending
        if not data:
            return
        self._pending = b""
        if self._buffered:
            self._buffered = has_unsent(self._transport)
        if not self._buffered:
            try:
                sent = self._send(data)
            except OSError:
                sent = 0  # Twisted's own send waits for writability, or reports the error
            if sent == len(data):
                return
            data = data[sent:]
            self._buffered = True
        self._transport.write(data)

    @property
    def is_flushed(self) -> bool:
        """Everything has been passed to the kernel."""
        return not (self._pending or has_unsent(self._transport))


class TlsSender(_Batching):
    """Writes to our own TLS transport: the data of one turn becomes one record."""

    __slots__ = ()

    def flush(self) -> None:
        """Send what is pending now."""
        data = self._pending
        if data:
            self._pending = b""
            self._transport.write(data)

    @property
    def is_flushed(self) -> bool:
        """As far as can be told."""
        return not self._pending


class PlainSender:
    """Writes through the transport's own ``write``."""

    __slots__ = ("_transport", "_write")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._write: Callable[[bytes], None] = transport.write

    def __call__(self, data: bytes) -> None:
        """Send ``data``."""
        self._write(data)

    def flush(self) -> None:
        """Nothing is pending here."""

    @property
    def is_flushed(self) -> bool:
        """As far as can be told."""
        return True


def disable_nagle(transport: Any) -> None:
    """Let small writes leave at once (``TCP_NODELAY``). Does nothing where there is no TCP."""
    with suppress(AttributeError, OSError):
        transport.setTcpNoDelay(True)


def sender(transport: Any, outbox: Outbox) -> Sender | TlsSender | PlainSender:
    """The cheapest way to write to ``transport``; call once per connection."""
    if is_plain_socket(transport):
        return Sender(transport, outbox)
    if hasattr(type(transport), "make_sender"):
        own: TlsSender = transport.make_sender(outbox)
        return own
    return PlainSender(transport)
