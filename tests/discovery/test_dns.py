"""The dns discovery: with a zone in memory and a clock, and with a real name server on loopback."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_twisted
from harness import free_port
from twisted.internet import reactor
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock, deferLater
from twisted.names import client, dns, server
from twisted.names.error import DNSNameError
from zope.interface import implementer

from llmgw.builtins import dns_discovery
from llmgw.config import parse_backend
from llmgw.discovery.dns import DnsDiscovery, DnsOptions, Record, split_server
from llmgw.discovery.dns_lookup import system_servers
from llmgw.errors import ConfigError
from llmgw.interfaces import IDiscovery
from llmgw.testing import discovery_contract


class Zone:
    """Records in memory; a question that is in ``broken`` is not answered."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[Record]] = {}
        self.broken: set[tuple[str, str]] = set()
        self.asked: list[tuple[str, str]] = []

    def __call__(self, name: str, kind: str) -> Deferred[Sequence[Record]]:
        self.asked.append((name, kind))
        if (name, kind) in self.broken:
            return fail(OSError("no answer in time"))
        return succeed(list(self.records.get((name, kind), [])))

    def address(self, name: str, *addresses: str, ttl_s: float = 30, kind: str = "A") -> None:
        self.records[name, kind] = [Record(ttl_s, each) for each in addresses]


class TestDnsContract(discovery_contract(dns_discovery)):  # type: ignore[misc]
    """SRV records, since only these tell a port of each."""

    options: Mapping[str, Any] = {"query": "_llm._tcp.x", "record": "srv"}

    @pytest.fixture(autouse=True)
    def _zone(self) -> None:
        self.zone = Zone()

    def build(self, options: Mapping[str, Any], clock: Clock) -> Any:
        built = super().build(options, clock)
        built._lookup = self.zone
        return _Renamed(built)

    def know(self, clock: Clock, entries: Sequence[Mapping[str, Any]]) -> None:
        self.zone.records["_llm._tcp.x", "SRV"] = [
            Record(5, f"{entry['id']}.x", urlsplit(entry["url"]).port or 80) for entry in entries
        ]
        for entry in entries:
            self.zone.address(f"{entry['id']}.x", urlsplit(entry["url"]).hostname or "", ttl_s=5)


@implementer(IDiscovery)
class _Renamed:
    """Ids are made of addresses here, which the contract does not know."""

    def __init__(self, built: Any) -> None:
        self._built = built

    def start(self, update: Any) -> None:
        names = {"10.0.0.1:8080": "a", "10.0.0.2:8080": "b"}
        self._built.start(lambda told: update([{**each, "id": names[each["id"]]} for each in told]))

    def stop(self) -> Any:
        return self._built.stop()


class Scene:
    def __init__(self, **options: Any) -> None:
        self.clock, self.zone = Clock(), Zone()
        self.told: list[Any] = []
        self.discovery = DnsDiscovery(DnsOptions(**options), self.clock, self.zone)

    def start(self) -> None:
        self.discovery.start(self.told.append)

    @property
    def urls(self) -> list[str]:
        for entry in self.told[-1]:
            parse_backend(entry)
        return [entry["url"] for entry in self.told[-1]]


@pytest.fixture
def scene() -> Any:
    made: list[Scene] = []

    def make(**options: Any) -> Scene:
        made.append(Scene(**options))
        return made[-1]

    yield make
    for each in made:
        each.discovery.stop()
        assert not each.clock.getDelayedCalls()


def test_addresses_of_both_families(scene: Any) -> None:
    it = scene(query="llm.x", port=8080, path="/llm")
    it.zone.address("llm.x", "10.0.0.2", "10.0.0.1", "10.0.0.1")
    it.zone.address("llm.x", "fd00::1", kind="AAAA")
    it.start()
    assert it.urls == ["http://10.0.0.1:8080/llm", "http://10.0.0.2:8080/llm", "http://[fd00::1]:8080/llm"]
    assert [entry["id"] for entry in it.told[-1]] == ["10.0.0.1:8080", "10.0.0.2:8080", "fd00::1:8080"]


def test_it_asks_again_when_the_shortest_time_to_live_is_over(scene: Any) -> None:
    it = scene(query="llm.x", port=80, least_s=5, most_s=60)
    it.zone.address("llm.x", "10.0.0.1", ttl_s=20)
    it.start()
    it.clock.advance(19)
    assert len(it.zone.asked) == 2
    it.zone.address("llm.x", "10.0.0.1", ttl_s=0)
    it.clock.advance(2)
    assert len(it.zone.asked) == 4
    it.zone.address("llm.x", "10.0.0.1", ttl_s=86400)
    it.clock.advance(5)
    assert len(it.zone.asked) == 6
    it.clock.advance(59)
    assert len(it.zone.asked) == 6
    it.clock.advance(1)
    assert len(it.zone.asked) == 8
    assert len(it.told) == 1  # nothing new, nothing told


