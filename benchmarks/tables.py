"""The tables of docs/performance.md, from the results that are kept: what is quoted is what was measured.

    python benchmarks/tables.py [--check]

Each table stands in the page between ``<!-- NAME -->`` and ``<!-- end -->`` and is written anew there.
``--check`` writes nothing and fails when the page tells something else than the results.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare import JOBS

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
CLOCK = ("latency_p50", "added_latency_p50", "added_transit_p50")


def _results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "results" / f"{name}.json").read_text())["results"]
    return found


def _rows(*rows: list[str]) -> str:
    head, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rest))


def _figure(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}g}" if value < 10**digits else f"{value:,.0f}"


def beside(name: str) -> str:
    """CPU of each gateway per unit of work, and its ratio to the first."""
    told = {target: jobs for target, jobs in _results(name).items() if target != "direct"}
    jobs = list(dict.fromkeys(job for each in told.values() for job in each))
    rows = [["µs of CPU (ratio)", *told]]
    for job in jobs:
        cells = []
        for each in told.values():
            figures = each.get(job, {})
            known = "cpu_us" in figures
            without = "none was answered" if "failed" in figures else ""
            cells.append(
                f"{_figure(figures['cpu_us'])} ({_figure(figures['ratio'], 2)})" if known else without
            )
        rows.append([JOBS[job][0], *cells])
    return _rows(*rows)


def added(name: str) -> str:
    """Milliseconds that each gateway adds to the mock server's own answer."""
    told = {target: jobs for target, jobs in _results(name).items() if target != "direct"}
    rows = [["added, ms", *told]]
    for job, figure, what in (
        ("request-rate", "added_latency_p50", "request at 200/s, median"),
        ("event", "added_ttft_p50", "time to first token, 100 streams that begin at once, median"),
        ("event", "added_transit_p50", "event, median"),
        ("event", "added_transit_p99", "event, p99"),
    ):
        cells = [each.get(job, {}).get(figure) for each in told.values()]
        rows.append([what, *("" if cell is None else f"{cell / 1000:.2f}" for cell in cells)])
    return _rows(*rows)


def inside(name: str) -> str:
    """One of the curves that are taken inside the process."""
    curve = _results("curves")[name]
    routers = list(next(iter(curve.values())))
    label = {"backends": "backends", "keys": "keys", "prompt_bytes": "bytes of prompt"}[name]
    rows = [[label, *(f"`{router}`, µs" for router in routers)]]
    return _rows(*rows, *([f"{int(value):,}", *map(_figure, told.values())] for value, told in curve.items()))


def streams() -> str:
    """The curve of an event's cost with the number of streams."""
    curve = _results("curves")["streams"]
    targets = list(next(iter(curve.values())))
    rows = [["streams", *(f"{target}, µs (ratio)" for target in targets)]]
    for count, told in curve.items():
        cells = (f"{_figure(each['cpu_us'])} ({_figure(each['ratio'], 2)})" for each in told.values())
        rows.append([f"{int(count):,}", *cells])
    return _rows(*rows)


TABLES: dict[str, Callable[[], str]] = {
    "gateways": lambda: beside("gateways"),
    "added": lambda: added("gateways"),
    "litellm": lambda: beside("litellm"),
    "ways": lambda: beside("ways"),
    "tls": lambda: beside("tls"),
    "backends": lambda: inside("backends"),
    "keys": lambda: inside("keys"),
    "prompts": lambda: inside("prompt_bytes"),
    "streams": streams,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page differs")
    options = parser.parse_args()
    before = PAGE.read_text()
    after = before
    for name, make in TABLES.items():
        found = re.search(rf"<!-- {name} -->\n.*?<!-- end -->", after, re.DOTALL)
        if found is not None:
            after = after.replace(found[0], f"<!-- {name} -->\n\n{make()}\n\n<!-- end -->")
    if options.check:
        raise SystemExit("docs/performance.md differs from benchmarks/results" if after != before else 0)
    PAGE.write_text(after)


if __name__ == "__main__":
    main()
