"""Who waits for a slot, in which order, and who goes next.

A line is kept per model, oldest first. Binding is late: nobody who waits belongs
to a backend. When one may have room, an :class:`Offer` finds who goes next (the
router's order, or else the oldest that fits) and where (the router's choice among
all that are free, since more may be free by then).

A router that chooses nobody for one who waits has declined for it: then the next
one is asked, a few times.
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

MOST_DECLINES = 8
"""After so many who would rather wait on, nobody else is asked in the same offer."""

MOST_ORDERED = 64
"""So many of those who fit, the oldest, are shown to a router that orders them."""

Choose = Callable[["Request", Sequence["Backend"], float], "Choice | None"]
Order = Callable[[Sequence["Request"], "Backend", float], int]


class Waiter:
    """One request that waits.

    :param exclude: ids of backends that it cannot use.
    :param since_s: monotonic time of its coming.
    :ivar number: grows with each that comes.
    """

    __slots__ = ("exclude", "number", "request", "since_s")

    def __init__(self, request: Request, exclude: frozenset[str], since_s: float) -> None:
        self.request = request
        self.exclude = exclude
        self.since_s = since_s
        self.number = 0


W = TypeVar("W", bound=Waiter)


class Lines(Generic[W]):
    """All who wait."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[W, None]] = {}
        self._numbers = count()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    @property
    def models(self) -> list[str]:
        """Models that somebody waits for."""
        return list(self._lines)

    def count(self, model: str) -> int:
        """How many wait for ``model``."""
        line = self._lines.get(model)
        return 0 if line is None else len(line)

    def enter(self, waiter: W) -> None:
        """Come last."""
        waiter.number = next(self._numbers)
        self._lines.setdefault(waiter.request.model, {})[waiter] = None
        self._total += 1

    def leave(self, waiter: W) -> bool:
        """:return: whether it was still there."""
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
        """Those who wait for one of ``models``, oldest first."""
        lines = [self._lines[model] for model in models if model in self._lines]
        return iter(lines[0]) if len(lines) == 1 else heapq.merge(*lines, key=lambda waiter: waiter.number)


class Offer(Generic[W]):
    """What one backend may have free, offered to those who wait.

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
        self._shut: set[str] = set()  # models that nobody may be asked for now

    def next(self, now_s: float) -> tuple[W, Choice] | None:
        """Who goes, and where to; ``None`` when there is no room, or nobody for it.

        The caller takes the waiter out of its line, and the lease, before it
        asks again.
        """
        fleet = self._fleet
        member = fleet.members.get(self._backend_id)
        if member is None:
            return None
        while member.view.in_flight < member.room and len(self._declined) < MOST_DECLINES:
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
        """Those this backend would do for, oldest first: one, or enough to be ordered."""
        fleet, lines, declined = self._fleet, self._lines, self._declined
        most = 1 if self._order is None else MOST_ORDERED
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
