"""The kubernetes discovery: its view of slices, and its dealings with an API server of the recorded shape."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_twisted
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock, deferLater
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

from llmgw.builtins import kubernetes_discovery
from llmgw.config import parse_backend
from llmgw.discovery.kubernetes_protocol import ApiError, Heard, Slices, error_of
from llmgw.discovery.standing import Backoff
from llmgw.errors import ConfigError
from llmgw.testing import discovery_contract

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "endpointslices.json").read_text())
"""What ``GET …/endpointslices`` of a Kubernetes 1.29 looks like, shortened."""


def endpoint(address: str, **more: Any) -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": {"ready": True, "serving": True, "terminating": False},
        **more,
    }


def piece(name: str, version: int, *endpoints: Any, port: int = 8080, **more: Any) -> dict[str, Any]:
    """A slice."""
    return {
        "metadata": {"name": name, "namespace": "llm", "resourceVersion": str(version)},
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": [{"name": "http", "protocol": "TCP", "port": port}],
        **more,
    }


def listed(version: int, *slices: Any) -> dict[str, Any]:
    return {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(version)}, "items": list(slices)}


def event(kind: str, item: Any) -> dict[str, Any]:
    return {"type": kind, "object": item}


def urls(slices: Slices, port: Any = None) -> list[str]:
    entries = slices.entries(port, "http", "")
    for entry in entries:
        parse_backend({key: value for key, value in entry.items() if key != "key"})
    return [entry["url"] for entry in entries]


@pytest.fixture
def slices() -> Slices:
    found = Slices()
    found.load(listed(10, piece("s-1", 8, endpoint("10.1.0.1"), endpoint("10.1.0.2")), piece("s-2", 9)))
    return found


def test_a_recorded_list_is_understood() -> None:
    found = Slices()
    found.load(RECORDED)
    assert found.version == "48211"
    assert found.entries("http", "http", "") == [
        {
            "key": "llama-7xk2p",
            "id": "llama-6d5f9c7b8-abcde",
            "url": "http://10.244.1.17:8080",
            "labels": {"zone": "zone-a", "node": "gpu-node-1"},
        },
        {
            "key": "llama-7xk2p",
            "id": "10.244.2.9:8080",
            "url": "http://10.244.2.9:8080",
            "labels": {"node": "gpu-node-2"},
        },
        {"key": "llama-v6zz9", "id": "llama-6d5f9c7b8-fghij", "url": "http://[fd00:10:244::21]:8080"},
    ]
    assert urls(found, "metrics") == ["http://10.244.1.17:9100", "http://10.244.2.9:9100"]
    assert urls(found, 7) == [
        "http://10.244.1.17:7",
        "http://10.244.2.9:7",
        "http://[fd00:10:244::21]:7",
    ]


def test_events_change_the_picture(slices: Slices) -> None:
    assert slices.take(event("ADDED", piece("s-3", 11, endpoint("10.1.0.3")))) is Heard.CHANGED
    assert slices.take(event("MODIFIED", piece("s-1", 12, endpoint("10.1.0.2"), port=9))) is Heard.CHANGED
    assert urls(slices) == ["http://10.1.0.2:9", "http://10.1.0.3:8080"]
    assert slices.version == "12"
    assert slices.take(event("BOOKMARK", {"metadata": {"resourceVersion": "40"}})) is Heard.BOOKMARK
    assert slices.version == "40"
    slices.take(event("DELETED", piece("s-1", 41)))
    slices.take(event("DELETED", piece("none", 42)))
    assert urls(slices) == ["http://10.1.0.3:8080"]


@pytest.mark.parametrize(
    ("conditions", "served"),
    [
        ({"ready": True}, True),
        ({}, True),
        (None, True),
        ({"ready": None}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
    ],
)
def test_only_what_is_ready_is_served(conditions: Any, served: bool) -> None:
    found = Slices()
    found.load(listed(1, piece("s", 1, {"addresses": ["10.1.0.1"], "conditions": conditions})))
    assert bool(urls(found)) is served


@pytest.mark.parametrize(
    "odd",
    [
        {"endpoints": None},
        {"endpoints": 7},
        {"endpoints": [7, {}, {"addresses": []}, {"addresses": [7]}, {"addresses": None}]},
        {"ports": None},
        {"ports": [{}, {"port": None}, 7]},
    ],
)
def test_slices_with_gaps_are_no_backends(odd: dict[str, Any]) -> None:
    found = Slices()
    found.load(
        listed(1, piece("s", 1, endpoint("10.1.0.1"), **odd) if "ports" in odd else {**piece("s", 1), **odd})
    )
    assert urls(found) == []


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({}, "without object"),
        ({"type": "ADDED", "object": 7}, "without object"),
        ({"type": "ADDED", "object": {}}, "without metadata"),
        ({"type": "ADDED", "object": {"metadata": {"resourceVersion": "1"}}}, "without a name"),
        ({"type": "BOOKMARK", "object": {"metadata": {}}}, "without a resource version"),
        (
            {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "1&x"}}},
            "without a resource version",
        ),
        ({"type": "NEWS", "object": piece("s", 1)}, "type 'NEWS'"),
        ({"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}, "etcd is away"),
    ],
)
def test_what_is_no_good_is_told_and_changes_nothing(slices: Slices, message: Any, why: str) -> None:
    before = urls(slices)
    with pytest.raises(ApiError, match=why):
        slices.take(message)
    assert (urls(slices), slices.version) == (before, "10")


def test_a_version_that_is_gone_is_forgotten_and_the_slices_are_not(slices: Slices) -> None:
    with pytest.raises(ApiError) as gone:
        slices.take(event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}))
    assert gone.value.code == 410
    assert slices.version is None
    assert len(urls(slices)) == 2


@pytest.mark.parametrize("answer", [{}, {"items": 7}, {"metadata": {"resourceVersion": "1"}, "items": [7]}])
def test_a_list_that_is_none_changes_nothing(slices: Slices, answer: Any) -> None:
    with pytest.raises(ApiError):
        slices.load(answer)
    assert len(urls(slices)) == 2


def test_errors_without_words() -> None:
    assert str(error_of([])) == "an answer that is no object"
    assert error_of({"code": "x"}).code == 0


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["7", "10.0.0.1"])
NAMES = st.sampled_from(
    ["metadata", "name", "resourceVersion", "endpoints", "addresses", "ports", "port", "targetRef"]
)
JUNK = st.recursive(
    LEAVES, lambda deep: st.lists(deep, max_size=3) | st.dictionaries(NAMES, deep, max_size=4)
)


@given(st.sampled_from(["ADDED", "DELETED", "BOOKMARK", "ERROR"]), JUNK)
def test_no_event_does_harm(kind: str, item: Any) -> None:
    found = Slices()
    found.load(listed(1, piece("s", 1, endpoint("10.1.0.1"))))
    try:
        found.take(event(kind, item))
    except ApiError:
        pass
    found.entries(None, "http", "")


# --- the contract, over an API in memory ---


class FakeApi:
    """Behind the client's own interface."""

    def __init__(self) -> None:
        self.version = 1
        self.slice: Any = piece("s", 1)
        self.feed: Any = None

    def know(self, entries: Sequence[Mapping[str, Any]]) -> None:
        self.version += 1
        endpoints = [
            endpoint(urlsplit(entry["url"]).hostname or "", targetRef={"kind": "Pod", "name": entry["id"]})
            for entry in entries
        ]
        self.slice = piece("s", self.version, *endpoints)
        if self.feed is not None:
            self.feed(json.dumps(event("MODIFIED", self.slice)).encode() + b"\n")

    async def ask(self, *_: Any) -> Any:
        return 200, json.dumps(listed(self.version, self.slice)).encode()

    async def stream(self, method: str, url: str, headers: Any, body: Any, feed: Any, **_: Any) -> None:
        self.feed = feed
        await Deferred()


