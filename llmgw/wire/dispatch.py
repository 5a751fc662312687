"""Dispatch of reactor events to protocols without a logging context around each.

The stock reactors run every read and write through ``log.callWithLogger``, which sets up a
context so that *legacy* log lines (``twisted.python.log.msg``) begin with the protocol's
name: five calls and a dictionary for each event of each stream. Nothing here logs that way.
:func:`without_log_context` replaces that public function in this process by one that keeps
its other purpose: an exception is logged and the reactor goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.python import log
from twisted.python.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Callable


def call_plainly(logger: Any, func: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Run ``func``; what it raises is logged, as ``log.callWithLogger`` does.

    :param logger: the receiver of the event; not used.
    """
    try:
        return func(*args, **kw)
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.err(Failure())
        return None


def without_log_context() -> None:
    """Use :func:`call_plainly` from now on. For a process that is a gateway and nothing else."""
    log.callWithLogger = call_plainly
