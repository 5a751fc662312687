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

PAUSE_S, PAUSE_GAIN, PAUSE_MOST = 7.0, 0.05, 10.0
"""Mean pause of a conversation before its next turn: at first, the newest one's weight in it, and how
many times the mean it counts at most."""

PAUSES, KEEP_LEAST_S = 3.0, 1.0
"""After so many mean pauses, but not less than this, what a slot holds has lost half of its value."""

LOOKS = 8
"""A turn adds few landmarks: so far back from its end the turn before is looked for."""

KEEP = 2.0
"""Value of a held landmark just used, against one saved now, if its conversation comes back for certain."""

BACK, BACK_GAIN = 0.7, 0.02
"""Share of prompts that continue what a slot holds: at first, and the newest one's weight in it."""


class SlotShadow:
    """The slots of one backend.

    :ivar slots: how many there are.
    :ivar taken: how many are at work for us.
    """

    __slots__ = (
        "_back",
        "_busy",
        "_ends",
        "_firsts",
        "_idle",
        "_marks",
        "_pause_s",
        "_used_s",
        "slots",
        "taken",
    )

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._marks: list[Sequence[int]] = [()] * slots
        self._idle = dict.fromkeys(range(slots))
        self._firsts: list[int | None] = [None] * slots
        self._used_s = [-inf] * slots
        self._busy: list[str | None] = [None] * slots
        self._ends: dict[int, int] = {}  # last landmark of what is held, and the slot
        self._back = BACK
        self._pause_s = PAUSE_S
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
        keep, keep_s = KEEP * self._back, max(PAUSES * self._pause_s, KEEP_LEAST_S)
        firsts, held_by = self._firsts, self._marks
        for slot in self._idle:
            used_s, held = used[slot], held_by[slot]
            if first is not None and firsts[slot] == first:
                saved = saved_of(held, marks)
                value = saved - keep * (len(held) - saved) / (1.0 + (now_s - used_s) / keep_s)
            else:
                value = -keep * len(held) / (1.0 + (now_s - used_s) / keep_s)
            if value > most or (value == most and used_s < oldest_s):
                chosen, most, oldest_s = slot, value, used_s
        return chosen

    def take(self, slot: int, request_id: str, marks: Sequence[int], now_s: float) -> bool:
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
        self._firsts[slot] = None
        if marks:
            self._firsts[slot] = marks[0]
            self._ends[marks[-1]] = slot
            self._learn(bool(held) and held[-1] in marks[-LOOKS:], now_s - self._used_s[slot])
        self.taken += 1
        return True

    def _learn(self, came_back: bool, pause_s: float) -> None:
        """A prompt continues what its slot held, after that pause, or does not."""
        self._back += BACK_GAIN * (came_back - self._back)
        if came_back:
            mean_s = self._pause_s
            self._pause_s += PAUSE_GAIN * (min(pause_s, PAUSE_MOST * mean_s) - mean_s)

    def free(self, slot: int, request_id: str, now_s: float) -> None:
        """That request is over."""
        if slot < self.slots and self._busy[slot] == request_id:
            self._busy[slot] = None
            self._idle[slot] = None
            self._used_s[slot] = now_s
            self.taken -= 1


def saved_of(held: Sequence[int], marks: Sequence[int]) -> int:
    """Length of the common beginning, by halving: equal landmarks mean equal beginnings.

    A turn of a conversation finds all that is held in its own beginning, which one
    look tells.
    """
    low = high = min(len(held), len(marks))
    while low and held[low - 1] != marks[low - 1]:
        high = low
        low //= 2
    while high - low > 1:
        middle = (low + high) // 2
        if held[middle - 1] == marks[middle - 1]:
            low = middle
        else:
            high = middle
    return low
