"""A load that meets another gateway's between two steps of its own."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock

from llmgw.core.hold import Setbacks
from llmgw.core.placement import Nowhere, Place
from llmgw.core.standing import Standing
from llmgw.errors import GatewayError
from llmgw.load import Load
from llmgw.load_locks import Lock, Told
from llmgw.loads import Loads

TOLD = Told("1", "http://b0", "loading 'm' failed: exit code 1", 30.0)


class LateLocks:
    """The lock is given just after its last owner has written down what it met."""

    shared = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: list[Told] = []

    async def take(self, *parts: str) -> Lock:
        self._told = [TOLD]
        return Lock(None, ":".join(parts), "", self._clock, self._clock.seconds)

    async def told(self, model: str, urls: list[str]) -> list[Told]:
        return self._told if "http://b0" in urls else []


def test_what_the_last_owner_of_the_lock_met_is_heard_before_anything_is_done() -> None:
    clock = Clock()
    refused: list[GatewayError] = []
    setbacks = Setbacks(10.0)
    shelf = SimpleNamespace(
        id="b0",
        backend=SimpleNamespace(url="http://b0"),
        changing=False,
        look=lambda within_s: succeed(None),
    )

    def decide(model: str) -> Place | Nowhere:
        until_s = setbacks.until_s("b0", model)
        return Nowhere(until_s, "broken") if until_s > clock.seconds() else Place("b0")

    gateway: Any = SimpleNamespace(
        reactor=clock,
        clock=clock.seconds,
        dice=random.Random(1),
        fleet=SimpleNamespace(prospect=lambda model, now_s: Standing.DOWN),
        holding=SimpleNamespace(count=lambda model: 1, fail=lambda model, error: refused.append(error)),
    )
    loads: Any = SimpleNamespace(
        gateway=gateway,
        _clock=clock.seconds,
        hear_failures=lambda model: Loads.hear_failures(loads, model),
        locks=LateLocks(clock),
        heard={},
        setbacks=setbacks,
        shelves={},  # to touch one would be a KeyError
        shelves_of=lambda model: [shelf],
        is_loading=lambda model: False,
        decide=decide,
        refusal=lambda model, nowhere: GatewayError(setbacks.reason("b0", model)),
    )
    loads.under_way = {"m": (load := Load(loads, "m", ordered=False))}
    Deferred.fromCoroutine(load.run())
    clock.pump([0.0] * 4)
    assert [error.message for error in refused] == [TOLD.reason]
    assert loads.under_way == {}
