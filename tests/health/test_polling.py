"""The rhythm of looking: when, how often, and that stopping ends it."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any

import pytest
from twisted.internet import error
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.task import Clock
from twisted.logger import capturedLogs

from llmgw.errors import ConfigError
from llmgw.health.polling import PollingSource, one_line, timing, unanswered
from llmgw.testing import FakeHealthTarget
from llmgw.values import HealthReport

UP = HealthReport(alive=True)
DOWN = HealthReport(alive=False)
LOADING = HealthReport(alive=True, loading=True)


class Scripted(PollingSource):
    """A source whose checks are answered from a list, the last entry for ever."""

    def __init__(
        self, clock: Clock, *script: HealthReport | Exception, interval_s: float = 5.0, seed: int = 0
    ) -> None:
        super().__init__(clock, interval_s, 2.0, random.Random(seed))
        self.script = list(script)
        self.at_s: list[float] = []
        self.reports: list[HealthReport] = []

    async def look(self) -> HealthReport:
        self.at_s.append(self._reactor.seconds())
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(entry, Exception):
            raise entry
        return entry

    def run(
        self, clock: Clock, seconds: float, report: Callable[[HealthReport], None] | None = None
    ) -> list[float]:
        """Waits between the looks."""
        self.start(FakeHealthTarget(clock), report or self.reports.append)
        clock.pump([0.01] * round(seconds / 0.01))
        return [later - earlier for earlier, later in zip(self.at_s, self.at_s[1:], strict=False)]


def test_the_first_look_is_at_once() -> None:
    clock = Clock()
    looks = Scripted(clock, UP)
    looks.run(clock, 0)
    assert looks.reports == [UP]
    looks.stop()


def test_looks_are_spread_around_the_interval() -> None:
    clock = Clock()
    looks = Scripted(clock, UP)
    waits = looks.run(clock, 600)
    looks.stop()
    assert 4.0 <= min(waits) < 4.3
    assert 5.7 < max(waits) <= 6.02


def test_the_spread_comes_from_the_dice_given() -> None:
    runs = []
    for seed in (1, 1, 2):
        clock = Clock()
        looks = Scripted(clock, UP, seed=seed)
        runs.append(looks.run(clock, 60))
        looks.stop()
    assert runs[0] == runs[1] != runs[2]


def test_a_working_backend_is_never_asked_within_two_seconds() -> None:
    clock = Clock()
    looks = Scripted(clock, UP, interval_s=2.0)
    waits = looks.run(clock, 300)
    looks.stop()
    assert min(waits) >= 2.0 - 1e-6


@pytest.mark.parametrize("sight", [DOWN, LOADING, OSError("gone")])
def test_a_backend_that_does_not_work_is_asked_every_second(sight: HealthReport | Exception) -> None:
    clock = Clock()
    looks = Scripted(clock, sight)
    waits = looks.run(clock, 30)
    looks.stop()
    assert waits == pytest.approx([1.0] * len(waits), abs=0.02)


def test_one_that_came_up_is_asked_again_after_two_seconds() -> None:
    clock = Clock()
    looks = Scripted(clock, DOWN, UP)
    waits = looks.run(clock, 20)
    looks.stop()
    assert waits[:2] == pytest.approx([1.0, 2.0], abs=0.02)
    assert min(waits[2:]) >= 4.0


def test_a_look_before_its_time_comes_at_once_and_the_rhythm_goes_on_from_it() -> None:
    clock = Clock()
    looks = Scripted(clock, UP, LOADING, LOADING, UP)
    looks.run(clock, 3.5)
    looks.look_soon()
    looks.look_soon()
    clock.pump([0.01] * 600)
    looks.stop()
    assert looks.at_s[:5] == pytest.approx([0.0, 3.5, 4.5, 5.5, 7.5], abs=0.05)


def test_no_look_before_its_time_comes_within_two_seconds_of_the_last() -> None:
    clock = Clock()
    looks = Scripted(clock, UP)
    looks.run(clock, 0.5)
    for _ in range(600):
        looks.look_soon()
        clock.advance(0.01)
    looks.stop()
    waits = [later - earlier for earlier, later in zip(looks.at_s, looks.at_s[1:], strict=False)]
    assert waits == pytest.approx([2.0] * 3, abs=0.02)


def test_a_look_before_its_time_defers_none() -> None:
    clock = Clock()
    looks = Scripted(clock, DOWN)
    looks.look_soon()
    looks.run(clock, 0.5)
    looks.look_soon()
    clock.pump([0.01] * 100)
    looks.stop()
    looks.look_soon()
    assert looks.at_s == pytest.approx([0.0, 1.0], abs=0.02)
    assert not clock.getDelayedCalls()


def test_a_report_that_raises_is_logged_and_looking_goes_on(expected_failures: Any) -> None:
    clock = Clock()
    looks = Scripted(clock, UP)
    looks.run(clock, 20, lambda report: 1 / 0)
    looks.stop()
    assert len(looks.at_s) >= 3
    assert len(expected_failures(ZeroDivisionError)) == len(looks.at_s)


def test_a_lack_of_our_own_is_no_report_and_told_once() -> None:
    clock = Clock()
    lack = OSError(errno.EMFILE, "Couldn't bind: 24: Too many open files")
    looks = Scripted(clock, UP, lack, lack, UP, lack, UP)
    with capturedLogs() as events:
        looks.run(clock, 30)
    looks.stop()
    assert set(map(id, looks.reports)) == {id(UP)}
    assert len(looks.at_s) > len(looks.reports) + 2
    told = [event for event in events if "cannot be looked at" in event["log_format"]]
    assert len(told) == 2, "once for each time that it began"


def test_stop_before_start_and_twice_is_fine() -> None:
    clock = Clock()
    looks = Scripted(clock, UP)
    looks.stop()
    looks.run(clock, 1)
    looks.stop()
    looks.stop()
    assert not clock.getDelayedCalls()


def test_stop_within_a_report_leaves_nothing() -> None:
    clock = Clock()
    looks = Scripted(clock, UP)
    looks.run(clock, 60, lambda report: looks.stop())
    assert len(looks.at_s) == 1
    assert not clock.getDelayedCalls()


class Stubborn(PollingSource):
    """Takes every failed question for an answer, cancelling too, and asks on."""

    asked = 0

    async def look(self) -> HealthReport:
        for path in ("/a", "/b", "/c"):
            try:
                await self.ask(path)
            except Exception as fault:
                self.last = fault
            self.asked += 1
        return UP


class FailsOtherwise(FakeHealthTarget):
    """Questions that are cancelled fail with something else, as an agent's do."""

    def get(self, path: str, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        self.waiting.append(Deferred(lambda asking: asking.errback(OSError("connection lost"))))
        return self.waiting[-1]


@pytest.mark.parametrize("target", [FakeHealthTarget, FailsOtherwise])
def test_no_question_follows_a_stop(target: Callable[..., FakeHealthTarget]) -> None:
    clock = Clock()
    backend = target(clock, otherwise=None)
    looks = Stubborn(clock, 5.0, 2.0)
    reports: list[HealthReport] = []
    looks.start(backend, reports.append)
    assert len(backend.waiting) == 1
    looks.stop()
    assert looks.asked == 3
    assert isinstance(looks.last, CancelledError)
    assert len(backend.waiting) <= 1, "it asked on"
    assert not clock.getDelayedCalls()
    assert not reports


def test_looking_is_for_subclasses() -> None:
    clock = Clock()
    looks = PollingSource(clock, 5.0, 2.0)
    reports: list[HealthReport] = []
    looks.start(FakeHealthTarget(clock), reports.append)
    looks.stop()
    assert reports == [HealthReport(alive=False, detail="NotImplementedError")]


@pytest.mark.parametrize(
    ("fault", "report"),
    [
        (error.ConnectionRefusedError(), (True, "nobody listens there (connection refused)")),
        (error.NoRouteError(113, "no route"), (True, "No route to host: 113: no route.")),
        (error.SSLError(string="bad"), (True, "An SSL error occurred: bad.")),
        (error.TimeoutError(), (False, "no answer in time")),
        (TimeoutError("x"), (False, "no answer in time")),
        (error.DNSLookupError("no results"), (False, "DNS lookup failed: no results.")),
        (OSError(24, "too many"), (False, "[Errno 24] too many")),
        (ValueError(), (False, "ValueError")),
        (ValueError("a\r\n b\tc"), (False, "a b c")),
    ],
)
def test_only_a_refusal_is_a_refusal(fault: Exception, report: tuple[bool, str]) -> None:
    refused, detail = report
    assert unanswered(fault) == HealthReport(alive=False, refused=refused, detail=detail)


def test_a_detail_is_short() -> None:
    assert len(one_line("x" * 10_000)) == 200


def test_timing_has_defaults_and_takes_numbers() -> None:
    assert timing({}) == (5.0, 2.0)
    assert timing({"interval_s": 10, "timeout_s": 0.5, "path": "/"}, ("path",)) == (10.0, 0.5)


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({"interval_s": 1.9}, ["interval_s"]),
        ({"interval_s": float("nan")}, ["interval_s"]),
        ({"interval_s": 1e9}, ["interval_s"]),
        ({"interval_s": True}, ["interval_s"]),
        ({"interval_s": "5"}, ["interval_s"]),
        ({"timeout_s": 0}, ["timeout_s"]),
        ({"timeout_s": None, "interval_s": -1, "x": 1}, ["x", "interval_s", "timeout_s"]),
    ],
)
def test_timing_names_every_fault(options: dict[str, Any], places: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        timing(options)
    assert [fault.where for fault in caught.value.faults] == places
