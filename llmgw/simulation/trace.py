"""Workloads from traces: Azure's CSV, Mooncake's JSON lines, our own access log.

Only times and numbers of tokens are read. Arrivals keep their pattern; they are
rescaled so that the whole is ``load`` times what the fleet can carry with
nothing cached, or run at ``speed`` times the trace's own pace.

- Azure LLM inference traces 2023: ``TIMESTAMP,ContextTokens,GeneratedTokens``.
  Nothing is known of what prompts share, so they share nothing.
- Mooncake (FAST '25): ``timestamp`` (ms), ``input_length``, ``output_length`` and
  ``hash_ids``, one per 512 tokens; equal ids are equal text.
- Access log (``docs/access-log.md``): ``at``, ``prompt_tokens``, ``output_tokens``,
  ``cached_tokens``. Requests that were refused or never answered have no tokens
  and are skipped. What prompts shared is a guess: those of one key and target
  begin alike, for as many tokens as the log says were cached.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from llmgw.errors import ConfigError, ConfigFault
from llmgw.finite import is_finite_number
from llmgw.simulation.node import NodeSpec
from llmgw.simulation.prompt import Pieces
from llmgw.simulation.workload import Maker, Workload, rate_for

DAEMON = re.compile(r"\d{4}-\d\d-\d\dT[\d:]+(?:[+-]\d{4}|Z) \[")
"""How a line of the daemon's own log begins, which is among access lines where both go to standard output."""

HASH_TOKENS = 512
"""Tokens that one of Mooncake's ids stands for."""


