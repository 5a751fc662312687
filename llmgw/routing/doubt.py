"""Doubt in a backend that fails, and when to try it again.

Failures make doubt, answers take a part of it away, and time all of it. With much
doubt a backend is out: left to trials, one at a time. The next one is due when
some time has passed, the longer the more trials failed, and a number of requests
went elsewhere; so one that fails six times in ten gets next to nothing, be the
requests many or few. Where the others are hard pressed, time alone must do. After
a trial that went well another one follows at once, and a few of them in a row bring
the backend back. A first token is enough: whoever fails fast does not come so far.

Where requests fail now and then at all of them, a failure says less of the one that it
happened at: then it takes more of them (:func:`fails_anyhow`). A fleet in which three
requests in a hundred failed would else lose a good backend every few seconds.

One that is gone is another matter: nobody listened, or all that was under way there was
cut at once, as when a server restarts. Such a one is not half ill but away for a time. It
is tried every two seconds, or less often when it has been away for long, and a single good
sign says that it is back.

The gateway's breakers stand before this and take away what is plainly dead. This
is for what fails too seldom for them, and for routers driven without breakers.
"""

from __future__ import annotations

from collections.abc import Iterable
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

OUT_MORE, OUT_MOST = 160.0, 3.0
"""So much more doubt it takes for the share of requests that fails anyhow, and at most."""

RECORD_KEPT, RECORD_LEAST = 0.995, 100.0
"""What remains of a backend's record at each new answer or failure, so that some two hundred
count; and so many of the fleet must be known for the share of failures to be taken as it is."""

ROW, BACK = 3, 0.35
"""So many good answers in a row bring it back, with no more doubt than this."""

NONE = 0.05
"""Less is no doubt at all."""

TRIAL_FIRST_S, TRIAL_LAST_S = 5.0, 30.0
"""Time until the next trial, at first and at most."""

GROWTH, SHRINK = 6.0, 0.7
"""What a failed trial makes of that time, and one that went well."""

GONE_FIRST_S, GONE_NEXT_S = 0.5, 2.0
"""The same for one that is gone."""

GONE_SHARE = 0.25
"""Trials that fail otherwise than by nobody listening, which costs little, are at least this
share of the time apart for which it has been gone."""

TOGETHER_S = 1.0
"""Requests that are cut so close together are lost at once."""

TRIAL_SENT = 128
"""Requests that must have been sent until the next trial, to whomever,"""

TRIAL_LATE_S = 120.0
"""or else so much time must have passed."""


class Doubt:
    """About one backend.

    :ivar bad: of the requests that ended while it was in use, those that failed, fading; who is
        gone has not failed.
    :ivar seen: the same of all of them.
    :ivar count: failures lately, as of ``at_s``; 0 if there is no doubt.
    :ivar out: it is left to trials.
    :ivar trial_s: no trial before.
    :ivar pause_s: time from a failure to the next trial.
    """

    __slots__ = (
        "_answers",
        "_back_s",
        "_before",
        "_cut_s",
        "_due_s",
        "_due_sent",
        "_gone",
        "_gone_s",
        "_row",
        "_struck_s",
        "at_s",
        "bad",
        "count",
        "out",
        "pause_s",
        "seen",
        "trial_s",
    )

    def __init__(self) -> None:
        self.bad = self.seen = 0.0
        self._before = (0.0, 0.0)
        self.count = 0.0
        self.at_s = 0.0
        self.out = False
        self.trial_s = -inf
        self.pause_s = 0.0
        self._due_sent = 0
        self._due_s = -inf
        self._gone = False
        self._gone_s = self._back_s = self._cut_s = -inf
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

    def record(self) -> tuple[float, float]:
        """What failed of how many, before the present doubt began."""
        return self._before if self.count else (self.bad, self.seen)

    def _note(self, bad: float) -> None:
        """A request ended; trials say nothing of who is in use."""
        if not self.out:
            self.seen = RECORD_KEPT * self.seen + 1.0
            self.bad = RECORD_KEPT * self.bad + bad

    def failed(
        self,
        started_s: float,
        now_s: float,
        sent: int,
        *,
        refused: bool = False,
        cut: bool = False,
        left: int = 1,
        anyhow: float = 0.0,
    ) -> bool:
        """A request failed through the backend's fault.

        Those that were under way when the last failure became known say nothing new
        about when to try again.

        :param sent: see :meth:`is_due`.
        :param refused: nobody listened.
        :param cut: its connection or stream was cut.
        :param left: so many of ours are there still.
        :param anyhow: the share that fails whoever is asked, of :func:`fails_anyhow`.
        :return: whether all that was there is lost.
        """
        if not self.count:
            self._before = (self.bad, self.seen)
        self.count = count = min(self.now(now_s) + 1.0, MOST)
        self.at_s = now_s
        if cut:
            self._cut_s = now_s
        lost = not left and not self._gone and self._is_lost(now_s)
        least = OUT if self._answers >= PROVEN else OUT_NEW
        more = 0.0
        if not (lost or refused):
            self._note(1.0)
            more = min(OUT_MORE * anyhow, OUT_MOST)
        if not self.out or (count >= least and not self._gone):  # it may be known only now what fails anyhow
            self.out = count >= least + more
        if lost or (refused and not self._gone):
            self._gone = True
            self._gone_s, self.pause_s = now_s, 0.0
        elif started_s < self._struck_s:
            return False
        self._struck_s = now_s
        self._row = 0
        if self._gone:
            self.pause_s = max(self.pause_s, GONE_FIRST_S)
            self.tried(now_s, sent)
            away_s = 0.0 if refused else now_s - self._gone_s
            self.pause_s = min(max(GONE_NEXT_S, GONE_SHARE * away_s), TRIAL_LAST_S)
        else:
            self.pause_s = min(max(self.pause_s, TRIAL_FIRST_S), TRIAL_LAST_S)
            self.tried(now_s, sent)
            self.pause_s = min(GROWTH * self.pause_s, TRIAL_LAST_S)
        return lost

    def _is_lost(self, now_s: float) -> bool:
        """Whether the last ones there were cut just now; if that happened lately, too, it is an illness."""
        return now_s - self._cut_s < TOGETHER_S and now_s - self._back_s > FADE_S

    def answered(self, started_s: float, now_s: float) -> None:
        """A first token came, or a whole answer without one; to a request older than the last
        failure it says nothing of now."""
        self._answers += 1
        self._note(0.0)
        if started_s < self._struck_s or not self.count:
            return
        self._row += 1
        if self._gone:
            self.revived(now_s)
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
        self.trial_s = now_s + max(self.pause_s, GONE_FIRST_S)
        self._due_s = now_s + TRIAL_LATE_S
        self._due_sent = sent if self._gone else sent + TRIAL_SENT

    def revived(self, now_s: float) -> None:
        """It answers again after nobody was there: what failed then is explained."""
        if self.out:
            self._back_s = now_s
        self.count = min(self.count, BACK)
        self.pause_s = 0.0
        self.trial_s = self._due_s = -inf
        self.out = self._gone = False


def fails_anyhow(doubt: Doubt, others: Iterable[Doubt]) -> float:
    """Share of requests that fails whoever is asked: of its own before this doubt, and of the
    others' without the one that failed most, who may be ill, too."""
    bad, seen = doubt.record()
    worst = doubt
    most = 0.0
    for each in others:
        if each is not doubt:
            bad += each.bad
            seen += each.seen
            if each.bad > most:
                worst, most = each, each.bad
    if worst is not doubt:
        bad -= worst.bad
        seen -= worst.seen
    return bad / (seen + RECORD_LEAST)
