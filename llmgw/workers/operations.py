"""What an operator may ask and do where there are workers: all of them, shown and moved as one gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import convert
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from twisted.internet.defer import Deferred

from llmgw import __version__
from llmgw.admin.exposition import labelled, write_gauge
from llmgw.admin.openmetrics import Exemplar, openmetrics
from llmgw.core.merged_metrics import Departed, merge_metrics
from llmgw.core.merged_state import merge_states

if TYPE_CHECKING:
    from llmgw.workers.child import Child
    from llmgw.workers.service import ParentService


class ParentOperations:
    """Asks the workers and puts their answers together; see ``admin.site.Operations``."""

    def __init__(self, service: ParentService) -> None:
        self._service = service
        self._departed = Departed()
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def readiness(self) -> tuple[bool, str]:
        """Ready while any worker is; else why the first is not."""
        service = self._service
        if service.draining:
            return False, "draining"
        if service.crew.serving:
            return True, ""
        whys = [child.status.why for child in service.crew if child.status is not None and child.status.why]
        return False, whys[0] if whys else "no worker is ready"

    def state(self) -> Deferred[Mapping[str, Any]]:
        """The whole picture, and the workers."""
        return Deferred.fromCoroutine(self._state())

    async def _state(self) -> Mapping[str, Any]:
        service = self._service
        told = await service.crew.ask("state", all=True)
        nothing = {"in_flight": 0, "models": {}, "backends": [], "router": service.config.router.plugin}
        whole = merge_states([state for _, state in told] or [nothing])
        whole["version"] = __version__
        whole["uptime_s"] = service.uptime_s
        whole["draining"] = service.draining
        whole["workers"] = self.workers()
        return whole

    def workers(self) -> list[dict[str, Any]]:
        """Every process: where it is, what it does."""
        service = self._service
        now_s = service.reactor.seconds()
        found: list[dict[str, Any]] = []
        for place in service.crew.places:
            children = [place.current, *sorted(place.leaving, key=lambda child: child.started_s)]
            for child in children:
                status = None if child is None else child.status
                state = place.state
                if child is not None and child is not place.current:
                    state = "finishing" if child.leaving else "being replaced"
                found.append(
                    {
                        "number": place.number,
                        "pid": None if child is None else child.pid,
                        "state": state,
                        "why": "" if status is None else status.why,
                        "in_flight": 0 if status is None else status.in_flight,
                        "connections": 0 if status is None else status.connections,
                        "uptime_s": None if child is None else now_s - child.started_s,
                        "restarts": place.restarts.total,
                    }
                )
        return found

    def metrics_text(self) -> Deferred[bytes]:
        """All workers' figures as one gateway's, and the parent's own."""
        return Deferred.fromCoroutine(self._metrics_text())

    async def _metrics_text(self) -> bytes:
        crew = self._service.crew
        texts = []
        for child, text in await crew.ask("metrics_text", all=True):
            child.said = text
            texts.append(text)
        own: list[str] = []
        states = self.workers()
        write_gauge(own, "llmgw_workers", "Places for workers.", [("", len(crew.places))])
        write_gauge(own, "llmgw_workers_serving", "Workers that take requests.", [("", len(crew.serving))])
        write_gauge(own, "llmgw_workers_down", "Places given up after too many ends.", [("", crew.down)])
        finishing = sum(state["state"] == "finishing" for state in states)
        write_gauge(own, "llmgw_workers_finishing", "Workers that finish their streams.", [("", finishing)])
        write_gauge(
            own,
            "llmgw_worker_in_flight",
            "Requests at work by worker.",
            [(labelled((("worker", str(n)),)), count) for n, count in _by_place(states).items()],
        )
        ends = [(labelled((("worker", str(p.number)),)), float(p.restarts.total)) for p in crew.places]
        lines: list[str] = []
        write_gauge(lines, "llmgw_worker_ends_total", "Ends of workers that nobody asked for.", ends)
        own += [line.replace(" gauge\n", " counter\n") for line in lines]
        texts.append("".join(own) + generate_latest(self._process).decode())
        return merge_metrics(texts, self._departed).encode()

    def openmetrics(self) -> Deferred[bytes] | None:
        """The same as OpenMetrics, where there are exemplars: of each bucket the last one of any worker."""
        if not self._service.config.metrics.exemplars:
            return None
        return Deferred.fromCoroutine(self._openmetrics())

    async def _openmetrics(self) -> bytes:
        last: dict[str, Exemplar] = {}
        for _, told in await self._service.crew.ask("exemplars", all=True):
            for line, each in convert(told, dict[str, Exemplar]).items():
                if line not in last or last[line].at < each.at:
                    last[line] = each
        return openmetrics((await self._metrics_text()).decode(), last).encode()

    def departed(self, child: Child) -> None:
        """A worker has ended: what it counted, as far as it is known, stays counted."""
        self._departed.add(child.said)

    def explain(self, body: bytes) -> Deferred[Mapping[str, Any]]:
        """What one worker would do with a request; fails with the GatewayError it would be answered with."""
        return Deferred.fromCoroutine(self._service.crew.ask_one("explain", body.decode("utf-8", "replace")))

    def drain_backend(self, id: str, on: bool) -> Deferred[bool]:
        """Send no new requests to a backend from any worker, or send them again."""
        return Deferred.fromCoroutine(self._drain_backend(id, on))

    async def _drain_backend(self, id: str, on: bool) -> bool:
        crew = self._service.crew
        known = any(found for _, found in await crew.ask("drain_backend", id, on))
        if known:
            (crew.drained.add if on else crew.drained.discard)(id)
        return known

    def load_model(self, name: str, on: bool) -> Deferred[Mapping[str, Any] | None]:
        """Have a model loaded by one worker, for all of them; or unloaded, by whoever may."""
        return Deferred.fromCoroutine(self._load_model(name, on))

    async def _load_model(self, name: str, on: bool) -> Mapping[str, Any] | None:
        crew = self._service.crew
        if on:
            begun: Mapping[str, Any] | None = await crew.ask_one("load_model", name, True)
            return begun
        # All of them: each keeps its own requests away.
        told = [answer for _, answer in await crew.ask("load_model", name, False) if answer is not None]
        return told[0] if told else None

    def reload(self) -> Deferred[list[str]]:
        """See :meth:`llmgw.workers.service.ParentService.reload`."""
        return self._service.reload()

    def restart(self) -> Deferred[list[int]]:
        """See :meth:`llmgw.workers.crew.Crew.restart`."""
        return Deferred.fromCoroutine(self._service.crew.restart())

    def drain(self) -> None:
        """Begin to drain the whole gateway, as SIGTERM does."""
        self._service.begin_drain()


def _by_place(states: list[dict[str, Any]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for state in states:
        found[state["number"]] = found.get(state["number"], 0) + state["in_flight"]
    return found