class Arrival(Struct, frozen=True):
    """One line of a trace.

    :param pieces: of the prompt; ``None`` when all its text is its own.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    pieces: Pieces | None = None


class Span(Struct, frozen=True):
    """What of a trace is used.

    :param skip: lines left out at its beginning.
    :param count: at most so many then.
    :param longest: longer prompts are cut to so many tokens.
    """

    skip: int = 0
    count: int | None = None
    longest: int = 16_000


def read_trace(path: str, span: Span | None = None) -> list[Arrival]:
    """Read a file of any of the three kinds; its first line tells which.

    :raise ConfigError: a line makes no sense; names it.
    :raise OSError: the file cannot be read.
    """
    span = span or Span()
    with open(path, encoding="utf-8", errors="replace") as lines:
        first = next((line for line in lines if not DAEMON.match(line)), "")
        lines.seek(0)
        if first.startswith("TIMESTAMP"):
            parsed = azure(lines, path)
        elif '"hash_ids"' in first or '"input_length"' in first:
            parsed = mooncake(lines, path)
        elif first.startswith("{"):
            parsed = access_log(lines, path)
        else:
            raise _fault(path, 1, "neither an Azure trace, a Mooncake trace nor an access log")
        found: list[Arrival] = []
        most = None if span.count is None else span.skip + span.count
        for arrival in parsed:
            found.append(arrival)
            if most is not None and len(found) >= most:
                break
    return [_cut(each, span.longest) for each in found[span.skip :]]


def azure(lines: Iterable[str], source: str) -> Iterable[Arrival]:
    """:raise ConfigError: see :func:`read_trace`."""
    began: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            # Seven digits of a second are one more than Python takes.
            at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _fault(source, number, "must be TIMESTAMP,ContextTokens,GeneratedTokens") from None
        began = began or at
        yield Arrival((at - began).total_seconds(), max(1, prompt), max(1, output))


def mooncake(lines: Iterable[str], source: str) -> Iterable[Arrival]:
    """:raise ConfigError: see :func:`read_trace`."""
    for number, table in objects(lines, source):
        at_ms = _figure(table, "timestamp", source, number)
        prompt = max(1, int(_figure(table, "input_length", source, number)))
        output = max(1, int(_figure(table, "output_length", source, number)))
        ids = table.get("hash_ids", [])
        if not isinstance(ids, list) or not all(isinstance(id, int) for id in ids):
            raise _fault(source, number, "hash_ids must be whole numbers")
        sizes = [HASH_TOKENS] * len(ids)
        if ids:
            sizes[-1] = prompt - HASH_TOKENS * (len(ids) - 1)
        pieces = tuple(
            (-1 - id, size) for id, size in zip(ids, sizes, strict=True) if size > 0
        )  # ours are above 0
        yield Arrival(at_ms / 1000.0, prompt, output, pieces or None)


def access_log(lines: Iterable[str], source: str) -> Iterable[Arrival]:
    """:raise ConfigError: see :func:`read_trace`."""
    owners: dict[tuple[str, str], int] = {}
    began_s: float | None = None
    for number, table in objects(lines, source):
        if "prompt_tokens" not in table or "output_tokens" not in table:
            continue
        at_s = _figure(table, "at", source, number)
        prompt = max(1, int(_figure(table, "prompt_tokens", source, number)))
        output = max(1, int(_figure(table, "output_tokens", source, number)))
        cached = min(prompt, int(_figure(table, "cached_tokens", source, number, 0.0)))
        pieces: Pieces | None = None
        if cached:
            owner = (str(table.get("key", "")), str(table.get("target", table.get("model", ""))))
            pieces = ((owners.setdefault(owner, -1 - len(owners)), cached),)
        began_s = at_s if began_s is None else began_s
        # Lines stand in order of ends, so one may have arrived before the first one.
        yield Arrival(at_s - began_s, prompt, output, pieces)


def workload_of(
    arrivals: Sequence[Arrival],
    name: str,
    seed: int,
    fleet: Sequence[NodeSpec],
    *,
    load: float | None = None,
    speed: float = 1.0,
) -> Workload:
    """Arrivals as jobs.

    :param load: share of the fleet's capacity; ``None`` keeps the trace's pace.
    :param speed: then times this.
    :raise ConfigError: there is nothing to run.
    """
    if not arrivals:
        raise ConfigError([ConfigFault("", "no request of it can be used")], name)
    maker = Maker(seed)
    ordered = sorted(arrivals, key=lambda each: each.at_s)
    begin_s = ordered[0].at_s
    number = len(ordered)
    scale = 1.0 / speed
    if load is not None:
        mean_prompt = sum(each.prompt_tokens for each in ordered) / number
        mean_output = sum(each.output_tokens for each in ordered) / number
        span_s = ordered[-1].at_s - begin_s
        wanted_s = number / rate_for(fleet, load, mean_prompt, mean_output)
        scale = wanted_s / span_s if span_s > 0.0 else 1.0
    jobs = []
    for each in ordered:
        pieces = each.pieces or ()
        rest = each.prompt_tokens - sum(tokens for _, tokens in pieces)
        if rest > 0:
            pieces = (*pieces, (maker.piece(), rest))
        jobs.append(maker.job((each.at_s - begin_s) * scale, pieces, each.output_tokens))
    return Workload(name, jobs, number)


# --- inside -------------------------------------------------------------------


def _cut(arrival: Arrival, longest: int) -> Arrival:
    if arrival.prompt_tokens <= longest:
        return arrival
    left = longest
    kept = []
    for piece, tokens in arrival.pieces or ():
        if left <= 0:
            break
        kept.append((piece, min(tokens, left)))
        left -= tokens
    return Arrival(arrival.at_s, longest, arrival.output_tokens, tuple(kept) or None)


def objects(lines: Iterable[str], source: str) -> Iterable[tuple[int, dict[str, Any]]]:
    mixed = False
    for number, line in enumerate(lines, 1):
        if not line.startswith("{"):
            mixed = mixed or DAEMON.match(line) is not None
            if mixed or not line.strip():
                continue
        try:
            table = json.loads(line)
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict):
            raise _fault(source, number, "is not a JSON object")
        yield number, table


def _figure(table: dict[str, Any], key: str, source: str, number: int, default: float | None = None) -> float:
    value = table.get(key, default)
    if not is_finite_number(value) or value < 0:
        raise _fault(source, number, f"{key} must be a number, 0 or more")
    return float(value)


def _fault(source: str, number: int, what: str) -> ConfigError:
    return ConfigError([ConfigFault(f"line {number}", what)], source)
