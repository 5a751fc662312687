"""The source ``llamacpp``, on answers as the real server gives them."""

from __future__ import annotations

import gzip
import random
from collections import Counter
from typing import Any

import pytest
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from zope.interface.verify import verifyObject

from llmgw.errors import ConfigError
from llmgw.health.llamacpp import LlamaCppHealth, LlamaCppHealthFactory
from llmgw.interfaces import IHealthSource, IHealthSourceFactory
from llmgw.testing import FakeHealthTarget, health_source_contract
from llmgw.testing.fakes import Answer
from llmgw.values import HealthReport

factory = LlamaCppHealthFactory()

PROPS = b'{"default_generation_settings":{"params":{},"n_ctx":2048},"total_slots":2,"model_alias":"tiny"}'
SLOTS = b'[{"id":0,"n_ctx":2048,"is_processing":true},{"id":1,"n_ctx":2048,"is_processing":false}]'
METRICS = b"""# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 3
"""
MODELS = b'{"object":"list","data":[{"id":"tiny","aliases":["tiny"],"meta":{"n_ctx":2048}}]}'
HEALTHY: dict[str, Answer] = {
    "/health": (200, b'{"status":"ok"}'),
    "/props": (200, PROPS),
    "/slots": (200, SLOTS),
    "/metrics": (200, METRICS),
    "/v1/models": (200, MODELS),
}
LOADING = (503, b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}')
KEY_WANTED = (401, b'{"error":{"message":"Invalid API Key","type":"authentication_error","code":401}}')
OFF = (
    501,
    b'{"error":{"code":501,"message":"This server does not support it","type":"not_supported_error"}}',
)
FULL = HealthReport(
    alive=True,
    models=("tiny",),
    slots=2,
    busy_slots=1,
    deferred=3,
    context_length=2048,
    kind="llama-server",
    detail="ok",
)

TestContract = health_source_contract(factory)
TestHealthyContract = health_source_contract(factory, {"interval_s": 2}, HEALTHY)
TestIdleContract = health_source_contract(factory, {"busy": False}, HEALTHY)


class Watch:
    """A source at work on a fake backend."""

    def __init__(self, changes: dict[str, Answer] | None = None, **options: Any) -> None:
        self.clock = Clock()
        self.target = FakeHealthTarget(self.clock, {**HEALTHY, **(changes or {})})
        self.reports: list[HealthReport] = []
        options = {"interval_s": 5.0, "timeout_s": 2.0, "busy": True, **options}
        self.source = LlamaCppHealth(self.clock, **options, dice=random.Random(1))
        self.source.start(self.target, self.reports.append)
        self.run(0.5)

    def run(self, seconds: float) -> HealthReport:
        self.clock.pump([0.05] * round(seconds / 0.05))
        return self.reports[-1] if self.reports else HealthReport(alive=False, detail="none yet")

    def asked(self) -> Counter[str]:
        return Counter(path for _, path in self.target.asked)

    def stop(self) -> None:
        self.source.stop()
        assert not self.clock.getDelayedCalls()
        assert not self.target.waiting


def first(changes: dict[str, Answer], seconds: float = 0.5, **options: Any) -> HealthReport:
    watch = Watch(changes, **options)
    watch.run(seconds)
    watch.stop()
    return watch.reports[0]


def changed(**fields: Any) -> HealthReport:
    return HealthReport(**{name: fields.get(name, getattr(FULL, name)) for name in FULL.__struct_fields__})


def test_it_keeps_the_interfaces() -> None:
    verifyObject(IHealthSourceFactory, factory)
    verifyObject(IHealthSource, factory.build({}, Clock()))


def test_a_whole_server_is_told_in_full() -> None:
    assert first({}) == FULL


@pytest.mark.parametrize("compress", [gzip.compress, lambda body: b"\x28\xb5\x2f\xfd" + body])
def test_what_is_compressed_is_told(compress: Any) -> None:
    squeezed = {path: (200, compress(HEALTHY[path][1])) for path in ("/props", "/v1/models")}  # type: ignore[index]
    told = first(squeezed)
    assert (told.models, told.slots) == (None, None)
    assert told.detail.startswith("ok, but it compresses answers, though none is asked for")


