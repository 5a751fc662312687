"""All backends: which models they serve, which of them may be asked now, and their leases.

:meth:`Fleet.candidates` applies the hard constraints, a router chooses among the
candidates, :meth:`Fleet.lease` counts the request in. All three happen in one turn of the
reactor, so there is no gap between check and action.

The rules of a pool (all members that serve one model and are not draining):

- At most half of it is ejected; of two members one may always be.
- The only member of a pool is never ejected. Only a refused connection keeps requests away
  from it, for a second at a time.
- Panic: if less than half of a pool is available, the cause is more likely ours or the
  network's than theirs, and half a fleet cannot carry the whole load. Passive ejections are
  then ignored; refused health checks are not.

The messages of errors raised here are sent to clients, so they hold no addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from math import inf
from random import Random
from typing import Any

from llmgw.core.breaker import BreakerRules
from llmgw.core.hold import LOAD_S
from llmgw.core.lease import BreakerChange, Lease
from llmgw.core.member import CHECK_S, Member
from llmgw.core.pools import Pool, Pools
from llmgw.core.retry import retry_after
from llmgw.core.snapshot import member_snapshot
from llmgw.core.spec import BackendSpec
from llmgw.core.standing import Down, Standing
from llmgw.core.stock import Stock
from llmgw.errors import (
    ContextLengthExceeded,
    GatewayError,
    ModelLoading,
    ModelNotFound,
    NoBackend,
    Overloaded,
)
from llmgw.values import (
    Backend,
    Event,
    HealthChanged,
    HealthReport,
    Request,
    Started,
)

__all__ = ["BackendSpec", "BreakerChange", "Down", "Fleet", "Lease", "Member", "Standing"]


class Fleet:
    """All backends of this process.

    :param dice: only for jitter.
    :ivar observe: gets every event, in order; must not raise. ``None`` at first: then no
        events are made.
    :ivar freed: gets the id of a backend that may have a free slot, or whose standing has
        changed; must not raise, nor take a lease before it returns. ``None`` while no request
        waits. Not called for what only time brings back.
    :ivar pressed: gets members of which some had no room, and whether none had; must
        not raise. ``None``: caps are not shared.
    :ivar breaker_changed: gets every :class:`BreakerChange`; must not raise. ``None``: nobody listens.
    :ivar doubted: gets the id of a backend whose answer to a request says that it is loading its
        model, which no look has told; must not raise. ``None``: nobody wants to know.
    :ivar panics: number of choices made in panic.
    :ivar heard_s: the latest monotonic time that was passed to any method.
    """

    def __init__(self, rules: BreakerRules, dice: Random) -> None:
        self.observe: Callable[[Event], None] | None = None
        self.freed: Callable[[str], None] | None = None
        self.pressed: Callable[[Sequence[Member], bool], object] | None = None
        self.breaker_changed: Callable[[BreakerChange], object] | None = None
        self.doubted: Callable[[str], object] | None = None
        self.panics = 0
        self.heard_s = -inf
        self._rules = rules
        self._dice = dice
        self._members: dict[str, Member] = {}
        self._served = False
        self._pools = Pools(self._members)

    # --- membership -------------------------------------------------------------

    @property
    def members(self) -> Mapping[str, Member]:
        """By id; removed ones stay until their last lease has ended."""
        return self._members

    def put(self, spec: BackendSpec, now_s: float) -> None:
        """Add a backend, or change the settings of the one with that id.

        A changed URL means another server: it begins with an empty profile, while requests to
        the old one go on. A backend added after the first request goes through slow start:
        its cache is cold, and nothing is known of it.
        """
        old = self._members.get(spec.id)
        if old is not None and old.spec.url == spec.url:
            old.removed = False
            old.configure(spec)
        else:
            member = self._members[spec.id] = Member(spec, self._rules, self._dice)
            if old is not None:
                old.removed = True
                member.draining = old.draining
            if self._served:
                member.cool(now_s)
        self._changed(spec.id)

    def remove(self, backend_id: str, now_s: float) -> None:
        """Send no new requests there; it is forgotten when its last lease ends."""
        self.heard_s = now_s
        member = self._members.get(backend_id)
        if member is not None:
            member.removed = True
            self.returned(member)
            self._changed(backend_id)

    def drain(self, backend_id: str) -> None:
        """Send no new requests there until :meth:`undrain`.

        :raise KeyError: no such backend.
        """
        self._members[backend_id].draining = True
        self._changed(backend_id)

    def undrain(self, backend_id: str) -> None:
        """:raise KeyError: no such backend."""
        self._members[backend_id].draining = False
        self._changed(backend_id)

    def report(self, backend_id: str, report: HealthReport, now_s: float) -> None:
        """Take in a health report; one about a backend that is gone is ignored."""
        self.heard_s = now_s
        member = self._members.get(backend_id)
        if member is None:
            return
        if member.report(report, now_s):
            self._pools.note(backend_id)
        if self.observe is not None:
            self.observe(HealthChanged(backend_id, now_s, report))
        if self.freed is not None:
            self.freed(backend_id)

    def stock(self, backend_id: str, stock: Stock | None, now_s: float) -> None:
        """Take in which models a backend has, and which of them are not in memory: it gets no
        requests for these until that changes. ``None``: models are not loaded there by name."""
        member = self._members.get(backend_id)
        if member is not None and member.stocked(stock, now_s):
            self._changed(backend_id)

    def revive(self, backend_id: str, now_s: float) -> None:
        """The backend has just been started, and has answered."""
        member = self._members.get(backend_id)
        if member is not None:
            member.revived(now_s)
            self._changed(backend_id)

    # --- what is served -----------------------------------------------------------

    def models(self) -> dict[str, tuple[str, ...]]:
        """Model names to the ids of the backends known to serve them, including draining and
        dead ones: the model exists, even if no backend can be asked for it now."""
        return self._pools.ids()

    def knows(self, model: str) -> bool:
        """Whether some backend has the model, by its report or its settings."""
        return self._pools.knows(model)

    def serves(self, model: str) -> bool:
        """Whether some backend has the model, or has not reported yet what it has."""
        return self._pools.serves(model)

    def cold(self, model: str) -> bool:
        """Whether some backend could load ``model``, and has not."""
        pool = self._pools.of(model)
        return pool is not None and pool.cold

    def prospect(self, model: str, now_s: float) -> Standing | None:
        """The best standing among its takers: ``READY`` (also if full or in a pause) or
        ``LOADING``; ``None`` if all are out, or there are none."""
        pool = self._pools.of(model)
        members = () if pool is None else pool.members
        standings = [member.standing(model, now_s, len(members) == 1) for member in members]
        if Standing.READY in standings or Standing.BUSY in standings:
            return Standing.READY
        return Standing.LOADING if Standing.LOADING in standings else None

    def takers(self, model: str) -> Sequence[Member]:
        """The members that serve ``model`` and are neither draining nor removed."""
        pool = self._pools.of(model)
        return () if pool is None else pool.members

    def fits(self, member: Member, request: Request) -> bool:
        """Whether the window of ``member``, one of the model's :meth:`takers`, is large enough, by
        the rule of :meth:`candidates`."""
        pool = self._pools.of(request.model)
        return pool is not None and member.window >= min(request.prompt_tokens, pool.widest)

    def candidates(
        self,
        request: Request,
        now_s: float,
        *,
        exclude: Set[str] = frozenset(),
        exact_tokens: int | None = None,
    ) -> list[Backend]:
        """Backends that may take ``request`` now; never empty.

        :param exclude: ids of backends that this request has tried.
        :param exact_tokens: the length of the prompt, if a backend has counted it. Only then is
            a request refused as too long; by an estimate it goes to the largest window.
        :raise ModelNotFound: no backend serves the model.
        :raise ContextLengthExceeded: no window of the model is large enough.
        :raise Overloaded: all that could take it are at their cap, or asked for a pause.
        :raise ModelLoading: all that could take it are loading the model, or would have to.
        :raise NoBackend: none can be reached.
        """
        self.heard_s = now_s
        model = request.model
        pool = self._pools.ready.get(model) or self._pools.of(model)
        if pool is None:
            raise self._unknown(model)
        need = request.prompt_tokens if exact_tokens is None else exact_tokens
        if need > pool.widest:
            if exact_tokens is None:
                need = pool.widest
            elif need > pool.known:
                raise ContextLengthExceeded(
                    f"The prompt has {need} tokens; the largest context of model {model!r} is {pool.known}."
                )
        takers: Sequence[Member] = pool.members
        for member in takers:
            if not member.quiet:
                takers = self._available(pool.members, model, now_s)
                break
        if pool.slotted:
            takers = [member for member in takers if member.has_slot(model)]
        found = [
            member.backend
            for member in takers
            if member.window >= need and member.view.in_flight < member.room
        ]
        if self.pressed is not None and len(found) < len(takers):
            self.pressed(takers, not found)
        if exclude:
            found = [each for each in found if each.id not in exclude]
        if found:
            return found
        untried = [each for each in pool.members if each.window >= need and each.spec.id not in exclude]
        raise self._unavailable(model, untried, takers, pool, now_s)

    # --- leases -----------------------------------------------------------

    def lease(self, backend_id: str, request: Request, now_s: float) -> Lease:
        """Count ``request`` in at a backend that was chosen in this turn of the reactor.

        :raise NoBackend: it has been removed.
        """
        member = self._members.get(backend_id)
        if member is None or member.removed:
            raise NoBackend(
                "The chosen backend has just been removed.", retry_after_s=retry_after(1.0, self._dice)
            )
        self.heard_s = now_s
        self._served = True
        if member.stock is not None:
            member.stock.used[request.model] = now_s
        observe = self.observe
        if observe is not None:
            observe(Started(request.id, backend_id, now_s))
        return Lease(self, member, request, now_s)

    def room(self, member: Member, model: str) -> tuple[bool, bool]:
        """For leases: whether ``member`` is its pool's only one, and whether it may be ejected."""
        pool = self._pools.of(model)
        if pool is None or member not in pool.members:
            return False, True
        size = len(pool.members)
        out = sum(other.is_ejected(model) for other in pool.members if other is not member)
        return size == 1, out < max(1, int(self._rules.max_ejected * size))

    def returned(self, member: Member) -> None:
        """For leases: the last lease of ``member`` may have ended."""
        key = member.spec.id
        if member.removed and not member.leases and self._members.get(key) is member:
            del self._members[key]

    def snapshot(self, now_s: float) -> list[dict[str, Any]]:
        """Everything about every member in plain values, for ``/api/state``."""
        return [member_snapshot(self, member, now_s) for member in self._members.values()]

    # --- inside -------------------------------------------------------------------

    def _changed(self, backend_id: str) -> None:
        """What a backend serves, or whether it may be asked, may have changed."""
        self._pools.note(backend_id)
        if self.freed is not None:
            self.freed(backend_id)

    def _available(self, members: Sequence[Member], model: str, now_s: float) -> list[Member]:
        """The members that may be asked; in panic also those that are only ejected."""
        alone = len(members) == 1
        ready: list[Member] = []
        ejected: list[Member] = []
        for member in members:
            standing = Standing.READY if member.quiet else member.standing(model, now_s, alone)
            if standing is Standing.READY:
                ready.append(member)
            elif standing is Standing.EJECTED:
                ejected.append(member)
        if ejected and not alone and len(ready) < self._rules.panic * len(members):
            self.panics += 1
            for member in ejected:
                member.admit(model, now_s)
            ready += ejected
        return ready

    def _unknown(self, model: str) -> GatewayError:
        if not self._members:
            return NoBackend("There is no backend now.", retry_after_s=retry_after(CHECK_S, self._dice))
        return ModelNotFound(f"The model {model!r} does not exist.", param="model")

    def _unavailable(
        self, model: str, untried: list[Member], takers: Sequence[Member], pool: Pool, now_s: float
    ) -> GatewayError:
        """Why none of ``untried`` can be asked, with the time until the first one may be."""
        alone = len(pool.members) == 1
        free: list[float] = []
        loaded: list[float] = []
        back: list[float] = [CHECK_S]
        for member in untried:
            standing = Standing.READY if member in takers else member.standing(model, now_s, alone)
            if standing is Standing.READY:
                free.append(member.free_in_s())
            elif standing is Standing.BUSY:
                free.append(member.busy_until_s - now_s)
            elif standing is Standing.LOADING:
                loaded.append(member.loaded_in_s(now_s))
            elif standing is Standing.EJECTED:
                back.append(member.back_in_s(model, now_s))
        what: type[GatewayError]
        if free:
            what, text, wait_s = Overloaded, f"All backends of model {model!r} are busy.", min(free)
        elif loaded:
            what, text, wait_s = ModelLoading, f"The model {model!r} is being loaded.", min(loaded)
        elif pool.cold:
            what, text, wait_s = ModelLoading, f"The model {model!r} is not loaded.", LOAD_S
        else:
            what, text, wait_s = NoBackend, f"No backend of model {model!r} can be reached now.", min(back)
        return what(text, retry_after_s=retry_after(wait_s, self._dice))
