"""Which modes a file with a secret in it may have; one rule for keys, peppers and tokens."""

from __future__ import annotations

import os
import shlex
import stat

from llmgw.errors import ConfigError, ConfigFault


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
        with open(path, "rb") as file:
            # The open file is asked, not the name: nobody can swap it in between.
            fault = mode_fault(os.fstat(file.fileno()).st_mode, path)
            if fault:
                raise ConfigError([ConfigFault("", fault)], path)
            return file.read()
    except OSError as error:
        raise ConfigError([ConfigFault("", f"cannot be read: {error.strerror}")], path) from None
