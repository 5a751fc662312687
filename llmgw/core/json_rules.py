"""Rules that a JSON request body must keep before anybody builds objects from it.

A few looks at the bytes, all at C speed and linear in their number:

:func:`few_openers` clears the many bodies that have fewer brackets, in
strings or out of them, than may be inside each other.

:func:`check_shape` judges the others. It bounds nesting, structural characters
and the length of numbers: it deletes everything but brackets, commas and
quotes, then throws away every second piece between quotes, which is what
strings hold.

:func:`read_members` lets ``msgspec`` prove the grammar and hand out the text of
each top-level value. The last of two equal keys wins there, so doubled keys
are looked for: by adding up lengths, by laying the members out again as
Python's ``json`` does, and where neither proves anything by
:func:`find_members`, which walks along the body and compares what stands there
with what the parser kept. The walk also tells where each member stands. Objects
inside the members are :mod:`.doubled`'s.

A known weakness: ``check_shape`` runs before the parser (a bomb must not reach it),
so its verdict on text that is no JSON at all may name a limit, not the bad byte.

:source: RFC 8259 (JSON, sections 4, 7, 8.1, 9); RFC 7493 (I-JSON, section 2.3
    on doubled names).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Generator, Iterable
from functools import lru_cache
from itertools import accumulate

import msgspec

from llmgw.errors import InvalidRequest


class BodyLimits(msgspec.Struct, frozen=True, eq=False):
    """What a request body may hold. Made once; compared by identity, as keys of what is remembered.

    :param depth: objects and arrays inside each other, the outermost counted.
    :param structural: characters ``{``, ``[`` and ``,`` outside strings.
    :param number_digits: digits in a row outside strings.
    :param members: keys of the outermost object.
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


Span = tuple[int, int, int]
"""Where a member stands: offsets of its key's quote, of its value, and of the value's end."""

_WINDOW = 16_384
"""Bytes looked at in one go: few enough to stop early and to stay in a core's cache."""
_STEP_BYTES = 1 << 20
"""Bytes looked at in one step."""
_GAP = 256
"""Bytes of a string without a quote that are worth jumping over."""

_QUOTE = b'"'
_BACKSLASH, _OPEN_BRACE = b"\\{"
# Only these two escapes can mislead a search for quotes.
_HARD_ESCAPE = re.compile(rb'\\["\\]')
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_\\"


_FOLD = bytes.maketrans(b"[]", b"{}")
_NESTING_ONLY = bytes(byte for byte in range(256) if byte not in b'{}[]"')
_WITH = {kept: bytes(byte for byte in range(256) if byte not in b'{}[]"' + kept) for kept in (b",", b":")}
_STEP = bytes(1 if byte == 0x7B else 255 for byte in range(256))  # read as signed: +1, -1
_DIGITS = bytes.maketrans(b"0123456789", b"0000000000")


class Shape(msgspec.Struct, frozen=True, gc=False):
    """What :func:`check_shape` learnt by the way.

    :param opened: objects and arrays in the body.
    :param opaque_bytes: bytes of long strings that look like base64 (images,
        sound), which are no prompt text. Every such string over 16 KiB is
        seen; shorter ones are seen by chance.
    :param separators: commas, or colons, outside strings; 0 where they need no counting.
    """

    opened: int
    opaque_bytes: int
    separators: int = 0


_FEW_DIGITS = 64


def few_openers(body: bytes, limits: BodyLimits) -> int | None:
    """Clear a usual body without telling strings from the rest.

    :return: how many objects and arrays it has at most, when so few that
        :func:`check_shape` would pass it and find nothing opaque, whatever the
        bytes are; else ``None``, which says nothing.
    """
    size = len(body)
    if size > limits.structural or limits.number_digits < _FEW_DIGITS:
        return None
    if size > _WINDOW and _may_be_opaque(body):
        return None
    # Taking out what is rare is far quicker than counting it.
    opened = 2 * size - len(body.replace(b"{", b"")) - len(body.replace(b"[", b""))
    # Of 65 digits in a row every sixteenth one makes four.
    if opened > limits.depth or b"0000" in body[::16].translate(_DIGITS):
        return None
    return opened


def _may_be_opaque(body: bytes) -> bool:
    """Whether a string of more than a window could look like base64: it would cover one of the samples."""
    return not all(
        body[start : start + _GAP].translate(None, _BASE64) for start in range(0, len(body), _WINDOW // 2)
    )


def check_shape(body: bytes, limits: BodyLimits, *, exempt: bool = False) -> Shape:
    """Refuse what nests too deeply, has too much structure, or too long numbers.

    :param exempt: count colons in place of commas: embeddings and token arrays are long
        flat lists. Brackets and members of objects stay counted, for they are what costs memory.
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
    """:func:`check_shape` in steps of some milliseconds at most, for bodies so large that
    others would wait for all of it: 20 MB of escapes take a tenth of a second."""
    size = len(body)
    looked = 0
    # So short a body cannot break the limit, and text without separators is less to look at.
    separator = b":" if exempt else b","
    with_separators = size > limits.structural
    drop = _WITH[separator] if with_separators else _NESTING_ONLY
    opened = separators = depth = opaque = position = 0
    in_string = False
    while position < size:
        if in_string:
            quote = body.find(_QUOTE, position)
            if quote < 0:
                break  # the parser will say where
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
    """Where to go on inside a string whose next quote is at ``quote``: never amid an escape."""
    if body[quote - 1] != _BACKSLASH:
        return quote
    gap = body[position:quote]
    return quote - (len(gap) - len(gap.rstrip(b"\\"))) % 2


def _window(body: bytes, position: int) -> bytes:
    """The next bytes, never ending amid an escape."""
    window = body[position : position + _WINDOW]
    if window[-1] == _BACKSLASH and (len(window) - len(window.rstrip(b"\\"))) % 2:
        # One backslash alone is the end of no JSON text; the parser will say so.
        return window[:-1] or window
    return window


def _unescaped(text: bytes) -> bytes:
    """``text`` without the escapes of quote and backslash, so that every quote left is a real one."""
    if b"\\" not in text:
        return text
    # Few backslashes: leap from one to the next. Many: two plain passes are quicker.
    if text.count(b"\\") < len(text) >> 5:
        return _HARD_ESCAPE.sub(b"", text)
    return text.replace(b"\\\\", b"").replace(b'\\"', b"")


def _highest(nesting: bytes, room: int) -> int:
    """How far ``nesting`` (``{`` up, ``}`` down) rises above its start, at least 0.

    :param room: an upper bound is good enough when it is not above this.
    """
    # A dip "}{" has its own height on both sides: without it the highest point stays.
    bound = nesting.replace(b"}{", b"").count(b"{")
    if bound <= room:
        return bound
    return max(accumulate(array("b", nesting.translate(_STEP)), initial=0))


def _has_long_number(body: bytes, start: int, size: int, in_string: bool, run: int) -> bool:
    """Whether ``run`` digits in a row begin in the window, outside strings.

    A look at every sixteenth byte or so clears nearly all text: so long a run
    of digits cannot slip between the samples. Then come dearer looks.
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


# --- members ------------------------------------------------------------------

_KEY_CHARS = 256
_SPACED_BYTES = 32_768
"""A body up to this size is laid out again for comparison; walking along a larger one is quicker."""
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)
# White space needs no care here: the parser has passed it.
_KEY = re.compile(rb'[\s,]*("(?:[^"\\]+|\\.)*")\s*:\s*', re.DOTALL)
_TAIL = re.compile(rb"\s*\}\s*")
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


class _Layout(msgspec.Struct, frozen=True, gc=False):
    """What an object has beside its values.

    :param fixed: bytes of its keys and punctuation, without white space and escapes.
    :param start: how it begins where Python's ``json`` writes it.
    :param spaced: all that ``json`` writes, with places for the values.
    """

    fixed: int
    start: bytes
    spaced: bytes


_USUAL_KEYS = 24


@lru_cache(maxsize=128)
def _usual_layout(*keys: str) -> _Layout:
    # Clients send the same few keys all day. At most 24 of 256 characters: a few megabytes in all.
    _check_lengths(keys)
    names = [b'"%b": ' % key.encode() for key in keys]
    spaced = b", ".join([name.replace(b"%", b"%%") + b"%b" for name in names])
    return _Layout(1 + sum(map(len, names)), b"{" + b"".join(names[:1]), b"{%b}" % spaced)


def read_members(body: bytes, most: int = BodyLimits().members) -> dict[str, msgspec.Raw]:
    """The text of each top-level value, in order, by decoded key.

    ``body`` must be UTF-8 (skipped strings are not looked at) and no deeper
    than :func:`check_shape` allows. The values are views of it.

    :param most: refuse more members than this.
    :raise InvalidRequest: not JSON (with the byte), not an object, a doubled key.
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
    # What is left is white space, escapes in keys, and doubled members, the
    # shortest of which is `,"":0`.
    if len(body) - fixed - sum(map(len, values.values())) >= 5:
        _walk(body, values)
    return values


def members_of(value: msgspec.Raw | None) -> dict[str, msgspec.Raw]:
    """The members of a value of good JSON, each as it came; none, if it is no object."""
    if value is None or memoryview(value)[0] != _OPEN_BRACE:
        return {}
    return _MEMBERS.decode(value)


def find_members(body: bytes, most: int = BodyLimits().members) -> dict[str, Span]:
    """Spans of the top-level members, in order, by decoded key; else as :func:`read_members`."""
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
    # Matching a key of many megabytes would take memory many times its size.
    if max(map(len, keys), default=0) > _KEY_CHARS:
        raise InvalidRequest(f"the body has a key of more than {_KEY_CHARS} characters")


def _walk(body: bytes, values: dict[str, msgspec.Raw]) -> dict[str, Span]:
    # Without doubled keys the parser's keys come in the body's order and its
    # values are the body's text. At the first doubled key one of them differs:
    # the value (the parser kept a later one; no JSON value but a number begins
    # with another, and then the next key is amiss), a key, or the end.
    found: dict[str, Span] = {}
    position = body.index(b"{") + 1
    for key, value in values.items():
        name = _KEY.match(body, position)
        if name is None:
            raise _doubled(body, position)
        token = name[1]
        if token[1:-1] != key.encode() and _STRING.decode(token) != key:
            raise _doubled(body, position)
        start = name.end()
        if not body.startswith(value, start):
            raise InvalidRequest(f"the key {shown(key)} stands twice in the body", param=cut(key))
        position = start + len(value)
        found[key] = (name.start(1), start, position)
    if _TAIL.fullmatch(body, position) is None:
        raise _doubled(body, position)
    return found


def _doubled(body: bytes, position: int) -> InvalidRequest:
    name = _KEY.match(body, position)
    if name is None:
        # The value before is a number of which the parser kept a shorter one.
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
    """A client's word as the ``param`` of an error."""
    return name[:64]


def shown(name: str) -> str:
    """A client's word in a message: short, and with nothing that a terminal would obey."""
    return ascii(cut(name))
