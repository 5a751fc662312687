"""What an operator may ask and do: the admin listener's view of a running service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict
from twisted.internet.defer import fail

from llmgw import __version__
from llmgw.admin.metrics import BackendTraffic
from llmgw.errors import GatewayError
from llmgw.gateway.explain import explain

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

    from llmgw.admin.metrics import Table
    from llmgw.admin.openmetrics import Exemplar
    from llmgw.service import GatewayService

NO_TRAFFIC = BackendTraffic()
STORE_UP = "1 while the shared store answers."
PEERS = "Other gateways and workers that share the store, by what was heard of them."
EXPIRES = "When the first certificate of a llmtls: listener runs out, Unix time."
FIRST_LOOK_S = 3.0
"""How long a start may wait for every backend's first look before it counts as ready."""


class Operations:
    """Reads the service and passes the few levers on; see ``admin.site.Operations``."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._told: dict[str, int] = {}

    def readiness(self) -> tuple[bool, str]:
        """Whether requests can be taken, and why not."""
        service = self._service
        if service.draining:
            return False, "draining"
        if not service.running:
            return False, "starting"
        if not service.gateway.upstreams:
            return False, "no backends"
        if not service.backends.all_looked() and service.uptime_s < FIRST_LOOK_S:
            return False, "backends have not been looked at yet"
        return True, ""

    def state(self) -> Mapping[str, Any]:
        """The whole picture as plain values, without secrets."""
        service = self._service
        gateway, site = service.gateway, service.site
        traffic = service.metrics.traffic()
        return {
            "version": __version__,
            "at": gateway.wall_clock(),
            "uptime_s": service.uptime_s,
            "draining": service.draining,
            "router": service.config.router.plugin,
            "in_flight": gateway.in_flight,
            "waiting": len(gateway.waiting) - len(gateway.holding),
            "holding": {model: gateway.holding.count(model) for model in gateway.holding.models()},
            "loading": service.loads.state(),
            "connections": len(site.connections),
            "overload": service.pressure.state(),
            "held_bytes": site.held_bytes,
            "refusals": dict(site.refusals),
            "models": {name: list(ids) for name, ids in gateway.fleet.models().items()},
            "aliases": {name: rule.target for name, rule in gateway.aliases.items()},
            "in_flight_by_key": dict(gateway.per_key),
            "store": self._store(),
            "peers": None if service.peers is None else service.peers.state(),
            "limits": [asdict(policy) for policy in gateway.policies],
            "discovery": service.discoveries.state(),
            "contact_age_s": service.discoveries.contact_ages_s(),
            "limits_used": self.limits_used(),
            "key_names": self.key_names(),
            "requests": traffic.requests,
            "errors": traffic.errors,
            "rejected": traffic.rejected,
            "retries": traffic.retries,
            "client_aborts": traffic.client_aborts,
            "output_tokens": traffic.output_tokens,
            "backends": [
                {**member, "requests": own.requests, "errors": own.errors}
                for member in self.fleet()
                for own in (traffic.backends.get(member["id"], NO_TRAFFIC),)
            ],
        }

    def news(self) -> dict[str, Sequence[Any]]:
        """What each feed has new since this was last asked; for the one parent of a worker."""
        found: dict[str, Sequence[Any]] = {}
        for feed in self._service.feeds:
            found[feed.name] = feed.since(self._told.get(feed.name, 0))
            self._told[feed.name] = feed.total
        return found

    def limits_used(self) -> list[dict[str, Any]]:
        """What callers of the last requests have left, where the limiter can tell."""
        gateway = self._service.gateway
        usage = getattr(gateway.limiter, "usage", None)
        if usage is None:
            return []
        keys = sorted(self._keys_of_late())
        names = [policy.name for policy in gateway.policies] + [f"keys.{key}" for key in keys]
        used: list[dict[str, Any]] = usage(keys, names)
        return used

    def key_names(self) -> dict[str, str]:
        """Names of the keys that came lately, where a checker knows them."""
        known: dict[str, str] = {}
        for checker in self._service.gateway.callers.checkers:
            known.update(getattr(checker, "names", {}))
        return {key: known[key] for key in self._keys_of_late() if key in known}

    def load(self) -> Mapping[str, float]:
        """What the history keeps with each sample."""
        gateway = self._service.gateway
        return {"in_flight": gateway.in_flight, "waiting": len(gateway.waiting)}

    def _keys_of_late(self) -> set[str]:
        gateway = self._service.gateway
        return gateway.recent.keys() | set(gateway.per_key)

    def _store(self) -> Mapping[str, Any] | None:
        store = self._service.store
        if store is None:
            return None
        return {"place": store.place, "up": store.up, "why": store.why, "losses": store.losses}

    def fleet(self) -> list[dict[str, Any]]:
        """Every backend: what the fleet knows, its pool, and the router's last score."""
        gateway = self._service.gateway
        picture = gateway.fleet.snapshot(gateway.clock())
        for member in picture:
            upstream = gateway.upstreams.get(member["id"])
            if upstream is not None:
                member["idle_connections"] = len(upstream.pool.idle)
                member["connects"] = upstream.pool.connects
            member["score"] = gateway.scores.get(member["id"])
            member["source"] = self._service.discoveries.source_of(member["id"])
        return picture

    def gauges(self) -> Mapping[str, tuple[str, float]]:
        """Figures of the process for a scrape: help text and value by name."""
        service = self._service
        gateway, site = service.gateway, service.site
        store = service.store
        dropped = gateway.access_log.dropped if gateway.access_log is not None else 0
        expires = service.certificate_expires
        certificates = {} if expires is None else {"llmgw_certificate_expires_seconds": (EXPIRES, expires)}
        limiter = gateway.limiter_gauges()
        return certificates | {
            "llmgw_limiter_degraded": ("1 while limits are decided without the store.", 0.0),
            **limiter,
            "llmgw_connections": ("Client connections.", len(site.connections)),
            "llmgw_requests_in_flight": ("Requests at work.", gateway.in_flight),
            "llmgw_waiting": (
                "Requests that wait for a slot.",
                len(gateway.waiting) - len(gateway.holding),
            ),
            "llmgw_held_request_bytes": (
                "Bodies of requests that are held for their model.",
                gateway.holding.held_bytes,
            ),
            "llmgw_held_body_bytes": ("Request bodies in memory.", site.held_bytes),
            "llmgw_overload_level": (
                "0 calm, 1 shedding, 2 refusing, 3 closed, 4 cutting.",
                float(service.pressure.level),
            ),
            "llmgw_memory_share": (
                "Share of the memory limit in use, 0 to 1.",
                service.pressure.memory or 0.0,
            ),
            "llmgw_draining": ("1 while draining.", float(service.draining)),
            "llmgw_limiter_passed": (
                "Requests that passed without limits, as the limiter gave no answer.",
                gateway.limiter_degraded,
            ),
            "llmgw_limiter_faults": (
                "Times the rate limiter failed otherwise, as in settling.",
                gateway.limiter_faults,
            ),
            "llmgw_router_faults": ("Choices made without the failed router.", gateway.router_faults),
            "llmgw_panic_choices": (
                "Choices for which ejections were ignored, as under half of a pool was left.",
                gateway.fleet.panics,
            ),
            "llmgw_filter_faults": ("Times a request filter failed.", gateway.filters.faults),
            "llmgw_access_log_dropped": ("Access lines lost to write errors.", dropped),
            **({} if store is None else {"llmgw_store_up": (STORE_UP, float(store.up))}),
            **({} if service.peers is None else {"llmgw_peers": (PEERS, float(service.peers.others))}),
        }

    def refusal_tables(self) -> Iterable[Table]:
        """What was turned away before there was a request, for a scrape."""
        refusals = self._service.site.refusals
        yield (
            "llmgw_refused",
            "Connections and malformed requests turned away since the start.",
            [((("reason", reason),), float(count)) for reason, count in refusals.items()],
        )

    def discovery_tables(self) -> Iterable[Table]:
        """Labelled figures of what finds backends, for a scrape."""
        discoveries = self._service.discoveries.state()
        ages_s = self._service.discoveries.contact_ages_s()
        for name, text, value in (
            ("up", "1 while the discovery is in touch with its source.", lambda each: each["connected"]),
            ("backends", "Backends the source tells of.", lambda each: each["backends"]),
            ("held", "Backends that vanished from it and are kept for now.", lambda each: len(each["held"])),
            (
                "refused",
                "Entries that are not served.",
                lambda each: len(each["refused"]) + len(each["clashes"]),
            ),
            ("contact_age_seconds", "Since the source's last answer.", lambda each: ages_s.get(each["name"])),
        ):
            rows = [((("discovery", each["name"]),), value(each)) for each in discoveries]
            yield f"llmgw_discovery_{name}", text, [(labels, row) for labels, row in rows if row is not None]
        yield (
            "llmgw_backend_source",
            "Always 1: where the backend comes from.",
            [((("backend", each["id"]), ("source", each["source"])), 1) for each in self.fleet()],
        )

    def model_tables(self) -> Iterable[Table]:
        """Labelled figures of models that come and go, for a scrape."""
        service = self._service
        holding = service.gateway.holding
        yield (
            "llmgw_holding",
            "Requests that are held for their model now.",
            [((("model", model),), holding.count(model)) for model in holding.models()],
        )
        found = [
            ((("backend", shelf.id), ("model", model)), state)
            for shelf in service.loads.shelves.values()
            for model, state in shelf.states.items()
        ]
        for name, text, wanted in (
            ("loaded", "1 while the backend has the model in memory.", "loaded"),
            ("loading", "1 while the backend loads the model.", "loading"),
            ("failed", "1 while the last load there has failed.", "failed"),
        ):
            yield f"llmgw_model_{name}", text, [(labels, float(state == wanted)) for labels, state in found]

    def load_model(self, name: str, on: bool) -> Mapping[str, Any] | None:
        """Have a model loaded, or unloaded wherever it is.

        :return: ``None``: there is no loader that has it.
        :raise GatewayError: it cannot be had now, and why.
        """
        service = self._service
        rule = service.gateway.aliases.get(name)
        model = name if rule is None else rule.target or name
        loads = service.loads
        if not loads.can_load(model):
            return None
        if not on:
            return {"model": model, "unloading": loads.unload(model)}
        loads.load(model)
        under_way = loads.is_under_way(model)
        return {
            "model": model,
            "status": "loading" if under_way else "loaded",
            "expected_s": loads.expected_s(model) if under_way else 0.0,
        }

    def knows(self, model: str) -> bool:
        """A name that may be a metric's label: some backend has told it."""
        return self._service.gateway.fleet.knows(model)

    def metrics_text(self) -> bytes:
        """Prometheus' text format."""
        return self._service.metrics.render()

    def openmetrics(self) -> bytes | None:
        """The same as OpenMetrics, where there are exemplars."""
        service = self._service
        return service.metrics.render_openmetrics() if service.gateway.exemplars else None

    def exemplars(self) -> dict[str, Exemplar]:
        """See :meth:`llmgw.admin.metrics.Metrics.exemplars`; for the one parent of a worker."""
        return self._service.metrics.exemplars()

    def explain(self, body: bytes) -> Mapping[str, Any]:
        """Candidates, scores, reasons and choice; nothing is sent.

        :raise GatewayError: what the request would be answered with.
        """
        return explain(body, self._service.gateway)

    def drain_backend(self, id: str, on: bool) -> bool:
        """Send no new requests to a backend, or send them again."""
        fleet = self._service.gateway.fleet
        try:
            (fleet.drain if on else fleet.undrain)(id)
        except KeyError:
            return False
        return True

    def reload(self) -> Deferred[list[str]]:
        """See :meth:`llmgw.service.GatewayService.reload`."""
        return self._service.reload()

    def restart(self) -> Deferred[list[int]]:
        """There are no workers to restart."""
        return fail(GatewayError("workers = 1: there are no workers to restart", status=409, code="conflict"))

    def drain(self) -> None:
        """Begin to drain the whole gateway, as SIGTERM does."""
        self._service.begin_drain()
