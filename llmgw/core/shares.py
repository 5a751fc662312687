"""How gateways that know each other divide the caps of their backends.

The cap of a backend bounds the requests of all gateways, but each must decide by itself, at
once. So each has a *share* of the cap, granted through the shared store, which adds up all
grants in one step and never grants more than the cap. Two rules make that cheap:

- A gateway demands what it has in flight and, while no other is short, a little more, and at
  least half of an equal part. What it does not use it gives back at its next exchange with
  the store. When its share is used up, it asks at once.
- A gateway with no request there may send one without asking, while the others are below the
  cap by what they reported last. So an idle fleet answers at once, however small the caps.

Therefore N gateways together may exceed a cap by up to N - 1 requests, and only if several
without any there start one at the same moment.

Opinions of breakers are exchanged as well. They are hints: they eject nothing by themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from llmgw.core.breaker import OPEN

if TYPE_CHECKING:
    from llmgw.core.fleet import Fleet
    from llmgw.core.member import Member

RESERVE = 4
"""For so many requests in flight, one more is demanded in reserve."""

Demands = dict[str, tuple[int, int, int]]
"""By backend: requests in flight, share wanted, cap."""

Opinions = dict[str, dict[str, float]]
"""By backend and model: seconds for which a breaker stays open."""


class Shares:
    """This gateway's shares of the caps, and its demands."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._granted: Mapping[str, int] = {}
        self._pressed: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._demanded: Demands = {}
        self._short: Collection[str] = ()
        self._others = 0

    def press(self, members: Iterable[Member], waits: bool = True) -> bool:
        """A request found no room at some of ``members``.

        :param waits: it found none at all, so each such request counts; if not, one place more is
            demanded in all.
        :return: :attr:`unmet`: our share of one of them is used up, but its cap is not.
        """
        pressed = self._pressed
        for member in members:
            view = member.view
            if view.in_flight >= member.room and view.in_flight + view.peers_in_flight < member.cap:
                id = member.spec.id
                pressed[id] = pressed.get(id, 0) + 1 if waits else max(1, pressed.get(id, 0))
        return self.unmet

    @property
    def unmet(self) -> bool:
        """A request may be waiting for more than our share."""
        return bool(self._pressed)

    @property
    def contended(self) -> bool:
        """Whether some backend is at its cap with our and other gateways' requests."""
        views = ((member.view, member.cap) for member in self._fleet.members.values())
        return any(
            view.peers_in_flight and view.in_flight + view.peers_in_flight >= cap for view, cap in views
        )

    def give_up(self) -> None:
        """No request waits any more."""
        self._pressed.clear()

    def demands(self) -> Demands:
        """What to ask for now. Places that are no longer demanded are not used from here on."""
        self._asked = dict(self._pressed)
        found: Demands = {}
        for id, member in self._fleet.members.items():
            at_work = member.view.in_flight
            wanted = at_work + self._asked.get(id, 0)
            if id not in self._short:
                wanted = max(wanted + at_work // RESERVE, member.cap // (2 * self._others + 2))
            wanted = min(wanted, member.cap)
            if wanted:
                found[id] = (at_work, wanted, member.cap)
            if self._others and wanted < member.room:
                others = member.view.peers_in_flight
                self._give(member, others, max(wanted, int(others < member.cap)))
        self._demanded = found
        return found

    def take(
        self,
        granted: Mapping[str, int],
        busy: Mapping[str, int],
        others: int,
        short: Collection[str] = (),
    ) -> None:
        """Take in the answer to the last demands.

        :param granted: our shares, by backend.
        :param busy: requests of the other gateways in flight, by backend.
        :param others: the number of other gateways; without any, the whole caps are ours.
        :param short: backends of which another gateway got less than it demanded.
        """
        self._granted = granted
        self._short = short
        self._others = others
        for id, count in self._asked.items():
            _, demanded, _ = self._demanded.get(id, (0, 0, 0))
            if granted.get(id, 0) >= demanded and self._pressed.get(id, 0) <= count:
                self._pressed.pop(id, None)
        for id, member in self._fleet.members.items():
            at_work = busy.get(id, 0)
            free = int(at_work < member.cap)
            share = max(granted.get(id, 0), free) if others else None
            self._give(member, at_work, share)

    def loosen(self) -> None:
        """The store does not answer: go on with what is known of the others' requests."""
        for member in self._fleet.members.values():
            others = member.view.peers_in_flight
            self._give(member, others, max(member.room, member.cap - others))

    def forget(self) -> None:
        """Gateways no longer know of each other: each has the whole cap."""
        self._granted = {}
        self._others = 0
        for member in self._fleet.members.values():
            self._give(member, 0, None)

    def _give(self, member: Member, others: int, share: int | None) -> None:
        """Set what routing goes by; with more room, waiting requests are offered it."""
        room = member.room
        member.view.peers_in_flight = others
        member.share(share)
        if member.room > room and self._fleet.freed is not None:
            self._fleet.freed(member.spec.id)

    @property
    def shared(self) -> dict[str, int]:
        """Our shares by backend, for the operator."""
        return dict(self._granted)


def may_get_room(fleet: Fleet, model: str) -> bool:
    """Whether some backend of the model has room by its cap, but not by our share, so that asking
    the other gateways may help."""
    return any(
        member.view.in_flight >= member.room
        and member.view.in_flight + member.view.peers_in_flight < member.cap
        for member in fleet.takers(model)
    )


def opinions(fleet: Fleet, now_s: float) -> Opinions:
    """The breakers that are open here."""
    found: Opinions = {}
    for id, member in fleet.members.items():
        for model, breaker in member.breakers.items():
            if breaker.current(now_s) is OPEN:
                found.setdefault(id, {})[model] = round(breaker.opens_again_s(now_s), 3)
    return found


def take_hints(fleet: Fleet, told: Opinions, now_s: float) -> None:
    """Take another gateway's opinions as hints."""
    for id, models in told.items():
        member = fleet.members.get(id)
        if member is None:
            continue
        for model, left_s in models.items():
            if not member.models or model in member.models:
                member.breaker(model).hinted(now_s + left_s)
