"""The contract of health sources, as tests under ``twisted.internet.task.Clock``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock

from llmgw.interfaces import IHealthSource, IHealthSourceFactory
from llmgw.testing.fakes import Answer, FakeHealthTarget
from llmgw.testing.shared import FactoryContract, class_name, contract
from llmgw.values import HealthReport

MIN_GAP_S = 2.0
_STEP_S = 0.05

GARBAGE: tuple[Answer, ...] = (
    (200, b""),
    (200, b"\xff\xfe\x00"),
    (200, b"[]"),
    (200, b"null"),
    (200, b'{"data": 1, "models": "x", "error": []}'),
    (200, b"[" * 100_000),
    (204, b""),
    (302, b"moved"),
    (401, b'{"error":{"code":401}}'),
    (500, b"<html>"),
    (503, b'{"error":{"message":"Loading model"}}'),
    None,
    ConnectionRefusedError(),
    RuntimeError("something nobody thought of"),
)


class HealthSourceContract(FactoryContract):
    """What every health source must keep.

    :cvar answers: what a healthy backend answers, path to status and body.
    :cvar first_s: a healthy backend must have been reported within this time.
    :cvar asks: ``False`` for a source that learns by other means than ``target.get``;
        it is spared the tests of silence and refusal.
    """

    interface = IHealthSourceFactory
    product = IHealthSource
    answers: Mapping[str, Answer] = {
        "/health": (200, b'{"status":"ok"}'),
        "/v1/models": (200, b'{"object":"list","data":[{"id":"m","object":"model"}]}'),
        "/props": (200, b'{"total_slots":4,"default_generation_settings":{"n_ctx":4096}}'),
        "/slots": (200, b'[{"id":0,"is_processing":false}]'),
    }
    first_s = 10.0
    asks = True

    def watch(self, answers: Mapping[str, Answer], otherwise: Answer = (404, b"{}")) -> _Watch:
        """A started source, its target, its clock and what it reported."""
        return _Watch(self, answers, otherwise)

    def test_it_reports_soon_and_again(self) -> None:
        """The gateway cannot use a backend before the first report."""
        watch = self.watch(self.answers)
        watch.run(self.first_s)
        assert watch.reports, f"no report within {self.first_s} s"
        assert watch.reports[-1].alive, f"a healthy backend was reported as {watch.reports[-1]}"
        seen = len(watch.reports)
        watch.run(120.0)
        assert len(watch.reports) > seen, "it reported once and fell silent"
        watch.stop()

    def test_reports_are_lawful(self) -> None:
        """Counts are not negative and shares lie between 0 and 1."""
        watch = self.watch(self.answers)
        watch.run(60.0)
        watch.stop()
        for report in watch.reports:
            _check(report)

    def test_it_never_looks_more_often_than_every_two_seconds(self) -> None:
        """Each question delays llama-server's noticing of closed requests."""
        watch = self.watch(self.answers)
        watch.run(120.0)
        watch.stop()
        for path, gap_s in watch.target.gaps():
            assert gap_s >= MIN_GAP_S - 2 * _STEP_S, f"{path} asked again after {gap_s:.2f} s"

    def test_refusal_is_death(self) -> None:
        """Nobody listens there."""
        if not self.asks:
            return
        watch = self.watch({}, ConnectionRefusedError())
        watch.run(60.0)
        watch.stop()
        assert watch.reports, "a refused connection was not reported"
        assert not any(report.alive for report in watch.reports), "alive, though the connection was refused"

    def test_silence_is_reported_and_questions_do_not_pile_up(self) -> None:
        """A backend that takes connections and never answers."""
        if not self.asks:
            return
        watch = self.watch({}, None)
        most = watch.run(120.0)
        assert watch.reports, "silence was not reported"
        allowed = max(4, len(self.answers))
        assert most <= allowed, f"{most} questions were waiting for an answer at once"
        watch.stop()

    def test_it_survives_any_answer(self) -> None:
        """Whatever comes, it goes on looking, and recovers when sense returns."""
        for garbage in GARBAGE:
            watch = self.watch({}, garbage)
            watch.run(30.0)
            watch.target.answers.update(self.answers)
            watch.target.otherwise = (404, b"{}")
            seen = len(watch.reports)
            watch.run(120.0)
            watch.stop()
            for report in watch.reports:
                _check(report)
            assert len(watch.reports) > seen, f"silent for good after {str(garbage)[:60]}"
            assert watch.reports[-1].alive, f"still dead long after {str(garbage)[:60]}"

    def test_stop_leaves_nothing(self) -> None:
        """At any moment: before the first look, during one, between two."""
        for answers, otherwise in ((self.answers, (404, b"{}")), ({}, None), ({}, ConnectionRefusedError())):
            for after_s in (0.0, 0.02, 0.5, 3.0, 7.0, 31.0):
                watch = self.watch(answers, otherwise)
                watch.run(after_s)
                watch.stop()

    def test_stop_may_be_called_from_a_report(self) -> None:
        """A report may be what makes the gateway drop the backend."""
        watch = self.watch(self.answers)
        watch.stop_at_report = True
        watch.run(self.first_s)
        assert watch.reports, "no report"
        watch.check_stopped()


class _Watch:
    def __init__(self, owner: HealthSourceContract, answers: Mapping[str, Answer], otherwise: Answer) -> None:
        self.clock = Clock()
        self.target = FakeHealthTarget(self.clock, answers, otherwise=otherwise)
        self.reports: list[HealthReport] = []
        self.stop_at_report = False
        self.source = owner.build(owner.options, self.clock)
        self.source.start(self.target, self._report)

    def run(self, seconds: float) -> int:
        """Let time pass.

        :return: the most questions that waited for an answer at once.
        """
        most = len(self.target.waiting)
        for _ in range(round(seconds / _STEP_S)):
            self.clock.advance(_STEP_S)
            most = max(most, len(self.target.waiting))
        return most

    def stop(self) -> None:
        self.source.stop()
        self.check_stopped()

    def check_stopped(self) -> None:
        assert not self.target.waiting, "stop left a question waiting for its answer"
        calls = self.clock.getDelayedCalls()
        assert not calls, f"stop left calls behind: {calls}"
        seen = len(self.reports)
        self.run(20.0)
        assert len(self.reports) == seen, "a report came after stop"

    def _report(self, report: HealthReport) -> None:
        self.reports.append(report)
        if self.stop_at_report:
            self.source.stop()


def _check(report: HealthReport) -> None:
    assert isinstance(report, HealthReport), f"reported {report!r}"
    for name in ("slots", "busy_slots", "deferred", "context_length"):
        value = getattr(report, name)
        assert value is None or (isinstance(value, int) and value >= 0), f"{name} is {value!r}"
    for name in ("kv_use", "gpu_use"):
        value = getattr(report, name)
        assert value is None or 0 <= value <= 1, f"{name} is {value!r}"
    assert not (report.refused and report.alive), "refused and alive at once"
    assert report.models is None or all(isinstance(model, str) for model in report.models), (
        "models are not text"
    )
    assert "\n" not in report.detail, "the detail is more than one line"


def health_source_contract(
    factory: Any,
    options: Mapping[str, Any] | None = None,
    answers: Mapping[str, Answer] | None = None,
) -> type[HealthSourceContract]:
    """Tests for a health source's factory.

    :param answers: what a healthy backend answers, where the default (a
        llama-server) does not do: path to status and body.
    """
    attributes: dict[str, Any] = {"factory": factory, "options": options or {}}
    if answers is not None:
        attributes["answers"] = answers
    return contract(HealthSourceContract, class_name(factory, HealthSourceContract), **attributes)
