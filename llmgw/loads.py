"""Which models are loaded where, and the running loads: at most one per model at a time.

A load is started because requests wait for a model that no backend has in memory
(:meth:`Loads.want`), because the configuration says so, or an operator. A single load is in
:mod:`llmgw.load`; where a model is loaded, and what is evicted for it, is decided by
:mod:`llmgw.core.placement`.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from llmgw.core.hold import LoadTimes, Setbacks, remaining_s
from llmgw.core.placement import LOOK_AGAIN_S, Nowhere, Place, Wait, place
from llmgw.core.retry import retry_after
from llmgw.core.standing import Standing
from llmgw.discovery.etcd_client import EtcdOptions, check_etcd_options
from llmgw.discovery.standing import read_options
from llmgw.errors import GatewayError, ModelLoading, NoBackend
from llmgw.etcd_locks import EtcdLocks
from llmgw.load import Load
from llmgw.load_locks import LoadLocks
from llmgw.shelf import Shelf
from llmgw.unloads import Unloads

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmgw.config import BackendConfig, Config
    from llmgw.gateway.gateway import Gateway
    from llmgw.store.store import Store

LATE_S = 6.0
"""For so long (three checks) a load waits for backends that answer late, before it is given up."""
TICK_S = 1.0
NO_ROOM_S = 30.0
"""Seconds after which to come back for a model that no instance can make room for."""
UNREACHED_S = 5.0
"""Seconds after which to come back for a model whose instances cannot be reached."""


class Loads:
    """
    :param store: the store that gateways share, if there is one.
    :ivar shelves: by backend id, for backends whose models are loaded by name.
    :ivar under_way: the running loads, by model.
    :ivar heard: the last failure that was taken over from other gateways, by model and URL of a
        backend.
    :ivar drain_s: longest time for draining a busy model.
    """

    log = Logger()

    def __init__(self, gateway: Gateway, config: Config, store: Store | None) -> None:
        self.shelves: dict[str, Shelf] = {}
        self.under_way: dict[str, Load] = {}
        self.times = LoadTimes()
        self.setbacks = Setbacks(config.loading.backoff_s)
        self.gateway = gateway
        self._reactor = gateway.reactor
        self._clock = gateway.clock
        self.locks = _locks_of(config, store, self._reactor, self._clock)
        self.heard: dict[tuple[str, str], str] = {}
        self._unwanted: set[str] = set()  # preloaded models that the operator has unloaded
        self.unloads = Unloads(self)
        self._hearing: Deferred[None] | None = None
        self._ticking = LoopingCall(self._tick)
        self._ticking.clock = self._reactor
        self._running = False
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over the settings of ``config``."""
        self.config = config.loading
        self.drain_s = config.hold.max_s
        self.setbacks.first_s = config.loading.backoff_s
        models = [(model.target or model.name, model) for model in config.models]
        self._pinned = frozenset(name for name, model in models if model.pin)
        self._preload = tuple(dict.fromkeys(name for name, model in models if model.preload))
        self._sizes = {name: model.memory_bytes for name, model in models if model.memory_bytes}
        self._idle_s = {
            name: model.idle_unload_s for name, model in models if model.idle_unload_s is not None
        }
        for shelf in self.shelves.values():
            shelf.interval_s = self.config.interval_s

    # --- life ---

    def start(self) -> None:
        """Start checking."""
        self._running = True
        for shelf in self.shelves.values():
            shelf.start(self.config.interval_s)
        self._ticking.start(TICK_S, now=True)

    async def stop(self) -> None:
        """Stop: loads are left to their backends, locks are released, servers that we started end."""
        self._running = False
        if self._ticking.running:
            self._ticking.stop()
        tasks = [load.task for load in self.under_way.values() if load.task is not None] + list(
            self.unloads.tasks
        )
        if self._hearing is not None:
            tasks.append(self._hearing)
        for task in tasks:
            task.cancel()
        await DeferredList(tasks, consumeErrors=True)
        await DeferredList([shelf.stop() for shelf in self.shelves.values()], consumeErrors=True)

    def put(self, backend: BackendConfig, loader: Any, *, found: bool = False) -> None:
        """A backend has got a loader."""
        shelf = self.shelves[backend.id] = Shelf(
            backend,
            loader,
            fleet=self.gateway.fleet,
            reactor=self._reactor,
            clock=self._clock,
            found=found,
        )
        if self._running:
            shelf.start(self.config.interval_s)

    def drop(self, backend_id: str) -> None:
        """A backend no longer has a loader, or was removed."""
        shelf = self.shelves.pop(backend_id, None)
        if shelf is not None:
            shelf.stop().addErrback(lambda failure: self.log.failure("ending a loader", failure))
            self.gateway.fleet.stock(backend_id, None, self._clock())

    # --- what requests and operators ask ---

    def want(self, model: str, *, ordered: bool = False) -> None:
        """Load ``model``, unless it is being loaded already.

        :param ordered: load it even if no request waits for it.
        :raise GatewayError: it cannot be loaded now; the message says why.
        """
        load = self.under_way.get(model)
        if load is not None:
            load.ordered = load.ordered or ordered
            return
        shelves = self.shelves_of(model)
        if not shelves or not self._running:
            return
        decision = self.decide(model)
        # Before the first check nothing is known; the load itself checks.
        if isinstance(decision, Nowhere) and all(shelf.answered for shelf in shelves):
            raise self.refusal(model, decision)
        load = self.under_way[model] = Load(self, model, ordered)
        load.task = Deferred.fromCoroutine(load.run())

    def keep(self, model: str) -> None:
        """A client was told to come back for ``model``: the load goes on for it."""
        load = self.under_way.get(model)
        if load is not None:
            load.until_s = self._clock() + self.drain_s

    def expected_s(self, model: str) -> float:
        """Estimated seconds until ``model`` is loaded."""
        now_s = self._clock()
        load = self.under_way.get(model)
        if load is not None and load.begun_s is not None and load.shelf is not None:
            return remaining_s(self.times.expected_s(model, load.shelf.id), now_s - load.begun_s)
        for shelf in self.shelves_of(model):
            if shelf.states.get(model) == "loading":
                since_s = shelf.since_s.get(model, now_s)
                return remaining_s(self.times.expected_s(model, shelf.id), max(0.0, now_s - since_s))
        decision = self.decide(model)
        load_s = self.times.expected_s(model, decision.instance if isinstance(decision, Place) else None)
        wait_s = decision.until_s - now_s if isinstance(decision, Wait) else 0.0
        return load_s + wait_s

    def can_load(self, model: str) -> bool:
        """Whether some backend could load ``model``."""
        return bool(self.shelves_of(model))

    def is_under_way(self, model: str) -> bool:
        """Whether ``model`` is being loaded, or about to be."""
        if self.gateway.fleet.prospect(model, self._clock()) is Standing.READY:
            return False
        if model in self.under_way:
            return True
        return any(shelf.states.get(model) == "loading" for shelf in self.shelves_of(model))

    def is_gone(self, backend_id: str, model: str, *, noticed: bool = True) -> bool:
        """A backend has answered that a model it had is no longer loaded.

        :param noticed: its own list shows that, too, by now.
        :return: whether that may be true.
        """
        shelf = self.shelves.get(backend_id)
        if shelf is None or not shelf.has(model):
            return False
        shelf.mark(model, "unloaded")
        if not noticed:
            shelf.doubt(model)
        shelf.poke()
        return True

    def load(self, model: str) -> None:
        """Load a model for the operator, whatever has failed before.

        :raise GatewayError: it cannot be loaded now; the message says why.
        """
        self._unwanted.discard(model)
        for shelf in self.shelves_of(model):
            self.setbacks.forget(shelf.id, model)
        if self.gateway.fleet.prospect(model, self._clock()) is not Standing.READY:
            self.want(model, ordered=True)
            if model in self.under_way:
                self.under_way[model].anew = True

    def unload(self, model: str) -> list[str]:
        """Unload a model for the operator, as soon as its requests have ended; it gets no new ones.

        :return: ids of the backends that have it.
        """
        self._unwanted.add(model)
        load = self.under_way.get(model)
        if load is not None:
            load.ordered, load.until_s = False, -inf
        there = [shelf for shelf in self.shelves_of(model) if shelf.states.get(model) == "loaded"]
        for shelf in there:
            self.unloads.begin(shelf, model, "operator")
        return [shelf.id for shelf in there]

    def state(self) -> dict[str, Any]:
        """For ``/api/state``."""
        return {
            "backends": [shelf.picture() for shelf in self.shelves.values()],
            "under_way": {
                model: {
                    "backend": None if load.shelf is None else load.shelf.id,
                    "for_s": None if load.begun_s is None else self._clock() - load.begun_s,
                    "expected_s": self.expected_s(model),
                }
                for model, load in self.under_way.items()
            },
        }

    # --- deciding ---

    def decide(self, model: str) -> Place | Wait | Nowhere:
        now_s = self._clock()
        instances = [
            shelf.instance(
                model, self.times, self.setbacks, self._pinned, self._sizes, self._is_awaited(shelf, model)
            )
            for shelf in self.shelves_of(model)
            if shelf.reachable()
        ]
        decision = place(self._size_of(model), instances, now_s, self.config.min_stay_s)
        failed = isinstance(decision, Nowhere) and decision.until_s < inf
        if failed and any(self._is_late(shelf, model, now_s) for shelf in self.shelves_of(model)):
            return Wait(now_s + LOOK_AGAIN_S, "who could still have it answers late")
        return decision

    def _is_late(self, shelf: Shelf, model: str, now_s: float) -> bool:
        """Whether the backend is there, has not failed ``model``, and has only missed a check or two."""
        member = shelf.member
        if member is None or member.down is not None or member.draining or member.removed:
            return False
        return 0.0 <= now_s - shelf.late_since_s < LATE_S and self.setbacks.until_s(shelf.id, model) <= now_s

    def _is_awaited(self, shelf: Shelf, model: str) -> bool:
        """Whether requests for the models in memory there have waited longer than those for ``model``."""
        holding = self.gateway.holding
        oldest_s = holding.oldest_s(model)
        return any(holding.oldest_s(each) < oldest_s for each in shelf.resident() if each != model)

    def _size_of(self, model: str) -> int:
        told = (getattr(shelf.loader, "sizes", {}).get(model, 0) for shelf in self.shelves_of(model))
        return max(told, default=0) or self._sizes.get(model, 0)

    def shelves_of(self, model: str) -> list[Shelf]:
        return [shelf for shelf in self.shelves.values() if shelf.has(model)]

    def is_loading(self, model: str) -> bool:
        """Whether another gateway is loading it at a backend that we can reach, where it has not failed."""
        now_s = self._clock()
        return any(
            shelf.states.get(model) == "loading"
            and shelf.reachable()
            and self.setbacks.until_s(shelf.id, model) <= now_s
            for shelf in self.shelves_of(model)
        )

    def refusal(self, model: str, nowhere: Nowhere) -> GatewayError:
        now_s, dice = self._clock(), self.gateway.dice
        if nowhere.until_s < inf:
            reasons = [
                (self.setbacks.until_s(shelf.id, model), self.setbacks.reason(shelf.id, model))
                for shelf in self.shelves_of(model)
            ]
            wait_s = retry_after(max(1.0, nowhere.until_s - now_s), dice)
            return ModelLoading(max(reasons)[1] or f"loading {model!r} failed", retry_after_s=wait_s)
        if not any(shelf.reachable() for shelf in self.shelves_of(model)):
            return NoBackend(
                f"No backend that could load {model!r} can be reached now.",
                retry_after_s=retry_after(UNREACHED_S, dice),
            )
        return ModelLoading(
            f"{model!r} cannot be loaded: {nowhere.why}", retry_after_s=retry_after(NO_ROOM_S, dice)
        )

    # --- time ---

    def _tick(self) -> None:
        gateway, now_s = self.gateway, self._clock()
        if self.locks.shared and self._hearing is None:
            self._hearing = Deferred.fromCoroutine(self._hear_others())
            self._hearing.addErrback(lambda failure: failure.trap(CancelledError) and None)
            self._hearing.addBoth(self._heard_leaving)
        for shelf in self.shelves.values():
            for model in shelf.resident():
                names = shelf.names_of(model)
                own = [self._idle_s[name] for name in names if name in self._idle_s]
                idle_s = min(own, default=self.config.idle_unload_s)
                pinned = not self._pinned.isdisjoint(names)
                if idle_s > 0 and not pinned and self.unloads.is_idle(shelf, model, idle_s, now_s):
                    self.unloads.begin(shelf, model, "idle")
        ordered = [model for model in self._preload if model not in self._unwanted]
        for model in {*ordered, *gateway.holding.models()}:
            if model in self.under_way or gateway.fleet.prospect(model, now_s) is Standing.READY:
                continue
            try:
                self.want(model, ordered=model in ordered)
            except GatewayError as error:
                gateway.holding.fail(model, error)

    async def hear_failures(self, model: str) -> None:
        """Take in what other gateways have met with ``model``, and what need not be heeded any more:
        somebody has loaded it well since, or an operator wants it tried."""
        shelves = self.shelves_of(model)
        told = await self.locks.told(model, [shelf.backend.url for shelf in shelves])
        if told is None:
            return
        now_s = self._clock()
        known = {each.backend: each for each in told}
        for shelf in shelves:
            place, failure = (model, shelf.backend.url), known.get(shelf.backend.url)
            if failure is not None and self.heard.get(place) != failure.id:
                self.heard[place] = failure.id
                self.setbacks.failed(shelf.id, model, failure.reason, now_s, failure.pause_s)
            elif (
                failure is None
                and self.heard.pop(place, None) is not None
                # A pause that is over is kept all the same: the next one is longer.
                and self.setbacks.until_s(shelf.id, model) > now_s + TICK_S
            ):
                self.setbacks.forget(shelf.id, model)

    async def _hear_others(self) -> None:
        """Of failures that are not to be heeded any more; and keep requests away from what other
        gateways let run out."""
        for model in {model for model, _ in self.heard}:
            await self.hear_failures(model)
        shelves = list(self.shelves.values())
        told = await self.locks.leaving([shelf.backend.url for shelf in shelves])
        for shelf, models in zip(shelves, told, strict=True):
            shelf.leaves_elsewhere(models)

    def _heard_leaving(self, _: Any) -> None:
        self._hearing = None


def _locks_of(
    config: Config, store: Store | None, reactor: Any, clock: Callable[[], float]
) -> LoadLocks | EtcdLocks:
    """The locks that keep gateways from loading the same model at a time: in the store, else in the
    etcd that backends are discovered in, else none."""
    if store is None:
        for table in config.discovery:
            if table.plugin == "etcd":
                options = read_options(EtcdOptions, table.options, check_etcd_options)
                return EtcdLocks(options, reactor, clock)
    return LoadLocks(store, reactor, clock)
