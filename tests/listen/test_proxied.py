"""The PROXY protocol on a listener, without a network."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.logger import capturedLogs

from llmgw.core.proxy_header import V2_START
from llmgw.listen.complaints import MOST, PER_S
from llmgw.listen.proxied import HEADER_S, ProxiedFactory

BALANCER = IPv4Address("TCP", "10.0.0.9", 40000)
HEADER = b"PROXY TCP4 192.0.2.1 198.51.100.1 5000 443\r\n"


class Behind(Protocol):
    """What stands behind the header."""

    def __init__(self, addr: Any) -> None:
        self.addr = addr
        self.got = b""
        self.lost = False

    def dataReceived(self, data: bytes) -> None:
        self.got += data

    def connectionLost(self, reason: Any = None) -> None:
        self.lost = True


class Makes(Factory):
    """Remembers what it made.

    :param full: it makes nothing.
    """

    noisy = False

    def __init__(self, *, full: bool = False) -> None:
        self.made: list[Behind] = []
        self.full = full

    def buildProtocol(self, addr: Any) -> Behind | None:
        if self.full:
            return None
        self.made.append(Behind(addr))
        return self.made[-1]


def connect(factory: ProxiedFactory, peer: Any = BALANCER) -> tuple[Any, StringTransport]:
    preface = factory.buildProtocol(peer)
    assert preface is not None
    transport = StringTransport(peerAddress=peer)
    preface.makeConnection(transport)
    return preface, transport


def proxied(behind: Makes, *networks: str) -> tuple[ProxiedFactory, Clock]:
    clock = Clock()
    nets = [ipaddress.ip_network(each) for each in networks]
    return ProxiedFactory(behind, nets or None, clock), clock


def test_behind_the_header_only_the_client_is_seen() -> None:
    behind = Makes()
    factory, clock = proxied(behind, "10.0.0.0/8")
    preface, transport = connect(factory)
    for byte in HEADER:
        assert not behind.made
        preface.dataReceived(bytes([byte]))
    preface.dataReceived(b"hello")
    [made] = behind.made
    assert made.addr == IPv4Address("TCP", "192.0.2.1", 5000)
    assert transport.getPeer() == made.addr
    assert transport.getHost() == IPv4Address("TCP", "198.51.100.1", 443)
    assert made.transport is transport
    assert made.got == b"hello"
    assert not clock.getDelayedCalls()
    preface.connectionLost(None)
    assert made.lost


def test_what_comes_with_the_header_goes_on() -> None:
    behind = Makes()
    preface, _ = connect(proxied(behind, "10.0.0.0/8")[0])
    source, destination = (ipaddress.ip_address(each).packed for each in ("2001:db8::1", "2001:db8::2"))
    preface.dataReceived(V2_START + b"\x21\x21\x00\x24" + source + destination + b"\x13\x88\x01\xbbhello")
    assert behind.made[0].got == b"hello"
    assert behind.made[0].addr == IPv6Address("TCP", "2001:db8::1", 5000)


@pytest.mark.parametrize("header", [b"PROXY UNKNOWN\r\n", V2_START + b"\x20\x00\x00\x00"])
def test_a_balancer_that_speaks_for_itself_is_the_client(header: bytes) -> None:
    behind = Makes()
    preface, transport = connect(proxied(behind, "10.0.0.0/8")[0])
    preface.dataReceived(header)
    assert behind.made[0].addr == transport.getPeer() == BALANCER


@pytest.mark.parametrize("peer", ["11.0.0.1", "127.0.0.1", "::1"])
def test_strangers_are_closed_at_once(peer: str) -> None:
    factory, _ = proxied(Makes(), "10.0.0.0/8")
    kind = IPv6Address if ":" in peer else IPv4Address
    with capturedLogs() as logs:
        assert factory.buildProtocol(kind("TCP", peer, 1)) is None
    assert [event["peer"] for event in logs] == [peer]


def test_an_ipv4_balancer_on_a_listener_for_both_families() -> None:
    factory, _ = proxied(Makes(), "10.0.0.0/8")
    assert factory.buildProtocol(IPv6Address("TCP", "::ffff:10.0.0.9", 1)) is not None
    assert factory.buildProtocol(UNIXAddress("/run/s")) is not None


def test_the_innermost_factory_says_whom_it_believes() -> None:
    class Gateway(Makes):
        def believes(self, host: str) -> bool:
            return host in ("10.0.0.9", "unix")

    class Wrapper(Makes):
        wrappedFactory = Gateway()

    for behind in (Gateway(), Wrapper()):
        factory, _ = proxied(behind)
        assert factory.buildProtocol(BALANCER) is not None
        assert factory.buildProtocol(UNIXAddress(None)) is not None
        assert factory.buildProtocol(IPv4Address("TCP", "127.0.0.1", 1)) is None
    alone, _ = proxied(Makes())
    assert alone.buildProtocol(IPv4Address("TCP", "127.0.0.1", 1)) is not None
    assert alone.buildProtocol(UNIXAddress(None)) is not None
    assert alone.buildProtocol(BALANCER) is None


def test_a_header_must_come_soon() -> None:
    factory, clock = proxied(Makes(), "10.0.0.0/8")
    preface, transport = connect(factory)
    preface.dataReceived(HEADER[:10])
    clock.advance(HEADER_S - 0.1)
    assert not transport.disconnecting
    with capturedLogs() as logs:
        clock.advance(0.2)
    assert transport.disconnected or transport.disconnecting
    assert "no PROXY header within 5 s" in logs[0]["why"]
    preface.dataReceived(HEADER[10:] + b"late")  # already on its way
    preface.connectionLost(None)


def test_anything_else_is_cut_and_told_and_nothing_is_made() -> None:
    behind = Makes()
    factory, clock = proxied(behind, "10.0.0.0/8")
    preface, transport = connect(factory)
    with capturedLogs() as logs:
        preface.dataReceived(b"GET / HTTP/1.1\r\n")
    assert transport.disconnected or transport.disconnecting
    assert "does not begin with a PROXY header" in logs[0]["why"]
    preface.dataReceived(HEADER)
    assert not behind.made
    assert not clock.getDelayedCalls()


def test_a_probe_that_connects_and_leaves_is_no_news() -> None:
    factory, clock = proxied(Makes(), "10.0.0.0/8")
    preface, _ = connect(factory)
    with capturedLogs() as logs:
        preface.connectionLost(None)
    assert not logs
    assert not clock.getDelayedCalls()


def test_nothing_is_made_for_a_client_over_its_cap() -> None:
    preface, transport = connect(proxied(Makes(full=True), "10.0.0.0/8")[0])
    preface.dataReceived(HEADER + b"hello")
    assert transport.disconnected or transport.disconnecting
    preface.dataReceived(b"more")
    preface.connectionLost(None)


def test_a_flood_of_strangers_does_not_fill_the_log() -> None:
    factory, clock = proxied(Makes(), "10.0.0.0/8")
    stranger = IPv4Address("TCP", "192.0.2.66", 1)
    with capturedLogs() as logs:
        for _ in range(1000):
            factory.buildProtocol(stranger)
        assert len(logs) == MOST
        clock.advance(PER_S)
        factory.buildProtocol(stranger)
    assert len(logs) == MOST + 1
    assert logs[-1]["more"] == f" ({1000 - MOST} more were not told)"
