"""How fast one backend reads and writes, learned from its answers."""

from __future__ import annotations

from llmgw.routing.line import Line
from llmgw.routing.pace import Flight, Pace
from llmgw.values import Profile

SURE, FRESH_MOST = 24, 4
"""With so many samples the lines are laid anew only after so many more."""

SEEN_MOST, SEEN_MOST_S = 10.0, 0.05
"""So much more than a server says that reading took is believed to be its reading: so
many times its word, and so many seconds."""

OVERHEAD_MOST_S = 0.25
"""Overhead beyond is not believed: it is waiting that we did not see."""


class Speed:
    """Two straight lines, which :meth:`lay` keeps up with the answers.

    :ivar reading: time to first token of an idle backend over uncached prompt tokens.
    :ivar stepping: time between two output tokens over the streams there.
    """

    __slots__ = ("_fresh", "_pace", "_profile", "_weight", "reading", "stepping")

    def __init__(self) -> None:
        self.reading = Line(400.0)
        self.stepping = Line(8.0)
        self._fresh = 0
        self._weight = 0.0

    def of(self, pace: Pace, weight: float, profile: Profile) -> None:
        """Whose speed it is. Beside the first samples, and in their place, stands the fleet's
        pace for that weight, or what the profile knows from a time before us."""
        known = self._weight
        self._pace, self._weight, self._profile = pace, weight, profile
        if weight != known:
            self._lay()

    def answered(self, flight: Flight, uncached: float, prompt_s: float | None, gap_s: float | None) -> None:
        """Learn from an answer.

        :param uncached: prompt tokens that were read, by the backend's word if it told.
        :param prompt_s: time it says it spent on them, free of waiting for others.
        :param gap_s: mean time between two tokens.
        """
        line, ttft_s = self.reading, flight.ttft_s
        x, y = uncached, prompt_s
        if ttft_s is not None and not flight.waited and not (flight.whole and y is not None):
            if y is None:
                x, y = flight.ahead + uncached, ttft_s
            else:  # a server that is held back may not know it, so what was seen counts more than its word
                seen_s, most_s = ttft_s - line.slope * flight.ahead, SEEN_MOST * y + SEEN_MOST_S
                if seen_s > y:
                    y = seen_s if seen_s < most_s else most_s
        if y is not None:
            if line.samples >= 5:  # before that a wrong guess must not clip what overrules it
                expected_s = line.base + line.slope * x
                if 3.0 * y < expected_s:
                    y = expected_s / 3.0
                elif y > 3.0 * expected_s:
                    y = 3.0 * expected_s
            near = 400.0 / (400.0 + x)
            line.add(x, y, near * near)
        if gap_s is not None:
            self.stepping.add(flight.beside, gap_s, 1.0)
        self._fresh += 1
        if self._weight and (self._fresh >= FRESH_MOST or line.samples < SURE):
            self._lay()

    def _lay(self) -> None:
        self._fresh = 0
        pace, weight = self._pace, self._weight
        pace.seen(weight)
        reading, stepping = self.reading, self.stepping
        slope = pace.per_token_s / weight
        profile = self._profile
        if profile.prefill_rate and not reading.samples:
            slope = 1.0 / profile.prefill_rate
        reading.fit(pace.overhead_s, slope)
        if reading.base > OVERHEAD_MOST_S:
            reading.base = OVERHEAD_MOST_S
        step_s = pace.step_s / weight
        if profile.token_rate and not stepping.samples:
            step_s = 1.0 / profile.token_rate
        stepping.fit(step_s, 0.03 * step_s)
        if reading.samples:
            pace.measured(weight, reading, stepping)
