"""The beat: what it measures, what it sets, and that it goes on."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from twisted.internet.task import Clock

from llmgw.config import OverloadConfig
from llmgw.core.overload import Level
from llmgw.pressure import BEAT_S, CpuWait, Pressure


class Site:
    """What the beat uses of it."""

    def __init__(self) -> None:
        self.shedding = False
        self.accepting = True
        self.idle_closed = self.stalled_cut = 0

    def close_idle(self) -> None:
        self.idle_closed += 1

    def cut_stalled(self, most: int) -> None:
        self.stalled_cut += most


class Memory:
    """Memory as the test says."""

    limit_bytes: int | None = 1000
    now: float | None = 0.1
    own_bytes = 50 << 20
    left = 60 << 20
    given_back = 0

    def give_back(self) -> None:
        self.given_back += 1
        self.own_bytes = self.left

    def share(self) -> float | None:
        return self.now


class Bench:
    """A beat on a clock that is moved by hand."""

    def __init__(self) -> None:
        self.site = Site()
        self.gateway = SimpleNamespace(overload=Level.CALM)
        self.memory = Memory()
        self.lags: list[float] = []
        self.reactor = Clock()
        self.late_s = 0.0
        self.waited_s = 0.0
        stand_ins: dict[str, Any] = {"site": self.site, "gateway": self.gateway}
        self.pressure = Pressure(
            OverloadConfig(),
            observe=self.lags.append,
            reactor=self.reactor,
            clock=lambda: self.reactor.seconds() + self.late_s,
            waited_s=lambda: self.waited_s,
            memory=lambda limit: self.memory,
            **stand_ins,
        )
        self.pressure.start()

    def beat(self, late_s: float = 0.0, waited_s: float = 0.0) -> None:
        """One beat, so late, of which it waited for a processor."""
        self.late_s += late_s
        self.waited_s += waited_s
        self.reactor.advance(BEAT_S)


def test_each_beat_is_observed_with_its_lag() -> None:
    bench = Bench()
    bench.beat()
    bench.beat(late_s=0.2)
    bench.beat()
    assert [round(lag, 3) for lag in bench.lags] == [0, 0.2, 0]
    bench.pressure.stop()
    bench.pressure.stop()
    assert not bench.reactor.getDelayedCalls()


def test_a_loop_that_is_late_sheds_refuses_and_closes() -> None:
    bench = Bench()
    seen = []
    for late_s in (0.2, 0.2, 0.4, 0.4, 2.0, 2.0):
        bench.beat(late_s)
        seen.append((bench.gateway.overload, bench.site.shedding, bench.site.accepting))
    assert seen == [
        (Level.CALM, False, True),
        (Level.SHEDDING, True, True),
        (Level.SHEDDING, True, True),
        (Level.REFUSING, True, True),
        (Level.REFUSING, True, True),
        (Level.CLOSED, True, False),
    ]
    assert bench.site.idle_closed == 1
    for _ in range(9):
        bench.beat()
    assert (bench.gateway.overload, bench.site.shedding, bench.site.accepting) == (Level.CALM, False, True)


def test_waiting_for_a_processor_is_observed_and_not_held_against_us() -> None:
    bench = Bench()
    for _ in range(8):
        bench.beat(late_s=0.5, waited_s=0.45)
    assert bench.gateway.overload == Level.CALM
    assert round(bench.lags[-1], 3) == 0.5


def test_at_the_end_of_memory_stalled_answers_are_cut_at_each_beat() -> None:
    bench = Bench()
    bench.memory.now = 0.99
    bench.beat()
    bench.beat()
    assert (bench.gateway.overload, bench.site.stalled_cut) == (Level.CUTTING, 32)
    assert bench.pressure.state() == {
        "level": "cutting",
        "lag_s": 0.0,
        "memory": 0.99,
        "memory_limit_bytes": 1000,
    }


def test_free_memory_is_given_back_now_and_then() -> None:
    bench = Bench()
    for _ in range(200):
        bench.beat()
    assert bench.memory.given_back == 1  # what the start left behind
    for own_mib, times in ((67, 1), (69, 2)):
        bench.memory.own_bytes = own_mib << 20
        for _ in range(200):
            bench.beat()
        assert bench.memory.given_back == times


def test_a_large_heap_is_looked_through_after_larger_growth() -> None:
    bench = Bench()
    bench.memory.left = 800 << 20
    for own_mib, times in ((800, 1), (890, 1), (910, 2)):
        bench.memory.own_bytes = own_mib << 20
        for _ in range(200):
            bench.beat()
        assert bench.memory.given_back == times


def test_amid_a_burst_nothing_is_given_back_but_after_it() -> None:
    bench = Bench()
    for _ in range(30):
        bench.beat()
    for _ in range(30):
        bench.memory.own_bytes += 2 << 20
        bench.beat()
    assert bench.memory.given_back == 1  # what the start left behind
    bench.beat()
    assert bench.memory.given_back == 2


def test_while_memory_is_short_it_is_given_back_often() -> None:
    bench = Bench()
    bench.memory.now = 0.86
    for _ in range(25):
        bench.beat()
    assert bench.memory.given_back == 3


def test_new_figures_count_from_the_next_beat() -> None:
    bench = Bench()
    bench.memory.now = 0.5
    bench.beat()
    assert bench.pressure.level == Level.CALM
    bench.pressure.configure(OverloadConfig(shed_memory=0.4))
    bench.beat()
    assert (bench.pressure.level, bench.pressure.memory) == (Level.SHEDDING, 0.5)


def test_the_kernel_tells_how_long_we_waited() -> None:
    cpu_wait_s = CpuWait()
    before_s = cpu_wait_s()
    begun = time.monotonic()
    while time.monotonic() - begun < 0.01:
        pass
    assert 0 <= cpu_wait_s() - before_s <= time.monotonic() - begun + 0.001
