"""Measures the load of this process, and lets ``core.overload`` decide what to stop doing.

Four times a second a beat measures the lag of the event loop and the use of memory. The
published lag is what a request experiences. The lag that is judged excludes the time in which
the process was ready to run, but the machine was busy with others: refusing requests would not
help against that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.logger import Logger

from llmgw.core.overload import CALM_S, Ladder, Level, OverloadRules
from llmgw.memory import Memory
from llmgw.proc_file import ProcFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twisted.internet.interfaces import IDelayedCall

    from llmgw.config import OverloadConfig
    from llmgw.gateway.gateway import Gateway
    from llmgw.wire.site import Site

BEAT_S = 0.25
GIVE_BACK_EVERY_S = 5.0
GIVE_BACK_BYTES = 8 << 20
GIVE_BACK_SHARE = 1 / 8
"""Free memory is returned to the system when the process has grown by so much since the last time,
and by this share of its size: the larger a heap is, the longer it takes to look through it."""
BURST_BYTES = 1 << 20
"""A process that grows by more than this between two beats is in a burst."""
CUT_AT_ONCE = 16
"""Stalled answers cut at one beat; the next beat sees whether that was enough."""


class Pressure:
    """The beat of one gateway process.

    :param observe: called with the lag of each beat in seconds.
    :param waited_s: returns the seconds that this thread has waited for a CPU since its start.
    :param memory: makes the gauge from the operator's limit.
    """

    log = Logger()

    def __init__(
        self,
        config: OverloadConfig,
        *,
        site: Site,
        gateway: Gateway,
        observe: Callable[[float], None],
        reactor: Any,
        clock: Callable[[], float],
        waited_s: Callable[[], float] | None = None,
        memory: Callable[[int | None], Any] = Memory,
    ) -> None:
        self._site = site
        self._gateway = gateway
        self._observe = observe
        self._reactor = reactor
        self._clock = clock
        self._waited = waited_s if waited_s is not None else CpuWait()
        self._make_memory = memory
        self._due_s = 0.0
        self._waited_s = 0.0
        self._gave_back_s = 0.0
        self._smallest_bytes = self._own_bytes = 0
        self._call: IDelayedCall | None = None
        self._ladder = Ladder(OverloadRules())
        self.configure(config)

    def configure(self, config: OverloadConfig) -> None:
        """Change the limits; the level stays until the next beat."""
        self._memory = self._make_memory(config.memory_bytes)
        self._ladder.rules = OverloadRules(
            **{name: getattr(config, name) for name in OverloadRules.__struct_fields__}
        )

    @property
    def level(self) -> Level:
        """The level now."""
        return self._ladder.level

    @property
    def memory(self) -> float | None:
        """Share of the memory limit in use at the last beat."""
        return self._ladder.memory

    def state(self) -> Mapping[str, Any]:
        """For ``/api/state``."""
        ladder = self._ladder
        return {
            "level": ladder.level.name.lower(),
            "lag_s": ladder.lag_s,
            "memory": ladder.memory,
            "memory_limit_bytes": self._memory.limit_bytes,
        }

    def start(self) -> None:
        """Start the beat."""
        self._waited_s = self._waited()
        self._arm()

    def stop(self) -> None:
        """Stop the beat."""
        call, self._call = self._call, None
        if call is not None and call.active():
            call.cancel()

    def _arm(self) -> None:
        self._due_s = self._clock() + BEAT_S
        self._call = self._reactor.callLater(BEAT_S, self._beat)

    def _beat(self) -> None:
        now_s = self._clock()
        lag_s = max(0.0, now_s - self._due_s)
        self._observe(lag_s)
        waited_s = self._waited()
        own_lag_s = max(0.0, lag_s - (waited_s - self._waited_s))
        self._waited_s = waited_s
        before = self._ladder.level
        try:
            share = self._memory.share()
            self._give_back(now_s)
            level = self._ladder.beat(now_s, own_lag_s, share)
            if level is not before:
                self._changed(level)
            if level >= Level.CLOSED:
                self._site.close_idle()
            if level is Level.CUTTING:
                self._site.cut_stalled(CUT_AT_ONCE)
        finally:
            self._arm()

    def _give_back(self, now_s: float) -> None:
        """Return free memory now and then; while memory is short, before anybody is refused for long."""
        short = self._ladder.level > Level.CALM and self._ladder.by_memory
        every_s = CALM_S if short else GIVE_BACK_EVERY_S
        if now_s - self._gave_back_s < every_s:
            return
        memory = self._memory
        self._smallest_bytes = min(self._smallest_bytes, memory.own_bytes)
        growth = max(GIVE_BACK_BYTES, self._smallest_bytes * GIVE_BACK_SHARE)
        # During a burst there is little to return, and the next attempt would be far off.
        still_grows = memory.own_bytes > self._own_bytes + BURST_BYTES
        self._own_bytes = memory.own_bytes
        if short or (memory.own_bytes > self._smallest_bytes + growth and not still_grows):
            self._gave_back_s = now_s
            memory.give_back()
            self._smallest_bytes = memory.own_bytes

    def _changed(self, level: Level) -> None:
        self._gateway.overload = level
        self._site.shedding = level >= Level.SHEDDING
        self._site.accepting = level < Level.CLOSED
        memory = self._ladder.memory
        self.log.warn(
            "overload: {reached} (event loop {lag:.3f} s late, memory {memory} used)",
            reached=level.name.lower(),
            lag=self._ladder.lag_s,
            memory="?" if memory is None else f"{memory:.0%}",
        )


class CpuWait:
    """How long a thread, the first one that asks, was ready to run without a CPU.

    :source: Linux ``Documentation/scheduler/sched-stats.rst``, ``/proc/<pid>/schedstat``.
    """

    def __init__(self) -> None:
        self._file = ProcFile("/proc/thread-self/schedstat")

    def __call__(self) -> float:
        """Seconds since the start of the thread; 0 if the system does not report it."""
        try:
            return int(self._file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0
