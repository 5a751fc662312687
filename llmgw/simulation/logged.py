"""What really became of the requests of an access log: the row to compare simulated ones with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from llmgw.simulation.report import SPIKE_S, spread
from llmgw.simulation.trace import DAEMON, Span, objects

AS_LOGGED = "(as logged)"


def logged(path: str, span: Span, spike_s: float = SPIKE_S) -> dict[str, Any] | None:
    """Figures of the lines that a replay of ``span`` takes, in the form of :func:`.report.summary`.

    A second try at another backend shows as the last one only, so ``share`` counts
    requests, where a simulation counts attempts.

    :return: ``None`` where the file is no access log.
    :raise ConfigError: a line is no JSON object; names it.
    :raise OSError: the file cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace") as lines:
        first = next((line for line in lines if not DAEMON.match(line)), "")
        lines.seek(0)
        if not first.startswith("{") or '"input_length"' in first or '"hash_ids"' in first:
            return None
        tables = (
            table
            for _, table in objects(lines, path)
            if "output_tokens" in table and "prompt_tokens" in table
        )
        stop = None if span.count is None else span.skip + span.count
        return _figures(islice(tables, span.skip, stop), spike_s)


def _figures(tables: Iterable[Mapping[str, Any]], spike_s: float) -> dict[str, Any]:
    ttft: list[float] = []
    e2e: list[float] = []
    nodes: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    waited_s = prompt = cached = retries = requests = 0.0
    for table in tables:
        requests += 1
        waited_s += table.get("waited_s", 0.0)
        retries += max(0, table.get("attempts", 1) - 1)
        if table.get("backend"):
            nodes[str(table["backend"])] += 1
        if table.get("outcome") != "done":
            errors[str(table.get("outcome"))] += 1
            continue
        e2e.append(table.get("duration_s", 0.0))
        prompt += table["prompt_tokens"]
        cached += table.get("cached_tokens", 0)
        if table.get("ttft_s") is not None:
            ttft.append(table["ttft_s"])
    asked = sum(nodes.values())
    return {
        "requests": int(requests),
        "ttft_s": spread(sorted(ttft)),
        "e2e_s": spread(sorted(e2e)),
        "waited_s": waited_s / requests if requests else 0.0,
        "share": {node: count / asked for node, count in sorted(nodes.items())},
        "cache_hit": cached / prompt if prompt else 0.0,
        "errors": dict(sorted(errors.items())),
        "retries": int(retries),
        "spikes": sum(value > spike_s for value in ttft),
        "router_faults": 0,
        "router_fault": "",
    }
