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

    __slots__ = ("_answers", "_samples", "output", "overhead_s", "per_token_s", "step_s", "uncached")

    def __init__(self) -> None:
        self._answers = 0
        self._samples = 0
        self.output = 150.0
        self.uncached = 300.0
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
        self.told: int | None = None
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
