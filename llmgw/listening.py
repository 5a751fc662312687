"""The listening sockets of this process: opened here, or taken over from another.

Endpoints open their sockets through the reactor they were given. Here they get a
stand-in for it, which does what they ask and remembers the socket; where somebody
else has opened it (the parent of workers, the daemon that we replace, systemd) it
adopts that one instead. Whatever an endpoint puts around a socket, TLS or the PROXY
protocol, it so puts around an adopted one too, and any endpoint that listens
through its reactor can be shared.

What Twisted does at the end of a port is wrong for a shared one: ``shutdown(2)``
ends the queue for every process that holds it, and the file of a UNIX socket would
be removed while others serve it. Both are avoided here.

:source: ``twisted.internet.tcp.Port`` and ``unix.Port`` of Twisted 26, whose private
    fields ``_shouldShutdown``, ``_bindPath`` and ``_logger`` are set here and nowhere else. Reactors
    make such ports in ``adoptStreamPort``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

from twisted.internet import tcp, unix
from twisted.internet.fdesc import setNonBlocking
from twisted.logger import ILogObserver, LogEvent, Logger, globalLogPublisher
from twisted.protocols.tls import TLSMemoryBIOFactory
from zope.interface import directlyProvides, implementer, providedBy

from llmgw.seldom import Seldom

SYSTEM_BACKLOG = 4096
"""For sockets that systemd opened; the kernel takes ``somaxconn`` where that is less."""


ACCEPTS_AT_A_TIME = 8


@implementer(ILogObserver)
class _Accepting:
    """Takes what Twisted says of accepting. When there is no descriptor left that is three lines for each
    connection, and where many come, the log would fill the disk."""

    _log = Logger()

    def __init__(self) -> None:
        self._seldom = Seldom(time.monotonic)

    def __call__(self, event: LogEvent) -> None:
        text = str(event.get("log_format", ""))
        if "EMFILE" not in text:
            globalLogPublisher(event)
        elif text.startswith("EMFILE recovery"):
            more = self._seldom.words("closed")
            if more is not None:
                self._log.error(
                    "no descriptor is left (EMFILE): connections are closed as they come{more}", more=more
                )


_TOLD = Logger("llmgw.listening", observer=_Accepting())


class _OneByOne:
    """A port takes as many connections at a time as it took the last time, and more."""

    _logger = _TOLD
    numberAccepts = property(lambda self: 1, lambda self, value: None)


class _FewAtATime:
    """As Twisted adapts it, but never so many that a burst of new connections makes the others wait long.

    Setting up TLS for one takes some 0.2 ms; Twisted takes 20 more with each turn of a burst.
    """

    _logger = _TOLD
    _accepts = ACCEPTS_AT_A_TIME

    @property
    def numberAccepts(self) -> int:
        return self._accepts

    @numberAccepts.setter
    def numberAccepts(self, value: int) -> None:
        self._accepts = min(value, ACCEPTS_AT_A_TIME)


class _Port(_FewAtATime, tcp.Port):
    pass


class _UnixPort(_FewAtATime, unix.Port):
    pass


class _SharedPort(_OneByOne, tcp.Port):
    pass


class _SharedUnixPort(_OneByOne, unix.Port):
    pass


class Sockets:
    """All of them, each under the name of the endpoint that asked for it.

    :param inherited: name and descriptor of sockets that were opened for us; an
        endpoint gets those of its name in their order, or else one that is bound
        where it wants to listen. The descriptors are ours to close. A list is shared
        with whoever else takes from it.
    :param accepts: take connections; else only hold the sockets for others.
    :param shared: other processes accept from the inherited ones too: take one
        connection at a time, so that a burst is not all for who wakes first.
    """

    def __init__(
        self,
        reactor: Any,
        inherited: Iterable[tuple[str, int]] = (),
        *,
        accepts: bool = True,
        shared: bool = False,
    ) -> None:
        self.reactor = reactor
        self._tcp_port = _SharedPort if shared else _Port
        self._unix_port = _SharedUnixPort if shared else _UnixPort
        self._accepts = accepts
        self._inherited = inherited if isinstance(inherited, list) else list(inherited)
        self._ports: list[tuple[str, Any]] = []
        self._activated: dict[int, Any] = {}
        self._files: list[str] = []

    def reactor_for(self, name: str) -> Any:
        """The stand-in for the endpoint ``name``."""
        return _Reactor(self, name)

    def descriptors(self) -> list[tuple[str, int]]:
        """Name and descriptor of every open socket, in the order in which they were asked for."""
        return [(name, port.fileno()) for name, port in self._ports if port.connected]

    def activated(self) -> dict[int, int]:
        """Descriptors that systemd passed us to those that the same sockets have now."""
        return {number: port.fileno() for number, port in self._activated.items() if port.connected}

    def close_unclaimed(self) -> None:
        """Close what was inherited and no endpoint asked for."""
        for _, descriptor in self._inherited:
            os.close(descriptor)
        self._inherited.clear()

    def let_go(self) -> None:
        """Another process serves them from now on: their files are not ours to remove."""
        self._files.clear()
        for _, port in self._ports:
            if isinstance(port, unix.Port):
                _forget_file(port)

    def remove_files(self) -> None:
        """Remove the files of UNIX sockets that we took over, at the end."""
        for path in self._files:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._files.clear()

    # --- for the stand-ins ---

    def take(self, name: str, family: int, address: Any) -> int | None:
        """The inherited descriptor for this wish, ``None`` if there is none."""
        found = next((each for each in self._inherited if each[0] == name), None)
        if found is None:
            found = next((each for each in self._inherited if _is_bound(each[1], family, address)), None)
        if found is None:
            return None
        self._inherited.remove(found)
        return found[1]

    def keep(self, name: str, port: Any) -> Any:
        """Remember a port that is open; it closes without harm to others."""
        port._shouldShutdown = False
        if type(port) is tcp.Port:  # as the reactor makes them
            port.__class__ = self._tcp_port
        elif type(port) is unix.Port:
            port.__class__ = self._unix_port
        if not self._accepts:
            port.stopReading()
        self._ports.append((name, port))
        return port

    def adopt(self, name: str, descriptor: int, family: int, factory: Any, backlog: int) -> Any:
        """A port on a socket that is open already; ``descriptor`` itself stays open."""
        if family == socket.AF_UNIX:
            setNonBlocking(descriptor)
            port = self._unix_port._fromListeningDescriptor(self.reactor, descriptor, factory)
            _forget_file(port)
            port.backlog = backlog
            port.startListening()
        else:
            setNonBlocking(descriptor)
            port = self._tcp_port._fromListeningDescriptor(self.reactor, descriptor, family, factory)
            port.startListening()
            port.socket.listen(backlog)
        return self.keep(name, port)

    def adopt_activated(self, name: str, descriptor: int, family: int, factory: Any) -> Any:
        """As :meth:`adopt`, for one that systemd passed by number."""
        port = self._activated[descriptor] = self.adopt(name, descriptor, family, factory, SYSTEM_BACKLOG)
        return port

    def own_file(self, path: str) -> None:
        """A UNIX socket's file that is ours to remove."""
        self._files.append(path)


