"""Prometheus' text, read back by the parser of ``prometheus_client``."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from llmgw.admin import exposition
from llmgw.admin.exposition import Count, Family, Histogram, head, labelled, number, write_gauge


def parsed(out: list[str]) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families("".join(out))}


def histogram_of(out: list[str], name: str) -> dict[str, float]:
    """Sample values by ``le``, and by ``sum`` and ``count``."""
    found = {}
    for sample in parsed(out)[name].samples:
        found[sample.labels.get("le", sample.name.rpartition("_")[2])] = sample.value
    return found


@given(
    st.lists(st.floats(min_value=0.001, max_value=100), min_size=1, max_size=8, unique=True),
    st.lists(st.floats(min_value=0, max_value=1000), max_size=30),
)
def test_a_histogram_is_cumulative_and_its_count_and_sum_are_right(
    bounds: list[float], values: list[float]
) -> None:
    bounds = sorted(bounds)
    histogram = Histogram("x", tuple(bounds))
    for value in values:
        histogram.observe(value)
    out = [head("x", "histogram", "text")]
    histogram.write(out)
    found = histogram_of(out, "x")
    for bound in bounds:
        assert found[number(bound)] == sum(value <= bound for value in values)
    assert found["+Inf"] == found["count"] == len(values)
    assert found["sum"] == pytest.approx(math.fsum(values))


def test_a_value_on_the_bound_belongs_to_it() -> None:
    histogram = Histogram("x", (1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.counts == [1, 2, 1]


def test_labels_stand_beside_le() -> None:
    family: Family[Histogram] = Family(
        "x", "histogram", "t", ("a", "b"), lambda name, labels: Histogram(name, (0.5,), labels)
    )
    family.child(("1", "2")).observe(0.1)
    out: list[str] = []
    family.write(out)
    samples = parsed(out)["x"].samples
    assert [sample.labels for sample in samples[:2]] == [
        {"a": "1", "b": "2", "le": "0.5"},
        {"a": "1", "b": "2", "le": "+Inf"},
    ]


@given(st.text())
def test_any_text_is_a_label(text: str) -> None:
    out = [head("x", "gauge", "t")]
    out.append(f"x{{{labelled((('a', text),))}}} 1\n")
    (sample,) = parsed(out)["x"].samples
    assert sample.labels == {"a": text.encode("utf-8", "replace").decode()}


def test_a_lone_surrogate_does_not_break_the_page() -> None:
    labelled((("a", "x\ud800y"),)).encode("utf-8")


def test_help_is_one_line() -> None:
    out = [head("x", "gauge", "two\nlines and a \\"), "x 1\n"]
    assert parsed(out)["x"].documentation == "two\nlines and a \\"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (True, "1"),
        (5.0, "5"),
        (0.25, "0.25"),
        (-1.5, "-1.5"),
        (1e20, "1e+20"),
        (10**14, "100000000000000"),
        (float("inf"), "+Inf"),
        (float("-inf"), "-Inf"),
        (float("nan"), "NaN"),
    ],
)
def test_numbers_are_written_as_go_reads_them(value: float, text: str) -> None:
    assert number(value) == text


def test_gauges_with_and_without_samples() -> None:
    out: list[str] = []
    write_gauge(out, "x", "t", (('a="b"', 1.5), ("", 2)))
    write_gauge(out, "y", "t", ())
    found = parsed(out)
    assert [(sample.labels, sample.value) for sample in found["x"].samples] == [({"a": "b"}, 1.5), ({}, 2.0)]
    assert found["y"].samples == []


def test_past_the_most_series_all_is_counted_under_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "MAX_SERIES", 3)
    family: Family[Count] = Family("x_total", "counter", "t", ("a", "b"), Count)
    for index in range(10):
        family.child((str(index), "b")).value += 1
    family.child(("0", "b")).value += 1
    out: list[str] = []
    family.write(out)
    counted = {sample.labels["a"]: sample.value for sample in parsed(out)["x"].samples}
    assert counted == {"0": 2, "1": 1, "2": 1, "other": 7}


def test_series_of_what_is_gone_are_forgotten() -> None:
    family: Family[Count] = Family("x_total", "counter", "t", ("model", "backend"), Count)
    for backend in ("a", "b", ""):
        family.child(("m", backend))
    family.keep("route", set())
    assert len(family.children) == 3
    family.keep("backend", {"a", ""})
    assert list(family.children) == [("m", "a"), ("m", "")]
