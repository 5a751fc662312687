"""Limits how many requests are started in one turn of the event loop.

Starting a request (it is parsed, checked and routed) takes longer than anything else done in
one go. Without a limit a burst of requests would hold up every stream until all of them are
started, no backend would be asked before the last request of the burst had been read, and the
memory that each needs only at its start would be needed a thousand times at the same moment.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from llmgw.wire.twisted_internals import end_of_turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmgw.wire.incoming import Incoming

STARTS_PER_TURN = 16


class StartPacer:
    """Starts requests in the order in which they came.

    :param serve: starts one; never raises.
    """

    def __init__(self, serve: Callable[[Incoming], None], reactor: Any) -> None:
        self._serve = serve
        self._at_end_of_turn = end_of_turn(reactor)
        # Above 0 while a call at the end of the turn is scheduled.
        self._started = 0
        self._waiting: dict[Incoming, None] = {}

    def start(self, incoming: Incoming) -> None:
        """Start it in this turn, or in one of the next; a second call before that does nothing."""
        if self._started >= STARTS_PER_TURN:
            self._waiting[incoming] = None
            return
        if not self._started:
            self._at_end_of_turn(self._next_turn)
        self._started += 1
        self._serve(incoming)

    def _next_turn(self) -> None:
        waiting = self._waiting
        starting = list(islice(waiting, STARTS_PER_TURN))
        self._started = len(starting)
        if not starting:
            return
        self._at_end_of_turn(self._next_turn)
        for incoming in starting:
            del waiting[incoming]
            self._serve(incoming)
