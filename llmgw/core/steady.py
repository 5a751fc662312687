"""Up or down, by looks that may err: several in a row are wanted to change one's mind."""

from __future__ import annotations


class Steady:
    """:param fall: bad looks in a row until it is down.

    :param rise: good looks in a row until it is up again.
    :ivar up: ``None`` before the first look, which counts alone: nothing is known to change.
    """

    def __init__(self, fall: int, rise: int) -> None:
        self.up: bool | None = None
        self._fall = fall
        self._rise = rise
        self._against = 0

    def look(self, good: bool) -> bool:
        """Take in a look. :return: whether it changed something."""
        if self.up is None:
            self.up = good
            return True
        if good is self.up:
            self._against = 0
            return False
        self._against += 1
        if self._against < (self._rise if good else self._fall):
            return False
        self.up, self._against = good, 0
        return True
