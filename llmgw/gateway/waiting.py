"""The bounded wait for a slot (``[admission] max_wait_s``).

A request that finds every backend at its cap waits here, and nowhere else: it
holds nothing of any backend, so a client that leaves is forgotten at once. Who
goes next and where is found by :mod:`llmgw.core.waiting` when something changed
at a backend, at the end of the reactor's turn, and four times a second for what
time alone brings back (a pause that a backend asked for, an open breaker).

While anybody waits for a model, those who come for it stand behind them in the
line, so that nobody is overtaken by one who comes just as a slot comes free. Only
who does not fit, or was declined by the router, is passed by.

Where gateways share the caps (:mod:`llmgw.core.shares`), a request that finds our share
of them used up, while the others leave room, waits for the answer to our asking:
:data:`SHARE_WAIT_S` at most, whatever the operator allows.

Who waits stays while backends are down or loading, as they may be back in time;
not when no backend of the model is left that takes requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmgw.core.retry import retry_after
from llmgw.core.shares import may_get_room
from llmgw.core.waiting import Lines, Offer, Waiter
from llmgw.errors import GatewayError, Overloaded
from llmgw.wire.coroutines import Future

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from twisted.internet.interfaces import IDelayedCall

    from llmgw.gateway.gateway import Gateway
    from llmgw.values import Choice, Request


SHARE_WAIT_S = 0.25
"""How long a request waits for more of a shared cap, where it may not wait else."""


class _Waiting(Waiter):
    """:ivar choice: fires with who is to be asked, or fails.

    :ivar refusal: for one that is held for its model: what it is told in the end.
    """

    __slots__ = ("choice", "refusal")

    def __init__(self, room: WaitingRoom, request: Request, exclude: frozenset[str], since_s: float) -> None:
        super().__init__(request, exclude, since_s)
        self.choice: Future[Choice] = Future(lambda: room.forget(self))
        self.refusal: Callable[[], GatewayError] | None = None


class WaitingRoom:
    """Those who wait, for all models.

    :ivar deadline_s: for the sweep: always due, while somebody waits.
    :ivar occupied: somebody waits.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.deadline_s = 0.0
        self.occupied = False
        self._gateway = gateway
        self._lines: Lines[_Waiting] = Lines()
        self._changed: set[str] = set()
        self._soon: IDelayedCall | None = None
        self._closed = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._lines)

    def has_line(self, model: str) -> bool:
        """Whether somebody waits for ``model``; then all who come go through :meth:`place`."""
        return self._lines.count(model) > 0

    def has_room(self, model: str) -> bool:
        """Whether one more may wait for ``model``."""
        return self._lines.count(model) < self._most(model)

    async def place(self, request: Request, exclude: frozenset[str], until_s: float) -> Choice:
        """Who is to be asked, when there is room; with a line, at once or in its turn.

        The lease must be taken in the turn in which this returns. Cancelling
        forgets the request.

        :param exclude: ids of backends that it cannot use.
        :param until_s: monotonic time of the request's own deadline.
        :raise GatewayError: the line is full, or the time is over: what the fleet
            has to say then, which as a rule is that it is overloaded.
        """
        gateway = self._gateway
        now_s = gateway.clock()
        waiting = _Waiting(self, request, exclude, now_s)
        had_line = self.has_line(request.model)
        self._enter(waiting)
        if had_line:
            self._offer([member.spec.id for member in gateway.fleet.takers(request.model)], waiting)
            if waiting.choice.done:
                return await waiting.choice
        if self._lines.count(request.model) > self._most(request.model):
            self.forget(waiting)
            raise self._refusal(waiting)
        if gateway.fleet.pressed is not None:
            gateway.fleet.pressed(gateway.fleet.takers(request.model), True)
        wait_s = min(gateway.config.admission.max_wait_s or SHARE_WAIT_S, until_s - now_s)
        timer = gateway.reactor.callLater(max(0.0, wait_s), self._time_over, waiting)
        try:
            return await waiting.choice
        finally:
            if timer.active():
                timer.cancel()
            gateway.metrics.waited(gateway.clock() - now_s)

    async def hold(
        self, request: Request, exclude: frozenset[str], wait_s: float, refusal: Callable[[], GatewayError]
    ) -> Choice:
        """As :meth:`place`, for a request whose model nobody has in memory: it stands in the
        same line, and is given a slot in its turn once somebody has.

        :param refusal: makes what is raised when ``wait_s`` is over.
        :raise GatewayError: that, or what :meth:`fail` was given.
        """
        gateway = self._gateway
        if self._closed:
            raise refusal()
        waiting = _Waiting(self, request, exclude, gateway.clock())
        waiting.refusal = refusal
        self._enter(waiting)
        timer = gateway.reactor.callLater(max(0.0, wait_s), self._time_over, waiting)
        try:
            return await waiting.choice
        finally:
            if timer.active():
                timer.cancel()

    def fail(self, model: str, error: GatewayError) -> None:
        """Tell all who are held for ``model``: it will not come."""
        for waiting in list(self._lines.oldest([model])):
            if waiting.refusal is not None:
                self._fail(waiting, error)

    def forget(self, waiting: _Waiting) -> None:
        """It waits no more. Nobody watches the fleet for nobody."""
        if self._lines.leave(waiting) and not self._lines:
            self.occupied = False
            self._gateway.fleet.freed = None
            self._gateway.sweep.discard(self)
            self._changed.clear()
            if self._soon is not None:
                self._soon.cancel()
                self._soon = None

    def close(self) -> None:
        """The gateway stops: send away all who wait, and let nobody wait any more."""
        self._closed = True
        for waiting in list(self._lines.oldest(self._lines.models)):
            after_s = retry_after(1.0, self._gateway.dice)
            self._fail(waiting, Overloaded("the gateway is stopping", retry_after_s=after_s))

    # --- called by the sweep ---

    def expired(self, now_s: float) -> None:
        """Look at everything again."""
        self._offer(list(self._gateway.fleet.members))
        self._send_away_deserted()

    # --- our own ---

    def _most(self, model: str) -> int:
        gateway = self._gateway
        admission = gateway.config.admission
        if self._closed or gateway.overload:
            return 0
        if admission.max_wait_s <= 0 and not may_get_room(gateway.fleet, model):
            return 0
        if admission.max_waiting is not None:
            return admission.max_waiting
        return 2 * sum(member.cap for member in gateway.fleet.takers(model))

    def _enter(self, waiting: _Waiting) -> None:
        if not self._lines:
            self.occupied = True
            self._gateway.fleet.freed = self._freed
            self._gateway.sweep.add(self)
        self._lines.enter(waiting)

    def _freed(self, backend_id: str) -> None:
        """From the fleet, amid whatever somebody else is doing: only make a note."""
        self._changed.add(backend_id)
        if self._soon is None:
            self._soon = self._gateway.reactor.callLater(0, self._look_at_changed)

    def _look_at_changed(self) -> None:
        self._soon = None
        changed, self._changed = self._changed, set()
        self._offer(changed)
        self._send_away_deserted()

    def _offer(self, backend_ids: Collection[str], own: _Waiting | None = None) -> None:
        """Let those who wait have what is free there.

        :param own: stop when it is this one's turn: its caller takes the lease first.
        """
        gateway = self._gateway
        order = gateway.order if hasattr(gateway.router, "order") else None
        for backend_id in backend_ids:
            offer = Offer(self._lines, gateway.fleet, backend_id, gateway.choose, order)
            while self._lines and (found := offer.next(gateway.clock())) is not None:
                waiting, choice = found
                self.forget(waiting)
                waiting.choice.fire(choice)
                if waiting is own:
                    if self._lines:
                        for each in backend_ids:
                            self._freed(each)
                    return

    def _send_away_deserted(self) -> None:
        """Those whose model nobody serves any more, or all its backends are drained."""
        fleet = self._gateway.fleet
        for model in self._lines.models:
            if not fleet.takers(model):
                for waiting in list(self._lines.oldest([model])):
                    if waiting.refusal is not None and fleet.cold(model):
                        continue
                    self._fail(waiting, self._refusal(waiting))

    def _time_over(self, waiting: _Waiting) -> None:
        self._fail(waiting, self._refusal(waiting))

    def _fail(self, waiting: _Waiting, error: GatewayError) -> None:
        self.forget(waiting)
        waiting.choice.fail(error)

    def _refusal(self, waiting: _Waiting) -> GatewayError:
        """What one that comes now, and may not wait, would be told."""
        if waiting.refusal is not None:
            return waiting.refusal()
        gateway, request = self._gateway, waiting.request
        try:
            gateway.fleet.candidates(request, gateway.clock(), exclude=waiting.exclude)
        except GatewayError as error:
            return error
        return Overloaded(
            f"no backend of {request.model!r} can take the request now",
            retry_after_s=retry_after(1.0, gateway.dice),
        )
