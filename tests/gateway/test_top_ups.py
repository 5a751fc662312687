"""Streams that run past what was reserved for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twisted.internet.task import Clock

from llmgw.gateway.top_ups import STEP, TopUps
from llmgw.values import Usage
from llmgw.wire.sweep import NEVER, Sweep


class Stream:
    """Stands for an account: what came so far."""

    def __init__(self) -> None:
        self.charged: Any = object()
        self.usage: Usage | None = None

    def used(self) -> Usage | None:
        return self.usage


class House:
    def __init__(self, top_up: Any = None) -> None:
        self.clock = Clock()
        self.paid: list[tuple[Any, int]] = []
        self.faults = 0
        limiter: Any = SimpleNamespace(top_up=top_up or (lambda *paid: self.paid.append(paid)))
        gateway: Any = SimpleNamespace(
            clock=self.clock.seconds,
            sweep=Sweep(self.clock, self.clock.seconds),  # type: ignore[arg-type]
            limiter=limiter,
            limiter_fault=self._failed,
        )
        self.gateway = gateway
        gateway.sweep.start()
        self.top_ups = TopUps(gateway)

    def _failed(self) -> None:
        self.faults += 1

    def watch(self, reserved: int, output: int | None) -> Stream:
        stream = Stream()
        stream.usage = None if output is None else Usage(100, 0, output)
        self.top_ups.watch(stream, reserved)  # type: ignore[arg-type]
        return stream


def test_only_who_is_past_its_reservation_pays_and_in_whole_steps() -> None:
    house = House()
    house.watch(600, 500)
    house.watch(600, None)
    long = house.watch(600, 501)
    house.clock.pump([0.25] * 5)
    assert house.paid == [(long.charged, STEP)]
    long.usage = Usage(100, 0, 500 + STEP)
    house.clock.pump([0.25] * 8)
    assert house.paid == [(long.charged, STEP)], "it has paid for so much"
    long.usage = Usage(100, 0, 501 + 3 * STEP)
    house.clock.pump([0.25] * 5)
    assert house.paid[1:] == [(long.charged, 3 * STEP)]


def test_who_is_over_is_forgotten_and_nobody_is_looked_at_while_there_is_none() -> None:
    house = House()
    stream = house.watch(10, 500)
    stream.charged = None
    house.clock.pump([0.25] * 5)
    assert (len(house.top_ups), house.top_ups.deadline_s, house.paid) == (0, NEVER, [])
    house.watch(10, 500)
    house.clock.pump([0.25] * 5)
    assert len(house.paid) == 1


def test_a_limiter_without_top_ups_and_one_that_raises() -> None:
    house = House()
    house.gateway.limiter = SimpleNamespace()
    house.watch(10, 500)
    house.clock.pump([0.25] * 5)
    assert house.faults == 0

    def broken(reservation: object, tokens: int) -> None:
        raise OSError("no luck")

    house = House(broken)
    house.watch(10, 500)
    house.clock.pump([0.25] * 12)
    assert house.faults == 1
    assert len(house.top_ups) == 1