class TestKubernetesContract(discovery_contract(kubernetes_discovery)):  # type: ignore[misc]
    options: Mapping[str, Any] = {"service": "llama", "api": "http://api", "namespace": "llm"}

    @pytest.fixture(autouse=True)
    def _api(self) -> None:
        self.api = FakeApi()

    def build(self, options: Mapping[str, Any], clock: Clock) -> Any:
        built = super().build(options, clock)
        built._http = self.api
        return built

    def know(self, clock: Clock, entries: Sequence[Mapping[str, Any]]) -> None:
        self.api.know(entries)


# --- an API server on loopback ---


class Api(Resource):
    """Lists and watches as the API does.

    :ivar asked: queries, in order.
    :ivar oldest: versions before it are gone.
    :ivar token: what must be presented.
    """

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.slices = {item["metadata"]["name"]: item for item in copy.deepcopy(RECORDED)["items"]}
        self.version = int(RECORDED["metadata"]["resourceVersion"])
        self.log: list[tuple[int, dict[str, Any]]] = []
        self.oldest = 0
        self.token = "first"
        self.asked: list[dict[bytes, list[bytes]]] = []
        self.watchers: list[Any] = []
        self.broken = False
        self.port: Any = reactor.listenTCP(0, Site(self), interface="127.0.0.1")  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.port.getHost().port}"

    def render_GET(self, request: Any) -> Any:
        self.asked.append(request.args)
        if self.broken:
            request.setResponseCode(500)
            return b"<html>proxy error</html>"
        if request.getHeader("authorization") != f"Bearer {self.token}":
            return self._status(request, 401, "Unauthorized")
        assert request.path == b"/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
        assert request.args[b"labelSelector"] == [b"kubernetes.io/service-name=llama"]
        if b"watch" not in request.args:
            return json.dumps(listed(self.version, *self.slices.values())).encode()
        version = int(request.args[b"resourceVersion"][0])
        if version < self.oldest:
            if version % 2:
                return self._status(request, 410, "too old resource version")
            gone = {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410}
            return json.dumps(event("ERROR", gone)).encode() + b"\n"
        request.setHeader("content-type", "application/json")
        request.write(b"")
        for at, each in self.log:
            if at > version:
                request.write(json.dumps(each).encode() + b"\n")
        self.watchers.append(request)
        request.notifyFinish().addErrback(lambda _: self.watchers.remove(request))
        return NOT_DONE_YET

    def change(self, kind: str, item: Any) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        name = item["metadata"]["name"]
        if kind == "DELETED":
            self.slices.pop(name)
        else:
            self.slices[name] = item
        self.log.append((self.version, event(kind, item)))
        self.send(self.log[-1][1])

    def send(self, message: Any) -> None:
        for watcher in self.watchers:
            watcher.write(json.dumps(message).encode() + b"\n")

    def end_watches(self) -> None:
        for watcher in self.watchers:
            watcher.finish()
        self.watchers = []

    async def close(self) -> None:
        for watcher in list(self.watchers):
            watcher.transport.abortConnection()
        await self.port.stopListening()
        await deferLater(reactor, 0.05)  # type: ignore[arg-type]

    def _status(self, request: Any, code: int, message: str) -> bytes:
        request.setResponseCode(code)
        return json.dumps({"kind": "Status", "message": message, "code": code}).encode()


