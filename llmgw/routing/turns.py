"""Whose turn it is among equals.

A shared index into a list that changes from call to call skips some backends
and doubles others: with two models of two backends each and alternating
requests, it can send all traffic to half of them. Remembering when each id was
last chosen has no such flaw: the one that waited longest is next, whatever the
others in the list are. While the list stays the same this is a plain ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.values import Backend

MOST_REMEMBERED = 1024
"""Ids kept; beyond it those not in sight are forgotten and count as never chosen."""


class Turns:
    """Remembers the order of choices by backend id."""

    __slots__ = ("_count", "_last")

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._count = 0

    def queue(self, backends: Sequence[Backend]) -> list[Backend]:
        """Longest waiting first; those never chosen before all others, by id."""
        last = self._last
        return sorted(backends, key=lambda each: (last.get(each.id, 0), each.id))

    def next(self, equals: Sequence[Backend]) -> Backend:
        """The one that waited longest; it is noted as chosen now.

        :param equals: not empty.
        """
        chosen = equals[0]
        if len(equals) > 1:
            last = self._last
            oldest = last.get(chosen.id, 0)
            for each in equals[1:]:
                since = last.get(each.id, 0)
                if since < oldest or (since == oldest and each.id < chosen.id):
                    chosen, oldest = each, since
        self.took(chosen, equals)
        return chosen

    def took(self, chosen: Backend, in_sight: Sequence[Backend]) -> None:
        """``chosen`` has had its turn."""
        last = self._last
        self._count = last[chosen.id] = self._count + 1
        if len(last) > MOST_REMEMBERED:
            self._last = {each.id: last[each.id] for each in in_sight if each.id in last}
