"""One ``[[discovery]]`` table at work: the plugin that tells, and what is made of its word.

Each entry is judged as a ``[[backends]]`` table and by where it may be; what is
good goes into the set, which holds for a while what vanishes (`llmgw.core.hold_down`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from twisted.internet.defer import Deferred, maybeDeferred, succeed
from twisted.logger import Logger

from llmgw import plugins
from llmgw.config import BackendConfig, is_local_url, parse_backend, port_of
from llmgw.core.allowed import AllowList
from llmgw.core.hold_down import HoldDown, HoldRules
from llmgw.errors import PLUGIN_FAULTS, ConfigError, PluginError
from llmgw.finite import is_finite_number
from llmgw.foreign import at_most
from llmgw.plain_files import read_plain
from llmgw.plain_text import plain
from llmgw.wire.pool import tls_options

if TYPE_CHECKING:
    from llmgw.config import Config, DiscoveryConfig

STOP_S = 2.0


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


class Source:
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
        self._judged: dict[str, tuple[Mapping[str, Any], BackendConfig]] = {}

    @property
    def awaited(self) -> bool:
        """Nothing is known by it yet, not even from a run before."""
        return not (self.told or self.hold.present or self._fault)

    @property
    def contact_s(self) -> float | None:
        """When the source answered last, by the reactor's clock."""
        found = getattr(self._plugin, "contact_s", None)
        return found if is_finite_number(found) else None

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
        return at_most(STOP_S, maybeDeferred(stopping.stop), self._reactor)

    def judge_again(self) -> None:
        """Other rules hold now: what was told last is taken in anew."""
        self._judged = {}
        if self._entries is not None:
            self._take(self._entries)

    def inherit(self, before: Source) -> None:
        """Take in what another table told last, by the rules of this one."""
        if before._entries is not None:
            self._take(before._entries)

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
        """Good entries into the set, bad ones aside; one that was good keeps that form."""
        good: dict[str, BackendConfig] = {}
        judged: dict[str, tuple[Mapping[str, Any], BackendConfig]] = {}
        refused: list[Refusal] = []
        for index, entry in enumerate(entries):
            key, table = _without_key(entry, index)
            known = self._judged.get(key)
            try:
                if known is not None and known[0] == table:
                    backend = known[1]
                else:
                    backend = self._backend(table)
                if backend.id in good:
                    raise ValueError(f"id {backend.id!r} is already that of another entry")
                good[backend.id] = backend
                judged[key] = (table, backend)
            except (ConfigError, PluginError, OSError, ValueError) as error:
                why = " ".join(str(error).split())
                if known is not None and known[1].id not in good:
                    good[known[1].id], judged[key] = known[1], known
                    why += "; its last good form stays"
                refused.append(Refusal(key, why))
        self._judged = judged
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
        if "fault" in table:
            raise ValueError(str(table["fault"]))
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
            saved = msgspec.json.decode(read_plain(path), type=_Saved)
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
    return plain(str(key), 200), table