@pytest.mark.parametrize("status", [501, 404, 403, 400, 401])
def test_slots_and_metrics_may_be_off(status: int) -> None:
    off = (status, OFF[1])
    assert first({"/slots": off, "/metrics": off}) == changed(busy_slots=None, deferred=None)
    assert first({"/metrics": off}) == changed(deferred=None)
    assert first({"/slots": off}) == FULL, "requests_processing tells it too"


def test_what_is_off_is_asked_again_after_a_minute_only() -> None:
    watch = Watch({"/slots": OFF, "/metrics": OFF})
    watch.run(55)
    assert watch.asked()["/slots"] == watch.asked()["/metrics"] == watch.asked()["/props"] == 1
    assert watch.asked()["/health"] > 8
    watch.target.answers.update(HEALTHY)
    assert watch.run(30) == FULL
    watch.stop()


def test_facts_are_asked_once_a_minute() -> None:
    watch = Watch()
    watch.run(240)
    watch.stop()
    assert 4 <= watch.asked()["/props"] == watch.asked()["/v1/models"] <= 5
    assert watch.asked()["/slots"] == watch.asked()["/metrics"] == watch.asked()["/health"] >= 40


def test_a_backend_that_wants_a_key_is_alive() -> None:
    changes: dict[str, Answer] = dict.fromkeys(("/props", "/slots", "/metrics", "/v1/models"), KEY_WANTED)
    report = first(changes)
    assert report == HealthReport(alive=True, detail="ok, but 401 from /props: it wants another api_key_file")


def test_loading_is_told_and_watched_every_second() -> None:
    watch = Watch(dict.fromkeys(HEALTHY, LOADING))
    assert watch.run(5) == HealthReport(alive=True, loading=True, detail="loading its model")
    assert watch.asked() == {"/health": len(watch.reports)}
    assert len(watch.reports) in (5, 6)
    watch.target.answers.update(HEALTHY)
    assert watch.run(1.2) == FULL
    watch.stop()


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_failing_server_or_the_proxy_before_it_is_not_alive(status: int) -> None:
    report = first({"/health": (status, b"<html>Bad Gateway</html>")})
    assert report == HealthReport(alive=False, detail=f"{status} from /health")


@pytest.mark.parametrize(
    "changes",
    [
        dict.fromkeys(("/health", "/props", "/slots", "/metrics"), (404, b"404 page not found")),
        dict.fromkeys(("/health", "/props", "/slots", "/metrics"), (200, b"<html>welcome</html>")),
        {"/health": (200, b""), "/props": (200, b'{"version":"0.6"}')},
        {"/props": (200, b'{"total_slots":0}')},
        {"/props": (200, b'{"total_slots":true}')},
        {"/props": (200, b'{"total_slots":"2"}')},
        {"/props": (200, b'{"total_slots":2,"default_generation_settings":[]}')},
        {"/props": (200, b"[" * 100_000)},
        {"/props": (302, b"")},
    ],
)
def test_another_server_is_alive_with_its_models(changes: dict[str, Answer]) -> None:
    watch = Watch(changes)
    watch.run(20)
    watch.stop()
    assert watch.reports[0] == HealthReport(alive=True, models=("tiny",), detail="ok")
    assert not watch.asked()["/slots"]
    assert not watch.asked()["/metrics"]


@pytest.mark.parametrize("answer", [(200, b"<html>"), (404, b""), OSError("reset"), None])
def test_without_a_model_list_the_rest_is_told(answer: Answer) -> None:
    report = first({"/v1/models": answer}, seconds=3)
    if isinstance(answer, tuple):
        assert report == changed(models=None)
    else:
        assert report == changed(models=None, busy_slots=None, deferred=None), "silence ends the look"


