"""The source ``prometheus``: pages as servers write them, and as nobody should; an exporter's page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import pytest_twisted
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from twisted.web.resource import Resource
from twisted.web.server import Request, Site
from zope.interface.verify import verifyObject

from llmgw.errors import ConfigError
from llmgw.health.prometheus import (
    FIGURES,
    FORMATS,
    READ_BYTES,
    Page,
    PrometheusHealthFactory,
    Series,
    series,
)
from llmgw.health.target import ANSWER_BYTES, Target
from llmgw.interfaces import IHealthSource, IHealthSourceFactory
from llmgw.testing import FakeHealthTarget, health_source_contract
from llmgw.testing.fakes import Answer
from llmgw.values import HealthReport

factory = PrometheusHealthFactory()

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 8.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 3.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.25
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
"""
OLD_VLLM = b"""\
vllm:num_requests_running{model_name="m"} 2.0
vllm:num_requests_swapped{model_name="m"} 0.0
vllm:num_requests_waiting{model_name="m"} 0.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:cpu_cache_usage_perc{model_name="m"} 0.9
"""
SGLANG = b"""\
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",engine_type="unified",tp_rank="0",pp_rank="0"} 0.28
sglang:num_running_reqs{model_name="m",engine_type="unified",tp_rank="0",pp_rank="0"} 1.62e+02
sglang:num_running_reqs_offline_batch{model_name="m",tp_rank="0"} 9.0
sglang:num_queue_reqs{model_name="m",engine_type="unified",tp_rank="0",pp_rank="0"} 2826.0
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 500000.0
sglang:context_len{model_name="m",tp_rank="0"} 131072.0
"""
LLAMA = b"""\
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 3
"""
DCGM = b"""\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-604ac76c",device="nvidia0",Hostname="a"} 40
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-704ac76c",device="nvidia1",Hostname="a"} 90
DCGM_FI_DEV_MEMORY_TEMP{gpu="0",UUID="GPU-604ac76c"} 9223372036854775794
"""
ALL = VLLM + SGLANG + LLAMA + DCGM

TestContract = health_source_contract(factory, {"format": "vllm"}, {"/metrics": (200, VLLM)})
TestMappedContract = health_source_contract(
    factory,
    {"path": "/m?x=1", "metrics": {"gpu_use": 'util{gpu="0"}'}, "scale": {"gpu_use": 0.01}, "interval_s": 2},
    {"/m?x=1": (200, b'util{gpu="0"} 50\n')},
)


def look(answer: Answer, options: Mapping[str, Any] | None = None) -> HealthReport:
    """The first report."""
    clock = Clock()
    reports: list[HealthReport] = []
    source = factory.build(options or {}, clock)
    source.start(FakeHealthTarget(clock, {"/metrics": answer}), reports.append)
    clock.pump([0.05] * 60)
    source.stop()
    assert not clock.getDelayedCalls()
    return reports[0]


def read(body: bytes, figure: str, *selectors: str, scale: float = 1.0) -> float | None:
    """One figure of one page."""
    page = Page(body, {figure: [series(text, scale) for text in selectors]})
    return page.figures.get(figure)


def test_it_keeps_the_interfaces() -> None:
    verifyObject(IHealthSourceFactory, factory)
    verifyObject(IHealthSource, factory.build({}, Clock()))


# --- the formats that are built in --------------------------------------------


@pytest.mark.parametrize(
    ("format", "page", "figures"),
    [
        ("vllm", VLLM, {"busy_slots": 8, "deferred": 3, "kv_use": 0.25}),
        ("vllm", OLD_VLLM, {"busy_slots": 2, "deferred": 0, "kv_use": 0.5}),
        ("vllm", ALL, {"busy_slots": 8, "deferred": 3, "kv_use": 0.25}),
        (
            "sglang",
            SGLANG,
            {"busy_slots": 162, "deferred": 2826, "kv_use": 0.28, "context_length": 131072},
        ),
        ("llama-server", LLAMA, {"busy_slots": 1, "deferred": 3}),
        ("llama-server", b"llamacpp:kv_cache_usage_ratio 0.5\n", {"kv_use": 0.5}),
        ("dcgm", DCGM, {"gpu_use": 0.65}),
        ("dcgm", b'DCGM_FI_DEV_GPU_UTIL_RATIO{gpu="0"} 0.4\n', {"gpu_use": 0.4}),
        (
            "dcgm",
            b"DCGM_FI_DEV_GPU_UTIL 9223372036854775794\nDCGM_FI_PROF_GR_ENGINE_ACTIVE 0.7\n",
            {"gpu_use": 0.7},
        ),
    ],
)
def test_formats(format: str, page: bytes, figures: dict[str, Any]) -> None:
    assert look((200, page), {"format": format}) == HealthReport(alive=True, detail="ok", **figures)


