"""``leases.lua`` once more, in Python, and a store that runs it under a test's clock.

A test holds it against the script on a real Redis; the simulations run on it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock

from llmgw.config import StoreConfig
from llmgw.store.errors import StoreDown, StoreLost, StoreRefused
from llmgw.store.store import Script

LIVELY_S = 5.0
PLACES_S = 5.0
MEMORY_S = 5.0
SLACK = 1e-6


class Model:
    """The memory of one server, and what the script does with it.

    :param clock: seconds, the server's own.
    """

    def __init__(self, clock: Callable[[], float], server: str = "run-1") -> None:
        self.clock = clock
        self.server = server
        self.epoch: str | None = None
        self.gateways: dict[str, float] = {}
        self.buckets: dict[str, tuple[float, float, float, float]] = {}
        self.places: dict[str, dict[str, tuple[int, float]]] = {}
        self.calls = 0
        self.updates = 0

    def flush(self) -> None:
        """FLUSHALL, or a restart without a disk."""
        self.epoch = None
        self.gateways.clear()
        self.buckets.clear()
        self.places.clear()

    def copy(self) -> Model:
        """What a replica has at this moment."""
        other = Model(self.clock, self.server)
        other.epoch = self.epoch
        other.gateways = dict(self.gateways)
        other.buckets = dict(self.buckets)
        other.places = {key: dict(held) for key, held in self.places.items()}
        return other

    def call(self, keys: Sequence[str], message: bytes) -> bytes:
        """One run of the script."""
        self.calls += 1
        now = self.clock()
        gateway, server, known, entries = msgspec.msgpack.decode(message)
        if self.epoch is None or (server and not self.epoch.startswith(server + " ")):
            self.epoch = f"{server} {now * 1e6:.0f}"
        self.gateways[gateway] = now
        self.gateways = {name: at for name, at in self.gateways.items() if now - LIVELY_S < at <= now}
        self.updates += len(entries)
        answers = [
            (self._bucket if entry[0] == 0 else self._held)(key, gateway, known, entry, now)
            for key, entry in zip(keys[2:], entries, strict=True)
        ]
        return msgspec.msgpack.encode([self.epoch, len(self.gateways), answers])

    def _bucket(self, key: str, gateway: str, known: str | None, entry: list[Any], now: float) -> list[float]:
        _, rate, burst, delta, need, head, big, want, hint, stale = entry
        level, flow = burst, 0.0
        if key in self.buckets and now < self.buckets[key][3]:
            was, at, flowed, _ = self.buckets[key]
            elapsed = max(0.0, now - at)
            level = min(burst, was + elapsed * rate)
            flow = flowed * math.exp(-elapsed / MEMORY_S)
        if stale or known != self.epoch:
            level = min(level, hint)
        level = max(-burst, min(burst, level + delta))
        grant = 0.0
        if level + SLACK >= need:
            grant = need
        elif level + SLACK >= head:
            grant = head + math.floor(max(0.0, level - head))
        elif big and level > SLACK:
            grant = head
        grant += max(0.0, min(want, math.floor(level + SLACK - grant)))
        level = max(-burst, level - grant)
        flow += (grant + max(0.0, -delta)) / MEMORY_S
        self.buckets[key] = (level, now, flow, now + (burst - level) / rate + 10.0)
        return [grant, level, flow]

    def _held(self, key: str, gateway: str, known: str | None, entry: list[Any], now: float) -> list[float]:
        _, limit, running, want = entry
        holders = self.places.setdefault(key, {})
        for name, (_, until) in list(holders.items()):
            if name != gateway and not now <= until <= now + PLACES_S:
                del holders[name]
        others = sum(held for name, (held, _) in holders.items() if name != gateway)
        held = max(running, min(want, limit - others))
        if held > 0:
            holders[gateway] = (held, now + PLACES_S)
        else:
            holders.pop(gateway, None)
        return [held]


class ModelStore:
    """What a limiter needs of a :class:`~llmgw.store.store.Store`, on a :class:`Model`.

    Each way takes a random part of ``rtt_s``. What is on its way when the store
    goes away is lost on one of the two ways.

    :ivar stopped: takes calls and does not answer; like SIGSTOP.
    :ivar gone: cannot be connected to.
    :ivar refuses: the error it answers with.
    """

    def __init__(self, model: Model, clock: Clock, rtt_s: float = 0.001, seed: int = 0) -> None:
        self.config = StoreConfig("redis://model")
        self.model = model
        self.up = True
        self.server_id = model.server
        self.watchers: list[Callable[[bool], None]] = []
        self.rtt_s = rtt_s
        self.op_s = 0.05
        self.stopped = False
        self.gone = False
        self.refuses = ""
        self._clock = clock
        self._dice = random.Random(seed)
        self._misses = 0
        self._held_back: list[Callable[[], None]] = []

    def key(self, *parts: str) -> str:
        return "llmgw:" + ":".join(parts)

    def start(self) -> None:
        """See the real one."""

    def close(self) -> Deferred[None]:
        """See the real one."""
        return succeed(None)

    def run(self, script: Script, keys: Sequence[Any], arguments: Sequence[Any]) -> Deferred[Any]:
        """See the real one."""
        if not self.up:
            return fail(StoreDown("away"))
        answer: Deferred[Any] = Deferred()

        def late() -> None:
            if not answer.called:
                self._misses += 1
                answer.errback(StoreLost("no answer"))
                if self._misses >= 3:
                    self.go(False)
                    self._clock.callLater(0.5, again)

        def again() -> None:
            if self.stopped or self.gone:
                self._clock.callLater(0.5, again)
            else:
                self.go(True)

        timer = self._clock.callLater(self.op_s, late)

        def there() -> None:
            if self.stopped:
                self._held_back.append(there)
                return
            if self.refuses:
                self._clock.callLater(0.0, refuse)
                return
            reply = self.model.call(keys, arguments[0])
            self._clock.callLater(self._dice.random() * self.rtt_s / 2, back, reply)

        def refuse() -> None:
            if timer.active():
                timer.cancel()
                answer.errback(StoreRefused(self.refuses))

        def back(reply: bytes) -> None:
            if timer.active() and self.up:
                timer.cancel()
                self._misses = 0
                answer.callback(reply)

        self._clock.callLater(self._dice.random() * self.rtt_s / 2, there)
        return answer

    def go(self, up: bool) -> None:
        """Lose or regain the server."""
        if up != self.up:
            self.up = up
            self._misses = 0
            self.server_id = self.model.server
            for watcher in list(self.watchers):
                watcher(up)

    def resume(self) -> None:
        """It answers again, and first does what lay before it."""
        self.stopped = False
        held_back, self._held_back = self._held_back, []
        for call in held_back:
            call()
