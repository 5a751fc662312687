"""How gateways that know each other divide the caps of their backends.

A backend takes so many requests in all, and each gateway must decide by itself, at
once. So each has a *share*: what the others have granted it, all together through
the shared store, which adds up grants in one step and never gives out more than the
cap. Two rules keep that from costing anything:

- A gateway asks for what it has at work and, while nobody else is short, for a little
  more, and for half of an equal part at least. What it does not use it gives back at
  its next look. When its share is used up it asks at once.
- Who has nothing there may have one request without asking, while the others are
  below the cap by what they told last. So a fleet at rest answers everybody at once,
  however small the caps.

Hence the slack: with N gateways there are at most N - 1 requests more at a backend
than its cap, and only if several that had none there begin in the same moment.

Opinions of breakers travel along. They are hints: nobody is taken out by hearsay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from llmgw.core.breaker import OPEN

if TYPE_CHECKING:
    from llmgw.core.fleet import Fleet
    from llmgw.core.member import Member

RESERVE = 4
"""Who has four requests at work asks for one more."""

Wishes = dict[str, tuple[int, int, int]]
"""By backend: requests at work, share wanted, cap."""

Opinions = dict[str, dict[str, float]]
"""By backend and model: seconds for which a breaker stays open."""


class Shares:
    """What this gateway wants and has of each backend."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._granted: Mapping[str, int] = {}
        self._pressed: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._wished: Wishes = {}
        self._short: Collection[str] = ()
        self._others = 0

    def press(self, members: Iterable[Member], waits: bool = True) -> bool:
        """Somebody found no room at some of ``members``.

        :param waits: nor at any other, so each who comes counts; else one more would do.
        :return: whether our share of any of them is used up, and the cap is not.
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
        """Somebody may wait for more than we have."""
        return bool(self._pressed)

    @property
    def contended(self) -> bool:
        """Some backend is full with ours and theirs together."""
        views = ((member.view, member.cap) for member in self._fleet.members.values())
        return any(
            view.peers_in_flight and view.in_flight + view.peers_in_flight >= cap for view, cap in views
        )

    def give_up(self) -> None:
        """Whoever waited does not wait any more."""
        self._pressed.clear()

    def wishes(self) -> Wishes:
        """What to ask for now. Of what is not asked for any more nothing is used from here on."""
        self._asked = dict(self._pressed)
        found: Wishes = {}
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
        self._wished = found
        return found

    def take(
        self,
        granted: Mapping[str, int],
        busy: Mapping[str, int],
        others: int,
        short: Collection[str] = (),
    ) -> None:
        """What came of it.

        :param granted: our shares.
        :param busy: requests of the others at work.
        :param others: how many gateways they are; with none, all is ours.
        :param short: backends of which somebody else got less than wished for.
        """
        self._granted = granted
        self._short = short
        self._others = others
        for id, count in self._asked.items():
            if granted.get(id, 0) >= self._wished.get(id, (0, 0, 0))[1] and self._pressed.get(id, 0) <= count:
                self._pressed.pop(id, None)
        for id, member in self._fleet.members.items():
            at_work = busy.get(id, 0)
            free = int(at_work < member.cap)
            share = max(granted.get(id, 0), free) if others else None
            self._give(member, at_work, share)

    def loosen(self) -> None:
        """The store does not answer: go on with what is known of the others' work."""
        for member in self._fleet.members.values():
            others = member.view.peers_in_flight
            self._give(member, others, max(member.room, member.cap - others))

    def forget(self) -> None:
        """Nobody tells of the others any more: each has the whole cap."""
        self._granted = {}
        self._others = 0
        for member in self._fleet.members.values():
            self._give(member, 0, None)

    def _give(self, member: Member, others: int, share: int | None) -> None:
        """Let the choice know. Somebody may wait for more room than there was."""
        room = member.room
        member.view.peers_in_flight = others
        member.share(share)
        if member.room > room and self._fleet.freed is not None:
            self._fleet.freed(member.spec.id)

    @property
    def shared(self) -> dict[str, int]:
        """Our shares, for the operator."""
        return dict(self._granted)


def may_get_room(fleet: Fleet, model: str) -> bool:
    """Nobody of the model has room by our share, and somebody may have by its cap:
    whoever asks the other gateways may get more in a moment."""
    return any(
        member.view.in_flight >= member.room
        and member.view.in_flight + member.view.peers_in_flight < member.cap
        for member in fleet.takers(model)
    )


def opinions(fleet: Fleet, now_s: float) -> Opinions:
    """Whose breakers are open here."""
    found: Opinions = {}
    for id, member in fleet.members.items():
        for model, breaker in member.breakers.items():
            if breaker.current(now_s) is OPEN:
                found.setdefault(id, {})[model] = round(breaker.opens_again_s(now_s), 3)
    return found


def heed(fleet: Fleet, told: Iterable[Opinions], now_s: float) -> None:
    """Take the others' opinions as hints."""
    for each in told:
        for id, models in each.items():
            member = fleet.members.get(id)
            if member is not None:
                for model, left_s in models.items():
                    if not member.models or model in member.models:
                        member.breaker(model).hinted(now_s + left_s)
