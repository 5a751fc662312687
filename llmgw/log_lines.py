"""The gateway's own log in other forms: observers for ``twistd --logger``.

``twistd -n --logger=llmgw.log_lines.json_lines llmgw …`` writes one JSON object a
line, ``--logger=llmgw.log_lines.journal`` lines without a time and with a priority,
as systemd's journal takes them from standard output. A factory of your own, of no
arguments and returning an ``ILogObserver``, is named the same way.

:source: sd-daemon(3) for the priorities; ``twisted.logger`` for the events.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

import msgspec
from twisted.logger import ILogObserver, LogEvent, LogLevel, formatEvent
from zope.interface import implementer

LONGEST = 16_384
"""Characters of one text; what is longer is cut."""
_PRIORITY = {LogLevel.debug: 7, LogLevel.info: 6, LogLevel.warn: 4, LogLevel.error: 3, LogLevel.critical: 2}
_OWN = frozenset(
    (
        *("format", "isError", "failure", "message", "time", "system", "why"),
        *("at", "level", "source", "text", "traceback"),
    )
)
_encode = msgspec.json.Encoder(enc_hook=str).encode


def json_lines() -> ILogObserver:
    """For ``--logger``: JSON lines on standard output."""
    return JsonLines(_stdout())


def journal() -> ILogObserver:
    """For ``--logger``: lines for the journal on standard output."""
    return Journal(_stdout())


def _stdout() -> BinaryIO:
    # Not sys.stdout, which twistd makes into a log of its own.
    assert sys.__stdout__ is not None
    return cast(BinaryIO, sys.__stdout__.buffer)


@implementer(ILogObserver)
class JsonLines:
    """``at`` (Unix seconds), ``level``, ``source`` (the Python module that speaks), ``text``, ``traceback``
    if there is one, and each field of the event that is a plain value, under its own name.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def __call__(self, event: LogEvent) -> None:
        """Write one line. Never raises for the sake of what an event holds."""
        line: dict[str, Any] = {
            "at": round(float(event.get("log_time", 0.0)), 3),
            "level": _level(event).name,
            "source": str(event.get("log_namespace", "")),
            "text": _text(event),
        }
        traceback = _traceback(event)
        if traceback:
            line["traceback"] = traceback
        line.update(_fields(event))
        _write(self._out, _encode(line) + b"\n")


@implementer(ILogObserver)
class Journal:
    """``<6>source: text``; each line of a traceback is one of the same priority."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def __call__(self, event: LogEvent) -> None:
        """Write one line, or as many as a traceback has."""
        mark = f"<{_PRIORITY.get(_level(event), 6)}>"
        source = event.get("log_namespace", "")
        text = f"{source}: {_text(event)}" if source else _text(event)
        lines = [*text.splitlines(), *_traceback(event).splitlines()]
        _write(self._out, "".join(f"{mark}{line}\n" for line in lines).encode("utf-8", "replace"))


def _level(event: LogEvent) -> Any:
    return event.get("log_level") or (LogLevel.critical if event.get("isError") else LogLevel.info)


def _text(event: LogEvent) -> str:
    return (formatEvent(event) or "")[:LONGEST]


def _traceback(event: LogEvent) -> str:
    failure = event.get("log_failure") or event.get("failure")
    return "" if failure is None else str(failure.getTraceback())[:LONGEST]


def _fields(event: LogEvent) -> Mapping[str, Any]:
    """What a message names: plain values only, so that no secret comes out of an object."""
    return {
        key: value[:LONGEST] if isinstance(value, str) else value
        for key, value in event.items()
        if not key.startswith("log_")
        and key not in _OWN
        and (isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)))
    }


def _write(out: BinaryIO, data: bytes) -> None:
    try:
        out.write(data)
        out.flush()
    except (OSError, ValueError):
        pass  # nobody reads it any more; the gateway goes on
