"""Backends that are found while running: from what discoveries tell to what is served.

:class:`Discoveries` puts the sets of all sources (`llmgw.discovered`) behind the
file's backends and lets :class:`~llmgw.backends.Backends` serve the whole.

Who wins where two claim one id or one URL: the file, then discoveries in the
order of their tables, what is present before what is merely held. The other one
is ignored and told, in the log once and in ``/api/state``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from twisted.internet.defer import Deferred, DeferredList
from twisted.logger import Logger

from llmgw.discovered import Refusal, Source
from llmgw.gateway.first_word import FirstWord

if TYPE_CHECKING:
    from llmgw.backends import Backends
    from llmgw.config import BackendConfig, Config, DiscoveryConfig
    from llmgw.gateway.gateway import Gateway

CONFIGURED = "config"
"""The source of backends that the file or the command line names."""
TOGETHER_S = 0.02
"""What is told in so short a time is taken over in one go."""
MOST_TOLD = 100
"""Refusals of one source that are shown."""


class Discoveries:
    """All ``[[discovery]]`` tables, and the one set that comes of them and the file.

    :param backends: serves the set.
    :param gateway: is told while nothing is known yet of what a source has.
    """

    log = Logger()

    def __init__(self, backends: Backends, gateway: Gateway, reactor: Any) -> None:
        self._backends = backends
        self._gateway = gateway
        self._reactor = reactor
        self._sources: list[Source] = []
        self._config: Config | None = None
        self._owners: dict[str, str] = {}
        self._running = False
        self._due: Any = None

    def apply(self, config: Config) -> None:
        """Serve ``config.backends`` and what is found; discoveries whose table is as
        it was go on undisturbed, the set of one whose table changed stays until it tells another."""
        old, self._sources = self._sources, []
        left = list(old)
        for name, table in zip(_names(config.discovery), config.discovery, strict=True):
            source = next((each for each in left if each.table == table), None)
            if source is None:
                source = Source(table, self._reactor, self._soon)
            else:
                left.remove(source)
            source.name, source.config = name, config
            self._sources.append(source)
        replaced = list(left)
        for source in self._sources:
            if source in old:
                source.judge_again()
            else:
                self._inherit(source, replaced)
                if self._running:
                    source.start()
        for source in left:
            self._stop(source)
        self._config = config
        self._merge()

    def start(self) -> None:
        """Begin to ask."""
        self._running = True
        for source in self._sources:
            source.start()
        self._await()

    def stop(self) -> Deferred[Any]:
        """Fires when every discovery has ended; the set stays as it is."""
        self._running = False
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._await()
        return DeferredList([source.stop() for source in self._sources], consumeErrors=True)

    def source_of(self, id: str) -> str:
        """Where a backend comes from: :data:`CONFIGURED`, or a discovery's name; ``""`` if it is gone."""
        return self._owners.get(id, "")

    def state(self) -> list[dict[str, Any]]:
        """Each discovery in plain values, of which none changes by time alone."""
        return [
            {
                "name": source.name,
                "plugin": source.table.plugin,
                "connected": source.connected,
                "told": source.told,
                "from_state_file": source.remembered,
                "error": source.error,
                "backends": len(source.hold.present),
                "held": sorted(source.hold.held),
                "refused": _shown(source.refused),
                "clashes": _shown(source.clashes),
            }
            for source in self._sources
        ]

    def contact_ages_s(self) -> dict[str, float]:
        """Seconds since each source's last answer, by name; of those that ever answered."""
        now_s = self._reactor.seconds()
        return {
            source.name: max(0.0, now_s - source.contact_s)
            for source in self._sources
            if source.contact_s is not None
        }

    # --- inside ---

    def _inherit(self, source: Source, replaced: list[Source]) -> None:
        """What the table told that this one takes the place of: the next of that plugin."""
        before = next((each for each in replaced if each.table.plugin == source.table.plugin), None)
        if before is not None:
            replaced.remove(before)
            source.inherit(before)

    def _stop(self, source: Source) -> None:
        source.stop().addErrback(
            lambda failure: self.log.failure("stopping discovery {name}", failure, name=source.name)
        )

    def _soon(self) -> None:
        """Something changed: take it over with whatever else changes now."""
        if not self._running:
            return
        if self._due is not None:
            if self._due.getTime() - self._reactor.seconds() <= TOGETHER_S:
                return
            self._due.cancel()
        self._due = self._reactor.callLater(TOGETHER_S, self._expired)

    def _expired(self) -> None:
        self._due = None
        try:
            self._merge()
        except Exception:
            # Of one plugin's making perhaps; the next change is not to be lost for it.
            self.log.failure("serving what was found")

    def _merge(self) -> None:
        config = self._config
        assert config is not None
        now_s = self._reactor.seconds()
        for source in self._sources:
            source.hold.expire(now_s)
        chosen = self._settle(config.backends)
        due = [at_s for source in self._sources if (at_s := source.hold.next_s()) is not None]
        if due and self._running and self._due is None:
            self._due = self._reactor.callLater(max(TOGETHER_S, min(due) - now_s), self._expired)
        self._backends.apply(replace(config, backends=(*config.backends, *chosen)))
        self._await()

    def _await(self) -> None:
        """Let requests for unknown models wait while a source has not told anything yet."""
        gateway = self._gateway
        awaited = self._running and any(source.awaited for source in self._sources)
        if awaited and gateway.first_word is None:
            gateway.first_word = FirstWord(self._reactor, gateway.dice)
        elif not awaited and gateway.first_word is not None:
            word, gateway.first_word = gateway.first_word, None
            word.said()

    def _settle(self, configured: Sequence[BackendConfig]) -> list[BackendConfig]:
        """The found backends that are served."""
        owners = {backend.id: CONFIGURED for backend in configured}
        urls = {backend.url: backend.id for backend in configured}
        chosen: list[BackendConfig] = []
        clashes: dict[str, list[Refusal]] = {source.name: [] for source in self._sources}
        for held in (False, True):
            for source in self._sources:
                for backend in list((source.hold.held if held else source.hold.present).values()):
                    why = ""
                    if backend.id in owners:
                        why = f"id: is already that of a backend from {owners[backend.id]}"
                    elif backend.url in urls:
                        why = f"url: {backend.url} is already that of {urls[backend.url]}"
                    if not why:
                        owners[backend.id] = source.name
                        urls[backend.url] = backend.id
                        chosen.append(backend)
                    elif held:
                        source.hold.drop(backend.id)
                    else:
                        clashes[source.name].append(Refusal(backend.id, why))
        for source in self._sources:
            self._tell(source, tuple(clashes[source.name]))
        self._owners = owners
        return chosen

    def _tell(self, source: Source, clashes: tuple[Refusal, ...]) -> None:
        for clash in clashes:
            if clash not in source.clashes:
                self.log.warn(
                    "discovery {discovery}: {backend} ignored: {why}",
                    discovery=source.name,
                    backend=clash.key,
                    why=clash.why,
                )
        source.clashes = clashes


def _names(tables: Sequence[DiscoveryConfig]) -> list[str]:
    """The plugin's name; with a number for the second of a kind and so on."""
    names: list[str] = []
    for table in tables:
        seen = sum(1 for name in names if name.rpartition("-")[0] == table.plugin or name == table.plugin)
        names.append(f"{table.plugin}-{seen + 1}" if seen else table.plugin)
    return names


def _shown(refusals: Sequence[Refusal]) -> list[dict[str, str]]:
    return [{"key": each.key, "why": each.why} for each in refusals[:MOST_TOLD]]
