"""Spans of a real gateway, as a collector gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cases.scenes import ask_stream, ask_whole
from harness import Gateway, Line, Received, Scripted, answer_completion, gateway_with, json_response
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from llmgw.assembly import build_tracer
from llmgw.config import parse_config
from llmgw.errors import ConfigError

PARENT = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"
CONFIG = """
[tracing]
endpoint = "{url}"
service_name = "front"
"""


class Collector:
    """Takes OTLP over HTTP.

    :ivar spans: what came, by name, with its attributes as plain values.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[Any, dict[str, Any]]] = []
        self.resources: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, request: Any) -> None:
        for resource in request.resource_spans:
            self.resources.append(plain(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += [(span, plain(span.attributes)) for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def test_a_request_is_a_span_and_so_is_each_attempt(tmp_path: Path, collector: Collector) -> None:
    def broken(line: Line, request: Received) -> None:
        line.send(json_response({"error": {"message": "no"}}, 502))

    bad, good = Scripted(broken), Scripted(answer_completion)
    config = CONFIG.format(url=collector.url) + '[router]\nplugin = "round-robin"\n'
    with gateway_with(tmp_path, bad, good, config=config) as gateway:
        assert gateway.ask(ask_stream(id="one", headers=PARENT)).status == 200
        assert gateway.ask(ask_stream(id="two", headers=PARENT)).status == 200
    by_id = {span.span_id.hex(): (span, said) for span, said in collector.spans}
    servers = [(span, said) for span, said in collector.spans if span.kind == span.SPAN_KIND_SERVER]
    clients = [(span, said) for span, said in collector.spans if span.kind == span.SPAN_KIND_CLIENT]
    assert {span.trace_id.hex() for span, _ in collector.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert [span.parent_span_id.hex() for span, _ in servers] == ["b7ad6b7169203331"] * 2
    assert {span.parent_span_id.hex() for span, _ in clients} <= set(by_id)
    asked = [(said["llmgw.backend"], said.get("error.type")) for _, said in clients]
    assert set(asked) == {("b0", "upstream_error"), ("b1", None)}
    assert asked.count(("b1", None)) == 2
    # The backend's own spans hang below the attempt's.
    (told,) = {request.get("traceparent") for request in good.requests[:1]}
    assert told is not None
    assert told.split("-")[1] == "0af7651916cd43dd8448eb211c80319c"
    assert by_id[told.split("-")[2]][1]["llmgw.backend"] == "b1"
    span, said = next(each for each in servers if each[1]["llmgw.request_id"] == "one")
    assert span.name == "chat m"
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == "m"
    assert said["http.response.status_code"] == 200
    assert "error.type" not in said
    assert [event.name for event in span.events] == ["gen_ai.first_token"]
    assert span.start_time_unix_nano <= span.events[0].time_unix_nano <= span.end_time_unix_nano
    assert collector.resources[0]["service.name"] == "front"


def test_without_a_callers_trace_one_begins_and_a_refusal_is_an_error(
    tmp_path: Path, collector: Collector
) -> None:
    backend = Scripted(answer_completion)
    with gateway_with(tmp_path, backend, config=CONFIG.format(url=collector.url)) as gateway:
        assert gateway.ask(ask_whole(id="whole")).status == 200
        assert gateway.ask(ask_whole(id="nobody", model="unknown")).status == 404
        not_recorded = PARENT.replace("-01\r", "-00\r")
        assert gateway.ask(ask_whole(id="unseen", headers=not_recorded)).status == 200
    said = {said["llmgw.request_id"]: (span, said) for span, said in collector.spans if "http.route" in said}
    assert set(said) == {"whole", "nobody"}
    span, attributes = said["nobody"]
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert (span.parent_span_id, attributes["error.type"]) == (b"", "model_not_found")
    assert backend.requests[-1].get("traceparent") == not_recorded[13:].strip()


def test_a_collector_that_is_away_costs_a_line_in_the_log(tmp_path: Path) -> None:
    backend = Scripted(answer_completion)
    with gateway_with(tmp_path, backend, config=CONFIG.format(url="http://127.0.0.1:1/v1/traces")) as gateway:
        assert gateway.ask(ask_whole()).status == 200
    assert is_told(gateway)


def is_told(gateway: Gateway) -> bool:
    return gateway.log.count("traces: ") == 1


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = CONFIG.format(url="http://127.0.0.1:4318/v1/traces") + '[[backends]]\nid = "b"\nurl = "http://b"\n'
    with pytest.raises(ConfigError, match=r"tracing.endpoint: .*llmgw\[otel\]"):
        build_tracer(parse_config(text, source="", base_dir="/"), None)
