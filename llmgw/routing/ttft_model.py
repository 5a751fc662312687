"""What one backend will take until the first token, learned from what it took.

The time to first token of a request with ``u`` uncached prompt tokens is taken to be ::

    overhead + wait for a slot + seconds_per_token x (behind x backlog + u)

Overhead and seconds per token are a straight line through measured times, with
forgetting. Before the first samples, and with less and less weight beside them,
stands a guess: the speed of the fleet as learned so far, in proportion to the
backend's weight. A wrong weight is overruled within some ten answers.

The line holds for the machine as it usually is. Two factors follow at once when
it is not: how much longer than predicted first tokens took lately, forgotten
within half a minute, and how overdue the oldest one is that has not come. The
first is soft near 1, where it is mostly noise. Simulated, leaving it out cost
nothing at rest and saved nothing; the second saved 3 % of mean time to first token.

A prompt also delays those that come while it is read. As many as usually come in
that time wait half of it, which makes a cost in the square of its length: long
prompts belong where they are read fast. (1.5 % of mean time, simulated.)

The time of an output token is a straight line, too, over the number of streams. While
a prompt is read, all streams stand still; were that taken for the streams' own time,
those that read most would seem to write slowest, which are the fastest ones. So what
others' reading took of a stream's time is taken off it, and streams are counted as
long as it ran. (3 % of mean time to first token and 2 % of the whole, simulated.)

What is worked out from all this is three numbers, so that a decision costs three
multiplications per backend. They are made anew when something happened there, and
at least every :data:`CALM_TICK_S`.
"""

from __future__ import annotations

from math import exp, inf
from zlib import crc32

from llmgw.routing.doubt import Doubt
from llmgw.routing.pace import Flight, Pace, Prices
from llmgw.routing.speed import Speed
from llmgw.values import Backend

TICK_S, LEFT_TICK_S, CALM_TICK_S = 0.05, 0.12, 0.25
"""Costs are worked out anew at least so often: while a prompt is being read, after one
of several streams ended, and else."""

SLOW_S = 10.0
"""Time constant for forgetting slowness."""

LATE_MOST = 100.0
"""The most that one overdue first token can make of a backend's cost."""

SLOW_MOST = 8.0
"""More slowness is not remembered: it would take too long to forget."""

IDLE_S = 30.0
"""After so long without a request a backend is taken to be faster by :data:`IDLE_GAIN`."""

IDLE_GAIN = 0.4
"""What is known of an idle backend is old; this sends it a request now and then. Each of
several gateways does so less, as all of them do."""

GUESS_GAP_S, GAP_GAIN = 10.0, 0.05
"""Mean time between two requests for one backend, at first; and the newest one's weight in it."""

UNTRIED_S = 1.0
"""Time constant in which one that never answered becomes attractive, whatever its weight."""

BEHIND_GUESS_S, BEHIND_KEPT = 1.0, 0.98
"""Servers read several prompts at once, or one after the other: how much of the reading
ahead of it a prompt waits for is learned. At first all, as if that had been true for so
many seconds; and what remains of the past at each new sample."""

FOLLOWERS = 4.0
"""For each one that waits for a slot so many will come before nobody waits any more, as at
three quarters of what the backend can do. What a request takes of its time, all of them wait.
Of several gateways each counts its part of them."""

TRIAL_GAIN = 0.2
"""What a due trial makes of the cost, so that it takes place."""

HARD_PRESSED = 100.0
"""What one that is not due makes of it, so that it takes place where the others are hard pressed."""

COLD_GAIN = 1.0
"""How much a backend without any warmth costs beyond its figures. It falls by the fourth
power of what is missing: what is known of its speed is better than what time tells."""

FEW, WHOLE_SHARE = 4, 0.1
"""An answer of more tokens shows whether it came in one piece: then less than this share of the
time for writing them lies between its first token and its end."""

