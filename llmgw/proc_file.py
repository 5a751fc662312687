"""A file of the kernel's that is read a few times a second."""

from __future__ import annotations

import os


class ProcFile:
    """Opened at the first reading and kept: to open a file is dearer than to read it.

    Nothing is opened before, so ``/proc/self`` is the process that reads, not the one that forked it.

    :param path: of a file below ``/proc``; 4 KiB of it are read at most.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor: int | None = None

    def read(self) -> bytes:
        """What it says now.

        :raise OSError: it cannot be opened or read. The next reading tries anew.
        """
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(self._descriptor, 4096, 0)
        except OSError:
            self._close()
            raise

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = _close