@pytest.mark.parametrize(
    ("page", "figures"),
    [
        (VLLM, {"busy_slots": 8, "deferred": 3, "kv_use": 0.25}),
        (LLAMA, {"busy_slots": 1, "deferred": 3}),
        (DCGM, {"gpu_use": 0.65}),
    ],
)
def test_without_format_and_metrics_every_known_name_is_looked_for(
    page: bytes, figures: dict[str, Any]
) -> None:
    assert look((200, page)) == HealthReport(alive=True, detail="ok", **figures)


def test_every_format_names_fields_of_a_report() -> None:
    for wanted in FORMATS.values():
        assert wanted.keys() <= FIGURES.keys() <= set(HealthReport.__struct_fields__)


# --- a mapping of one's own ---------------------------------------------------


def test_metrics_alone_are_all_that_is_read() -> None:
    report = look((200, VLLM), {"metrics": {"slots": "vllm:num_requests_running"}})
    assert report == HealthReport(alive=True, slots=8, detail="ok")


def test_metrics_go_before_those_of_the_format() -> None:
    page = VLLM + b"mine 32\nother 4\n"
    options = {
        "format": "vllm",
        "metrics": {"kv_use": "mine", "gpu_use": ["absent", "other"]},
        "scale": {"kv_use": 0.0078125, "gpu_use": 0.125},
    }
    report = look((200, page), options)
    assert report == HealthReport(alive=True, busy_slots=8, deferred=3, kv_use=0.25, gpu_use=0.5, detail="ok")


@pytest.mark.parametrize(
    ("selector", "value"),
    [
        ("a", 7.0),
        ("a{}", 7.0),
        ('a{x="1"}', 1.0),
        ('a{x="1",y="p"}', 1.0),
        ('a{ y = "p" , x = "1", }', 1.0),
        ('a{y="p"}', 3.0),
        ('a{y="}, z=\\"1\\" "}', 4.0),
        ('a{z="1"}', None),
        ('a{x="2",y="q"}', None),
        ("a_total", 16.0),
        ("a:b", 32.0),
        ('c{x="1"}', None),
        ("b", None),
    ],
)
def test_selectors(selector: str, value: float | None) -> None:
    page = (
        b'# a{x="1"} 100\na{x="1",y="p"} 1\na{y="p",x="2",} 2 1395066363000\n'
        b'a{x="3",y="}, z=\\"1\\" "} 4\na_total 16\na:b 32\nc 64\n  \n'
    )
    assert read(page, "busy_slots", selector) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1a",
        "a b",
        "a{",
        "a{x}",
        'a{x=~"1"}',
        'a{x!="1"}',
        "a{x='1'}",
        'a{x="1"',
        'a{x="1"} 3',
        "sum(a)",
        "ä",
    ],
)
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be like name"):
        series(text)


def test_a_selector_is_kept_as_it_is_written_on_the_wire() -> None:
    assert series('a{x="1\\"",y=""}', 0.5) == Series(b"a", ((b"x", b'1\\"'), (b"y", b"")), 0.5)


# --- several series, and values that cannot be --------------------------------


@pytest.mark.parametrize(
    ("figure", "values", "told"),
    [
        ("busy_slots", "1 2 4", 7),
        ("slots", "4 4", 8),
        ("deferred", "0 0", 0),
        ("kv_use", "0.2 0.4 0.9", 0.5),
        ("gpu_use", "1 0", 0.5),
        ("context_length", "8192 4096", 4096),
        # Passed over:
        ("busy_slots", "NaN 2 +Inf -Inf -1 1e300 x", 2),
        ("kv_use", "NaN 0.5 -0.1 37", 0.5),
        ("slots", "0", None),
        ("context_length", "0", None),
        ("busy_slots", "-1", None),
        ("busy_slots", "NaN", None),
        ("kv_use", "37", None),
        ("kv_use", "9223372036854775794", None),
        ("deferred", "5e6", None),
        ("deferred", "1" * 41, None),
        # Rounded:
        ("busy_slots", "1.9999", 2),
        ("kv_use", "1.004", 1.0),
        ("deferred", "9e5 9e5", 1_000_000),
    ],
)
def test_series_make_one_figure(figure: str, values: str, told: float | None) -> None:
    page = "".join(f'a{{n="{n}"}} {value}\n' for n, value in enumerate(values.split())).encode()
    assert read(page, figure, "a") == (told if told is None else pytest.approx(told))


def test_counts_are_whole_numbers() -> None:
    report = look((200, VLLM), {"format": "vllm"})
    assert isinstance(report.busy_slots, int)


