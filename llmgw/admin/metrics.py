"""What the gateway counts, and what is read at a scrape.

Counting is a dictionary look-up and an addition, since it stands in the way of
every request; ``prometheus_client`` takes ten times as long and serves the
process's own figures. Labels are bounded: a model nobody is configured for is
``other``, and so is what comes after :data:`~llmgw.admin.exposition.MAX_SERIES`.

Every metric is described for operators in ``docs/metrics.md``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from llmgw import __version__
from llmgw.admin.exposition import MAX_SERIES, OTHER, Count, Family, Histogram, labelled, write_gauge
from llmgw.admin.openmetrics import Exemplar, openmetrics

if TYPE_CHECKING:
    from llmgw.values import Usage

LATENCY_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 960.0)
GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
OVERHEAD_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)
LAG_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LOAD_BOUNDS = (0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0)
HOLD_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


Table = tuple[str, str, Iterable[tuple[Iterable[tuple[str, str]], float]]]
"""A gauge: name, help text, and for each set of labels its value."""


class BackendTraffic(Struct):
    """What one backend has answered since the start; ``errors`` are 5xx."""

    requests: int = 0
    errors: int = 0
    ttft_sum_s: float = 0.0
    ttft_count: int = 0


class Traffic(Struct):
    """What all have asked for since the start.

    :param rejected: by the error's code.
    :param backends: by id; those nobody was sent to are absent.
    """

    requests: int
    errors: int
    output_tokens: int
    rejected: dict[str, int]
    retries: int
    client_aborts: int
    backends: dict[str, BackendTraffic]


_RequestSeries = tuple[Count, Histogram, Histogram, Histogram, Count, Count, Count]


class Metrics:
    """All of it.

    :param snapshot: the fleet's state, as :meth:`llmgw.core.fleet.Fleet.snapshot` gives it.
    :param gauges: further gauges by name: ``(help text, value)``.
    :param knows: whether a model's name is configured or told by a backend; the
        rest is ``other``. Asked for each request, so it should be a look-up.
        ``None`` takes every name.
    :ivar tables: each gives further gauges with labels at a scrape.
    :ivar lag: how late the event loop's timer ran; whoever measures it observes.
    """

    def __init__(
        self,
        snapshot: Callable[[], Iterable[Mapping[str, Any]]],
        gauges: Callable[[], Mapping[str, tuple[str, float]]],
        knows: Callable[[str], bool] | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._gauges = gauges
        self._knows = knows
        self.tables: list[Callable[[], Iterable[Table]]] = []
        self._families: list[Family[Any]] = []
        self._exemplars: dict[Histogram, dict[int, Exemplar]] = {}
        self._series: dict[tuple[str, str | None, str | None, int], _RequestSeries] = {}
        count, histogram = self._counter, self._histogram
        self._requests = count(
            "llmgw_requests_total",
            "Requests by route, model, backend and status.",
            ("route", "model", "backend", "status"),
        )
        self._tokens = count("llmgw_tokens_total", "Tokens by model and kind.", ("model", "kind"))
        self._rejected = count("llmgw_rejected_total", "Requests the gateway refused.", ("reason",))
        self._retries = count("llmgw_retries_total", "Attempts that another followed.", ("reason",))
        self._aborts = count("llmgw_client_aborts_total", "Clients that left before their answer's end.")
        self._ttft = histogram(
            "llmgw_ttft_seconds",
            "Arrival of a request to its first token.",
            LATENCY_BOUNDS,
            ("model", "backend"),
        )
        self._gaps = histogram(
            "llmgw_inter_token_seconds", "Between two reads of a stream.", GAP_BOUNDS, ("model", "backend")
        )
        self._durations = histogram(
            "llmgw_request_seconds",
            "Arrival of a request to the end of its answer.",
            LATENCY_BOUNDS,
            ("route",),
        )
        self._overhead = histogram(
            "llmgw_overhead_seconds",
            "From the request being complete to its leaving for a backend.",
            OVERHEAD_BOUNDS,
        )
        self._hold = histogram(
            "llmgw_hold_seconds", "How long requests were held for a model to load.", HOLD_BOUNDS
        )
        self._held = count(
            "llmgw_held_total", "Requests held for their model, by what came of it.", ("model", "outcome")
        )
        self._loads = count(
            "llmgw_model_loads_total", "Loads by what came of them.", ("backend", "model", "outcome")
        )
        self._load_seconds = histogram(
            "llmgw_model_load_seconds", "How long loads took.", LOAD_BOUNDS, ("backend", "model")
        )
        self._unloads = count(
            "llmgw_model_unloads_total", "Models unloaded, by why.", ("backend", "model", "reason")
        )
        self._wait = histogram("llmgw_wait_seconds", "How long requests waited for a slot.", HOLD_BOUNDS)
        self.lag = histogram(
            "llmgw_reactor_lag_seconds", "How late the event loop's own timer ran.", LAG_BOUNDS
        ).child(())
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    # --- counting ---

    def request(
        self,
        route: str,
        model: str | None,
        backend: str | None,
        status: int,
        duration_s: float,
        ttft_s: float | None,
        overhead_s: float | None,
        used: Usage | None,
    ) -> None:
        """A request is over; of its tokens, cached ones are prompt tokens too."""
        series = self._series.get((route, model, backend, status))
        if series is None:
            series = self._find_series(route, model, backend, status)
        series[0].value += 1
        series[1].observe(duration_s)
        if ttft_s is not None:
            series[2].observe(ttft_s)
        if overhead_s is not None:
            series[3].observe(overhead_s)
        if used is not None:
            series[4].value += used.prompt_tokens
            series[5].value += used.cached_tokens
            series[6].value += used.output_tokens

    def no_request(self, status: int) -> None:
        """Bytes that were no request were answered: counted as one, since it has an access line as one.
        Nobody knows when it began."""
        self._requests.child((OTHER, OTHER, "", str(status))).value += 1

    def _find_series(self, route: str, model: str | None, backend: str | None, status: int) -> _RequestSeries:
        """What a request is counted in; kept, unless its model is nobody's."""
        name, place = self._name(model), backend or ""
        series = (
            self._requests.child((route, name, place, str(status))),
            self._durations.child((route,)),
            self._ttft.child((name, place)),
            self._overhead.child(()),
            self._tokens.child((name, "prompt")),
            self._tokens.child((name, "cached")),
            self._tokens.child((name, "output")),
        )
        if name == model and len(self._series) < MAX_SERIES:
            self._series[route, model, backend, status] = series
        return series

    def exemplify(
        self, model: str | None, backend: str | None, ttft_s: float, label: tuple[str, str], at: float
    ) -> None:
        """Remember a request for its bucket of the time to first token.

        :param label: what names it.
        :param at: Unix seconds.
        """
        child = self._ttft.child((self._name(model), backend or ""))
        kept = self._exemplars.setdefault(child, {})
        kept[bisect_left(child.bounds, ttft_s)] = Exemplar(labelled((label,)), ttft_s, at)

    def gaps(self, model: str | None, backend: str) -> Histogram:
        """The histogram of a stream's gaps, looked up once per stream."""
        return self._gaps.child((self._name(model), backend))

    def held(self, model: str, outcome: str, seconds: float | None) -> None:
        """A request was held for its model, or could not be (no ``seconds``)."""
        self._held.child((self._name(model), outcome)).value += 1
        if seconds is not None:
            self._hold.child(()).observe(seconds)

    def loaded(self, backend: str, model: str, outcome: str, seconds: float) -> None:
        """A load has ended: ``loaded``, ``failed`` or ``undone``."""
        self._loads.child((backend, self._name(model), outcome)).value += 1
        if outcome == "loaded":
            self._load_seconds.child((backend, self._name(model))).observe(seconds)

    def unloaded(self, backend: str, model: str, why: str) -> None:
        """A model was unloaded: ``evicted``, ``idle`` or ``operator``."""
        self._unloads.child((backend, self._name(model), why)).value += 1

    def waited(self, seconds: float) -> None:
        """A request has waited for a slot, whatever came of it."""
        self._wait.child(()).observe(seconds)

    def rejected(self, reason: str) -> None:
        """A request was refused; ``reason`` is an error's code."""
        self._rejected.child((reason,)).value += 1

    def retried(self, reason: str) -> None:
        """An attempt failed, and another follows."""
        self._retries.child((reason,)).value += 1

    def client_abort(self) -> None:
        """A client left."""
        self._aborts.child(()).value += 1

    def traffic(self) -> Traffic:
        """The counters, summed for people."""
        backends: dict[str, BackendTraffic] = {}
        requests = errors = 0
        for (_, _, place, status), count in self._requests.children.items():
            failed = count.value if status >= "500" else 0
            requests += count.value
            errors += failed
            if place:
                own = backends.setdefault(place, BackendTraffic())
                own.requests += count.value
                own.errors += failed
        for (_, place), first in self._ttft.children.items():
            if place in backends:
                backends[place].ttft_sum_s += first.total
                backends[place].ttft_count += sum(first.counts)
        return Traffic(
            requests,
            errors,
            sum(count.value for (_, kind), count in self._tokens.children.items() if kind == "output"),
            {reason: count.value for (reason,), count in self._rejected.children.items()},
            sum(count.value for count in self._retries.children.values()),
            self._aborts.child(()).value,
            backends,
        )

    def _name(self, model: str | None) -> str:
        if model is None or (self._knows is not None and not self._knows(model)):
            return OTHER
        return model

    # --- rendering ---

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        members = list(self._snapshot())
        present = {str(member["id"]) for member in members} | {"", OTHER}
        out: list[str] = []
        for family in self._families:
            # Backends that discovery took away must not use up the room of the next.
            if len(family.children) > MAX_SERIES // 2:
                family.keep("backend", present)
                self._series.clear()
                self._exemplars.clear()
            family.write(out)
        _write_members(out, members)
        rows_of = [row for table in self.tables for row in table()]
        # A plugin may name its gauges as we name ours, and twice one name spoils the whole page.
        taken = {family.name for family in self._families} | {name for name, _, _ in rows_of} | _OWN
        gauges = {**_ALWAYS, **self._gauges()}
        for name, (text, value) in gauges.items():
            if name not in taken and not name.startswith("process_"):
                write_gauge(out, name, text, () if value is None else (("", value),))
        for name, text, rows in rows_of:
            write_gauge(out, name, text, [(labelled(labels), value) for labels, value in rows])
        write_gauge(out, "llmgw_info", "Always 1.", ((labelled((("version", __version__),)), 1),))
        return "".join(out).encode() + generate_latest(self._process)

    def render_openmetrics(self) -> bytes:
        """The same as OpenMetrics 1.0.0, with exemplars."""
        return openmetrics(self.render().decode(), self.exemplars()).encode()

    def exemplars(self) -> dict[str, Exemplar]:
        """Of each bucket that has one, by the text of its line up to the value."""
        found: dict[str, Exemplar] = {}
        for child, kept in self._exemplars.items():
            found.update({child.before(bucket): exemplar for bucket, exemplar in kept.items()})
        return found

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Family[Count]:
        return self._family(Family(name, "counter", text, labels, Count))

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Family[Histogram]:
        def make(name: str, labels: str) -> Histogram:
            return Histogram(name, bounds, labels)

        return self._family(Family(name, "histogram", text, labels, make))

    def _family(self, family: Family[Any]) -> Family[Any]:
        self._families.append(family)
        if not family.labels:
            family.child(())  # zero is worth telling where there is nothing to list
        return family


