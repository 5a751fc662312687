"""Writing at the end of the turn, straight to the socket; and reading without a detour.

Twisted's ``transport.write`` buffers, asks the reactor to watch for
writability and sends in the next turn: two ``epoll_ctl`` calls and one more
turn for each event of a stream. A gateway's sockets are nearly always
writable, so we try ``send`` first.

Not at once, though, but when all that arrived in this turn of the reactor has
been handled: the readers of many streams are then woken together. A wake-up of
a sleeping peer costs the sender more than the rest of the event.

This is the one place that reads private fields of Twisted (``_tempDataBuffer``,
``dataBuffer`` and ``offset`` of ``twisted.internet.abstract.FileDescriptor``, ``_dataReceived``
of ``twisted.internet.tcp.Connection``, ``threadCallQueue`` of
``twisted.internet.base.ReactorBase``). Wherever they are not as expected, public
ways are used.

1. Only for plain TCP and unix transports, and TLS of our own on these; foreign ones use ``write``.
2. What the socket does not take goes to ``write``, so ordering, back-pressure
   (``registerProducer``) and error reporting stay Twisted's.
3. Before a transport is closed its :class:`Sender` must be flushed.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from fcntl import ioctl
from functools import partial
from termios import TIOCOUTQ
from typing import TYPE_CHECKING, Any

from twisted.internet.base import BaseConnector, ReactorBase
from twisted.internet.main import CONNECTION_LOST
from twisted.internet.protocol import ClientFactory
from twisted.internet.tcp import Connection

try:
    from twisted.internet.asyncioreactor import AsyncioSelectorReactor
except ImportError:  # pragma: no cover - every supported platform has it
    AsyncioSelectorReactor = None  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from collections.abc import Callable


class _Afterwards(ClientFactory):
    """Hears that a connection is lost, and does nothing."""

    noisy = False


_AFTERWARDS: Any = _Afterwards()


class Outbox:
    """Senders with something to send, until the end of the turn.

    :ivar waiting: they are flushed when this turn's events have been handled; who
        adds the first one calls :meth:`wake`.
    """

    def __init__(self, reactor: Any) -> None:
        self.waiting: list[_Gathering] = []
        self._later = end_of_turn(reactor)

    def wake(self) -> None:
        """Somebody is about to wait."""
        self._later(self._flush)

    def _flush(self) -> None:
        waiting, self.waiting = self.waiting, []
        for sender in waiting:
            sender.flush()


class _Gathering:
    """What is written in one turn leaves in one piece at its end."""

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
        """Send what waits now."""
        raise NotImplementedError


class Sender(_Gathering):
    """Writes to one transport. Call it with bytes; it never raises for what the peer did."""

    __slots__ = ("_left", "_send")

    def __init__(self, transport: Any, outbox: Outbox) -> None:
        super().__init__(transport, outbox)
        self._send = transport.socket.send
        self._left = _is_waiting(transport)  # something with the transport, the last time that we looked

    def flush(self) -> None:
        """Send what waits now."""
        data = self._pending
        if not data:
            return
        self._pending = b""
        if self._left:
            self._left = _is_waiting(self._transport)
        if not self._left:
            try:
                sent = self._send(data)
            except OSError:
                sent = 0  # see _send
            if sent == len(data):
                return
            data = data[sent:]
            self._left = True
        self._transport.write(data)

    @property
    def is_flushed(self) -> bool:
        """Everything has left for the kernel."""
        return not (self._pending or _is_waiting(self._transport))


class TlsSender(_Gathering):
    """Writes to TLS of our own: what one turn has brought becomes one record."""

    __slots__ = ()

    def flush(self) -> None:
        """Send what waits now."""
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
        """Nothing waits here."""

    @property
    def is_flushed(self) -> bool:
        """As far as can be told."""
        return True


def sender(transport: Any, outbox: Outbox) -> Sender | TlsSender | PlainSender:
    """The cheapest way to write to ``transport``; call once per connection."""
    if _is_socket(transport):
        return Sender(transport, outbox)
    if hasattr(type(transport), "make_sender"):
        own: TlsSender = transport.make_sender(outbox)
        return own
    return PlainSender(transport)


def send_at_once(transport: Any) -> Callable[[bytes], None]:
    """The cheapest way to write to ``transport`` without waiting for the end of the turn."""
    if not _is_socket(transport):
        write: Callable[[bytes], None] = transport.write
        return write
    return partial(_send, transport, transport.socket.send)


def _is_waiting(transport: Any) -> bool:
    """What was written earlier has not left yet: what is written now must queue behind it."""
    return bool(transport._tempDataBuffer or transport.dataBuffer)


def _send(transport: Any, send: Callable[[bytes], int], data: bytes) -> None:
    if _is_waiting(transport) or not transport.connected:
        transport.write(data)
        return
    try:
        sent = send(data)
    except OSError:
        # EAGAIN waits for writability; a real error comes back from
        # Twisted's own send, which reports it to connectionLost.
        transport.write(data)
        return
    if sent != len(data):
        transport.write(data[sent:])


def read_by(transport: Any, take: Callable[[bytes], bool]) -> bool:
    """Let ``take`` see each read of a plain transport first.

    :param take: tells whether it has taken the bytes, else they go to the protocol as ever.
        It never raises.
    :return: whether it can be so; :func:`read_as_ever` ends it.
    """
    if not _is_socket(transport):
        return False
    # A partial: the cells of a closure would be twice as large, and there is one for each stream.
    transport.doRead = partial(_read, transport, transport.socket.recv, transport.bufferSize, take)
    return True


def _read(transport: Any, receive: Callable[[int], bytes], size: int, take: Callable[[bytes], bool]) -> Any:
    """As ``twisted.internet.tcp.Connection.doRead``, two calls of functions shorter."""
    try:
        data = receive(size)
    except BlockingIOError:
        return None
    except OSError:
        return CONNECTION_LOST
    return None if data and take(data) else transport._dataReceived(data)


def read_as_ever(transport: Any) -> None:
    """All reads go to the protocol again."""
    # Not by way of __dict__: to ask for that makes one, which takes a kilobyte.
    with suppress(AttributeError):
        del transport.doRead


def _is_socket(transport: Any) -> bool:
    """A plain transport with the private fields that this module reads."""
    return (
        isinstance(transport, Connection)
        and not getattr(transport, "TLS", False)
        and hasattr(transport, "_tempDataBuffer")
        and hasattr(transport, "dataBuffer")
        and hasattr(transport, "_dataReceived")
    )


def unsent_bytes(transport: Any) -> int:
    """Bytes held by a transport and those below it until the peer has taken them;
    0 where they cannot be seen."""
    size = 0
    while transport is not None:
        size += len(getattr(transport, "dataBuffer", b"")) - getattr(transport, "offset", 0)
        size += getattr(transport, "_tempDataLen", 0)
        size += sum(map(len, getattr(transport, "_appSendBuffer", ())))
        transport = getattr(transport, "transport", None)
    return size


def untaken_bytes(transport: Any) -> int:
    """:func:`unsent_bytes`, and those that the kernel has and the peer has not; on Linux.

    A TLS connection is not closed before the peer says goodbye, too: until then these are lost
    if it is cut.
    """
    size = unsent_bytes(transport)
    while (below := getattr(transport, "transport", None)) is not None:
        transport = below
    with suppress(AttributeError, OSError, ValueError):
        size += int.from_bytes(ioctl(transport.socket.fileno(), TIOCOUTQ, bytes(4)), sys.byteorder)
    return size


def take_over(transport: Any, protocol: Any) -> None:
    """Let ``transport`` call ``protocol`` itself.

    A client endpoint leaves a wrapper between the two that only passes each read
    on; once the connection stands it has nothing left to do. Nor have the factory that
    made it and the Deferred that was waited for, which the connector keeps.
    """
    if isinstance(transport, Connection) and hasattr(transport, "protocol"):
        transport.protocol = protocol
        connector = getattr(transport, "connector", None)
        if isinstance(connector, BaseConnector):
            connector.factory = _AFTERWARDS


def end_of_turn(reactor: Any) -> Callable[[Callable[[], None]], Any]:
    """How to have something called when this turn's events have been handled.

    A ``ReactorBase`` runs its thread calls after each poll; adding one from the
    reactor's own thread needs no wake-up, and costs a tenth of ``callLater(0)``.
    """
    if AsyncioSelectorReactor is not None and isinstance(reactor, AsyncioSelectorReactor):
        loop = getattr(reactor, "_asyncioEventloop", None)
        if loop is not None:
            soon: Callable[[Callable[[], None]], Any] = loop.call_soon
            return soon
    elif isinstance(reactor, ReactorBase) and isinstance(getattr(reactor, "threadCallQueue", None), list):

        def append(call: Callable[[], None]) -> None:
            # The list is looked up each time: it is the reactor's to replace.
            reactor.threadCallQueue.append((call, (), {}))

        return append
    return lambda call: reactor.callLater(0, call)
