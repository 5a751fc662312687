"""Gateways side by side in front of one mock server: CPU, latency, memory.

    python benchmarks/compare.py [--targets nginx,llmgw] [--jobs event,request] [--rounds 5] [--out FILE.json]

Each round runs every job against every target, in turn and back again, so that what disturbs the
machine disturbs all of them. CPU is that of the gateway's processes alone, as the kernel counts it,
per request or per event; what counts are the ratios to the first target in the same round, and of
these the medians. Prints a table, and the whole as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from targets import HERE, TARGETS, Stage, Target, staged

JOBS: dict[str, tuple[str, str, str]] = {
    "event": ("SSE event, 100 streams at 20 ms", "events", "-c 100 -n 100 -s [n=120:i=20:s=200]"),
    "event-400": ("SSE event, 400 streams at 20 ms", "events", "-c 400 -n 400 -s [n=200:i=20:s=200]"),
    "flood": ("SSE event, as fast as it goes", "events", "-c 16 -n 96 -s [n=500:i=0:s=200]"),
    "request": ("1 KB request, saturated", "ok", "-c 16 -d 2 -w 50"),
    "request-rate": ("1 KB request at 200/s", "ok", "-c 32 -r 200 -d 3 -w 20"),
    "event-few": ("SSE event, 20 streams at 20 ms", "events", "-c 20 -n 20 -s [n=100:i=20:s=200]"),
    "request-slow": ("1 KB request at 50/s", "ok", "-c 32 -r 50 -d 5 -w 10"),
    "request-32k": ("32 KB request, saturated", "ok", "-c 16 -d 2 -b 32768 -w 50"),
    "tls-event": ("SSE event over TLS", "events", "-t -c 100 -n 100 -s [n=200:i=20:s=200]"),
    "tls-request": ("1 KB request over TLS", "ok", "-t -c 16 -d 3 -w 50"),
    "tls-full": ("full TLS handshake and a request", "ok", "-t -o -c 8 -d 3 -w 20"),
    "tls-resumed": ("resumed TLS handshake and a request", "ok", "-t -e -c 8 -d 3 -w 20"),
}
"""What it is, what it is divided by, and the options of the load generator (``:`` for a blank)."""
SHOWN = (
    "latency_p50",
    "added_latency_p50",
    "latency_p99",
    "ttft_p50",
    "transit_p50",
    "transit_p99",
    "gap_p99",
)
ADDED = ("latency_p50", "latency_p99", "ttft_p50", "transit_p50", "transit_p99")
"""What is told as well without the part that ``direct`` takes, when that is among the targets."""


class _Time(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]


_libc = ctypes.CDLL(None, use_errno=True)


def cpu_s(pids: list[int]) -> float:
    """CPU time of processes, to the nanosecond (clock_getcpuclockid(3))."""
    total = 0.0
    for pid in pids:
        told = _Time()
        if not _libc.clock_gettime((~pid << 3) | 2, ctypes.byref(told)):
            total += told.s + told.ns / 1e9
    return total


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


def pss_kib(pids: list[int]) -> int:
    """Memory of processes, what they share counted once."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def measure(stage: Stage, target: Target, job: str) -> dict[str, float]:
    """One job once.

    :return: what the load generator told, ``cpu_us`` for each unit of the job, ``pss_kib``.
    :raise RuntimeError: less than all of it was answered well.
    """
    _, unit, options = JOBS[job]
    port = target.tls_port if job.startswith("tls") else target.port
    command = [str(stage.folder / "load"), "-p", str(port)]
    command += [each.replace(":", " ") if each.startswith("[") else each for each in options.split()]
    for header in target.headers:
        command += ["-H", header]
    pids = family(target.process.pid)
    before = cpu_s(pids)
    told = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    used_s = cpu_s(pids) - before
    result: dict[str, float] = json.loads(told.stdout)
    if result["bad"] or result["errors"] or result["unfinished"]:
        raise RuntimeError(f"{target.name}: {job}: {told.stdout.strip()}")
    result["cpu_us"] = used_s * 1e6 / result[unit]
    result["busy"] = used_s / result["seconds"]
    result["pss_kib"] = pss_kib(pids)
    return result


