"""What ``llmgw simulate`` and ``llmgw replay`` share: options, runs, and the table of figures."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec import Struct, to_builtins

from llmgw import plugins
from llmgw.commands.admin import AdminListener, Unreachable
from llmgw.errors import ConfigError, ConfigFault, PluginError
from llmgw.simulation import plot
from llmgw.simulation.faults import FAULTS, Fault, parse_fault
from llmgw.simulation.fleets import BUILT_IN, fleet_of_state, parse_fleet
from llmgw.simulation.logged import AS_LOGGED
from llmgw.simulation.node import NodeSpec
from llmgw.simulation.report import SPIKE_S, summary
from llmgw.simulation.run import Result, Settings, simulate
from llmgw.simulation.workload import Workload

Command = TypeVar("Command", bound=Callable[..., Any])


class RouterOption(Struct, frozen=True):
    """One ``--router``.

    :param text: as given, and how the table calls it.
    """

    text: str
    name: str
    options: Mapping[str, Any]

    def build(self, seed: int) -> Any:
        """:raise ConfigError: its options are wrong. :raise PluginError: there is no such router."""
        if "seed" not in self.options:
            try:
                return plugins.build("router", self.name, {**self.options, "seed": seed})
            except ConfigError:
                pass  # it has no dice, or its other options are wrong, which the next line tells
        return plugins.build("router", self.name, self.options, where=f"--router {self.text}")


class Trial(Struct, frozen=True):
    """The values of the options that both commands have."""

    fleet: tuple[NodeSpec, ...]
    fleet_name: str
    routers: tuple[RouterOption, ...]
    settings: Settings
    faults: tuple[Fault, ...]
    spike_s: float
    picture: Path | None
    as_json: bool


def options(command: Command) -> Command:
    """Adds the options that both commands have; :func:`trial_of` reads them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS: Sequence[Callable[[Any], Any]] = (
    click.option(
        "--fleet",
        default="article",
        show_default=True,
        help=f"A TOML file, or one that is built in: {', '.join(BUILT_IN)}.",
    ),
    click.option(
        "--fleet-from",
        metavar="URL",
        help="Take the fleet and its speeds from a running gateway's admin URL.",
    ),
    click.option(
        "--token-file",
        type=click.Path(dir_okay=False, exists=True, path_type=Path),
        help="The admin token for --fleet-from.",
    ),
    click.option(
        "--router",
        "routers",
        multiple=True,
        metavar="NAME[:KEY=VALUE,...]",
        help="A router to try, such as adaptive:alpha=0.5; may be repeated. All installed ones if absent.",
    ),
    click.option(
        "--gateways",
        type=click.IntRange(1, 64),
        default=1,
        show_default=True,
        help="How many share the fleet.",
    ),
    click.option(
        "--cap",
        default="slots",
        show_default=True,
        help="One gateway's requests in flight at one node: slots, none or a number.",
    ),
    click.option(
        "--max-wait",
        "max_wait_s",
        type=click.FloatRange(0, 86_400),
        default=0.0,
        show_default=True,
        help="Seconds that a request may wait in the gateway for a free slot.",
    ),
    click.option("--slot-choice", is_flag=True, help="Let routers choose the server's slot (id_slot)."),
    click.option(
        "--fault",
        "faults",
        multiple=True,
        metavar="'NAME KEY=VALUE ...'",
        help=f"Something that goes wrong; may be repeated: {', '.join(FAULTS)}.",
    ),
    click.option("--seed", type=click.IntRange(0, 2**63), default=1, show_default=True, help="Of all dice."),
    click.option(
        "--spike-ms",
        type=click.FloatRange(0, min_open=True),
        default=SPIKE_S * 1000.0,
        show_default=True,
        help="A longer time to first token counts as a spike.",
    ),
    click.option(
        "--plot",
        "picture",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write a picture: .png or .svg (extra `plot`).",
    ),
    click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table."),
)


