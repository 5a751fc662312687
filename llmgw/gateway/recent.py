"""The last requests, as their access lines: who was chosen and why, who was refused.

Every request leaves one tuple here and nothing else; it becomes an
:class:`~llmgw.gateway.access_log.AccessLine` only when somebody looks.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

from llmgw.gateway.access_log import AccessLine

MOST = 256
"""Lines kept; the oldest goes first. A line holds strings of the request, bounded by ``[limits]``."""


class Recent:
    """A ring of access lines.

    :ivar total: lines that were ever added.
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
        """What was added after the first ``seen`` lines, oldest first.

        :param most: so many of the newest; older ones, and those that fell out, are left out.
        """
        wanted = min(self.total - seen, len(self._lines), most)
        return [AccessLine.of(*line) for line in islice(self._lines, len(self._lines) - wanted, None)]

    def keys(self) -> set[str]:
        """Ids of the keys that came lately."""
        return {line[KEY] for line in self._lines if line[KEY] is not None}


KEY = tuple(AccessLine.__struct_fields__).index("key")
