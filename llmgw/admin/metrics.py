"""Counters and histograms of the gateway, rendered for Prometheus when it asks.

Counting is a dictionary look-up and an addition: a histogram of
``prometheus_client`` costs ten times as much per observation, and its part here
is the text format. Labels are bounded: a model or backend that is not
configured never becomes one, and past :data:`MOST_SERIES` new label sets are
counted under ``other``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from llmgw.values import Usage

OTHER = "other"
MOST_SERIES = 2000
LATENCY_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 960.0)
GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
OVERHEAD_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


class Histogram:
    """Counts per bucket, and the sum. Values are seconds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value in the bucket whose upper bound it does not exceed."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus wants them."""
        found: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            found.append(("+Inf" if bound == float("inf") else repr(bound), running))
        return found


class Family:
    """One metric name: its children by label values."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], make: Callable[[], Any]) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self._make = make
        self.children: dict[tuple[str, ...], Any] = {}

    def child(self, values: tuple[str, ...]) -> Any:
        """The child of ``values``, made when first asked for."""
        child = self.children.get(values)
        if child is None:
            if len(self.children) >= MOST_SERIES:
                values = (OTHER,) * len(self.labels)
                child = self.children.get(values)
                if child is not None:
                    return child
            child = self.children[values] = self._make()
        return child


class Count:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Metrics:
    """Everything that is counted while requests run, and what is read at a scrape.

    :param snapshot: the fleet's state, as :meth:`llmgw.core.fleet.Fleet.snapshot` gives it.
    :param gauges: further gauges by name: ``(help text, value)``.
    """

    def __init__(
        self,
        snapshot: Callable[[], Iterable[Mapping[str, Any]]],
        gauges: Callable[[], Mapping[str, tuple[str, float]]],
    ) -> None:
        self._snapshot = snapshot
        self._gauges = gauges
        self._families: list[Family] = []
        count = self._counter
        self._requests = count(
            "llmgw_requests_total", "Requests by route, model, backend and status.", "route", "model", "backend", "status"
        )
        self._tokens = count("llmgw_tokens_total", "Tokens by model and kind.", "model", "kind")
        self._rejected = count("llmgw_rejected_total", "Requests refused by the gateway, by reason.", "reason")
        self._retries = count("llmgw_retries_total", "Attempts that were followed by another, by reason.", "reason")
        self._aborts = count("llmgw_client_aborts_total", "Clients that left before their answer was complete.")
        histogram = self._histogram
        self._ttft = histogram(
            "llmgw_ttft_seconds", "Arrival of the request to its first token.", LATENCY_BOUNDS, "model", "backend"
        )
        self._gaps = histogram(
            "llmgw_inter_token_seconds", "Between two reads of a stream.", GAP_BOUNDS, "model", "backend"
        )
        self._durations = histogram(
            "llmgw_request_seconds", "Arrival of the request to the end of its answer.", LATENCY_BOUNDS, "route"
        )
        self._overhead = histogram(
            "llmgw_overhead_seconds", "From the request being complete to its leaving for a backend.", OVERHEAD_BOUNDS
        )
        self.lag = histogram("llmgw_reactor_lag_seconds", "How late the event loop's own timer ran.", OVERHEAD_BOUNDS).child(())
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    # --- counting ---

    def request(
        self,
        *,
        route: str,
        model: str | None,
        backend: str | None,
        status: int,
        duration_s: float,
        ttft_s: float | None,
        overhead_s: float | None,
    ) -> None:
        """A request is over."""
        labels = (route, model or OTHER, backend or "", str(status))
        self._requests.child(labels).value += 1
        self._durations.child((route,)).observe(duration_s)
        if ttft_s is not None:
            self._ttft.child((model or OTHER, backend or "")).observe(ttft_s)
        if overhead_s is not None:
            self._overhead.child(()).observe(overhead_s)

    def tokens(self, model: str | None, used: Usage) -> None:
        """Tokens of a request."""
        for kind, value in (
            ("prompt", used.prompt_tokens),
            ("cached", used.cached_tokens),
            ("output", used.output_tokens),
        ):
            if value:
                self._tokens.child((model or OTHER, kind)).value += value

    def gaps(self, model: str | None, backend: str) -> Histogram:
        """The histogram of a stream's gaps, looked up once per stream."""
        found: Histogram = self._gaps.child((model or OTHER, backend))
        return found

    def rejected(self, reason: str) -> None:
        """A request was refused; ``reason`` is an error's code."""
        self._rejected.child((reason,)).value += 1

    def retried(self, reason: str) -> None:
        """An attempt failed, and another follows."""
        self._retries.child((reason,)).value += 1

    def client_abort(self) -> None:
        """A client left."""
        self._aborts.child(()).value += 1

    # --- rendering ---

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """Called by ``prometheus_client`` at each scrape."""
        for family in self._families:
            yield _rendered(family)
        yield from _fleet_gauges(list(self._snapshot()))
        for name, (text, value) in self._gauges().items():
            gauge = GaugeMetricFamily(name, text)
            gauge.add_metric((), value)
            yield gauge

    def _counter(self, name: str, text: str, *labels: str) -> Family:
        family = Family(name, text, labels, Count)
        self._families.append(family)
        if not labels:
            family.child(())
        return family

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Family:
        family = Family(name, text, labels, lambda: Histogram(bounds))
        self._families.append(family)
        return family


