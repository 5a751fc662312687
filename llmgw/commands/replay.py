"""``llmgw replay``: what another router would have made of yesterday's requests."""

from __future__ import annotations

from typing import Any

import click

from llmgw.commands import trial
from llmgw.simulation.logged import logged
from llmgw.simulation.trace import Span, read_trace, workload_of


@click.command()
@click.argument("access_log", type=click.Path(dir_okay=False))
@click.option(
    "--speed",
    type=click.FloatRange(0, 1e6, min_open=True),
    default=1.0,
    show_default=True,
    help="So many times the log's own pace.",
)
@click.option("--requests", type=click.IntRange(1, 10_000_000), help="At most so many.  [default: all]")
@click.option("--skip", type=click.IntRange(0), default=0, show_default=True, help="Leave out so many first.")
@trial.options
def replay(access_log: str, speed: float, requests: int | None, skip: int, **shared: Any) -> None:
    """Run the requests of ACCESS_LOG through routers on a simulated fleet.

    Take --fleet-from the gateway that wrote the log, and its servers are
    simulated at the speeds it has measured. Which prompts began alike is not in
    the log; it is guessed from the tokens that were cached. The first row is what
    really happened: the router that wrote the log should come near to it.
    """
    values = trial.trial_of(shared)
    with trial.told():
        arrivals = read_trace(access_log, Span(skip, requests, 1_000_000))
        was = logged(access_log, Span(skip, requests), values.spike_s) if speed == 1.0 else None
        made = workload_of(arrivals, access_log, values.settings.seed, values.fleet, speed=speed)
    about = {"name": access_log, "requests": made.size, "speed": speed, "skip": skip}
    trial.run(values, made, about, was)
