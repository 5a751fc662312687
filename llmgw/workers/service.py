"""The parent of workers: holds the sockets, and answers the operator.

It reads the configuration, verifies it as a gateway would, and serves nobody
itself. Order of the start: bind → give up rights → start workers. Order of the end:
not ready → workers drain (each as a gateway does) → what is left is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory

from llmgw import __version__
from llmgw.access.flood import FailureFlood
from llmgw.admin.site import AdminRoot, AdminSite
from llmgw.assembly import build_listeners, check_listeners_are_guarded
from llmgw.config import Config, StoreConfig
from llmgw.daemon import NEEDS_RESTART, SIGINT_FINISH_S, Daemon, StartError, stop_all
from llmgw.errors import ConfigError, ConfigFault, GatewayError
from llmgw.listening import Sockets
from llmgw.service import GatewayService
from llmgw.workers.crew import Crew
from llmgw.workers.embedded import EmbeddedStore, find_server
from llmgw.workers.feeds import Feeds
from llmgw.workers.messages import Setup
from llmgw.workers.operations import ParentOperations
from llmgw.workers.setup import as_worker

GRACE_S = 5.0
"""Beyond the time of a drain, before workers that are left are killed."""

NEEDS_NEW_PARENT = frozenset({"listen", "admin", "admin_token", "workers"})
"""Of the keys that a reload cannot change, those that new workers cannot change either."""


class ParentService(Daemon):
    """The parent.

    :param config: checked.
    :param setup: what it was read from.
    :param reread: gives both anew for a reload; raises ConfigError.
    :param inherited: sockets that a daemon before us handed over.
    :raise ConfigError: as :class:`~llmgw.service.GatewayService`.
    :raise PluginError: likewise.
    """

    def __init__(
        self,
        config: Config,
        setup: Setup,
        reactor: Any,
        *,
        reread: Callable[[], tuple[Config, Setup]],
        reactor_name: str = "",
        inherited: list[tuple[str, int]] | None = None,
    ) -> None:
        super().__init__(config, reactor, reactor.seconds)
        self._reread = reread
        program, self._warnings = verify(config, reactor)
        self.store = EmbeddedStore(reactor, program) if program else None
        # One list: whoever is bound where is found out when they listen.
        inherited = [] if inherited is None else inherited
        self.sockets = Sockets(reactor, inherited, accepts=False)
        self.admin_sockets = Sockets(reactor, inherited)
        self._listeners = build_listeners("listen", config.listen, Factory(), self.sockets)
        operations = ParentOperations(self)
        self.crew = Crew(
            reactor,
            setup,
            config.workers,
            self.sockets,
            reactor_name=reactor_name,
            departed=operations.departed,
        )
        token = config.admin_token.reveal() if config.admin_token is not None else None
        self.feeds = Feeds(self.crew, lambda: len(root.events), reactor)
        feeds = (self.feeds.decisions, self.feeds.history)
        root = AdminRoot(operations, token, flood=FailureFlood(), reactor=reactor, feeds=feeds)
        admin = AdminSite(root)
        self._admin = build_listeners("admin", config.admin, admin, self.admin_sockets)

    @property
    def warnings(self) -> Sequence[str]:
        """Those of the gateway that each worker will be."""
        return self._warnings

    @property
    def started(self) -> bool:
        """See :class:`llmgw.handover.Serving`: every worker serves that can."""
        places = self.crew.places
        waited_for = [place for place in places if not place.restarts.given_up]
        told = [place.current is not None and place.current.status is not None for place in waited_for]
        return bool(self.running and told and all(told))

    def listening(self) -> tuple[list[tuple[str, int]], Mapping[int, int]]:
        """See :class:`llmgw.handover.Serving`."""
        activated = {**self.sockets.activated(), **self.admin_sockets.activated()}
        return [*self.sockets.descriptors(), *self.admin_sockets.descriptors()], activated

    def let_go(self) -> None:
        """See :class:`~llmgw.daemon.Daemon`."""
        self.sockets.let_go()
        self.admin_sockets.let_go()

    # --- start --------------------------------------------------------------------

    def privilegedStartService(self) -> None:
        """Bind, while we may still be root.

        :raise StartError: a port can't be had, or its socket can't be shared; the message names it.
        """
        super().privilegedStartService()
        held = {name for name, _ in self.sockets.descriptors()}
        for text, _ in self._listeners:
            if text not in held:
                raise StartError(
                    f"llmgw: cannot listen on {text}: this kind of endpoint opens no socket that "
                    "workers could share; use workers = 1"
                )

    def startService(self) -> None:
        """Begin to serve."""
        super().startService()
        self._started_s = self.clock()
        self.listen()
        if self.store is not None:
            try:
                self.store.start()
            except OSError as error:
                raise StartError(f"llmgw: the embedded store cannot be started: {error}") from None
            self.crew.store = self.store.url
        self.crew.start()
        self.feeds.start()
        self.take_signals()
        self.warn()
        self.log.info(
            "llmgw {version} serves {listen} with {count} workers",
            version=__version__,
            listen=", ".join(self.config.listen),
            count=self.config.workers,
        )

    # --- end ----------------------------------------------------------------------

    async def finish(self) -> None:
        """Drain all workers, and kill what is left."""
        drain = self.config.drain
        self.draining = True
        self.notifier.stopping(drain.lame_duck_s + drain.finish_s + drain.abort_s + GRACE_S)
        self.crew.drain(interrupted=self._interrupted, relieved=self.relieved)
        if self.relieved:
            await stop_all([*self._listeners, *self._admin])
        lame_duck_s = 0.0 if self._interrupted else drain.lame_duck_s
        # The workers accept until then; a socket that only we hold would keep callers waiting.
        await self._until_gone(lame_duck_s)
        await stop_all(self._listeners)
        self.sockets.remove_files()
        finish_s = SIGINT_FINISH_S if self._interrupted else drain.finish_s
        await self._until_gone(finish_s + drain.abort_s + GRACE_S, patient=True)
        self.feeds.stop()
        self.crew.kill()
        await self._until_gone(GRACE_S, patient=True)
        if self.store is not None:
            await self.store.stop()
        await stop_all(self._admin)
        self.admin_sockets.remove_files()
        self.notifier.stop()

    async def _until_gone(self, most_s: float, *, patient: bool = False) -> None:
        """:param patient: hurrying does not shorten it, as the workers hurry by themselves."""
        await self.until(lambda: self.crew.gone, most_s, patient=patient)

    def hurry(self) -> None:
        """Skip the waiting of the drain that is under way, here and in the workers."""
        super().hurry()
        self.crew.hurry()

    # --- reload -------------------------------------------------------------------

    def reload(self) -> Deferred[list[str]]:
        """Read everything again, verify it here, and have all workers take it over.

        :return: fires with the keys whose change needs a restart: of the daemon, or
            (all but ``listen``, ``admin``, ``admin_token`` and ``workers``) of the workers.
        :raise ConfigError: (or PluginError; the Deferred fails with it.) Nothing was changed.
        :raise GatewayError: a worker could not take over what others did. It says which.
        """
        return self.notifier.around(Deferred.fromCoroutine(self._reload()))

    async def _reload(self) -> list[str]:
        config, setup = self._reread()
        _, self._warnings = verify(config, self.reactor)
        check_listeners_are_guarded([text for text, _ in self._listeners], config)
        fixed = [key for key in NEEDS_RESTART if getattr(config, key) != getattr(self.config, key)]
        # What is not changed now must not be taken for changed when it is compared again.
        held = {key: getattr(self.config, key) for key in fixed if key in NEEDS_NEW_PARENT}
        self.config = replace(config, **held)
        told, refused = await self.crew.reload(setup)
        if refused:
            whys = "; ".join(f"worker {number}: {why}" for number, why in sorted(refused.items()))
            raise GatewayError(
                f"verified, but not taken over by all: {whys}. POST /api/restart replaces them"
            )
        fixed = [key for key in NEEDS_RESTART if key in fixed or key in told]
        self.tell_reloaded(fixed)
        return fixed


def verify(config: Config, reactor: Any) -> tuple[str, Sequence[str]]:
    """Build a gateway of ``config`` and throw it away; it touches no network.

    :return: the program of the store that we bring, empty if the configuration
        names one; and what is worth a warning.
    :raise ConfigError: some part of it is wrong, or there is no store to be had.
    :raise PluginError: a plugin is missing or unfit.
    """
    if any(text.partition(":")[0] == "stdio" for text in (*config.listen, *config.admin)):
        raise ConfigError([ConfigFault("workers", "stdio: cannot be shared; use workers = 1")], config.source)
    ours = StoreConfig(url="unix:///nowhere")
    gateway = GatewayService(as_worker(config, ours.url or ""), reactor)
    named = gateway.store is not None and gateway.store.config != ours
    return "" if named else find_server(), gateway.warnings
