"""Files that an operator names, read without waiting for anybody.

To open a pipe is to wait for its other end, and a device may go on for ever. Who
names one by mistake is told so, in place of a gateway that neither starts nor
reloads.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

MOST_BYTES = 64 << 20
"""No configuration, key file or bundle of certificates comes near it."""
NOT_PLAIN = "it is no regular file"


def open_plain(path: str) -> BinaryIO:
    """The file at ``path``, open for reading.

    :raise OSError: it cannot be opened, or is a folder, a pipe, a device or the like.
    """
    return open(path, "rb", opener=_open_at_once)


def read_plain(path: str) -> bytes:
    """All that is in the file at ``path``.

    :raise OSError: as :func:`open_plain`, or it cannot be read, or is larger than any that is meant.
    """
    with open_plain(path) as file:
        return read_whole(file)


def read_whole(file: BinaryIO) -> bytes:
    """:raise OSError: it cannot be read, or is larger than any that is meant."""
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MOST_BYTES >> 20} MiB")
    return content


def _open_at_once(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    # The open file is asked, not the name: nobody can swap it in between.
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # for a folder Python has words of its own
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_PLAIN, path)
    return descriptor
