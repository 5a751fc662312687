"""Exemplars, and OpenMetrics for their sake: read by the official parser."""

from __future__ import annotations

from pathlib import Path

from harness import Scripted, chat_body, eventually, gateway_with, post
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from llmgw.admin.metrics import Metrics


def request(metrics: Metrics, ttft_s: float, id: str = "r1", model: str = "m") -> None:
    metrics.request("/v1/chat/completions", model, "b0", 200, 1.0, ttft_s, 0.001, None)
    metrics.exemplify(model, "b0", ttft_s, ("request_id", id), 1000.5)


def exemplars(text: str) -> dict[str, tuple[str, float]]:
    """By bucket: id and value."""
    return {
        sample.labels["le"]: (next(iter(sample.exemplar.labels.values())), sample.exemplar.value)
        for family in text_string_to_metric_families(text)
        if family.name == "llmgw_ttft_seconds"
        for sample in family.samples
        if sample.exemplar is not None
    }


def test_a_bucket_keeps_the_last_request_that_fell_into_it() -> None:
    metrics = Metrics(list, dict)
    request(metrics, 0.02, "old")
    request(metrics, 0.021, "new")
    request(metrics, 4.0, "slow")
    request(metrics, 5000.0, "endless")
    assert exemplars(metrics.render_openmetrics().decode()) == {
        "0.025": ("new", 0.021),
        "5": ("slow", 4.0),
        "+Inf": ("endless", 5000.0),
    }


def test_both_forms_tell_the_same_figures() -> None:
    from prometheus_client.parser import text_string_to_metric_families as plain

    metrics = Metrics(
        lambda: [{"id": "b0", "in_flight": 1, "breaker": "open"}], lambda: {"llmgw_x": ("X.", 2)}
    )
    request(metrics, 0.2)
    metrics.rejected("overloaded")

    def figures(families: object) -> dict[object, float]:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families  # type: ignore[attr-defined]
            for sample in family.samples
            if sample.name.startswith("llmgw_") and "le" not in sample.labels
        }

    opened = figures(text_string_to_metric_families(metrics.render_openmetrics().decode()))
    assert opened == figures(plain(metrics.render().decode()))
    assert ("llmgw_rejected_total", (("reason", "overloaded"),)) in opened


def test_exemplars_are_bounded_as_labels_are() -> None:
    metrics = Metrics(list, dict, lambda model: model == "m")
    for number in range(50):
        request(metrics, 0.2, model=f"unknown-{number}")
    assert len(metrics._exemplars) == 1


def test_a_gateway_tells_them_when_the_configuration_says_so(tmp_path: Path) -> None:
    backend = Scripted()
    accept = "accept: application/openmetrics-text; version=1.0.0\r\n"
    with gateway_with(tmp_path, backend, config="[metrics]\nexemplars = true\n") as gateway:
        gateway.ask(post(body=chat_body(stream=True), headers="x-request-id: look-at-me\r\n"))

        def told() -> str:
            with gateway.admin_client() as client:
                client.send(f"GET /metrics HTTP/1.1\r\nhost: localhost\r\n{accept}\r\n".encode())
                return client.read_answer("GET").body.decode()

        found = eventually(lambda: exemplars(told()))
        assert [id for id, _ in found.values()] == ["look-at-me"]
        gateway.config_path.write_text(gateway.config_path.read_text().replace("exemplars = true", ""))
        assert gateway.admin("/api/reload", "POST")[0] == 200
        assert "# EOF" not in told()
    backend.close()
