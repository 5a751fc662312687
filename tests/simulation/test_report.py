"""Figures and the picture."""

import pytest

from llmgw.simulation.exchange import Record
from llmgw.simulation.plot import draw
from llmgw.simulation.report import percentile, share_of, summary
from llmgw.simulation.run import Result


def record(number, arrived_s, ttft_s, asked=("a",), outcome="done", cached=0):
    return Record(f"r{number}", arrived_s, ttft_s, 2.0, asked, 100, cached, 10, outcome)


RESULT = Result(
    "some",
    [
        record(1, 1.0, 0.1),
        record(2, 2.0, 0.3, cached=50),
        record(3, 3.0, 0.2, asked=("b", "a")),
        record(4, 4.0, None, asked=("b",), outcome="reset"),
        record(5, 5.0, None, asked=(), outcome="overloaded"),
    ],
    9.0,
    ("a", "b", "c"),
)


@pytest.mark.parametrize(
    ("values", "share", "found"), [([], 0.5, 0.0), ([3.0], 0.99, 3.0), (list(range(100)), 0.95, 95)]
)
def test_percentiles(values, share, found):
    assert percentile(values, share) == found


def test_times_are_of_what_was_answered():
    figures = summary(RESULT)
    assert figures["requests"] == 5
    assert figures["ttft_s"] == pytest.approx({"mean": 0.2, "p50": 0.2, "p95": 0.3, "p99": 0.3})
    assert figures["errors"] == {"overloaded": 1, "reset": 1}
    assert figures["share"] == {"a": 0.75, "b": 0.25, "c": 0.0}
    assert figures["cache_hit"] == pytest.approx(50 / 300)
    assert (figures["spikes"], figures["retries"]) == (1, 1)
    assert summary(RESULT, spike_s=0.15)["spikes"] == 2


def test_nothing_at_all_gives_zeros():
    figures = summary(Result("none", [], 0.0, ("a",)))
    assert figures["ttft_s"]["mean"] == figures["share"]["a"] == figures["cache_hit"] == 0.0


def test_share_in_a_span_counts_attempts():
    assert share_of(RESULT, "b", 0.0, 3.5) == pytest.approx(0.25)
    assert share_of(RESULT, "b", 4.0, 5.0) == 1.0
    assert share_of(RESULT, "b", 50.0, 60.0) == 0.0


@pytest.mark.parametrize(("name", "begins"), [("x.png", b"\x89PNG"), ("x.svg", b"<?xml")])
def test_the_picture(tmp_path, name, begins):
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    draw({"one": RESULT, "none": Result("none", [], 0.0, ("a",))}, str(path), "a title")
    assert path.read_bytes().startswith(begins)
