"""Duplicate keys of the objects nested in a body's members.

Given two equal keys, one parser takes the first and another the last, so the value that
was checked need not be the one that is used (RFC 8259 section 4, RFC 7493 section 2.3).
:mod:`.json_members` looks at the top level, this module at everything below.

Common text is settled quickly: where messages hold only keys and strings, there must be
exactly the quotes of what the parser kept; and most clients write compact JSON, which is
byte for byte what msgspec writes after reading it, while a duplicate key would not be
written twice. Other text is read by Python's ``json``, which shows the pairs of each
object before one of them is lost in a dictionary. Text of many megabytes is taken apart
first, in steps.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import msgspec

from llmgw.core.json_members import cut, read_members, shown
from llmgw.core.json_shape import BodyLimits, shape_steps
from llmgw.errors import InvalidRequest

_PIECE_BYTES = 1 << 20
"""Bytes looked at in one step."""
_OPENERS = b"{["
_SPACED, _START = b'": ', 64
"""Text with this in its first bytes is not compact."""
_SHORTEST = len('{"":0,"":0}')

_decode = msgspec.json.Decoder().decode
_decode_texts = msgspec.json.Decoder(list[dict[str, str]]).decode
_encode = msgspec.json.Encoder().encode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


def is_usual(value: bytes) -> bool:
    """Recognise common text that is JSON without duplicate keys.

    :return: ``False`` decides nothing.
    """
    try:
        kept = _decode_texts(value)
    except msgspec.DecodeError:
        return _is_compact(value)
    # A string with escaped quotes has more quotes, too, and is written out for comparison.
    return len(value) - len(value.replace(b'"', b"")) == 4 * sum(map(len, kept)) or _encode(kept) == value


def _is_compact(value: bytes) -> bool:
    if value.find(_SPACED, 0, _START) >= 0:
        return False
    try:
        return _encode(_decode(value)) == value
    except msgspec.DecodeError:
        return False  # also for a number too large for msgspec


def check_pairs(value: bytes) -> None:
    """:func:`check_duplicates` for text that :func:`is_usual` does not recognise."""
    _read_pairs(value.decode())


def check_duplicates(value: bytes) -> None:
    """Look at every object in ``value``.

    :param value: JSON text within the nesting and digits that
        :func:`~llmgw.core.json_shape.check_shape` allows.
    :raise InvalidRequest: naming the key.
    """
    if not is_usual(value):
        check_pairs(value)


def check_members(values: Iterable[msgspec.Raw]) -> None:
    """:func:`check_duplicates` for those values of an object that may hold objects themselves."""
    for value in _with_objects(values):
        check_duplicates(value)


def duplicate_steps(body: bytes, uncounted: BodyLimits | None = None) -> Generator[None, None, None]:
    """:func:`check_duplicates` in steps of a few milliseconds, for bodies so large that
    other requests would be held up.

    :param uncounted: the limits of a body whose commas were not counted.
    :raise InvalidRequest: also for a key of more than 256 characters in an object of more than 1 MiB;
        and for a list of more elements than that with an object in it: only lists of numbers
        and strings may be that long.
    """
    todo, looked = [(body, uncounted)], 0
    while todo:
        value, limits = todo.pop()
        looked += len(value)
        if len(value) <= _PIECE_BYTES:
            check_duplicates(value)
        else:
            inside, limits = yield from _inside(value, limits)
            yield  # what follows copies as many bytes again
            todo += [(text, limits) for text in _with_objects(inside)]
        if looked >= _PIECE_BYTES:
            looked = 0
            yield


def _inside(
    value: bytes, limits: BodyLimits | None
) -> Generator[None, None, tuple[Iterable[msgspec.Raw], BodyLimits | None]]:
    """The values in an object or array, in steps.

    :param limits: as ``uncounted`` of :func:`duplicate_steps`.
    :return: also the limits for the values: ``None`` once their commas have been counted.
    """
    if not value.startswith(b"["):
        return read_members(value, sys.maxsize).values(), limits
    if limits is not None:
        try:
            yield from shape_steps(value, limits)
        except InvalidRequest:
            if (yield from shape_steps(value, limits, exempt=True)).separators:
                raise
            return (), limits  # its braces are inside strings: objects have colons
    return _elements(value), None


def _with_objects(values: Iterable[msgspec.Raw]) -> Sequence[bytes]:
    structures = [
        bytes(value) for value in values if len(value) >= _SHORTEST and memoryview(value)[0] in _OPENERS
    ]
    return [text for text in structures if b"{" in text]


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        key, _ = next(filter(lambda counted: counted[1] > 1, Counter(key for key, _ in pairs).items()))
        raise InvalidRequest(f"the key {shown(key)} stands twice in an object of the body", param=cut(key))


_read_pairs = json.JSONDecoder(object_pairs_hook=_refuse_duplicates).decode