async def until(check: Any, within_s: float = 15) -> None:
    end = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < end, check
        await deferLater(reactor, 0.02)  # type: ignore[arg-type]


@pytest_twisted.ensureDeferred
async def test_against_an_api_server(tmp_path: Path) -> None:
    api, told = Api(), []
    token = tmp_path / "token"
    token.write_text("wrong\n")
    options = {
        "service": "llama",
        "namespace": "llm",
        "port": "http",
        "api": api.url,
        "token_file": str(token),
    }
    discovery = kubernetes_discovery.build(options, reactor)
    discovery._backoff = Backoff(1, Random(1), first_s=0.05, most_s=0.2)
    discovery.start(told.append)

    def names() -> list[str]:
        return [entry["id"] for entry in told[-1]] if told else []

    try:
        await until(lambda: discovery.error == "status 401: Unauthorized")
        token.write_text("first\n")
        await until(lambda: len(names()) == 3)
        await until(lambda: api.watchers)
        api.change("ADDED", piece("new", 0, endpoint("10.244.3.3")))
        await until(lambda: "10.244.3.3:8080" in names())
        api.change("DELETED", piece("new", 0))
        await until(lambda: len(names()) == 3)
        # A bookmark moves the version on, and the next watch begins there; the token has changed meanwhile.
        api.version += 100
        api.send(
            event("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(api.version)}})
        )
        await until(lambda: discovery._slices.version == str(api.version))
        api.token = "second"
        token.write_text("second")
        seen = len(told)
        api.end_watches()
        await until(lambda: api.watchers)
        assert api.asked[-1][b"resourceVersion"] == [str(api.version).encode()]
        assert api.asked[-1][b"allowWatchBookmarks"] == [b"true"]
        assert len(told) == seen
        # What a watcher misses while its version is forgotten, by a status and by an event.
        for turn in (1, 2):
            api.broken = True
            api.end_watches()
            await until(lambda: not discovery.connected)
            assert "status 500" in discovery.error
            api.change("ADDED", piece(f"late-{turn}", 0, endpoint(f"10.244.4.{turn}")))
            api.version += turn
            api.oldest = api.version
            api.broken = False
            await until(lambda turn=turn: f"10.244.4.{turn}:8080" in names())
            await until(lambda: api.watchers)
        assert discovery.connected
        assert all(told)
    finally:
        discovery.stop()
        await api.close()


@pytest.mark.parametrize(
    ("options", "wheres"),
    [
        ({"namespace": "x", "api": "http://a"}, ["service"]),
        ({"namespace": "x", "api": "http://a", "service": "a", "selector": "b"}, ["service"]),
        ({"service": "a"}, ["api"]),
        ({"service": "a", "api": "http://a"}, ["namespace"]),
        ({"service": "A B", "api": "http://a", "namespace": "a/b"}, ["service", "namespace"]),
        ({"service": "a", "api": "http://a", "namespace": "b", "port": "a/b"}, ["port"]),
        ({"service": "a", "api": "http://a", "namespace": "b", "token_file": "/no/such"}, ["token_file"]),
    ],
)
def test_wrong_options_are_faults_with_their_keys(
    options: dict[str, Any], wheres: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError) as refused:
        kubernetes_discovery.build(options, Clock())
    assert [fault.where for fault in refused.value.faults] == wheres


def test_inside_a_cluster_it_finds_the_rest_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    monkeypatch.setattr("llmgw.discovery.kubernetes.IN_CLUSTER", str(tmp_path))
    (tmp_path / "namespace").write_text("llm")
    (tmp_path / "token").write_text("a-token\n")
    discovery = kubernetes_discovery.build({"service": "llama"}, Clock())
    assert discovery._url().startswith(
        "https://[fd00::1]:6443/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices?labelSelector="
    )
    assert discovery._headers()["authorization"] == "Bearer a-token"
    (tmp_path / "token").write_text("")
    with pytest.raises(OSError, match="no word"):
        discovery._headers()
