"""What one backend will take until the first token, learned from what it took.

The time to first token of a request with ``u`` uncached prompt tokens is modelled as::

    slow x (wait for a slot + overhead + seconds_per_token x (backlog + u))

Overhead and seconds per token are a straight line through measured times, with
forgetting, so both follow a machine whose speed changes. Before the first
samples, and with less and less weight beside them, stands a guess: the speed of
the fleet as learned so far, in proportion to the backend's weight. A wrong weight
is therefore overruled by about ten answers.

The line holds for the machine as it usually is. ``slow`` follows at once when it
is not: how much longer than predicted first tokens took lately, forgotten within
half a minute; and how overdue the oldest one is that has not come.

Failures make ``doubt``. A doubted backend gets one trial at a time, at intervals
that double while trials fail and shrink as they succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from typing import Any

from llmgw.values import Backend

Settings = Any

KEPT = 0.97
"""What remains of a line's past at each new sample."""

SLOW_S = 20.0
"""Time constant in seconds for forgetting slowness."""

DOUBT_S = 20.0
"""Time constant in seconds for forgetting failures."""

LATE_MOST = 100.0
"""The most that one overdue first token can make of a backend's cost."""

OVERHEAD_MOST_S = 0.25
"""Overhead beyond is not believed: it is waiting that we did not see."""

TICK_S = 0.05
"""Costs are worked out anew at least so often."""

TRIAL_FIRST_S, TRIAL_LAST_S = 0.5, 10.0
"""Interval between trials of a doubted backend, at first and at most."""

GUESS_OVERHEAD_S = 0.02
GUESS_TOKENS_PER_S = 1000.0
GUESS_STEP_S = 0.02
"""Speed of a machine of mean weight before anything was measured anywhere."""


class Line:
    """``y = base + slope x`` through weighted samples, newer ones counting more.

    Two points on the guessed line stand beside the samples for good, at ``x = 0``
    and at ``far``; so few samples, or samples all alike, cannot tilt it.
    """

    __slots__ = ("_far", "_w", "_wx", "_wxx", "_wxy", "_wy", "base", "samples", "slope")

    def __init__(self, far: float) -> None:
        self._far = far
        self._w = self._wx = self._wxx = self._wy = self._wxy = 0.0
        self.samples = 0
        self.base = 0.0
        self.slope = 0.0

    def add(self, x: float, y: float, weight: float) -> None:
        """A sample; :meth:`fit` takes it in."""
        self.samples += 1
        self._w = KEPT * self._w + weight
        self._wx = KEPT * self._wx + weight * x
        self._wxx = KEPT * self._wxx + weight * x * x
        self._wy = KEPT * self._wy + weight * y
        self._wxy = KEPT * self._wxy + weight * x * y

    def fit(self, base: float, slope: float, weight: float) -> None:
        """Lay the line anew.

        :param base: of the guess, as ``slope``.
        :param weight: of each of the two points of the guess.
        """
        far = self._far
        end = base + slope * far
        w = self._w + 2.0 * weight
        wx = self._wx + weight * far
        wxx = self._wxx + weight * far * far
        wy = self._wy + weight * (base + end)
        wxy = self._wxy + weight * far * end
        self.slope = found = max((w * wxy - wx * wy) / (w * wxx - wx * wx), 1e-9)
        self.base = max((wy - found * wx) / w, 0.0)


class Flight:
    """One request on its way to a backend, or thought of for it.

    :ivar prompt: its prompt tokens, as estimated.
    :ivar tokens: of these, the ones believed uncached.
    :ivar matched: share of the prompt that the index found there.
    :ivar distance: class of how long ago that was read.
    :ivar ahead: tokens that others were waiting to have read.
    :ivar beside: requests that were there, this one included.
    :ivar expected_s: predicted time to first token for a backend as it usually is.
    :ivar waited: it had to wait for a slot.
    """

    __slots__ = (
        "ahead",
        "backend_id",
        "beside",
        "distance",
        "expected_s",
        "marks",
        "matched",
        "prompt",
        "slot",
        "started_s",
        "tokens",
        "ttft_s",
        "waited",
    )

    def __init__(self, backend_id: str, prompt: float, tokens: float, marks: Sequence[int]) -> None:
        self.backend_id = backend_id
        self.prompt = prompt
        self.tokens = tokens
        self.marks = marks
        self.matched = 0.0
        self.distance = 0
        self.ahead = 0.0
        self.beside = 0
        self.expected_s = 0.0
        self.slot: int | None = None
        self.started_s = 0.0
        self.ttft_s: float | None = None
        self.waited = False


