"""The inside of a worker: a gateway service, and the line to the parent that moves its levers."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from twisted.internet.defer import Deferred, maybeDeferred, succeed
from twisted.internet.task import LoopingCall
from twisted.logger import Logger, globalLogBeginner, textFileLogObserver
from twisted.python.failure import Failure

from llmgw.config import Config
from llmgw.daemon import StartError
from llmgw.errors import ConfigError, PluginError
from llmgw.listening import Sockets
from llmgw.operations import Operations
from llmgw.service import GatewayService
from llmgw.tap import prepare_process
from llmgw.workers.faults import as_values
from llmgw.workers.link import Link, factory_of
from llmgw.workers.messages import (
    ALIVE_EVERY_S,
    CALLS,
    Answer,
    Begin,
    Call,
    Drain,
    Failed,
    Farewell,
    Hurry,
    Reload,
    Setup,
    Status,
    read_as_worker,
)
from llmgw.workers.setup import as_worker, config_of

LAST_WORDS_S = 2.0
ROUNDS_PER_S = 4
"""How often the worker looks whether what it told of itself is still true."""
FIGURES = ("state", "metrics_text")
"""Our status goes before the answer to these, so that what the parent says of each worker adds up to it."""


class Worker:
    """What the parent's messages do here.

    :param descriptor: of the line.
    """

    log = Logger()

    def __init__(self, reactor: Any, descriptor: int) -> None:
        self.reactor = reactor
        self.service: GatewayService | None = None
        self.failed = False
        self._gone: Deferred[None] = Deferred()
        self._operations: Operations | None = None
        self._store = ""
        self._setup: Setup | None = None
        self._told: Status | None = None
        self._rounds = 0
        self._loop = LoopingCall(self._look)
        self._loop.clock = reactor
        self.link = Link(read_as_worker, self._heard, self._orphaned)
        reactor.adoptStreamConnection(descriptor, socket.AF_UNIX, factory_of(self.link))
        os.close(descriptor)

    # --- what the parent says -----------------------------------------------------

    def _heard(self, message: Any) -> None:
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Drain):
            self._drain(message.interrupted, message.relieved)
        elif isinstance(message, Hurry):
            if self.service is not None:
                self.service.hurry()
        elif isinstance(message, Call):
            if message.what in FIGURES and self._operations is not None:
                self._tell(self._status())
            self._answer(message.id, self._call, message.what, message.arguments)
        elif isinstance(message, Reload):
            self._answer(message.id, self._reload, message.setup)

    def _begin(self, begin: Begin) -> None:
        self._store = begin.store
        self._setup = begin.setup
        sockets = Sockets(self.reactor, begin.sockets, shared=True)
        try:
            service = GatewayService(self._config(), self.reactor, reread=self._config, sockets=sockets)
            service.privilegedStartService()
            service.startService()
        except (ConfigError, PluginError, StartError) as error:
            self._end(str(error))
            return
        except Exception:
            self.log.failure("starting")
            self._end(Failure().getErrorMessage())
            return
        sockets.close_unclaimed()
        self.service = service
        self._operations = Operations(service)
        for backend_id in begin.drained:
            self._operations.drain_backend(backend_id, True)
        self.reactor.addSystemEventTrigger("before", "shutdown", self._stop)
        self._loop.start(1 / ROUNDS_PER_S)

    def _stop(self) -> Deferred[None]:
        """Drain, say farewell, and wait until that has left."""
        assert self.service is not None
        stopping = self.service.stopService()
        stopping.addErrback(lambda failure: self.log.failure("stopping", failure))
        return stopping.addCallback(lambda _: self._say_farewell())

    def _say_farewell(self) -> Deferred[None]:
        assert self._operations is not None
        self._loop.stop()
        if not self.link.connected:
            return succeed(None)
        self.link.send(Farewell(self._operations.metrics_text().decode()))
        assert self.link.transport is not None
        self.link.transport.loseConnection()
        # The parent may hang; it must not keep us.
        return self._gone.addTimeout(LAST_WORDS_S, self.reactor, onTimeoutCancel=lambda *_: None)

    def _drain(self, interrupted: bool, relieved: bool) -> None:
        if self.service is None:
            self.reactor.stop()
        else:
            self.service.retire(interrupted=interrupted, relieved=relieved)

    def _reload(self, setup: Setup) -> Any:
        old, self._setup = self._setup, setup
        assert self.service is not None

        def kept(failure: Failure) -> Failure:
            self._setup = old
            return failure

        return self.service.reload().addErrback(kept)

    def _call(self, what: str, arguments: list[Any]) -> Any:
        if what not in CALLS or self._operations is None:
            raise ValueError(f"a worker is not asked for {what!r} now")
        if what == "explain":
            return self._operations.explain(arguments[0].encode())
        answer = getattr(self._operations, what)(*arguments)
        return answer.decode() if isinstance(answer, bytes) else answer

    def _answer(self, id: int, do: Any, *arguments: Any) -> None:
        answering = maybeDeferred(do, *arguments)
        answering.addCallbacks(
            lambda value: self.link.send(Answer(id, value)),
            lambda failure: self.link.send(Answer(id, error=as_values(failure.value))),
        )
        answering.addErrback(lambda failure: self.log.failure("answering the parent", failure))

    def _orphaned(self) -> None:
        """The parent has ended: whoever comes next on these sockets must not find us."""
        self._gone.callback(None)
        if self.service is None:
            if self.reactor.running:
                self.reactor.stop()
        elif not self.service.draining:
            self.log.warn("the parent is gone: finishing")
            self._drain(False, True)

    # --- what we say --------------------------------------------------------------

    def _look(self) -> None:
        """Tell our status once a second, or as soon as it matters."""
        status, told = self._status(), self._told
        self._rounds += 1
        if (
            told is None
            or (told.ready, told.draining) != (status.ready, status.draining)
            or self._rounds >= ALIVE_EVERY_S * ROUNDS_PER_S
        ):
            self._tell(status)

    def _status(self) -> Status:
        assert self.service is not None
        assert self._operations is not None
        ready, why = self._operations.readiness()
        gateway, site = self.service.gateway, self.service.site
        return Status(ready, why, self.service.draining, gateway.in_flight, len(site.connections))

    def _tell(self, status: Status) -> None:
        self._rounds = 0
        self._told = status
        self.link.send(status)

    def _end(self, why: str) -> None:
        self.failed = True
        self.link.send(Failed(why))
        self.reactor.callLater(0.1, self.reactor.stop)

    def _config(self) -> Config:
        """The parent's configuration as a worker has it: the admin listener is the parent's."""
        assert self._setup is not None
        return as_worker(config_of(self._setup), self._store)


def run(descriptor: int) -> None:
    """Serve until told to end. Exit status 1: it could not start."""
    from twisted.internet import reactor

    # Lines without a time: the parent's log has one.
    observer = textFileLogObserver(sys.stderr, timeFormat="")
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False)
    prepare_process(reactor)
    for number in (signal.SIGHUP, signal.SIGUSR2):  # the parent's to obey
        signal.signal(number, signal.SIG_IGN)
    worker = Worker(reactor, descriptor)
    reactor.run()
    sys.exit(1 if worker.failed else 0)
