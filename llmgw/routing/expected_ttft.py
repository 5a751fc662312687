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

from llmgw.core.prefix import PrefixIndex, landmarks
from llmgw.routing.affinity import CROWD, Plateaus, credit, favour_home, known
from llmgw.routing.bounded_wait import BoundedWait
from llmgw.routing.doubt import fails_anyhow
from llmgw.routing.options import Number, read_numbers
from llmgw.routing.pace import Flight, Pace, Prices
from llmgw.routing.slot_shadow import SlotShadow
from llmgw.routing.ttft_model import FEW, OUT_S, Lane
from llmgw.values import Backend, Choice, Event, Finished, FirstToken, HealthChanged, Request, Started

OPTIONS = {
    "index_landmarks": Number(default=32768, least=2, most=10_000_000, whole=True),
    "output_price": Number(default=0.08, least=0.0, most=1.0),
    "stall_price": Number(default=0.3, least=0.0, most=10.0),
    "tail_price": Number(default=0.08, least=0.0, most=10.0),
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

TIE, TIE_AMONG_GATEWAYS = 0.02, 0.1
"""Costs that differ by less than this share are equal."""

SHARED = 0.1
"""With more belief that others use a backend, no slot is asked for there: it might be theirs."""

UNKNOWN_SLOTS = 8
"""Prompts a backend is first believed to hold, if its slots are not known."""

LEAST_TOLD_S = 1e-3
"""Less than this, of one that never answered, is no figure to tell: it was made so that it is tried."""

NO_BLAME = frozenset({"busy", "client_gone", "dropped", "loading"})
"""Reasons of an end that say nothing about the backend; ``status_4…`` is another."""


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
        times what waiting for a full one does; 0 never. Only where those who are told
        ``None`` may wait (:mod:`llmgw.routing.bounded_wait`).
    :param seed: for repeatable runs; ``None`` takes the system's randomness.
    """

    observes = True
    wants_prefix = True

    def __init__(
        self,
        index_landmarks: int = 32768,
        output_price: float = 0.08,
        stall_price: float = 0.3,
        tail_price: float = 0.08,
        size_price: float = 1.0,
        patience: float = 1.5,
        seed: int | None = None,
    ) -> None:
        self._prices = Prices(output_price, stall_price, tail_price)
        self._wait = BoundedWait(size_price, patience)
        self._slot_choice = True
        self._dice = Random(seed)
        self._pace = Pace()
        self._lanes: dict[str, Lane] = {}
        self._listed: Sequence[Backend] = ()  # the last candidates, and their lanes
        self._listed_lanes: list[Lane] = []
        self._index = PrefixIndex(index_landmarks)
        self._shadows: dict[str, SlotShadow] = {}
        self._asked: dict[str, Flight] = {}
        self._flights: dict[str, Flight] = {}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ExpectedTtft:
        """:raise ConfigError: each fault names its option."""
        return cls(**read_numbers(options, OPTIONS))

    def adapt(self, *, slot_choice: bool, may_wait: bool) -> None:
        """What becomes of the answers. Without a word slots are chosen, and whether a
        request may wait is found out.

        :param slot_choice: whether slots are asked for; choosing them takes time.
        :param may_wait: whether a request waits that was told ``None``.
        """
        self._slot_choice = slot_choice
        self._wait.may_wait = may_wait

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
        prompt: float = (request.prompt_tokens or 1) * pace.counted
        prefix = request.prefix
        marks: Sequence[int] = ()
        plateaus: Plateaus = ()
        share = 0.0
        count = len(candidates)
        if prefix:
            marks = landmarks(prefix)
            crowd = count // 2 if count > 2 * CROWD else CROWD
            plateaus = self._index.match(marks, crowd)
            if plateaus and len(plateaus[-1][1]) > crowd:
                share = plateaus[-1][0] / len(prefix)
                plateaus = plateaus[:-1]
        tokens = prompt * (1.0 - share)
        if self._listed != candidates:
            self._list(candidates, now_s)
        lanes = self._listed_lanes
        costs = []
        for lane in lanes:
            if lane.until_s <= now_s:
                lane.refresh(candidates[lane.place], pace, prices, now_s)
            costs.append(lane.fixed_s + (lane.per_token_s + lane.squared_s * tokens) * tokens)
        if plateaus:
            credit(self._index, plateaus, share, len(prefix), prompt, self._lanes, lanes, costs)
        herd = pace.herd > 1.0
        if herd and (plateaus or share or request.session):
            favour_home(request, share, prompt, lanes, costs)
        rising = sorted(costs)
        best = rising[0]
        limit = best + abs(best) % OUT_S * (TIE_AMONG_GATEWAYS if herd else TIE)
        if count == 1 or rising[1] > limit:
            cost, place = best, costs.index(best)
        else:
            near = [place for place, cost in enumerate(costs) if cost <= limit]
            place = near[int(self._dice.random() * len(near))]
            cost = costs[place]
        chosen = candidates[place]
        lane = lanes[place]
        if (
            self._wait.may_wait is not False
            and count < len(self._lanes)
            and self._wait.should_go_on(
                request.id, lane, tokens, cost, candidates, self._lanes.values(), pace, prices, now_s
            )
        ):
            return None
        if lane.doubt.count:
            lane.doubt.tried(now_s, pace.sent)
            lane.until_s = -inf
        matched, distance, cached = share, 0, share
        if plateaus:
            matched, distance, cached = known(self._index, plateaus, lane.id, share, len(prefix))
        slot = None
        if self._slot_choice and not herd:
            slot = self._slot(lane, chosen.slots, marks, now_s)
        asked = self._asked
        if len(asked) >= MOST_ASKED:
            asked.clear()
        asked[request.id] = Flight(
            lane.id,
            prompt,
            max(prompt * (1.0 - cached), 1.0),
            marks,
            matched,
            distance,
            slot,
            request.streaming,
        )
        if cost >= OUT_S:
            what = "it failed lately" if lane.out else "its KV cache is full"
            why = f"{what}, and it is the least bad of {count}"
        elif cost < LEAST_TOLD_S and not lane.reading.samples:
            why = "not tried yet"
        else:
            why = f"cost {cost:.3g} s, least of {count}"
        if prefix:
            why = f"{why}; {matched:.0%} of the prompt seen there"
        return Choice(chosen, slot, cost, why)

    def _list(self, candidates: Sequence[Backend], now_s: float) -> None:
        """Find the lanes of these candidates; mostly they are those of the last time."""
        found = []
        for place, each in enumerate(candidates):
            lane = self._lanes.get(each.id)
            if lane is None:
                lane = self._new_lane(each.id, now_s)
            lane.place = place
            found.append(lane)
        self._listed = candidates[:]
        self._listed_lanes = found

    def _new_lane(self, backend_id: str, now_s: float) -> Lane:
        lanes = self._lanes
        if len(lanes) >= MOST_LANES:
            for gone in [each.id for each in lanes.values() if not each.own]:
                self._index.forget(gone)
                self._shadows.pop(gone, None)
                del lanes[gone]
            self._listed = ()
        lane = lanes[backend_id] = Lane(backend_id, now_s)
        return lane

    def _slot(self, lane: Lane, slots: int | None, marks: Sequence[int], now_s: float) -> int | None:
        """The slot that suits best; none where others send too, or some of ours have no slot."""
        if not slots or lane.shared > SHARED:
            return None
        shadow = self._shadows.get(lane.id)
        if shadow is None or shadow.slots != slots:
            shadow = self._shadows[lane.id] = SlotShadow(slots)
        if shadow.taken != lane.own:
            return None
        return shadow.choose(marks, now_s)

    def order(self, waiting: Sequence[Request], backend: Backend, now_s: float) -> int:
        """See :meth:`llmgw.routing.bounded_wait.BoundedWait.first`."""
        return self._wait.first(
            waiting, self._lanes.get(backend.id), self._index, self._pace, self._prices, now_s
        )

    # --- learning -----------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Learn."""
        if isinstance(event, HealthChanged):
            self._reported(event)
        elif isinstance(event, Started):
            self._started(event)
        elif isinstance(event, FirstToken):
            self._first_token(event)
        else:
            self._finished(event)

    def _started(self, event: Started) -> None:
        request_id, backend_id = event.request_id, event.backend_id
        self._wait.went(request_id)
        self._pace.sent += 1
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
            if shadow is None or not shadow.take(flight.slot, request_id, flight.marks, event.at_s):
                flight.slot = None

    def _first_token(self, event: FirstToken) -> None:
        flight = self._flights.get(event.request_id)
        if flight is None or flight.backend_id != event.backend_id:
            return
        lane = self._lanes[flight.backend_id]
        if flight.whole:
            flight.told_s = event.ttft_s
        elif flight.ttft_s is None:
            lane.first_token(event.request_id, flight, event.at_s, event.ttft_s)
            self._has_read(lane, flight, event.at_s)

    def _has_read(self, lane: Lane, flight: Flight, now_s: float) -> None:
        """A sign that it works, and that it has the prompt in its cache."""
        self._is_well(lane, flight.started_s, now_s)
        if flight.marks:
            self._index.insert(flight.marks, lane.id, lane.told_slots or UNKNOWN_SLOTS)

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
                doubt = lane.doubt
                lost = doubt.failed(
                    flight.started_s,
                    now_s,
                    self._pace.sent,
                    refused=reason in ("connect", "refused"),
                    cut=reason in ("reset", "cut") or (flight.ttft_s is not None and reason != "timeout"),
                    left=lane.own,
                    anyhow=fails_anyhow(doubt, (each.doubt for each in self._lanes.values())),
                )
                if lost:
                    self._forget(lane.id)
                lane.until_s = -inf
        elif reason == "done":
            if flight.whole or flight.ttft_s is None:
                self._has_read(lane, flight, now_s)
            self._answered(flight, lane, event)

    def _forget(self, backend_id: str) -> None:
        """Its caches are empty."""
        self._index.forget(backend_id)
        self._shadows.pop(backend_id, None)

    def _is_well(self, lane: Lane, started_s: float, now_s: float) -> None:
        """A request that was sent then has a good answer, or its beginning."""
        if lane.doubt.count:
            lane.until_s = -inf
        lane.doubt.answered(started_s, now_s)

    def _answered(self, flight: Flight, lane: Lane, event: Finished) -> None:
        prompt, cached, output = event.prompt_tokens, event.cached_tokens, event.output_tokens
        uncached = flight.tokens
        if prompt is not None:
            self._pace.count(flight.prompt / self._pace.counted, prompt)
        if prompt is not None and cached is not None:
            uncached = float(max(prompt - cached, 1))
            expected = flight.matched * prompt
            if expected >= 1.0:
                self._index.correct(lane.id, flight.distance, min(cached / expected, 1.0))
        gap_s = None
        tokens = self._pace.output if output is None else output  # not told: as many as usual
        ttft_s = lane.answered(flight, event.duration_s, output, event.prompt_s)
        if tokens > FEW and (ttft_s < event.duration_s or output is None):
            gap_s = max(event.duration_s - ttft_s - flight.stood_s, 0.0) / (tokens - 1)
        self._pace.answered(uncached, output, ttft_s)
        lane.speed.answered(flight, uncached, event.prompt_s, gap_s)

    def _reported(self, event: HealthChanged) -> None:
        """Who is gone comes back with empty caches; who is busy beyond us serves others too."""
        report, backend_id = event.report, event.backend_id
        lane = self._lanes.get(backend_id)
        if lane is None:
            return
        if report.refused or report.loading:
            lane.away = True
        elif report.alive and lane.away:
            lane.away = False
            self._forget(backend_id)
            lane.doubt.revived(event.at_s)
            lane.until_s = -inf
        if report.slots and report.slots != lane.told_slots:
            lane.told_slots = lane.slots = report.slots
            lane.until_s = -inf
        if report.busy_slots is not None:
            lane.others_are(max(0, report.busy_slots + (report.deferred or 0) - lane.own))
            own = others = 0
            for each in self._lanes.values():
                own += each.own
                others += each.others
            self._pace.shared(own, others)
