"""The access log: one JSON object per line, written in batches.

msgspec escapes control characters, so a line end in a model name or a user agent cannot
forge a line (log injection).
"""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
from msgspec import Struct
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

    from llmgw.values import Usage

FLUSH_S = 1.0
FLUSH_LINES = 500

# In the class below ``bytes`` is a field.
Agent = bytes | None


class AccessLine(Struct, omit_defaults=True):
    """One line of the access log, in this order. Times are seconds.

    :param at: wall time at which the head of the request was complete, Unix seconds.
    :param key: the key's id, or ``anonymous``; absent if the request was refused before.
    :param model: the name that the client used; ``target`` the one that the backend was asked for.
    :param why: the router's reason.
    :param attempts: number of backends asked.
    :param failed: those that gave the client nothing, and why.
    :param waited_s: time it waited for a slot (``[admission]``); absent if it did not.
    :param certificate: the subject of the client's certificate (RFC 4514), if one was requested.
    :param ttft_s: from the arrival of the request to that of the first token at our socket.
    :param outcome: ``done``, ``client_gone``, ``cut``, or the error's code.
    """

    at: float
    id: str
    peer: str
    method: str
    route: str
    status: int
    outcome: str
    duration_s: float
    key: str | None = None
    model: str | None = None
    target: str | None = None
    streaming: bool = False
    backend: str | None = None
    why: str | None = None
    attempts: int = 0
    failed: str | None = None
    waited_s: float | None = None
    overhead_s: float | None = None
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    bytes: int = 0
    agent: str | None = None
    certificate: str | None = None

    @classmethod
    def of(
        cls,
        at: float,
        id: str,
        peer: str,
        method: str,
        route: str,
        status: int,
        outcome: str,
        duration_s: float,
        key: str | None,
        model: str | None,
        target: str | None,
        streaming: bool,
        backend: str | None,
        why: str | None,
        attempts: int,
        failed: str,
        waited_s: float,
        overhead_s: float | None,
        ttft_s: float | None,
        used: Usage | None,
        sent_bytes: int,
        agent: Agent,
        certificate: str | None,
    ) -> AccessLine:
        """A line from the raw figures of an :class:`~llmgw.gateway.account.Account`."""
        return cls(
            at=round(at, 3),
            id=id,
            peer=peer,
            method=method,
            route=route,
            status=status,
            outcome=outcome,
            duration_s=round(duration_s, 6),
            key=key,
            model=model[:256] if model else None,
            target=target if target != model else None,
            streaming=streaming,
            backend=backend,
            why=why[:256] if why else None,
            attempts=attempts,
            failed=failed or None,
            waited_s=round(waited_s, 6) or None,
            overhead_s=None if overhead_s is None else round(overhead_s, 6),
            ttft_s=None if ttft_s is None else round(ttft_s, 6),
            prompt_tokens=used.prompt_tokens if used else None,
            cached_tokens=used.cached_tokens if used else None,
            output_tokens=used.output_tokens if used else None,
            bytes=sent_bytes,
            agent=agent[:128].decode("latin-1") if agent else None,
            certificate=certificate,
        )


_UNSAFE = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def _escape_unsafe(line: bytes) -> bytes:
    """Escape also characters that JSON allows, but that control a terminal or end a line for some
    readers: DEL, the C1 controls, line separators, changes of direction."""
    if line.isascii() and b"\x7f" not in line:
        return line
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", line.decode()).encode()


