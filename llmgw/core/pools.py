"""Which members serve which model: an index that is built on demand and dropped on changes.

The cost of a change of one member depends only on the number of its models, however many
members there are; so a discovery that finds a thousand members at a time stays cheap.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from llmgw.core.member import NO_LIMIT, Member


class Pool(Struct):
    """The members of one model.

    :param members: those that are not draining and do not have to load the model first.
    :param widest: the largest window among them.
    :param known: the largest window, draining members included.
    :param cold: some member that is not draining could load the model, and has not.
    :param slotted: some member knows how many slots the model has there.
    """

    members: tuple[Member, ...]
    widest: int
    known: int
    cold: bool = False
    slotted: bool = False


class Pools:
    """The pools of all models.

    :param members: all members by id, including removed ones; read, never changed.
    :ivar ready: the pools that have been built, by model.
    """

    def __init__(self, members: Mapping[str, Member]) -> None:
        self.ready: dict[str, Pool] = {}
        self._members = members
        # Of all members that are not removed: the models counted for each, and the count of each model.
        self._counted: dict[str, tuple[str, ...] | None] = {}
        self._known: dict[str, int] = {}
        self._silent = 0
        self._any_name: Pool | None = None
        self._ids: dict[str, tuple[str, ...]] | None = None

    def note(self, id: str) -> None:
        """A member was added, removed or changed: count its models again."""
        member = self._members.get(id)
        old = self._counted.pop(id, ())
        new: tuple[str, ...] | None = ()
        if member is not None and not member.removed:
            new = self._counted[id] = member.models
        self._ids = None
        self._silent += (new is None) - (old is None)
        had, has = frozenset(old or ()), frozenset(new or ())
        for name in has - had:
            self._known[name] = self._known.get(name, 0) + 1
        for name in had - has:
            self._known[name] -= 1
            if not self._known[name]:
                del self._known[name]
        if old is None or new is None:  # it is, or was, in all pools
            self.ready.clear()
            self._any_name = None
        else:
            for name in had | has:
                self.ready.pop(name, None)

    def of(self, model: str) -> Pool | None:
        """The pool of ``model``; for an unknown name that of the members with unknown models."""
        if model in self.ready:
            return self.ready[model]
        if model in self._known:
            members = [each for each in self._present() if each.models is None or model in each.models]
            self.ready[model] = _pool(members, model)
            return self.ready[model]
        if self._any_name is None and self._silent:
            self._any_name = _pool([each for each in self._present() if each.models is None])
        return self._any_name

    def knows(self, model: str) -> bool:
        """Whether some member has the model, by its report or its settings."""
        return model in self._known

    def serves(self, model: str) -> bool:
        """Whether some member has the model, or has not reported yet what it has."""
        return model in self._known or self._silent > 0

    def ids(self) -> dict[str, tuple[str, ...]]:
        """Models to the ids of members that have them, including draining and dead ones; sorted by model."""
        if self._ids is None:
            names: dict[str, list[str]] = {name: [] for name in sorted(self._known)}
            for member in self._present():
                for name in dict.fromkeys(member.models or ()):
                    names[name].append(member.spec.id)
            self._ids = {name: tuple(ids) for name, ids in names.items()}
        return dict(self._ids)

    def _present(self) -> list[Member]:
        return [member for member in self._members.values() if not member.removed]


def _pool(members: list[Member], name: str = "") -> Pool:
    present = [member for member in members if not member.draining]
    takers = tuple(member for member in present if not member.is_cold(name))
    return Pool(
        takers,
        max((member.window for member in takers), default=NO_LIMIT),
        max(member.window for member in members),
        cold=len(takers) < len(present),
        slotted=any(member.stock is not None and name in member.stock.slots for member in takers),
    )
