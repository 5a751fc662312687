"""The files that a configuration names: where they are, and that secrets among them are kept.

Nothing else of this package touches a disk, and this module only through
:class:`FileSeam`, so that a configuration can be checked without one. Relative
paths come out absolute. Contents of files are never quoted in a fault.
"""

from __future__ import annotations

import os
import re
import stat
from typing import Protocol

from llmgw.config.words import cause, shown
from llmgw.plain_files import NOT_PLAIN, read_plain
from llmgw.private_files import mode_fault
from llmgw.values import Secret


class FileSeam(Protocol):
    """The files a configuration names."""

    def read(self, path: str) -> bytes:
        """:raise OSError: it cannot be read."""

    def mode(self, path: str) -> int:
        """:return: ``st_mode``, symbolic links followed. :raise OSError: it is not there."""


class _Disk:
    """The real ones."""

    def read(self, path: str) -> bytes:
        return read_plain(path)

    def mode(self, path: str) -> int:
        return os.stat(path).st_mode


DISK: FileSeam = _Disk()


class Place(Protocol):
    """Where a path stands: what the functions below ask of a reader.

    :ivar base_dir: absolute; relative paths count from here.
    :ivar files: ``None``: whoever wrote this text may not name files.
    """

    base_dir: str
    files: FileSeam | None


def absolute_path(place: Place, path: str) -> str:
    """``path``, which need not be there, counted from the folder of the place.

    :raise ValueError: no file can have that name.
    """
    if "\0" in path:
        raise ValueError("a path cannot hold a NUL character")
    return os.path.join(place.base_dir, path)


def log_path(place: Place, where: str, path: str) -> str:
    """``-`` is standard output and empty is off; else absolute."""
    return path if path in ("", "-") else absolute_path(place, path)


def auth_spec(place: Place, where: str, text: str) -> str:
    """A ``strcred`` string; the path in ``keys:<path>`` is made absolute.

    :raise ValueError: that path is missing.
    """
    kind, colon, path = text.partition(":")
    if kind != "keys":
        return text
    if not path:
        raise ValueError("keys: needs the path of the key file")
    return kind + colon + absolute_path(place, path)


def existing_file(place: Place, where: str, path: str) -> str:
    """The absolute path of a file that is there.

    :raise ValueError: it is not, is a folder, a pipe or the like, or no file may be named here.
    """
    path = absolute_path(place, path)
    _mode(place, path)
    return path


def existing_folder(place: Place, path: str) -> str:
    """The absolute path of a folder that is there.

    :raise ValueError: it is not, is none, or nothing may be named here.
    """
    path = absolute_path(place, path)
    if not stat.S_ISDIR(_mode_of(place, path)):
        raise ValueError(f"{shown(path)} is no folder")
    return path


def private_file(place: Place, path: str) -> str:
    """The absolute path of a file that is there and that others can neither read nor change.

    :raise ValueError: as :func:`existing_file`, or its mode is not safe.
    """
    path = absolute_path(place, path)
    fault = mode_fault(_mode(place, path), path)
    if fault:
        raise ValueError(f"{shown(path)} {fault}")
    return path


def private_path(place: Place, where: str, path: str) -> str:
    """As :func:`private_file`."""
    return private_file(place, path)


def secret_file(place: Place, where: str, path: str) -> Secret:
    """The one word of visible ASCII in a private file, white space around it removed.

    :raise ValueError: as :func:`private_file`, or there is no such word in it.
    """
    path = private_file(place, path)
    assert place.files is not None  # else private_file would have raised
    try:
        text = place.files.read(path).decode("ascii", "replace").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {shown(path)}: {cause(error)}") from None
    if not text:
        raise ValueError(f"{shown(path)} is empty")
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise ValueError(f"{shown(path)} must hold one word of visible ASCII")
    return Secret(text)


def _mode(place: Place, path: str) -> int:
    mode = _mode_of(place, path)
    if not stat.S_ISREG(mode):
        raise ValueError(f"cannot read {shown(path)}: {NOT_PLAIN}")
    return mode


def _mode_of(place: Place, path: str) -> int:
    if place.files is None:
        raise ValueError("may not name a file here")
    try:
        return place.files.mode(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {shown(path)}: {cause(error)}") from None