def test_vllm_tells_its_window_in_the_model_list() -> None:
    listing = b'{"data":[{"id":"m","max_model_len":4096}]}'
    report = first({"/props": (404, b""), "/v1/models": (200, listing)})
    assert report == HealthReport(alive=True, models=("m",), context_length=4096, detail="ok")


def test_router_mode_is_a_llama_server_without_slots_of_its_own() -> None:
    failed = b'{"id":"b","status":{"value":"unloaded","failed":true}}'
    listing = b'{"data":[{"id":"a","status":{"value":"loaded"}},%s]}' % failed
    need_model = (400, b'{"error":{"message":"model name is missing"}}')
    report = first(
        {
            "/props": (200, b'{"role":"router","max_instances":2,"models_autoload":true}'),
            "/v1/models": (200, listing),
            "/slots": need_model,
            "/metrics": need_model,
        }
    )
    assert report == HealthReport(alive=True, models=("a",), kind="llama-server", detail="ok", role="router")


OLLAMA: dict[str, Answer] = {
    **dict.fromkeys(("/health", "/props", "/slots", "/metrics"), (404, b"404 page not found")),
    "/v1/models": (200, b'{"object":"list","data":[{"id":"phi:3b","object":"model","owned_by":"library"}]}'),
    "/": (200, b"Ollama is running"),
}


def test_an_ollama_is_known_by_its_page() -> None:
    watch = Watch(OLLAMA)
    report = watch.run(50)
    watch.stop()
    assert report == HealthReport(alive=True, models=("phi:3b",), kind="ollama", detail="ok")
    assert watch.asked() == {"/health": len(watch.reports), "/props": 1, "/": 1, "/v1/models": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"/": (200, b"<html>Ollama is running hot")},
        {"/": (200, b"")},
        {"/": (403, b"Ollama is running")},
        {"/": None},
    ],
)
def test_another_server_in_go_is_no_ollama(changes: dict[str, Answer]) -> None:
    assert first({**OLLAMA, **changes}, 5.0).kind is None


@pytest.mark.parametrize("props", [(404, b'{"detail":"Not Found"}'), (404, b""), (200, b"{}"), KEY_WANTED])
def test_a_server_that_is_none_in_go_is_not_asked_for_its_page(props: Answer) -> None:
    watch = Watch({**OLLAMA, "/props": props})
    assert watch.run(5).kind is None
    watch.stop()
    assert not watch.asked()["/"]


def test_an_ollama_that_is_once_late_with_its_page_is_one_still() -> None:
    watch = Watch(OLLAMA)
    watch.target.answers["/"] = None
    assert watch.run(120).kind == "ollama"
    watch.stop()
    assert watch.asked()["/"] > 1
    assert {report.kind for report in watch.reports} == {"ollama"}


def test_an_ollama_that_gives_way_to_a_llama_server_is_one_no_more() -> None:
    watch = Watch(OLLAMA)
    watch.target.answers.update(HEALTHY)
    assert watch.run(70) == FULL
    watch.stop()


def test_a_sleeping_server_is_not_woken() -> None:
    props = PROPS.replace(b'"total_slots"', b'"is_sleeping":true,"total_slots"')
    watch = Watch({"/props": (200, props)})
    report = watch.run(40)
    watch.stop()
    assert report == changed(busy_slots=None, deferred=None, detail="asleep")
    assert not watch.asked()["/slots"]
    assert not watch.asked()["/metrics"]


def test_with_busy_off_only_questions_that_let_it_sleep_are_asked() -> None:
    watch = Watch(busy=False)
    assert watch.run(20) == changed(busy_slots=None, deferred=None)
    watch.stop()
    assert set(watch.asked()) == {"/health", "/props", "/v1/models"}


