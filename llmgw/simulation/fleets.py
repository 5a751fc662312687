"""Fleets to simulate: from a TOML file, from a running gateway's state, or built in.

The file describes what a benchmark of the server shows, not the model of
:mod:`llmgw.simulation.node`::

    [[nodes]]
    id = "a100"
    count = 2               # a100-1 and a100-2
    slots = 16
    prefill_rate = 8000     # prompt tokens per second
    token_rate = 105        # output tokens per second of one stream alone
    full_token_rate = 80    # ... of each stream when all slots are at work
    weight = 10             # what the gateways are told
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeGuard

from msgspec import Struct

from llmgw.config.reader import Reader, Rule, toml_table
from llmgw.errors import ConfigError, ConfigFault
from llmgw.finite import is_finite_number
from llmgw.simulation.node import BATCH_TOKENS, NodeSpec

FULL_SHARE = 0.6
"""Speed of a stream on a full server beside one alone, where nothing is said."""

Rate = Annotated[float, Rule(above=0, most=1e9)]


class NodeTable(Struct, frozen=True):
    """One ``[[nodes]]`` table; see the module. Rates are tokens per second.

    :param count: so many alike; with more than one, ids end in their number.
    """

    id: Annotated[str, Rule(shape=r"[A-Za-z0-9._:-]{1,128}", meaning="letters, digits, . _ : -")]
    slots: Annotated[int, Rule(least=1, most=4096)]
    prefill_rate: Rate
    token_rate: Rate
    full_token_rate: Rate | None = None
    count: Annotated[int, Rule(least=1, most=1000)] = 1
    weight: Rate = 1.0
    batch_tokens: Annotated[int, Rule(least=1, most=1_000_000)] = BATCH_TOKENS
    context_length: Annotated[int, Rule(least=1, most=1_000_000_000)] | None = None


class FleetTable(Struct, frozen=True):
    """The whole file."""

    nodes: Annotated[tuple[NodeTable, ...], Rule(filled=True)]


def parse_fleet(text: str, source: str = "") -> tuple[NodeSpec, ...]:
    """The nodes of a fleet file.

    :raise ConfigError: every fault with its key.
    """
    reader = Reader("/", None)
    fleet = reader.struct(FleetTable, toml_table(text, source), "")
    if reader.faults:
        raise ConfigError(reader.faults, source)
    nodes: list[NodeSpec] = []
    for index, table in enumerate(fleet.nodes):
        full = table.full_token_rate
        if full is not None and full > table.token_rate:
            reader.fault(f"nodes[{index}].full_token_rate", "must not be above token_rate")
            continue
        for number in range(table.count):
            name = table.id if table.count == 1 else f"{table.id}-{number + 1}"
            if any(node.id == name for node in nodes):
                reader.fault(f"nodes[{index}].id", f"{name} is there already")
            nodes.append(
                node_at_rates(
                    name,
                    table.slots,
                    table.prefill_rate,
                    table.token_rate,
                    full,
                    weight=table.weight,
                    batch_tokens=table.batch_tokens,
                    context_length=table.context_length,
                )
            )
    if reader.faults:
        raise ConfigError(reader.faults, source)
    return tuple(nodes)


def node_at_rates(
    id: str,
    slots: int,
    prefill_rate: float,
    token_rate: float,
    full_token_rate: float | None = None,
    *,
    weight: float = 1.0,
    batch_tokens: int = BATCH_TOKENS,
    context_length: int | None = None,
) -> NodeSpec:
    """A node by what it shows: an iteration's time is a straight line through both rates."""
    full = FULL_SHARE * token_rate if full_token_rate is None else full_token_rate
    alone_s = 1.0 / token_rate
    stream_s = (1.0 / full - alone_s) / (slots - 1) if slots > 1 else 0.0
    # Streams cannot add more than all of the time.
    stream_s = min(stream_s, alone_s)
    return NodeSpec(
        id, slots, prefill_rate, alone_s - stream_s, stream_s, weight, batch_tokens, context_length
    )


def fleet_of_state(state: Mapping[str, Any], source: str = "") -> tuple[NodeSpec, ...]:
    """The fleet that a gateway's ``/api/state`` tells of, at the speeds it has measured.

    ``token_rate`` there is the mean of streams as they came, which is taken for
    the rate of one alone; so a busy fleet comes out somewhat slower than it is.

    :raise ConfigError: a backend whose slots or speed the gateway does not know.
    """
    backends = state.get("backends")
    if not isinstance(backends, Sequence) or isinstance(backends, str) or not backends:
        raise ConfigError([ConfigFault("backends", "there are none")], source)
    faults = []
    nodes = []
    for index, each in enumerate(backends):
        where = f"backends[{index}]"
        if not isinstance(each, Mapping) or not isinstance(each.get("id"), str):
            faults.append(ConfigFault(where, "is not a backend"))
            continue
        if each.get("removed"):
            continue
        slots, window = each.get("slots") or each.get("cap"), each.get("context_length")
        prefill_rate, token_rate = each.get("prefill_rate"), each.get("token_rate")
        weight = each.get("weight", 1.0)
        if _is_figure(slots) and _is_figure(prefill_rate) and _is_figure(token_rate) and _is_figure(weight):
            node = node_at_rates(
                each["id"],
                max(1, int(slots)),
                float(prefill_rate),
                float(token_rate),
                weight=float(weight),
                context_length=int(window) if _is_figure(window) else None,
            )
            nodes.append(node)
        else:
            what = f"{each['id']}: its slots or its speed are not known yet; send it some requests first"
            faults.append(ConfigFault(where, what))
    if faults:
        raise ConfigError(faults, source)
    return tuple(nodes)


def _is_figure(value: Any) -> TypeGuard[float]:
    return is_finite_number(value) and value > 0


# --- built in -----------------------------------------------------------------


def article_fleet() -> tuple[NodeSpec, ...]:
    """The article's A100, 4090 and Xeon: 35, 80 and 300 ms to the first token of a
    200-token prompt when idle, wire included. Only these three figures are the
    article's; the rest was chosen to fit them and is no benchmark of such machines.
    """
    return (
        NodeSpec("a100", 16, 8000.0, 0.0093, 0.0002, weight=10.0),
        NodeSpec("4090", 8, 3200.0, 0.0160, 0.0010, weight=4.0),
        NodeSpec("xeon", 4, 800.0, 0.0285, 0.0210, weight=1.0),
    )


def mixed_fleet(copies: int = 1) -> tuple[NodeSpec, ...]:
    """Eight machines of four kinds, ``copies`` times."""
    kinds = (
        ("a100", 2, 16, 8000.0, 0.0093, 0.0002, 10.0),
        ("4090", 3, 8, 3200.0, 0.0160, 0.0010, 4.0),
        ("l4", 2, 4, 1600.0, 0.0250, 0.0030, 2.0),
        ("xeon", 1, 4, 800.0, 0.0285, 0.0210, 1.0),
    )
    return tuple(
        NodeSpec(f"{name}-{index + 1}", slots, rate, step_s, stream_s, weight=weight)
        for name, number, slots, rate, step_s, stream_s, weight in kinds
        for index in range(number * copies)
    )


BUILT_IN: Mapping[str, tuple[NodeSpec, ...]] = {"article": article_fleet(), "mixed": mixed_fleet()}
"""Fleets that need no file."""
