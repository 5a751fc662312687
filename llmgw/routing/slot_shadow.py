"""Which of a server's slots holds what, as far as we can know.

Llama-server keeps one prompt per slot and puts a new one where it finds the
longest common beginning, or else in the slot idle for longest. By itself it
gives up a conversation's cache for one that merely begins with the same system
prompt. Told which slot to use (``id_slot``), it need not: here the value of what
is overwritten is set against what is saved.

This holds only while every request there is ours and was given its slot; the
router asks for none otherwise. A server that ignores the wish costs nothing: the
shadow is then wrong, and used for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

KEEP_S = 20.0
"""Time in which a held prompt loses half of its value; conversations pause for some seconds."""

LOOKS = 8
"""A turn adds few landmarks: so far back from its end the turn before is looked for."""

KEEP = 0.5
"""Value of a held landmark just used, against one saved now."""


class SlotShadow:
    """The slots of one backend.

    :ivar slots: how many there are.
    :ivar taken: how many are at work for us.
    """

    __slots__ = ("_busy", "_ends", "_firsts", "_idle", "_marks", "_used_s", "_worth", "slots", "taken")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._marks: list[Sequence[int]] = [()] * slots
        self._idle = dict.fromkeys(range(slots))
        self._firsts: list[int | None] = [None] * slots
        self._worth = [0.0] * slots  # of what is held, just used
        self._used_s = [-inf] * slots
        self._busy: list[str | None] = [None] * slots
        self._ends: dict[int, int] = {}  # last landmark of what is held, and the slot
        self.taken = 0

    def choose(self, marks: Sequence[int], now_s: float) -> int | None:
        """The idle slot where a prompt with these landmarks gains most; ``None`` if all work."""
        chosen: int | None = None
        most, oldest_s = -inf, inf
        busy, used, ends = self._busy, self._used_s, self._ends
        for mark in marks[: -LOOKS - 1 : -1]:  # the next turn of a conversation, mostly
            own = ends.get(mark)
            if own is not None and busy[own] is None:
                return own
        first = marks[0] if marks else None
        firsts, worth = self._firsts, self._worth
        for slot in self._idle:
            used_s = used[slot]
            if firsts[slot] == first and first is not None:
                held = self._marks[slot]
                saved = saved_of(held, marks)
                value = saved - KEEP * (len(held) - saved) / (1.0 + (now_s - used_s) / KEEP_S)
            else:
                value = -worth[slot] / (1.0 + (now_s - used_s) / KEEP_S)
            if value > most or (value == most and used_s < oldest_s):
                chosen, most, oldest_s = slot, value, used_s
        return chosen

    def take(self, slot: int, request_id: str, marks: Sequence[int]) -> bool:
        """A request was sent with that slot.

        :return: whether it was idle.
        """
        if slot >= self.slots or self._busy[slot] is not None:
            return False
        self._busy[slot] = request_id
        del self._idle[slot]
        held = self._marks[slot]
        if held and self._ends.get(held[-1]) == slot:
            del self._ends[held[-1]]
        self._marks[slot] = marks
        self._worth[slot] = KEEP * len(marks)
        self._firsts[slot] = marks[0] if marks else None
        if marks:
            self._ends[marks[-1]] = slot
        self.taken += 1
        return True

    def free(self, slot: int, request_id: str, now_s: float) -> None:
        """That request is over."""
        if slot < self.slots and self._busy[slot] == request_id:
            self._busy[slot] = None
            self._idle[slot] = None
            self._used_s[slot] = now_s
            self.taken -= 1


def saved_of(held: Sequence[int], marks: Sequence[int]) -> int:
    """Length of the common beginning, or somewhat less.

    A turn of a conversation finds all that is held in its own beginning, which one
    look tells, as equal landmarks mean equal beginnings. For others a rough answer
    is enough: looks at a half, a quarter and the first.
    """
    length = min(len(held), len(marks))
    while length and held[length - 1] != marks[length - 1]:
        length //= 2
    return length
