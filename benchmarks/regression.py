"""Whether everyday work has become dearer since the figures that are kept: a report, never a failure.

It is a request, a long one, an event of a stream, the look-up of a key, and a request of the simulator.

    python benchmarks/regression.py [--keep]

Times inside the process (``inside.py``) are divided by those of a fixed piece of Python that is run
between them, so that a slower machine, or a busy one, slows both: the quotients move by some percent
between machines and runs, and what has changed by more than a fifth is marked. Builds of Python differ
by more than that, so each has figures of its own. ``--keep`` makes
today's figures those that are kept, in ``results/regression.json``; a change that is meant keeps them
in its own commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from inside import Rig, least_us
from rich.console import Console
from rich.table import Table

from llmgw.access.credentials import ApiKey
from llmgw.access.keys import KeysChecker
from llmgw.routing.weighted_least_connections import WeightedLeastConnections
from llmgw.simulation.fleets import mixed_fleet
from llmgw.simulation.run import simulate
from llmgw.simulation.workload import mixed
from llmgw.tap import tune_memory

KEPT = Path(__file__).parent / "results" / "regression.json"
ROUNDS = 9
MARKED = 0.2


class _Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, value: int) -> int:
        self.total += value
        return self.total


def fixed() -> None:
    """Some work as Python's everyday is: calls, attributes, a dictionary, bytes, JSON."""
    counter = _Counter()
    seen: dict[str, int] = {}
    for number in range(60):
        seen[f"k{number % 7}"] = counter.add(number)
    json.loads(json.dumps(seen))
    b"\r\n".join([b"%b: %d" % (name.encode(), value) for name, value in seen.items()])


def simulated() -> None:
    """100 requests of a mixed load on unlike machines."""
    fleet = mixed_fleet()
    simulate(mixed(1, fleet, 0.7, 100), fleet, lambda _: WeightedLeastConnections())


def quotients() -> dict[str, float]:
    """What each piece of work costs, in multiples of :func:`fixed`."""
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(3)]
        plain, stream, long = (
            Rig(folders[0]),
            Rig(folders[1], stream=True),
            Rig(folders[2], prompt_bytes=32_768),
        )
        stream.begin_stream()
        key, checker = ApiKey(plain.secret, "127.0.0.1"), KeysChecker(os.path.join(folders[0], "keys.toml"))
        work: dict[str, tuple[Callable[[], object], int]] = {
            "request": (plain.ask, 1000),
            "request of 32 KB": (long.ask, 1000),
            "event": (stream.event, 20_000),
            "key": (lambda: checker.requestAvatarId(key), 20_000),
            "100 requests simulated": (simulated, 5),
        }
        taken: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(ROUNDS):
            for name, (once, times) in work.items():
                base_us = least_us(fixed, 1000)
                taken[name].append(least_us(once, times) / base_us)
        plain.check()
    return {name: round(statistics.median(each), 3) for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="make today's figures those that are kept")
    options = parser.parse_args()
    tune_memory()
    now = quotients()
    python = f"{platform.python_version()}, {platform.python_compiler()}"
    all_kept: dict[str, dict[str, float]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept = all_kept.get(python, {})
    shown = Table(
        title=f"cost with Python {python}, in multiples of a fixed piece of it", title_justify="left"
    )
    for column in ("", "kept", "now", "change"):
        shown.add_column(column, justify="right" if column else "left")
    for name, value in now.items():
        before = kept.get(name)
        change = "" if before is None else f"{value / before - 1:+.0%}"
        if before is not None and value / before - 1 > MARKED:
            change += "  dearer: see request_path.py --profile"
        shown.add_row(name, "" if before is None else f"{before:.3f}", f"{value:.3f}", change)
    Console().print(shown)
    if options.keep:
        KEPT.write_text(json.dumps(all_kept | {python: now}, indent=1) + "\n")


if __name__ == "__main__":
    main()
