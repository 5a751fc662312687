"""Expected time to first token: where will this request be answered soonest.

For each backend the model of :mod:`llmgw.routing.ttft_model` says what a request
costs there: its expected time to first token, a little of its time for output,
and a little of the time for which others stand still while its prompt is read.
The prefix index of :mod:`llmgw.core.prefix` says which part of the prompt need
not be read there. The least cost wins. There is no limit beyond which another
rule takes over: a cached prefix counts as the seconds it saves, and loses to a
queue that lasts longer.

Near ties are settled by dice, more generously when other gateways are seen, so
that gateways with the same knowledge do not all run to the same backend.

Everything is learned from events, beside which the profiles are read: a router
driven with half-empty profiles works, and one that has just been built works
with the profile alone.

:source: the study of routers this project began with ("PTR"); what of it did not
    pay in simulation was left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import inf, log
from operator import is_
from random import Random
from typing import Any
from zlib import crc32

from llmgw.core.prefix import DISTANCES, PrefixIndex, blocks_covered, landmarks
from llmgw.routing.options import Number, read_numbers
from llmgw.routing.pace import Flight, Pace, Prices
from llmgw.routing.slot_shadow import SlotShadow
from llmgw.routing.ttft_model import OUT_S, Lane
from llmgw.values import Backend, Choice, Event, Finished, FirstToken, HealthChanged, Request, Started

OPTIONS = {
    "index_landmarks": Number(default=32768, least=2, most=10_000_000, whole=True),
    "output_price": Number(default=0.08, least=0.0, most=1.0),
    "stall_price": Number(default=0.3, least=0.0, most=10.0),
    "tail_price": Number(default=0.06, least=0.0, most=10.0),
    "size_price": Number(default=1.0, least=0.0, most=1000.0),
    "patience": Number(default=1.5, least=0.0, most=100.0),
    "seed": Number(default=None, whole=True),
}

MOST_ASKED = 4096
"""Choices remembered until they start; some, as those of ``explain``, never do."""

MOST_FLIGHTS = 65536
"""Requests under way that are remembered; more means that ends were not told."""

MOST_LANES = 4096
"""Backends remembered; beyond it those without a request under way are forgotten."""

WAIT_MOST_S = 60.0
"""Who has waited for longer has left without a word."""

MOST_WAITING = 32
"""So many of those who wait are looked at, the oldest first."""

CROWD = 4
"""A beginning that more backends than this have read, and more than half of the
candidates, counts as read by all: a system prompt."""

TIE, TIE_AMONG_GATEWAYS = 0.02, 0.1
"""Costs that differ by less than this share are equal."""

SIZELESS = 0.5
"""What every request in a bounded wait counts for beside its size, as a share of the mean size."""

SHARED = 0.1
"""With more belief that others use a backend, no slot is asked for there: it might be theirs."""

HOME = 0.8
"""Among several gateways: share of a conversation's prompt that is taken to be cached at its home."""

UNKNOWN_SLOTS = 8
"""Prompts a backend is first believed to hold, if its slots are not known."""

NO_BLAME = frozenset({"busy", "client_gone", "dropped", "loading"})
"""Reasons of an end that say nothing about the backend; ``status_4…`` is another."""


Plateaus = Sequence[tuple[int, Mapping[str, int]]]
"""Of :meth:`PrefixIndex.match`."""


