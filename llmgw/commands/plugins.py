"""``llmgw plugins``: what is installed, from where, and what is wrong with it."""

from __future__ import annotations

import json
import sys

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text
from twisted.logger import globalLogBeginner

from llmgw import plugins as registry


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def plugins(as_json: bool) -> None:
    """List installed plugins by kind.

    Exit status is 1 if a dropin cannot be imported or a plugin cannot be used.
    """
    # Until logging begins Twisted prints each broken dropin's traceback to
    # stderr; we tell the same in one line.
    globalLogBeginner.beginLoggingTo((), discardBuffer=True, redirectStandardIO=False)
    found, broken = registry.describe(), registry.broken()
    if as_json:
        click.echo(json.dumps({"plugins": msgspec.to_builtins(found), "broken": msgspec.to_builtins(broken)}))
    else:
        _print(found, broken)
    if broken or any(plugin.fault for plugin in found):
        sys.exit(1)


def _print(found: list[registry.PluginInfo], broken: list[registry.BrokenDropin]) -> None:
    console = Console()
    for kind in registry.KINDS:
        rows = [plugin for plugin in found if plugin.kind == kind]
        table = Table(title=kind, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for heading in ("name", "description", "from"):
            table.add_column(heading, overflow="fold")
        # Text, not markup: a plugin's words are not ours to interpret.
        for plugin in rows:
            style = "red" if plugin.fault else ""
            table.add_row(Text(plugin.name, style), Text(plugin.description), Text(_origin(plugin)))
        console.print(table if rows else Text(f"{kind}: none installed", "dim"))
        console.print()
    for plugin in found:
        if plugin.fault:
            line = f"{plugin.kind} {plugin.name} cannot be used: {plugin.fault} [{plugin.file}]"
            console.print(Text(line, "red"), soft_wrap=True)
    for dropin in broken:
        line = f"{dropin.file} cannot be imported: {dropin.cause}"
        console.print(Text(line, "red"), soft_wrap=True)


def _origin(plugin: registry.PluginInfo) -> str:
    if plugin.distribution:
        return f"{plugin.distribution} {plugin.version}"
    return plugin.file or plugin.module
