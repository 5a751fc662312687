"""The running backends: each with its member of the fleet, its pool, and its health sources.

:class:`Backends` brings the running set in line with a configured one, whether that comes from
the file, a reload, or a discovery. A backend that is removed is drained by the fleet: its
streams go on, and its pool is closed when they have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec.structs import replace
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.logger import Logger, LogLevel

from llmgw import plugins
from llmgw.certificates import BadPair, read_pair
from llmgw.config import BackendConfig, LoaderConfig, PluginConfig
from llmgw.core.fleet import BackendSpec, BreakerChange
from llmgw.core.http import HeadLimits
from llmgw.errors import ConfigError, ConfigFault
from llmgw.gateway.backend_http import Outbound
from llmgw.gateway.gateway import Upstream
from llmgw.gathering import Faults
from llmgw.health.polling import one_line
from llmgw.health.target import Target
from llmgw.plain_files import read_plain
from llmgw.values import HealthReport
from llmgw.watch import Watch
from llmgw.wire.pool import Pool, endpoint_for, tls_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmgw.config import Config
    from llmgw.core.fleet import Fleet
    from llmgw.gateway.gateway import Gateway
    from llmgw.loads import Loads
    from llmgw.wire.senders import Outbox
    from llmgw.wire.sweep import Sweep


class Backends:
    """Keeps fleet, pools and health sources in line with the configuration."""

    log = Logger()

    def __init__(
        self, fleet: Fleet, gateway: Gateway, loads: Loads, sweep: Sweep, outbox: Outbox, reactor: Any
    ) -> None:
        self.verified: Mapping[str, tuple[bytes, ...]] = {}
        """What TLS files held when they were verified (:func:`verify_backends`)."""
        self._outbox = outbox
        self._loads = loads
        self._fleet = fleet
        self._gateway = gateway
        self._sweep = sweep
        self._reactor = reactor
        self._watches: dict[str, Watch] = {}
        self._told: dict[str, str] = {}  # as logged, for each at its last change
        self._out: set[tuple[str, str]] = set()  # backend and model that were logged as taken out
        self._health: dict[str, tuple[PluginConfig, ...]] = {}
        self._running = False
        # What TLS files held when their backend was put in place.
        self._files: dict[str, tuple[bytes, ...]] = {}
        self._figures: tuple[float, ...] = ()

    def apply(self, config: Config) -> None:
        """Add, change and remove, so that exactly ``config.backends`` are served."""
        wanted = {backend.id: backend for backend in config.backends}
        upstreams = self._gateway.upstreams
        for id in [id for id in upstreams if id not in wanted]:
            self._remove(id)
        figures = _pool_figures(config)
        for backend in wanted.values():
            known = upstreams.get(backend.id)
            health = _health_of(backend, config)
            if (
                known is None
                or known.config != backend
                or self._health[backend.id] != health
                or self._files[backend.id] != self.verified.get(backend.id, ())
            ):
                self._put(backend, config, health)
            elif figures != self._figures:
                # Running requests end on the connections of the old pool.
                known.pool.close()
                known.pool = self._pool(backend, config, _tls(backend))
        self._figures = figures

    def start(self) -> None:
        """Start watching."""
        self._running = True
        self._fleet.breaker_changed = self._breaker_changed
        self._fleet.doubted = self._doubted
        for watch in self._watches.values():
            watch.start()

    def stop(self) -> None:
        """Stop watching, and close idle connections."""
        self._running = False
        for watch in self._watches.values():
            watch.stop()
        for upstream in self._gateway.upstreams.values():
            upstream.pool.close()

    def all_looked(self) -> bool:
        """Whether every backend has been checked once."""
        return all(watch.looked for watch in self._watches.values())

    def _put(self, backend: BackendConfig, config: Config, health: tuple[PluginConfig, ...]) -> None:
        id = backend.id
        old = self._gateway.upstreams.get(id)
        if old is not None:
            self._watches.pop(id).stop()
            old.pool.close()
            if _loaded_by(old.config) != _loaded_by(backend):
                self._loads.drop(id)
        tls = _tls(backend)
        self._gateway.upstreams[id] = Upstream(backend, Outbound(backend), self._pool(backend, config, tls))
        self._fleet.put(
            BackendSpec(
                id=id,
                url=backend.url,
                weight=backend.weight,
                models=backend.models,
                max_connections=backend.max_connections,
                context_length=backend.context_length,
                labels=backend.labels,
            ),
            self._sweep.clock(),
        )
        headers = {}
        if backend.api_key is not None:
            headers["authorization"] = f"Bearer {backend.api_key.reveal()}"
        sources = [plugins.build("health", table.plugin, table.options, self._reactor) for table in health]
        target = Target(self._reactor, id, backend.url, headers, tls)
        watch = Watch(sources, target, lambda report: self._reported(id, target, report), self._sweep.clock)
        self._have_loaded(backend, target, _loader_of(backend))
        self._watches[id] = watch
        self._health[id] = health
        self._files[id] = self.verified.get(id, ())
        if self._running:
            watch.start()

    def _have_loaded(
        self, backend: BackendConfig, target: Target, table: LoaderConfig | None, *, found: bool = False
    ) -> None:
        """Have the backend's models loaded by name, if there is a loader, in one go with what is known."""
        shelf = self._loads.shelves.get(backend.id)
        if table is None:
            if shelf is not None and not shelf.found:
                self._loads.drop(backend.id)
        elif shelf is None:
            loader = plugins.build("model-loader", table.plugin, table.options, target, self._reactor)
            self._loads.put(backend, loader, found=found)
        if shelf is not None:
            shelf.backend = backend
            shelf.publish()

    def _reported(self, id: str, target: Target, report: HealthReport) -> None:
        """A health check of a backend is over; it may have shown that its models are loaded by name."""
        self._tell(id, report)
        self._fleet.report(id, self._with_loaders_word(id, report), self._sweep.clock())
        backend = self._gateway.upstreams[id].config
        if backend.loader is not None or report.kind is None:
            return
        shelf = self._loads.shelves.get(id)
        if report.role == "router" and shelf is None:
            self.log.info("backend {backend}: a llama-server in router mode", backend=id)
            self._have_loaded(backend, target, LoaderConfig("llamacpp-router"), found=True)
        elif report.role != "router" and shelf is not None and shelf.found:
            self._loads.drop(id)

    def _with_loaders_word(self, id: str, report: HealthReport) -> HealthReport:
        """``report``, and why the backend's models cannot be loaded, which its log line told once."""
        shelf = self._loads.shelves.get(id)
        if shelf is None or not shelf.silent or not report.alive or report.loading:
            return report
        joined = f"{report.detail}, and" if report.detail.startswith("ok, but ") else "ok, but"
        return replace(report, detail=one_line(f"{joined} {shelf.silent}"))

    def _tell(self, id: str, report: HealthReport) -> None:
        """Log a report that differs from the one before."""
        if not report.alive:
            what, level = f"fails its health checks: {report.detail}", LogLevel.warn
            kind = "refused" if report.refused else "silent"
        elif report.loading:
            kind = what = "is loading its model"
            level = LogLevel.info
        elif report.detail.startswith("ok, but "):
            kind = what = f"answers, {report.detail.removeprefix('ok, ')}"
            level = LogLevel.warn
        else:
            kind = what = "is well"
            level = LogLevel.info
        if self._told.get(id) != kind:
            self._told[id] = kind
            self.log.emit(level, "backend {backend}: {what}", backend=id, what=what)

    def _doubted(self, id: str) -> None:
        """A request has learnt something that no health check has reported."""
        watch = self._watches.get(id)
        if watch is not None:
            watch.look_soon()

    def _breaker_changed(self, change: BreakerChange) -> None:
        """Log it, but not each failed trial until the backend is back."""
        place = (change.backend_id, change.model)
        model = f" for {change.model!r}" if change.model else ""
        if not change.reason:
            self._out.discard(place)
            self.log.info(
                "backend {backend}: its trials{model} went well; it is warmed up",
                backend=change.backend_id,
                model=model,
            )
        elif place not in self._out:
            self._out.add(place)
            self.log.warn(
                "backend {backend}: taken out{model}, as its requests fail"
                " ({streak} in a row, the last one: {reason}); tried again in {again} s",
                backend=change.backend_id,
                model=model,
                streak=change.streak,
                reason=change.reason,
                again=max(1, round(change.again_s)),
            )

    def _remove(self, id: str) -> None:
        self._watches.pop(id).stop()
        self._told.pop(id, None)
        self._out = {place for place in self._out if place[0] != id}
        self._loads.drop(id)
        del self._health[id], self._files[id]
        self._fleet.remove(id, self._sweep.clock())
        self._gateway.upstreams.pop(id).pool.close()
        self.log.info("backend {backend}: removed; requests at work there run on", backend=id)

    def _pool(self, backend: BackendConfig, config: Config, tls: Any) -> Pool:
        parts = urlsplit(backend.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        timeouts = config.timeouts
        host = parts.hostname or ""
        return Pool(
            lambda: endpoint_for(
                self._reactor, parts.scheme, host, port, connect_s=timeouts.connect_s, tls=tls
            ),
            reactor=self._reactor,
            tls=tls is not None,
            sweep=self._sweep,
            outbox=self._outbox,
            head_limits=HeadLimits(
                header_line=config.limits.upstream_head_bytes,
                headers=config.limits.upstream_head_bytes,
            ),
            connect_s=timeouts.connect_s,
            idle_s=timeouts.upstream_idle_s,
            close_grace_s=timeouts.close_grace_s,
            named=not (isIPAddress(host) or isIPv6Address(host)),
        )


def _pool_figures(config: Config) -> tuple[float, ...]:
    """All that :meth:`Backends._pool` takes from outside the backend's own table."""
    timeouts = config.timeouts
    return (
        timeouts.connect_s,
        timeouts.upstream_idle_s,
        timeouts.close_grace_s,
        config.limits.upstream_head_bytes,
    )


def verify_backends(config: Config, reactor: Any) -> dict[str, tuple[bytes, ...]]:
    """Build everything of backends once and throw it away.

    :return: what the TLS files of each hold, by its id.
    :raise ConfigError: TLS files, health plugins or loaders of some are wrong; every fault.
    :raise PluginError: the only fault: one of these plugins is not there.
    """
    faults = Faults(config.source)
    verified = {}
    for index, backend in enumerate(config.backends):
        verified[backend.id] = faults.of(_verify_tls, backend, f"backends[{index}].tls")
    for index, found in enumerate(config.discovery):
        trust = found.defaults.get("tls")
        if trust:
            served = BackendConfig(id="", url="https://localhost", tls=trust)
            faults.of(_verify_tls, served, f"discovery[{index}].defaults.tls")
    for index, table in enumerate(config.health):
        faults.of(plugins.build, "health", table.plugin, table.options, reactor, where=f"health[{index}]")
    for index, backend in enumerate(config.backends):
        if backend.health is not None:
            where = f"backends[{index}].health"
            faults.of(plugins.build, "health", backend.health, {}, reactor, where=where)
        loader = _loader_of(backend)
        if loader is not None:
            target = Target(reactor, backend.id, backend.url, {})
            where = f"backends[{index}].loader"
            faults.of(
                plugins.build, "model-loader", loader.plugin, loader.options, target, reactor, where=where
            )
    faults.tell()
    return verified


def _verify_tls(backend: BackendConfig, where: str) -> tuple[bytes, ...]:
    try:
        _tls(backend)
        return _tls_files(backend)
    except (BadPair, OSError, ValueError) as error:
        raise ConfigError([ConfigFault(where, str(error))]) from None


def _tls(backend: BackendConfig) -> Any:
    parts = urlsplit(backend.url)
    if parts.scheme != "https":
        return None
    tls = backend.tls
    own = read_pair(tls.cert_file, tls.key_file or tls.cert_file) if tls.cert_file else None
    return tls_options(parts.hostname or "", tls.ca_file, tls.verify, own)


def _tls_files(backend: BackendConfig) -> tuple[bytes, ...]:
    """What its TLS files hold now: those of a listed backend are read again by a reload."""
    tls = backend.tls
    return tuple(read_plain(path) for path in (tls.ca_file, tls.cert_file, tls.key_file) if path)


def _loader_of(backend: BackendConfig) -> LoaderConfig | None:
    """The loader in its configuration."""
    if backend.loader is None:
        return LoaderConfig("ollama") if backend.kind == "ollama" else None
    return None if backend.loader.plugin == "none" else backend.loader


def _loaded_by(backend: BackendConfig) -> tuple[Any, ...]:
    """What a running loader was made from."""
    return (backend.url, backend.api_key, backend.tls, backend.loader, backend.kind)


def _health_of(backend: BackendConfig, config: Config) -> tuple[PluginConfig, ...]:
    """The health tables for one backend: the plugin it names, with the options of
    the table of that name if there is one, or else all tables."""
    if backend.health is None:
        return config.health
    named = tuple(table for table in config.health if table.plugin == backend.health)
    if named:
        return named
    return (PluginConfig(backend.health),)
