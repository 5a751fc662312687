"""What the data path does with private fields of Twisted, each use with a fallback.

The fields are ``_tempDataBuffer``, ``_tempDataLen``, ``dataBuffer`` and ``offset`` of
``twisted.internet.abstract.FileDescriptor``, ``_dataReceived`` of
``twisted.internet.tcp.Connection``, ``_appSendBuffer`` of
``twisted.protocols.tls.TLSMemoryBIOProtocol``, ``threadCallQueue`` of
``twisted.internet.base.ReactorBase``, and ``_asyncioEventloop`` of the asyncio reactor.
Where they are not as expected, public interfaces are used instead.
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


class _IgnoresLoss(ClientFactory):
    """Stands in for the factory of a connection that no longer needs one."""

    noisy = False


_IGNORES_LOSS: Any = _IgnoresLoss()


def is_plain_socket(transport: Any) -> bool:
    """Whether ``transport`` is a socket without TLS that has the private fields used here."""
    return (
        isinstance(transport, Connection)
        and not getattr(transport, "TLS", False)
        and hasattr(transport, "_tempDataBuffer")
        and hasattr(transport, "dataBuffer")
        and hasattr(transport, "_dataReceived")
    )


def send_at_once(transport: Any) -> Callable[[bytes], None]:
    """The cheapest way to write to ``transport`` without waiting for the end of the turn."""
    if not is_plain_socket(transport):
        write: Callable[[bytes], None] = transport.write
        return write
    return partial(_send, transport, transport.socket.send)


def has_unsent(transport: Any) -> bool:
    """Whether earlier data is still in Twisted's buffers: new data must queue behind it."""
    return bool(transport._tempDataBuffer or transport.dataBuffer)


def _send(transport: Any, send: Callable[[bytes], int], data: bytes) -> None:
    if has_unsent(transport) or not transport.connected:
        transport.write(data)
        return
    try:
        sent = send(data)
    except OSError:
        # Twisted waits for writability after EAGAIN; a real error comes back from
        # its own send, which reports it to connectionLost.
        transport.write(data)
        return
    if sent != len(data):
        transport.write(data[sent:])


def read_directly(transport: Any, take: Callable[[bytes], bool]) -> bool:
    """Offer each read of a plain transport to ``take`` before the protocol gets it.

    :param take: returns whether it has consumed the bytes; if not, they go to the protocol.
        Must not raise.
    :return: whether the transport allows it; :func:`stop_reading_directly` ends it.
    """
    if not is_plain_socket(transport):
        return False
    # A partial: the cells of a closure would take twice the memory, for each stream.
    transport.doRead = partial(_read, transport, transport.socket.recv, transport.bufferSize, take)
    return True


def _read(transport: Any, receive: Callable[[int], bytes], size: int, take: Callable[[bytes], bool]) -> Any:
    """As ``twisted.internet.tcp.Connection.doRead``, with two function calls less."""
    try:
        data = receive(size)
    except BlockingIOError:
        return None
    except OSError:
        return CONNECTION_LOST
    return None if data and take(data) else transport._dataReceived(data)


def stop_reading_directly(transport: Any) -> None:
    """Let all reads go to the protocol again. Idempotent."""
    # Not through __dict__: accessing it creates one, which takes a kilobyte.
    with suppress(AttributeError):
        del transport.doRead


def unsent_bytes(transport: Any) -> int:
    """Bytes buffered in a transport and those below it; 0 where they cannot be seen."""
    size = 0
    while transport is not None:
        size += len(getattr(transport, "dataBuffer", b"")) - getattr(transport, "offset", 0)
        size += getattr(transport, "_tempDataLen", 0)
        size += sum(map(len, getattr(transport, "_appSendBuffer", ())))
        transport = getattr(transport, "transport", None)
    return size


def unacked_bytes(transport: Any) -> int:
    """:func:`unsent_bytes` plus, on Linux, those in the kernel that the peer has not acknowledged.

    Aborting a connection loses them, also one under TLS that waits for the peer's close_notify.
    """
    size = unsent_bytes(transport)
    while (below := getattr(transport, "transport", None)) is not None:
        transport = below
    with suppress(AttributeError, OSError, ValueError):
        size += int.from_bytes(ioctl(transport.socket.fileno(), TIOCOUTQ, bytes(4)), sys.byteorder)
    return size


def take_over(transport: Any, protocol: Any) -> None:
    """Let ``transport`` call ``protocol`` directly.

    A client endpoint leaves a wrapper between the two that only forwards each read; once
    the connection is established it has nothing left to do. Nor have its factory and the
    Deferred that was waited for, which the connector would keep in memory.
    """
    if isinstance(transport, Connection) and hasattr(transport, "protocol"):
        transport.protocol = protocol
        connector = getattr(transport, "connector", None)
        if isinstance(connector, BaseConnector):
            connector.factory = _IGNORES_LOSS


def end_of_turn(reactor: Any) -> Callable[[Callable[[], None]], Any]:
    """A function that schedules a call for when this turn's events have been handled.

    A ``ReactorBase`` runs its thread calls after each poll; adding one from the reactor's
    own thread needs no wake-up, and costs a tenth of ``callLater(0)``.
    """
    if AsyncioSelectorReactor is not None and isinstance(reactor, AsyncioSelectorReactor):
        loop = getattr(reactor, "_asyncioEventloop", None)
        if loop is not None:
            soon: Callable[[Callable[[], None]], Any] = loop.call_soon
            return soon
    elif isinstance(reactor, ReactorBase) and isinstance(getattr(reactor, "threadCallQueue", None), list):

        def append(call: Callable[[], None]) -> None:
            # The list is looked up each time, since the reactor may replace it.
            reactor.threadCallQueue.append((call, (), {}))

        return append
    return lambda call: reactor.callLater(0, call)