def _rendered(family: Family) -> Any:
    """A family in ``prometheus_client``'s form."""
    sample = next(iter(family.children.values()), None)
    if isinstance(sample, Histogram) or family.name.endswith("_seconds"):
        histogram = HistogramMetricFamily(family.name, family.text, labels=family.labels)
        for values, child in family.children.items():
            histogram.add_metric(values, child.buckets(), child.total)
        return histogram
    counter = CounterMetricFamily(family.name.removesuffix("_total"), family.text, labels=family.labels)
    for values, child in family.children.items():
        counter.add_metric(values, child.value)
    return counter


_BREAKER = {"closed": 0, "slow_start": 1, "half_open": 2, "open": 3}

_GAUGES = (
    ("llmgw_in_flight", "Requests of this gateway at work on the backend.", "in_flight"),
    ("llmgw_backend_cap", "Most requests in flight on the backend.", "cap"),
    ("llmgw_backend_ttft_seconds", "Mean time to first token over the last 50.", "ttft_s"),
    ("llmgw_backend_token_rate", "Output tokens per second of one stream.", "token_rate"),
    ("llmgw_backend_prefill_rate", "Prompt tokens read per second.", "prefill_rate"),
    ("llmgw_backend_failure_streak", "Failures since the last success.", "failure_streak"),
    ("llmgw_backend_busy_slots", "Slots at work by the backend's own word.", "busy_slots"),
    ("llmgw_backend_deferred", "Requests queued inside the backend by its own word.", "deferred"),
    ("llmgw_backend_available", "1 while the backend may be chosen.", "available"),
    ("llmgw_backend_warmth", "0 to 1; below 1 in slow start.", "warmth"),
    ("llmgw_backend_score", "The router's last score of the backend.", "score"),
)


def _fleet_gauges(members: list[Mapping[str, Any]]) -> Iterator[Any]:
    for name, text, key in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=("backend",))
        for member in members:
            value = member.get(key)
            if value is not None:
                gauge.add_metric((member["id"],), float(value))
        yield gauge
    gauge = GaugeMetricFamily(
        "llmgw_breaker_state", "0 closed, 1 slow start, 2 half open, 3 open.", labels=("backend",)
    )
    for member in members:
        state = member.get("breaker")
        if isinstance(state, str):
            gauge.add_metric((member["id"],), _BREAKER.get(state, 3))
    yield gauge
