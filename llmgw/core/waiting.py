"""The queues of requests that wait for a slot, and which of them goes next.

There is a queue ("line") per model, oldest first. Binding is late: no waiting request belongs
to a backend. When a backend may have room, an :class:`Offer` finds the request that goes next
(by the router's order, or else the oldest that fits) and where it goes (the router's choice
among all backends that are free by then).

If the router chooses no backend for a request, it has declined it; then the next request is
tried, a few times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

from llmgw.errors import GatewayError

if TYPE_CHECKING:
    from llmgw.core.fleet import Fleet
    from llmgw.core.member import Member
    from llmgw.values import Backend, Choice, Request

MAX_DECLINES = 8
"""After the router has declined so many requests, the offer ends."""

MAX_ORDERED = 64
"""A router that orders requests is shown so many of those that fit, the oldest."""

Choose = Callable[["Request", Sequence["Backend"], float], "Choice | None"]
Order = Callable[[Sequence["Request"], "Backend", float], int]


class Waiter:
    """One request that waits.

    :param exclude: ids of backends that it cannot use.
    :param since_s: monotonic time since which it waits.
    :ivar number: its position in the order of arrival over all models.
    """

    __slots__ = ("exclude", "number", "request", "since_s")

    def __init__(self, request: Request, exclude: frozenset[str], since_s: float) -> None:
        self.request = request
        self.exclude = exclude
        self.since_s = since_s
        self.number = 0


W = TypeVar("W", bound=Waiter)


class Lines(Generic[W]):
    """The queues of all models."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[W, None]] = {}
        self._numbers = count()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    @property
    def models(self) -> list[str]:
        """The models for which requests wait."""
        return list(self._lines)

    def count(self, model: str) -> int:
        """The number of requests that wait for ``model``."""
        line = self._lines.get(model)
        return 0 if line is None else len(line)

    def enter(self, waiter: W) -> None:
        """Add a request at the end of its queue."""
        waiter.number = next(self._numbers)
        self._lines.setdefault(waiter.request.model, {})[waiter] = None
        self._total += 1

    def leave(self, waiter: W) -> bool:
        """Remove a request. :return: whether it was there."""
        model = waiter.request.model
        line = self._lines.get(model)
        if line is None or waiter not in line:
            return False
        del line[waiter]
        self._total -= 1
        if not line:
            del self._lines[model]
        return True

    def oldest(self, models: Iterable[str]) -> Iterator[W]:
        """The requests that wait for one of ``models``, oldest first."""
        lines = [self._lines[model] for model in models if model in self._lines]
        return iter(lines[0]) if len(lines) == 1 else heapq.merge(*lines, key=lambda waiter: waiter.number)


class Offer(Generic[W]):
    """The free slots of one backend, offered to waiting requests.

    :param choose: as a router's; ``None`` declines.
    :param order: as a router's; ``None`` is first come, first served.
    """

    def __init__(
        self, lines: Lines[W], fleet: Fleet, backend_id: str, choose: Choose, order: Order | None
    ) -> None:
        self._lines = lines
        self._fleet = fleet
        self._backend_id = backend_id
        self._choose = choose
        self._order = order
        self._declined: set[W] = set()
        self._shut: set[str] = set()  # models without a candidate now

    def next(self, now_s: float) -> tuple[W, Choice] | None:
        """The request that goes next, and where to; ``None`` if there is no room, or no request for it.

        The caller removes the request from its queue and takes the lease before it asks again.
        """
        fleet = self._fleet
        member = fleet.members.get(self._backend_id)
        if member is None:
            return None
        while member.view.in_flight < member.room and len(self._declined) < MAX_DECLINES:
            fit = self._fit(member)
            if not fit:
                break
            place = 0
            if self._order is not None and len(fit) > 1:
                place = self._order([each.request for each in fit], member.backend, now_s)
            waiter = fit[place]
            request = waiter.request
            try:
                candidates = fleet.candidates(request, now_s, exclude=waiter.exclude)
            except GatewayError:
                self._shut.add(request.model)
                continue
            choice = self._choose(request, candidates, now_s)
            if choice is not None:
                return waiter, choice
            self._declined.add(waiter)
        return None

    def _fit(self, member: Member) -> list[W]:
        """The requests that fit this backend, oldest first: one, or as many as the router orders."""
        fleet, lines, declined = self._fleet, self._lines, self._declined
        most = 1 if self._order is None else MAX_ORDERED
        models = [
            model for model in lines.models if model not in self._shut and member in fleet.takers(model)
        ]
        fit: list[W] = []
        for waiter in lines.oldest(models):
            if (
                waiter not in declined
                and self._backend_id not in waiter.exclude
                and fleet.fits(member, waiter.request)
            ):
                fit.append(waiter)
                if len(fit) == most:
                    break
        return fit
