"""The top-level members of a JSON request body: their text, and where each one is.

:func:`read_members` lets ``msgspec`` check the grammar and return the text of each
top-level value. The parser keeps the last of two equal keys, so duplicate keys are
looked for: by adding up lengths; by laying the members out again as Python's ``json``
writes them; and where neither settles it by :func:`find_members`, which walks along the
body and compares it with what the parser kept. The walk also gives each member's offsets.
Duplicate keys of nested objects are left to :mod:`.duplicate_keys`.

:source: RFC 8259 (JSON, sections 4 and 8.1); RFC 7493 (I-JSON, section 2.3 on
    duplicate names).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from llmgw.core.json_shape import BodyLimits
from llmgw.errors import InvalidRequest

Span = tuple[int, int, int]
"""Where a member is: the offsets of its key's quote, of its value, and of the value's end."""

_OPEN_BRACE = ord("{")
_KEY_CHARS = 256
_SPACED_BYTES = 32_768
"""Up to this size a body is laid out again for comparison; walking along a larger one is quicker."""
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)
# White space needs no check here: the parser has accepted it.
_KEY = re.compile(rb'[\s,]*("(?:[^"\\]+|\\.)*")\s*:\s*', re.DOTALL)
_TAIL = re.compile(rb"\s*\}\s*")
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


class _Layout(msgspec.Struct, frozen=True, gc=False):
    """Everything in an object except its values.

    :param fixed: number of bytes of its keys and punctuation, without white space and escapes.
    :param start: its first bytes as Python's ``json`` writes it.
    :param spaced: all of it as ``json`` writes it, with ``%b`` for each value.
    """

    fixed: int
    start: bytes
    spaced: bytes


_USUAL_KEYS = 24


@lru_cache(maxsize=128)
def _usual_layout(*keys: str) -> _Layout:
    # Clients send the same few sets of keys. At most 24 keys of 256 characters: a few megabytes in all.
    _check_lengths(keys)
    names = [b'"%b": ' % key.encode() for key in keys]
    spaced = b", ".join([name.replace(b"%", b"%%") + b"%b" for name in names])
    return _Layout(1 + sum(map(len, names)), b"{" + b"".join(names[:1]), b"{%b}" % spaced)


def read_members(body: bytes, most: int = BodyLimits().members) -> dict[str, msgspec.Raw]:
    """The text of each top-level value, in order, by decoded key.

    ``body`` must be UTF-8 (skipped strings are not looked at) and no deeper
    than :func:`~.json_shape.check_shape` allows. The values are views of it.

    :param most: refuse more members than this.
    :raise InvalidRequest: not JSON (with the byte), not an object, a duplicate key.
    """
    values = _parse(body, most)
    if len(values) <= _USUAL_KEYS:
        layout = _usual_layout(*values)
        if (
            body.startswith(layout.start)
            and len(body) <= _SPACED_BYTES
            and layout.spaced % tuple(values.values()) == body
        ):
            return values
        fixed = layout.fixed
    else:
        _check_lengths(values)
        fixed = 1 + 4 * len(values) + sum(map(len, values))
    # The other bytes are white space, escapes in keys, and duplicate members, the
    # shortest of which is `,"":0`.
    if len(body) - fixed - sum(map(len, values.values())) >= 5:
        _walk(body, values)
    return values


def members_of(value: msgspec.Raw | None) -> dict[str, msgspec.Raw]:
    """The members of a value of valid JSON, each as it came; none if it is not an object."""
    if value is None or memoryview(value)[0] != _OPEN_BRACE:
        return {}
    return _MEMBERS.decode(value)


def find_members(body: bytes, most: int = BodyLimits().members) -> dict[str, Span]:
    """Spans of the top-level members, in order, by decoded key; otherwise as :func:`read_members`."""
    values = _parse(body, most)
    _check_lengths(values)
    return _walk(body, values)


def _parse(body: bytes, most: int) -> dict[str, msgspec.Raw]:
    try:
        values = _MEMBERS.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _not_an_object(body, error) from None
    if len(values) > most:
        raise InvalidRequest(f"the body has more than {most} members")
    return values


def _check_lengths(keys: Iterable[str]) -> None:
    # Matching a key of many megabytes would take many times its size in memory.
    if max(map(len, keys), default=0) > _KEY_CHARS:
        raise InvalidRequest(f"the body has a key of more than {_KEY_CHARS} characters")


def _walk(body: bytes, values: dict[str, msgspec.Raw]) -> dict[str, Span]:
    # Without duplicate keys the parser's keys come in the body's order and its values
    # are the body's text. At the first duplicate one of them differs: the value (the
    # parser kept a later one; only a number can begin with another value, and then the
    # next key does not match), a key, or the end.
    found: dict[str, Span] = {}
    position = body.index(b"{") + 1
    for key, value in values.items():
        name = _KEY.match(body, position)
        if name is None:
            raise _duplicate(body, position)
        token = name[1]
        if token[1:-1] != key.encode() and _STRING.decode(token) != key:
            raise _duplicate(body, position)
        start = name.end()
        if not body.startswith(value, start):
            raise InvalidRequest(f"the key {shown(key)} stands twice in the body", param=cut(key))
        position = start + len(value)
        found[key] = (name.start(1), start, position)
    if _TAIL.fullmatch(body, position) is None:
        raise _duplicate(body, position)
    return found


def _duplicate(body: bytes, position: int) -> InvalidRequest:
    name = _KEY.match(body, position)
    if name is None:
        # The value before is a number, of which the parser kept a shorter duplicate.
        return InvalidRequest(f"a key stands twice in the body (byte {position})")
    key = _STRING.decode(name[1])
    where = name.start(1)
    return InvalidRequest(f"the key {shown(key)} stands twice in the body (byte {where})", param=cut(key))


def _not_an_object(body: bytes, error: Exception) -> InvalidRequest:
    if isinstance(error, msgspec.ValidationError):
        return InvalidRequest("the body must be a JSON object with 'model'")
    if isinstance(error, RecursionError):
        return InvalidRequest("the body is nested too deeply")
    what = str(error).removeprefix("JSON is malformed: ")
    if "utf-16" in what or "hex escape" in what or _HALF_PAIR.search(body[-16:]):
        return InvalidRequest(f"the body has half a surrogate pair in a string: {what}")
    if what == "Input data was truncated":
        what = f"it ends too early (byte {len(body)})"
    return InvalidRequest(f"the body is not valid JSON: {what}")


def cut(name: str) -> str:
    """A client's string as the ``param`` of an error."""
    return name[:64]


def shown(name: str) -> str:
    """A client's string in a message: short, and without anything a terminal would interpret."""
    return ascii(cut(name))
