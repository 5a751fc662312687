"""One backend whose models are loaded by name: what it has, kept current.

A :class:`Shelf` asks its loader every few seconds, and at once when something was
changed, and tells the fleet which models are in memory. What we did ourselves is
written down in the turn in which it happened; an answer to a question that was
asked before is then old, and dropped.
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
"""A server notices within some hundredths of a second that a process of its own has ended."""
ANSWER_S = 10.0
"""A loader that has not told its states by then tells nothing."""
LEAST_S = 0.2
"""Two looks that the loader's own word brought about are no nearer."""


class Shelf:
    """
    :param found: nobody asked for this loader; it was found that it fits.
    :ivar states: model to ``loaded``, ``loading``, ``unloaded`` or ``failed``.
    :ivar since_s: when each came into its state, as far as this process knows.
    :ivar leaving: loaded models that get no new requests, as they are to go.
    :ivar changing: room is being made there by us.
    :ivar loading: what we have asked it to load: each fires when it is seen to be loaded.
    :ivar silent: why the last look failed, in words; ``""`` if it did not.
    :ivar late_since_s: since when looks get no answer in time; ``inf``: they do, or fail at once.
    :ivar foreign: the server is none of the loader's: it has no shelf for now.
    :ivar answered: some look did not fail.
    :ivar rest_until_s: nothing is moved there before: a busy model did not run out.
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
        self._version = 0  # grows with each change of our own
        self._looked_s = -inf
        self._timer: Any = None
        self._running = False
        self._looks: set[Deferred[None]] = set()
        self.publish()

    # --- life ---

    def start(self, interval_s: float) -> None:
        """Begin to look, at once and then every ``interval_s``."""
        self.interval_s = interval_s
        if self._running:
            return
        self._running = True
        begin = getattr(self.loader, "start", None)
        if begin is not None:
            begin(self.poke)
        self._look_soon(0.0)

    def stop(self) -> Deferred[Any]:
        """Look no more, and let the loader go."""
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for look in list(self._looks):
            look.cancel()
        end = getattr(self.loader, "stop", None)
        return maybeDeferred(end) if end is not None else DeferredList([])

    def poke(self) -> None:
        """The loader has news: look soon."""
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

    # --- looking ---

    def look(self, within_s: float = ANSWER_S) -> Deferred[None]:
        """Ask the loader now. Never fails but by cancelling."""
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
        """From now on it is as if it had no loader; it is asked on, for it may be exchanged."""
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
        """What the loader tells now, taken at its word; nothing where it tells nothing."""
        try:
            return await self._asked(within_s)
        except CancelledError:
            raise
        except Exception:
            return {}

    async def _asked(self, within_s: float) -> Mapping[str, str]:
        return states_of(await at_most(within_s, maybeDeferred(self.loader.models), self._reactor))

    def _take(self, told: Mapping[str, str]) -> None:
        # What was there before us is as old as can be.
        since_s = self._clock() if self.answered else -inf
        self.answered = True
        for model, until_s in list(self._doubt_until_s.items()):
            if told.get(model) == "loaded" and self._clock() < until_s:
                told = {**told, model: "loading"}  # to be waited for, and looked at again
            else:
                del self._doubt_until_s[model]
        # The server may take a moment until it says so itself.
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
        """``model`` has come into ``state`` by our doing."""
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
        """That ``model`` is loaded is not believed for now: its process was seen to be gone."""
        self._doubt_until_s.update(dict.fromkeys(self.names_of(model), self._clock() + DOUBT_S))

    def leave(self, models: Iterable[str], on: bool = True) -> None:
        """No new requests for these, or again."""
        for model in models:
            names = self.names_of(model)
            self.leaving = self.leaving.union(names) if on else self.leaving.difference(names)
        self.publish()

    def leaves_elsewhere(self, models: frozenset[str]) -> None:
        """Another gateway lets these run out."""
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
            # What the loader does not know by this name, the backend may know all the same.
            or (self.states.get(name, "loaded") != "loaded" if self.answered else True)
        )
        slots: Mapping[str, int] = getattr(self.loader, "slots", {})
        known = {name: slots[name] for name in names if name in slots and name not in cold}
        self._fleet.stock(self.id, Stock(names, cold, known), self._clock())

    # --- what the placement asks ---

    @property
    def member(self) -> Member | None:
        """The fleet's picture of the backend."""
        return self._fleet.members.get(self.id)

    @property
    def starts_server(self) -> bool:
        """It need not be there before a load."""
        return bool(getattr(self.loader, "starts_server", False))

    def has(self, model: str) -> bool:
        """It could serve ``model``, were it loaded."""
        if self.foreign:
            return False
        if self.backend.models is not None:
            return model in self.backend.models
        return model in self.states

    def reachable(self) -> bool:
        """A load may be asked of it now."""
        member = self.member
        if member is None or member.draining or member.removed:
            return False
        return self.starts_server or (member.down is None and not self.silent and self.answered)

    def names_of(self, model: str) -> list[str]:
        """``model`` and all else that it is called there."""
        aliases: Mapping[str, str] = getattr(self.loader, "aliases", {})
        true = aliases.get(model, model)
        return [true, *(name for name, meant in aliases.items() if meant == true)]

    def busy(self, model: str) -> int:
        """Requests of this gateway at work on ``model``."""
        member = self.member
        return 0 if member is None else sum(member.busy_with(name) for name in self.names_of(model))

    def used_s(self, model: str) -> float:
        """When ``model`` was last asked for; now, while it is at work."""
        member = self.member
        used = {} if member is None or member.stock is None else member.stock.used
        if self.busy(model) and model in used:
            used[model] = self._clock()
        return max((used[name] for name in self.names_of(model) if name in used), default=-inf)

    def resident(self) -> list[str]:
        """What is in memory or on its way there, each by its first name."""
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
        """As :func:`llmgw.core.placement.place` wants it.

        :param awaited: what is in memory there is not to go yet.
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
        """Nobody is at work on ``model``, by our count and by the backend's own word."""
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
            return True  # who does not tell can not be waited for
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
