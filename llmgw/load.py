"""One load, from the first demand for a model until it is loaded, or cannot be.

It goes on until the model is loaded, cannot be loaded, or is no longer wanted; once a backend
has been asked it is completed in any case. Among gateways that share a store, the lock of the
model is taken before anything is decided, and the lock of the backend before anything is
changed there.
"""

from __future__ import annotations

import re
from math import inf
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred, DeferredList, TimeoutError, maybeDeferred
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.core.placement import Nowhere, Place, Wait
from llmgw.core.standing import Standing
from llmgw.errors import GatewayError, LoadUndone, ModelLoading
from llmgw.foreign import at_most
from llmgw.load_locks import Told

if TYPE_CHECKING:
    from llmgw.load_locks import Lock
    from llmgw.loads import Loads
    from llmgw.shelf import Shelf

LOOK_S = 0.25
"""Seconds between two checks while waiting for something."""
WAIT_MOST_S = 1.0
APART_S = 0.25
"""Gateways without a shared store start their loads at random within so many seconds."""
UNDONE_MOST = 3
"""A load that was undone so many times has failed."""
LOOKS_S = 2.0
"""Longest wait for the states of all backends; one that does not answer is left out."""

_PLACES = re.compile(r"\S*/\S+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
"""Paths, URLs and addresses, which clients must not see."""


class Load:
    """
    :param ordered: by the operator or the configuration: it goes on even if no request waits.
    :ivar anew: by the operator: earlier failures do not count.
    :ivar until_s: a client was told to come back for the model: the load goes on until then.
    :ivar shelf: where it is being loaded.
    :ivar begun_s: monotonic time since when.
    :ivar task: the coroutine that carries it out.
    """

    log = Logger()

    def __init__(self, loads: Loads, model: str, ordered: bool) -> None:
        self.model = model
        self.ordered = ordered
        self.anew = False
        self._undone = 0
        self.until_s = -inf
        self.shelf: Shelf | None = None
        self.begun_s: float | None = None
        self.task: Deferred[Any] | None = None
        self._loads = loads
        self._gateway = loads.gateway
        self._reactor = loads.gateway.reactor
        self._clock = loads.gateway.clock

    async def run(self) -> None:
        """Carry it out, and fail the waiting requests if it fails. Never raises."""
        model, holding = self.model, self._gateway.holding
        try:
            await self._pause(0.0)  # the request that wants it has to enter its queue first
            await self._bring()
        except CancelledError:
            pass
        except GatewayError as error:
            holding.fail(model, error)
        except Exception:
            self.log.failure("loading {model}", model=model)
            holding.fail(model, GatewayError("the gateway failed; see its log"))
        finally:
            del self._loads.under_way[model]

    # --- the stages ---

    async def _bring(self) -> None:
        """:raise GatewayError: the model cannot be loaded."""
        model, loads, fleet = self.model, self._loads, self._gateway.fleet
        if self.anew:
            await loads.locks.forget(model, [shelf.backend.url for shelf in loads.shelves_of(model)])
        while self._is_wanted():
            await self._look()
            await loads.hear_failures(model)
            standing = fleet.prospect(model, self._clock())
            if standing is Standing.READY:
                return
            if standing is Standing.LOADING or loads.is_loading(model):
                await self._pause(LOOK_S)
                continue
            decision = loads.decide(model)
            if isinstance(decision, Nowhere):
                raise loads.refusal(model, decision)
            if isinstance(decision, Wait):
                await self._pause(min(WAIT_MOST_S, max(LOOK_S / 4, decision.until_s - self._clock())))
                continue
            lock = await loads.locks.take("model", model)
            if lock is None:
                await self._pause(LOOK_S)
                continue
            try:
                await self._place(lock)
            finally:
                self.shelf = self.begun_s = None
                await lock.release()

    async def _place(self, lock: Lock) -> None:
        """Decide again, since others may have changed something, and load."""
        model, loads = self.model, self._loads
        if not loads.locks.shared:
            # There may be other gateways all the same: the second one sees what the first one does.
            await self._pause(APART_S * self._gateway.dice.random())
        await self._look()
        await loads.hear_failures(model)  # the previous holder of the lock may have failed
        if self._gateway.fleet.prospect(model, self._clock()) is Standing.READY:
            return
        decision = loads.decide(model)
        if not isinstance(decision, Place) or loads.is_loading(model):
            return
        shelf = loads.shelves[decision.instance]
        loading: Deferred[None] | None = None
        shelf.changing = True
        theirs = await loads.locks.take("backend", shelf.backend.url)
        try:
            if theirs is None:
                await self._pause(LOOK_S)
            elif await self._make_room(shelf, decision.victims, (lock, theirs)):
                loading = self._begin(shelf)
                if loads.locks.shared:
                    await self._seen_by_others(shelf)
        except CancelledError:
            if loading is not None:
                loading.cancel()
            raise
        finally:
            shelf.changing = False
            if theirs is not None:
                await theirs.release()
        if loading is not None:
            await self._see_through(shelf, lock, loading)

    async def _make_room(self, shelf: Shelf, victims: tuple[str, ...], locks: tuple[Lock, Lock]) -> bool:
        """Drain the victims and unload them.

        :param locks: of the model and of the backend.
        :return: whether it is done, and the locks are still ours.
        """
        loads = self._loads
        until_s = self._clock() + loads.drain_s
        shelf.leave(victims)
        try:
            for victim in victims:
                while not await shelf.idle(victim):
                    if not self._is_wanted():
                        return False
                    if self._clock() >= until_s:
                        shelf.rest_until_s = self._clock() + loads.config.min_stay_s
                        return False
                    await loads.locks.tell_leaving(locks[1], shelf.backend.url, victims)
                    await self._pause(LOOK_S / 2)
                if not all(lock.valid for lock in locks):
                    return False
                if not await loads.unloads.unload(shelf, victim, "evicted"):
                    return False
        finally:
            shelf.leave(victims, on=False)
            await loads.locks.forget_leaving(shelf.backend.url)
        return all(lock.valid for lock in locks)

    def _begin(self, shelf: Shelf) -> Deferred[None]:
        """Ask the loader for it. It counts as in memory from here on."""
        model = self.model
        self.shelf, self.begun_s = shelf, self._clock()
        shelf.mark(model, "loading")
        self.log.info("backend {backend}: loading {model}", backend=shelf.id, model=model)
        give_up_s = self._loads.config.give_up_s
        loading: Deferred[None] = at_most(give_up_s, maybeDeferred(shelf.loader.load, model), self._reactor)
        # Whoever sees it first: a look may be ahead of the loader's own.
        arrived: Deferred[None] = Deferred(lambda _: loading.cancel())
        shelf.loading[model] = arrived

        def ended(outcome: Any) -> None:
            if arrived.called:
                return
            if isinstance(outcome, Failure):
                arrived.errback(outcome)
            else:
                arrived.callback(None)

        def over(outcome: Any) -> Any:
            del shelf.loading[model]
            loading.cancel()
            return outcome

        loading.addBoth(ended)
        return arrived.addBoth(over)

    async def _seen_by_others(self, shelf: Shelf) -> None:
        """Wait until the backend itself reports the load, before others may decide on it."""
        until_s = self._clock() + LOOKS_S
        while self.model in shelf.loading and self._clock() < until_s:
            told = await shelf.told(LOOKS_S)
            if told.get(self.model) in ("loading", "loaded"):
                return
            await self._pause(LOOK_S / 4)

    async def _see_through(self, shelf: Shelf, lock: Lock, loading: Deferred[None]) -> None:
        """Wait for its end, and record the outcome."""
        model, loads, metrics = self.model, self._loads, self._gateway.metrics
        begun_s = self._clock() if self.begun_s is None else self.begun_s
        try:
            await loading
            await self._confirm(shelf)
        except CancelledError:
            shelf.mark(model, "unloaded")
            raise
        except Exception as error:
            if isinstance(error, LoadUndone) and self._undone < UNDONE_MOST:
                self._undone += 1
                metrics.loaded(shelf.id, model, "undone", self._clock() - begun_s)
                self.log.warn("backend {backend}: {why}", backend=shelf.id, why=str(error))
                shelf.mark(model, "unloaded")
                await self._pause(LOOK_S)
                return
            metrics.loaded(shelf.id, model, "failed", self._clock() - begun_s)
            await self._failed(shelf, lock, error)
            return
        took_s = self._clock() - begun_s
        loads.times.learn(shelf.id, model, took_s)
        loads.setbacks.forget(shelf.id, model)
        metrics.loaded(shelf.id, model, "loaded", took_s)
        self.log.info(
            "backend {backend}: loaded {model} in {took_s:.1f} s",
            backend=shelf.id,
            model=model,
            took_s=took_s,
        )
        if shelf.starts_server:
            self._gateway.fleet.revive(shelf.id, self._clock())
        shelf.mark(model, "loaded")
        await loads.locks.forget(model, [shelf.backend.url])

    async def _confirm(self, shelf: Shelf) -> None:
        """Check with the backend itself, if it reports its models.

        :raise LoadUndone: the loader has finished too early, or the model has been unloaded since.
        """
        told = await shelf.told(LOOKS_S)
        states = [told[name] for name in shelf.names_of(self.model) if name in told]
        if told and not {"loaded", "loading"} & set(states):
            raise LoadUndone(f"{self.model!r} was loaded, and is not there")

    async def _failed(self, shelf: Shelf, lock: Lock, error: Exception) -> None:
        """Record the failure, also for the other gateways."""
        model, loads = self.model, self._loads
        reason = self._reason(error)
        pause_s = loads.setbacks.failed(shelf.id, model, reason, self._clock())
        shelf.mark(model, "failed")
        self.log.error(
            "backend {backend}: {why}; not again for {pause_s:g} s",
            backend=shelf.id,
            why=str(error) or reason,
            pause_s=pause_s,
        )
        told = Told(lock.id, shelf.backend.url, reason, pause_s)
        if await lock.tell(loads.locks.told_key(model, told.backend), told):
            loads.heard[model, told.backend] = told.id
        if isinstance(error, TimeoutError):
            try:  # given up by us, so the backend shall give it up, too
                await at_most(LOOKS_S, maybeDeferred(shelf.loader.unload, model), self._reactor)
            except CancelledError:
                raise
            except Exception as still:
                self.log.warn("backend {backend}: {why}", backend=shelf.id, why=str(still))

    def _reason(self, error: Exception) -> str:
        """Why it failed, in a form for clients."""
        if isinstance(error, ModelLoading):
            return _PLACES.sub("…", error.message)
        if isinstance(error, TimeoutError):
            return f"loading {self.model!r} failed: not ready after {self._loads.config.give_up_s:g} s"
        return f"loading {self.model!r} failed: its backend does not answer"

    # --- what it goes by ---

    def _is_wanted(self) -> bool:
        return self.ordered or self._clock() < self.until_s or self._gateway.holding.count(self.model) > 0

    async def _look(self) -> None:
        """The current states of every backend that could have the model."""
        shelves = [shelf for shelf in self._loads.shelves_of(self.model) if not shelf.changing]
        await DeferredList([shelf.look(LOOKS_S) for shelf in shelves])

    def _pause(self, seconds: float) -> Deferred[None]:
        return deferLater(self._reactor, seconds)
