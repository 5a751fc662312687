"""One backend's live picture, kept current from what its requests showed.

:class:`LiveProfile` is the only writer of a :class:`llmgw.values.Profile`
(availability and warmth are written by ``core.member``, which knows them).
Routers hold the ``view`` and read it at any time; its identity never changes.

Two kinds of mean are kept, for two reasons:

- Time to first token is the plain mean of the last :data:`WINDOW` samples, as
  the adaptive router's formula wants it. Samples are whole nanoseconds, so the
  running sum is exact and cannot drift however long the process lives.
- Rates and durations are exponential means: old requests fade out, and one
  number is enough to hold them.
"""

from __future__ import annotations

from math import inf

from llmgw.values import HealthReport, Profile, Usage

WINDOW = 50
"""Samples behind the mean time to first token."""

SHARE = 0.2
"""Weight of the newest sample in exponential means (the first one is the mean):
about the last ten count."""

KEPT = 1 - SHARE
"""What remains of a fading sum at each new sample."""


class LiveProfile:
    """Writes one backend's :class:`~llmgw.values.Profile`.

    :ivar view: what routers read; the same object for life.
    :ivar duration_s: mean length of a completed request, ``None`` before the first.
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
        self._nanos = [0] * WINDOW  # a ring; what was not measured yet adds nothing to the sum
        self._at = 0  # where the next sample goes, over the oldest
        self._sum_nanos = 0
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0

    def started(self, now_s: float) -> None:
        """A request was sent there."""
        view = self.view
        view.in_flight += 1
        view.updated_s = now_s

    def ended(self, now_s: float) -> None:
        """A request left, whatever came of it; exactly once for each :meth:`started`."""
        view = self.view
        view.in_flight -= 1
        view.updated_s = now_s

    def first_token(self, ttft_s: float, now_s: float) -> None:
        """A request showed its first token.

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
        """A request was answered to its end."""
        mean_s = self.duration_s
        self.duration_s = duration_s if mean_s is None else mean_s + SHARE * (duration_s - mean_s)
        view = self.view
        view.failure_streak = 0
        view.updated_s = now_s

    def failed(self, now_s: float) -> None:
        """A request failed through the backend's fault.

        The streak is not cleared by a first token, only by a whole answer: a
        backend that cuts every stream in the middle must not look well.
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
        """Take in the figures of one request; what is missing or senseless is left out.

        The prompt rate is a quotient of two fading sums rather than a mean of
        quotients, so that a prompt of three uncached tokens, whose time is all
        overhead, hardly counts.

        :param usage: tokens by the backend's word; cached ones cost no reading.
        :param prompt_s: time spent reading the uncached part of the prompt.
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
        """Take in what was seen at a look. What it leaves out is not known any more:
        yesterday's figure of a source that has died would count for ever.
        """
        view = self.view
        view.busy_slots = report.busy_slots
        view.deferred = report.deferred
        view.kv_use = report.kv_use
        view.gpu_use = report.gpu_use
        view.updated_s = now_s
