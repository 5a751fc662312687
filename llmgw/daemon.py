"""The life of a daemon, whatever it serves: bind, signals, drain, reload.

A gateway (:class:`~llmgw.service.GatewayService`) and the parent of several
(:class:`~llmgw.workers.service.ParentService`) add what they stop, what they read again, and
what they hurry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredList, maybeDeferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from llmgw.config import Config
from llmgw.signals import take_signals
from llmgw.systemd import Notifier

NEEDS_RESTART = (
    "listen",
    "admin",
    "admin_token",
    "workers",
    "rate_limiter",
    "store",
    "peers",
    "breaker",
    "retry",
    "log",
    "tracing",
)
"""Keys that a reload reads, but cannot change."""
SIGINT_FINISH_S = 5.0
HURRIED_ABORT_S = 1.0
"""What is left of ``drain.abort_s`` after SIGINT or a second signal."""
POLL_S = 0.05


class StartError(SystemExit, Exception):
    """The daemon cannot start; the message is one line for the terminal.

    A ``SystemExit``, so that no traceback is printed. And an ``Exception``, since only then
    twistd in the background reports to the process that waits for its start, which would wait
    for ever, and removes its pid file.
    """


class Daemon(Service):
    """One process that listens until it is told to end.

    :ivar upgrade: what SIGUSR2 does, if anything.
    :ivar draining: it is ending, or about to end.
    :ivar relieved: another process accepts on the same sockets now.
    """

    log = Logger()
    name = "llmgw"

    def __init__(self, config: Config, reactor: Any, clock: Callable[[], float]) -> None:
        self.config = config
        self.reactor = reactor
        self.clock = clock
        self._listeners: list[tuple[str, Any]] = []
        self._admin: list[tuple[str, Any]] = []
        self._started_s = 0.0
        self.notifier = Notifier(reactor, {})
        self.upgrade: Callable[[], None] | None = None
        self.draining = False
        self.relieved = False
        self._hurried = False
        self._interrupted = False
        self._stopping: Deferred[None] | None = None

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._started_s

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings about what is allowed, but worth a line in the log."""
        raise NotImplementedError

    @property
    def started(self) -> bool:
        """See :class:`llmgw.handover.Serving`."""
        raise NotImplementedError

    def listening(self) -> tuple[list[tuple[str, int]], Mapping[int, int]]:
        """See :class:`llmgw.handover.Serving`."""
        raise NotImplementedError

    # --- start --------------------------------------------------------------------

    def privilegedStartService(self) -> None:
        """Bind, while we may still be root.

        :raise StartError: a port cannot be bound; the message names it.
        """
        for text, listener in [*self._listeners, *self._admin]:
            try:
                listener.privilegedStartService()
            except Exception as error:
                # twistd in the background shows the first 100 characters: the reason must be among them.
                where = re.sub(r":backlog=\d+$", "", text)
                why = getattr(getattr(error, "socketError", None), "strerror", None) or error
                raise StartError(f"llmgw: cannot listen on {where}: {why}") from None

    def listen(self) -> None:
        """Accept on every listener."""
        for _, listener in [*self._listeners, *self._admin]:
            listener.startService()

    def take_signals(self) -> None:
        """From now on signals drain, reload and replace this process."""
        take_signals(self.reactor, terminate=self.terminate, reload=self.reload_and_log, upgrade=self.upgrade)

    def warn(self) -> None:
        """Log each warning."""
        for warning in self.warnings:
            self.log.warn("{warning}", warning=warning)

    # --- end ----------------------------------------------------------------------

    def stopService(self) -> Deferred[None]:
        """Drain and end. Fires when everything is closed."""
        if self._stopping is None:
            self._stopping = Deferred.fromCoroutine(self._stop())
        return self._stopping

    async def _stop(self) -> None:
        await self.finish()
        await maybeDeferred(super().stopService)

    async def finish(self) -> None:
        """Drain, and close everything; called once."""
        raise NotImplementedError

    def terminate(self, interrupted: bool) -> None:
        """SIGTERM drains, SIGINT drains for five seconds, a second one of either ends at once."""
        if self.draining:
            self.hurry()
            return
        self.draining = True
        self._interrupted = interrupted
        self.reactor.stop()

    def begin_drain(self) -> None:
        """As SIGTERM."""
        self.terminate(False)

    def relieve(self) -> None:
        """See :class:`llmgw.handover.Serving`."""
        self.let_go()
        self.retire(relieved=True)

    def let_go(self) -> None:
        """Another process uses the same sockets from now on."""
        raise NotImplementedError

    def retire(self, *, interrupted: bool = False, relieved: bool = False) -> None:
        """Begin to drain, unless it is draining already.

        :param interrupted: as SIGINT.
        :param relieved: another process accepts on the same sockets from now on.
        """
        if not self.draining:
            self.relieved = relieved
            self.terminate(interrupted)

    def hurry(self) -> None:
        """Skip the remaining wait of the current drain."""
        self._hurried = self.draining

    async def until(self, done: Callable[[], bool], most_s: float, *, patient: bool = False) -> None:
        """Wait until ``done()``, at most ``most_s``, or until somebody hurries us.

        :param patient: hurrying does not shorten it.
        """
        end_s = self.clock() + most_s
        while not done() and self.clock() < end_s and (patient or not self._hurried):
            await deferLater(self.reactor, POLL_S)

    # --- reload -------------------------------------------------------------------

    def reload(self) -> Deferred[list[str]]:
        """Read everything again; replace all of it, or keep the old.

        :return: fires with the keys whose change needs a restart.
        """
        raise NotImplementedError

    def reload_and_log(self) -> None:
        """Reload on a signal; the outcome is logged."""
        self.reload().addErrback(
            lambda failure: self.log.error("reload refused: {why}", why=failure.getErrorMessage())
        )

    def tell_reloaded(self, fixed: Sequence[str]) -> None:
        """Log that a reload is done.

        :param fixed: keys whose change needs a restart.
        """
        self.warn()
        self.log.info("reloaded{left}", left=f"; a restart is needed for {', '.join(fixed)}" if fixed else "")


async def stop_all(listeners: Sequence[tuple[str, Any]]) -> None:
    """Stop every listener, once; one that fails does not affect the others."""
    running = [maybeDeferred(listener.stopService) for _, listener in listeners if listener.running]
    await DeferredList(running, consumeErrors=True)
