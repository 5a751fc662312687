"""How faults are worded: key paths, values as the file has them, hints.

Everything here gives one short line, whatever it is given: a fault stands in
logs and on terminals, and a file may hold control characters or a megabyte.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable

_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a float"),
    (str, "a string"),
    (list, "an array"),
    (dict, "a table"),
)


def key_path(where: str, name: str) -> str:
    """``where`` with ``name`` below it, quoted when it is no bare TOML key."""
    bare = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name[:80])
    return f"{where}.{bare}" if where else bare


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean …?`` with the nearest of ``known``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def shown(value: object) -> str:
    """``value`` as in the file, of at most 80 characters."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        text = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
    elif isinstance(value, bool | int | float):
        text = str(value).lower()
    else:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:76]}..."


def type_of(value: object) -> str:
    """The TOML type of ``value``, with its article."""
    # The order counts: a boolean is a Python int.
    return next((words for kind, words in _TYPES if isinstance(value, kind)), "a date or time")


def bounds(above: float | None, least: float | None, most: float | None) -> str:
    """``above 0 and at most 10``; each bound may be missing.

    :param above: exclusive; the other two are inclusive.
    """
    return " and ".join(
        f"{word} {bound:g}" if bound < 1e6 else f"{word} {bound:.0f}"
        for word, bound in (("above", above), ("at least", least), ("at most", most))
        if bound is not None
    )


def cause(error: Exception) -> str:
    """Why a file could not be had, without its name."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
