"""The running gateway: assembled at start, parts swapped on reload, stopped in order.

``makeService`` builds a :class:`GatewayService` without touching the network;
every fault of a configuration is found then. The order at the end: not ready → still
accepting for the lame duck time → no new connections → answers close their connections →
streams finish → the rest gets an error and is cut.
"""

from __future__ import annotations

import random
import resource
import time
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict, replace
from twisted.internet.defer import Deferred, maybeDeferred

from llmgw import __version__
from llmgw.access.flood import FailureFlood
from llmgw.admin.history import History
from llmgw.admin.metrics import Metrics
from llmgw.admin.site import AdminRoot, AdminSite
from llmgw.assembly import (
    body_limits,
    build_callers,
    build_filters,
    build_limiter,
    build_listeners,
    build_router,
    build_store,
    build_tracer,
    check_discoveries,
    check_listeners,
    check_listeners_are_guarded,
)
from llmgw.backends import Backends, verify_backends
from llmgw.core.breaker import BreakerRules
from llmgw.core.fleet import Fleet
from llmgw.core.retry import RetryBudget
from llmgw.daemon import HURRIED_ABORT_S, NEEDS_RESTART, SIGINT_FINISH_S, Daemon, StartError, stop_all
from llmgw.discoveries import Discoveries
from llmgw.errors import PLUGIN_FAULTS
from llmgw.foreign import at_most
from llmgw.gateway.access_log import AccessLog
from llmgw.gateway.gateway import Gateway
from llmgw.gathering import Faults
from llmgw.listen.tls import certificate_warnings, first_expiry, reread_all
from llmgw.listening import Sockets
from llmgw.loads import Loads
from llmgw.operations import Operations
from llmgw.peers import Peers
from llmgw.pressure import Pressure
from llmgw.wire.accepting import ClientFactory
from llmgw.wire.pacing import StartPacer
from llmgw.wire.senders import Outbox
from llmgw.wire.site import Site
from llmgw.wire.sweep import Sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmgw.admin.events import Feed
    from llmgw.config import Config

SPARE_DESCRIPTORS = 256
STOP_S = 2.0
"""A plugin that takes longer to stop is not waited for."""
LEAST_CONNECTIONS = 16