class Pace:
    """What the fleet has in common: the size of requests, and speed for a weight.

    :ivar output: mean output tokens of a request.
    :ivar uncached: mean uncached prompt tokens of a request.
    :ivar overhead_s: mean of the backends' overheads.
    :ivar per_token_s: seconds to read a token at weight 1.
    :ivar step_s: seconds between two output tokens at weight 1.
    """

    __slots__ = ("_answers", "_samples", "herd", "output", "overhead_s", "per_token_s", "step_s", "uncached")

    def __init__(self) -> None:
        self._answers = 0
        self._samples = 0
        self.output = 150.0
        self.uncached = 300.0
        self.herd = 1.0
        self.overhead_s = GUESS_OVERHEAD_S
        self.per_token_s = 0.0
        self.step_s = 0.0

    def answered(self, uncached: float, output: int | None) -> None:
        """A request was answered to its end."""
        self._answers += 1
        gain = max(0.02, 1.0 / (self._answers + 4))
        self.uncached += gain * (uncached - self.uncached)
        if output is not None:
            self.output += gain * (output - self.output)

    def seen(self, weight: float) -> None:
        """The first backend was seen: until something is measured, its weight is the mean."""
        if not self.per_token_s:
            self.per_token_s = weight / GUESS_TOKENS_PER_S
            self.step_s = weight * GUESS_STEP_S

    def measured(self, lane: Lane) -> None:
        """A backend's lines were laid anew."""
        self._samples += 1
        gain = max(0.02, 1.0 / (self._samples + 1))
        self.overhead_s += gain * (lane.reading.base - self.overhead_s)
        self.per_token_s += gain * (lane.reading.slope * lane.weight - self.per_token_s)
        self.step_s += gain * (lane.stepping.base * lane.weight - self.step_s)