SAME = 0.4
"""What we have sent since others were counted, they are taken to have sent to this share."""

STRANGERS_GAIN = 0.3
"""Weight of the newest count in the belief that others use a backend, too."""

KV_FULL = 0.95
"""Share of KV cache from which a backend is left out, unless all are there."""

OUT_S = 1e4
"""Added to the cost of one that is left out. Where all are, the least bad is taken."""


class Lane:
    """One backend: what is on its way there, and what one more would cost.

    :ivar own: requests of ours there.
    :ivar others: requests of others there, when somebody told last.
    :ivar told_slots: by its health reports.
    :ivar slots: as many as it has, by report, by setting, or else its cap.
    :ivar full: one more would wait for a slot.
    :ivar fixed_s: cost of a request without uncached tokens.
    :ivar per_token_s: cost of each uncached token.
    :ivar squared_s: cost for the square of their number.
    :ivar until_s: the three hold no longer than this.
    :ivar turn_s: time in which a slot comes free when all are taken.
    :ivar away: nobody was there at the last look.
    :ivar doubt: whoever tells it something lets the costs be worked out anew.
    :ivar whole: answers that are not asked for as streams come from it in one piece.
    :ivar place: for the router: where it stood in the last list it was in.
    """

    __slots__ = (
        "_ahead",
        "_behind",
        "_behind_s",
        "_beside",
        "_expected_s",
        "_factor",
        "_first_s",
        "_gap_s",
        "_own_then",
        "_passed_s",
        "_peers",
        "_ratio",
        "_ratio_s",
        "_read_s",
        "_stood_s",
        "_streams_s",
        "_tail",
        "_unread",
        "_used_s",
        "_waited_s",
        "_waiting",
        "away",
        "backend",
        "doubt",
        "fixed_s",
        "full",
        "id",
        "others",
        "out",
        "own",
        "per_token_s",
        "place",
        "reading",
        "salt",
        "shared",
        "slots",
        "speed",
        "squared_s",
        "stepping",
        "told_slots",
        "turn_s",
        "until_s",
        "weight",
        "whole",
    )

    def __init__(self, backend_id: str, now_s: float) -> None:
        self.id = backend_id
        self.backend: Backend | None = None
        self.weight = 1.0
        self.slots = 1
        self.told_slots: int | None = None
        self.own = 0
        self.others = 0
        self.shared = 0.0
        self.salt = crc32(backend_id.encode()) | 1
        self.full = False
        self.out = False
        self.away = False
        self.whole = False
        self.place = 0
        self.fixed_s = 0.0
        self.per_token_s = 0.0
        self.squared_s = 0.0
        self.turn_s = 0.0
        self.until_s = -inf
        self.speed = speed = Speed()
        self.reading = speed.reading
        self.stepping = speed.stepping
        self.doubt = Doubt()
        self._waiting: dict[str, Flight] = {}
        self._unread = 0.0
        self._read_s = now_s
        self._used_s = now_s
        self._own_then = 0
        self._peers: int | None = 0
        self._factor = 1.0
        self._first_s = 0.0
        self._tail = 0.0
        self._gap_s = GUESS_GAP_S
        self._ratio = 1.0
        self._ratio_s = now_s
        self._ahead = 0.0
        self._beside = 1.0
        self._behind = 1.0
        self._behind_s = self._waited_s = BEHIND_GUESS_S
        self._expected_s = 0.0
        self._passed_s = now_s
        self._streams_s = 0.0  # time that streams ran, each one's added
        self._stood_s = 0.0  # time for which all of them stood still

    # --- what happens there -------------------------------------------------------

    def started(self, request_id: str, flight: Flight, now_s: float) -> None:
        """A request of ours was sent there."""
        self._gap_s += GAP_GAIN * (now_s - self._used_s - self._gap_s)
        flight.started_s = self._used_s = now_s
        flight.ahead = self._ahead
        flight.waited = self.full
        flight.whole = self.whole and not flight.streaming
        flight.expected_s = self._expected_s + self.reading.slope * flight.tokens
        self._pass(now_s)
        self.own += 1
        tokens = flight.tokens
        self._unread += tokens
        waiting = self._waiting
        if waiting and self._beside < self.slots - 1.0:  # one more of many: correct what was worked out
            more_s = self.reading.slope * tokens * self._behind
            self._ahead += tokens
            self._beside += 1.0
            self._expected_s += more_s
            more_s *= self._factor
            self.fixed_s += more_s * (1.0 + self._tail * (2.0 * self._first_s + more_s))
            self._first_s += more_s
        else:
            self.until_s = -inf
        waiting[request_id] = flight

    def first_token(self, request_id: str, flight: Flight, now_s: float, ttft_s: float) -> None:
        """That request's first token came."""
        self._is_read(request_id, flight, now_s, ttft_s)
        # What was believed cached and was not is no slowness: between the two predictions all is well.
        expected_s = flight.expected_s
        if ttft_s > expected_s:
            expected_s = min(ttft_s, expected_s + self.reading.slope * (flight.prompt - flight.tokens))
        ratio = min(ttft_s / (expected_s + 1e-3), SLOW_MOST)
        if flight.ahead and not flight.waited:
            slope = self.reading.slope
            waited_s = ttft_s - self.reading.base - slope * flight.tokens
            behind_s = slope * flight.ahead
            self._waited_s = BEHIND_KEPT * self._waited_s + min(max(waited_s, 0.0), 2.0 * behind_s)
            self._behind_s = BEHIND_KEPT * self._behind_s + behind_s
            self._behind = self._waited_s / self._behind_s
        before = self.slowness(now_s)
        gain = 0.5 if ratio > before else 0.3
        if flight.waited:
            gain *= 0.2
        self._ratio = before + gain * (ratio - before)
        self._ratio_s = now_s

    def assume_read(self, now_s: float) -> None:
        """Of whom no first token will be seen, the prompt is taken to be read when that was expected."""
        waiting = self._waiting
        while waiting:
            request_id, flight = next(iter(waiting.items()))
            if not flight.whole or now_s < flight.started_s + flight.expected_s:
                break
            self._is_read(request_id, flight, now_s, flight.expected_s)

    def _is_read(self, request_id: str, flight: Flight, now_s: float, ttft_s: float) -> None:
        """That request's prompt has been read."""
        self._read(request_id, flight)
        begun_s, read_s = flight.started_s, self.reading.slope * flight.tokens
        if begun_s < self._read_s:
            begun_s = self._read_s
        self._pass(now_s)
        self._stood_s += read_s if read_s < now_s - begun_s else now_s - begun_s
        self._read_s = now_s
        flight.first_s, flight.streams_s, flight.stood_s = now_s, self._streams_s, self._stood_s
        flight.ttft_s = ttft_s

    def left(self, request_id: str, flight: Flight, now_s: float) -> None:
        """That request is over."""
        self._pass(now_s)
        self.own -= 1
        if flight.ttft_s is None:
            self._read(request_id, flight)
        else:
            flight.stood_s = self._stood_s - flight.stood_s
            if now_s > flight.first_s:
                flight.beside = self.others + (self._streams_s - flight.streams_s) / (now_s - flight.first_s)
        if self.full or not self.own:
            self.until_s = -inf
        elif self.until_s > now_s + LEFT_TICK_S:
            self.until_s = now_s + LEFT_TICK_S

    def answered(
        self, flight: Flight, duration_s: float, output: int | None, prompt_s: float | None
    ) -> float:
        """That request has its answer.

        Whether it came in one piece shows here, and when its first token would have been seen: when
        the backend says so, or else after the share of its time that was expected for that.

        :param output: its tokens, if told. If not, all of its time is taken to be reading, as
            it is for an embedding.
        :param prompt_s: time spent on the prompt, if told.
        :return: its time to first token.
        """
        writing_s = 0.0
        if output is not None:
            writing_s = output * (self.stepping.base + self.stepping.slope * flight.beside)
            if not flight.streaming and output > FEW:
                self._shows_whole(flight.told_s if flight.whole else flight.ttft_s, duration_s, writing_s)
        ttft_s = flight.ttft_s
        if flight.whole or ttft_s is None:
            expected_s = flight.expected_s
            if output is None:
                ttft_s = duration_s
            elif prompt_s is None:
                ttft_s = duration_s * expected_s / (expected_s + writing_s + 1e-9)
            else:
                ttft_s = min(max(expected_s - self.reading.slope * flight.tokens, 0.0) + prompt_s, duration_s)
            flight.ttft_s = ttft_s
        return ttft_s

    def _shows_whole(self, seen_s: float | None, duration_s: float, writing_s: float) -> None:
        """Its first token came then, or not at all, though writing the answer takes that long."""
        whole = seen_s is None or duration_s - seen_s < WHOLE_SHARE * writing_s
        if whole and not self.whole:  # what seemed to be waiting and slowness was writing
            self._ratio = self._behind = 1.0
            self._behind_s = self._waited_s = BEHIND_GUESS_S
        self.whole = whole

    def others_are(self, count: int) -> None:
        """So many requests of others are there."""
        self.others = count
        self.shared += STRANGERS_GAIN * ((1.0 if count else 0.0) - self.shared)
        self._own_then = self.own
        self.until_s = -inf

    # --- what it would cost now ---------------------------------------------------

    def cost_s(self, tokens: float) -> float:
        """Of a request with so many uncached tokens, as it was worked out last."""
        return self.fixed_s + (self.per_token_s + self.squared_s * tokens) * tokens

    def slowness(self, now_s: float) -> float:
        """How much longer than usual first tokens took lately; below 1 if shorter."""
        return 1.0 + (self._ratio - 1.0) * exp((self._ratio_s - now_s) / SLOW_S)

    def refresh(self, backend: Backend, pace: Pace, prices: Prices, now_s: float) -> None:
        """Work out the costs anew, from the backend's live picture and our own counts."""
        profile = backend.profile
        if backend is not self.backend:
            self._settle(backend, pace)
        peers = profile.peers_in_flight
        if peers != self._peers:
            self._peers = peers
            self.others_are(peers or 0)
        reading, stepping = self.reading, self.stepping
        per_token_s = reading.slope
        slots = self.slots
        there: float = self.own
        seen = profile.in_flight
        if seen and seen > there:
            there = seen
        herd = pace.herd
        used_s = self._used_s
        factor = eager = 1.0
        if self._ratio > 1.0:
            above = (self._ratio - 1.0) * exp((self._ratio_s - now_s) / SLOW_S)
            factor += above * above / (1.0 + above)
        ahead = 0.0
        if self.whole:
            self.assume_read(now_s)
        if self._waiting:
            self.until_s = now_s + TICK_S
            oldest = next(iter(self._waiting.values()))
            begun_s = oldest.started_s
            late = (now_s - begun_s) / (2.0 * oldest.expected_s + 0.05)
            if begun_s < self._read_s:
                begun_s = self._read_s
            ahead = herd * self._unread - (now_s - begun_s) / (per_token_s * factor)
            if ahead < 0.0:
                ahead = 0.0
            if late > 1.0:
                factor *= late if late < LATE_MOST else LATE_MOST
        else:
            self.until_s = now_s + CALM_TICK_S
            if not there and not self.doubt.out:
                unused_s = now_s - used_s
                if reading.samples:
                    eager = 1.0 - IDLE_GAIN / herd * (unused_s / IDLE_S if unused_s < IDLE_S else 1.0)
                else:
                    eager = exp(-unused_s / (UNTRIED_S * herd))
                factor *= eager
        if self.others or herd > 1.0:  # what we sent since they were counted, others will have sent too
            there += max(0.0, self.others + SAME * (herd - 1.0) * (there - self._own_then))
        expected_s = reading.base + per_token_s * ahead * self._behind
        if there >= slots:
            self.full = True
            beside = streams = float(slots)
            step_s = stepping.base + stepping.slope * beside
            queue = there - slots + 1.0
            held_s = pace.output * step_s / slots
            self.turn_s = turn_s = held_s + pace.uncached * per_token_s / slots
            expected_s += queue * turn_s
            followers = FOLLOWERS * queue / herd
            after_s = followers * held_s
        else:
            self.full = False
            followers = after_s = 0.0
            streams = there
            beside = there + 1.0
            step_s = stepping.base + stepping.slope * beside
            if profile.gpu_use:  # what our own requests do not explain
                factor *= 1.0 + profile.gpu_use * (1.0 - there / slots)
        self._ahead = ahead
        self._beside = beside
        self._expected_s = expected_s
        warmth = profile.warmth
        if warmth < 1.0:
            cold = (1.0 - warmth) * (1.0 - warmth)
            factor *= 1.0 + COLD_GAIN * cold * cold
        out_s = 0.0
        kv_use = profile.kv_use
        if kv_use is not None and kv_use >= KV_FULL:
            out_s = OUT_S
        self.out = False
        if self.doubt.count:
            factor, out_s = self._doubted(factor, out_s, pace.sent, now_s)
        first_s = factor * expected_s
        read_s = factor * per_token_s
        self._factor = factor
        self._tail = tail = prices.tail / pace.ttft_s
        self._first_s = first_s
        self.fixed_s = (
            first_s * (1.0 + tail * first_s)
            + factor * prices.output * pace.output * (step_s + stepping.slope * beside)
            + after_s
            + out_s
        )
        comers_s = 0.0  # reading time that comes in while a token's worth of it passes
        if reading.samples:
            idle_s = 0.5 * (now_s - used_s)
            comers_s = per_token_s * per_token_s / (idle_s if idle_s > self._gap_s else self._gap_s + 1e-6)
        self.squared_s = 0.5 * comers_s + tail * read_s * read_s
        if eager < 1.0:  # a trial is for short prompts; the first one less so, if nobody else tries it too
            short = 1.0 if reading.samples else 1.0 - 1.0 / herd
            self.squared_s += (1.0 - eager) * short * per_token_s / pace.uncached
        self.per_token_s = (
            read_s * (1.0 + prices.stall * streams + 2.0 * tail * first_s)
            + comers_s * ahead
            + followers * per_token_s
        )

    def _settle(self, backend: Backend, pace: Pace) -> None:
        """Take over what changes seldom."""
        self.backend = backend
        self.weight = weight = backend.weight or 1e-6
        self.slots = self.told_slots or backend.slots or backend.max_connections
        self.speed.of(pace, weight, backend.profile)

    def _doubted(self, factor: float, out_s: float, sent: int, now_s: float) -> tuple[float, float]:
        doubt = self.doubt
        failures = doubt.now(now_s)
        self.out = out = doubt.out
        if out and now_s < doubt.trial_s:
            out_s += OUT_S
            self.until_s = min(self.until_s, doubt.trial_s)
        elif out:
            factor *= TRIAL_GAIN if doubt.is_due(now_s, sent) else HARD_PRESSED
        return factor * (1.0 + failures), out_s

    def _pass(self, now_s: float) -> None:
        """Time has passed; those that wait for a slot are no streams."""
        own = self.own
        self._streams_s += (own if own < self.slots else self.slots) * (now_s - self._passed_s)
        self._passed_s = now_s

    def _read(self, request_id: str, flight: Flight) -> None:
        del self._waiting[request_id]
        self._unread = self._unread - flight.tokens if self._waiting else 0.0
        self.until_s = -inf
