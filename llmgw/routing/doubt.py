"""Doubt in a backend that fails, and when to try it again.

Failures make doubt, answers take a part of it away, and time all of it. With much
doubt a backend is out: left to trials, one at a time. The next one is due when
some time has passed, the longer the more trials failed, and a number of requests
went elsewhere; so one that fails six times in ten gets next to nothing, be the
requests many or few. Where the others are hard pressed, time alone must do. After
a trial that went well another one follows at once, and a few of them in a row bring
the backend back. One where nobody listened is another matter: it is tried often, as
that costs next to nothing, and a single good answer says that it is back.

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

OUT = 1.5
"""With so much doubt, two failures close together, a backend is out."""

PROVEN, OUT_NEW = 5, 0.9
"""One that has not answered so often yet is out after a single failure."""

ROW, BACK = 3, 0.35
"""So many good answers in a row bring it back, with no more doubt than this."""

NONE = 0.05
"""Less is no doubt at all."""

TRIAL_FIRST_S, TRIAL_LAST_S = 5.0, 30.0
"""Time until the next trial, at first and at most."""

GROWTH, SHRINK = 6.0, 0.7
"""What a failed trial makes of that time, and one that went well."""

REFUSED_FIRST_S, REFUSED_LAST_S = 0.5, 2.0
"""The same where nobody listens."""

TRIAL_SENT = 128
"""Requests that must have been sent until the next trial, to whomever,"""

TRIAL_LATE_S = 120.0
"""or else so much time must have passed."""


class Doubt:
    """About one backend.

    :ivar count: failures lately, as of ``at_s``; 0 if there is no doubt.
    :ivar out: it is left to trials.
    :ivar trial_s: no trial before.
    :ivar pause_s: time from a failure to the next trial.
    """

    __slots__ = (
        "_answers",
        "_due_s",
        "_due_sent",
        "_refused",
        "_row",
        "_struck_s",
        "at_s",
        "count",
        "out",
        "pause_s",
        "trial_s",
    )

    def __init__(self) -> None:
        self.count = 0.0
        self.at_s = 0.0
        self.out = False
        self.trial_s = -inf
        self.pause_s = 0.0
        self._due_sent = 0
        self._due_s = -inf
        self._refused = False
        self._struck_s = -inf
        self._answers = 0
        self._row = 0

    def now(self, now_s: float) -> float:
        """Failures lately, fading."""
        return self.count * exp((self.at_s - now_s) / FADE_S)

    def is_due(self, now_s: float, sent: int) -> bool:
        """Whether it is time for a trial, however well the others do.

        :param sent: requests that were sent so far, to whomever.
        """
        return now_s >= self.trial_s and (sent >= self._due_sent or now_s >= self._due_s)

    def failed(self, started_s: float, now_s: float, sent: int, refused: bool) -> None:
        """A request failed through the backend's fault.

        Those that were under way when the last failure became known say nothing new
        about when to try again.

        :param sent: see :meth:`is_due`.
        :param refused: nobody listened.
        """
        self.count = count = min(self.now(now_s) + 1.0, MOST)
        self.at_s = now_s
        self.out = self.out or count >= (OUT if self._answers >= PROVEN else OUT_NEW)
        self._refused = refused
        if started_s >= self._struck_s:
            self._struck_s = now_s
            self._row = 0
            first_s, last_s = (REFUSED_FIRST_S, REFUSED_LAST_S) if refused else (TRIAL_FIRST_S, TRIAL_LAST_S)
            self.pause_s = min(max(self.pause_s, first_s), last_s)
            self.tried(now_s, sent)
            self.pause_s = min(GROWTH * self.pause_s, last_s)

    def succeeded(self, started_s: float, now_s: float) -> None:
        """A request was answered whole; one older than the last failure says nothing of now."""
        self._answers += 1
        if started_s < self._struck_s or not self.count:
            return
        self._row += 1
        if self._refused:
            self.revived()
        left = FORGIVEN * self.now(now_s)
        if self.out:
            self.trial_s = self._due_s = now_s
            if self._row >= ROW:
                self.out = False
                left = min(left, BACK)
        self.count = left if left > NONE or self.out else 0.0
        self.at_s = now_s
        self.pause_s *= SHRINK

    def tried(self, now_s: float, sent: int) -> None:
        """Chosen while in doubt: the next trial is some way off."""
        self.trial_s = now_s + max(self.pause_s, REFUSED_FIRST_S)
        self._due_s = now_s + TRIAL_LATE_S
        self._due_sent = sent if self._refused else sent + TRIAL_SENT

    def revived(self) -> None:
        """It answers again after nobody was there: what failed then is explained."""
        self.count = min(self.count, BACK)
        self.pause_s = 0.0
        self.trial_s = self._due_s = -inf
        self.out = self._refused = False