def mixed(value: int) -> int:
    """32 bits that look like dice (the finish of a multiply-shift hash)."""
    value = value * 0x9E3779B97F4A7C15 >> 20 & 0xFFFFFFFF
    value = (value ^ value >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    value = (value ^ value >> 12) * 0x297A2D39 & 0xFFFFFFFF
    return value ^ value >> 15


class ExpectedTtft:
    """See the module.

    :cvar observes: whether :meth:`observe` does anything with events.
    :param index_landmarks: bound of the prefix index, some 0.3 kB each.
    :param output_price: share of the expected output time that counts as cost.
    :param stall_price: share of the reading time that counts per stream it stalls.
    :param tail_price: of the square of the time to first token over its mean.
    :param size_price: in a bounded wait, how much size counts for the order; 0 is
        first come first served.
    :param patience: answer ``None`` rather than a backend that costs so many
        times what waiting for a full one does; 0 never. Only while :meth:`order` is
        asked, which tells that those who are told ``None`` may wait.
    :param seed: for repeatable runs; ``None`` takes the system's randomness.
    """

    observes = True
    wants_prefix = True

    def __init__(
        self,
        index_landmarks: int = 32768,
        output_price: float = 0.08,
        stall_price: float = 0.3,
        tail_price: float = 0.06,
        size_price: float = 1.0,
        patience: float = 1.5,
        seed: int | None = None,
    ) -> None:
        self._prices = Prices(output_price, stall_price, tail_price)
        self._size_price = size_price
        self._patience = patience
        self._dice = Random(seed)
        self._pace = Pace()
        self._lanes: dict[str, Lane] = {}
        self._listed: list[Backend] = []  # the last candidates, and their lanes
        self._listed_lanes: list[Lane] = []
        self._index = PrefixIndex(index_landmarks)
        self._shadows: dict[str, SlotShadow] = {}
        self._asked: dict[str, Flight] = {}
        self._flights: dict[str, Flight] = {}
        self._declined: dict[str, float] = {}  # since when those wait that were told None, or ordered
        self._waits_until_s = -inf  # so long it is known that those who are told None may wait
        self._away: set[str] = set()  # nobody was there at the last look

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ExpectedTtft:
        """:raise ConfigError: each fault names its option."""
        return cls(**read_numbers(options, OPTIONS))

    # --- choosing -----------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpectedTtft:
        """A copy to be asked and thrown away, as ``explain`` does: the index, which may be
        large and which choosing only reads, is shared."""
        memo[id(self._index)] = self._index
        made = object.__new__(ExpectedTtft)
        made.__dict__.update(deepcopy(self.__dict__, memo))
        return made

    def choose(self, request: Request, candidates: Sequence[Backend], now_s: float) -> Choice | None:
        """O(n), a few multiplications each, and some look-ups for the prefix."""
        pace, prices = self._pace, self._prices
        prompt = float(max(request.prompt_tokens, 1))
        prefix = request.prefix
        marks: Sequence[int] = ()
        plateaus: Plateaus = ()
        share = 0.0
        if prefix:
            marks = landmarks(prefix)
            crowd = max(CROWD, len(candidates) // 2)
            plateaus = self._index.match(marks, crowd)
            if plateaus and len(plateaus[-1][1]) > crowd:
                share = blocks_covered(plateaus[-1][0]) / len(prefix)
                plateaus = plateaus[:-1]
        tokens = prompt * (1.0 - share)
        listed = self._listed
        if len(listed) != len(candidates) or not all(map(is_, listed, candidates)):
            self._list(candidates, now_s)
        costs = []
        for lane in self._listed_lanes:
            if lane.until_s <= now_s:
                lane.refresh(candidates[lane.place], pace, prices, now_s)
            costs.append(lane.fixed_s + (lane.per_token_s + lane.squared_s * tokens) * tokens)
        if plateaus:
            self._credit(plateaus, share, len(prefix), prompt, candidates, costs)
        herd = pace.herd > 1.0
        if herd and (plateaus or share or request.session):
            self._favour_home(request, share, prompt, candidates, costs)
        best = min(costs)
        limit = best + abs(best) % OUT_S * (TIE_AMONG_GATEWAYS if herd else TIE)
        near = [place for place, cost in enumerate(costs) if cost <= limit]
        place = near[0] if len(near) == 1 else near[int(self._dice.random() * len(near))]
        chosen = candidates[place]
        cost = costs[place]
        lane = self._listed_lanes[place]
        if now_s < self._waits_until_s and self._should_wait(
            request.id, lane, tokens, cost, candidates, now_s
        ):
            return None
        if lane.doubt.count:
            lane.doubt.tried(now_s)
            lane.until_s = -inf
        matched, distance, cached = share, 0, share
        if plateaus:
            matched, distance, cached = self._known(plateaus, chosen.id, share, len(prefix))
        slot = None if herd else self._slot(lane, chosen.slots, marks, now_s)
        if len(self._asked) >= MOST_ASKED:
            self._asked.clear()
        self._asked[request.id] = Flight(
            chosen.id, prompt, max(prompt * (1.0 - cached), 1.0), marks, matched, distance, slot
        )
        return Choice(
            chosen,
            slot,
            cost,
            f"cost {cost:.3g} s, least of {len(costs)}; {matched:.0%} of the prompt seen there",
        )

    def _list(self, candidates: Sequence[Backend], now_s: float) -> None:
        """Find the lanes of these candidates; mostly they are those of the last time."""
        found = []
        for place, each in enumerate(candidates):
            lane = self._lanes.get(each.id)
            if lane is None:
                lane = self._new_lane(each.id, now_s)
            lane.place = place
            found.append(lane)
        self._listed = list(candidates)
        self._listed_lanes = found

    def _new_lane(self, backend_id: str, now_s: float) -> Lane:
        lanes = self._lanes
        if len(lanes) >= MOST_LANES:
            for gone in [each.id for each in lanes.values() if not each.own]:
                self._index.forget(gone)
                self._shadows.pop(gone, None)
                self._away.discard(gone)
                del lanes[gone]
            self._listed = []
        lane = lanes[backend_id] = Lane(backend_id, now_s)
        return lane

    def _credit(
        self,
        plateaus: Plateaus,
        common: float,
        blocks: int,
        prompt: float,
        candidates: Sequence[Backend],
        costs: list[float],
    ) -> None:
        """Lower ``costs`` by what the index says is cached beyond what all have.

        :param common: share of the prompt that all are taken to have.
        """
        held, lanes, count = self._index.held, self._lanes, len(candidates)
        best = min(costs)
        for length, readers in plateaus:
            share = blocks_covered(length) / blocks
            for backend_id, read in readers.items():
                lane = lanes.get(backend_id)
                if lane is None or lane.fixed_s >= best:  # no cache would help it
                    continue
                place = lane.place
                if place >= count or candidates[place].id != backend_id:
                    continue
                reads = held[backend_id]
                distance = (reads.read - read).bit_length()
                cached = share * reads.belief[distance if distance < DISTANCES else -1]
                if cached > common:
                    tokens = prompt * (1.0 - cached)
                    cost = lane.fixed_s + (lane.per_token_s + lane.squared_s * tokens) * tokens
                    costs[place] = min(cost, costs[place])
                    best = min(cost, best)

    def _known(
        self, plateaus: Plateaus, backend_id: str, common: float, blocks: int
    ) -> tuple[float, int, float]:
        """:return: share of the prompt found at that backend, class of distance, share believed cached."""
        for length, readers in plateaus:
            read = readers.get(backend_id)
            if read is not None:
                share = blocks_covered(length) / blocks
                reads = self._index.held[backend_id]
                distance = (reads.read - read).bit_length()
                cached = share * reads.belief[distance if distance < DISTANCES else -1]
                return share, distance, max(cached, common)
        return common, 0, common

    def _favour_home(
        self,
        request: Request,
        common: float,
        prompt: float,
        candidates: Sequence[Backend],
        costs: list[float],
    ) -> None:
        """Lower the cost of the backend that all gateways would draw for this conversation.

        They know nothing of each other's prompts; what one of them cannot find, another
        may have sent there. The key is the session, or a block that stays the same while
        the conversation does not double, and the draw is weighted rendezvous hashing.
        """
        prefix, lanes = request.prefix, self._lanes
        session = request.session
        key = crc32(session.encode()) if session else prefix[(1 << len(prefix).bit_length() - 1) - 1]
        most, home = -1.0, 0
        for place, each in enumerate(candidates):
            lane = lanes[each.id]
            merit = lane.weight / -log((mixed(lane.salt * (key | 1)) + 0.5) / 2.0**32)
            if merit > most:
                most, home = merit, place
        lane = lanes[candidates[home].id]
        tokens = prompt * (1.0 - common) * (1.0 - HOME)
        cost = lane.fixed_s + (lane.per_token_s + lane.squared_s * tokens) * tokens
        costs[home] = min(costs[home], cost)

    def _slot(self, lane: Lane, slots: int | None, marks: Sequence[int], now_s: float) -> int | None:
        """The slot that suits best; none where others send too, or some of ours have no slot."""
        if not slots or lane.shared > SHARED:
            return None
        shadow = self._shadows.get(lane.id)
        if shadow is None or len(shadow) != slots:
            shadow = self._shadows[lane.id] = SlotShadow(slots)
        if shadow.taken != lane.own:
            return None
        return shadow.choose(marks, now_s)

    # --- the bounded wait ---------------------------------------------------------

    def order(self, waiting: Sequence[Request], backend: Backend, now_s: float) -> int:
        """The one whose waiting grows dearest for each second of the server's time it asks for.

        What a wait costs is taken to grow as in the choice, by ``tail_price`` with its
        square, so that short prompts go first and long ones not last for ever.

        :source: the generalised c-mu rule (van Mieghem, 1995).
        """
        self._waits_until_s = now_s + WAIT_MOST_S
        price = self._size_price
        lane = self._lanes.get(backend.id)
        if not price or lane is None or len(waiting) == 1:
            return 0
        pace = self._pace
        slope = lane.reading.slope
        growth = 2.0 * self._prices.tail / pace.ttft_s
        least_s = slope * SIZELESS * pace.uncached / price
        chosen, most = 0, -inf
        for place, each in enumerate(waiting[:MOST_WAITING]):
            tokens: float = each.prompt_tokens
            if each.prefix:
                held = self._index.length(landmarks(each.prefix), backend.id)
                tokens *= 1.0 - blocks_covered(held) / len(each.prefix)
            read_s = slope * tokens
            late_s = now_s - self._waits_since(each.id, now_s) + read_s
            merit = (1.0 + growth * late_s) / (least_s + read_s)
            if merit > most:
                chosen, most = place, merit
        return chosen

    def _waits_since(self, request_id: str, now_s: float) -> float:
        declined = self._declined
        since_s = declined.get(request_id)
        if since_s is None:
            while declined:
                oldest = next(iter(declined))
                if now_s - declined[oldest] < WAIT_MOST_S and len(declined) < MOST_ASKED:
                    break
                del declined[oldest]
            since_s = declined[request_id] = now_s
        return since_s

    def _should_wait(
        self,
        request_id: str,
        best: Lane,
        tokens: float,
        cost: float,
        candidates: Sequence[Backend],
        now_s: float,
    ) -> bool:
        """Whether a backend that is full now would still be the better one."""
        free = {each.id for each in candidates}
        patience = self._patience
        queue = len(self._declined) - (request_id in self._declined)
        for lane in self._lanes.values():
            if lane.id in free or lane.doubt.count or lane.id in self._away or lane.backend is None:
                continue
            if lane.until_s <= now_s:
                lane.refresh(lane.backend, self._pace, self._prices, now_s)
            if lane.full and (
                best.out or (patience and patience * (lane.cost_s(tokens) + queue * lane.turn_s) < cost)
            ):
                self._waits_since(request_id, now_s)
                return True
        return False

    # --- learning -----------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Learn."""
        if isinstance(event, HealthChanged):
            self._reported(event)
        elif isinstance(event, Started):
            self._started(event)
        elif isinstance(event, FirstToken):
            flight = self._flights.get(event.request_id)
            if flight is not None and flight.ttft_s is None and flight.backend_id == event.backend_id:
                lane = self._lanes[event.backend_id]
                lane.first_token(event.request_id, flight, event.at_s, event.ttft_s)
                if flight.marks:
                    self._index.insert(flight.marks, lane.id, lane.told_slots or UNKNOWN_SLOTS)
        else:
            self._finished(event)

    def _started(self, event: Started) -> None:
        request_id, backend_id = event.request_id, event.backend_id
        self._declined.pop(request_id, None)
        flights = self._flights
        if request_id in flights:
            self._end(request_id, event.at_s)
        elif len(flights) >= MOST_FLIGHTS:
            self._end(next(iter(flights)), event.at_s)
        flight = self._asked.pop(request_id, None)
        if flight is None or flight.backend_id != backend_id:  # somebody else chose
            flight = Flight(backend_id, self._pace.uncached, self._pace.uncached)
        lane = self._lanes.get(backend_id)
        if lane is None:
            lane = self._new_lane(backend_id, event.at_s)
        flights[request_id] = flight
        lane.started(request_id, flight, event.at_s)
        if flight.slot is not None:
            shadow = self._shadows.get(backend_id)
            if shadow is None or not shadow.take(flight.slot, request_id, flight.marks):
                flight.slot = None

    def _end(self, request_id: str, now_s: float) -> tuple[Flight, Lane]:
        flight = self._flights.pop(request_id)
        lane = self._lanes[flight.backend_id]
        lane.left(request_id, flight, now_s)
        return flight, lane

    def _finished(self, event: Finished) -> None:
        flight = self._flights.get(event.request_id)
        if flight is None or flight.backend_id != event.backend_id:
            return
        _, lane = self._end(event.request_id, event.at_s)
        now_s, reason = event.at_s, event.reason
        if flight.slot is not None:
            shadow = self._shadows.get(lane.id)
            if shadow is not None:
                shadow.free(flight.slot, event.request_id, now_s)
        if not event.ok:
            if reason not in NO_BLAME and not reason.startswith("status_4"):
                lane.doubt.failed(flight.started_s, now_s, reason in ("connect", "refused"))
                lane.until_s = -inf
        elif reason == "done":
            if lane.doubt.count:
                lane.doubt.succeeded(flight.started_s, now_s)
                lane.until_s = -inf
            self._answered(flight, lane, event)

    def _answered(self, flight: Flight, lane: Lane, event: Finished) -> None:
        prompt, cached, output = event.prompt_tokens, event.cached_tokens, event.output_tokens
        uncached = flight.tokens
        if prompt is not None and cached is not None:
            uncached = float(max(prompt - cached, 1))
            expected = flight.matched * prompt
            if expected >= 1.0:
                self._index.correct(lane.id, flight.distance, min(cached / expected, 1.0))
        gap_s = None
        if output is not None and output > 4 and flight.ttft_s is not None:
            gap_s = max(event.duration_s - flight.ttft_s, 0.0) / (output - 1)
        self._pace.answered(uncached, output, flight.ttft_s)
        lane.answered(flight, uncached, event.prompt_s, gap_s)

    def _reported(self, event: HealthChanged) -> None:
        """Who is gone comes back with empty caches; who is busy beyond us serves others too."""
        report, backend_id = event.report, event.backend_id
        lane = self._lanes.get(backend_id)
        if lane is None:
            return
        if report.refused or report.loading:
            self._away.add(backend_id)
        elif report.alive and backend_id in self._away:
            self._away.discard(backend_id)
            self._index.forget(backend_id)
            self._shadows.pop(backend_id, None)
            lane.doubt.revived()
            lane.until_s = -inf
        if report.slots and report.slots != lane.told_slots:
            lane.told_slots = report.slots
            lane.backend = None
            lane.until_s = -inf
        if report.busy_slots is not None:
            lane.others_are(max(0, report.busy_slots + (report.deferred or 0) - lane.own))
            own = others = 0
            for each in self._lanes.values():
                own += each.own
                others += each.others
            self._pace.shared(own, others)
