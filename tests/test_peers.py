"""Gateways that hear of each other through a real Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import pytest_twisted
from redis_servers import RedisServer
from twisted.internet import reactor
from twisted.internet.task import deferLater

from llmgw.config import PeersConfig, StoreConfig
from llmgw.core.breaker import BreakerRules
from llmgw.core.fleet import BackendSpec, Fleet
from llmgw.core.lease import Lease
from llmgw.errors import Overloaded
from llmgw.peers import Peers
from llmgw.store.store import Store
from llmgw.values import Request

QUICK = PeersConfig(refresh_s=0.05, stale_s=0.6)


class Side:
    """One gateway, as far as peers see it."""

    def __init__(self, url: str, cap: int = 4, prefix: str = "t:") -> None:
        self.fleet = Fleet(BreakerRules(), Random(1))
        for id in ("b", "c"):
            self.fleet.put(BackendSpec(id, f"http://{id}", models=("m",), max_connections=cap), 0.0)
        self.store = Store(StoreConfig(url=url, key_prefix=prefix), reactor)
        self.peers = Peers(QUICK, self.store, self.fleet, reactor, time.monotonic)

    def start(self) -> None:
        self.store.start()
        self.peers.start()

    async def stop(self) -> None:
        await self.peers.stop()
        await self.store.close()

    @property
    def others_at_work(self) -> int:
        return self.fleet.members["b"].view.peers_in_flight

    def take(self, id: str = "b") -> Lease | None:
        """One more request, if there is room."""
        request = Request(id="r", model="m", prompt_tokens=1)
        try:
            free = {each.id for each in self.fleet.candidates(request, time.monotonic())}
        except Overloaded:
            return None
        return self.fleet.lease(id, request, time.monotonic()) if id in free else None


async def until(check: Callable[[], Any], within_s: float = 10.0) -> Any:
    end_s = time.monotonic() + within_s
    while not (found := check()):
        assert time.monotonic() < end_s, "not in time"
        await deferLater(reactor, 0.005)  # type: ignore[arg-type]
    return found


@pytest.fixture
def sides(redis_server: RedisServer) -> Iterator[Callable[..., list[Side]]]:
    made: list[Side] = []

    def make(count: int, cap: int = 4) -> list[Side]:
        prefix = f"t{time.monotonic_ns()}:"
        some = [Side(redis_server.url, cap, prefix) for _ in range(count)]
        for side in some:
            side.start()
        made.extend(some)
        return some

    yield make
    for side in made:
        pytest_twisted.blockon(pytest_twisted.defer.ensureDeferred(side.stop()))


@pytest_twisted.ensureDeferred
async def test_they_hear_of_each_others_work(sides: Callable[..., list[Side]]) -> None:
    one, two, three = sides(3)
    await until(lambda: all(side.peers.others == 2 for side in (one, two, three)))
    lease = one.take()
    assert lease is not None
    await until(lambda: (two.others_at_work, three.others_at_work) == (1, 1))
    assert one.others_at_work == 0
    lease.finish(time.monotonic(), True, "done")
    await until(lambda: two.others_at_work == 0)
    assert two.peers.state()["others"] == 2


@pytest_twisted.ensureDeferred
async def test_one_who_is_alone_has_the_whole_cap_and_gets_it_among_idle_ones(
    sides: Callable[..., list[Side]],
) -> None:
    one, two = sides(2)
    await until(lambda: one.peers.others == two.peers.others == 1)
    held = []
    for _ in range(4):
        held.append(await until(one.take))
    assert one.take() is None
    await until(lambda: two.others_at_work == 4)
    # The cap is used up: not even the first one is free, and there is nothing to wait for.
    assert two.take() is None
    held[0].finish(time.monotonic(), True, "done")
    assert await until(two.take)
    await until(lambda: one.others_at_work == 1)
    assert one.take() is None


@pytest_twisted.ensureDeferred
async def test_who_comes_takes_nothing_that_one_who_was_alone_still_has(
    sides: Callable[..., list[Side]],
) -> None:
    [one] = sides(1)
    await until(lambda: one.peers.heard_s is not None)
    await until(lambda: one.peers._timer is not None)
    one.peers._timer.cancel()  # it does not hear of the newcomer for a while
    one.peers._timer = None
    two = Side(one.store.config.url or "", prefix=one.store.config.key_prefix)
    two.start()
    await until(lambda: two.peers.others == 1)
    held = [side.take() for side in (one, one, one, one, two, two, two)]
    assert [lease is not None for lease in held] == [True] * 4 + [True, False, False]
    one.peers._begin()
    await until(lambda: (one.peers.others, two.others_at_work) == (1, 4))
    for lease in held:
        if lease is not None:
            lease.finish(time.monotonic(), True, "done")
    for _ in range(4):
        await until(two.take)
    await two.stop()


@pytest_twisted.ensureDeferred
async def test_a_rush_at_all_of_them_stays_within_the_slack(sides: Callable[..., list[Side]]) -> None:
    all_sides = sides(4, 8)
    await until(lambda: all(side.peers.others == 3 for side in all_sides))
    leases: list[Lease] = []
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        for side in all_sides:
            while (lease := side.take()) is not None:
                leases.append(lease)
        await deferLater(reactor, 0.002)  # type: ignore[arg-type]
    assert 8 <= len(leases) <= 8 + 3


@pytest_twisted.ensureDeferred
async def test_one_that_is_gone_does_not_count_for_long(sides: Callable[..., list[Side]]) -> None:
    one, two, three = sides(3)
    await until(lambda: one.peers.others == 2)
    assert two.take() is not None
    assert three.take() is not None
    await until(lambda: one.others_at_work == 2)
    # One takes its leave, the other just says no more.
    await two.peers.stop()
    await until(lambda: one.others_at_work == 1, QUICK.stale_s / 2 + 5)
    three.store._link.close()  # type: ignore[union-attr]
    three.store._closed = True
    await until(lambda: one.peers.others == 0)
    assert one.others_at_work == 0
    assert one.fleet.members["b"].room == 4


@pytest_twisted.ensureDeferred
async def test_an_opinion_of_one_makes_the_other_wary(sides: Callable[..., list[Side]]) -> None:
    one, two = sides(2, 64)
    await until(lambda: one.peers.others == two.peers.others == 1)
    for _ in range(5):
        lease = await until(one.take)
        lease.finish(time.monotonic(), False, "reset")
    breaker = two.fleet.members["b"].breaker("m")
    await until(lambda: breaker._hinted_s > time.monotonic())
    assert two.take() is not None  # nobody is taken out by hearsay


@pytest_twisted.ensureDeferred
async def test_without_the_store_each_goes_on_by_itself(redis_servers: Callable[..., Any]) -> None:
    server = redis_servers()
    one, two = Side(server.url), Side(server.url)
    for side in (one, two):
        side.start()
    try:
        await until(lambda: one.peers.others == two.peers.others == 1)
        assert one.take() is not None
        await until(lambda: two.others_at_work == 1)
        server.kill()
        # What is known holds on for a while, then each has the whole cap.
        await until(lambda: two.others_at_work == 0 and two.fleet.members["b"].room == 4)
        assert two.peers.state()["heard_s_ago"] is None
        for _ in range(4):
            assert two.take() is not None
        assert two.take() is None
        server.start()
        await until(lambda: one.others_at_work == 4 and two.others_at_work == 1)
        assert one.take() is None
    finally:
        for side in (one, two):
            await side.stop()
