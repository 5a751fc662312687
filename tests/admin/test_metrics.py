"""What is counted, and what a scrape says."""

from __future__ import annotations

import timeit
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmgw.admin import metrics as metrics_module
from llmgw.admin.metrics import Metrics
from llmgw.core.breaker import BreakerRules, State
from llmgw.core.fleet import BackendSpec, Fleet
from llmgw.values import Usage

CONTRACT = {
    "llmgw_requests": ("route", "model", "backend", "status"),
    "llmgw_ttft_seconds": ("model", "backend"),
    "llmgw_inter_token_seconds": ("model", "backend"),
    "llmgw_request_seconds": ("route",),
    "llmgw_overhead_seconds": (),
    "llmgw_in_flight": ("backend",),
    "llmgw_backend_score": ("backend",),
    "llmgw_backend_ttft_seconds": ("backend",),
    "llmgw_breaker_state": ("backend",),
    "llmgw_tokens": ("model", "kind"),
    "llmgw_rejected": ("reason",),
    "llmgw_hold_seconds": (),
    "llmgw_retries": ("reason",),
    "llmgw_limiter_degraded": (),
    "llmgw_client_aborts": (),
    "llmgw_reactor_lag_seconds": (),
}
"""Names of ``contract.md`` as the parser gives them (counters without ``_total``), and labels."""


def empty() -> Metrics:
    return Metrics(list, dict)


def request(metrics: Metrics, **fields: Any) -> None:
    metrics.request(
        **{
            "route": "/v1/chat/completions",
            "model": "m",
            "backend": "b0",
            "status": 200,
            "duration_s": 2.0,
            "ttft_s": 0.2,
            "overhead_s": 0.0004,
            "used": None,
            **fields,
        }
    )


def scrape(metrics: Metrics) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


def values(metrics: Metrics, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Values of a family's samples by their label values."""
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for sample in scrape(metrics)[name].samples
    }


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    for family in scrape(metrics).values():
        for each in family.samples:
            if each.name == name and each.labels == labels:
                return float(each.value)
    raise AssertionError(f"no {name}{labels}")


def test_every_name_of_the_contract_is_there_before_anything_happened() -> None:
    found = scrape(empty())
    assert set(CONTRACT) <= set(found)
    assert all(family.documentation for family in found.values())


def test_every_sample_has_the_labels_of_the_contract() -> None:
    metrics = Metrics(
        lambda: [{"id": "b0", "in_flight": 1, "score": 2.5, "ttft_s": 0.1, "breaker": "closed"}], dict
    )
    request(metrics)
    metrics.gaps("m", "b0").observe(0.02)
    request(metrics, model="m", used=Usage(prompt_tokens=10, cached_tokens=4, output_tokens=5))
    metrics.rejected("overloaded")
    metrics.retried("upstream_error")
    found = scrape(metrics)
    for name, labels in CONTRACT.items():
        for each in found[name].samples:
            assert set(each.labels) - {"le"} == set(labels), name


def test_a_gauge_of_a_plugin_takes_no_name_of_ours() -> None:
    names = (
        "llmgw_requests_total",
        "llmgw_in_flight",
        "llmgw_info",
        "llmgw_refused",
        "process_open_fds",
        "mine",
    )
    metrics = Metrics(
        lambda: [{"id": "b0", "in_flight": 1, "breaker": "closed"}],
        lambda: dict.fromkeys(names, ("Mine.", 7)),
    )
    metrics.tables.append(lambda: [("llmgw_refused", "Ours.", [((("reason", "x"),), 1.0)])])
    text = metrics.render().decode()
    assert [name for name in names if f"\n{name} 7" in text] == ["mine"]
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len({line.split()[2] for line in heads})


def test_a_request_is_counted_once_and_timed() -> None:
    metrics = empty()
    request(metrics)
    request(metrics, status=502, ttft_s=None, overhead_s=None, backend=None, model=None)
    assert values(metrics, "llmgw_requests", "model", "backend", "status") == {
        ("m", "b0", "200"): 1,
        ("other", "", "502"): 1,
    }
    assert sample(metrics, "llmgw_ttft_seconds_count", model="m", backend="b0") == 1
    assert sample(metrics, "llmgw_ttft_seconds_sum", model="m", backend="b0") == 0.2
    assert sample(metrics, "llmgw_request_seconds_count", route="/v1/chat/completions") == 2
    assert sample(metrics, "llmgw_overhead_seconds_count") == 1


