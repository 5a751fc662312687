"""Send at once what the socket takes at once.

Twisted's ``transport.write`` buffers, asks the reactor to watch for
writability and sends in the next turn: two ``epoll_ctl`` calls and one more
turn for each event of a stream. A gateway's sockets are nearly always
writable, so trying ``send`` first saves a fifth of the CPU per event.

This is the one place that reads private fields of Twisted (``_tempDataBuffer``
and ``dataBuffer`` of ``twisted.internet.abstract.FileDescriptor``). Wherever
they are not as expected, the transport's own ``write`` is used.

1. Only for plain TCP and unix transports; TLS and foreign ones use ``write``.
2. What the socket does not take goes to ``write``, so ordering, back-pressure
   (``registerProducer``) and error reporting stay Twisted's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.tcp import Connection

if TYPE_CHECKING:
    from collections.abc import Callable


def sender(transport: Any) -> Callable[[bytes], None]:
    """The cheapest way to write to ``transport``; call once per connection.

    :return: a function that takes bytes and never raises for what the peer did.
    """
    write: Callable[[bytes], None] = transport.write
    if (
        not isinstance(transport, Connection)
        or getattr(transport, "TLS", False)
        or not hasattr(transport, "_tempDataBuffer")
        or not hasattr(transport, "dataBuffer")
    ):
        return write
    send_now = transport.socket.send

    def send(data: bytes) -> None:
        if transport._tempDataBuffer or transport.dataBuffer or not transport.connected:
            write(data)
            return
        try:
            sent = send_now(data)
        except OSError:
            # EAGAIN waits for writability; a real error comes back from
            # Twisted's own send, which reports it to connectionLost.
            write(data)
            return
        if sent != len(data):
            write(data[sent:])

    return send


def is_flushed(transport: Any) -> bool:
    """Everything written has left for the kernel, as far as can be told."""
    return not getattr(transport, "_tempDataBuffer", None) and not getattr(transport, "dataBuffer", None)


def take_over(transport: Any, protocol: Any) -> None:
    """Let ``transport`` call ``protocol`` itself.

    A client endpoint leaves a wrapper between the two that only passes each read
    on; once the connection stands it has nothing left to do.
    """
    if isinstance(transport, Connection) and hasattr(transport, "protocol"):
        transport.protocol = protocol
