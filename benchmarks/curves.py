"""How the cost of a request grows: with backends, keys, prompt size; that of an event, with streams.

    python benchmarks/curves.py [--out FILE.json]

The first three are taken inside the process (``inside.py``), where nothing else disturbs; the last
one with real sockets, at 5,000 events a second however many streams they are spread over, against
nginx in turn. One worker, keys, limits, metrics and access log on.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import compare
from compare import Stage, Target, keep, measure
from inside import Rig, least_us
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from targets import HERE, TARGETS, staged

from llmgw.tap import tune_memory

INSIDE: dict[str, tuple[int, ...]] = {
    "backends": (1, 2, 10, 100, 1000),
    "keys": (1, 100, 10_000),
    "prompt_bytes": (200, 2_000, 20_000, 200_000, 1_500_000),
}
STREAMS = (10, 100, 1000, 5000)
EVENTS_PER_S = 5000
ROUTERS = ("expected-ttft", "adaptive")
ROUNDS = 3


def inside(name: str, value: int, router: str) -> float:
    """Microseconds of one request with ``value`` of ``name``, all else as usual."""
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(folder, router=router, **{name: value})  # type: ignore[arg-type]
        for _ in range(50):
            rig.ask()
        rig.check()
        times = 5000 if len(rig.request) < 10_000 else 500 if len(rig.request) < 1_000_000 else 50
        return least_us(rig.ask, times)


def streams(count: int, stage: Stage, targets: list[Target]) -> dict[str, dict[str, float]]:
    """Microseconds of one event of each target, and its ratio to the first one's in the same round."""
    interval_ms = count * 1000 // EVENTS_PER_S
    events = max(10, 4000 // interval_ms)
    job = f"streams-{count}"
    options = f"-c {count} -n {count} -s [n={events}:i={interval_ms}:s=200]"
    compare.JOBS[job] = (f"{count} streams", "events", options)
    spent: dict[str, list[float]] = {target.name: [] for target in targets}
    for number in range(ROUNDS):
        for target in targets if number % 2 == 0 else targets[::-1]:
            spent[target.name].append(measure(stage, target, job)["cpu_us"])
    first = spent[targets[0].name]
    return {
        name: {
            "cpu_us": round(statistics.median(each), 2),
            "ratio": round(statistics.median(mine / one for mine, one in zip(each, first, strict=True)), 2),
        }
        for name, each in spent.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the JSON there")
    options = parser.parse_args()
    console = Console(stderr=True)
    results: dict[str, Any] = {}
    tune_memory()
    with Progress(console=console, transient=True) as progress:
        total = sum(map(len, INSIDE.values())) * len(ROUTERS) + len(STREAMS)
        bar = progress.add_task("", total=total)
        for name, values in INSIDE.items():
            for value in values:
                for router in ROUTERS:
                    progress.update(bar, advance=1, description=f"{name} {value} {router}")
                    told = results.setdefault(name, {}).setdefault(str(value), {})
                    told[router] = round(inside(name, value, router), 1)
        with staged(HERE / "build") as stage:
            targets = [TARGETS[name](stage, name) for name in ("nginx", "llmgw")]
            for count in STREAMS:
                progress.update(bar, advance=1, description=f"{count} streams")
                results.setdefault("streams", {})[str(count)] = streams(count, stage, targets)
    for name, curve in results.items():
        shown = Table(title=name.replace("_", " "), title_justify="left")
        shown.add_column("")
        for column in next(iter(curve.values())):
            shown.add_column(f"{column}, µs", justify="right")
        for value, told in curve.items():
            cells = [
                f"{each['cpu_us']} ({each['ratio']})" if isinstance(each, dict) else str(each)
                for each in told.values()
            ]
            shown.add_row(value, *cells)
        console.print(shown)
    keep({"results": results}, options.out)


if __name__ == "__main__":
    main()
