"""The circuit breaker of one backend and one model.

::

    CLOSED     --5 in a row, or half of 20 and more in 30 s-->  OPEN
    OPEN       --5 s x 2^k, 60 s at most, +-20 %-->             HALF_OPEN
    HALF_OPEN  --3 trials passed-->                             SLOW_START
    HALF_OPEN  --1 failure-->                                   OPEN
    SLOW_START --30 s, warmth 10 % to 100 %-->                  CLOSED
    SLOW_START --as CLOSED-->                                   OPEN

``k`` is the number of openings in the last ten minutes. The caller passes what a breaker
cannot know: the size of its pool, and how many of it are ejected already.

Three rules that are easily missed:

- A result counts only if its request was started after the last opening. Hundreds of
  requests that were in flight when the breaker opened fail one after another, and say nothing
  new.
- A trial passes with its first token, since streams run for minutes. Aborted without one, it
  makes room for another trial and proves nothing. One that stays silent for ``open_cap_s`` no
  longer keeps others out.
- Health checks may stand for all trials but the last: a health endpoint may work while the
  real one fails.

Time is monotonic and an argument; transitions by time happen when somebody asks.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from math import inf
from random import Random

from msgspec import Struct

STEPS = 10
"""Steps that a :class:`Tally` divides its window into."""


class State(enum.Enum):
    """The states of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    SLOW_START = "slow_start"


# Enum members are found through a descriptor, which costs more than everything else that a
# request does here (Python 3.11: 0.1 µs); a global name of the module is cheap.
CLOSED = State.CLOSED
OPEN = State.OPEN
HALF_OPEN = State.HALF_OPEN
SLOW_START = State.SLOW_START


class Trigger(enum.Enum):
    """What causes a transition."""

    TRIP = "trip"
    COOL = "cool"
    PROVE = "prove"
    WARM = "warm"


TRANSITIONS: Mapping[tuple[State, Trigger], State] = {
    (State.CLOSED, Trigger.TRIP): State.OPEN,
    (State.OPEN, Trigger.TRIP): State.OPEN,  # the only one of its pool, refused again
    (State.OPEN, Trigger.COOL): State.HALF_OPEN,
    (State.HALF_OPEN, Trigger.TRIP): State.OPEN,
    (State.HALF_OPEN, Trigger.PROVE): State.SLOW_START,
    (State.SLOW_START, Trigger.TRIP): State.OPEN,
    (State.SLOW_START, Trigger.WARM): State.CLOSED,
}
"""Every legal transition; any other raises :class:`KeyError` and changes nothing."""


