"""The adaptive router: weight against load and measured time to first token.

The formula is that of the article this project set out to make real::

                              K
    score = --------------------------------------
            (C + 1) x (alpha x T / T_base + 1 - alpha)

K is the backend's weight, C its requests in flight, T its mean time to first
token over the last 50 answers (100 ms before the first one, never under 10 ms),
T_base 50 ms. The highest score is chosen. A backend that failed three times in
a row scores 0.

The published code loses backends for ever and floods new ones. Five repairs,
each with a test of its own, leave the formula as it is:

1. A backend at 0 gets one request as a trial every ``trial_s``: otherwise no
   success could ever clear its streak.
2. If all are at 0, the least bad is chosen: a three-second partition must not
   become a refusal without end.
3. The score is multiplied by warmth, so new and recovered backends start slowly.
4. A backend without samples is taken to be no faster than the median of those
   that have some: 100 ms looks splendid beside honest numbers under load.
5. Equal scores take turns, instead of the first in the list winning always.

A sixth lies outside: the lease lasts to the end of the stream, not to the first
token, so C counts all streams that are running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from llmgw.routing.options import Number, read_numbers
from llmgw.routing.turns import MOST_REMEMBERED, Turns
from llmgw.values import Backend, Choice, Event, Request

OPTIONS = {
    "alpha": Number(default=1.0, least=0.0, most=1.0),
    "baseline_ms": Number(default=50.0, above=0.0),
    "default_ttft_ms": Number(default=100.0, above=0.0),
    "floor_ms": Number(default=10.0, above=0.0),
    "streak": Number(default=3, least=1, whole=True),
    "trial_s": Number(default=5.0, above=0.0),
}


class Adaptive:
    """See the module.

    :cvar observes: whether :meth:`observe` does anything with events.
    :param alpha: 1 goes by time to first token alone (the article's code), 0
        ignores it and is weighted least connections.
    :param baseline_ms: the time to first token that counts as 1.
    :param default_ttft_ms: assumed without samples.
    :param floor_ms: smaller means count as this.
    :param streak: failures in a row at which the score is 0.
    :param trial_s: a backend at 0 gets one request in so many seconds.
    """

    observes = False

    def __init__(
        self,
        alpha: float = 1.0,
        baseline_ms: float = 50.0,
        default_ttft_ms: float = 100.0,
        floor_ms: float = 10.0,
        streak: int = 3,
        trial_s: float = 5.0,
    ) -> None:
        self._per_second = alpha * 1000.0 / baseline_ms
        self._rest = 1.0 - alpha
        self._default_s = default_ttft_ms / 1000.0
        self._floor_s = floor_ms / 1000.0
        self._streak = streak
        self._trial_s = trial_s
        self._turns = Turns()
        self._next_trial_s: dict[str, float] = {}  # backends at 0

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Adaptive:
        """:raise ConfigError: each fault names its option."""
        return cls(**read_numbers(options, OPTIONS))

    def choose(self, request: Request, candidates: Sequence[Backend], now_s: float) -> Choice:
        """O(n), and a sort of the known means while some backend has none."""
        streak = self._streak
        trials = self._next_trial_s
        for each in candidates:
            if trials or each.profile.failure_streak >= streak:
                return self._choose_around_failed(candidates, now_s)
        return self._best(candidates, candidates)

    def observe(self, event: Event) -> None:
        """Nothing to learn: what it goes by is in the profiles."""

    def _choose_around_failed(self, candidates: Sequence[Backend], now_s: float) -> Choice:
        """Some are at 0, or were lately."""
        due = self._due_for_trial(candidates, now_s)
        if due is not None:
            self._turns.took(due, candidates)
            return Choice(due, None, 0.0, f"trial after {due.profile.failure_streak} failures")
        fit = [each for each in candidates if each.profile.failure_streak < self._streak]
        if fit:
            return self._best(fit, candidates)
        lowest = min(each.profile.failure_streak for each in candidates)
        least_bad = [each for each in candidates if each.profile.failure_streak == lowest]
        chosen = self._best(least_bad, candidates).backend
        return Choice(chosen, None, 0.0, f"all {len(candidates)} at 0, least bad after {lowest} failures")

    def _best(self, fit: Sequence[Backend], candidates: Sequence[Backend]) -> Choice:
        """By score alone, failures aside, the best of ``fit``; equals take turns.

        :param fit: some of ``candidates``, not empty.
        """
        per_second, rest, floor_s = self._per_second, self._rest, self._floor_s
        guess_s: float | None = None
        best = -inf
        equals: list[Backend] = []
        for each in fit:
            profile = each.profile
            ttft_s = profile.ttft_s
            if ttft_s is None:
                guess_s = ttft_s = self._guess_s(candidates) if guess_s is None else guess_s
            slowness = per_second * (ttft_s if ttft_s > floor_s else floor_s) + rest
            score = each.weight * profile.warmth / ((profile.in_flight + 1) * slowness)
            if score > best:
                best = score
                equals = [each]
            elif score == best:
                equals.append(each)
        why = f"score {best:.3g}, best of {len(candidates)}"
        return Choice(self._turns.next(equals), None, best, why)

    def _guess_s(self, candidates: Sequence[Backend]) -> float:
        known = sorted(each.profile.ttft_s for each in candidates if each.profile.ttft_s is not None)
        return max(self._default_s, known[len(known) // 2]) if known else self._default_s

    def _due_for_trial(self, candidates: Sequence[Backend], now_s: float) -> Backend | None:
        for each in candidates:
            if each.profile.failure_streak < self._streak:
                self._next_trial_s.pop(each.id, None)
            elif self._trial_is_due(each.id, now_s):
                return each
        return None

    def _trial_is_due(self, backend_id: str, now_s: float) -> bool:
        trials = self._next_trial_s
        due_s = trials.get(backend_id)
        if due_s is not None and now_s < due_s:
            return False
        if len(trials) > MOST_REMEMBERED:
            trials.clear()
        trials[backend_id] = now_s + self._trial_s
        return due_s is not None
