"""``llmgw explain``: who would take a request now, and why; nothing is sent."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import IO, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmgw.commands import admin
from llmgw.commands.figures import bar, figure, seconds


@click.command()
@click.argument("body", type=click.File("rb"), required=False)
@click.option("--model", help="Ask for a short chat with this model, in place of BODY.")
@admin.options
@click.option("--json", "as_json", is_flag=True, help="The gateway's answer as it is.")
def explain(body: IO[bytes] | None, model: str | None, url: str, token_file: Any, as_json: bool) -> None:
    """Show who would take the request in the file BODY (- for standard input), and why.

    The gateway is asked by its admin listener. Exit status 1: nobody would take it.
    """
    if (body is None) == (model is None):
        raise click.UsageError("give a file with a request's body (- for standard input), or --model")
    if body is not None:
        raw = body.read()
    else:
        raw = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]}).encode()
    told = admin.AdminListener(url, token_file).post("/api/explain", raw)
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        _print(told)
    sys.exit(0 if told["choice"] is not None else 1)


def _print(told: Mapping[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    name = told["model"] + (f" (as {told['target']})" if told["target"] != told["model"] else "")
    if told["choice"] is not None:
        line = Text.assemble((told["choice"], "bold green"), f" would take {name}")
        console.print(line + Text(f": {told['why']}" if told["why"] else ""))
    else:
        refusal = told["refusal"]
        why = f"{refusal['code']}: {refusal['message']}" if refusal else "the router declines all candidates"
        console.print(Text.assemble((f"Nobody would take {name} now. ", "bold red"), why))
    console.print(Text(f"About {told['prompt_tokens']} prompt tokens.", "dim"))
    if told["candidates"]:
        table = Table("candidate", box=None, pad_edge=False)
        table.add_column("score", justify="right")
        for heading in ("in flight", "first token", "on its own the router says"):
            table.add_column(heading)
        for each in told["candidates"]:
            chosen = each["backend"] == told["choice"]
            used, cap = each["in_flight"], each["max_connections"]
            table.add_row(
                Text(("→ " if chosen else "  ") + each["backend"], "bold" if chosen else ""),
                figure(each["score"]),
                Text(f"{bar(used, cap)} {used}/{cap}"),
                seconds(each["ttft_s"]),
                Text(each["why"] or ""),
            )
        console.print(table)
    for each in told["left_out"]:
        console.print(Text.assemble("left out  ", (each["backend"], "bold"), f"  {each['why']}"))