class BreakerRules(Struct, frozen=True):
    """Thresholds and times; the ``[breaker]`` table.

    :param consecutive: failures in a row that open.
    :param ratio: share of failures that opens, if there are ``ratio_min`` results in ``window_s``.
    :param open_s: duration of the first opening; doubled by each further one within ``decay_s``.
    :param open_cap_s: the longest opening, before jitter.
    :param jitter: openings vary by this share up and down.
    :param successes: trials that must pass while half-open.
    :param slow_start_s: time from ``slow_start_floor`` to full weight.
    :param slow_start_floor: share of its weight with which a backend begins.
    :param decay_s: for this long an opening counts against the backend.
    :param max_ejected: share of a pool that may be ejected at a time; of two always one may.
    :param panic: if less than this share of a pool is available, passive ejections are ignored.
    :param lone_open_s: pause of a pool's only backend after it has refused a connection.
    :param fall: failed health checks in a row that take a backend out.
    :param rise: good ones in a row that bring it back.
    :raise ValueError: a value makes no sense; the message names the field.
    """

    consecutive: int = 5
    ratio: float = 0.5
    ratio_min: int = 20
    window_s: float = 30.0
    open_s: float = 5.0
    open_cap_s: float = 60.0
    jitter: float = 0.2
    successes: int = 3
    slow_start_s: float = 30.0
    slow_start_floor: float = 0.1
    decay_s: float = 600.0
    max_ejected: float = 0.5
    panic: float = 0.5
    lone_open_s: float = 1.0
    fall: int = 3
    rise: int = 2

    def __post_init__(self) -> None:
        for name in ("consecutive", "ratio_min", "successes", "fall", "rise"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more")
        for name in ("window_s", "open_s", "open_cap_s", "decay_s", "lone_open_s", "slow_start_floor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        for name in ("ratio", "jitter", "max_ejected", "panic", "slow_start_floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1")
        if not self.slow_start_s >= 0:
            raise ValueError("slow_start_s must be 0 or more")


class Tally:
    """Counts events, and the marked ones among them, in a sliding window of ``window_s``.

    The window moves in :data:`STEPS` steps, so it covers nine tenths to all of ``window_s``, at
    a cost that does not depend on the rate.

    On a hot path the caller may do itself what :meth:`add` does: call :meth:`roll` if ``now_s``
    has reached ``ends_s``, then add to ``total`` and ``marked`` directly.

    :ivar total: events in the window.
    :ivar marked: marked ones in the window.
    :ivar ends_s: when the present step ends.
    """

    __slots__ = ("_past_marked", "_past_total", "_step", "_step_s", "_steps", "ends_s", "marked", "total")

    def __init__(self, window_s: float) -> None:
        self.total = 0
        self.marked = 0
        self.ends_s = -inf
        self._step = 0
        self._step_s = window_s / STEPS
        # Past steps that are still in the window: number, events, marked ones. The current
        # step has the difference between the totals and their sums.
        self._steps: deque[tuple[int, int, int]] = deque()
        self._past_total = 0
        self._past_marked = 0

    def add(self, now_s: float, total: int, marked: int) -> None:
        """Count ``total`` events, of which ``marked`` are marked; or only marks for earlier ones."""
        if now_s >= self.ends_s:
            self.roll(now_s)
        self.total += total
        self.marked += marked

    def roll(self, now_s: float) -> None:
        """Drop the steps that have left the window."""
        if now_s < self.ends_s:
            return
        steps = self._steps
        steps.append((self._step, self.total - self._past_total, self.marked - self._past_marked))
        self._step = step = int(now_s // self._step_s)
        self.ends_s = (step + 1) * self._step_s
        while steps and steps[0][0] <= step - STEPS:
            _, total, marked = steps.popleft()
            self.total -= total
            self.marked -= marked
        self._past_total = self.total
        self._past_marked = self.marked

    def clear(self) -> None:
        """Forget everything."""
        self._steps.clear()
        self.total = self.marked = 0
        self._past_total = self._past_marked = 0


def ramp(elapsed_s: float, over_s: float, floor: float) -> float:
    """Warmth after ``elapsed_s`` of a slow start that takes ``over_s``: ``floor`` to 1."""
    if elapsed_s >= over_s:
        return 1.0
    return floor + (1.0 - floor) * max(0.0, elapsed_s) / over_s


class Breaker:
    """Decides whether a backend may be tried for a model.

    Every request begins with :meth:`started`, whose ticket is passed to exactly one of
    :meth:`success`, :meth:`failure` and :meth:`neutral` at its end.

    :ivar state: the state when it was last updated, which :meth:`current` does.
    :ivar refused: the last opening was caused by a refused connection.
    """

    __slots__ = (
        "_before",
        "_dice",
        "_hinted_s",
        "_needed",
        "_openings",
        "_passed",
        "_rules",
        "_since_s",
        "_streak",
        "_tally",
        "_ticket",
        "_trial",
        "_trial_s",
        "_until_s",
        "refused",
        "state",
    )

    def __init__(self, rules: BreakerRules, dice: Random) -> None:
        self.state = CLOSED
        self.refused = False
        self._rules = rules
        self._dice = dice
        self._since_s = 0.0
        self._until_s = 0.0
        self._streak = 0
        self._tally = Tally(rules.window_s)
        self._openings: deque[float] = deque()
        self._ticket = 0
        self._before = 0  # tickets up to this one are from before the last opening
        self._trial = 0  # ticket of the running trial, 0 for none
        self._trial_s = 0.0
        self._passed = 0
        self._needed = rules.successes
        self._hinted_s = -inf

    # --- questions ----------------------------------------------------------------

    def current(self, now_s: float) -> State:
        """The state now, after transitions by time."""
        state = self.state
        if state is CLOSED:
            return state
        if state is OPEN and now_s >= self._until_s:
            self._transition(Trigger.COOL, now_s)
            self._trial = 0
            self._passed = 0
        elif state is SLOW_START and now_s >= self._since_s + self._rules.slow_start_s:
            self._transition(Trigger.WARM, now_s)
        return self.state

    def allows(self, now_s: float, alone: bool = False) -> bool:
        """Whether a request may be sent now.

        :param alone: the backend is the only one of its pool. Then only a refused connection
            keeps requests away, for a second at a time: without an alternative, there is
            nothing to lose.
        """
        state = self.current(now_s)
        if state is CLOSED or state is SLOW_START:
            return True
        if alone and not self.refused:
            return True
        patience_s = self._rules.lone_open_s if alone else self._rules.open_cap_s
        if state is HALF_OPEN:
            return self._trial == 0 or now_s >= self._trial_s + patience_s
        return alone and now_s >= self._since_s + patience_s

    def warmth(self, now_s: float) -> float:
        """The share of its weight that the backend should get; 1 unless it is in slow start."""
        if self.current(now_s) is SLOW_START:
            return ramp(now_s - self._since_s, self._rules.slow_start_s, self._rules.slow_start_floor)
        return 1.0

    def opens_again_s(self, now_s: float) -> float:
        """Seconds until the next trial; 0 if the breaker is not open."""
        return self._until_s - now_s if self.current(now_s) is OPEN else 0.0

    # --- what happens -------------------------------------------------------------

    def started(self, now_s: float) -> int:
        """A request is sent. While half-open it is the trial.

        :return: the ticket to pass with its result.
        """
        self._ticket = ticket = self._ticket + 1
        if self.state is not CLOSED and self.current(now_s) is HALF_OPEN:
            self._trial = ticket
            self._trial_s = now_s
        return ticket

    def first_token(self, now_s: float, ticket: int) -> None:
        """The first token of the request has come: if it is the trial, it has passed."""
        if ticket == self._trial:
            self._trial_passed(now_s)

    def success(self, now_s: float, ticket: int) -> None:
        """The request was answered completely."""
        if ticket == self._trial:
            self._trial_passed(now_s)
        elif ticket > self._before and (self.state is CLOSED or self.current(now_s) in (CLOSED, SLOW_START)):
            self._streak = 0
            tally = self._tally
            if now_s >= tally.ends_s:
                tally.roll(now_s)
            tally.total += 1

    def neutral(self, ticket: int) -> None:
        """The request's end says nothing about the backend; a trial makes room for another."""
        if ticket == self._trial:
            self._trial = 0

    def failure(
        self,
        now_s: float,
        ticket: int,
        *,
        refused: bool = False,
        alone: bool = False,
        may_open: bool = True,
    ) -> None:
        """The request failed, and the backend is to blame.

        The ratio is checked here and not at successes: a success after a bad spell must not
        open the breaker.

        :param refused: the connection was refused.
        :param alone: the backend is the only one of its pool.
        :param may_open: the pool can spare it.
        """
        if ticket <= self._before:
            return
        state = self.current(now_s)
        self.neutral(ticket)
        if state is CLOSED or state is SLOW_START:
            self._streak += 1
            self._tally.add(now_s, 1, 1)
        if alone:
            if refused:
                self._open(now_s, self._rules.lone_open_s, refused=True, needed=1)
        elif state is HALF_OPEN or (may_open and state is not OPEN and self._is_too_much(now_s)):
            self._open(now_s, self._next_opening_s(now_s), refused=refused, needed=self._rules.successes)

    def hinted(self, until_s: float) -> None:
        """The breaker of another gateway is open until then. That ejects nothing here, but our
        first own failure until then opens this breaker, too."""
        self._hinted_s = until_s

    def probed(self, now_s: float) -> None:
        """A health check has found the backend well."""
        if self.current(now_s) is HALF_OPEN and self._passed < self._needed - 1:
            self._passed += 1

    # --- inside -------------------------------------------------------------------

    def _transition(self, trigger: Trigger, now_s: float) -> None:
        self.state = TRANSITIONS[self.state, trigger]
        self._since_s = now_s

    def _trial_passed(self, now_s: float) -> None:
        self._trial = 0
        self._passed += 1
        if self._passed >= self._needed:
            self._transition(Trigger.PROVE, now_s)

    def _is_too_much(self, now_s: float) -> bool:
        rules, tally = self._rules, self._tally
        if self._streak >= rules.consecutive or now_s < self._hinted_s:
            return True
        return tally.total >= rules.ratio_min and tally.marked >= rules.ratio * tally.total

    def _next_opening_s(self, now_s: float) -> float:
        rules, openings = self._rules, self._openings
        while openings and openings[0] <= now_s - rules.decay_s:
            openings.popleft()
        doublings = min(len(openings), 32)  # more would overflow
        openings.append(now_s)
        swing = 1.0 + rules.jitter * (2.0 * self._dice.random() - 1.0)
        return min(rules.open_s * 2.0**doublings, rules.open_cap_s) * swing

    def _open(self, now_s: float, for_s: float, *, refused: bool, needed: int) -> None:
        self._transition(Trigger.TRIP, now_s)
        self.refused = refused
        self._until_s = now_s + for_s
        self._before = self._ticket
        self._trial = 0
        self._needed = needed
        self._streak = 0
        self._tally.clear()
