"""Figures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from llmgw.simulation.run import Result

SPIKE_S = 0.25
"""A time to first token above it is a spike: the article's slow machine takes 300 ms at its best."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank of ``ordered``; 0 if there is nothing."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(result: Result, spike_s: float = SPIKE_S) -> dict[str, Any]:
    """The figures of one run as plain values, times in seconds.

    Times are of requests that were answered in full; a router that refuses or
    loses many looks fast, so read them together with ``errors``.
    """
    done = [record for record in result.records if record.outcome == "done"]
    ttft = sorted(record.ttft_s for record in done if record.ttft_s is not None)
    e2e = sorted(record.e2e_s for record in done)
    nodes = Counter(record.node for record in result.records if record.asked)
    asked = sum(nodes.values())
    prompt = sum(record.prompt_tokens for record in done)
    errors = Counter(record.outcome for record in result.records if record.outcome != "done")
    return {
        "requests": len(result.records),
        "ttft_s": spread(ttft),
        "e2e_s": spread(e2e),
        "waited_s": _mean([record.waited_s for record in result.records]),
        "share": {node: nodes[node] / asked if asked else 0.0 for node in result.nodes},
        "cache_hit": sum(record.cached_tokens for record in done) / prompt if prompt else 0.0,
        "errors": dict(sorted(errors.items())),
        "retries": sum(max(0, len(record.asked) - 1) for record in result.records),
        "spikes": sum(value > spike_s for value in ttft),
        "ended_s": result.ended_s,
        "router_faults": result.faults,
        "router_fault": result.fault,
    }


def share_of(result: Result, node: str, begin_s: float, end_s: float) -> float:
    """Share of all attempts at ``node``, of requests that arrived in between; 0 if there were none."""
    asked = [
        each for record in result.records if begin_s <= record.arrived_s < end_s for each in record.asked
    ]
    return asked.count(node) / len(asked) if asked else 0.0


def spread(ordered: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles of rising values."""
    return {
        "mean": _mean(ordered),
        "p50": percentile(ordered, 0.50),
        "p95": percentile(ordered, 0.95),
        "p99": percentile(ordered, 0.99),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
