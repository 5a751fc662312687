"""Up or down, from checks that may err: it takes several in a row to change the state (fall, rise)."""

from __future__ import annotations


class FallRise:
    """
    :param fall: failed checks in a row until it is down.
    :param rise: good checks in a row until it is up again.
    :ivar up: ``None`` before the first check, which alone decides.
    """

    def __init__(self, fall: int, rise: int) -> None:
        self.up: bool | None = None
        self._fall = fall
        self._rise = rise
        self._against = 0

    def check(self, good: bool) -> bool:
        """Take in a check's result. :return: whether :attr:`up` has changed."""
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
