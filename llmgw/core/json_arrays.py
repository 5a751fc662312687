"""How long an array of a request body is, without building more of it than the limit allows.

An array of millions of empty strings is a few megabytes of text, and takes a gigabyte
once each element is an object.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

import msgspec
from msgspec.structs import astuple

MAX_FIELDS = 4096
"""For limits above this the whole list is built: a struct of more fields is not worth making."""

_OPEN_BRACE, _OPEN_BRACKET = b"{["
_NUMBER_OR_END = b"-0123456789]"
_ABSENT = msgspec.Raw()
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_first_byte = re.compile(rb"\[[ \t\r\n]*(.)").match


def count_prompts(raw: msgspec.Raw, limit: int) -> int:
    """The number of prompts that a ``prompt`` holds, each of which is answered by itself.

    An array with numbers in it is one prompt, given as tokens, and may be long.

    :param limit: counting stops at one above this.
    """
    text = memoryview(raw)
    begin = _first_byte(text)
    if begin is None or begin[1] in _NUMBER_OR_END:
        return 1
    entries = _first(text, limit + 1)
    return 1 if any(memoryview(each)[0] in _NUMBER_OR_END for each in entries) else len(entries)


def count_elements(raw: msgspec.Raw, limit: int) -> int:
    """The number of elements of an array; 0 for any other value.

    :param limit: counting stops at one above this.
    """
    text = memoryview(raw)
    return len(_first(text, limit + 1)) if text[0] == _OPEN_BRACKET else 0


def is_longer(raw: msgspec.Raw | bytes, limit: int, opened: int) -> bool:
    """Whether ``raw`` is an array of more than ``limit`` elements.

    :param opened: the number of objects and arrays in the whole body, or an upper bound. An
        array whose first element is an object is taken to hold objects only, so most
        ``messages`` need no second look.
    """
    if len(raw) <= 2 * limit:
        return False
    text = memoryview(raw)
    if text[0] != _OPEN_BRACKET or (text[1] == _OPEN_BRACE and opened <= limit):
        return False
    if limit > MAX_FIELDS:
        return len(_elements(text)) > limit
    try:
        _row(limit, strict=True)(text)
    except msgspec.ValidationError:
        return True
    return False


def _first(text: memoryview, limit: int) -> list[msgspec.Raw]:
    """The first elements of an array, ``limit`` or fewer."""
    if limit > MAX_FIELDS or len(text) <= 2 * limit:
        return _elements(text)
    return [each for each in astuple(_row(limit, strict=False)(text)) if each]


@lru_cache(maxsize=16)
def _row(limit: int, *, strict: bool) -> Callable[[memoryview], msgspec.Struct]:
    """A decoder that reads an array as the fields of a struct. Elements beyond the last field
    are not built; if ``strict`` they are an error, and are not even read."""
    names = [(f"e{index}", msgspec.Raw, _ABSENT) for index in range(limit)]
    row = msgspec.defstruct("_Row", names, array_like=True, forbid_unknown_fields=strict, frozen=True)
    return msgspec.json.Decoder(row).decode
