"""``llmgw check FILE``: everything that can be wrong before the gateway starts."""

from __future__ import annotations

import json
import sys

import click

from llmgw.config import load_config
from llmgw.errors import ConfigError, PluginError


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def check(file: str, as_json: bool) -> None:
    """Read FILE, build every plugin it names, and say what is wrong.

    Nothing is contacted and nothing is started. Exit status 0 when the gateway
    would start, 1 when it would not.
    """
    from twisted.internet import reactor

    from llmgw.service import GatewayService

    faults: list[str] = []
    warnings: list[str] = []
    try:
        config = load_config(file)
        warnings = list(config.warnings)
        warnings = GatewayService(config, reactor).warnings
    except ConfigError as error:
        faults = [str(fault) for fault in error.faults]
    except PluginError as error:
        faults = [str(error)]
    if as_json:
        click.echo(json.dumps({"file": file, "good": not faults, "faults": faults, "warnings": warnings}))
    else:
        for fault in faults:
            click.echo(f"{file}: {fault}", err=True)
        for warning in warnings:
            click.echo(f"{file}: warning: {warning}", err=True)
        if not faults:
            click.echo(f"{file}: good")
    sys.exit(1 if faults else 0)
