"""Doubt in a backend that fails, and when to try it again.

Failures make doubt, answers take a part of it away, and time all of it. With much
doubt a backend gets one trial at a time, at intervals that double while trials
fail and shrink as they succeed, until several in a row went well: so one that
fails six times in ten gets a few requests a minute. One where nobody listened is
another matter: it is tried often, as that costs next to nothing, and a single
good answer says that it is back.

The gateway's breakers stand before this and take away what is plainly dead. This
is for what fails too seldom for them, and for routers driven without breakers.
"""

from __future__ import annotations

from math import exp, inf

FADE_S = 90.0
"""Time constant for forgetting failures."""

FORGIVEN = 0.75
"""What one good answer leaves of doubt."""

MOST = 5.0
"""Many requests that fail at once are one failure of the backend."""

OUT, BACK = 1.5, 0.7
"""With so much doubt, two failures close together, a backend is left to trials, and
with so little it is used again."""

NONE = 0.05
"""Less is no doubt at all."""

TRIAL_FIRST_S, TRIAL_LAST_S = 3.0, 30.0
"""Interval between trials, at first and at most."""

GROWTH = 3.0
"""What a failed trial makes of the interval."""

REFUSED_FIRST_S, REFUSED_LAST_S = 0.5, 2.0
"""The same where nobody listens."""

SHRINK = 0.7
"""What a good answer leaves of the interval."""


class Doubt:
    """About one backend.

    :ivar count: failures lately, as of ``at_s``; 0 if there is no doubt.
    :ivar trial_s: no trial before.
    :ivar pause_s: interval to the next one.
    """

    __slots__ = ("_out", "_refused", "_struck_s", "at_s", "count", "pause_s", "trial_s")

    def __init__(self) -> None:
        self.count = 0.0
        self.at_s = 0.0
        self.trial_s = -inf
        self.pause_s = 0.0
        self._out = False
        self._refused = False
        self._struck_s = -inf

    def now(self, now_s: float) -> float:
        """Failures lately, fading."""
        return self.count * exp((self.at_s - now_s) / FADE_S)

    def is_out(self, failures: float) -> bool:
        """Whether it is left to trials, with so many failures lately."""
        self._out = failures >= (BACK if self._out else OUT)
        return self._out

    def failed(self, started_s: float, now_s: float, refused: bool) -> None:
        """A request failed through the backend's fault.

        Those that were under way when the last failure became known say nothing new
        about when to try again.

        :param refused: nobody listened.
        """
        self.count = min(self.now(now_s) + 1.0, MOST)
        self.at_s = now_s
        self._refused = refused
        if started_s >= self._struck_s:
            self._struck_s = now_s
            first_s, last_s = (REFUSED_FIRST_S, REFUSED_LAST_S) if refused else (TRIAL_FIRST_S, TRIAL_LAST_S)
            pause_s = min(max(self.pause_s, first_s), last_s)
            self.trial_s = now_s + pause_s
            self.pause_s = min(GROWTH * pause_s, last_s)

    def succeeded(self, started_s: float, now_s: float) -> None:
        """A request was answered whole; one older than the last failure says nothing of now."""
        if started_s < self._struck_s:
            return
        if self._refused:
            self.revived()
        left = FORGIVEN * self.now(now_s)
        self.count = left if left > NONE else 0.0
        self.at_s = now_s
        self.pause_s *= SHRINK

    def tried(self, now_s: float) -> None:
        """Chosen while in doubt: the next trial is one interval away."""
        self.trial_s = now_s + max(self.pause_s, REFUSED_FIRST_S)

    def revived(self) -> None:
        """It answers again after nobody was there: what failed then is explained."""
        self.count = min(self.count, BACK / 2.0)
        self.pause_s = 0.0
        self.trial_s = -inf
        self._out = self._refused = False
