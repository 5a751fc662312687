"""Merges the reports of several health sources of one backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import convert
from msgspec.structs import asdict, fields, replace
from twisted.logger import Logger

from llmgw.errors import PLUGIN_FAULTS
from llmgw.finite import is_finite_number
from llmgw.foreign import set_aside, unwanted
from llmgw.health.polling import one_line
from llmgw.seldom import Seldom
from llmgw.values import HealthReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmgw.health.target import Target

FRESH_S = 30.0


class Watch:
    """All health sources of one backend, and their merged report.

    The first source decides whether the backend is alive, and each of its checks makes one
    report. The others add what it did not report, if they report the backend alive and their
    last check is no older than :data:`FRESH_S`.

    If a source fails, that is logged, once a minute at most, and the backend stays as it was.
    """

    log = Logger()

    def __init__(
        self,
        sources: Sequence[Any],
        target: Target,
        report: Callable[[HealthReport], None],
        clock: Callable[[], float],
    ) -> None:
        self._sources = list(sources)
        self._reports: list[HealthReport | None] = [None] * len(self._sources)
        self._told_s = [0.0] * len(self._sources)
        self._stopped = False
        self._seldom = Seldom(clock)
        self._clock = clock
        self._target = target
        self._report = report

    @property
    def looked(self) -> bool:
        """The first source has reported."""
        return self._reports[0] is not None

    def start(self) -> None:
        """Start every source."""
        self._stopped = False
        for index, source in enumerate(self._sources):
            try:
                answer = source.start(self._target, lambda report, index=index: self._reported(index, report))
            except PLUGIN_FAULTS:
                self._complain("did not start")
            else:
                self._not_nothing("start", answer)

    def stop(self) -> None:
        """Stop every source."""
        self._stopped = True
        for source in self._sources:
            try:
                answer = source.stop()
            except PLUGIN_FAULTS:
                self._complain("did not stop")
            else:
                self._not_nothing("stop", answer)

    def look_soon(self) -> None:
        """Have the first source check before its time, if it can (``look_soon``)."""
        look_soon = getattr(self._sources[0], "look_soon", None)
        if look_soon is not None:
            try:
                answer = look_soon()
            except PLUGIN_FAULTS:
                self._complain("did not look before its time")
            else:
                self._not_nothing("look_soon", answer)

    def _not_nothing(self, method: str, answer: Any) -> None:
        if answer is not None:
            self._tell(unwanted(method, answer))

    def _complain(self, what: str) -> None:
        """It has raised, just now."""
        self._seldom.tell_raised(self.log, f"a health source of backend {self._target.id}", what)

    def _tell(self, what: str) -> None:
        self._seldom.tell(self.log, f"a health source of backend {self._target.id}", what)

    def _reported(self, index: int, report: HealthReport) -> None:
        if self._stopped:
            return  # and a source that does not keep to it
        now_s = self._clock()
        try:
            report = _checked(report)
        except ValueError as error:
            self._tell(f"reported {error}")
            return
        self._reports[index] = report
        self._told_s[index] = now_s
        if index:
            return
        merged = report
        for other, told_s in zip(self._reports[1:], self._told_s[1:], strict=True):
            if other is not None and other.alive and now_s - told_s <= FRESH_S:
                merged = _completed(merged, other)
        self._report(merged)


def _checked(report: Any) -> HealthReport:
    """``report``, if its fields have the right types.

    :raise ValueError: they have not, or figures are impossible.
    """
    if not isinstance(report, HealthReport):
        raise ValueError(f"{set_aside(report)}, which is no report")
    try:
        typed: HealthReport = convert(asdict(report), HealthReport)
    except (ValueError, TypeError) as error:
        raise ValueError(f"what is no report: {error}") from None
    for name in ("slots", "busy_slots", "deferred", "context_length", "kv_use", "gpu_use"):
        value = getattr(typed, name)
        if value is not None and not (is_finite_number(value) and value >= 0):
            raise ValueError(f"what cannot be: {name} = {value}")
    return replace(typed, detail=one_line(typed.detail))


def _completed(report: HealthReport, other: HealthReport) -> HealthReport:
    """``report``, with what only ``other`` has reported."""
    gaps = {
        field.name: getattr(other, field.name)
        for field in fields(HealthReport)
        if getattr(report, field.name) is None and getattr(other, field.name) is not None
    }
    return replace(report, **gaps) if gaps else report
