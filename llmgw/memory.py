"""How full memory is: this process, its control group, its machine.

The limit is the operator's, else the tightest of the process's control groups
(version 2 or 1), else the machine's memory. Within a control group the whole
group counts, as it is the group that is killed; but only once this process is a
good part of it, since shedding requests frees nothing of what others hold.

:source: Linux ``Documentation/admin-guide/cgroup-v2.rst`` (``memory.current``,
    ``memory.max``, ``memory.stat``) and ``cgroup-v1/memory.rst``; ``proc(5)``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from llmgw.proc_file import ProcFile

OWN_SHARE = 0.05
"""Below this share of the limit the process itself is not what fills the group."""

_libc = ctypes.CDLL(None)
_trim = getattr(_libc, "malloc_trim", None)
_tune = getattr(_libc, "mallopt", None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_OWN_MAPPING_BYTES = 8 << 20
_KEPT_BYTES = 32 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# version: usage, limit, the key in memory.stat of what the kernel would give up first
_FILES = {
    2: ("memory.current", "memory.max", "inactive_file"),
    1: ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
}


def keep_freed() -> None:
    """Let the allocator keep some memory that was freed, in place of giving it back at once.

    The copies of a prompt with an image are megabytes; each page that the kernel takes and
    gives anew costs a fault, which was two thirds of such a request. What is kept too long
    :meth:`Memory.give_back` returns. Larger blocks go back as soon as they are free.

    :source: ``mallopt(3)``; other allocators than glibc's are left as they are.
    """
    if _tune is not None:
        _tune(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
        _tune(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class Memory:
    """Reads the figures anew at each :meth:`share`.

    :ivar own_bytes: what the process itself had in memory at the last one; 0 if unknown.
    :param limit_bytes: the operator's limit for this process; ``None``: find one.
    :param root: where ``proc`` and ``sys`` are.
    """

    def __init__(self, limit_bytes: int | None = None, root: str = "/") -> None:
        self._root = Path(root)
        self._statm = ProcFile(str(self._root / "proc/self/statm"))
        self._folder: Path | None = None
        self._version = 2
        self.limit_bytes = limit_bytes
        self.own_bytes = 0
        if limit_bytes is None:
            self._find_limit()

    def share(self) -> float | None:
        """Share of the limit in use; ``None`` where the system does not tell."""
        limit = self.limit_bytes
        own = self._own_bytes()
        self.own_bytes = own or 0
        if limit is None or own is None:
            return None
        share = own / limit
        if self._folder is None or share < OWN_SHARE:
            return share
        usage_file, _, given_up = _FILES[self._version]
        usage = _number(self._folder / usage_file)
        if usage is None:
            return share
        return max(share, (usage - _stat(self._folder / "memory.stat", given_up)) / limit)

    def give_back(self) -> None:
        """Return free memory to the system, and look again what is left.

        glibc keeps what a burst of connections has freed, and it would count as used
        for ever. Takes about a millisecond for each 10 MB (``malloc_trim(3)``).
        """
        if _trim is not None:
            _trim(0)
        self.own_bytes = self._own_bytes() or 0

    def _own_bytes(self) -> int | None:
        try:
            return int(self._statm.read().split()[1]) * _PAGE_BYTES
        except (OSError, ValueError, IndexError):
            return None

    def _find_limit(self) -> None:
        total = _stat(self._root / "proc/meminfo", "MemTotal:") * 1024
        least = total or None
        for version, folder in self._groups():
            limit = _number(folder / _FILES[version][1])
            # "No limit" is a huge number in version 1, and the word "max" in 2.
            if limit and (least is None or limit < least):
                least, self._folder, self._version = limit, folder, version
        self.limit_bytes = least

    def _groups(self) -> Iterator[tuple[int, Path]]:
        """The process's groups and those around them.

        In a container the paths may be the host's: then only the topmost is there.
        """
        try:
            lines = (self._root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            return
        mount = self._root / "sys/fs/cgroup"
        for line in lines:
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers == "":
                version, top = 2, mount
            elif "memory" in controllers.split(","):
                version, top = 1, mount / "memory"
            else:
                continue
            folder = top / path.lstrip("/")
            while folder != top and top in folder.parents:
                yield version, folder
                folder = folder.parent
            yield version, top


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path, key: str) -> int:
    """A figure of a file with a word and a number in each line; 0 if there is none."""
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value.split()[0])
    except (OSError, ValueError, IndexError):
        pass
    return 0