@pytest.mark.parametrize(
    ("page", "detail"),
    [
        (b"", "ok, but none of its metrics is there"),
        (b"<html>", "ok, but none of its metrics is there"),
        (b'a{n="1" 5\n', "ok, but none of its metrics is there"),
        (b"a\n", "ok, but none of its metrics is there"),
        (b"a 37\n", "ok, but a is 37, no kv_use"),
        (b"a x\n", "ok, but a is nan, no kv_use"),
        (b"a 37\nb 0.5\n", "ok"),
        (b"a 0.5", "ok"),
        (b"a 0.5\r\n", "ok"),
        (b"\n\na\t0.5 # {} 1\n", "ok"),
    ],
)
def test_a_page_that_tells_nothing_is_alive_and_says_why(page: bytes, detail: str) -> None:
    report = look((200, page), {"metrics": {"kv_use": ["a", "b"]}})
    assert report.alive
    assert report.detail == detail
    assert report.kv_use == (0.5 if detail == "ok" else None)


def test_too_many_series_are_no_figure() -> None:
    page = Page(b"b 3\n" + b"a 1\n" * READ_BYTES, {"busy_slots": [Series(b"b")], "deferred": [Series(b"a")]})
    assert page.figures == {"busy_slots": 3}
    assert page.doubt == "a has too many series"


@given(st.binary(max_size=200), st.sampled_from(sorted(FIGURES)))
def test_any_bytes_are_survived(noise: bytes, figure: str) -> None:
    for body in (noise, b"a" + noise, b"a{" + noise, b'a{x="' + noise + b'"} 1', b"a " + noise):
        for selector in ("a", 'a{x="1"}'):
            value = read(body, figure, selector)
            rule = FIGURES[figure]
            assert value is None or rule.least <= value <= rule.most


@given(st.dictionaries(st.text(max_size=8), st.integers(0, 1000), min_size=1, max_size=6))
def test_what_the_usual_library_writes_is_read(values: dict[str, int]) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("a", "Help.", ["x", "y"], registry=registry)
    for label, value in values.items():
        gauge.labels(label, "1").set(value)
    page = generate_latest(registry)
    assert read(page, "busy_slots", 'a{y="1"}') == sum(values.values())
    for label, value in values.items():
        written = label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        assert read(page, "busy_slots", f'a{{x="{written}"}}') == value


