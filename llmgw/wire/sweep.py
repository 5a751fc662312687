"""One coarse timer for all deadlines.

A stream changes its deadline with every chunk. A ``callLater`` for each would cost more
than relaying the chunk, so a deadline is a float attribute, and one sweep looks at all of
them. Deadlines that pass together, such as those of an attacker's hundreds of connections,
are handled in batches, one per turn of the reactor, so nothing else waits for more than
one batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from twisted.internet.task import LoopingCall
from twisted.logger import Logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.internet.interfaces import IDelayedCall, IReactorTime

NEVER = float("inf")
BATCH = 8
"""Expired members per turn; closing a connection under TLS takes about 0.1 ms."""


class Timed(Protocol):
    """Something with a deadline."""

    deadline_s: float
    """Monotonic seconds; :data:`NEVER` for none."""

    def expired(self, now_s: float) -> None:
        """The deadline has passed. Called again at each sweep until it is moved."""


class Sweep:
    """Looks at every member's deadline every ``every_s`` seconds.

    :param clock: returns monotonic seconds; the clock that the members use.
    """

    log = Logger()

    def __init__(self, reactor: IReactorTime, clock: Callable[[], float], every_s: float = 0.25) -> None:
        self.clock = clock
        self.every_s = every_s
        self._members: set[Timed] = set()
        self._reactor = reactor
        self._loop = LoopingCall(self._look)
        self._loop.clock = reactor
        self._due: list[Timed] = []
        self._next: IDelayedCall | None = None

    def add(self, member: Timed) -> None:
        """Watch ``member`` until it is discarded."""
        self._members.add(member)

    def discard(self, member: Timed) -> None:
        """Stop watching. Does nothing if it is not watched."""
        self._members.discard(member)

    def __len__(self) -> int:
        return len(self._members)

    def start(self) -> None:
        """Begin. A member that raises is logged and dropped; the others' deadlines still hold."""
        self._loop.start(self.every_s, now=False)

    def stop(self) -> None:
        """Stop, and forget all members."""
        if self._loop.running:
            self._loop.stop()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._due.clear()
        self._members.clear()

    def _look(self) -> None:
        now_s = self.clock()
        self._due = [member for member in self._members if member.deadline_s <= now_s]
        if self._due and self._next is None:
            self._expire()

    def _expire(self) -> None:
        """Expire one batch, and the rest in the next turns."""
        self._next = None
        now_s = self.clock()
        for _ in range(BATCH):
            if not self._due:
                return
            member = self._due.pop()
            if member.deadline_s > now_s or member not in self._members:
                continue  # moved or discarded in the meantime
            try:
                member.expired(now_s)
            except Exception:
                self._members.discard(member)
                self.log.failure("a deadline of {member} failed", member=type(member).__name__)
        if self._due:
            self._next = self._reactor.callLater(0, self._expire)
