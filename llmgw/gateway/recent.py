"""The latest requests, as access lines: which backend was chosen and why, what was refused.

Every request leaves one tuple here; it is made an
:class:`~llmgw.gateway.access_log.AccessLine` only when somebody looks.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

from llmgw.gateway.access_log import AccessLine

MOST = 256
"""Lines kept. A line holds strings of the request, which ``[limits]`` bounds."""


class Recent:
    """A ring of access lines.

    :ivar total: number of lines added so far.
    """

    name = "decisions"

    def __init__(self, most: int = MOST) -> None:
        self.total = 0
        self._lines: deque[tuple[Any, ...]] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, line: tuple[Any, ...]) -> None:
        """:param line: what :meth:`AccessLine.of` takes, in its order."""
        self.total += 1
        self._lines.append(line)

    def since(self, seen: int, most: int = MOST) -> list[AccessLine]:
        """The lines added after the first ``seen`` ones that are still kept, oldest first.

        :param most: only so many of the newest.
        """
        wanted = min(self.total - seen, len(self._lines), most)
        return [AccessLine.of(*line) for line in islice(self._lines, len(self._lines) - wanted, None)]

    def keys(self) -> set[str]:
        """Ids of the keys of these requests."""
        return {line[KEY] for line in self._lines if line[KEY] is not None}


KEY = tuple(AccessLine.__struct_fields__).index("key")
