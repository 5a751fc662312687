"""The access log: one JSON object a line, written in batches.

msgspec escapes control characters, so a model name or a user agent with a
line end in it still makes one line (log injection).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, BinaryIO

import msgspec
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

FLUSH_S = 1.0
FLUSH_LINES = 500


class AccessLog:
    """Appends to a file, or to standard output for ``-``.

    A line waits for at most :data:`FLUSH_S` or :data:`FLUSH_LINES` others. When
    the disk takes no more, lines are dropped and counted; requests go on.

    :ivar dropped: lines lost to write errors.
    """

    log = Logger()

    def __init__(self, path: str, reactor: IReactorTime) -> None:
        self.path = path
        self.dropped = 0
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []
        self._file: BinaryIO | None = None
        self._failing = False
        self._loop = LoopingCall(self.flush)
        self._loop.clock = reactor

    def start(self) -> None:
        """Open the file.

        :raise OSError: it cannot be opened for appending.
        """
        self._open()
        self._loop.start(FLUSH_S, now=False)

    def stop(self) -> None:
        """Write what waits and close."""
        if self._loop.running:
            self._loop.stop()
        self.flush()
        if self._file is not None and self.path != "-":
            self._file.close()
        self._file = None

    def reopen(self) -> None:
        """Open the path again, after log rotation moved the old file away."""
        self.flush()
        if self._file is not None and self.path != "-":
            self._file.close()
            self._open()

    def write(self, line: msgspec.Struct) -> None:
        """Add one line."""
        self._lines.append(self._encode(line))
        if len(self._lines) >= FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what waits. Never raises for the disk's sake."""
        if not self._lines or self._file is None:
            return
        lines, self._lines = self._lines, []
        lines.append(b"")
        try:
            self._file.write(b"\n".join(lines))
            self._file.flush()
            self._failing = False
        except OSError as error:
            self.dropped += len(lines) - 1
            if not self._failing:
                self._failing = True
                self.log.error(
                    "access log {path}: {error}; lines are dropped", path=self.path, error=str(error)
                )

    def _open(self) -> None:
        if self.path == "-":
            # Not sys.stdout: twistd has put its log there.
            self._file = getattr(sys.__stdout__, "buffer", None)
        else:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
            self._file = os.fdopen(descriptor, "ab", buffering=0)
