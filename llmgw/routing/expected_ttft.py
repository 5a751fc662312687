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
from math import inf
from random import Random
from typing import Any

from llmgw.core.prefix import DISTANCES, PrefixIndex, blocks_covered, landmarks
from llmgw.routing.options import Number, read_numbers
from llmgw.routing.pace import Flight, Pace, Prices
from llmgw.routing.slot_shadow import SlotShadow
from llmgw.routing.ttft_model import OUT_S, Lane
from llmgw.values import Backend, Choice, Event, Finished, FirstToken, HealthChanged, Request, Started

OPTIONS = {
    "index_landmarks": Number(default=32768, least=2, most=10_000_000, whole=True),
    "output_price": Number(default=0.03, least=0.0, most=1.0),
    "stall_price": Number(default=0.2, least=0.0, most=10.0),
    "size_price": Number(default=10.0, least=0.0, most=1000.0),
    "patience": Number(default=0.0, least=0.0, most=100.0),
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

SAVED = 1.3
"""Weight of a cached token: what is read anew also pushes out what another would have used."""

TIE, TIE_AMONG_GATEWAYS = 0.02, 0.1
"""Costs that differ by less than this share are equal."""

UNKNOWN_SLOTS = 8
"""Prompts a backend is first believed to hold, if its slots are not known."""

NO_BLAME = frozenset({"busy", "client_gone", "dropped", "loading"})
"""Reasons of an end that say nothing about the backend; ``status_4…`` is another."""


class ExpectedTtft:
    """See the module.

    :cvar observes: whether :meth:`observe` does anything with events.
    :param index_landmarks: bound of the prefix index, some 0.3 kB each.
    :param output_price: share of the expected output time that counts as cost.
    :param stall_price: share of the reading time that counts per stream it stalls.
    :param size_price: in a bounded wait, seconds that a second of reading moves
        a request back; 0 is first come first served.
    :param patience: answer ``None`` rather than a backend that costs so many
        times what waiting for a full one does; 0 never. Only where those who are
        told ``None`` may wait.
    :param seed: for repeatable runs; ``None`` takes the system's randomness.
    """

    observes = True
    wants_prefix = True

    def __init__(
        self,
        index_landmarks: int = 32768,
        output_price: float = 0.03,
        stall_price: float = 0.2,
        size_price: float = 10.0,
        patience: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self._prices = Prices(output_price, stall_price)
        self._size_price = size_price
        self._patience = patience
        self._dice = Random(seed)
        self._pace = Pace()
        self._lanes: dict[str, Lane] = {}
        self._index = PrefixIndex(index_landmarks)
        self._shadows: dict[str, SlotShadow] = {}
        self._asked: dict[str, Flight] = {}
        self._flights: dict[str, Flight] = {}
        self._declined: dict[str, float] = {}  # since when those wait that were told None, or ordered
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
        lanes, pace, prices = self._lanes, self._pace, self._prices
        prompt = float(max(request.prompt_tokens, 1))
        prefix = request.prefix
        marks: Sequence[int] = ()
        plateaus: list[tuple[int, Mapping[str, int]]] = []
        share = 0.0
        if prefix:
            marks = landmarks(prefix)
            crowd = max(CROWD, len(candidates) // 2)
            plateaus = self._index.match(marks, crowd)
            if plateaus and len(plateaus[-1][1]) > crowd:
                share = blocks_covered(plateaus.pop()[0]) / len(prefix)
        tokens = prompt * (1.0 - share)
        costs: list[float] = []
        for place, each in enumerate(candidates):
            lane = lanes.get(each.id)
            if lane is None:
                lane = self._new_lane(each.id, now_s)
            if lane.until_s <= now_s:
                lane.refresh(each, pace, prices, now_s)
            costs.append(lane.fixed_s + (lane.per_token_s + lane.squared_s * tokens) * tokens)
            lane.place = place
        found = self._credit(plateaus, share, len(prefix), prompt, candidates, costs) if plateaus else {}
        best = min(costs)
        limit = best + abs(best) % OUT_S * (TIE if pace.herd == 1.0 else TIE_AMONG_GATEWAYS)
        near = [place for place, cost in enumerate(costs) if cost <= limit]
        place = near[0] if len(near) == 1 else near[int(self._dice.random() * len(near))]
        chosen = candidates[place]
        if self._patience and self._may_wait_for_better(request.id, tokens, costs[place], candidates, now_s):
            return None
        lane = lanes[chosen.id]
        if lane.doubt.count:
            lane.doubt.tried(now_s)
            lane.until_s = -inf
        matched, distance, cached = found.get(chosen.id, (share, 0, share))
        slot = self._slot(lane, chosen.slots, marks, now_s)
        if len(self._asked) >= MOST_ASKED:
            self._asked.clear()
        self._asked[request.id] = Flight(
            chosen.id, prompt, max(prompt * (1.0 - cached), 1.0), marks, matched, distance, slot
        )
        cost = costs[place]
        return Choice(
            chosen,
            slot,
            cost,
            f"cost {cost:.3g} s, least of {len(costs)}; {matched:.0%} of the prompt seen there",
        )

    def _new_lane(self, backend_id: str, now_s: float) -> Lane:
        lanes = self._lanes
        if len(lanes) >= MOST_LANES:
            for gone in [each.id for each in lanes.values() if not each.own]:
                self._index.forget(gone)
                self._shadows.pop(gone, None)
                self._away.discard(gone)
                del lanes[gone]
        lane = lanes[backend_id] = Lane(backend_id, now_s)
        return lane

    def _credit(
        self,
        plateaus: Sequence[tuple[int, Mapping[str, int]]],
        common: float,
        blocks: int,
        prompt: float,
        candidates: Sequence[Backend],
        costs: list[float],
    ) -> dict[str, tuple[float, int, float]]:
        """Take off ``costs`` what the index says is cached beyond what all have.

        :param common: share of the prompt that all are taken to have.
        :return: by id: share found there, class of distance, share believed cached.
        """
        held, lanes, count = self._index.held, self._lanes, len(candidates)
        found: dict[str, tuple[float, int, float]] = {}
        for length, readers in plateaus:
            share = blocks_covered(length) / blocks
            for backend_id, read in readers.items():
                lane = lanes.get(backend_id)
                if lane is None or backend_id in found:
                    continue
                place = lane.place
                if place >= count or candidates[place].id != backend_id:
                    continue
                reads = held[backend_id]
                distance = (reads.read - read).bit_length()
                cached = share * reads.belief[distance if distance < DISTANCES else -1]
                if cached < common:
                    cached = common
                found[backend_id] = (share, distance, cached)
                costs[place] -= SAVED * lane.per_token_s * prompt * (cached - common)
        return found

    def _slot(self, lane: Lane, slots: int | None, marks: Sequence[int], now_s: float) -> int | None:
        """The slot to ask for; none where others send too, or some of ours have no slot."""
        if not slots or lane.others:
            return None
        shadow = self._shadows.get(lane.id)
        if shadow is None or len(shadow) != slots:
            shadow = self._shadows[lane.id] = SlotShadow(slots)
        if shadow.taken != lane.own:
            return None
        return shadow.choose(marks, now_s)

    # --- the bounded wait ---------------------------------------------------------

    def order(self, waiting: Sequence[Request], backend: Backend, now_s: float) -> int:
        """The one that waited longest, counting what this backend would have to read
        for it, at ``size_price``, as if it had come so much later."""
        price = self._size_price
        lane = self._lanes.get(backend.id)
        if not price or lane is None or len(waiting) == 1:
            return 0
        per_token_s = price * lane.reading.slope
        chosen, least = 0, inf
        for place, each in enumerate(waiting[:MOST_WAITING]):
            since_s = self._waits_since(each.id, now_s)
            tokens = each.prompt_tokens
            if each.prefix:
                held = self._index.length(landmarks(each.prefix), backend.id)
                tokens *= 1.0 - blocks_covered(held) / len(each.prefix)  # type: ignore[assignment]
            key = since_s + per_token_s * tokens
            if key < least:
                chosen, least = place, key
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

    def _may_wait_for_better(
        self, request_id: str, tokens: float, cost: float, candidates: Sequence[Backend], now_s: float
    ) -> bool:
        """Whether a backend that is full now would still be the better one."""
        free = {each.id for each in candidates}
        queue = len(self._declined) - (request_id in self._declined)
        for lane in self._lanes.values():
            if lane.id in free or lane.doubt.count or lane.id in self._away or lane.backend is None:
                continue
            if lane.until_s <= now_s:
                lane.refresh(lane.backend, self._pace, self._prices, now_s)
            if lane.full and self._patience * (lane.cost_s(tokens) + queue * lane.turn_s) < cost:
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
                lane.doubt.succeeded(now_s)
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
        self._pace.answered(uncached, output)
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
        if report.slots:
            lane.told_slots = report.slots
        if report.busy_slots is not None:
            lane.others_are(max(0, report.busy_slots + (report.deferred or 0) - lane.own))
            own = others = 0
            for each in self._lanes.values():
                own += each.own
                others += each.others
            self._pace.shared(own, others)
