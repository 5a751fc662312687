"""Peak EWMA: the lowest recent duration times load, quick to believe bad news.

A duration longer than the mean becomes the mean at once; a shorter one pulls it
down slowly. Cost is that mean times the requests there with the one to place,
over warmth. Simple, without weights, and good where requests are of one size:
with long and short ones mixed it mostly measures who had the last long one.

A failure counts as twice the mean, so that a backend that fails fast does not
look fast. One that never answered counts as the mean of the others, and one
unused for ``tau_s`` is partly forgiven, else nobody would ever ask it again.

:source: Twitter Finagle, ``PeakEwma`` load balancer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, inf
from typing import Any

from llmgw.routing.options import Number, read_numbers
from llmgw.routing.turns import MOST_REMEMBERED, Turns
from llmgw.values import Backend, Choice, Event, Finished, Request

OPTIONS = {
    "tau_s": Number(default=10.0, above=0.0),
    "default_ms": Number(default=1000.0, above=0.0),
}


class PeakEwma:
    """See the module.

    :cvar observes: whether :meth:`observe` does anything with events.
    :param tau_s: time constant of the mean.
    :param default_ms: assumed while nothing was measured anywhere.
    """

    observes = True

    def __init__(self, tau_s: float = 10.0, default_ms: float = 1000.0) -> None:
        self._tau_s = tau_s
        self._default_s = default_ms / 1000.0
        self._means: dict[str, tuple[float, float]] = {}  # mean, and when it was so
        self._turns = Turns()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> PeakEwma:
        """:raise ConfigError: each fault names its option."""
        return cls(**read_numbers(options, OPTIONS))

    def choose(self, request: Request, candidates: Sequence[Backend], now_s: float) -> Choice:
        """O(n)."""
        means, tau_s = self._means, self._tau_s
        known = [means[each.id] for each in candidates if each.id in means]
        middle_s = sum(mean_s for mean_s, _ in known) / len(known) if known else self._default_s
        lowest = inf
        equals: list[Backend] = []
        for each in candidates:
            profile = each.profile
            there = profile.in_flight or 0
            mean = means.get(each.id)
            if mean is None:
                mean_s = middle_s
            elif there:
                mean_s = mean[0]
            else:  # what an idle backend was like is forgotten, down to the others' mean
                past = exp((mean[1] - now_s) / tau_s)
                mean_s = min(mean[0], past * mean[0] + (1.0 - past) * middle_s)
            cost = mean_s * (there + 1) / profile.warmth if profile.warmth > 0.0 else inf
            if cost < lowest:
                lowest = cost
                equals = [each]
            elif cost == lowest:
                equals.append(each)
        chosen = self._turns.next(equals)
        return Choice(chosen, None, lowest, f"cost {lowest:.3g} s, lowest of {len(candidates)}")

    def observe(self, event: Event) -> None:
        """Learn from ends: of answers the duration, of failures twice the mean."""
        if not isinstance(event, Finished) or (event.ok and event.reason != "done"):
            return
        means, now_s = self._means, event.at_s
        mean_s, at_s = means.get(event.backend_id, (0.0, now_s))
        sample_s = max(event.duration_s, 0.0)
        if not event.ok:
            sample_s = max(sample_s, 2.0 * (mean_s or self._default_s))
            sample_s = min(sample_s, 100.0 * self._default_s)
        if sample_s < mean_s:
            past = exp((at_s - now_s) / self._tau_s)
            sample_s = past * mean_s + (1.0 - past) * sample_s
        if len(means) > MOST_REMEMBERED:
            means.clear()
        means[event.backend_id] = (sample_s, now_s)
