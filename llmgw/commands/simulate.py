"""``llmgw simulate``: routers side by side on a fleet that exists only on paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from llmgw.commands import trial
from llmgw.simulation import workload
from llmgw.simulation.node import NodeSpec
from llmgw.simulation.trace import Span, read_trace, workload_of
from llmgw.simulation.workload import Workload

Generator = Callable[[int, Sequence[NodeSpec], float, int], Workload]

WORKLOADS: Mapping[str, tuple[Generator, float]] = {
    "article": (workload.article, 0.03),
    "mixed": (workload.mixed, 0.7),
    "chat": (workload.chat, 0.6),
    "bursts": (workload.bursts, 0.6),
}
"""Generators by name, each with the load it runs at if nothing is said."""


@click.command()
@click.option(
    "--workload",
    "kind",
    type=click.Choice(list(WORKLOADS)),
    default="article",
    show_default=True,
    help="What callers ask for.",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False),
    help="Requests of a trace instead: Azure 2023 CSV, Mooncake JSON lines, or an access log.",
)
@click.option(
    "--load",
    type=click.FloatRange(0.001, 100),
    help="Share of what the fleet can carry with nothing cached.  [default: the workload's; a trace's pace]",
)
@click.option("--requests", type=click.IntRange(1, 10_000_000), default=2000, show_default=True)
@click.option(
    "--skip", type=click.IntRange(0), default=0, show_default=True, help="Requests of the trace to leave out."
)
@click.option(
    "--longest",
    type=click.IntRange(1),
    default=Span().longest,
    show_default=True,
    help="Longer prompts of the trace are cut to so many tokens.",
)
@trial.options
def simulate(
    kind: str,
    trace: str | None,
    load: float | None,
    requests: int,
    skip: int,
    longest: int,
    **shared: Any,
) -> None:
    """Try routers on a simulated fleet, side by side, on the same requests.

    Times are of requests that were answered; look at the errors too. The same
    seed gives the same figures.
    """
    values = trial.trial_of(shared)
    about: dict[str, Any]
    if trace is not None:
        with trial.told():
            arrivals = read_trace(trace, Span(skip, requests, longest))
            made = workload_of(arrivals, trace, values.settings.seed, values.fleet, load=load)
        about = {"name": trace, "requests": made.size, "load": load, "skip": skip}
    else:
        make, usual = WORKLOADS[kind]
        load = usual if load is None else load
        made = make(values.settings.seed, values.fleet, load, requests)
        about = {"name": kind, "requests": made.size, "load": load}
    trial.run(values, made, about)
