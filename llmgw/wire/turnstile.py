"""So many requests begin in one turn of the event loop, the others in the next ones.

To begin one takes longer than anything else that is done at a time: it is read, judged and routed.
A crowd that asks at once would hold up every stream for all of it, no backend would be asked
before the last of the crowd had been read, and the memory of each one's beginning would be needed
a thousand times at the same moment.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from llmgw.wire.twisted_internals import end_of_turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmgw.wire.incoming import Incoming

AT_A_TIME = 16


class Turnstile:
    """Starts requests in the order in which they came.

    :param serve: starts one; never raises.
    """

    def __init__(self, serve: Callable[[Incoming], None], reactor: Any) -> None:
        self._serve = serve
        self._later = end_of_turn(reactor)
        # Not 0 says that the end of this turn is waited for.
        self._begun = 0
        self._waiting: dict[Incoming, None] = {}

    def pass_on(self, incoming: Incoming) -> None:
        """Start it, in this turn or in one of the next; a second call before that does nothing."""
        if self._begun >= AT_A_TIME:
            self._waiting[incoming] = None
            return
        if not self._begun:
            self._later(self._next_turn)
        self._begun += 1
        self._serve(incoming)

    def _next_turn(self) -> None:
        waiting = self._waiting
        starting = list(islice(waiting, AT_A_TIME))
        self._begun = len(starting)
        if not starting:
            return
        self._later(self._next_turn)
        for incoming in starting:
            del waiting[incoming]
            self._serve(incoming)
