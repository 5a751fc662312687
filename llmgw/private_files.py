"""Files with a secret in them: which modes they may have, and how they are replaced.

One rule for keys, peppers and tokens.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from llmgw.errors import ConfigError, ConfigFault
from llmgw.plain_files import open_plain, read_whole


def mode_fault(mode: int, path: str) -> str | None:
    """What is wrong with the mode of the private file at ``path``, and the cure; ``None`` if nothing.

    Its group may read it, as Kubernetes mounts secrets and packages install
    them (``root:llmgw 0640``); nobody but its owner may change it.

    :param mode: ``st_mode``, or its permission bits alone.
    """
    mode = stat.S_IMODE(mode)
    if not mode & 0o027:
        return None
    what = "open to other users" if mode & 0o007 else "writable by its group"
    named = shlex.quote(path) if path.isprintable() else "it"
    return f"is {what} (mode {mode:04o}): chmod 600 {named}"


def read_private(path: str) -> bytes:
    """Read a file that nobody else may read.

    :raise ConfigError: it cannot be read, others may read it, or its group may write it.
    """
    try:
        with open_plain(path) as file:
            fault = mode_fault(os.fstat(file.fileno()).st_mode, path)
            if fault:
                raise ConfigError([ConfigFault("", fault)], path)
            return read_whole(file)
    except OSError as error:
        raise ConfigError([ConfigFault("", f"cannot be read: {error.strerror}")], path) from None


def replace_private(target: str, text: str, before: os.stat_result | None) -> None:
    """Put ``text`` in the place of a file, wholly or not at all.

    :param target: the file itself, not a link to it.
    :param before: whose owner and mode it keeps; ``None``: it is new, with mode 0600.
    :raise OSError: it cannot be written; what was there stays.
    """
    folder = os.path.dirname(target)
    descriptor, temporary = tempfile.mkstemp(prefix=".new-", dir=folder)
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            if before is not None:
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    # The new name must survive a power cut too.
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold a lock among processes; wait for it as long as it takes.

    :param path: a file of its own, which stays: one that is replaced is another
        after each change, and a lock on the old one would guard nothing.
    :raise OSError: it cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
