"""What the gateway needs to know of a ``multipart/form-data`` body (transcriptions).

Only the delimiters and the headers of the parts are parsed; the content of files is skipped.
Whatever two parsers might read differently is refused, because the field that we read must be
the one that the backend reads: a boundary that is not at the start of a line, runs on into
other text, or comes after the end; a part without a disposition or with two; a name with
escapes; a duplicate ``model`` or ``stream``. Preamble and epilogue are allowed, as in RFC 2046.

Known weakness: WHATWG writes a backslash in a file name as it is, RFC 9110 as a pair. Field
names with backslashes are refused; file names are not parsed, so one that ends in a backslash
is refused as ambiguous.

:source: RFC 2046 section 5.1.1 (delimiters, preamble, epilogue), RFC 7578
    (form-data, sections 4.1, 4.2, 5.1), RFC 9110 section 5.6.6 (parameters).
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

import msgspec

from llmgw.core.body import Ask, BodyLimits, no_such_model
from llmgw.errors import InvalidRequest

MAX_PARTS = 64
MAX_HEADER_BYTES = 4096
"""Headers of one part."""

_READ = (b"model", b"stream")
_TEXT_FIELDS = frozenset({b"prompt"})
_LIMITS = BodyLimits()

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_PARAMETER = re.compile(rb'[ \t]*;[ \t]*(%b)=("(?:[^"\\\r\n]|\\.)*"|%b)' % (_TOKEN, _TOKEN))
_PARAMETERS_END = re.compile(rb"[ \t]*;?[ \t]*")
_MEDIA_TYPE = re.compile(rb"[ \t]*(%b/%b)" % (_TOKEN, _TOKEN))
_DISPOSITION = re.compile(rb"form-data(?=[ \t;]|$)", re.IGNORECASE)
_QUOTED_PAIR = re.compile(rb"\\(.)")
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_AFTER_DELIMITER = re.compile(rb"[ \t]{0,64}\r\n")
_HEADER = re.compile(rb"(%b):[ \t]*([^\r\n\0]*?)[ \t]*\r\n" % _TOKEN)


class _Part(msgspec.Struct, frozen=True):
    """One part: its name, whether it is a file, and the offsets of its content."""

    name: bytes
    is_file: bool
    start: int
    end: int


def read_multipart(body: bytes, content_type: str, *, require_model: bool = True) -> Ask:
    """Read ``model`` and ``stream``, wherever they are; the body itself stays as it is.

    ``prompt_bytes`` is the length of the ``prompt`` field, not of files.

    :param content_type: the request's header, with its ``boundary``.
    :param require_model: whether a missing ``model`` is an error.
    :raise InvalidRequest: the body is not unambiguously one form with one ``model``.
    """
    parts = _parts(body, content_type)
    model = ""
    part = _only(parts, b"model")
    if part is not None:
        model = _text(body, part, "model")
        if not model:
            raise InvalidRequest("'model' must not be empty", param="model")
        if len(model) > _LIMITS.model_chars:
            raise no_such_model(model)
    elif require_model:
        raise InvalidRequest("the form field 'model' is missing", param="model")
    part = _only(parts, b"stream")
    stream = part is not None and _text(body, part, "stream") == "true"
    prompt = sum(part.end - part.start for part in parts if part.name in _TEXT_FIELDS and not part.is_file)
    return Ask(model, stream, prompt_bytes=prompt)


def splice_multipart(body: bytes, content_type: str, model: str) -> bytes:
    """``body`` with another value of its field ``model``; every other byte stays.

    :raise InvalidRequest: as :func:`read_multipart`; also if there is no such field.
    :raise ValueError: ``model`` has a line break, which could forge a delimiter.
    """
    if "\r" in model or "\n" in model:
        raise ValueError(f"a model's name cannot hold a line break: {model!r}")
    part = _only(_parts(body, content_type), b"model")
    if part is None:
        raise InvalidRequest("the form field 'model' is missing", param="model")
    whole = memoryview(body)
    return b"".join((whole[: part.start], model.encode(), whole[part.end :]))


def _only(parts: list[_Part], name: bytes) -> _Part | None:
    found = [part for part in parts if part.name == name]
    if len(found) > 1:
        raise InvalidRequest(f"the form field '{name.decode()}' stands twice", param=name.decode())
    if found and found[0].is_file:
        raise InvalidRequest(f"the form field '{name.decode()}' must not be a file", param=name.decode())
    return found[0] if found else None


def _text(body: bytes, part: _Part, name: str) -> str:
    most = part.start + 4 * _LIMITS.model_chars + 4
    if part.end > most:  # too long in any case, and perhaps cut inside a character
        return body[part.start : most].decode(errors="replace")
    try:
        return body[part.start : part.end].decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"the form field '{name}' is not UTF-8", param=name) from None


def _parts(body: bytes, content_type: str) -> list[_Part]:
    dashes = b"--" + _boundary(content_type)
    found = body.find(dashes)
    if found < 0:
        raise InvalidRequest("the form does not have the boundary that its content-type names")
    if found and not body.endswith(b"\r\n", 0, found):
        raise _unclear("a boundary stands inside a line", found)
    parts: list[_Part] = []
    while True:
        after = found + len(dashes)
        if body.startswith(b"--", after):
            if body.find(dashes, after) >= 0:
                raise _unclear("the boundary stands after the end", after)
            return parts
        line_end = _AFTER_DELIMITER.match(body, after)
        if line_end is None:
            raise _unclear("other text follows the boundary", after)
        if len(parts) == MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts")
        name, is_file, start = _headers(body, line_end.end())
        found = body.find(dashes, start)
        if found < 0:
            raise InvalidRequest(f"the form ends amid its part {len(parts) + 1}: no closing boundary")
        # The line break before a boundary belongs to it, not to the blank line.
        if not body.endswith(b"\r\n", start, found):
            raise _unclear("a boundary stands inside a line", found)
        parts.append(_Part(name, is_file, start, found - 2))


def _headers(body: bytes, start: int) -> tuple[bytes, bool, int]:
    """Name, whether it is a file, and where the content starts."""
    position = start
    disposition: bytes | None = None
    while not body.startswith(b"\r\n", position):
        header = _HEADER.match(body, position, start + MAX_HEADER_BYTES)
        if header is None:
            raise _unclear("a part's header is malformed or too long", position)
        key = header[1].lower()
        if key == b"content-disposition":
            if disposition is not None:
                raise _unclear("a part has two content-dispositions", position)
            disposition = header[2]
        elif key == b"content-transfer-encoding" and header[2].lower() not in (b"binary", b"8bit", b"7bit"):
            raise InvalidRequest("the form has a part with a content-transfer-encoding")
        position = header.end()
    form = _DISPOSITION.match(disposition or b"")
    if disposition is None or form is None:
        raise _unclear("a part has no content-disposition 'form-data'", start)
    parameters = _parameters(disposition, form.end())
    if parameters is None or b"name" not in parameters or b"name*" in parameters:
        raise _unclear("a part has no clear name", start)
    name = parameters[b"name"]
    if b"\\" in name or (b"%" in name and unquote_to_bytes(name) in _READ):
        raise _unclear("a part's name is written with escapes", start)
    return name, b"filename" in parameters or b"filename*" in parameters, position + 2


def _boundary(content_type: str) -> bytes:
    raw = content_type.encode("latin-1", "replace")
    kind = _MEDIA_TYPE.match(raw)
    if kind is None or kind[1].lower() != b"multipart/form-data":
        raise InvalidRequest("the content-type must be multipart/form-data")
    parameters = _parameters(raw, kind.end())
    boundary = (parameters or {}).get(b"boundary", b"")
    boundary = _QUOTED_PAIR.sub(rb"\1", boundary)
    if not _BOUNDARY.fullmatch(boundary):
        raise InvalidRequest("the content-type has no valid boundary")
    return boundary


def _parameters(text: bytes, position: int) -> dict[bytes, bytes] | None:
    """Parameters by lower-case name, quotes removed and quoted pairs left; ``None`` if unclear or twice."""
    found: dict[bytes, bytes] = {}
    while parameter := _PARAMETER.match(text, position):
        name, value = parameter[1].lower(), parameter[2]
        if name in found:
            return None
        found[name] = value[1:-1] if value.startswith(b'"') else value
        position = parameter.end()
    return found if _PARAMETERS_END.fullmatch(text, position) else None


def _unclear(what: str, position: int) -> InvalidRequest:
    return InvalidRequest(f"the form is malformed: {what} (byte {position})")
