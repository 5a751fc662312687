"""The etcd discovery before an etcd that misbehaves as told, with a clock and no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from real_etcd import b64
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from llmgw.builtins import etcd_discovery
from llmgw.discovery.etcd import EtcdDiscovery
from llmgw.discovery.etcd_client import EtcdOptions
from llmgw.discovery.etcd_protocol import EtcdError
from llmgw.discovery.http_client import AwayError, QuietError
from llmgw.errors import ConfigError
from llmgw.testing import discovery_contract


class FakeEtcd:
    """Keys in memory, behind the client's own interface.

    :ivar asked: paths of calls and watches, in order, each with its endpoint.
    :ivar fault: raised by everything while it is set.
    """

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.revision = 1
        self.log: list[tuple[int, dict[str, Any]]] = []
        self.asked: list[str] = []
        self.fault: Exception | None = None
        self.feed: Callable[[bytes], None] | None = None
        self.watching: Deferred[None] | None = None

    def know(self, documents: Mapping[str, bytes]) -> None:
        for key in [*self.keys, *documents]:
            if documents.get(key) == self.keys.get(key):
                continue
            self.revision += 1
            if key in documents:
                change = {"kv": self._kv(key, documents[key])}
            else:
                change = {"type": "DELETE", "kv": {"key": b64(key)}}
            self.log.append((self.revision, change))
            self._send({"header": self._header(), "events": [change]})
        self.keys = dict(documents)

    def end(self, fault: Exception | None = None) -> None:
        """The watch ends."""
        watching, self.watching, self.feed = self.watching, None, None
        assert watching is not None
        if fault is None:
            watching.callback(None)
        else:
            watching.errback(fault)

    async def ask(self, method: str, url: str, headers: Any, body: bytes, timeout_s: float) -> Any:
        self.asked.append(url)
        if self.fault is not None:
            raise self.fault
        kvs = [self._kv(key, value) for key, value in self.keys.items()]
        return 200, json.dumps({"header": self._header(), "kvs": kvs}).encode()

    async def stream(
        self, method: str, url: str, headers: Any, body: bytes, feed: Any, *, open_s: float, silence_s: float
    ) -> None:
        start = int(json.loads(body)["create_request"]["start_revision"])
        self.asked.append(f"{url} {start}")
        if self.fault is not None:
            raise self.fault
        self.watching, self.feed = Deferred(), feed
        self._send({"header": self._header(), "created": True})
        for revision, change in self.log:
            if revision >= start:
                self._send({"header": self._header(), "events": [change]})
        await self.watching

    def _send(self, message: Any) -> None:
        if self.feed is not None:
            self.feed(json.dumps({"result": message}).encode() + b"\n")

    def _header(self) -> dict[str, str]:
        return {"cluster_id": "1", "revision": str(self.revision)}

    def _kv(self, key: str, value: bytes) -> dict[str, str]:
        return {"key": b64(key), "value": b64(value.decode()), "create_revision": "1"}


class FakedFactory:
    """The plugin, over a fake store."""

    name, description, contract = etcd_discovery.name, etcd_discovery.description, etcd_discovery.contract

    def __init__(self) -> None:
        self.store = FakeEtcd()

    def build(self, options: Any, reactor: Any) -> Any:
        built = etcd_discovery.build(options, reactor)
        built._http = self.store
        return built


class TestEtcdContract(discovery_contract(etcd_discovery)):  # type: ignore[misc]
    @pytest.fixture(autouse=True)
    def _store(self) -> None:
        self.store = FakeEtcd()

    def build(self, options: Mapping[str, Any], clock: Clock) -> Any:
        built = super().build(options, clock)
        built._http = self.store
        return built

    def know(self, clock: Clock, entries: Sequence[Mapping[str, Any]]) -> None:
        self.store.know({f"/llmgw/{entry['id']}": json.dumps(entry).encode() for entry in entries})


@pytest.fixture
def scene() -> Any:
    clock, store, told = Clock(), FakeEtcd(), []
    options = EtcdOptions(endpoints=("http://one", "http://two"))
    discovery = EtcdDiscovery(options, clock, store)
    store.know({"/llmgw/a": b'{"url": "http://10.0.0.1"}'})
    discovery.start(told.append)
    yield clock, store, told, discovery
    discovery.stop()
    clock.advance(0)
    assert not clock.getDelayedCalls()


RANGE, WATCH = "/v3/kv/range", "/v3/watch"


def test_a_watch_that_ends_goes_on_at_the_next_member_behind_what_was_seen(scene: Any) -> None:
    clock, store, told, discovery = scene
    store.know({**store.keys, "/llmgw/b": b'{"url": "http://10.0.0.2"}'})
    store.end()
    assert not discovery.connected
    clock.advance(0.2)
    assert store.asked == [f"http://one{RANGE}", f"http://one{WATCH} 3", f"http://two{WATCH} 4"]
    assert discovery.connected
    assert len(told) == 2


def test_while_nobody_answers_it_tries_slower_and_slower_and_tells_nothing(scene: Any) -> None:
    clock, store, told, discovery = scene
    store.fault = AwayError("refused")
    store.end(AwayError("cut"))
    begun = len(store.asked)
    clock.pump([0.05] * 40)
    quick = len(store.asked) - begun
    assert 4 <= quick <= 10
    clock.pump([1.0] * 600)
    assert 90 <= len(store.asked) - begun - quick <= 160
    assert {url.partition("/v3")[0] for url in store.asked[-2:]} == {"http://one", "http://two"}
    assert len(told) == 1
    assert "refused" in discovery.error
    store.fault = None
    clock.pump([1.0] * 7)
    assert discovery.error == ""
    assert len(told) == 1


def test_silence_opens_the_watch_again_at_once_and_at_the_same_member(scene: Any) -> None:
    _, store, told, discovery = scene
    store.end(QuietError("nothing came"))
    assert store.asked[-1] == f"http://one{WATCH} 3"
    assert len(store.asked) == 3
    assert discovery.connected
    assert len(told) == 1


def test_a_fault_of_our_own_is_logged_and_everything_is_read_anew(scene: Any, expected_failures: Any) -> None:
    clock, store, told, _ = scene
    store.end(ZeroDivisionError())
    clock.advance(1)
    assert store.asked[-2:] == [f"http://one{RANGE}", f"http://one{WATCH} 3"]
    assert len(told) == 2
    assert len(expected_failures(ZeroDivisionError)) == 1


def test_a_cancelling_that_is_not_ours_does_not_end_it(scene: Any) -> None:
    clock, store, told, discovery = scene
    store.end(CancelledError())
    assert not discovery.connected
    clock.advance(1)
    assert discovery.connected
    store.know({})
    assert told[-1] == []


def test_garbage_ends_the_watch_and_it_resumes(scene: Any) -> None:
    clock, store, told, discovery = scene
    for garbage in (b"<html>\n", b'{"result": 7}\n', b'{"result": {"header": {"revision": "x"}}}\n'):
        with pytest.raises(EtcdError):
            store.feed(garbage)
        store.end(AwayError("as the client does"))
        clock.advance(1)
        assert discovery.connected
    store.know({})
    assert told[-1] == []


@pytest.mark.parametrize(
    ("options", "wheres"),
    [
        ({"endpoints": []}, ["endpoints"]),
        ({"endpoints": ["ftp://x"]}, ["endpoints[0]"]),
        ({"prefix": ""}, ["prefix"]),
        ({"username": "x"}, ["password_file"]),
        ({"password_file": "/etc/hostname"}, ["password_file"]),
        ({"ca_file": "/no/such"}, ["ca_file"]),
        ({"ca_file": "/etc/hostname"}, ["endpoints"]),
        ({"ca_file": "/etc/hostname", "endpoints": ["https://x"]}, ["ca_file"]),
        ({"timeout_s": 0, "silence_s": 0}, ["timeout_s", "silence_s"]),
        ({"endpoint": "http://x"}, ["endpoint"]),
    ],
)
def test_wrong_options_are_faults_with_their_keys(options: dict[str, Any], wheres: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        etcd_discovery.build(options, Clock())
    assert [fault.where for fault in refused.value.faults] == wheres
