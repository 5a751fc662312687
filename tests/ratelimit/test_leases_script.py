"""The script on a real Redis, against its model in Python and against what Redis may do to it."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from lease_model import Model
from redis_servers import RedisServer

from llmgw.ratelimit.calls import LEASES

KEYS = ["epoch", "gateways"]


class Caller:
    """Calls the script as a gateway would."""

    def __init__(self, redis: RedisServer, name: str = "g1", server: str = "run-1") -> None:
        self.redis = redis
        self.name = name
        self.server = server
        self.epoch: str | None = None

    def call(self, *entries: tuple[str, list[Any]]) -> list[list[float]]:
        message = msgspec.msgpack.encode(
            (self.name, self.server, self.epoch, [entry for _, entry in entries])
        )
        keys = [*KEYS, *(key for key, _ in entries)]
        answer = self.redis.ask("EVAL", LEASES.text, len(keys), *keys, message)
        self.epoch, self.gateways, told = msgspec.msgpack.decode(answer)
        return told  # type: ignore[no-any-return]

    def bucket(self, key: str, **said: Any) -> tuple[float, float, float]:
        values = {
            "rate": 1.0,
            "burst": 100.0,
            "delta": 0.0,
            "need": 0.0,
            "head": 0.0,
            "big": False,
            "want": 0.0,
            "hint": 100.0,
            "stale": False,
            **said,
        }
        [told] = self.call((key, [0, *values.values()]))
        return tuple(told)  # type: ignore[return-value]

    def places(self, key: str, limit: int, running: int, want: int) -> int:
        [told] = self.call((key, [1, limit, running, want]))
        return int(told[0])


def test_a_bucket_gives_takes_back_and_refills(redis_server: RedisServer) -> None:
    one = Caller(redis_server)
    assert one.bucket("b", need=3.0, head=1.0)[:2] == (3, 97)
    grant, level, flow = one.bucket("b", want=7.0)
    assert grant == 7
    assert level == pytest.approx(90, abs=0.5)
    assert flow == pytest.approx(2.0, rel=0.05)
    assert one.bucket("b", delta=5.0)[1] == pytest.approx(95, abs=0.5)
    assert one.bucket("b", delta=500.0)[1] == 100
    assert one.bucket("b", delta=-500.0)[1] == -100
    state, _, expires = redis_server.ask("GET", "b"), None, redis_server.ask("PTTL", "b")
    assert state.startswith(b"-100.000000 ")
    assert expires == pytest.approx(210_000, abs=2000)


def test_what_is_there_goes_to_the_first(redis_server: RedisServer) -> None:
    one = Caller(redis_server)
    slow = {"rate": 0.001}
    one.bucket("b", need=95.0, head=1.0, **slow)
    assert one.bucket("b", need=20.0, head=6.0, **slow)[0] == 0
    assert one.bucket("b", need=20.0, head=3.0, **slow)[0] == 5
    # More than the whole bucket: when nothing is owed, and then it is owed.
    assert one.bucket("b", delta=-1.0, need=100.0, head=100.0, big=True, **slow)[0] == 0
    assert one.bucket("c", need=1.0, head=1.0, **slow)[0] == 1
    assert one.bucket("c", need=100.0, head=100.0, big=True, **slow)[:2] == (100, pytest.approx(-1, abs=0.01))


def test_a_lost_memory_begins_with_what_gateways_remember(redis_server: RedisServer) -> None:
    one, two = Caller(redis_server, "g1"), Caller(redis_server, "g2")
    one.bucket("b", need=90.0, head=1.0)
    two.bucket("b", need=8.0, head=1.0)
    first = one.epoch
    assert two.epoch == first
    # The key alone: it had expired, and was full.
    redis_server.ask("DEL", "b")
    assert one.bucket("b", hint=10.0)[1] == 100
    redis_server.ask("FLUSHALL")
    assert one.bucket("b", hint=10.0)[1] == pytest.approx(10, abs=0.1)
    assert one.epoch != first
    # The second one still has the old epoch, and remembers less.
    assert two.bucket("b", hint=2.0)[1] == pytest.approx(2, abs=0.1)
    assert two.bucket("b", hint=1.0)[1] == pytest.approx(2, abs=0.1)
    assert two.bucket("b", hint=1.0, stale=True)[1] == pytest.approx(1, abs=0.1)


def test_another_server_has_another_memory(redis_server: RedisServer) -> None:
    one = Caller(redis_server)
    one.bucket("b")
    first = one.epoch
    one.server = "run-2"
    assert one.bucket("b", hint=7.0)[1] == pytest.approx(7, abs=0.1)
    assert one.epoch != first
    # Who was not told which server it is does not claim another one.
    second = one.epoch
    one.server = ""
    assert one.bucket("b", hint=1.0)[1] == pytest.approx(7, abs=0.1)
    assert one.epoch == second


def test_gateways_are_counted(redis_server: RedisServer) -> None:
    callers = [Caller(redis_server, f"g{number}") for number in range(3)]
    for caller in callers:
        caller.call()
    assert callers[2].gateways == 3
    # Long silent, and from before the clock was set back.
    redis_server.ask("ZADD", "gateways", 1, "g0", 9e18, "g1")
    callers[2].call()
    assert callers[2].gateways == 1


def test_places_are_shared_and_those_of_the_dead_come_back(redis_server: RedisServer) -> None:
    one, two = Caller(redis_server, "g1"), Caller(redis_server, "g2")
    assert one.places("p", 4, 0, 3) == 3
    assert two.places("p", 4, 0, 3) == 1
    assert one.places("p", 4, 1, 1) == 1
    assert two.places("p", 4, 1, 3) == 3
    # Running ones are there, whatever the limit says now.
    assert two.places("p", 2, 3, 3) == 3
    assert one.places("p", 2, 1, 2) == 1
    assert 0 < redis_server.ask("PTTL", "p") <= 6000
    redis_server.ask("HSET", "p", "g2", "3 1000")
    assert one.places("p", 4, 1, 4) == 4
    redis_server.ask("HSET", "p", "g2", "3 9000000000000000")
    assert one.places("p", 4, 1, 4) == 4
    assert one.places("p", 4, 0, 0) == 0
    assert redis_server.ask("EXISTS", "p") == 0


def test_what_is_no_bucket_counts_as_a_full_one(redis_server: RedisServer) -> None:
    redis_server.ask("SET", "b", "nonsense")
    assert Caller(redis_server).bucket("b", need=1.0, head=1.0)[:2] == (1, 99)


def test_s_red_4_a_clock_set_back_adds_nothing_and_harms_nothing(redis_server: RedisServer) -> None:
    redis_server.ask("SET", "b", "50.0 9000000000000000 1.0")
    one = Caller(redis_server)
    assert one.bucket("b")[1] == 50
    assert one.bucket("b", rate=1000.0)[1] > 50


@pytest.mark.parametrize("seed", range(3))
def test_the_model_is_the_script(redis_server: RedisServer, seed: int) -> None:
    """Rates are so low that the time between two calls does not count."""
    dice = random.Random(seed)
    model = Model(lambda: 1000.0)
    callers = [Caller(redis_server, f"g{number}") for number in range(3)]
    epochs: dict[str | None, str | None] = {None: None}
    for _ in range(150):
        caller = dice.choice(callers)
        if dice.random() < 0.02:
            redis_server.ask("FLUSHALL")
            model.flush()
            model.server = f"run-{dice.random()}"
        before = caller.epoch
        entries: list[tuple[str, list[Any]]] = []
        for number in range(dice.randrange(4)):
            if number < 2:
                need = float(dice.choice([0, 0, 1, 5, 50]))
                head = min(need, float(dice.choice([1, 5, 50])))
                delta = float(dice.choice([0, 0, 3, -3, 200, -30]))
                want, hint = float(dice.choice([0, 2, 9])), float(dice.choice([-5, 0, 12, 30]))
                big, stale = dice.random() < 0.2, dice.random() < 0.1
                entries.append((f"b{number}", [0, 1e-6, 30.0, delta, need, head, big, want, hint, stale]))
            else:
                entries.append(
                    (f"p{number}", [1, dice.randrange(1, 6), dice.randrange(3), dice.randrange(6)])
                )
        told = caller.call(*entries)
        keys = [*KEYS, *(key for key, _ in entries)]
        message = msgspec.msgpack.encode(
            (caller.name, model.server, epochs.get(before), [entry for _, entry in entries])
        )
        epoch, gateways, expected = msgspec.msgpack.decode(model.call(keys, message))
        epochs[caller.epoch] = epoch
        assert gateways == caller.gateways
        assert len(told) == len(expected)
        for got, wanted in zip(told, expected, strict=True):
            assert got[:2] == pytest.approx(wanted[:2], abs=1e-3)
            assert got[2:] == pytest.approx(wanted[2:], rel=0.3, abs=0.5)
