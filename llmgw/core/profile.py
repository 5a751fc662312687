"""The live figures of one backend, updated by what happens to its requests.

:class:`LiveProfile` is the only writer of a :class:`llmgw.values.Profile`, except for
availability and warmth, which ``core.member`` writes. Routers hold the ``view`` and read it at
any time; it is always the same object.

Two kinds of means are used:

- Time to first token is the plain mean of the last :data:`WINDOW` samples, as the formula of
  the adaptive router requires. Samples are whole nanoseconds, so the running sum is exact and
  cannot drift, however long the process lives.
- Rates and durations are exponential means: old requests fade out, and one number holds them.
"""

from __future__ import annotations

from math import inf

from llmgw.values import HealthReport, Profile, Usage

WINDOW = 50
"""Samples behind the mean time to first token."""

SHARE = 0.2
"""Weight of the newest sample in exponential means, which cover about the last ten samples. The
first sample is the mean."""

KEPT = 1 - SHARE
"""The part of a fading sum that remains at each new sample."""


class LiveProfile:
    """Writes one backend's :class:`~llmgw.values.Profile`.

    :ivar view: what routers read; always the same object.
    :ivar duration_s: mean duration of completed requests; ``None`` before the first.
    """

    __slots__ = (
        "_at",
        "_nanos",
        "_prefill_s",
        "_prefill_tokens",
        "_sum_nanos",
        "duration_s",
        "view",
    )

    def __init__(self) -> None:
        self.view = Profile()
        self.duration_s: float | None = None
        self._nanos = [0] * WINDOW  # a ring buffer; zeros add nothing to the sum
        self._at = 0  # index of the oldest sample, which the next one replaces
        self._sum_nanos = 0
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0

    def started(self, now_s: float) -> None:
        """A request was sent there."""
        view = self.view
        view.in_flight += 1
        view.updated_s = now_s

    def ended(self, now_s: float) -> None:
        """A request has ended, with whatever outcome; exactly once for each :meth:`started`."""
        view = self.view
        view.in_flight -= 1
        view.updated_s = now_s

    def first_token(self, ttft_s: float, now_s: float) -> None:
        """The first token of a request has come.

        :param ttft_s: seconds since it was sent; below zero counts as zero.
        """
        sample = round(ttft_s * 1e9) if ttft_s > 0.0 else 0
        nanos, at = self._nanos, self._at
        self._sum_nanos = total = self._sum_nanos + sample - nanos[at]
        nanos[at] = sample
        self._at = at + 1 if at + 1 < WINDOW else 0
        view = self.view
        count = view.ttft_samples
        if count < WINDOW:
            view.ttft_samples = count = count + 1
        view.ttft_s = total / count / 1e9
        view.updated_s = now_s

    def succeeded(self, duration_s: float, now_s: float) -> None:
        """A request was answered completely."""
        mean_s = self.duration_s
        self.duration_s = duration_s if mean_s is None else mean_s + SHARE * (duration_s - mean_s)
        view = self.view
        view.failure_streak = 0
        view.updated_s = now_s

    def failed(self, now_s: float) -> None:
        """A request failed, and the backend is to blame.

        Only a complete answer ends the streak, not a first token: a backend that cuts every
        stream in the middle must not look healthy.
        """
        self.view.failure_streak += 1
        self.view.updated_s = now_s

    def measured(
        self,
        now_s: float,
        usage: Usage | None = None,
        prompt_s: float | None = None,
        token_rate: float | None = None,
    ) -> None:
        """Take in the figures of one request; missing and senseless ones are ignored.

        The prefill rate is a quotient of two fading sums, not a mean of quotients, so that a
        prompt with three uncached tokens, whose time is all overhead, hardly counts.

        :param usage: tokens as reported by the backend.
        :param prompt_s: seconds spent on the uncached part of the prompt.
        :param token_rate: output tokens per second of this stream.
        """
        view = self.view
        if token_rate is not None and 0.0 < token_rate < inf:
            mean = view.token_rate
            view.token_rate = token_rate if mean is None else mean + SHARE * (token_rate - mean)
            view.updated_s = now_s
        if usage is not None and prompt_s is not None and 0.0 < prompt_s < inf:
            uncached = usage.prompt_tokens - usage.cached_tokens
            if uncached > 0:
                self._prefill_tokens = tokens = KEPT * self._prefill_tokens + uncached
                self._prefill_s = seconds = KEPT * self._prefill_s + prompt_s
                view.prefill_rate = tokens / seconds
                view.updated_s = now_s

    def reported(self, report: HealthReport, now_s: float) -> None:
        """Take in a health report. What it leaves out becomes unknown: otherwise the last figure of
        a source that has died would count for ever.
        """
        view = self.view
        view.busy_slots = report.busy_slots
        view.deferred = report.deferred
        view.kv_use = report.kv_use
        view.gpu_use = report.gpu_use
        view.updated_s = now_s
