"""What cached beginnings are worth at each backend, and where a conversation is at home.

Costs are worked out as if nothing were cached; here those are lowered of whom the
prefix index knows to have read the prompt's beginning. Among several gateways, which
know nothing of each other's prompts, each conversation has a home besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, log
from zlib import crc32

from llmgw.core.prefix import PrefixIndex
from llmgw.routing.ttft_model import Lane
from llmgw.values import Request

CROWD = 4
"""A beginning that more backends than this have read, and more than half of the
candidates, counts as read by all: a system prompt."""

HOME = 0.8
"""Among several gateways: share of a conversation's prompt that is taken to be cached at its home."""

Plateaus = Sequence[tuple[int, Mapping[str, int]]]
"""Of :meth:`PrefixIndex.match`."""


def credit(
    index: PrefixIndex,
    plateaus: Plateaus,
    common: float,
    blocks: int,
    prompt: float,
    lanes: Mapping[str, Lane],
    listed: Sequence[Lane],
    costs: list[float],
) -> None:
    """Lower ``costs`` by what the index says is cached beyond what all have.

    :param common: share of the prompt that all are taken to have.
    :param blocks: of the prompt.
    :param prompt: its tokens.
    :param lanes: by id.
    :param listed: of the candidates, as ``costs``.
    """
    held, count = index.held, len(listed)
    best = inf
    for length, readers in plateaus:
        share = length / blocks
        for backend_id, read in readers.items():
            lane = lanes.get(backend_id)
            if lane is None or lane.fixed_s >= best:  # no cache would help it
                continue
            place = lane.place
            if place >= count or listed[place] is not lane:
                continue
            reads = held[backend_id]
            cached = share * reads.belief[(reads.read - read).bit_length()]
            if cached > common:
                tokens = prompt * (1.0 - cached)
                cost = lane.fixed_s + (lane.per_token_s + lane.squared_s * tokens) * tokens
                if cost < costs[place]:
                    costs[place] = cost
                    if cost < best:
                        best = cost


def known(
    index: PrefixIndex, plateaus: Plateaus, backend_id: str, common: float, blocks: int
) -> tuple[float, int, float]:
    """:return: share of the prompt found at that backend, class of distance, share believed cached."""
    for length, readers in plateaus:
        read = readers.get(backend_id)
        if read is not None:
            share = length / blocks
            reads = index.held[backend_id]
            distance = (reads.read - read).bit_length()
            cached = share * reads.belief[distance]
            return share, distance, cached if cached > common else common
    return common, 0, common


def mixed(value: int) -> int:
    """32 bits that look like dice (the finish of a multiply-shift hash)."""
    value = value * 0x9E3779B97F4A7C15 >> 20 & 0xFFFFFFFF
    value = (value ^ value >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    value = (value ^ value >> 12) * 0x297A2D39 & 0xFFFFFFFF
    return value ^ value >> 15


def favour_home(
    request: Request, common: float, prompt: float, lanes: Sequence[Lane], costs: list[float]
) -> None:
    """Lower the cost of the backend that all gateways would draw for this conversation.

    What one of them cannot find, another may have sent there. The key is the session,
    or a block that stays the same while the conversation does not double, and the draw
    is weighted rendezvous hashing.

    :param lanes: of the candidates, as ``costs``.
    """
    prefix, session = request.prefix, request.session
    key = crc32(session.encode()) if session else prefix[(1 << len(prefix).bit_length() - 1) - 1]
    most, home = -1.0, 0
    for place, lane in enumerate(lanes):
        merit = lane.weight / -log((mixed(lane.salt * (key | 1)) + 0.5) / 2.0**32)
        if merit > most:
            most, home = merit, place
    cost = lanes[home].cost_s(prompt * (1.0 - common) * (1.0 - HOME))
    costs[home] = min(costs[home], cost)