class Lane:
    """One backend: what is on its way there, and what that will take.

    :ivar own: requests of ours there.
    :ivar waiting: of these, those without a first token, oldest first.
    :ivar unread: their uncached tokens.
    :ivar others: requests of others there, when somebody told last.
    :ivar fixed_s: cost of a request without uncached tokens.
    :ivar per_token_s: cost of each uncached token.
    :ivar until_s: the two hold no longer than this.
    """

    def __init__(self, backend_id: str, now_s: float) -> None:
        self.id = backend_id
        self.weight = 1.0
        self.slots = 1
        self.own = 0
        self.waiting: dict[str, Flight] = {}
        self.unread = 0.0
        self.read_s = now_s  # when a first token came last
        self.others = 0
        self.own_then = 0
        self.peers = 0
        self.stale = True
        self.told_slots: int | None = None
        self.reading = Line(400.0)
        self.stepping = Line(8.0)
        self.ratio = 1.0
        self.ratio_s = now_s
        self.doubt = 0.0
        self.doubt_s = now_s
        self.trial_s = -inf
        self.pause_s = TRIAL_FIRST_S
        self.used_s = now_s
        # derived by refresh
        self.until_s = -inf
        self.fixed_s = 0.0
        self.per_token_s = 0.0
        self.ahead = 0.0
        self.expected_s = 0.0
        self.full = False
        self.beside = 1

    # --- what happens there -------------------------------------------------------

    def started(self, request_id: str, flight: Flight, now_s: float) -> None:
        """A request of ours was sent there."""
        flight.started_s = self.used_s = now_s
        flight.ahead = self.ahead
        flight.beside = self.beside
        flight.waited = self.full
        flight.expected_s = self.expected_s + self.reading.slope * flight.tokens
        self.own += 1
        self.waiting[request_id] = flight
        self.unread += flight.tokens
        self.until_s = -inf

    def first_token(self, request_id: str, flight: Flight, now_s: float, ttft_s: float) -> None:
        """It has read that request's prompt."""
        self._read(request_id, flight)
        self.read_s = now_s
        flight.ttft_s = ttft_s
        # What was believed cached and was not is no slowness: judge by the whole prompt.
        expected_s = flight.expected_s + self.reading.slope * (flight.prompt - flight.tokens)
        if ttft_s <= expected_s:
            expected_s = max(flight.expected_s, ttft_s)
        ratio = min(ttft_s / (expected_s + 1e-3), LATE_MOST)
        before = self.slowness(now_s)
        gain = 0.5 if ratio > before else 0.3
        if flight.waited:
            gain *= 0.2
        self.ratio = before + gain * (ratio - before)
        self.ratio_s = now_s

    def left(self, request_id: str, flight: Flight) -> None:
        """That request is over."""
        self.own -= 1
        if flight.ttft_s is None:
            self._read(request_id, flight)
        self.until_s = -inf

    def answered(self, flight: Flight, uncached: float, prompt_s: float | None, gap_s: float | None) -> None:
        """Learn from an answer.

        :param uncached: prompt tokens that were read, by the backend's word if it told.
        :param prompt_s: time it says it spent on them.
        :param gap_s: mean time between two tokens.
        """
        ttft_s = flight.ttft_s
        if flight.waited:
            ttft_s = prompt_s
        if ttft_s is not None:
            x = flight.ahead + uncached
            line = self.reading
            expected_s = line.base + line.slope * x
            if line.samples >= 5:
                ttft_s = min(max(ttft_s, expected_s / 3.0), 3.0 * expected_s)
            near = 400.0 / (400.0 + x)
            line.add(x, ttft_s, near * near)
        if gap_s is not None:
            self.stepping.add(flight.beside, gap_s, 1.0)
        self.stale = True

    def failed(self, now_s: float) -> None:
        """A request failed through the backend's fault."""
        self.doubt = self.doubted(now_s) + 1.0
        self.doubt_s = now_s
        self.trial_s = now_s + self.pause_s
        self.pause_s = min(2.0 * self.pause_s, TRIAL_LAST_S)
        self.until_s = -inf

    def succeeded(self, now_s: float) -> None:
        """A request was answered whole."""
        if self.doubt:
            self.doubt = 0.6 * self.doubted(now_s)
            self.doubt_s = now_s
            self.pause_s = max(0.5 * self.pause_s, TRIAL_FIRST_S)
            if self.doubt < 0.05:
                self.doubt = 0.0
            self.until_s = -inf

    def revived(self, now_s: float) -> None:
        """It answers again after nobody was there: it may be tried at once."""
        self.pause_s = TRIAL_FIRST_S
        self.trial_s = now_s
        self.until_s = -inf

    def others_are(self, count: int) -> None:
        """So many requests of others are there."""
        self.others = count
        self.own_then = self.own
        self.until_s = -inf

    # --- what it would cost now ---------------------------------------------------

    def doubted(self, now_s: float) -> float:
        """Failures lately, fading."""
        return self.doubt * exp((self.doubt_s - now_s) / DOUBT_S)

    def slowness(self, now_s: float) -> float:
        """How much longer than usual first tokens took lately; below 1 if shorter."""
        return 1.0 + (self.ratio - 1.0) * exp((self.ratio_s - now_s) / SLOW_S)

    def refresh(self, backend: Backend, pace: Pace, now_s: float, settings: Settings) -> None:
        """Work out ``fixed_s`` and ``per_token_s`` anew."""
        profile = backend.profile
        self.until_s = now_s + TICK_S
        self.weight = weight = backend.weight
        pace.seen(weight)
        reading, stepping = self.reading, self.stepping
        if self.stale:
            self.stale = False
            rate = profile.prefill_rate
            slope = 1.0 / rate if rate and not reading.samples else pace.per_token_s / weight
            reading.fit(pace.overhead_s, slope, settings.guess)
            rate = profile.token_rate
            step_s = 1.0 / rate if rate and not stepping.samples else pace.step_s / weight
            stepping.fit(step_s, 0.03 * step_s, settings.guess)
            if reading.base > OVERHEAD_MOST_S:
                reading.base = OVERHEAD_MOST_S
            if reading.samples:
                pace.measured(self)
        slots = self.told_slots or backend.slots or backend.max_connections
        own = self.own
        if profile.in_flight and profile.in_flight > own:
            own = profile.in_flight
        peers = profile.peers_in_flight
        if peers != self.peers:
            self.peers = peers
            self.others_are(peers or 0)
            self.until_s = now_s + TICK_S
        there: float = own
        herd = pace.herd
        if self.others or herd > 1.0:
            there += max(0.0, self.others + (herd - 1.0) * (own - self.own_then))
        beside = there + 1.0 if there < slots else slots
        self.beside = there + 1 if there < slots else slots
        step_s = stepping.base + stepping.slope * beside
        per_token_s = reading.slope
        slow = self.slowness(now_s)
        if slow < 1.0:
            slow = 1.0
        ahead = 0.0
        late = 1.0
        if self.waiting:
            oldest = next(iter(self.waiting.values()))
            begun_s = self.read_s if self.read_s > oldest.started_s else oldest.started_s
            ahead = herd * self.unread - (now_s - begun_s) / (per_token_s * slow)
            if ahead < 0.0:
                ahead = 0.0
            late = (now_s - oldest.started_s) / (2.0 * oldest.expected_s + 0.05)
            late = LATE_MOST if late > LATE_MOST else late if late > 1.0 else 1.0
        elif not own:
            idle_s = now_s - self.used_s
            if not reading.samples:
                late = exp(-idle_s)
            elif idle_s < 30.0:
                late = 1.0 - idle_s / 60.0
            else:
                late = 0.5
        wait_s = 0.0
        self.full = there >= slots
        if self.full:
            service_s = pace.output * step_s + pace.uncached * per_token_s
            wait_s = (there - slots + 1) * service_s / slots
        self.ahead = ahead
        self.expected_s = reading.base + wait_s + per_token_s * ahead
        factor = slow * late
        doubt = self.doubted(now_s) if self.doubt else 0.0
        if doubt:
            factor *= 1.0 + doubt
        if profile.warmth < 1.0:
            factor *= 1.0 + settings.cold * (1.0 - profile.warmth)
        if profile.gpu_use and own < slots:
            factor *= 1.0 + profile.gpu_use * (1.0 - own / slots)
        self.fixed_s = factor * (self.expected_s + settings.w * pace.output * step_s)
        if doubt:
            self.fixed_s += 0.5 * doubt * (pace.output * step_s)
        self.per_token_s = (
            factor * per_token_s * (1.0 + settings.gamma * (beside if beside < there else there))
        )

    def _read(self, request_id: str, flight: Flight) -> None:
        del self.waiting[request_id]
        self.unread = self.unread - flight.tokens if self.waiting else 0.0
        self.until_s = -inf