@pytest.mark.parametrize(
    "line",
    [
        b'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0\n',
        b"vllm:num_requests_running 1\n",
        b"".join(
            place.name + b" 1\n" for wanted in FORMATS.values() for list in wanted.values() for place in list
        ),
        b"\n",
        b"a 1\n",
        b"a{" + b'x="",' * 5000 + b'x="1"} 1\n',
        b'a{x="' + b'\\"' * 5000 + b"\n",
        b"a{" + b'"' * 5000,
    ],
    ids=["histogram", "one-name", "every-name", "empty", "short", "labels", "quotes", "open"],
)
def test_the_longest_answer_does_not_hold_up_the_reactor(line: bytes) -> None:
    """20 ms are wanted; the bound here is wide, as the machine may be busy."""
    body = (line * (ANSWER_BYTES // len(line) + 1))[:ANSWER_BYTES]
    wanted = {
        figure: [place for each in FORMATS.values() for place in each.get(figure, ())] for figure in FIGURES
    }
    wanted["slots"] = [series('a{x="1"}'), series('a{x="2",y="3"}')]
    took_s = []
    for _ in range(5):
        began_s = time.process_time()
        Page(body, wanted)
        took_s.append(time.process_time() - began_s)
    assert min(took_s) < 0.06


# --- life and death -----------------------------------------------------------


@pytest.mark.parametrize("status", [204, 302, 401, 404, 500, 503])
def test_only_200_is_alive(status: int) -> None:
    assert look((status, VLLM)) == HealthReport(alive=False, detail=f"{status} from /metrics")


def test_silence_is_death_and_a_refusal_is_told() -> None:
    assert look(None) == HealthReport(alive=False, detail="no answer in time")
    assert look(ConnectionRefusedError()).refused


# --- options ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({"format": "tgi"}, ["format"]),
        ({"format": 5}, ["format"]),
        ({"format": ["vllm"]}, ["format"]),
        ({"metrics": "a"}, ["metrics"]),
        ({"metrics": {}}, ["metrics"]),
        ({"metrics": {"alive": "a"}}, ["metrics.alive"]),
        ({"metrics": {"kv_use": "a b", "gpu_use": [], "slots": ["a", 1], "deferred": 1}},
         ["metrics.kv_use", "metrics.gpu_use", "metrics.slots", "metrics.deferred"]),
        ({"format": "vllm", "scale": {"kv_use": 0.01}}, ["scale.kv_use"]),
        ({"scale": 0.01}, ["scale"]),
        ({"metrics": {"kv_use": "a"}, "scale": {"kv_use": 0}}, ["scale.kv_use"]),
        ({"metrics": {"kv_use": "a"}, "scale": {"kv_use": True}}, ["scale.kv_use"]),
        ({"metrics": {"kv_use": "a"}, "scale": {"kv_use": "%"}}, ["scale.kv_use"]),
        ({"metrics": {"kv_use": "a"}, "scale": {"kv_use": float("nan")}}, ["scale.kv_use"]),
        ({"path": "metrics"}, ["path"]),
        ({"path": 1}, ["path"]),
        ({"path": ""}, ["path"]),
        ({"path": "/a b"}, ["path"]),
        ({"path": "/a\r\nx: y"}, ["path"]),
        ({"path": "/m", "url": "http://e/m"}, ["path"]),
        ({"format": "x", "path": 1, "url": "e", "interval_s": 1, "y": 1},
         ["format", "path", "path", "url", "y", "interval_s"]),
    ],
)  # fmt: skip
def test_wrong_options_are_named(options: dict[str, Any], places: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        factory.build(options, Clock())
    assert [fault.where for fault in caught.value.faults] == places


@pytest.mark.parametrize(
    "url",
    [
        "",
        5,
        "exporter:9400",
        "/metrics",
        "ftp://e/m",
        "http://",
        "http:///m",
        "http://e:0/m",
        "http://e:70000/m",
        "http://e:x/m",
        "http://e/m#part",
        "http://e/a b",
        "http://{id}/m",
        "http://[::1/m",
        "http://u:secret@e/m",
    ],
)
def test_a_wrong_url_is_refused_without_telling_its_password(url: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        factory.build({"url": url}, Clock())
    assert [fault.where for fault in caught.value.faults] == ["url"]
    assert "secret" not in str(caught.value)


# --- another server's page ----------------------------------------------------


class Metrics(Resource):
    """Remembers who asked how."""

    isLeaf = True

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.page = page
        self.asked: list[Request] = []

    def render_GET(self, request: Request) -> bytes:
        self.asked.append(request)
        return self.page


@pytest.mark.parametrize("host", ["127.0.0.1", "{host}"])
@pytest_twisted.ensureDeferred
async def test_an_exporter_is_asked_in_the_backends_place_and_gets_no_credential(host: str) -> None:
    from twisted.internet import reactor

    live: Any = reactor
    backend, exporter = Metrics(VLLM), Metrics(DCGM)
    ports = [live.listenTCP(0, Site(each), interface="127.0.0.1") for each in (backend, exporter)]
    try:
        url = f"http://{host}:{ports[1].getHost().port}/metrics?only=gpu"
        source = factory.build({"format": "dcgm", "url": url}, live)
        told: Deferred[HealthReport] = Deferred()
        headers = {"authorization": "Bearer secret"}
        source.start(
            Target(live, "b0", f"http://127.0.0.1:{ports[0].getHost().port}", headers), told.callback
        )
        report = await told.addTimeout(5, live)
        source.stop()
    finally:
        for port in ports:
            await port.stopListening()
    assert report == HealthReport(alive=True, gpu_use=0.65, detail="ok")
    assert not backend.asked
    (request,) = exporter.asked
    assert request.uri == b"/metrics?only=gpu"
    assert not request.requestHeaders.hasHeader("authorization")


@pytest.mark.parametrize(
    ("url", "backend", "asked"),
    [
        ("http://e:9400/metrics", "http://10.0.0.1:8000", ("http://e:9400", "/metrics")),
        ("https://e", "http://10.0.0.1:8000", ("https://e", "/")),
        ("http://{host}:9400/m?x={a=1}", "http://10.0.0.1:8000/v", ("http://10.0.0.1:9400", "/m?x={a=1}")),
        ("http://{host}:9400/m", "https://[::1]:8000", ("http://[::1]:9400", "/m")),
        ("http://[::1]:9400?x=1", "http://b", ("http://[::1]:9400", "/?x=1")),
    ],
)  # fmt: skip
def test_the_exporter_may_be_on_the_backends_host(
    monkeypatch: pytest.MonkeyPatch, url: str, backend: str, asked: tuple[str, str]
) -> None:
    clock = Clock()
    made: list[FakeHealthTarget] = []

    def target(reactor: Any, id: str, url: str, headers: Mapping[str, str]) -> FakeHealthTarget:
        made.append(FakeHealthTarget(clock, otherwise=(200, DCGM), id=id, url=url, headers=headers))
        return made[0]

    monkeypatch.setattr("llmgw.health.target.Target", target)
    source = factory.build({"url": url}, clock)
    reports: list[HealthReport] = []
    source.start(FakeHealthTarget(clock, id="b7", url=backend, headers={"x": "y"}), reports.append)
    clock.advance(0)
    source.stop()
    assert reports[0].gpu_use == pytest.approx(0.65)
    assert (made[0].url, made[0].asked[0][1]) == asked
    assert made[0].id == "b7"
    assert not made[0].headers
