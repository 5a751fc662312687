"""How a JSON request body may be built, found out before anybody builds objects from it.

A few passes over the bytes, each at C speed and linear in their number:

:func:`few_openers` passes the many bodies that have fewer brackets, inside strings
or outside, than may be nested.

:func:`check_shape` checks the others. It bounds the nesting, the number of structural
characters and the length of numbers: it deletes everything but brackets, commas and
quotes, then drops every second piece between quotes, since that is the inside of a
string.

A known weakness: ``check_shape`` runs before the parser, which must not see a JSON bomb.
For text that is not JSON at all it may therefore name a limit where the parser would
have named the bad byte.

:source: RFC 8259 (JSON, sections 7 and 9).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Generator
from itertools import accumulate

import msgspec

from llmgw.errors import InvalidRequest


class BodyLimits(msgspec.Struct, frozen=True, eq=False):
    """What a request body may hold. Made once; compared by identity, as it is part of cache keys.

    :param depth: nested objects and arrays, the outermost included.
    :param structural: characters ``{``, ``[`` and ``,`` outside strings.
    :param number_digits: digits in a row outside strings.
    :param members: keys of the top-level object.
    :param messages: elements of ``messages``.
    :param tools: elements of ``tools``.
    :param stop: elements of ``stop`` or ``stop_sequences``.
    :param n: choices asked for (``n``, ``n_cmpl``).
    :param model_chars: characters of a model's name.
    """

    depth: int = 64
    structural: int = 100_000
    number_digits: int = 64
    members: int = 1024
    messages: int = 2048
    tools: int = 256
    stop: int = 16
    n: int = 8
    model_chars: int = 256


_WINDOW = 16_384
"""Bytes looked at in one go: few enough to stop early and to stay in a core's cache."""
_STEP_BYTES = 1 << 20
"""Bytes looked at in one step."""
_GAP = 256
"""So many bytes of a string without a quote are worth skipping."""

_QUOTE = b'"'
_BACKSLASH = ord("\\")
# Only these two escapes can confuse a search for quotes.
_HARD_ESCAPE = re.compile(rb'\\["\\]')
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_\\"


_FOLD = bytes.maketrans(b"[]", b"{}")
_NESTING_ONLY = bytes(byte for byte in range(256) if byte not in b'{}[]"')
_WITH = {kept: bytes(byte for byte in range(256) if byte not in b'{}[]"' + kept) for kept in (b",", b":")}
_STEP = bytes(1 if byte == 0x7B else 255 for byte in range(256))  # read as signed: +1, -1
_DIGITS = bytes.maketrans(b"0123456789", b"0000000000")


class Shape(msgspec.Struct, frozen=True, gc=False):
    """What :func:`check_shape` found out on the way.

    :param opened: objects and arrays in the body.
    :param opaque_bytes: bytes of long strings that look like base64 (images, audio) and
        are therefore not prompt text. Every such string over 16 KiB is found, shorter
        ones only by chance.
    :param separators: commas, or colons, outside strings; 0 where they need not be counted.
    """

    opened: int
    opaque_bytes: int
    separators: int = 0


_FEW_DIGITS = 64


def few_openers(body: bytes, limits: BodyLimits) -> int | None:
    """Pass a common body without telling strings from the rest.

    :return: an upper bound of its objects and arrays, if they are so few that
        :func:`check_shape` would certainly pass the body and find nothing opaque;
        ``None`` decides nothing.
    """
    size = len(body)
    if size > limits.structural or limits.number_digits < _FEW_DIGITS:
        return None
    if size > _WINDOW and _may_be_opaque(body):
        return None
    # For rare bytes, replace() is far quicker than count().
    opened = 2 * size - len(body.replace(b"{", b"")) - len(body.replace(b"[", b""))
    # 65 digits in a row put four digits into every sixteenth byte.
    if opened > limits.depth or b"0000" in body[::16].translate(_DIGITS):
        return None
    return opened


def _may_be_opaque(body: bytes) -> bool:
    """Whether a string longer than a window could look like base64: it would cover one of the samples."""
    return not all(
        body[start : start + _GAP].translate(None, _BASE64) for start in range(0, len(body), _WINDOW // 2)
    )


def check_shape(body: bytes, limits: BodyLimits, *, exempt: bool = False) -> Shape:
    """Refuse what nests too deeply, has too much structure, or too long numbers.

    :param exempt: count colons instead of commas: embeddings and token arrays are long flat
        lists. Brackets and members of objects are still counted, since they cost memory.
    :raise InvalidRequest: naming the limit.
    """
    steps = shape_steps(body, limits, exempt=exempt)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            shape: Shape = end.value
            return shape


def shape_steps(body: bytes, limits: BodyLimits, *, exempt: bool = False) -> Generator[None, None, Shape]:
    """:func:`check_shape` in steps of a few milliseconds, for bodies so large that other
    requests would be held up: 20 MB of escapes take a tenth of a second."""
    size = len(body)
    looked = 0
    # A body this short cannot exceed the limit, and without separators there is less to look at.
    separator = b":" if exempt else b","
    with_separators = size > limits.structural
    drop = _WITH[separator] if with_separators else _NESTING_ONLY
    opened = separators = depth = opaque = position = 0
    in_string = False
    while position < size:
        if in_string:
            quote = body.find(_QUOTE, position)
            if quote < 0:
                break  # the parser will report where
            if quote - position >= _GAP:
                if not body[position : position + _GAP].translate(None, _BASE64):
                    opaque += quote - body.rfind(_QUOTE, 0, position) - 1
                position = _before_quote(body, position, quote)
        window = _window(body, position)
        pieces = _unescaped(window).translate(_FOLD, drop).replace(b'""', b"").split(_QUOTE)
        outside = b"".join(pieces[in_string::2])
        if outside:
            up = outside.count(b"{")
            opened += up
            if with_separators:
                separators += outside.count(separator)
                outside = outside.translate(None, separator)
            if opened + separators > limits.structural:
                raise InvalidRequest(f"the body has more than {limits.structural} structural characters")
            if depth + _highest(outside, limits.depth - depth) > limits.depth:
                raise InvalidRequest(f"the body is nested deeper than {limits.depth}")
            depth += 2 * up - len(outside)
        if _has_long_number(body, position, len(window), in_string, limits.number_digits + 1):
            raise InvalidRequest(f"the body has a number of more than {limits.number_digits} digits")
        in_string ^= not len(pieces) & 1
        position += len(window)
        looked += len(window)
        if looked >= _STEP_BYTES:
            looked = 0
            yield
    return Shape(opened, opaque, separators)


def _before_quote(body: bytes, position: int, quote: int) -> int:
    """Where to continue in a string whose next quote is at ``quote``: never inside an escape."""
    if body[quote - 1] != _BACKSLASH:
        return quote
    gap = body[position:quote]
    return quote - (len(gap) - len(gap.rstrip(b"\\"))) % 2


def _window(body: bytes, position: int) -> bytes:
    """The next bytes, never ending inside an escape."""
    window = body[position : position + _WINDOW]
    if window[-1] == _BACKSLASH and (len(window) - len(window.rstrip(b"\\"))) % 2:
        # No JSON text ends with a lone backslash; the parser will report it.
        return window[:-1] or window
    return window


def _unescaped(text: bytes) -> bytes:
    """``text`` without the escapes of quote and backslash, so that every quote left delimits a string."""
    if b"\\" not in text:
        return text
    # Few backslashes: jump from one to the next. Many: two plain passes are quicker.
    if text.count(b"\\") < len(text) >> 5:
        return _HARD_ESCAPE.sub(b"", text)
    return text.replace(b"\\\\", b"").replace(b'\\"', b"")


def _highest(nesting: bytes, room: int) -> int:
    """How far ``nesting`` (``{`` up, ``}`` down) rises above its start, at least 0.

    :param room: an upper bound is good enough if it does not exceed this.
    """
    # A dip "}{" has its own height on both sides: without it the highest point stays.
    bound = nesting.replace(b"}{", b"").count(b"{")
    if bound <= room:
        return bound
    return max(accumulate(array("b", nesting.translate(_STEP)), initial=0))


def _has_long_number(body: bytes, start: int, size: int, in_string: bool, run: int) -> bool:
    """Whether ``run`` digits in a row begin in the window, outside strings.

    Looking at about every sixteenth byte settles nearly all text: a run of digits that
    long cannot slip between the samples. Only then follow the more expensive checks.
    """
    stride = run // 4 or 1
    end = start + size + run
    if b"0" * (run // stride) not in body[start:end:stride].translate(_DIGITS):
        return False
    window, digits = body[start:end], b"0" * run
    if digits not in window.translate(_DIGITS):
        return False
    outside = b"".join(_unescaped(window).split(_QUOTE)[in_string::2])
    return digits in outside.translate(_DIGITS)
