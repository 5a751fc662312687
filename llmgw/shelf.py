"""The models of one backend that loads them by name, kept current.

A :class:`Shelf` asks its loader every few seconds, and at once after a change, and tells the
fleet which models are in memory. Changes of our own are recorded in the turn of the reactor in
which they are made; an answer to a question asked before that is outdated, and dropped.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred, DeferredList, TimeoutError, maybeDeferred
from twisted.logger import Logger

from llmgw.core.placement import Instance, Resident
from llmgw.core.stock import Stock, states_of
from llmgw.errors import ForeignServer
from llmgw.foreign import at_most

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from llmgw.config import BackendConfig
    from llmgw.core.fleet import Fleet
    from llmgw.core.hold import LoadTimes, Setbacks
    from llmgw.core.member import Member

DOUBT_S = 0.5
"""A server notices within some hundredths of a second that one of its processes has ended."""
ANSWER_S = 10.0
"""A loader that has not returned its states by then is taken to be silent."""
LEAST_S = 0.2
"""Minimum time between two checks that the loader has asked for."""


class Shelf:
    """
    :param found: the loader was not configured, but found to fit.
    :ivar states: model to ``loaded``, ``loading``, ``unloaded`` or ``failed``.
    :ivar since_s: when each came into its state, as far as this process knows.
    :ivar leaving: loaded models that get no new requests, as they will be evicted.
    :ivar changing: we are making room there.
    :ivar loading: the models that we have asked it to load; each fires when it is seen loaded.
    :ivar silent: why the last check failed, in words; ``""`` if it did not.
    :ivar late_since_s: since when checks get no answer in time; ``inf`` if they do, or fail at once.
    :ivar foreign: the server is not of the loader's kind, and counts as one without a loader.
    :ivar answered: some check has succeeded.
    :ivar rest_until_s: nothing is evicted there before this time: a busy model could not be drained.
    """

    log = Logger()

    def __init__(
        self,
        backend: BackendConfig,
        loader: Any,
        *,
        fleet: Fleet,
        reactor: Any,
        clock: Callable[[], float],
        found: bool = False,
    ) -> None:
        self.backend = backend
        self.id = backend.id
        self.loader = loader
        self.found = found
        self.states: dict[str, str] = {}
        self.since_s: dict[str, float] = {}
        self.leaving: set[str] = set()
        self.changing = False
        self.loading: dict[str, Deferred[None]] = {}
        self.silent = ""
        self.late_since_s = inf
        self.foreign = False
        self.answered = False
        self.interval_s = 2.0
        self.rest_until_s = -inf
        self._leaving_elsewhere: frozenset[str] = frozenset()
        self._fleet = fleet
        self._reactor = reactor
        self._clock = clock
        self._doubt_until_s: dict[str, float] = {}
        self._version = 0  # incremented with each change of our own
        self._looked_s = -inf
        self._timer: Any = None
        self._running = False
        self._looks: set[Deferred[None]] = set()
        self.publish()

    # --- life ---

    def start(self, interval_s: float) -> None:
        """Start checking, at once and then every ``interval_s``."""
        self.interval_s = interval_s
        if self._running:
            return
        self._running = True
        begin = getattr(self.loader, "start", None)
        if begin is not None:
            begin(self.poke)
        self._look_soon(0.0)

    def stop(self) -> Deferred[Any]:
        """Stop checking, and stop the loader."""
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for look in list(self._looks):
            look.cancel()
        end = getattr(self.loader, "stop", None)
        return maybeDeferred(end) if end is not None else DeferredList([])

    def poke(self) -> None:
        """The loader reports a change: check soon."""
        if self._running:
            self._look_soon(max(0.0, LEAST_S - (self._clock() - self._looked_s)))

    def _look_soon(self, after_s: float) -> None:
        if self._timer is not None:
            if self._timer.getTime() <= self._reactor.seconds() + after_s:
                return
            self._timer.cancel()
        self._timer = self._reactor.callLater(after_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.look().addBoth(self._ticked)

    def _ticked(self, _: Any) -> None:
        if self._running:
            self._look_soon(self.interval_s)

    # --- checking ---

    def look(self, within_s: float = ANSWER_S) -> Deferred[None]:
        """Ask the loader now. Only fails by being cancelled."""
        look: Deferred[None] = Deferred.fromCoroutine(self._look(within_s))
        self._looks.add(look)

        def over(outcome: Any) -> Any:
            self._looks.discard(look)
            return outcome

        return look.addBoth(over).addErrback(lambda failure: failure.trap(CancelledError) and None)

    async def _look(self, within_s: float) -> None:
        version = self._version
        self._looked_s = self._clock()
        try:
            told = await self._asked(within_s)
        except CancelledError:
            raise
        except Exception as error:
            silent, foreign = str(error) or type(error).__name__, isinstance(error, ForeignServer)
            if foreign and not self.foreign:
                self._find_foreign(silent)
            elif not foreign and not self.silent:
                self.log.warn("backend {backend}: cannot tell its models: {why}", backend=self.id, why=silent)
            self.silent = silent
            late = isinstance(error, TimeoutError)
            self.late_since_s = min(self.late_since_s, self._clock()) if late else inf
            return
        if self.foreign:
            self.log.info("backend {backend}: its models can be loaded by name", backend=self.id)
        self.silent, self.late_since_s, self.foreign = "", inf, False
        if version == self._version:
            self._take(told)

    def _find_foreign(self, why: str) -> None:
        """Treat it as a backend without a loader; it is still checked, since the server may be replaced."""
        self.log.warn(
            "backend {backend}: {why}: nothing is loaded there by name, what it serves it serves",
            backend=self.id,
            why=why,
        )
        self.foreign, self.answered = True, False
        self.states, self.since_s = {}, {}
        self.leaving.clear()
        self._version += 1
        self.publish()

    async def told(self, within_s: float) -> Mapping[str, str]:
        """The states that the loader returns now; empty if it returns none."""
        try:
            return await self._asked(within_s)
        except CancelledError:
            raise
        except Exception:
            return {}

    async def _asked(self, within_s: float) -> Mapping[str, str]:
        return states_of(await at_most(within_s, maybeDeferred(self.loader.models), self._reactor))

    def _take(self, told: Mapping[str, str]) -> None:
        # Models that were there before us count as old.
        since_s = self._clock() if self.answered else -inf
        self.answered = True
        for model, until_s in list(self._doubt_until_s.items()):
            if told.get(model) == "loaded" and self._clock() < until_s:
                told = {**told, model: "loading"}  # has to be waited for, and checked again
            else:
                del self._doubt_until_s[model]
        # The server may take a moment until it reports that itself.
        told = {**told, **{model: "loading" for model in self.loading if told.get(model) != "loaded"}}
        for model, state in told.items():
            if self.states.get(model) != state:
                self.since_s[model] = since_s
        for model in self.states.keys() - told.keys():
            self.since_s.pop(model, None)
        self.states = dict(told)
        self.publish()
        for model, arrived in list(self.loading.items()):
            if told.get(model) == "loaded" and not arrived.called:
                arrived.callback(None)

    # --- what we did ourselves ---

    def mark(self, model: str, state: str) -> None:
        """We have brought ``model`` into ``state``."""
        self._version += 1
        for name in self.names_of(model):
            self.states[name] = state
            self.since_s[name] = self._clock()
            self.leaving.discard(name)
            self._doubt_until_s.pop(name, None)
            self._leaving_elsewhere -= {name}
        self.answered = True
        self.publish()

    def doubt(self, model: str) -> None:
        """Do not believe for now that ``model`` is loaded: its process was seen to be gone."""
        self._doubt_until_s.update(dict.fromkeys(self.names_of(model), self._clock() + DOUBT_S))

    def leave(self, models: Iterable[str], on: bool = True) -> None:
        """Stop sending new requests for these models, or resume."""
        for model in models:
            names = self.names_of(model)
            self.leaving = self.leaving.union(names) if on else self.leaving.difference(names)
        self.publish()

    def leaves_elsewhere(self, models: frozenset[str]) -> None:
        """Another gateway is draining these models."""
        if models != self._leaving_elsewhere:
            self._leaving_elsewhere = models
            self.publish()

    def _is_leaving(self, name: str) -> bool:
        return name in self.leaving or name in self._leaving_elsewhere

    def publish(self) -> None:
        """Tell the fleet."""
        if self.foreign:
            self._fleet.stock(self.id, None, self._clock())
            return
        names = tuple(self.states)
        if self.backend.models is not None:
            names = self.backend.models
        cold = frozenset(
            name
            for name in names
            if self._is_leaving(name)
            # The backend may know a model by a name that the loader does not know.
            or (self.states.get(name, "loaded") != "loaded" if self.answered else True)
        )
        slots: Mapping[str, int] = getattr(self.loader, "slots", {})
        known = {name: slots[name] for name in names if name in slots and name not in cold}
        self._fleet.stock(self.id, Stock(names, cold, known), self._clock())

    # --- what the placement asks ---

    @property
    def member(self) -> Member | None:
        """The backend's member of the fleet."""
        return self._fleet.members.get(self.id)

    @property
    def starts_server(self) -> bool:
        """Whether the backend need not be running before a load."""
        return bool(getattr(self.loader, "starts_server", False))

    def has(self, model: str) -> bool:
        """Whether it could serve ``model`` if it were loaded."""
        if self.foreign:
            return False
        if self.backend.models is not None:
            return model in self.backend.models
        return model in self.states

    def reachable(self) -> bool:
        """Whether it can be asked for a load now."""
        member = self.member
        if member is None or member.draining or member.removed:
            return False
        return self.starts_server or (member.down is None and not self.silent and self.answered)

    def names_of(self, model: str) -> list[str]:
        """``model`` and its other names there."""
        aliases: Mapping[str, str] = getattr(self.loader, "aliases", {})
        true = aliases.get(model, model)
        return [true, *(name for name, meant in aliases.items() if meant == true)]

    def busy(self, model: str) -> int:
        """Number of this gateway's running requests for ``model``."""
        member = self.member
        return 0 if member is None else sum(member.busy_with(name) for name in self.names_of(model))

    def used_s(self, model: str) -> float:
        """When ``model`` was last requested; now, while requests for it are running."""
        member = self.member
        used = {} if member is None or member.stock is None else member.stock.used
        if self.busy(model) and model in used:
            used[model] = self._clock()
        return max((used[name] for name in self.names_of(model) if name in used), default=-inf)

    def resident(self) -> list[str]:
        """The models in memory or being loaded, each by its first name."""
        aliases: Mapping[str, str] = getattr(self.loader, "aliases", {})
        return [
            model
            for model, state in self.states.items()
            if state in ("loaded", "loading") and model not in aliases
        ]

    def instance(
        self,
        model: str,
        times: LoadTimes,
        setbacks: Setbacks,
        pinned: frozenset[str],
        sizes: Mapping[str, int],
        awaited: bool,
    ) -> Instance:
        """The backend as an input of :func:`llmgw.core.placement.place`.

        :param awaited: the models in memory there must not be evicted yet.
        """
        own_sizes: Mapping[str, int] = getattr(self.loader, "sizes", {})
        residents = tuple(
            Resident(
                each,
                busy=self.busy(each),
                used_s=self.used_s(each),
                since_s=self.since_s.get(each, -inf),
                load_s=times.expected_s(each, self.id),
                size=own_sizes.get(each) or sizes.get(each, 0),
                fixed=not pinned.isdisjoint(self.names_of(each)),
                loading=self.states[each] == "loading",
            )
            for each in self.resident()
        )
        member = self.member
        return Instance(
            self.id,
            residents,
            most=self.backend.max_models or getattr(self.loader, "capacity", None),
            memory=self.backend.model_memory_bytes,
            in_flight=0 if member is None else member.view.in_flight,
            load_s=times.expected_s(model, self.id),
            not_before_s=setbacks.until_s(self.id, model),
            changing=self.changing,
            kept=awaited or self._clock() < self.rest_until_s,
        )

    async def idle(self, model: str) -> bool:
        """Whether no requests for ``model`` are running, by our count and by the backend's report."""
        if self.busy(model):
            return False
        ask = getattr(self.loader, "busy", None)
        if ask is None:
            return True
        try:
            told = await at_most(ANSWER_S, maybeDeferred(ask, model), self._reactor)
        except CancelledError:
            raise
        except Exception:
            return True  # a backend that does not report it cannot be waited for
        return not told and not self.busy(model)

    def picture(self) -> dict[str, Any]:
        """For ``/api/state``."""
        now_s = self._clock()
        return {
            "backend": self.id,
            "capacity": self.backend.max_models or getattr(self.loader, "capacity", None),
            "found": self.found,
            "silent": self.silent,
            "changing": self.changing,
            "models": {
                model: {
                    "state": "leaving" if self._is_leaving(model) else state,
                    "for_s": None if (since_s := self.since_s.get(model, -inf)) == -inf else now_s - since_s,
                    "in_flight": self.busy(model),
                }
                for model, state in self.states.items()
            },
        }
