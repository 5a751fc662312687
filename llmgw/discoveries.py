"""Backends that are found while running: from what discoveries tell to what is served.

Each ``[[discovery]]`` table is a :class:`_Source`: the plugin that tells, the
guard over what it tells, and its set with what is held (`llmgw.core.hold_down`).
:class:`Discoveries` puts them behind the file's backends and lets
:class:`~llmgw.backends.Backends` serve the whole.

Who wins where two claim one id or one URL: the file, then discoveries in the
order of their tables, what is present before what is merely held. The other one
is ignored and told, in the log once and in ``/api/state``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from twisted.internet.defer import Deferred, DeferredList, maybeDeferred, succeed
from twisted.logger import Logger

from llmgw import plugins
from llmgw.config import BackendConfig, is_local_url, parse_backend, port_of
from llmgw.core.allowed import AllowList
from llmgw.core.hold_down import HoldDown, HoldRules
from llmgw.errors import PLUGIN_FAULTS, ConfigError, PluginError
from llmgw.wire.pool import tls_options

if TYPE_CHECKING:
    from llmgw.backends import Backends
    from llmgw.config import Config, DiscoveryConfig

CONFIGURED = "config"
"""The source of backends that the file or the command line names."""
TOGETHER_S = 0.02
"""What is told in so short a time is taken over in one go."""
STOP_S = 2.0
MOST_TOLD = 100
"""Refusals of one source that are shown."""


class Refusal(Struct, frozen=True):
    """An entry that is not served.

    :param key: the source's own name for it, such as an etcd key.
    """

    key: str
    why: str


class _Saved(Struct):
    """What a state file holds."""

    plugin: str
    entries: list[dict[str, Any]]


class _Source:
    """One ``[[discovery]]`` table at work.

    :ivar name: in state, metrics and logs.
    :ivar hold: its backends.
    :ivar refused: entries that are wrong, by the last update.
    :ivar clashes: entries that another source or entry has taken the place of.
    :ivar told: it has told a set since it began.
    """

    log = Logger()

    def __init__(self, table: DiscoveryConfig, reactor: Any, changed: Callable[[], None]) -> None:
        self.name = table.plugin
        self.table = table
        self.hold: HoldDown[BackendConfig] = HoldDown(HoldRules(table.hold_down_s, mass_s=table.mass_hold_s))
        self.refused: tuple[Refusal, ...] = ()
        self.clashes: tuple[Refusal, ...] = ()
        self.told = False
        self.remembered = False
        self.config: Config | None = None
        self._allowed = AllowList(table.allow)
        self._reactor = reactor
        self._changed = changed
        self._plugin: Any = None
        self._fault = ""
        self._entries: Sequence[Mapping[str, Any]] | None = None

    @property
    def contact_s(self) -> float | None:
        """When the source answered last, by the reactor's clock."""
        found: float | None = getattr(self._plugin, "contact_s", None)
        return found

    @property
    def error(self) -> str:
        """Why it does not answer now."""
        return self._fault or str(getattr(self._plugin, "error", ""))

    @property
    def connected(self) -> bool:
        """It is in touch with what it watches, as far as it says."""
        return bool(getattr(self._plugin, "connected", self.told)) and not self._fault

    def start(self) -> None:
        """Remember, then begin to ask."""
        self._recall()
        options = self.table.options
        try:
            self._plugin = plugins.build("discovery", self.table.plugin, options, self._reactor)
            self._plugin.start(self._update)
        except PLUGIN_FAULTS as fault:
            # Whatever a plugin does, the backends that are known go on.
            self._fault = f"did not start: {fault}"
            self.log.failure("discovery {discovery}: did not start", discovery=self.name)

    def stop(self) -> Deferred[Any]:
        """No update after this."""
        stopping, self._plugin = self._plugin, None
        if stopping is None:
            return succeed(None)
        # Nobody's plugin keeps the gateway from ending.
        return maybeDeferred(stopping.stop).addTimeout(STOP_S, self._reactor)

    def judge_again(self) -> None:
        """Other rules hold now: what was told last is taken in anew."""
        if self._entries is not None:
            self._take(self._entries)

    def _update(self, entries: Sequence[Mapping[str, Any]]) -> None:
        if self._plugin is None:
            return  # stopped, and does not keep to it
        try:
            self._take(list(entries))
            self.told, self.remembered = True, False
            self._save()
        except PLUGIN_FAULTS:
            self.log.failure("discovery {discovery}: taking in an update", discovery=self.name)
            return
        self._changed()

    def _take(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Good entries into the set, bad ones aside."""
        good: dict[str, BackendConfig] = {}
        refused: list[Refusal] = []
        for index, entry in enumerate(entries):
            key, table = _without_key(entry, index)
            try:
                if "fault" in table:
                    raise ValueError(str(table["fault"]))
                backend = self._backend(table)
                if backend.id in good:
                    raise ValueError(f"id {backend.id!r} is already that of another entry")
                good[backend.id] = backend
            except (ConfigError, PluginError, OSError, ValueError) as error:
                refused.append(Refusal(key, " ".join(str(error).split())))
        for each in refused:
            if each not in self.refused:
                self.log.warn(
                    "discovery {discovery}: {key} ignored: {why}",
                    discovery=self.name,
                    key=each.key,
                    why=each.why,
                )
        self._entries = entries
        self.refused = tuple(refused)
        before = self.hold.in_mass
        self.hold.update(good, self._reactor.seconds())
        if self.hold.in_mass and not before:
            self.log.warn(
                "discovery {discovery}: {gone} of {all} vanished at a time; kept for {seconds:g} s",
                discovery=self.name,
                gone=len(self.hold.held),
                all=len(self.hold.held) + len(self.hold.present),
                seconds=self.table.mass_hold_s,
            )

    def _backend(self, table: Mapping[str, Any]) -> BackendConfig:
        """:raise ConfigError: (PluginError, ValueError) it cannot be served."""
        backend = parse_backend(table, defaults=self.table.defaults)
        parts = urlsplit(backend.url)
        host = parts.hostname or ""
        if not self._allowed.permits(host):
            raise ValueError(f"url: {host} is not in `allow` of this discovery")
        if parts.scheme == "https":
            tls_options(host, backend.tls.ca_file, backend.tls.verify)
        config = self.config
        if config is None:
            return backend
        if is_local_url(backend.url) and parts.port in map(port_of, (*config.listen, *config.admin)):
            raise ValueError("url: is this gateway's own listener")
        if backend.health is not None and all(each.plugin != backend.health for each in config.health):
            plugins.build("health", backend.health, {}, self._reactor, where="health")
        return backend

    # --- across restarts ---

    def _recall(self) -> None:
        """The last set of the run before, until the source tells another."""
        path = self.table.state_file
        if path is None or self.hold.present:
            return
        try:
            with open(path, "rb") as file:
                saved = msgspec.json.decode(file.read(), type=_Saved)
            if saved.plugin != self.table.plugin:
                return
            self._take(saved.entries)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            self.log.warn(
                "discovery {discovery}: cannot use {path}: {why}",
                discovery=self.name,
                path=path,
                why=str(error),
            )
            return
        self.remembered = bool(self.hold.present)
        self._changed()

    def _save(self) -> None:
        path = self.table.state_file
        if path is None or self._entries is None:
            return
        raw = msgspec.json.encode(_Saved(self.table.plugin, [dict(entry) for entry in self._entries]))
        new = f"{path}.{os.getpid()}.new"  # of several workers each writes its own
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(raw)
            os.replace(new, path)
        except OSError as error:
            self.log.warn(
                "discovery {discovery}: cannot write {path}: {why}",
                discovery=self.name,
                path=path,
                why=error.strerror,
            )


def _without_key(entry: Mapping[str, Any], index: int) -> tuple[str, dict[str, Any]]:
    """The entry's name for people, and the entry without it."""
    table = dict(entry)
    key = table.pop("key", None) or table.get("id") or f"entry {index}"
    return str(key)[:200], table


class Discoveries:
    """All ``[[discovery]]`` tables, and the one set that comes of them and the file.

    :param backends: serves the set.
    """

    log = Logger()

    def __init__(self, backends: Backends, reactor: Any) -> None:
        self._backends = backends
        self._reactor = reactor
        self._sources: list[_Source] = []
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
                source = _Source(table, self._reactor, self._soon)
            else:
                left.remove(source)
            source.name, source.config = name, config
            self._sources.append(source)
        for source in self._sources:
            if source in old:
                source.judge_again()
            else:
                self._inherit(source, left)
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

    def stop(self) -> Deferred[Any]:
        """Fires when every discovery has ended; the set stays as it is."""
        self._running = False
        if self._due is not None:
            self._due.cancel()
            self._due = None
        return DeferredList([source.stop() for source in self._sources], consumeErrors=True)

    def source_of(self, id: str) -> str:
        """Where a backend comes from: :data:`CONFIGURED`, or a discovery's name; ``""`` if it is gone."""
        return self._owners.get(id, "")

    def state(self) -> list[dict[str, Any]]:
        """Each discovery in plain values."""
        now_s = self._reactor.seconds()
        return [
            {
                "name": source.name,
                "plugin": source.table.plugin,
                "connected": source.connected,
                "told": source.told,
                "from_state_file": source.remembered,
                "contact_age_s": None if source.contact_s is None else max(0.0, now_s - source.contact_s),
                "error": source.error,
                "backends": len(source.hold.present),
                "held": sorted(source.hold.held),
                "refused": _shown(source.refused),
                "clashes": _shown(source.clashes),
            }
            for source in self._sources
        ]

    # --- inside ---

    def _inherit(self, source: _Source, left: Iterable[_Source]) -> None:
        """The set of the table that this one replaces: same plugin, not kept itself."""
        for before in left:
            if before.table.plugin == source.table.plugin and not source.hold.present:
                source.hold.update({**before.hold.held, **before.hold.present}, self._reactor.seconds())

    def _stop(self, source: _Source) -> None:
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

    def _tell(self, source: _Source, clashes: tuple[Refusal, ...]) -> None:
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
