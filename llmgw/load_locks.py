"""One load for all gateways: locks in the shared store, each with a fence.

A lock is a key that holds its owner and a number that grows with each lock given
(the fence); it expires unless it is renewed, so a gateway that dies lets go within
:data:`TTL_S`. Whoever holds one asks :attr:`Lock.valid` before each step that must
not be done twice: by its own clock, since it may have slept; and what it writes
down for others is written by a script that compares the fence, so a late word of
one who has lost the lock is not heard.

Without a store, and while it is down, every lock is given: a gateway by itself is
better than none, and a server refuses to load twice what it is loading.
"""

from __future__ import annotations

import json
import os
from math import inf
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from llmgw.store.errors import StoreError
from llmgw.store.store import Script

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmgw.store.store import Store

TTL_S = 10.0
RENEW_S = 3.0
SURE = 0.7
"""Share of the time to live for which the holder counts on it."""
LEAVING_S = 3.0
"""A model that is let run out is kept free of requests for so long after the last word of it."""
FENCE_KEPT_S = 7 * 86_400
WITHIN_S = 0.5
"""A load takes seconds: an answer about its lock may take longer than the store's usual."""

_TAKE = Script("""
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local fence = redis.call('INCR', KEYS[2])
redis.call('EXPIRE', KEYS[2], ARGV[3])
redis.call('SET', KEYS[1], ARGV[1] .. ':' .. fence, 'PX', ARGV[2])
return fence
""")
_RENEW = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
""")
_RELEASE = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
""")
_TELL = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
""")


class Told(Struct, frozen=True):
    """A failure that another gateway has written down.

    :param id: different for each failure.
    """

    id: str
    backend: str
    reason: str
    pause_s: float


def written(told: Told) -> str:
    """As others can read it."""
    return json.dumps({each: getattr(told, each) for each in Told.__struct_fields__})


def read_told(text: bytes) -> Told | None:
    """What was written down; ``None`` for what makes no sense."""
    try:
        said = json.loads(text)
        return Told(str(said["id"]), str(said["backend"]), str(said["reason"]), float(said["pause_s"]))
    except (ValueError, KeyError, TypeError):
        return None


class Lock:
    """
    :ivar lost: somebody else has it, or may have it.
    """

    log = Logger()

    def __init__(
        self, store: Store | None, key: str, value: str, reactor: Any, clock: Callable[[], float]
    ) -> None:
        self.key = key
        self.lost = False
        self._store = store
        self._value = value
        self._reactor = reactor
        self._clock = clock
        self.id = value or f"{id(self):x}"
        self._sure_until_s = clock() + TTL_S * SURE
        self._timer: Any = None
        self._asking: Deferred[Any] | None = None
        if store is not None:
            self._timer = reactor.callLater(RENEW_S, self._renew)

    @property
    def valid(self) -> bool:
        """Nobody else has it now. Always, without a store."""
        return not self.lost and (self._store is None or self._clock() < self._sure_until_s)

    def tell(self, key: str, told: Told) -> Deferred[Any]:
        """Write a failure down for the others, if the lock is still ours. Never fails.

        :return: true when it was.
        """
        if self._store is None:
            return Deferred.fromCoroutine(_nothing())
        text = written(told)
        kept_ms = max(1000, round(told.pause_s * 1000))
        return self._store.run(
            _TELL, [self.key, key], [self._value, text, kept_ms], within_s=WITHIN_S
        ).addErrback(_unless_store)

    def release(self) -> Deferred[Any]:
        """Give it back. Never fails; what cannot be given back expires."""
        self.lost = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._asking is not None:
            self._asking.cancel()
        if self._store is None:
            return Deferred.fromCoroutine(_nothing())
        return self._store.run(_RELEASE, [self.key], [self._value], within_s=WITHIN_S).addErrback(
            _unless_store
        )

    def _renew(self) -> None:
        self._timer = None
        asked_s = self._clock()
        assert self._store is not None
        ttl_ms = round(TTL_S * 1000)
        self._asking = self._store.run(_RENEW, [self.key], [self._value, ttl_ms], within_s=WITHIN_S)
        self._asking.addCallbacks(lambda kept: self._renewed(asked_s, kept), _unless_store)
        self._asking.addBoth(self._renew_later)

    def _renewed(self, asked_s: float, kept: int) -> None:
        if kept:
            self._sure_until_s = asked_s + TTL_S * SURE
        elif not self.lost:
            self.lost = True
            self.log.warn("the lock {key} was lost: this gateway was too slow to renew it", key=self.key)

    def _renew_later(self, _: Any) -> None:
        self._asking = None
        if not self.lost:
            self._timer = self._reactor.callLater(RENEW_S, self._renew)


class LoadLocks:
    """
    :param store: ``None``: this gateway is alone.
    """

    def __init__(self, store: Store | None, reactor: Any, clock: Callable[[], float]) -> None:
        self._store = store
        self._reactor = reactor
        self._clock = clock
        self._name = os.urandom(8).hex()
        self._count = 0
        self._told_leaving_s: dict[str, float] = {}

    @property
    def shared(self) -> bool:
        """Others may have locks now."""
        return self._store is not None and self._store.up

    async def take(self, *parts: str) -> Lock | None:
        """The lock called ``parts``; ``None`` while somebody else has it."""
        store = self._store
        if store is None or not store.up:
            return Lock(None, ":".join(parts), "", self._reactor, self._clock)
        key = store.key("load", "lock", *parts)
        self._count += 1
        owner = f"{self._name}.{self._count}"
        try:
            fence = await store.run(
                _TAKE,
                [key, store.key("load", "fence")],
                [owner, round(TTL_S * 1000), FENCE_KEPT_S],
                within_s=WITHIN_S,
            )
        except StoreError:
            # It may have been taken for us, and expires then; now nobody can say who has what.
            return Lock(None, key, "", self._reactor, self._clock)
        if not fence:
            return None
        return Lock(store, key, f"{owner}:{fence}", self._reactor, self._clock)

    async def tell_leaving(self, lock: Lock, url: str, models: tuple[str, ...]) -> None:
        """The other gateways should send nobody to ``models`` of a backend, for now.

        :param lock: of the backend. To be told again while it goes on.
        """
        store, now_s = self._store, self._clock()
        if store is None or not store.up or now_s - self._told_leaving_s.get(url, -inf) < LEAVING_S / 3:
            return
        self._told_leaving_s[url] = now_s
        key = store.key("load", "leaving", url)
        kept_ms = round(LEAVING_S * 1000)
        await store.command("SET", key, json.dumps(models), "PX", kept_ms, within_s=WITHIN_S).addErrback(
            _unless_store
        )

    async def forget_leaving(self, url: str) -> None:
        """They may send requests there again."""
        store = self._store
        if self._told_leaving_s.pop(url, None) is not None and store is not None and store.up:
            key = store.key("load", "leaving", url)
            await store.command("DEL", key, within_s=WITHIN_S).addErrback(_unless_store)

    async def leaving(self, urls: list[str]) -> list[frozenset[str]]:
        """Models that other gateways let run out, of each backend."""
        store = self._store
        nothing = [frozenset[str]() for _ in urls]
        if store is None or not store.up or not urls:
            return nothing
        try:
            told = await store.command(
                "MGET", *(store.key("load", "leaving", url) for url in urls), within_s=WITHIN_S
            )
            return [frozenset(json.loads(text)) if text else frozenset() for text in told]
        except (StoreError, ValueError, TypeError):
            return nothing

    def told_key(self, model: str, url: str) -> str:
        """Where the last failure of ``model`` at a backend is written down."""
        return "" if self._store is None else self._store.key("load", "failed", model, url)

    async def told(self, model: str, urls: list[str]) -> list[Told] | None:
        """What gateways have met with ``model`` at these backends: of each its last failure,
        while it is to be heeded. ``None``: nobody can say."""
        store = self._store
        if store is None or not store.up or not urls:
            return None
        keys = [self.told_key(model, url) for url in urls]
        try:
            texts = await store.command("MGET", *keys, within_s=WITHIN_S)
        except StoreError:
            return None
        return [told for text in texts if text and (told := read_told(text)) is not None]

    async def forget(self, model: str, urls: list[str]) -> None:
        """``model`` was loaded well there, or is to be tried again: nobody need wait any more."""
        store = self._store
        if store is not None and store.up and urls:
            keys = [self.told_key(model, url) for url in urls]
            await store.command("DEL", *keys, within_s=WITHIN_S).addErrback(_unless_store)


def _unless_store(failure: Any) -> None:
    failure.trap(StoreError, CancelledError)


async def _nothing() -> None:
    pass