class _Reactor:
    """The reactor, but for what opens stream sockets."""

    def __init__(self, sockets: Sockets, name: str) -> None:
        self._sockets = sockets
        self._name = name
        directlyProvides(self, providedBy(sockets.reactor))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sockets.reactor, name)

    def listenTCP(self, port: int, factory: Any, backlog: int = 50, interface: str = "") -> Any:
        """See ``IReactorTCP``."""
        sockets = self._sockets
        family = socket.AF_INET6 if ":" in interface else socket.AF_INET
        descriptor = sockets.take(self._name, family, (interface, port))
        if descriptor is None:
            return sockets.keep(self._name, sockets.reactor.listenTCP(port, factory, backlog, interface))
        adopted = sockets.adopt(self._name, descriptor, family, factory, backlog)
        os.close(descriptor)
        return adopted

    def listenSSL(
        self, port: int, factory: Any, contextFactory: Any, backlog: int = 50, interface: str = ""
    ) -> Any:
        """See ``IReactorSSL``; made as ``PosixReactorBase.listenSSL`` makes it."""
        wrapped = TLSMemoryBIOFactory(contextFactory, False, factory)
        made = self.listenTCP(port, wrapped, backlog, interface)
        made._type = "TLS"
        return made

    def listenUNIX(
        self, address: str, factory: Any, backlog: int = 50, mode: int = 0o666, wantPID: int = 0
    ) -> Any:
        """See ``IReactorUNIX``."""
        sockets = self._sockets
        path = os.fsdecode(address)
        descriptor = sockets.take(self._name, socket.AF_UNIX, path)
        if descriptor is None:
            made = sockets.reactor.listenUNIX(address, factory, backlog, mode, wantPID)
            return sockets.keep(self._name, made)
        adopted = sockets.adopt(self._name, descriptor, socket.AF_UNIX, factory, backlog)
        os.close(descriptor)
        sockets.own_file(path)
        return adopted

    def adoptStreamPort(self, fileDescriptor: int, addressFamily: int, factory: Any) -> Any:
        """See ``IReactorSocket``."""
        return self._sockets.adopt_activated(self._name, fileDescriptor, addressFamily, factory)


def _forget_file(port: unix.Port) -> None:
    """Let the port take its socket for a nameless one: it neither changes the file's mode nor removes it."""
    port._bindPath = b"\0"
    lock, port.lockFile = port.lockFile, None
    if lock is not None:
        with contextlib.suppress(OSError, ValueError):
            lock.unlock()


def _is_bound(descriptor: int, family: int, address: Any) -> bool:
    """Whether the socket listens just there; port 0 is nowhere in particular."""
    with socket.socket(fileno=os.dup(descriptor)) as held:
        if held.family != family:
            return False
        bound = held.getsockname()
    if family == socket.AF_UNIX:
        return bool(bound == address)
    interface, port = address
    everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
    return bool(port and bound[1] == port and bound[0] == (interface or everywhere))
