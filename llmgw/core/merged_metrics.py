"""Merges the metrics of several workers into those of one gateway.

Counters and histograms are added up, sample by sample; what a worker had counted before
it ended stays in the sum, or a counter would fall. Gauges have a rule by name, since the
connections of workers add up, but not their views of one backend:

``sum``
    what each worker has a part of: connections, running requests, memory. Gauges
    that are not listed below are summed too.
``max``, ``min``
    what all see of the same thing: the worst figure, or the only true one.
``mean``
    what each measures for itself: times and rates.

:source: Prometheus text exposition format, version 0.0.4, as written by
    ``llmgw.admin.exposition`` and ``prometheus_client``: no time stamps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

RULES: Mapping[str, str] = {
    "llmgw_info": "max",
    "llmgw_draining": "max",
    "llmgw_overload_level": "max",
    "llmgw_memory_share": "max",
    "llmgw_store_up": "min",
    "llmgw_certificate_expires_seconds": "min",
    "llmgw_discovery_up": "min",
    "llmgw_discovery_backends": "max",
    "llmgw_discovery_held": "max",
    "llmgw_discovery_refused": "max",
    "llmgw_discovery_contact_age_seconds": "max",
    "llmgw_backend_source": "max",
    "llmgw_peers": "max",
    "llmgw_backend_cap": "max",
    "llmgw_backend_slots": "max",
    "llmgw_backend_ttft_seconds": "mean",
    "llmgw_backend_token_rate": "mean",
    "llmgw_backend_prefill_rate": "mean",
    "llmgw_backend_failure_streak": "max",
    "llmgw_backend_busy_slots": "max",
    "llmgw_backend_deferred": "max",
    "llmgw_backend_kv_use": "max",
    "llmgw_backend_gpu_use": "max",
    "llmgw_backend_available": "min",
    "llmgw_backend_loading": "max",
    "llmgw_backend_draining": "max",
    "llmgw_backend_warmth": "min",
    "llmgw_backend_score": "mean",
    "llmgw_breaker_state": "max",
    "llmgw_model_loaded": "max",
    "llmgw_model_loading": "max",
    "llmgw_model_failed": "max",
    "process_start_time_seconds": "min",
    "process_max_fds": "min",
}
"""How the gauges of several workers are merged, by the name of the family."""

_GROWS = frozenset({"counter", "histogram", "summary"})


class _Family:
    """One metric family. ``samples`` maps the text before the value to the workers' values."""

    __slots__ = ("head", "kind", "rule", "samples")

    def __init__(self, name: str, head: str) -> None:
        self.head = head
        self.kind = "untyped"
        self.rule = RULES.get(name, "sum")
        self.samples: dict[str, list[float]] = {}


class Departed:
    """The final counts of workers that have ended."""

    def __init__(self) -> None:
        self.families: dict[str, _Family] = {}

    def add(self, text: str) -> None:
        """Add a worker's last metrics, in the exposition format."""
        for name, family in _read([text]).items():
            if family.kind in _GROWS:
                mine = self.families.setdefault(name, _Family(name, family.head))
                mine.kind = family.kind
                for before, values in family.samples.items():
                    mine.samples[before] = [sum(values) + sum(mine.samples.get(before, ()))]


def merge_metrics(texts: Iterable[str], departed: Departed | None = None) -> str:
    """One exposition text made of several; families are in the order of their first text.

    :param departed: included in the sums.
    """
    families = _read(texts)
    if departed is not None:
        for name, gone in departed.families.items():
            family = families.setdefault(name, _Family(name, gone.head))
            family.kind = gone.kind
            for before, values in gone.samples.items():
                family.samples.setdefault(before, []).extend(values)
    out: list[str] = []
    for family in families.values():
        out.append(family.head)
        rule = "sum" if family.kind in _GROWS else family.rule
        out += [f"{before} {_number(_by(rule, values))}\n" for before, values in family.samples.items()]
    return "".join(out)


def _read(texts: Iterable[str]) -> dict[str, _Family]:
    """All families of all texts. Anything before the first family is ignored."""
    families: dict[str, _Family] = {}
    for text in texts:
        family: _Family | None = None
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, _Family(name, f"{line}\n"))
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ", 3)
                family = families.setdefault(name, _Family(name, ""))
                if family.kind != kind:
                    family.kind = kind
                    family.head += f"{line}\n"
            elif family is not None and line and not line.startswith("#"):
                before, _, value = line.rpartition(" ")
                family.samples.setdefault(before, []).append(float(value))
    return families


def _by(rule: str, values: list[float]) -> float:
    if rule == "max":
        return max(values)
    if rule == "min":
        return min(values)
    total = sum(values)
    return total / len(values) if rule == "mean" else total


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