def trial_of(values: Mapping[str, Any]) -> Trial:
    """Read the shared options.

    :raise click.ClickException: one of them is wrong.
    """
    picture: Path | None = values["picture"]
    if picture is not None and picture.suffix.lstrip(".").lower() not in plot.FORMATS:
        raise click.BadParameter(f"must end in .{' or .'.join(plot.FORMATS)}", param_hint="--plot")
    if picture is not None:
        try:
            import matplotlib.figure  # noqa: F401  # told now, and not after minutes
        except ImportError as error:
            raise click.ClickException(f"--plot: {error}; pip install 'llmgw[plot]'") from None
    with told():
        fleet, name = _fleet(values["fleet"], values["fleet_from"], values["token_file"])
        given = tuple(map(_router, values["routers"]))
        routers = given or tuple(RouterOption(each, each, {}) for each in plugins.installed("router"))
        for router in routers:
            router.build(0)
        faults = tuple(map(parse_fault, values["faults"]))
    return Trial(
        fleet,
        name,
        routers,
        Settings(
            gateways=values["gateways"],
            cap=_cap(values["cap"]),
            max_wait_s=values["max_wait_s"],
            slot_choice=values["slot_choice"],
            seed=values["seed"],
        ),
        faults,
        values["spike_ms"] / 1000.0,
        picture,
        values["as_json"],
    )


@contextmanager
def told() -> Iterator[None]:
    """Turns what is wrong into one line and exit status 1."""
    try:
        yield
    except (ConfigError, PluginError) as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise click.ClickException(f"{place}{error.strerror or error}") from None


def run(
    trial: Trial,
    workload: Workload,
    about: Mapping[str, Any],
    logged: Mapping[str, Any] | None = None,
) -> None:
    """Run every router on ``workload``, and show the figures.

    :param about: what the JSON tells of the workload.
    :param logged: what really became of it, if that is known.
    """
    results: dict[str, Result] = {}
    seconds: dict[str, float] = {}
    with told():
        _run_all(trial, workload, results, seconds)
    rows = {name: summary(result, trial.spike_s) for name, result in results.items()}
    if trial.as_json:
        settings = to_builtins(trial.settings)
        fleet = [to_builtins(node) for node in trial.fleet]
        told_rows = [
            {"router": name, **row, "simulated_in_s": round(seconds[name], 3)} for name, row in rows.items()
        ]
        whole = {"workload": about, "fleet": fleet, "settings": settings, "routers": told_rows}
        if logged is not None:
            whole["logged"] = logged
        click.echo(json.dumps(whole, indent=2))
    else:
        _print(trial, rows, about, logged)
        if logged is not None:
            _tell_other_fleet(trial, logged)
    if trial.picture is not None:
        title = f"{about['name']}, {workload.size} requests, fleet {trial.fleet_name}"
        with told():
            plot.draw(results, str(trial.picture), title)
        click.echo(f"Picture: {trial.picture}", err=True)


# --- the options --------------------------------------------------------------


def _fleet(name: str, url: str | None, token_file: Path | None) -> tuple[tuple[NodeSpec, ...], str]:
    if url is not None:
        return fleet_of_state(_state(url, token_file), url), url
    if name in BUILT_IN:
        return BUILT_IN[name], name
    return parse_fleet(Path(name).read_text("utf-8", "replace"), name), name


