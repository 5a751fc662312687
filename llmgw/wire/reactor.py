"""``twistd --reactor=uvloop``: Twisted's asyncio reactor on a uvloop event loop.

Named by the reactor plugin in ``twisted/plugins/llmgw_dropin.py``; Twisted
imports this module only when that reactor was asked for.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVarTuple

try:
    import uvloop
except ImportError as error:
    raise ImportError(
        f"uvloop cannot be imported ({error}): pip install 'llmgw[fast]', or leave --reactor out"
    ) from error

if TYPE_CHECKING:
    from _typeshed import HasFileno

Ts = TypeVarTuple("Ts")
Watcher = tuple[Callable[..., object], tuple[Any, ...]]


class Loop(uvloop.Loop):
    """A uvloop that goes on watching a socket that was reset.

    libuv reports an error on a socket once, and ends the watch. uvloop turns that into one last
    call of the reader, which first gets the data received before; so the reader neither learns
    of the error nor is called again, and a later ``add_writer`` raises RuntimeError (seen with
    uvloop 0.23). Other event loops call a reader until it stops watching, and so does this one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reading: dict[int, Watcher] = {}
        self._writing: dict[int, Watcher] = {}
        self._errors = select.poll()

    def add_reader(self, fd: int | HasFileno, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """See ``asyncio.AbstractEventLoop``."""
        fd = _number(fd)
        self._reading[fd] = callback, args
        self._watch(super().add_reader, self._reading, fd)

    def add_writer(self, fd: int | HasFileno, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """See ``asyncio.AbstractEventLoop``."""
        fd = _number(fd)
        self._writing[fd] = callback, args
        self._watch(super().add_writer, self._writing, fd)

    def remove_reader(self, fd: int | HasFileno) -> Any:
        """See ``asyncio.AbstractEventLoop``."""
        fd = _number(fd)
        self._reading.pop(fd, None)
        return super().remove_reader(fd)

    def remove_writer(self, fd: int | HasFileno) -> Any:
        """See ``asyncio.AbstractEventLoop``."""
        fd = _number(fd)
        self._writing.pop(fd, None)
        return super().remove_writer(fd)

    def _watch(self, add: Callable[..., object], watchers: dict[int, Watcher], fd: int) -> None:
        try:
            add(fd, self._call, watchers, fd)
        except RuntimeError:
            self._renew(fd)  # libuv had ended the watch

    def _call(self, watchers: dict[int, Watcher], fd: int) -> None:
        callback, args = watchers[fd]
        callback(*args)
        if fd in watchers and self._has_error(fd):
            self.call_soon(self._renew, fd)

    def _has_error(self, fd: int) -> bool:
        """Whether the socket has an error, which is left for the reader to fetch."""
        self._errors.register(fd, 0)
        found = self._errors.poll(0)
        self._errors.unregister(fd)
        return bool(found and found[0][1] & select.POLLERR)

    def _renew(self, fd: int) -> None:
        """Watch again, whatever state the watch is in."""
        super().remove_reader(fd)
        super().remove_writer(fd)
        if fd in self._reading:
            super().add_reader(fd, self._call, self._reading, fd)
        if fd in self._writing:
            super().add_writer(fd, self._call, self._writing, fd)


def _number(fd: int | HasFileno) -> int:
    return fd if isinstance(fd, int) else fd.fileno()


def install() -> None:
    """Make it the process's reactor.

    :raise twisted.internet.error.ReactorAlreadyInstalledError: too late.
    """
    from twisted.internet import asyncioreactor

    asyncioreactor.install(Loop())