class AccessLog:
    """Appends to a file, or to standard output for ``-``.

    A line waits for at most :data:`FLUSH_S`, or for :data:`FLUSH_LINES` others. If the disk is
    full, lines are dropped and counted; requests go on. If the file was moved away or deleted,
    its path is opened again at the next tick.

    :ivar dropped: lines lost to write errors.
    """

    log = Logger()

    def __init__(self, path: str, reactor: IReactorTime) -> None:
        self.path = path
        self.dropped = 0
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[AccessLine | tuple[Any, ...]] = []
        self._file: BinaryIO | None = None
        self._failing = False
        self._torn = False
        self._place: tuple[int, int] | None = None
        self._stuck = False
        self._loop = LoopingCall(self._tick)
        self._loop.clock = reactor

    def start(self) -> None:
        """Open the file.

        :raise OSError: it cannot be opened for appending.
        """
        self._open()
        self._loop.start(FLUSH_S, now=False)

    def stop(self) -> None:
        """Write what is pending, and close."""
        if self._loop.running:
            self._loop.stop()
        self.flush()
        if self._file is not None and self.path != "-":
            self._file.close()
        self._file = None

    def reopen(self) -> None:
        """Open the path again, after log rotation moved the old file away.

        If that fails, lines go on to the old file.
        """
        self.flush()
        old = self._file
        if old is None or self.path == "-":
            return
        try:
            self._open()
        except OSError as error:
            if not self._stuck:
                self._stuck = True
                self.log.error("access log {path}: not reopened: {error}", path=self.path, error=str(error))
        else:
            self._stuck = False
            old.close()

    def _tick(self) -> None:
        """Every second: write what is pending, and check that the file is still in its place."""
        if self._place is not None and self._place != _place_of(self.path):
            self.reopen()
        self.flush()

    def write(self, line: AccessLine | tuple[Any, ...]) -> None:
        """Add one line, or the arguments of :meth:`AccessLine.of`; it is encoded with its batch."""
        self._lines.append(line)
        if len(self._lines) >= FLUSH_LINES:
            self.flush()

    def write_fault(self, at: float, id: str, peer: str, status: int, outcome: str) -> None:
        """Add a line for malformed bytes, from which no request could be read."""
        self.write(
            AccessLine(
                at=round(at, 3),
                id=id,
                peer=peer,
                method="",
                route="other",
                status=status,
                outcome=outcome,
                duration_s=0.0,
            )
        )

    def flush(self) -> None:
        """Write what is pending. Does not raise if the disk fails."""
        if not self._lines or self._file is None:
            return
        waiting, self._lines = self._lines, []
        try:
            lines = [self._encoded(line) for line in waiting]
        except (TypeError, ValueError):
            lines = list(filter(None, map(self._encoded_if_it_can_be, waiting)))
        lines.append(b"")
        try:
            self._write_all(b"\n".join(lines))
            self._failing = False
        except OSError as error:
            self.dropped += len(lines) - 1
            if not self._failing:
                self._failing = True
                self.log.error(
                    "access log {path}: {error}; lines are dropped", path=self.path, error=str(error)
                )

    def _encoded(self, line: AccessLine | tuple[Any, ...]) -> bytes:
        return _escape_unsafe(self._encode(AccessLine.of(*line) if type(line) is tuple else line))

    def _encoded_if_it_can_be(self, line: AccessLine | tuple[Any, ...]) -> bytes:
        """A line that cannot be encoded (a plugin put something into it) is dropped alone."""
        try:
            return self._encoded(line)
        except (TypeError, ValueError) as error:
            self.dropped += 1
            self.log.error("access log {path}: a line is dropped: {error}", path=self.path, error=str(error))
            return b""

    def _write_all(self, data: bytes) -> None:
        """Write ``data``. A full disk may take a part of it; the next write then ends the torn line."""
        assert self._file is not None
        rest = memoryview(b"\n" + data if self._torn else data)
        while rest:
            written = self._file.write(rest)
            if not written:
                raise BlockingIOError(errno.EAGAIN, "it takes no more now")
            rest = rest[written:]
            self._torn = bool(rest)

    def _open(self) -> None:
        self._torn = False
        if self.path == "-":
            # Not sys.stdout, where twistd has put its log; nor its buffer, which keeps what it cannot write.
            buffer = getattr(sys.__stdout__, "buffer", None)
            self._file = getattr(buffer, "raw", buffer)
        else:
            # A named pipe must not block the gateway, whether it has no reader or no room.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            descriptor = os.open(self.path, flags, 0o640)
            self._file = os.fdopen(descriptor, "ab", buffering=0)
            found = os.fstat(descriptor)
            self._place = (found.st_dev, found.st_ino)


def _place_of(path: str) -> tuple[int, int] | None:
    """The file at ``path``, as device and inode; ``None`` if there is none that we can see."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
