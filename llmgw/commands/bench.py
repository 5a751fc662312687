"""``llmgw bench``: what callers of a real server see, and which router serves them best."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import click
from msgspec import structs

from llmgw.bench import callers
from llmgw.bench.callers import Sample, Target
from llmgw.bench.load import LOADS, marked
from llmgw.commands.trial import told
from llmgw.simulation.report import percentile

COMPARED = ("expected-ttft", "weighted-least-connections", "round-robin")


@click.command()
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option(
    "--compare-routers",
    "compare",
    is_flag=True,
    help="One gateway per router before the URLs (URL[,weight=N]), or before three real servers.",
)
@click.option(
    "--router",
    "routers",
    multiple=True,
    help=f"To compare; may be repeated.  [default: {', '.join(COMPARED)}]",
)
@click.option(
    "--load", "loads", multiple=True, type=click.Choice(list(LOADS)), help="What to ask.  [default: all]"
)
@click.option(
    "--requests",
    type=click.IntRange(1, 1_000_000),
    default=60,
    show_default=True,
    help="Per load and repetition.",
)
@click.option(
    "--streams", type=click.IntRange(1, 1000), default=4, show_default=True, help="Callers at once."
)
@click.option("--repetitions", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option("--model", help="Model to ask for.  [default: the first one named]")
@click.option(
    "--key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the API key; every URL is sent it.",
)
@click.option(
    "--ca-file",
    type=click.Path(exists=True, dir_okay=False),
    help="Authorities for its certificate, in place of the system's.",
)
@click.option("--insecure", is_flag=True, help="Do not verify the certificate.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def bench(
    urls: tuple[str, ...],
    compare: bool,
    routers: tuple[str, ...],
    loads: tuple[str, ...],
    requests: int,
    streams: int,
    repetitions: int,
    model: str | None,
    key_file: Path | None,
    ca_file: str | None,
    insecure: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Measure servers or gateways by their URLs, or routers side by side.

    Every target gets the same questions, in turn and in changing order, so that what
    the machine does meanwhile hits all alike. Each begins with the target's name, so
    that nobody finds in a server's cache what another has asked.
    """
    if not compare and not urls:
        raise click.UsageError("give a URL or more, or --compare-routers")
    key = key_file.read_text().strip() if key_file is not None else ""
    with told(), ExitStack() as ends:
        if compare:
            targets, shares = _gateways(ends, urls, routers or COMPARED, model)
        else:
            targets = {url: Target(url, model or "", key, insecure, ca_file) for url in urls}
            shares = None
        for name, target in targets.items():
            if not target.model:
                targets[name] = structs.replace(target, model=callers.first_model(target))
        found = _measure(targets, loads or tuple(LOADS), requests, streams, repetitions, seed)
        answered = shares() if shares is not None else {}
    rows = [
        {"target": name, "load": load, **figures(samples)}
        for load, by_target in found.items()
        for name, samples in by_target.items()
    ]
    if as_json:
        settings = {"requests": requests, "streams": streams, "repetitions": repetitions, "seed": seed}
        click.echo(json.dumps({"settings": settings, "rows": rows, "answered_by": answered}, indent=2))
    else:
        _print(rows, answered)


def figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Seconds, of those that were answered."""
    good = [each for each in samples if not each.error]
    return {
        "requests": len(samples),
        "ttft_s": _spread([each.ttft_s for each in good if each.ttft_s is not None]),
        "e2e_s": _spread([each.e2e_s for each in good]),
        "errors": dict(Counter(each.error for each in samples if each.error)),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    mean = statistics.fmean(ordered) if ordered else 0.0
    return {"mean": mean, **{f"p{share}": percentile(ordered, share / 100) for share in (50, 95, 99)}}


def _gateways(
    ends: ExitStack, urls: Sequence[str], routers: Sequence[str], model: str | None
) -> tuple[dict[str, Target], Callable[[], dict[str, dict[str, int]]]]:
    """Start what is to be compared; ``ends`` ends it."""
    try:
        from llmgw.bench.gateways import SERVERS, Backend, Gateway
        from llmgw.demo.fleet import Fleet
        from llmgw.demo.layout import ensure_model
        from llmgw.demo.processes import StartError
    except ImportError as error:
        raise click.ClickException(f"{error}; pip install 'llmgw[demo]'") from None
    folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
    try:
        if urls:
            backends = [_backend(number, url) for number, url in enumerate(urls)]
        else:
            fleet = Fleet(ensure_model(folder), folder, SERVERS)
            fleet.start()
            ends.callback(fleet.stop)
            backends = [Backend(plan.id, fleet.urls[plan.id], plan.weight) for plan in SERVERS]
        gateways = {}
        for number, router in enumerate(routers):
            gateways[router] = gateway = Gateway(folder, number, router, backends)
            ends.callback(gateway.stop)
    except ImportError as error:
        raise click.ClickException(f"{error}; pip install 'llmgw[demo]'") from None
    except StartError as error:
        raise click.ClickException(str(error)) from None
    targets = {name: Target(gateway.url, model or "") for name, gateway in gateways.items()}
    return targets, lambda: {name: gateway.shares() for name, gateway in gateways.items()}


def _backend(number: int, text: str) -> Any:
    from llmgw.bench.gateways import Backend

    url, _, weight = text.partition(",weight=")
    try:
        return Backend(f"backend-{number + 1}", url, float(weight or 1))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not URL[,weight=NUMBER]", param_hint="URL") from None


def _measure(
    targets: Mapping[str, Target],
    loads: Sequence[str],
    requests: int,
    streams: int,
    repetitions: int,
    seed: int,
) -> dict[str, dict[str, list[Sample]]]:
    found: dict[str, dict[str, list[Sample]]] = {load: {name: [] for name in targets} for load in loads}
    total = len(loads) * repetitions * len(targets) * requests
    with _progress(total) as advance:
        for load in loads:
            for repetition in range(repetitions):
                names = list(targets)
                names = names[repetition % len(names) :] + names[: repetition % len(names)]
                for name in names:
                    made = LOADS[load](Random(f"{seed} {load} {repetition}"), requests)
                    made = marked(made, f"{repetition} {name}")
                    found[load][name] += callers.run(targets[name], made, streams, advance)
    return found


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], object]]:
    from rich.console import Console
    from rich.progress import Progress

    shown = Console(stderr=True)
    with Progress(console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task("asking", total=total)
        yield lambda: progress.advance(task)


def _print(rows: Sequence[Mapping[str, Any]], answered: Mapping[str, Mapping[str, int]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "target", "load", *("TTFT mean", "p50", "p95", "p99", "e2e mean", "p99", "errors"), box=None
    )
    for row in rows:
        ttft, e2e = row["ttft_s"], row["e2e_s"]
        times = [ttft["mean"], ttft["p50"], ttft["p95"], ttft["p99"], e2e["mean"], e2e["p99"]]
        errors = ", ".join(f"{what} {count}" for what, count in row["errors"].items())
        table.add_row(row["target"], row["load"], *(f"{each * 1000:,.0f} ms" for each in times), errors)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    for name, shares in answered.items():
        console.print(
            f"{name}: " + ", ".join(f"{backend} {count}" for backend, count in sorted(shares.items()))
        )
