"""Several health sources of one backend make one report."""

import pytest

from llmgw.values import HealthReport
from llmgw.watch import FRESH_S, Watch


class Source:
    def start(self, target, report):
        self.report = report

    def stop(self):
        self.report = None


@pytest.fixture
def watched():
    sources = [Source(), Source()]
    told = []
    now = [100.0]
    watch = Watch(sources, None, told.append, lambda: now[0])
    watch.start()
    return watch, sources, told, now


def test_each_look_of_the_first_source_is_one_report(watched):
    watch, (first, second), told, _ = watched
    assert not watch.looked
    second.report(HealthReport(alive=True, gpu_use=0.5))
    second.report(HealthReport(alive=True, gpu_use=0.6))
    assert told == []
    first.report(HealthReport(alive=True, slots=4))
    second.report(HealthReport(alive=True, gpu_use=0.7))
    assert watch.looked
    assert told == [HealthReport(alive=True, slots=4, gpu_use=0.6)]


def test_the_first_source_alone_says_who_lives(watched):
    _, (first, second), told, _ = watched
    second.report(HealthReport(alive=True, kv_use=0.2, slots=9))
    first.report(HealthReport(alive=False, refused=True))
    assert not told[-1].alive
    assert told[-1].refused


def test_what_the_first_source_told_is_not_overridden(watched):
    _, (first, second), told, _ = watched
    second.report(HealthReport(alive=True, slots=9, kv_use=0.2))
    first.report(HealthReport(alive=True, slots=4))
    assert (told[-1].slots, told[-1].kv_use) == (4, 0.2)


def test_the_source_that_decides_is_asked_for_a_look_before_its_time(watched):
    watch, (first, second), _, _ = watched
    watch.look_soon()  # neither knows how to
    asked = []
    first.look_soon = lambda: asked.append("first")
    second.look_soon = lambda: asked.append("second")
    watch.look_soon()
    assert asked == ["first"]


def test_a_look_before_its_time_that_raises_is_told_and_harms_nobody(watched, expected_failures):
    from types import SimpleNamespace

    watch, (first, _), _, _ = watched
    watch._target = SimpleNamespace(id="b")
    first.look_soon = lambda: 1 / 0
    watch.look_soon()
    watch.look_soon()
    assert len(expected_failures(ZeroDivisionError)) == 1


def test_a_detail_is_one_short_line(watched):
    _, (first, _), told, _ = watched
    first.report(HealthReport(alive=False, detail="lost\x1b[2J\n" * 100_000))
    assert told[0].detail.startswith("lost\\x1b[2J lost")
    assert len(told[0].detail) <= 200


def test_a_report_after_the_end_is_none(watched):
    watch, (first, _), told, _ = watched
    report = first.report
    watch.stop()
    report(HealthReport(alive=False))
    assert told == []
    watch.start()
    first.report(HealthReport(alive=True))
    assert len(told) == 1


def test_figures_of_a_dead_or_silent_source_are_dropped(watched):
    _, (first, second), told, now = watched
    second.report(HealthReport(alive=True, kv_use=0.97))
    now[0] += FRESH_S + 1
    first.report(HealthReport(alive=True))
    assert told[-1].kv_use is None
    second.report(HealthReport(alive=False, kv_use=0.97))
    first.report(HealthReport(alive=True))
    assert told[-1].kv_use is None


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ("alive", "str, which is no report"),
        (HealthReport(alive="yes"), "Expected `bool`, got `str` - at `$.alive`"),
        (HealthReport(alive=True, slots="4"), "at `$.slots`"),
        (HealthReport(alive=True, models="abc"), "at `$.models`"),
        (HealthReport(alive=True, models=(object(),)), "no report"),
        (HealthReport(alive=True, slots=-1), "slots = -1"),
        (HealthReport(alive=True, slots=10**400), "slots = 1000"),
        (HealthReport(alive=True, kv_use=float("nan")), "kv_use = nan"),
    ],
)
def test_a_report_of_wrong_types_leaves_the_backend_as_it_was(watched, report, words):
    from types import SimpleNamespace

    from twisted.logger import capturedLogs

    watch, (first, second), told, _ = watched
    watch._target = SimpleNamespace(id="b")
    first.report(HealthReport(alive=True, slots=4))
    with capturedLogs() as events:
        first.report(report)
        second.report(report)
    assert told == [HealthReport(alive=True, slots=4)]
    [event] = events
    assert words in str(event["what"])
    first.report(HealthReport(alive=True, kv_use=1, models=["m"]))
    assert told[-1] == HealthReport(alive=True, kv_use=1.0, models=("m",))
