"""How often a fault of a plugin is worth a line in the log: once, and then summed."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from twisted.logger import Logger
from twisted.python.failure import Failure

EVERY_S = 60.0


class Seldom:
    """Of each kind of fault one line a minute, which tells how many were left out before it.

    :param clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told_s: dict[Hashable, float] = {}
        self._left_out: dict[Hashable, int] = {}

    def words(self, kind: Hashable) -> str | None:
        """What to put behind the line: nothing, or how many of this kind were left out since the last
        one; ``None``: this one is to be left out too.

        :param kind: one of few.
        """
        now_s = self._clock()
        if now_s - self._told_s.get(kind, float("-inf")) < EVERY_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return None
        self._told_s[kind] = now_s
        left_out = self._left_out.pop(kind, 0)
        return f" ({left_out} more since this was told last)" if left_out else ""

    def tell(self, log: Logger, who: str, what: str) -> None:
        """Log as an error that ``who`` did ``what``; the first word of that is the kind."""
        more = self.words((who, what.split()[0]))
        if more is not None:
            log.error("{who} {what}{more}", who=who, what=what, more=more)

    def tell_raised(
        self, log: Logger, who: str, what: str = "raised", failure: Failure | None = None
    ) -> None:
        """Log that ``who`` has raised.

        :param what: the kind.
        :param failure: what it raised; ``None``: the exception that is being handled.
        """
        more = self.words((who, what))
        if more is not None:
            log.failure("{who} {what}{more}", failure, who=who, what=what, more=more)
