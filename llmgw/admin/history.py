"""What the fleet did in the last ten minutes, a sample every five seconds.

An operator who opens the dashboard amid an incident wants to see what led to
it. Samples are differences of the counters that Prometheus gets too, so a
request costs nothing here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from twisted.internet.task import LoopingCall
from twisted.logger import Logger

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

    from llmgw.admin.metrics import Traffic

EVERY_S = 5.0
MOST = 120


class History:
    """Samples, oldest first, as plain values.

    Each has ``at`` (Unix seconds of its end), ``every_s``, ``requests``, ``errors``
    (5xx), ``rejected`` (by code), ``output_tokens`` of that time, ``in_flight`` and ``waiting``
    at its end, and by backend id what was answered there: ``requests`` and, where
    there was one, the mean ``ttft_s``. Backends without a request are left out.

    :param traffic: the counters now.
    :param load: gauges to store with a sample, by name.
    :ivar total: samples that were ever taken.
    """

    log = Logger()
    name = "history"

    def __init__(
        self,
        traffic: Callable[[], Traffic],
        load: Callable[[], Mapping[str, float]],
        wall_clock: Callable[[], float],
        reactor: IReactorTime,
    ) -> None:
        self.total = 0
        self._traffic = traffic
        self._load = load
        self._wall_clock = wall_clock
        self._samples: deque[dict[str, Any]] = deque(maxlen=MOST)
        self._before: Traffic | None = None
        self._loop = LoopingCall(self._sample_or_log)
        self._loop.clock = reactor

    def start(self) -> None:
        """Begin to take samples."""
        self._before = self._traffic()
        self._loop.start(EVERY_S, now=False)

    def stop(self) -> None:
        """Take no more."""
        if self._loop.running:
            self._loop.stop()

    def since(self, seen: int) -> list[dict[str, Any]]:
        """The samples after the first ``seen`` ones, as far as they are kept."""
        wanted = min(self.total - seen, len(self._samples))
        return list(islice(self._samples, len(self._samples) - wanted, None))

    def sample(self) -> None:
        """Take one."""
        now, before = self._traffic(), self._before or self._traffic()
        self._before = now
        backends: dict[str, dict[str, float]] = {}
        for name, counts in now.backends.items():
            earlier = before.backends.get(name)
            requests = counts.requests - (earlier.requests if earlier else 0)
            first = counts.ttft_count - (earlier.ttft_count if earlier else 0)
            if requests > 0:
                backends[name] = {"requests": requests}
                if first > 0:
                    ttft_s = (counts.ttft_sum_s - (earlier.ttft_sum_s if earlier else 0.0)) / first
                    backends[name]["ttft_s"] = round(ttft_s, 6)
        self._samples.append(
            {
                "at": round(self._wall_clock(), 3),
                "every_s": EVERY_S,
                "requests": max(0, now.requests - before.requests),
                "errors": max(0, now.errors - before.errors),
                "rejected": {
                    reason: count - before.rejected.get(reason, 0)
                    for reason, count in now.rejected.items()
                    if count > before.rejected.get(reason, 0)
                },
                "output_tokens": max(0, now.output_tokens - before.output_tokens),
                **self._load(),
                "backends": backends,
            }
        )
        self.total += 1

    def _sample_or_log(self) -> None:
        try:
            self.sample()
        except Exception:
            self.log.failure("taking a sample of the traffic")
