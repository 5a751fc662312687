"""Names of backends: looked up each time, remembered for when that fails or takes long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.interfaces import IHostnameResolver, IResolutionReceiver
from twisted.internet.task import Clock
from zope.interface import implementer
from zope.interface.verify import verifyObject

from llmgw.core.http import HeadLimits
from llmgw.wire.names import MAX_NAMES, PATIENCE_S, STALE_S, RememberedNames, remember_names
from llmgw.wire.pool import Pool
from llmgw.wire.sweep import Sweep


class Asked:
    """Who asks: what it was told, and whether that was all."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.begun = 0
        self.complete = 0

    def resolutionBegan(self, resolution: Any) -> None:
        self.begun += 1

    def addressResolved(self, address: Any) -> None:
        self.addresses.append(address.host)

    def resolutionComplete(self) -> None:
        self.complete += 1


@implementer(IHostnameResolver)
class Inner:
    """A resolver in the test's hands."""

    def __init__(self) -> None:
        self.receivers: list[Any] = []

    def resolveHostName(self, resolutionReceiver: Any, *args: Any) -> Any:
        verifyObject(IResolutionReceiver, resolutionReceiver)
        resolutionReceiver.resolutionBegan(self)
        self.receivers.append(resolutionReceiver)
        return self

    def answer(self, *hosts: str) -> None:
        receiver = self.receivers.pop(0)
        for host in hosts:
            receiver.addressResolved(IPv4Address("TCP", host, 80))
        receiver.resolutionComplete()


class Bench:
    def __init__(self) -> None:
        self.clock = Clock()
        self.inner = Inner()
        self.names = RememberedNames(self.inner, self.clock)
        verifyObject(IHostnameResolver, self.names)

    def ask(self, name: str = "b.example") -> Asked:
        asked = Asked()
        self.names.resolveHostName(asked, name, 80)
        return asked


def told(asked: Asked) -> tuple[list[str], int, int]:
    return asked.addresses, asked.begun, asked.complete


def test_each_look_up_asks_anew() -> None:
    bench = Bench()
    for hosts in (("10.0.0.1",), ("10.0.0.2", "10.0.0.3")):
        asked = bench.ask()
        bench.inner.answer(*hosts)
        assert told(asked) == (list(hosts), 1, 1)
    assert not bench.clock.getDelayedCalls()


def test_what_cannot_be_looked_up_any_more_is_remembered_for_an_hour() -> None:
    bench = Bench()
    bench.ask()
    bench.inner.answer("10.0.0.1")
    for wait_s, known in ((STALE_S, ["10.0.0.1"]), (1.0, [])):
        bench.clock.advance(wait_s)
        asked = bench.ask()
        bench.inner.answer()
        assert told(asked) == (known, 1, 1)


def test_a_slow_look_up_is_answered_from_memory_and_then_remembered() -> None:
    bench = Bench()
    bench.ask()
    bench.inner.answer("10.0.0.1")
    slow = bench.ask()
    bench.clock.advance(PATIENCE_S)
    assert told(slow) == (["10.0.0.1"], 1, 1)
    bench.inner.answer("10.0.0.2")
    assert told(slow) == (["10.0.0.1"], 1, 1)
    failing = bench.ask()
    bench.inner.answer()
    assert told(failing) == (["10.0.0.2"], 1, 1)


def test_without_memory_a_slow_look_up_is_waited_for() -> None:
    bench = Bench()
    asked = bench.ask()
    bench.clock.advance(10 * PATIENCE_S)
    assert told(asked) == ([], 1, 0)
    bench.inner.answer("10.0.0.1")
    assert told(asked) == (["10.0.0.1"], 1, 1)


def test_names_do_not_get_mixed_up_and_memory_is_bounded() -> None:
    bench = Bench()
    for number in range(MAX_NAMES + 1):
        bench.ask(f"b{number}")
        bench.inner.answer(f"10.0.{number // 256}.{number % 256}")
    for name, known in (("b0", []), ("b1", ["10.0.0.1"])):
        asked = bench.ask(name)
        bench.inner.answer()
        assert told(asked) == (known, 1, 1)


@pytest.mark.parametrize(("named", "kept"), [(True, [True, True, False]), (False, [True] * 3)])
def test_a_busy_connection_to_a_name_is_let_go_after_a_minute(named: bool, kept: list[bool]) -> None:
    clock = Clock()
    stand_ins: Any = {
        "reactor": clock,
        "sweep": Sweep(clock, clock.seconds),
        "outbox": None,
        "head_limits": HeadLimits(),
    }
    pool = Pool(lambda: None, tls=False, connect_s=1, idle_s=4, close_grace_s=1, named=named, **stand_ins)
    connection: Any = SimpleNamespace(made_s=0.0, advertised_s=None, lost=False, abort=lambda: None)
    seen = []
    for _ in range(3):
        pool.give(connection)
        seen.append(pool.take() is connection)
        clock.advance(31)
    assert seen == kept


def test_it_is_installed_once() -> None:
    class Reactor(Clock):
        nameResolver: Any = Inner()
        installed = 0

        def installNameResolver(self, resolver: Any) -> None:
            self.nameResolver = resolver
            self.installed += 1

    reactor = Reactor()
    remember_names(reactor)
    remember_names(reactor)
    assert (reactor.installed, type(reactor.nameResolver)) == (1, RememberedNames)
    remember_names(Clock())  # it has no names


@pytest.mark.parametrize(
    ("found", "types", "wanted"),
    [
        (["127.0.0.1"], None, ["127.0.0.1", "::1"]),
        (["127.0.0.7"], None, ["127.0.0.7", "::1"]),
        ([], None, ["127.0.0.1", "::1"]),
        ([], [IPv6Address], ["::1"]),
        (["127.0.0.1"], [IPv4Address], ["127.0.0.1"]),
    ],
)
@pytest.mark.parametrize("name", ["localhost", "LocalHost."])
def test_localhost_is_both_loopback_addresses(
    name: str, found: list[str], types: list[Any] | None, wanted: list[str]
) -> None:
    """RFC 6761 section 6.3, whatever the hosts file has."""
    bench, asked = Bench(), Asked()
    bench.names.resolveHostName(asked, name, 80, types)
    bench.inner.answer(*found)
    assert told(asked) == (wanted, 1, 1)