_ALWAYS: Mapping[str, tuple[str, float | None]] = {
    "llmgw_limiter_degraded": ("1 while limits are decided without the store.", None),
}
"""Gauges that are listed even when nobody gives them a value."""

_BREAKER = {"closed": 0, "slow_start": 1, "half_open": 2, "open": 3}

_GAUGES = (
    ("llmgw_in_flight", "Requests of this gateway at work on the backend.", "in_flight"),
    ("llmgw_backend_cap", "Most requests in flight on the backend.", "cap"),
    ("llmgw_backend_slots", "Parallel sequences by the backend's own word.", "slots"),
    ("llmgw_backend_ttft_seconds", "Mean time to first token over the last 50.", "ttft_s"),
    ("llmgw_backend_token_rate", "Output tokens per second of one stream.", "token_rate"),
    ("llmgw_backend_prefill_rate", "Prompt tokens read per second.", "prefill_rate"),
    ("llmgw_backend_failure_streak", "Failures since the last success.", "failure_streak"),
    ("llmgw_backend_busy_slots", "Slots at work by the backend's own word.", "busy_slots"),
    ("llmgw_backend_deferred", "Requests queued inside the backend by its own word.", "deferred"),
    ("llmgw_backend_kv_use", "Share of the KV cache in use, 0 to 1.", "kv_use"),
    ("llmgw_backend_gpu_use", "Share of the GPU in use, 0 to 1.", "gpu_use"),
    ("llmgw_backend_available", "1 while the backend may be chosen.", "available"),
    ("llmgw_backend_loading", "1 while the backend loads its model.", "loading"),
    ("llmgw_backend_draining", "1 while the operator keeps new requests away.", "draining"),
    ("llmgw_backend_warmth", "0 to 1; below 1 in slow start.", "warmth"),
    ("llmgw_backend_score", "The router's last score of the backend.", "score"),
)


_OWN = frozenset(name for name, _, _ in _GAUGES) | {"llmgw_breaker_state", "llmgw_info"}


def _write_members(out: list[str], members: list[Mapping[str, Any]]) -> None:
    named = [(labelled((("backend", str(member["id"])),)), member) for member in members]
    for name, text, key in _GAUGES:
        write_gauge(
            out, name, text, [(label, member[key]) for label, member in named if member.get(key) is not None]
        )
    states = [(label, _BREAKER.get(member.get("breaker", "closed"), 3)) for label, member in named]
    write_gauge(out, "llmgw_breaker_state", "0 closed, 1 slow start, 2 half open, 3 open.", states)