def summary(rounds: list[dict[str, float]], reference: list[dict[str, float]]) -> dict[str, float]:
    """Medians; ``ratio`` is that of each round's CPU to the reference's."""
    names = sorted(set.intersection(*(set(each) for each in rounds)))
    told = {name: round(statistics.median(each[name] for each in rounds), 3) for name in names}
    ratios = [mine["cpu_us"] / other["cpu_us"] for mine, other in zip(rounds, reference, strict=False)]
    told["ratio"] = round(statistics.median(ratios), 3)
    told["ratio_least"], told["ratio_most"] = round(min(ratios), 3), round(max(ratios), 3)
    return told


def table(job: str, results: dict[str, dict[str, Any]]) -> Table:
    """One job's results."""
    shown = Table(title=f"{job}: {JOBS[job][0]}", title_justify="left")
    figures = [name for name in SHOWN if any(name in jobs.get(job, ()) for jobs in results.values())]
    for name in ("", "CPU µs", "ratio", "least–most", *(f"{name} ms" for name in figures)):
        shown.add_column(name.replace("_", " "), justify="right" if name else "left")
    for name, jobs in results.items():
        told = jobs.get(job)
        if told is None:
            continue
        if "failed" in told:
            shown.add_row(name, told["failed"][:60])
            continue
        spread = f"{told['ratio_least']:.2f}–{told['ratio_most']:.2f}"
        rest = [f"{told[each] / 1000:.3g}" if each in told else "" for each in figures]
        shown.add_row(name, f"{told['cpu_us']:.1f}", f"{told['ratio']:.2f}", spread, *rest)
    return shown


def keep(found: dict[str, Any], out: Path | None) -> None:
    """Write what was found, with the command and the machine, to ``out`` or to standard output."""
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    machine = f"{os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}"
    text = json.dumps({"command": command, "machine": machine, **found}, indent=1)
    if out:
        out.write_text(text + "\n")
    else:
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    targets = f"of {', '.join(TARGETS)}; the first is the measure"
    parser.add_argument("--targets", default="nginx,llmgw", help=targets)
    usual = "event,request,request-rate,request-32k"
    parser.add_argument("--jobs", default=usual, help=f"of {', '.join(JOBS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the JSON there")
    options = parser.parse_args()
    jobs = options.jobs.split(",")
    console = Console(stderr=True)
    with staged(HERE / "build") as stage:
        running: list[Target] = []
        for name in options.targets.split(","):
            try:
                running.append(TARGETS[name](stage, name))
            except RuntimeError as error:
                console.print(f"left out: {error}")
        time.sleep(1.0)
        raw: dict[str, dict[str, list[dict[str, float]]]] = {target.name: {} for target in running}
        failed: dict[tuple[str, str], str] = {}
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("", total=len(jobs) * options.rounds * len(running))
            for job in jobs:
                for number in range(options.rounds):
                    for target in running if number % 2 == 0 else running[::-1]:
                        progress.update(bar, advance=1, description=f"{job} {target.name}")
                        if (target.name, job) in failed or (job.startswith("tls") and not target.tls_port):
                            continue
                        try:
                            found = measure(stage, target, job)
                            raw[target.name].setdefault(job, []).append(found)
                        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                            failed[target.name, job] = str(error)
    first = running[0].name
    results: dict[str, dict[str, Any]] = {
        name: {job: summary(rounds, raw[first][job]) for job, rounds in told.items() if job in raw[first]}
        for name, told in raw.items()
    }
    for jobs_of in results.values():
        for job, told in jobs_of.items():
            alone = results.get("direct", {}).get(job)
            if alone is not None:
                told |= {
                    f"added_{each}": round(told[each] - alone[each], 1) for each in ADDED if each in told
                }
    for (name, job), why in failed.items():
        results[name][job] = {"failed": why}
    for job in jobs:
        console.print(table(job, results))
    keep({"rounds": options.rounds, "results": results}, options.out)


if __name__ == "__main__":
    main()
