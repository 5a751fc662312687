"""Fleets: the article's three machines."""

from __future__ import annotations

from llmgw.simulation.node import NodeSpec


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
