"""The signals that the daemon obeys.

``twistd`` would die of SIGHUP, and would leave with the signal as its exit status
on SIGTERM. It keeps SIGUSR1 for itself: that one begins a new log file.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any


def take_signals(
    reactor: Any,
    *,
    terminate: Callable[[bool], None],
    reload: Callable[[], None],
    upgrade: Callable[[], None] | None = None,
) -> None:
    """Let signals call, in the reactor's turn. Nothing happens in other threads than the main one.

    :param terminate: on SIGTERM with ``False``, on SIGINT with ``True``.
    :param reload: on SIGHUP.
    :param upgrade: on SIGUSR2, if given.
    """
    _take(reactor, signal.SIGHUP, reload)
    if upgrade is not None:
        _take(reactor, signal.SIGUSR2, upgrade)

    def when_running() -> None:
        # The reactor takes these two for itself when it begins to run.
        _take(reactor, signal.SIGTERM, lambda: terminate(False))
        _take(reactor, signal.SIGINT, lambda: terminate(True))

    reactor.callWhenRunning(when_running)


def _take(reactor: Any, number: signal.Signals, action: Callable[[], None]) -> None:
    try:
        signal.signal(number, lambda *_: reactor.callFromThread(action))
    except ValueError:
        return  # not the main thread: somebody else's process
