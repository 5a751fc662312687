"""The source ``http``."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from zope.interface.verify import verifyObject

from llmgw.errors import ConfigError
from llmgw.health.http import HttpHealthFactory
from llmgw.interfaces import IHealthSource, IHealthSourceFactory
from llmgw.testing import FakeHealthTarget, health_source_contract
from llmgw.testing.fakes import Answer
from llmgw.values import HealthReport

factory = HttpHealthFactory()
LIST = b'{"data":[{"id":"m","max_model_len":4096},{"id":"n","max_model_len":8192}]}'

TestContract = health_source_contract(factory)
TestPlainContract = health_source_contract(
    factory, {"path": "/ping", "models_path": ""}, {"/ping": (200, b"pong")}
)


def look(
    answers: dict[str, Answer], options: dict[str, Any] | None = None, seconds: float = 3.0
) -> HealthReport:
    """The first report."""
    clock = Clock()
    reports: list[HealthReport] = []
    source = factory.build(options or {}, clock)
    source.start(FakeHealthTarget(clock, answers), reports.append)
    clock.pump([0.05] * round(seconds / 0.05))
    source.stop()
    assert not clock.getDelayedCalls()
    return reports[0]


def test_it_keeps_the_interfaces() -> None:
    verifyObject(IHealthSourceFactory, factory)
    verifyObject(IHealthSource, factory.build({}, Clock()))


@pytest.mark.parametrize("status", [200, 204, 302, 401, 404, 429])
def test_any_answer_below_500_is_alive(status: int) -> None:
    assert look({"/health": (status, b"")}, {"models_path": ""}) == HealthReport(alive=True, detail="ok")


@pytest.mark.parametrize("status", [500, 502, 503])
def test_500_and_more_is_not(status: int) -> None:
    assert look({"/health": (status, b"")}) == HealthReport(alive=False, detail=f"{status} from /health")


def test_the_model_list_is_told() -> None:
    report = look({"/health": (200, b""), "/v1/models": (200, LIST)})
    assert report == HealthReport(alive=True, models=("m", "n"), context_length=4096, detail="ok")


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ((200, b"<html>hello</html>"), "200 and no model list from /v1/models"),
        ((401, b"{}"), "401 and no model list from /v1/models"),
        ((302, b""), "302 and no model list from /v1/models"),
        (None, "no answer from /v1/models"),
        (OSError("reset"), "no answer from /v1/models"),
    ],
)
def test_without_a_model_list_it_is_alive_all_the_same(answer: Answer, detail: str) -> None:
    report = look({"/health": (200, b""), "/v1/models": answer})
    assert report == HealthReport(alive=True, detail=detail)


def test_silence_is_death_and_a_refusal_is_told() -> None:
    assert look({"/health": None}) == HealthReport(alive=False, detail="no answer in time")
    assert look({"/health": ConnectionRefusedError()}).refused


def test_paths_are_options() -> None:
    report = look(
        {"/up": (200, b""), "/api/models": (200, LIST)}, {"path": "/up", "models_path": "/api/models"}
    )
    assert report.models == ("m", "n")


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({"path": ""}, ["path"]),
        ({"path": "health"}, ["path"]),
        ({"path": "/a b"}, ["path"]),
        ({"path": "/a\r\nx: y"}, ["path"]),
        ({"models_path": 5}, ["models_path"]),
        (
            {"path": 1, "models_path": "x", "interval_s": 0, "y": 1},
            ["path", "models_path", "y", "interval_s"],
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], places: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        factory.build(options, Clock())
    assert [fault.where for fault in caught.value.faults] == places