def _state(url: str, token_file: Path | None) -> Mapping[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ConfigError([ConfigFault("--fleet-from", "must be an http:// or https:// URL")])
    listener = AdminListener(url.rstrip("/").removesuffix("/api/state"), token_file)
    try:
        state = listener.get("/api/state")
    except Unreachable as error:
        raise ConfigError([ConfigFault("--fleet-from", error.message)]) from None
    if not isinstance(state, dict):
        raise ConfigError([ConfigFault("--fleet-from", f"{url} did not answer with a JSON object")])
    return state


def _router(text: str) -> RouterOption:
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        try:
            options.update(tomllib.loads(pair))
        except tomllib.TOMLDecodeError:
            key, equals, value = pair.partition("=")
            if not equals:
                what = f"{pair!r} is not KEY=VALUE"
                raise ConfigError([ConfigFault(f"--router {text}", what)]) from None
            options[key.strip()] = value.strip()
    return RouterOption(text, name, options)


def _cap(text: str) -> str | int:
    if text in ("slots", "none"):
        return text
    if text.isascii() and text.isdigit() and 0 < int(text) < 1_000_000:
        return int(text)
    raise click.BadParameter("must be slots, none or a number above 0", param_hint="--cap")


# --- runs and figures ---------------------------------------------------------


def _run_all(trial: Trial, workload: Workload, results: dict[str, Result], seconds: dict[str, float]) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress:
        for router in trial.routers:
            task = progress.add_task(router.text, total=workload.size)
            began = time.perf_counter()
            results[router.text] = simulate(
                workload,
                trial.fleet,
                router.build,
                trial.settings,
                faults=trial.faults,
                progress=lambda ended, task=task: progress.update(task, completed=ended),  # type: ignore[misc]
            )
            seconds[router.text] = time.perf_counter() - began
            progress.update(task, completed=workload.size)


def _print(
    trial: Trial,
    simulated: Mapping[str, Mapping[str, Any]],
    about: Mapping[str, Any],
    logged: Mapping[str, Any] | None,
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A pipe has no width; 80 columns would fold the figures that somebody greps for.
    console = Console(width=None if sys.stdout.isatty() else 220, highlight=False)
    words = ", ".join(f"{key} {value}" for key, value in about.items() if value not in (None, ""))
    faults = "".join(f", fault {fault.text!r}" for fault in trial.faults)
    console.print(Text(f"{words}, fleet {trial.fleet_name}, seed {trial.settings.seed}{faults}"))
    table = Table("router", box=None, pad_edge=False)
    for heading in (
        "TTFT mean",
        "p50",
        "p95",
        "p99",
        "e2e mean",
        "p99",
        "cached",
        "spikes",
        "retries",
        "errors",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("share of the nodes")
    best = min((row["ttft_s"]["mean"] for row in simulated.values() if not row["errors"]), default=None)
    rows = dict(simulated) if logged is None else {AS_LOGGED: logged, **simulated}
    for name, row in rows.items():
        ttft, e2e, errors = row["ttft_s"], row["e2e_s"], sum(row["errors"].values())
        table.add_row(
            Text(name, "dim" if name == AS_LOGGED else "bold" if ttft["mean"] == best else ""),
            *(_ms(ttft[key]) for key in ("mean", "p50", "p95", "p99")),
            *(f"{e2e[key]:.2f} s" for key in ("mean", "p99")),
            f"{row['cache_hit']:.0%}",
            str(row["spikes"]),
            str(row["retries"]),
            Text(str(errors), "red" if errors else ""),
            Text(_shares(row["share"])),
        )
    console.print(table)
    for name, row in rows.items():
        if row["errors"]:
            kinds = ", ".join(f"{number} {kind}" for kind, number in row["errors"].items())
            console.print(Text(f"{name}: {kinds}", "red"))
        if row["router_faults"]:
            console.print(Text(f"{name} raised {row['router_faults']} times: {row['router_fault']}", "red"))


def _tell_other_fleet(trial: Trial, logged: Mapping[str, Any]) -> None:
    """A table that puts what one fleet did beside what another would do is easily misread."""
    unknown = sorted(set(logged["share"]) - {node.id for node in trial.fleet})
    if unknown:
        shown = ", ".join(unknown[:4]) + (", …" if len(unknown) > 4 else "")
        click.echo(
            f"{AS_LOGGED} is another fleet ({shown}) than {trial.fleet_name}: the rows do not compare. "
            "--fleet-from URL takes the fleet of the gateway that wrote the log.",
            err=True,
        )


def _ms(seconds: float) -> str:
    if seconds < 1.0:
        return f"{seconds * 1000.0:.1f} ms"
    return f"{seconds * 1000.0:,.0f} ms" if seconds < 10.0 else f"{seconds:,.1f} s"


def _shares(shares: Mapping[str, float], most: int = 4) -> str:
    largest = sorted(shares.items(), key=lambda each: -each[1])
    told_shares = [f"{node} {share:.0%}" for node, share in largest[:most]]
    return ", ".join(told_shares) + (f", {len(largest) - most} more" if len(largest) > most else "")