def test_whoever_does_not_answer_says_nothing_for_an_hour(scene: Any) -> None:
    it = scene(query="llm.x", port=80)
    it.zone.address("llm.x", "10.0.0.1")
    it.zone.address("llm.x", "fd00::1", kind="AAAA")
    it.start()
    it.zone.broken = {("llm.x", "AAAA")}
    it.clock.pump([5.0] * 20)
    assert it.discovery.error == "AAAA of llm.x: no answer in time"
    assert not it.discovery.connected
    it.zone.broken = {("llm.x", "A"), ("llm.x", "AAAA")}
    it.clock.pump([5.0] * 690)
    assert len(it.told) == 1
    it.clock.pump([5.0] * 60)
    assert it.told[-1] == []
    it.zone.broken = set()
    it.clock.pump([5.0] * 2)
    assert len(it.urls) == 2
    assert it.discovery.error == ""


def test_one_that_never_answered_tells_nothing_and_one_family_is_enough(scene: Any) -> None:
    it = scene(query="llm.x", port=80)
    it.zone.broken = {("llm.x", "A"), ("llm.x", "AAAA")}
    it.start()
    assert it.told == []
    it.zone.broken = {("llm.x", "AAAA")}
    it.zone.address("llm.x", "10.0.0.1")
    it.clock.advance(5)
    assert it.urls == ["http://10.0.0.1:80"]


def test_no_such_name_is_an_empty_set(scene: Any) -> None:
    it = scene(query="llm.x", port=80)
    it.start()
    assert it.told == [[]]
    assert it.discovery.connected


def test_srv_tells_ports_weights_and_who_comes_first(scene: Any) -> None:
    it = scene(query="_llm._tcp.x", record="srv")
    it.zone.records["_llm._tcp.x", "SRV"] = [
        Record(30, "a.x", 8001, 10, 3),
        Record(30, "b.x", 8002, 10, 0),
        Record(30, "spare.x", 8003, 20, 9),
    ]
    for name, address in (("a.x", "10.0.0.1"), ("b.x", "10.0.0.2"), ("spare.x", "10.0.0.3")):
        it.zone.address(name, address)
    it.start()
    assert it.urls == ["http://10.0.0.1:8001", "http://10.0.0.2:8002"]
    assert [entry.get("weight") for entry in it.told[-1]] == [3.0, None]
    it.zone.records["a.x", "A"] = it.zone.records["b.x", "A"] = []
    it.clock.advance(30)
    assert it.urls == ["http://10.0.0.3:8003"]
    it.zone.records["_llm._tcp.x", "SRV"] = [Record(30, "", 0)]
    it.clock.advance(30)
    assert it.told[-1] == []


def test_srv_whose_targets_nobody_knows_tells_nothing(scene: Any) -> None:
    it = scene(query="_llm._tcp.x", record="srv")
    it.zone.records["_llm._tcp.x", "SRV"] = [Record(30, "a.x", 8001)]
    it.zone.broken = {("a.x", "A"), ("a.x", "AAAA")}
    it.start()
    assert it.told == []


def test_srv_over_https_goes_by_name_since_certificates_do(scene: Any) -> None:
    it = scene(query="_llm._tcp.x", record="srv", scheme="https")
    it.zone.records["_llm._tcp.x", "SRV"] = [Record(30, "a.x", 8001), Record(30, "b.x", 8002, 5)]
    it.start()
    assert it.urls == ["https://a.x:8001"]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"port": 1}, "query"),
        ({"query": "x"}, "port"),
        ({"query": "x", "record": "srv", "port": 1}, "port"),
        ({"query": "a b", "port": 1}, "query"),
        ({"query": "x", "port": 1, "servers": ["ns.x"]}, "servers[0]"),
        ({"query": "x", "port": 1, "servers": ["10.0.0.1:0"]}, "servers[0]"),
        ({"query": "x", "port": 1, "least_s": 500}, "least_s"),
        ({"query": "x", "port": 1, "path": "llm"}, "path"),
        ({"query": "x", "port": 1, "record": "mx"}, "record"),
    ],
)
def test_wrong_options_are_faults_with_their_keys(options: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        dns_discovery.build(options, Clock())
    assert [fault.where for fault in refused.value.faults] == [where]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.2", ("10.0.0.2", 53)),
        ("10.0.0.2:5353", ("10.0.0.2", 5353)),
        ("::1", ("::1", 53)),
        ("fd00::5353", ("fd00::5353", 53)),
        ("[::1]:5353", ("::1", 5353)),
    ],
)
def test_places_of_name_servers(text: str, place: tuple[str, int]) -> None:
    assert split_server(text) == place