@pytest.mark.parametrize(
    ("text", "deferred"),
    [
        (b"llamacpp:requests_deferred 0\n", 0),
        (b"llamacpp:requests_deferred 2.0\n", 2),
        (b'llamacpp:requests_deferred{model="a b"} 7\n', 7),
        (b"llamacpp:requests_deferred 4 1700000000000\n", 4),
        (b"llamacpp:requests_deferred -1\n", 0),
        (b"llamacpp:requests_deferred NaN\n", None),
        (b"llamacpp:requests_deferred +Inf\n", None),
        (b"llamacpp:requests_deferred 1e999\n", None),
        (b"llamacpp:requests_deferred ..\n", None),
        (b"llamacpp:requests_deferred\n", None),
        (b"xllamacpp:requests_deferred 4\n", None),
        (b"", None),
        (b"\xff\x00" * 1000, None),
    ],
)
def test_the_deferred_gauge_is_read_or_left(text: bytes, deferred: int | None) -> None:
    assert first({"/metrics": (200, text)}) == changed(deferred=deferred)


@pytest.mark.parametrize(("text", "kv_use"), [(b"0.25", 0.25), (b"1.5", 1.0), (b"-1", 0.0), (b"nan", None)])
def test_older_servers_tell_their_kv_use(text: bytes, kv_use: float | None) -> None:
    report = first({"/metrics": (200, METRICS + b"llamacpp:kv_cache_usage_ratio " + text + b"\n")})
    assert report == changed(kv_use=kv_use)


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b"{}", b"[1]", b'[{"id":0}]', b'[{"is_processing":1}]', b"\xff"]
)
def test_a_slot_table_without_sense_is_left_out(body: bytes) -> None:
    assert first({"/slots": (200, body)}) == FULL


def test_the_first_silence_ends_the_look() -> None:
    watch = Watch(dict.fromkeys(("/props", "/slots", "/metrics", "/v1/models"), None))
    assert watch.run(2.2) == HealthReport(alive=True, detail="ok")
    watch.stop()
    assert watch.asked() == {"/health": 1, "/props": 1}


def test_silent_facts_are_asked_again_at_the_next_look_and_what_was_known_stays() -> None:
    watch = Watch()
    watch.target.answers["/props"] = None
    watch.run(70)
    assert watch.asked()["/props"] >= 2
    report = watch.reports[-1]
    assert (report.kind, report.slots, report.models) == ("llama-server", 2, ("tiny",))
    watch.target.answers["/props"] = (200, PROPS)
    assert watch.run(8) == FULL
    watch.stop()


def test_a_busy_server_that_is_late_with_its_slots_is_alive() -> None:
    report = first({"/slots": None}, seconds=3)
    assert report == changed(busy_slots=None, deferred=None)


@pytest.mark.parametrize("death", [ConnectionRefusedError(), None, LOADING])
def test_one_that_comes_back_is_asked_anew_who_it_is(death: Answer) -> None:
    watch = Watch({"/slots": OFF})
    watch.run(10)
    watch.target.answers["/health"] = death
    assert watch.run(12) != FULL
    watch.target.answers.update(HEALTHY)
    watch.target.answers["/v1/models"] = (200, b'{"data":[{"id":"another"}]}')
    assert watch.run(4) == changed(models=("another",))
    watch.stop()


def test_refusal_is_told() -> None:
    assert first({"/health": ConnectionRefusedError()}).refused


@pytest.mark.parametrize("steps", range(6))
def test_stop_at_any_question_leaves_nothing(steps: int) -> None:
    clock = Clock()
    target = FakeHealthTarget(clock, HEALTHY)
    source = factory.build({}, clock)
    source.start(target, lambda report: None)
    clock.pump([0.0] * steps)
    source.stop()
    asked = len(target.asked)
    clock.pump([0.1] * 100)
    assert not clock.getDelayedCalls()
    assert len(target.asked) == asked


@pytest.mark.parametrize(
    ("options", "places"),
    [({"busy": 1}, ["busy"]), ({"busy": "no", "interval_s": 1, "z": 0}, ["busy", "z", "interval_s"])],
)
def test_wrong_options_are_named(options: dict[str, Any], places: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        factory.build(options, Clock())
    assert [fault.where for fault in caught.value.faults] == places
