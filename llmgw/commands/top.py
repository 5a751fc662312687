"""``llmgw top``: the fleet in a terminal, live."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from llmgw.commands import admin
from llmgw.commands.figures import bar, figure, is_slow, seconds, spark, state_of, times_of_others

STALE_S = 12.0
AGAIN_S = 1.0
FRAME_S = 0.5
SPARK = 20
PIPE_WIDTH = 160
LINES = 256
SAMPLES = 120
TONES = {"good": "green", "warn": "yellow", "bad": "red", "idle": "dim"}


@click.command()
@admin.options
@click.option("--once", is_flag=True, help="One picture, and end.")
@click.option("--json", "as_json", is_flag=True, help="The state as JSON: one line for each change.")
def top(url: str, token_file: Path | None, once: bool, as_json: bool) -> None:
    """Show the fleet of a running gateway, live.

    Without a terminal one picture is printed. Ctrl-C ends it.
    """
    listener = admin.AdminListener(url, token_file)
    try:
        if as_json:
            _tell(listener, once)
        elif once or not sys.stdout.isatty():
            seen = Seen()
            _first_state(listener, seen)
            console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
            console.print(frame(seen, url, console.width, 24, time.monotonic()))
        else:
            _watch(listener, url)
    except KeyboardInterrupt:
        pass


class Seen:
    """What the gateway has told so far; written by one thread, read by another.

    :ivar heard_s: monotonic time of the last word.
    :ivar why: it cannot be heard now.
    """

    def __init__(self) -> None:
        self.state: Mapping[str, Any] | None = None
        self.lines: Sequence[Mapping[str, Any]] = ()
        self.samples: Sequence[Mapping[str, Any]] = ()
        self.heard_s = 0.0
        self.why = ""

    def begin(self) -> None:
        """A new stream, which tells everything again."""
        self.lines, self.samples, self.why = (), (), ""

    def take(self, name: str, content: Any, now_s: float) -> None:
        """One event."""
        self.heard_s = now_s
        self.why = ""
        if name == "state":
            self.state = content
        elif name == "decisions":
            self.lines = [*self.lines, *content["items"]][-LINES:]
        elif name == "history":
            self.samples = [*self.samples, *content["items"]][-SAMPLES:]


def _tell(listener: admin.AdminListener, once: bool) -> None:
    if once:
        click.echo(json.dumps(listener.get("/api/state"), indent=2))
        return
    for name, content in listener.events():
        if name == "state":
            click.echo(json.dumps(content))


def _first_state(listener: admin.AdminListener, seen: Seen) -> None:
    for name, content in listener.events():
        seen.take(name, content, time.monotonic())
        if seen.state is not None:
            return
    raise admin.Unreachable(f"{listener.url} ended its stream of events")


def _watch(listener: admin.AdminListener, url: str) -> None:
    seen = Seen()
    _first_state(listener, seen)  # what is wrong at the start ends the command
    threading.Thread(target=_listen, args=(listener, seen), daemon=True).start()
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            width, height = console.size
            live.update(frame(seen, url, width, height, time.monotonic()), refresh=True)
            time.sleep(FRAME_S)


def _listen(listener: admin.AdminListener, seen: Seen) -> None:
    while True:
        try:
            for index, (name, content) in enumerate(listener.events()):
                if index == 0:
                    seen.begin()
                seen.take(name, content, time.monotonic())
            seen.why = "the gateway ended the stream"
        except admin.Unreachable as error:
            seen.why = error.message
        time.sleep(AGAIN_S)


# --- pictures -----------------------------------------------------------------

Column = tuple[str, int, Literal["left", "right"]]
"""Heading, the least width of the screen at which it is shown, and side."""
NODE_COLUMNS: tuple[Column, ...] = (
    ("node", 0, "left"),
    ("state", 0, "left"),
    ("slots", 0, "left"),
    ("first token", 92, "left"),
    ("TTFT", 0, "right"),
    ("tok/s", 66, "right"),
    ("score", 84, "right"),
    ("share", 58, "right"),
    ("breaker", 104, "left"),
    ("models", 116, "left"),
)
LINE_COLUMNS: tuple[Column, ...] = (
    ("time", 0, "left"),
    ("caller", 96, "left"),
    ("model", 0, "left"),
    ("node", 0, "left"),
    ("TTFT", 66, "right"),
    ("whole", 76, "right"),
    ("outcome", 0, "left"),
    ("why", 110, "left"),
)


def frame(seen: Seen, url: str, width: int, height: int, now_s: float) -> RenderableType:
    """One picture.

    :param width: of the screen; what has no room is left out.
    :param height: likewise; decisions take what the fleet leaves.
    """
    state = seen.state
    assert state is not None
    head = _head(seen, state, url, now_s)
    parts: list[RenderableType] = [head, Text(), _nodes(seen, state, width)]
    left = height - len(state["backends"]) - 4 - len(head) // max(1, width)
    if left >= 3 and seen.lines:
        parts += [Text(), _decisions(seen, state, width, left - 2)]
    return Group(*parts)


def _head(seen: Seen, state: Mapping[str, Any], url: str, now_s: float) -> Text:
    ready = [node for node in state["backends"] if node["available"]]
    room = sum(node["cap"] or 0 for node in ready)
    short = seen.samples[-3:]
    span = sum(sample["every_s"] for sample in short)
    silent_s = now_s - seen.heard_s
    if seen.why or silent_s > STALE_S:
        link = Text(f"STALE for {silent_s:.0f} s {seen.why}", "bold red")
    else:
        link = Text("live", "green")
    rejected = sum(sum(sample["rejected"].values()) for sample in seen.samples[-12:])
    words = [
        f"router {state['router']}",
        f"{len(ready)} of {len(state['backends'])} nodes take requests",
        f"{state['in_flight']} of {room} slots",
        f"{state['waiting']} waiting",
        *([f"{sum(sample['requests'] for sample in short) / span:.1f} requests/s"] if span else []),
        *([f"{rejected} refused in a minute"] if rejected else []),
        *(["DRAINING"] if state["draining"] else []),
    ]
    return Text.assemble(("llmgw ", "bold"), f"{url}  ", link, "  " + " · ".join(words))


def _nodes(seen: Seen, state: Mapping[str, Any], width: int) -> Table:
    nodes = state["backends"]
    shares = _shares(seen.samples)
    shown = seen.samples[-SPARK:]
    ttfts = [own.get("ttft_s") or 0.0 for sample in shown for own in sample["backends"].values()]
    most = max(ttfts, default=0.0)
    rows = []
    for node in nodes:
        word, tone = state_of(node)
        slow = is_slow(node, nodes)
        times = times_of_others(node, nodes)
        drawn = spark([sample["backends"].get(node["id"], {}).get("ttft_s") for sample in shown], most)
        cap = node["cap"]
        rows.append(
            (
                Text(node["id"], "bold"),
                Text(word, TONES[tone]),
                Text(f"{bar(node['in_flight'], cap)} {node['in_flight']}/{'?' if cap is None else cap}"),
                Text(drawn, "yellow" if slow else "cyan"),
                Text(
                    (f"{times:.0f}× " if slow and times else "") + seconds(node["ttft_s"]),
                    "yellow" if slow else "",
                ),
                Text(figure(node["token_rate"])),
                Text(figure(node["score"])),
                Text("–" if shares is None else f"{shares.get(node['id'], 0.0):.0%}"),
                Text(node["breaker"].replace("_", " "), "" if node["breaker"] == "closed" else "yellow"),
                Text(", ".join(node["models"]) if node["models"] is not None else "not told", "dim"),
            )
        )
    return _table(NODE_COLUMNS, rows, width)


def _decisions(seen: Seen, state: Mapping[str, Any], width: int, most: int) -> Table:
    names = state.get("key_names") or {}
    rows = []
    for line in reversed(seen.lines[-most:]):
        done = line["outcome"] == "done"
        outcome = "done" if done else f"{line['status']} {line['outcome'].replace('_', ' ')}"
        rows.append(
            (
                Text(time.strftime("%H:%M:%S", time.localtime(line["at"]))),
                Text(names.get(line.get("key"), line.get("key") or "–")),
                Text(line.get("model") or line["route"]),
                Text(line.get("backend") or "–", "bold"),
                Text(seconds(line.get("ttft_s"))),
                Text(seconds(line["duration_s"])),
                Text(outcome, "" if done else "red" if line["status"] >= 500 else "yellow"),
                Text(line.get("why") or "", "dim"),
            )
        )
    return _table(LINE_COLUMNS, rows, width)


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int) -> Table:
    table = Table(box=None, pad_edge=False)
    kept = [index for index, (_, least, _) in enumerate(columns) if width >= least]
    for index in kept:
        heading, _, side = columns[index]
        table.add_column(heading, justify=side, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def _shares(samples: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    counts: dict[str, float] = {}
    for sample in samples:
        for name, own in sample["backends"].items():
            counts[name] = counts.get(name, 0) + own["requests"]
    whole = sum(counts.values())
    return {name: count / whole for name, count in counts.items()} if whole else None
