"""``llmgw check FILE``: everything that can be wrong before the gateway starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from llmgw.config import Config, load_config
from llmgw.errors import ConfigError, PluginError


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--offline", is_flag=True, help="Contact nobody: judge the file alone.")
@click.option("--strict", is_flag=True, help="Exit status 1 for warnings and findings too.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def check(file: str, offline: bool, strict: bool, as_json: bool) -> None:
    """Read FILE, build every plugin it names, ask every discovery and backend, and say what is wrong.

    Nothing is started. Exit status 0 when the gateway would start, 1 when it
    would not; a backend that does not answer keeps no gateway from starting.
    """
    from twisted.internet import reactor

    from llmgw.verify import verify, with_what_else

    faults: list[str] = []
    warnings: Sequence[str] = ()
    config: Config | None = None
    try:
        config = load_config(file)
        warnings = config.warnings
        warnings = verify(config, reactor)
    except ConfigError as error:
        faults = [str(fault) for fault in with_what_else(error, reactor).faults]
    except PluginError as error:
        faults = [str(error)]
    named: Sequence[Any] = ()
    findings: Sequence[Any] = ()
    if not (offline or faults or config is None):
        named, findings = _look(config, quiet=as_json)
    if as_json:
        told = {"file": file, "good": not faults, "faults": faults, "warnings": list(warnings)}
        found = {source.where: [backend.id for backend in source.backends] for source in named}
        click.echo(json.dumps({**told, "discovered": found, "findings": msgspec.to_builtins(findings)}))
    else:
        for fault in faults:
            click.echo(f"{file}: {fault}", err=True)
        for warning in warnings:
            click.echo(f"{file}: warning: {warning}", err=True)
        for source in named:
            if source.told:
                click.echo(f"{file}: {source}")
        for finding in findings:
            click.echo(f"{file}: {finding}", err=True)
        if not faults:
            count = len(findings)
            told_of = "" if not count else f", with {count} finding{'' if count == 1 else 's'}"
            click.echo(f"{file}: good{told_of}")
    sys.exit(1 if faults or (strict and (warnings or findings)) else 0)


def _look(config: Config, *, quiet: bool) -> tuple[Sequence[Any], Sequence[Any]]:
    """What discoveries name, and all findings."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from llmgw.commands.sources import ask_sources
    from llmgw.commands.surroundings import look

    shown = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    hidden = quiet or not shown.is_terminal
    with Progress(*columns, console=shown, transient=True, disable=hidden) as progress:
        task = progress.add_task("asking discoveries", total=None)
        named = ask_sources(config)
        count = len(config.backends) + sum(len(source.backends) for source in named)
        progress.update(task, description="asking backends", total=count)
        return named, look(config, named, lambda: progress.advance(task))
