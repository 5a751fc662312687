"""The calls of the limiter ``redis``: many limits in one script call, periodic or at once.

Every :data:`PERIOD_S` the limits in use are synchronised with the store, 128 in one call; for a
waiting request a call is made in the reactor's next turn. A limit is never in two calls at
once, so the order of answers does not matter.
"""

from __future__ import annotations

import random
from importlib import resources
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from twisted.internet.defer import CancelledError, Deferred, DeferredList, succeed
from twisted.logger import Logger

from llmgw.core.bucket_share import PERIOD_S, BucketAsk, BucketShare
from llmgw.core.concurrency_share import ConcurrencyAsk, ConcurrencyShare
from llmgw.store.errors import StoreDown, StoreError, StoreRefused
from llmgw.store.store import Script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llmgw.ratelimit.ledger import Ledger
    from llmgw.store.store import Store

JITTER = 0.2
BATCH = 128
"""Limits in one call; at 20 µs each it occupies the store for 3 ms."""

BATCHES = 8
"""Calls per period; with more limits than fit into these, each is synchronised less often."""

A_FEW = 4
"""The assumed number of gateways until the store has reported it."""

GOOD_CALLS = 3
"""Answers in a row after which a store that was away is trusted again."""

SICK_S = 0.5
"""Seconds between two tries of a store that answers with errors."""

LEASES = Script(resources.files("llmgw.ratelimit").joinpath("leases.lua").read_text(encoding="utf-8"))

Part = tuple[BucketShare | ConcurrencyShare, BucketAsk | ConcurrencyAsk, str]
"""One limit in a call: the share, what it asks, and its name in the store."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, int, list[list[float]]]).decode


class Calls:
    """Makes the calls to the store for all limits of this process.

    :param parts: returns what some ledgers have to say now.
    :param answered: called after each call, with whatever outcome.
    :ivar alone: the store is away, or was until a moment ago: decide without it.
    :ivar gateways: number of gateways that the store has seen lately; 0: never known.
    :ivar epoch: the store's; if it changes, the store may have lost its data.
    :ivar made: number of calls so far, ``failed`` of them without an answer.
    """

    log = Logger()

    def __init__(
        self,
        store: Store,
        reactor: Any,
        gateway: str,
        parts: Callable[[Iterable[Ledger], float], list[Part]],
        answered: Callable[[bool], None],
        dice: random.Random,
    ) -> None:
        self.alone = False
        self.gateways = 0
        self.epoch: str | None = None
        self.made = 0
        self.failed = 0
        self._store = store
        self._reactor = reactor
        self._gateway = gateway
        self._parts = parts
        self._answered = answered
        self._dice = dice
        self._active: dict[Ledger, None] = {}
        self._met = store.up
        self._good = 0
        self._sick = False
        self._timer: Any = None
        self._not_before_s = 0.0
        self._stopped = False
        self._under_way: set[Deferred[None]] = set()
        self._keys = [store.key("rl", "epoch"), store.key("rl", "gateways")]
        store.watchers.append(self._store_changed)

    def __len__(self) -> int:
        """Ledgers in use."""
        return len(self._active)

    # --- what the limiter calls ---

    @property
    def others(self) -> int:
        """The number of gateways for deciding alone; 0 if the store was never there."""
        return self.gateways or (A_FEW if self._met else 0)

    @property
    def possible(self) -> bool:
        """There is a store to call."""
        return self._store.up

    def activate(self, ledger: Ledger) -> None:
        """Synchronise ``ledger`` from now on, until nothing is held or owed any more."""
        ledger.active = True
        self._active[ledger] = None
        if self._timer is None:
            self._arm()

    def early(self, now_s: float) -> None:
        """A share runs low: end this period now, unless it has just begun."""
        if self._timer is not None and now_s >= self._not_before_s:
            self._not_before_s = now_s + PERIOD_S / 4.0
            self._timer.reset(0)

    def decide_alone(self) -> None:
        """Requests wait for the store in vain: if it is not even there, do not ask it for the next ones."""
        if not self._store.up:
            self._begin_alone()

    def send(self, parts: Iterable[Part]) -> None:
        """Call now with parts that are in no other call."""
        batch = list(parts)
        for start in range(0, len(batch), BATCH):
            self._send(batch[start : start + BATCH])

    def stop(self) -> Deferred[Any]:
        """Give everything back. Fires when that has been done, or has failed."""
        if self._stopped:
            return succeed(None)
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._store.watchers.remove(self._store_changed)
        if self._store.up:
            self.gateways = 0  # so nothing is kept
            self.send(self._parts(self._active, self._reactor.seconds()))
        return DeferredList(list(self._under_way))

    # --- our own ---

    def _arm(self) -> None:
        if self._stopped or not self._store.up:
            return
        wait_s = SICK_S if self._sick else PERIOD_S
        wait_s *= 1.0 - JITTER + 2.0 * JITTER * self._dice.random()
        self._timer = self._reactor.callLater(wait_s, self._look)

    def _look(self) -> None:
        """One period is over."""
        self._timer = None
        now_s = self._reactor.seconds()
        self._not_before_s = now_s + PERIOD_S / 4.0
        active = self._active
        turn = list(islice(active, BATCH * BATCHES))
        batch = self._parts(turn, now_s)
        for ledger in turn:
            del active[ledger]
            if ledger.at_rest(now_s):
                ledger.active = False
            else:
                active[ledger] = None
        if batch:
            self.send(batch)
        elif self.alone:
            self._send([])  # there is nothing to ask, but it must be known whether it works again
        if active or self.alone:
            self._arm()

    def _send(self, batch: list[Part]) -> None:
        self.made += 1
        call = Deferred.fromCoroutine(self._call(batch))
        self._under_way.add(call)
        call.addErrback(lambda failure: self.log.failure("calling the shared store", failure))
        call.addBoth(lambda _: self._under_way.discard(call))

    async def _call(self, batch: list[Part]) -> None:
        message = _encode((self._gateway, self._store.server_id, self.epoch, [ask for _, ask, _ in batch]))
        try:
            answer = await self._store.run(LEASES, [*self._keys, *(name for _, _, name in batch)], [message])
        except (StoreError, CancelledError) as error:
            self.failed += 1
            for part, _, _ in batch:
                if isinstance(part, BucketShare):
                    part.failed(not isinstance(error, StoreDown))
                else:
                    part.failed()
            if isinstance(error, StoreRefused):
                self._refused(error)
            self._answered(False)
            return
        epoch, self.gateways, answers = _decode(answer)
        now_s = self._reactor.seconds()
        for (part, _, _), told in zip(batch, answers, strict=True):
            if isinstance(part, BucketShare):
                part.answered(now_s, told[0], told[1], told[2], epoch)
            else:
                part.answered(now_s, int(told[0]), epoch)
        self._sick = False
        if self.alone:
            self._good += 1
            self.alone = self._good < GOOD_CALLS
        forgot = self.epoch not in (None, epoch)
        self.epoch = epoch
        self._answered(forgot)

    def _refused(self, error: StoreRefused) -> None:
        if not self._sick:
            self.log.error("the shared store refuses rate limits: {error}", error=str(error))
        self._sick = True
        self._begin_alone()

    def _begin_alone(self) -> None:
        self.alone = True
        self._good = 0
        if self._timer is None:
            self._arm()

    def _store_changed(self, up: bool) -> None:
        if up:
            self._met = True
            self._send([])  # reports our presence, and learns how many gateways there are
            if self._timer is None and (self.alone or self._active):
                self._arm()
        else:
            self._begin_alone()
        self._answered(False)
