"""The metrics of several workers as one text."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmgw.admin.metrics import Metrics
from llmgw.core.merged_metrics import RULES, Departed, merge_metrics


def text_of(*families: tuple[str, str, list[tuple[str, float]]]) -> str:
    lines = []
    for name, kind, samples in families:
        lines += [f"# HELP {name} What it is.", f"# TYPE {name} {kind}"]
        lines += [f"{before} {value}" for before, value in samples]
    return "\n".join([*lines, ""])


def read(text: str) -> dict[str, float]:
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_and_histograms_are_added_up_sample_by_sample() -> None:
    one = text_of(
        ("c_total", "counter", [('c_total{a="1"}', 2), ('c_total{a="x y"}', 1)]),
        ("h", "histogram", [('h_bucket{le="+Inf"}', 3), ("h_sum", 0.5), ("h_count", 3)]),
    )
    two = text_of(
        ("c_total", "counter", [('c_total{a="1"}', 5)]),
        ("h", "histogram", [('h_bucket{le="+Inf"}', 1), ("h_sum", 0.25), ("h_count", 1)]),
        ("late_total", "counter", [("late_total", 1)]),
    )
    whole = merge_metrics([one, two])
    assert read(whole) == {
        "c_total[('a', '1')]": 7,
        "c_total[('a', 'x y')]": 1,
        "h_bucket[('le', '+Inf')]": 4,
        "h_sum[]": 0.75,
        "h_count[]": 4,
        "late_total[]": 1,
    }
    assert whole.count("# TYPE c_total counter\n") == 1
    assert 'c_total{a="1"} 7\n' in whole


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("llmgw_connections", 6),
        ("llmgw_breaker_state", 3),
        ("llmgw_backend_available", 1),
        ("llmgw_backend_ttft_seconds", 2),
        ("nobody_knows_it", 6),
    ],
)
def test_gauges_follow_their_rule(name: str, whole: float) -> None:
    texts = [text_of((name, "gauge", [(name, value)])) for value in (1, 2, 3)]
    assert read(merge_metrics(texts)) == {f"{name}[]": whole}


def test_what_a_worker_counted_before_its_end_stays() -> None:
    departed = Departed()
    for _ in range(2):
        departed.add(text_of(("c_total", "counter", [("c_total", 2)]), ("g", "gauge", [("g", 9)])))
    departed.add(text_of(("gone_total", "counter", [("gone_total", 1)])))
    now = text_of(("c_total", "counter", [("c_total", 1)]), ("g", "gauge", [("g", 4)]))
    assert read(merge_metrics([now], departed)) == {"c_total[]": 5, "g[]": 4, "gone_total[]": 1}
    assert read(merge_metrics([], departed)) == {"c_total[]": 4, "gone_total[]": 1}


def test_numbers_are_written_as_go_reads_them() -> None:
    values = [math.inf, -math.inf, math.nan, 0.1, 1e300, 3.0]
    text = text_of(("g", "gauge", [(f'g{{n="{n}"}}', value) for n, value in enumerate(values)]))
    lines = [line.rpartition(" ")[2] for line in merge_metrics([text]).splitlines()[2:]]
    assert lines == ["+Inf", "-Inf", "NaN", "0.1", "1e+300", "3"]


def test_what_stands_before_the_first_family_and_other_comments_are_left_out() -> None:
    text = "stray 1\n# a comment\n\n# TYPE only_a_type gauge\n# another\nonly_a_type 2\n"
    assert merge_metrics([text, text]) == "# TYPE only_a_type gauge\nonly_a_type 4\n"


def test_a_gateways_own_text_comes_through_whole() -> None:
    metrics = Metrics(lambda: [{"id": "b", "in_flight": 2, "breaker": "open"}], dict)
    metrics.request("/v1/chat/completions", "m", "b", 200, 1.0, 0.1, 0.001, None)
    text = metrics.render().decode()
    whole = read(merge_metrics([text, text]))
    once = read(text)
    assert set(whole) == set(once)
    assert whole["llmgw_in_flight[('backend', 'b')]"] == 4
    assert whole["llmgw_breaker_state[('backend', 'b')]"] == 3
    assert whole["llmgw_request_seconds_count[('route', '/v1/chat/completions')]"] == 2


def test_every_rule_is_one_that_is_known() -> None:
    assert set(RULES.values()) == {"max", "min", "mean"}