def test_tokens_aborts_refusals_retries_holds_and_lag_are_counted() -> None:
    metrics = empty()
    request(metrics, model="m", used=Usage(prompt_tokens=10, output_tokens=5))
    request(metrics, model="m", used=Usage(prompt_tokens=1, cached_tokens=1))
    metrics.client_abort()
    metrics.rejected("overloaded")
    metrics.rejected("overloaded")
    metrics.retried("upstream_error")
    metrics.held("m", "released", 3.0)
    metrics.held("m", "refused", None)
    metrics.loaded("b0", "m", "loaded", 12.0)
    metrics.loaded("b0", "m", "failed", 1.0)
    metrics.unloaded("b0", "m", "idle")
    metrics.lag.observe(0.3)
    assert values(metrics, "llmgw_tokens", "model", "kind") == {
        ("m", "prompt"): 11,
        ("m", "output"): 5,
        ("m", "cached"): 1,
    }
    assert sample(metrics, "llmgw_client_aborts_total") == 1
    assert sample(metrics, "llmgw_rejected_total", reason="overloaded") == 2
    assert sample(metrics, "llmgw_retries_total", reason="upstream_error") == 1
    assert sample(metrics, "llmgw_hold_seconds_sum") == 3
    assert sample(metrics, "llmgw_hold_seconds_count") == 1
    assert sample(metrics, "llmgw_held_total", model="m", outcome="refused") == 1
    assert sample(metrics, "llmgw_model_loads_total", backend="b0", model="m", outcome="failed") == 1
    assert sample(metrics, "llmgw_model_load_seconds_sum", backend="b0", model="m") == 12
    assert sample(metrics, "llmgw_model_unloads_total", backend="b0", model="m", reason="idle") == 1
    assert sample(metrics, "llmgw_reactor_lag_seconds_bucket", le="0.25") == 0
    assert sample(metrics, "llmgw_reactor_lag_seconds_bucket", le="0.5") == 1


def test_a_stream_keeps_its_histogram() -> None:
    metrics = empty()
    gaps = metrics.gaps("m", "b0")
    gaps.observe(0.02)
    assert metrics.gaps("m", "b0") is gaps
    assert sample(metrics, "llmgw_inter_token_seconds_count", model="m", backend="b0") == 1


def test_names_nobody_knows_are_other() -> None:
    metrics = Metrics(list, dict, knows={"m"}.__contains__)
    for index in range(100):
        request(metrics, model=f"made-up-{index}", used=Usage(prompt_tokens=1))
        metrics.gaps(f"made-up-{index}", "b0")
    request(metrics)
    assert values(metrics, "llmgw_requests", "model") == {("other",): 100, ("m",): 1}
    assert values(metrics, "llmgw_tokens", "model", "kind")["other", "prompt"] == 100
    assert {model for model, _ in values(metrics, "llmgw_tokens", "model", "kind")} == {"other", "m"}


def test_hostile_names_make_no_second_line() -> None:
    metrics = empty()
    hostile = 'x"} 1\nllmgw_requests_total{a="\\'
    request(metrics, model=hostile)
    assert values(metrics, "llmgw_requests", "model") == {(hostile,): 1}


def test_backends_that_are_gone_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_SERIES", 10)
    members = [{"id": "b0"}]
    metrics = Metrics(lambda: members, dict)
    for index in range(7):
        request(metrics, backend=f"b{index}")
    request(metrics, backend=None, status=503)
    assert set(values(metrics, "llmgw_requests", "backend")) == {("b0",), ("",)}


def test_the_fleet_is_read_at_the_scrape() -> None:
    fleet = Fleet(BreakerRules(), Random(1))
    for name in ("b0", "b1"):
        fleet.put(BackendSpec(id=name, url=f"http://{name}:80", models=("m",), max_connections=4), 0.0)
    metrics = Metrics(lambda: fleet.snapshot(0.0), dict)
    assert values(metrics, "llmgw_in_flight", "backend") == {("b0",): 0, ("b1",): 0}
    assert values(metrics, "llmgw_backend_cap", "backend") == {("b0",): 4, ("b1",): 4}
    assert values(metrics, "llmgw_breaker_state", "backend") == {("b0",): 0, ("b1",): 0}
    assert values(metrics, "llmgw_backend_available", "backend") == {("b0",): 1, ("b1",): 1}
    assert values(metrics, "llmgw_backend_busy_slots", "backend") == {}


def test_every_breaker_state_has_a_number() -> None:
    assert {state.value for state in State} == set(metrics_module._BREAKER)


@pytest.mark.parametrize(
    ("state", "figure"), [("closed", 0), ("slow_start", 1), ("half_open", 2), ("open", 3)]
)
def test_breaker_states(state: str, figure: int) -> None:
    metrics = Metrics(lambda: [{"id": "b0", "breaker": state}], dict)
    assert values(metrics, "llmgw_breaker_state", "backend") == {("b0",): figure}


def test_further_gauges_are_told() -> None:
    given: Mapping[str, tuple[str, float]] = {
        "llmgw_limiter_degraded": ("Degraded.", 3),
        "llmgw_connections": ("Connections.", 7),
    }
    metrics = Metrics(list, lambda: given)
    assert sample(metrics, "llmgw_limiter_degraded") == 3
    assert sample(metrics, "llmgw_connections") == 7


def test_the_process_and_the_version_are_told() -> None:
    found = scrape(empty())
    assert found["process_resident_memory_bytes"].samples[0].value > 1e6
    assert found["llmgw_info"].samples[0].labels["version"]


def test_no_name_stands_twice() -> None:
    text = empty().render().decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_counting_is_cheap() -> None:
    """Ten times what it takes on a quiet machine, so that only a mistake in kind fails."""
    metrics = Metrics(list, dict, knows={"m"}.__contains__)
    gaps = metrics.gaps("m", "b0")
    assert min(timeit.repeat(lambda: request(metrics), number=2000, repeat=3)) / 2000 < 40e-6
    assert min(timeit.repeat(lambda: gaps.observe(0.02), number=5000, repeat=3)) / 5000 < 4e-6
