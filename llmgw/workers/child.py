"""One worker process as its parent sees it: started, listened to, ended."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from twisted.internet.error import ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.workers.link import Link, factory_of
from llmgw.workers.messages import Begin, Drain, Failed, Farewell, Hurry, Status, read_as_parent

LONGEST_LINE = 1 << 16
"""Of a log, in bytes; what is before is cut."""

SILENT_S = 30.0
"""A worker that has said nothing for so long is stuck, and is killed."""


class Child(ProcessProtocol):
    """One process.

    :param number: of its place.
    :param changed: called when its status has changed.
    :param ended: called once, when it is gone.
    :ivar status: the last it told, ``None`` before the first.
    :ivar pid: its process id.
    :ivar leaving: it was told to end.
    :ivar why: why it could not start, if it said so.
    :ivar said: the last text of its metrics.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        number: int,
        changed: Callable[[Child], None],
        ended: Callable[[Child], None],
    ) -> None:
        self.number = number
        self.status: Status | None = None
        self.pid = 0
        self.leaving = False
        self.why = ""
        self.said = ""
        self.started_s = reactor.seconds()
        self._reactor = reactor
        self._changed = changed
        self._ended = ended
        self._heard_s = self.started_s
        self._exit = ""
        self._unfinished = b""
        self.link = Link(read_as_parent, self._heard, lambda: None)

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self.status is not None and self.status.ready and not self.leaving

    def start(self, begin: Begin, activated: Mapping[int, int], reactor_name: str) -> None:
        """Start the process and tell it to serve.

        :param begin: its ``sockets`` hold descriptors of ours.
        :param activated: numbers that systemd's sockets must have there, to descriptors of ours.
        :raise OSError: no process can be had.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors: dict[int, Any] = {0: "w", 1: 1, 2: "r"}
            descriptors.update(activated)
            number = max(2, *descriptors) + 1
            line, descriptors[number] = number, theirs.fileno()
            sockets = []
            for name, descriptor in begin.sockets:
                number += 1
                descriptors[number] = descriptor
                sockets.append((name, number))
            process = self._reactor.spawnProcess(
                self,
                sys.executable,
                [sys.executable, "-m", "llmgw.workers.process", str(line), reactor_name],
                env=_environment(len(activated)),
                childFDs=descriptors,
            )
        self.pid = process.pid
        process.closeStdin()
        ours.setblocking(False)
        self._reactor.adoptStreamConnection(ours.fileno(), socket.AF_UNIX, factory_of(self.link))
        ours.close()
        self.link.send(Begin(begin.number, begin.setup, sockets, begin.store, begin.drained))

    def drain(self, *, interrupted: bool = False, relieved: bool = False) -> None:
        """Have it finish and end."""
        self.leaving = True
        self.link.send(Drain(interrupted, relieved))

    def hurry(self) -> None:
        """Have it skip the waiting."""
        self.link.send(Hurry())

    def kill(self) -> None:
        """End it without asking."""
        try:
            self.transport.signalProcess("KILL")  # type: ignore[union-attr]
        except ProcessExitedAlready:
            pass

    def check(self) -> None:
        """Kill it if it is stuck."""
        silent_s = self._reactor.seconds() - self._heard_s
        if silent_s > SILENT_S:
            self.log.error(
                "worker {number} (pid {pid}) has said nothing for {silent:.0f} s: killed",
                number=self.number,
                pid=self.pid,
                silent=silent_s,
            )
            self._heard_s = self._reactor.seconds()
            self.kill()

    @property
    def end(self) -> str:
        """How it ended, in words."""
        return self.why or self._exit

    # --- from the process -----------------------------------------------------------

    def _heard(self, message: Any) -> None:
        self._heard_s = self._reactor.seconds()
        if isinstance(message, Status):
            self.status = message
            self._changed(self)
        elif isinstance(message, Failed):
            self.why = message.why
        elif isinstance(message, Farewell):
            self.said = message.metrics

    def errReceived(self, data: bytes) -> None:
        """Its log, line by line into ours."""
        *lines, rest = (self._unfinished + data).split(b"\n")
        self._unfinished = rest[-LONGEST_LINE:]
        for line in lines:
            text = line.decode("utf-8", "replace").strip()
            if text:
                self.log.info("worker {number}: {text}", number=self.number, text=text)

    def processEnded(self, reason: Failure) -> None:
        error: Any = reason.value
        self._exit = f"signal {error.signal}" if error.signal else f"exit status {error.exitCode}"
        transport: Any = self.link.transport
        if transport is not None:
            transport.abortConnection()
        self._ended(self)


def _environment(activated: int) -> dict[str, str]:
    """That of the worker: ours, and what systemd said, which Twisted took away when it read it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NOTIFY_")}
    environment.pop("WATCHDOG_USEC", None)
    if activated:
        environment["LISTEN_FDS"] = str(activated)
    return environment