class GatewayService(Daemon):
    """One gateway process.

    :param config: checked.
    :param reread: reads the configuration again for a reload; raises ConfigError.
    :param sockets: those that others opened for us; absent, all are opened here.
    :raise ConfigError: a plugin's options or a backend's files are wrong.
    :raise PluginError: a plugin is missing or unfit.
    """

    def __init__(
        self,
        config: Config,
        reactor: Any,
        *,
        reread: Callable[[], Config] | None = None,
        sockets: Sockets | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        super().__init__(config, reactor, clock)
        self._reread = reread
        self._begun_with = config
        self._dice = random.Random(seed)
        self.sweep = Sweep(reactor, clock)
        outbox = Outbox(reactor)
        self.fleet = Fleet(BreakerRules(**asdict(config.breaker)), self._dice)
        operations = Operations(self)
        self.metrics = Metrics(operations.fleet, operations.gauges, operations.knows)
        retry = config.retry
        faults = Faults(config.source)
        faults.of(check_discoveries, config, reactor)
        limiter = faults.of(build_limiter, config, reactor)
        # Gateways exchange their state through it; None where nothing is shared.
        self.store = faults.of(build_store, config, limiter, reactor)
        router = faults.of(build_router, config)
        callers = faults.of(build_callers, config, self._dice)
        tracer = faults.of(build_tracer, config, reactor)
        filters = faults.of(build_filters, config, clock)
        verified = faults.of(verify_backends, config, reactor)
        if faults:  # the listeners are made last, which is not reached: theirs are told too
            faults.of(check_listeners, config, reactor)
        faults.tell()
        self.peers = Peers(config.peers, self.store, self.fleet, reactor, clock) if self.store else None
        self.gateway = Gateway(
            config=config,
            fleet=self.fleet,
            router=router,
            limiter=limiter,
            callers=callers,
            budget=RetryBudget(retry.ratio, retry.window_s, retry.floor),
            metrics=self.metrics,
            access_log=AccessLog(config.log.access, reactor) if config.log.access else None,
            tracer=tracer,
            filters=filters,
            body_limits=body_limits(config),
            sweep=self.sweep,
            reactor=reactor,
            dice=self._dice,
        )
        self.site = Site(
            sweep=self.sweep,
            outbox=outbox,
            limits=config.limits,
            timeouts=config.timeouts,
            serve=StartPacer(self.gateway.serve, reactor).start,
            fault_answer=self.gateway.fault_answer,
        )
        self.loads = Loads(self.gateway, config, self.store)
        self.gateway.holding.loads = self.loads
        self.backends = Backends(self.fleet, self.gateway, self.loads, self.sweep, outbox, reactor)
        self.backends.verified = verified
        self.discoveries = Discoveries(self.backends, self.gateway, reactor)
        self.discoveries.apply(config)
        self.metrics.tables += [
            operations.refusal_tables,
            operations.discovery_tables,
            operations.model_tables,
        ]
        factory = ClientFactory(self.site)
        admin_token = config.admin_token.reveal() if config.admin_token is not None else None
        self.history = History(self.metrics.traffic, operations.load, time.time, reactor)
        self.feeds: Sequence[Feed] = (self.gateway.recent, self.history)
        root = AdminRoot(operations, admin_token, flood=FailureFlood(), reactor=reactor, feeds=self.feeds)
        admin = AdminSite(root)
        self.sockets = Sockets(reactor) if sockets is None else sockets
        self._listeners = build_listeners("listen", config.listen, factory, self.sockets)
        self._admin = build_listeners("admin", config.admin, admin, self.sockets)
        self.pressure = Pressure(
            config.overload,
            site=self.site,
            gateway=self.gateway,
            observe=self.metrics.lag.observe,
            reactor=reactor,
            clock=clock,
        )

    @property
    def started(self) -> bool:
        """See :class:`llmgw.handover.Serving`."""
        return bool(self.running) and not self.draining

    def listening(self) -> tuple[list[tuple[str, int]], Mapping[int, int]]:
        """See :class:`llmgw.handover.Serving`."""
        return self.sockets.descriptors(), self.sockets.activated()

    def let_go(self) -> None:
        """See :class:`Daemon`."""
        self.sockets.let_go()

    @property
    def warnings(self) -> list[str]:
        """Warnings about the configuration and about the certificates in use."""
        told = list(self.config.warnings)
        for key, listeners in (("listen", self._listeners), ("admin", self._admin)):
            told += certificate_warnings(key, listeners)
        return told

    @property
    def certificate_expires(self) -> float | None:
        """Unix time at which the first certificate in use expires; ``None`` if there is none."""
        return first_expiry([*self._listeners, *self._admin])

    # --- start --------------------------------------------------------------------

    def startService(self) -> None:
        """Begin to serve."""
        super().startService()
        self._started_s = self.clock()
        self._configure_site()
        self.sweep.start()
        if self.gateway.access_log is not None:
            try:
                self.gateway.access_log.start()
            except OSError as error:
                raise StartError(f"llmgw: cannot write the access log: {error}") from None
        if self.gateway.tracer is not None:
            self.gateway.tracer.start()
        self.listen()
        self.backends.start()
        self.pressure.start()
        if self.store is not None:
            self.store.start()
        self.loads.start()
        if self.peers is not None:
            self.peers.start()
        self.discoveries.start()
        self.history.start()
        self.take_signals()
        self.warn()
        self.log.info(
            "llmgw {version} serves {listen} with {count} backend{s}, router {router}",
            version=__version__,
            listen=", ".join(self.config.listen),
            count=len(self.config.backends),
            s="" if len(self.config.backends) == 1 else "s",
            router=self.config.router.plugin,
        )

    # --- end ----------------------------------------------------------------------

    async def finish(self) -> None:
        """See :class:`Daemon`."""
        drain = self.config.drain
        self.draining = True
        self.notifier.stopping(drain.lame_duck_s + drain.finish_s + drain.abort_s)
        lame_duck_s = 0.0 if self._interrupted else drain.lame_duck_s
        finish_s = SIGINT_FINISH_S if self._interrupted else drain.finish_s
        if self.running:
            self._tell_of_the_end(lame_duck_s, finish_s)
        self.site.patient = not self._interrupted
        if self.relieved:
            # Idle connections are kept for the lame duck time, so that a request
            # that is on its way to one is answered, and told that it was the last.
            await stop_all([*self._listeners, *self._admin])
            self.site.draining = True
        if self.running:
            await self._pause(lame_duck_s)
        await stop_all(self._listeners)
        self.site.draining = True
        self.gateway.waiting.close()
        self.site.close_idle()
        await self._until_idle(finish_s)
        if self.site.busy:
            self._tell_of_a_cut(finish_s)
        self.gateway.cancel_all()
        # So long clients that lag behind may read how it ended.
        abort_s = min(drain.abort_s, HURRIED_ABORT_S) if self._hurried or self._interrupted else drain.abort_s
        self._hurried = False
        await self.until(lambda: not self.site.connections, abort_s)
        self.site.cut_all()
        await self.discoveries.stop()
        await self.loads.stop()
        self.backends.stop()
        self.pressure.stop()
        self.history.stop()
        await self.until(lambda: not self.site.connections, 1.0)
        self.sweep.stop()
        if self.gateway.access_log is not None:
            self.gateway.access_log.stop()
        await self._stop_limiter()
        if self.gateway.tracer is not None:
            await maybeDeferred(self.gateway.tracer.close)
        if self.peers is not None:
            await self.peers.stop()
        if self.store is not None:
            await self.store.close()
        await stop_all(self._admin)
        self.sockets.remove_files()
        self.notifier.stop()

    def _tell_of_the_end(self, lame_duck_s: float, finish_s: float) -> None:
        """Why the process has not ended yet, for whoever waits for it."""
        left = f"{finish_s:g} s are left to finish"
        if lame_duck_s and not self.relieved:
            left = f"connections are taken for {lame_duck_s:g} s more, then {left}"
        count = _requests(self.gateway.in_flight)
        self.log.info("ending: {count} at work; {left}", count=count, left=left)

    def _tell_of_a_cut(self, finish_s: float) -> None:
        why = f"drain.finish_s ({finish_s:g} s) is over"
        if self._hurried:
            why = "a second signal came"
        elif self._interrupted:
            why = f"SIGINT leaves {finish_s:g} s"
        self.log.warn("ending: {count} cut, as {why}", count=_requests(self.site.busy), why=why)

    async def _stop_limiter(self) -> None:
        """It may be a plugin's: what it does must not keep the process."""
        stopping = maybeDeferred(getattr(self.gateway.limiter, "stop", lambda: None))
        try:
            await at_most(STOP_S, stopping, self.reactor)
        except PLUGIN_FAULTS:
            self.log.failure("the rate limiter plugin did not stop")

    async def _until_idle(self, most_s: float) -> None:
        def idle() -> bool:
            self.site.close_idle()
            return self.site.busy == 0

        await self.until(idle, most_s)

    async def _pause(self, seconds: float) -> None:
        end_s = self.clock() + seconds
        await self.until(lambda: self.clock() >= end_s, seconds)

    # --- reload -------------------------------------------------------------------

    def reload(self) -> Deferred[list[str]]:
        """Read everything again; replace all of it, or keep the old.

        :return: fires with the keys whose change needs a restart.
        :raise ConfigError: (or PluginError; the Deferred fails with it.) Nothing was changed.
        """
        return self.notifier.around(maybeDeferred(self._reload))

    def _reload(self) -> list[str]:
        config = self._reread() if self._reread is not None else self.config
        old = self.config
        router = self.gateway.router
        faults = Faults(config.source)
        if config.router != old.router:
            router = faults.of(build_router, config)
        faults.of(check_discoveries, config, self.reactor)
        faults.of(check_listeners_are_guarded, [text for text, _ in self._listeners], config)
        if config.listen != old.listen:
            faults.of(build_listeners, "listen", config.listen, None, Sockets(self.reactor))
        callers = faults.of(build_callers, config, self._dice)
        filters = faults.of(build_filters, config, self.clock)
        verified = faults.of(verify_backends, config, self.reactor)
        shown = faults.of(reread_all, "listen", self._listeners)
        shown_to_operators = faults.of(reread_all, "admin", self._admin)
        faults.tell()
        fixed = [key for key in NEEDS_RESTART if getattr(config, key) != getattr(self._begun_with, key)]
        self.config = config
        gateway = self.gateway
        gateway.configure(config)
        self.loads.configure(config)
        gateway.use_router(router)
        gateway.callers = callers
        filters.faults = gateway.filters.faults
        gateway.filters = filters
        gateway.body_limits = body_limits(config)
        self._configure_site()
        self.pressure.configure(config.overload)
        self.backends.verified = verified
        self.discoveries.apply(config)
        for put_to_use in (*shown, *shown_to_operators):
            put_to_use()
        if gateway.access_log is not None:
            gateway.access_log.reopen()
        self.tell_reloaded(fixed)
        return fixed

    # --- our own ------------------------------------------------------------------

    def _configure_site(self) -> None:
        """Give the site its figures: as many descriptors as the system has, and no
        more connections than they carry, since each request needs two."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                soft = hard
            except (OSError, ValueError):
                pass
        most = max(LEAST_CONNECTIONS, (soft - SPARE_DESCRIPTORS) // 2)
        limits, timeouts = self.config.limits, self.config.timeouts
        if most < limits.connections:
            self.log.warn(
                "limits.connections lowered from {wanted} to {most}: only {descriptors} descriptors",
                wanted=limits.connections,
                most=most,
                descriptors=soft,
            )
            limits = replace(limits, connections=most)
        self.site.configure(limits, timeouts)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
