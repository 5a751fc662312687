"""Who of those who wait for a slot goes next, and who should rather wait on.

The gateway keeps the line (``[admission] max_wait_s``). Whether there is one it tells
(``adapt``); from who does not, a router learns it by being asked for an order, or
again for a request for which it has answered ``None``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from llmgw.core.prefix import PrefixIndex, blocks_covered, landmarks
from llmgw.routing.pace import Pace, Prices
from llmgw.routing.ttft_model import Lane
from llmgw.values import Backend, Request

MOST_KNOWN = 4096
"""Requests whose coming is remembered."""

WAIT_MOST_S = 60.0
"""Who has waited for longer has left without a word. Where nobody has told whether
requests may wait, it is tried with one in so long a time."""

MOST_WAITING = 32
"""So many of those who wait are looked at, the oldest first."""

LATE_GAIN = 4.5
"""So much more than in the choice does it count here that long times are dear beyond their length."""


class BoundedWait:
    """See :class:`llmgw.routing.expected_ttft.ExpectedTtft` for the prices.

    :ivar may_wait: whether those who are told ``None`` may wait; ``None`` is not known.
    """

    def __init__(self, size_price: float, patience: float) -> None:
        self.may_wait: bool | None = None
        self._tried_s = -inf
        self._size_price = size_price
        self._patience = patience
        self._since_s: dict[str, float] = {}  # of those that were told None, or ordered

    def first(
        self,
        waiting: Sequence[Request],
        lane: Lane | None,
        index: PrefixIndex,
        pace: Pace,
        prices: Prices,
        now_s: float,
    ) -> int:
        """The one whose waiting grows dearest for each second of the server's time it asks for.

        That is the time to read it, and a slot's share of the time for output, which is as long
        for all as far as we know. What a wait costs is taken to grow by ``tail_price`` with
        its square, so that short prompts go first and long ones not last for ever.

        :param lane: of the backend that has room.
        :source: the generalised c-mu rule (van Mieghem, 1995).
        """
        self.may_wait = True
        price = self._size_price
        if not price or lane is None or lane.backend is None or len(waiting) == 1:
            return 0
        slope = lane.reading.slope
        growth = 2.0 * LATE_GAIN * prices.tail / pace.ttft_s
        held_s = pace.output * (lane.stepping.base + lane.stepping.slope * lane.slots) / (lane.slots * price)
        chosen, most = 0, -inf
        for place, each in enumerate(waiting[:MOST_WAITING]):
            tokens: float = each.prompt_tokens * pace.counted
            if each.prefix:
                held = index.length(landmarks(each.prefix), lane.id)
                tokens *= 1.0 - blocks_covered(held) / len(each.prefix)
            read_s = slope * tokens
            late_s = now_s - self.since_s(each.id, now_s) + read_s
            merit = (1.0 + growth * late_s) / (held_s + read_s)
            if merit > most:
                chosen, most = place, merit
        return chosen

    def should_go_on(
        self,
        request_id: str,
        best: Lane,
        tokens: float,
        cost: float,
        candidates: Sequence[Backend],
        lanes: Iterable[Lane],
        pace: Pace,
        prices: Prices,
        now_s: float,
    ) -> bool:
        """Whether a backend that is full now would still be the better one.

        :param best: of the candidates, which costs ``cost``.
        :param lanes: all there are.
        """
        known = self._since_s
        again = request_id in known
        if self.may_wait is None:
            if again:
                self.may_wait = True
            elif not best.out or now_s < self._tried_s + WAIT_MOST_S:
                return False
        barred = best.out and now_s < best.doubt.trial_s
        free = {each.id for each in candidates}
        patience = self._patience
        queue = len(known) - again
        for lane in lanes:
            if lane.id in free or lane.doubt.count or lane.away or lane.backend is None:
                continue
            if lane.until_s <= now_s:
                lane.refresh(lane.backend, pace, prices, now_s)
            if lane.full and (
                barred or (patience and patience * (lane.cost_s(tokens) + queue * lane.turn_s) < cost)
            ):
                self.since_s(request_id, now_s)
                self._tried_s = now_s
                return True
        return False

    def since_s(self, request_id: str, now_s: float) -> float:
        """When that request was first heard of here."""
        known = self._since_s
        since_s = known.get(request_id)
        if since_s is None:
            while known:
                oldest = next(iter(known))
                if now_s - known[oldest] < WAIT_MOST_S and len(known) < MOST_KNOWN:
                    break
                del known[oldest]
            since_s = known[request_id] = now_s
        return since_s

    def went(self, request_id: str) -> None:
        """That request was sent somewhere."""
        self._since_s.pop(request_id, None)
