"""Figures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from llmgw.simulation.run import Result

SPIKE_S = 0.25


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank of ``ordered``; 0 if there is nothing."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(result: Result, spike_s: float = SPIKE_S) -> dict[str, Any]:
    """The figures of one run, seconds throughout."""
    done = [record for record in result.records if record.outcome == "done"]
    ttft = sorted(record.ttft_s for record in done if record.ttft_s is not None)
    e2e = sorted(record.e2e_s for record in done)
    nodes = Counter(record.node for record in result.records if record.node)
    asked = sum(nodes.values())
    prompt = sum(record.prompt_tokens for record in done)
    return {
        "requests": len(result.records),
        "ttft_s": _spread(ttft),
        "e2e_s": _spread(e2e),
        "share": {node: nodes[node] / asked if asked else 0.0 for node in result.nodes},
        "cache_hit": sum(record.cached_tokens for record in done) / prompt if prompt else 0.0,
        "errors": dict(Counter(r.outcome for r in result.records if r.outcome != "done")),
        "retries": sum(max(0, len(record.asked) - 1) for record in result.records),
        "spikes": sum(value > spike_s for value in ttft),
        "ended_s": result.ended_s,
        "router_faults": result.faults,
        "router_fault": result.fault,
    }


def _spread(ordered: Sequence[float]) -> dict[str, float]:
    return {
        "mean": sum(ordered) / len(ordered) if ordered else 0.0,
        "p50": percentile(ordered, 0.50),
        "p95": percentile(ordered, 0.95),
        "p99": percentile(ordered, 0.99),
    }