def test_the_systems_servers_are_read_as_they_are_now() -> None:
    text = "# old\nsearch x\nnameserver 10.0.0.2\nnameserver\nnameserver fd00::2\n"
    assert system_servers(lambda: text) == [("10.0.0.2", 53), ("fd00::2", 53)]
    assert system_servers(lambda: "") == [("127.0.0.1", 53)]


class Authority(client.Resolver):
    """Answers from a table; what it has not does not exist."""

    def __init__(self, table: dict[tuple[bytes, int], list[Any]]) -> None:
        super().__init__(servers=[("127.0.0.1", 1)])
        self.table = table

    def query(self, query: Any, timeout: Any = None) -> Any:
        found = self.table.get((query.name.name, query.type))
        if found is None and not any(name == query.name.name for name, _ in self.table):
            return fail(DNSNameError())
        return succeed(
            ([dns.RRHeader(query.name.name, query.type, ttl=5, payload=each) for each in found or ()], [], [])
        )


class Server(server.DNSServerFactory):
    """Sends no datagram above 512 bytes: the rest is to be asked for over TCP."""

    noisy = False
    over_tcp = 0

    def sendReply(self, protocol: Any, message: Any, address: Any) -> None:
        if address is None:
            self.over_tcp += 1
        elif len(message.toStr()) > 512:
            message.trunc, message.answers = 1, []
        super().sendReply(protocol, message, address)


@pytest_twisted.ensureDeferred
async def test_against_a_real_name_server_over_udp_and_tcp() -> None:
    many = [dns.Record_A(f"10.0.{n // 200}.{n % 200 + 1}") for n in range(300)]
    table: dict[tuple[bytes, int], list[Any]] = {
        (b"_llm._tcp.x", dns.SRV): [
            dns.Record_SRV(0, 5, 8001, b"a.x"),
            dns.Record_SRV(0, 5, 8002, b"many.x"),
        ],
        (b"a.x", dns.A): [dns.Record_A("10.9.9.9")],
        (b"a.x", dns.AAAA): [dns.Record_AAAA("fd00::9")],
        (b"many.x", dns.A): many,
    }
    factory = Server(clients=[Authority(table)])
    protocol = dns.DNSDatagramProtocol(controller=factory)
    protocol.noisy = False
    tcp: Any = reactor.listenTCP(0, factory, interface="127.0.0.1")  # type: ignore[attr-defined]
    udp: Any = reactor.listenUDP(tcp.getHost().port, protocol, "127.0.0.1", 65535)  # type: ignore[attr-defined]
    told: list[Any] = []
    options = {"query": "_llm._tcp.x", "record": "srv", "servers": [f"127.0.0.1:{tcp.getHost().port}"]}
    discovery = dns_discovery.build(options, reactor)
    missing = dns_discovery.build({**options, "query": "none.x", "record": "address", "port": 1}, reactor)
    missed: list[Any] = []
    discovery.start(told.append)
    missing.start(missed.append)
    end = time.monotonic() + 15
    while not (told and missed) or factory.connections:
        assert time.monotonic() < end, (discovery.error, missing.error)
        await deferLater(reactor, 0.02)  # type: ignore[arg-type]
    discovery.stop()
    missing.stop()
    assert missed == [[]]
    urls = {entry["url"] for entry in told[0]}
    assert {"http://10.9.9.9:8001", "http://[fd00::9]:8001", "http://10.0.0.1:8002"} <= urls
    assert len(urls) == 302
    assert factory.over_tcp
    await tcp.stopListening()
    await udp.stopListening()
    await deferLater(reactor, 0.05)  # type: ignore[arg-type]


@pytest_twisted.ensureDeferred
async def test_a_name_server_that_is_not_there_is_told_and_tells_nothing() -> None:
    told: list[Any] = []
    options = {"query": "x", "port": 1, "servers": [f"127.0.0.1:{free_port()}"], "timeout_s": 0.2}
    discovery = dns_discovery.build(options, reactor)
    discovery.start(told.append)
    end = time.monotonic() + 15
    while not discovery.error:
        assert time.monotonic() < end
        await deferLater(reactor, 0.02)  # type: ignore[arg-type]
    discovery.stop()
    assert discovery.error == "A of x: no answer in time"
    assert told == []
