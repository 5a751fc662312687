"""The bounded wait for a slot (``[admission] max_wait_s``).

A request that finds every backend at its cap waits here, and nowhere else: it holds nothing
of any backend, so a client that leaves is forgotten at once. Which request goes next, and
where to, is decided by :mod:`llmgw.core.waiting`: when something has changed at a backend, at
the end of the reactor's turn, and four times a second for what only time brings back (the end
of a pause that a backend asked for, or of an open breaker).

While requests wait for a model, new ones for it queue behind them, so that none is overtaken
by one that comes just when a slot is freed. A request is only passed over if it does not fit,
or if the router declines it.

Where gateways share the caps (:mod:`llmgw.core.shares`), a request that finds our share used
up while others have room waits for the answer to our demand, for at most
:data:`SHARE_WAIT_S`, whatever the operator allows.

Requests go on waiting while backends are down or loading, as these may be back in time, but
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
"""How long a request waits for a larger share of a cap where it may not wait otherwise."""


class _Waiting(Waiter):
    """One request that waits.

    :ivar choice: fires with the backend to ask, or fails.
    :ivar refusal: for a request held for its model: makes the error it gets when its time is over.
    """

    __slots__ = ("choice", "refusal")

    def __init__(self, room: WaitingRoom, request: Request, exclude: frozenset[str], since_s: float) -> None:
        super().__init__(request, exclude, since_s)
        self.choice: Future[Choice] = Future(lambda: room.forget(self))
        self.refusal: Callable[[], GatewayError] | None = None


class WaitingRoom:
    """All requests that wait.

    :ivar deadline_s: for the sweep: always due while a request waits.
    :ivar occupied: a request waits.
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
        """The number of waiting requests."""
        return len(self._lines)

    def has_line(self, model: str) -> bool:
        """Whether requests wait for ``model``; then all new ones go through :meth:`place`."""
        return self._lines.count(model) > 0

    def has_room(self, model: str) -> bool:
        """Whether one more request may wait for ``model``."""
        return self._lines.count(model) < self._most(model)

    async def place(self, request: Request, exclude: frozenset[str], until_s: float) -> Choice:
        """Wait for a slot, unless there is one for this request at once; return the backend to ask.

        The lease must be taken in the same turn of the reactor. Cancelling forgets the request.

        :param exclude: ids of backends that it cannot use.
        :param until_s: monotonic time of the request's own deadline.
        :raise GatewayError: the queue is full, or the time is over; usually ``Overloaded``.
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
        """As :meth:`place`, for a request whose model no backend has in memory: it waits in the
        same queue, and is given a slot in its turn once a backend has loaded it.

        :param refusal: makes the error that is raised when ``wait_s`` is over.
        :raise GatewayError: that one, or the one passed to :meth:`fail`.
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
        """Fail all requests held for ``model``: it will not be loaded."""
        for waiting in list(self._lines.oldest([model])):
            if waiting.refusal is not None:
                self._fail(waiting, error)

    def forget(self, waiting: _Waiting) -> None:
        """The request no longer waits. With the last one, the fleet is no longer watched."""
        if self._lines.leave(waiting) and not self._lines:
            self.occupied = False
            self._gateway.fleet.freed = None
            self._gateway.sweep.discard(self)
            self._changed.clear()
            if self._soon is not None:
                self._soon.cancel()
                self._soon = None

    def close(self) -> None:
        """The gateway stops: fail all waiting requests, and let none wait any more."""
        self._closed = True
        for waiting in list(self._lines.oldest(self._lines.models)):
            after_s = retry_after(1.0, self._gateway.dice)
            self._fail(waiting, Overloaded("the gateway is stopping", retry_after_s=after_s))

    # --- called by the sweep ---

    def expired(self, now_s: float) -> None:
        """Look at everything again."""
        self._offer(list(self._gateway.fleet.members))
        self._fail_unserved()

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
        """From the fleet, which is in the middle of something: only take a note."""
        self._changed.add(backend_id)
        if self._soon is None:
            self._soon = self._gateway.reactor.callLater(0, self._look_at_changed)

    def _look_at_changed(self) -> None:
        self._soon = None
        changed, self._changed = self._changed, set()
        self._offer(changed)
        self._fail_unserved()

    def _offer(self, backend_ids: Collection[str], own: _Waiting | None = None) -> None:
        """Give the free slots of these backends to waiting requests.

        :param own: stop when it is this one's turn, since its caller takes the lease first.
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
                    self._offer_again(backend_ids)
                    return

    def _offer_again(self, backend_ids: Collection[str]) -> None:
        if self._lines:
            for each in backend_ids:
                self._freed(each)

    def _fail_unserved(self) -> None:
        """Fail the requests whose model no backend serves any more, or only drained ones."""
        fleet = self._gateway.fleet
        for model in self._lines.models:
            if fleet.takers(model):
                continue
            for waiting in list(self._lines.oldest([model])):
                if waiting.refusal is None or not fleet.cold(model):
                    self._fail(waiting, self._refusal(waiting))

    def _time_over(self, waiting: _Waiting) -> None:
        self._fail(waiting, self._refusal(waiting))

    def _fail(self, waiting: _Waiting, error: GatewayError) -> None:
        self.forget(waiting)
        waiting.choice.fail(error)

    def _refusal(self, waiting: _Waiting) -> GatewayError:
        """The error for a request that came now and could not wait."""
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
