"""``twistd --reactor=lean``: Twisted's epoll reactor with less around each event.

Named by the reactor plugin in ``twisted/plugins/llmgw_dropin.py``; Twisted imports
this module only when that reactor was asked for, and only Linux has it.

What is left out of the usual event, which is that something can be read: a context
for lines of the legacy log, and two calls of functions. What is left out of the usual
turn, in which no timer is due: a handler of failures, and half of the looks at the
clock. What is to be called at the end of a turn has a list of its own. All other
events, and every end of a connection, go Twisted's way.

Private names of Twisted are used (``_pendingTimedCalls``, ``_newTimedCalls``,
``_justStopped``, ``_started``, ``_poller``, ``_selectables``, ``_doReadOrWrite``,
``_disconnectSelectable``); its own tests of reactors hold them, run with this one
(``tests/wire/test_lean_reactor.py``).
"""

from __future__ import annotations

import errno
import sys
from select import EPOLLIN
from typing import TYPE_CHECKING, Any

from twisted.internet.epollreactor import EPollReactor
from twisted.internet.main import installReactor
from twisted.logger import Logger
from twisted.python import log

if TYPE_CHECKING:
    from collections.abc import Callable

FAR_S = 1e6
"""A timer further off is left to Twisted, which knows how long the kernel can wait."""

_in_main_loop = Logger().failureHandler("in the main loop")


class LeanReactor(EPollReactor):
    """An ``EPollReactor``; what else it can is :meth:`call_at_end_of_turn`."""

    def __init__(self) -> None:
        self._at_end: list[Callable[[], None]] = []
        super().__init__()

    def call_at_end_of_turn(self, call: Callable[[], None]) -> None:
        """Call ``call`` when all that the kernel had to tell in this turn has been handled;
        outside of a turn, at the end of the next. From the reactor's own thread only."""
        self._at_end.append(call)

    def mainLoop(self) -> None:
        """Turn until stopped: as ``ReactorBase.mainLoop``, which looks at the clock twice and
        sets up a handler of failures for each turn."""
        while self._started:
            with _in_main_loop:
                while self._started:
                    self._turn()

    def _turn(self) -> None:
        timed = self._pendingTimedCalls
        if self._newTimedCalls or self.threadCallQueue or self._justStopped or not timed:
            self.runUntilCurrent()
            wait_s = self.timeout()
        else:
            wait_s = timed[0].time - self.seconds()
            if not 0 < wait_s < FAR_S:
                self.runUntilCurrent()
                wait_s = self.timeout()
        self.doPoll(wait_s if self.running else 0)

    def doPoll(self, timeout: float | None) -> None:
        """Wait, and handle what has happened. See ``EPollReactor.doPoll``.

        :param timeout: seconds; ``None`` for ever.
        """
        if self._at_end:
            timeout = 0
        selectables = self._selectables
        try:
            ready = self._poller.poll(-1 if timeout is None else timeout, len(selectables))
        except OSError as error:
            if error.errno == errno.EINTR:
                return
            raise
        for fd, event in ready:
            selectable = selectables.get(fd)
            if selectable is None:
                continue
            why: Any = None
            try:
                if event == EPOLLIN and selectable.fileno() != -1:
                    why = selectable.doRead()
                else:
                    log.callWithLogger(selectable, self._doReadOrWrite, selectable, fd, event)
            except BaseException:
                why = sys.exc_info()[1]
                log.err()
            if why:
                log.callWithLogger(selectable, self._disconnectSelectable, selectable, why, True)
        if self._at_end:
            self._end_turn()

    # This is the name by which the main loop calls it.
    doIteration = doPoll

    def _end_turn(self) -> None:
        calls, self._at_end = self._at_end, []
        for call in calls:
            try:
                call()
            except Exception:
                log.err()


def install() -> None:
    """Make it the process's reactor.

    :raise twisted.internet.error.ReactorAlreadyInstalledError: too late.
    """
    installReactor(LeanReactor())
