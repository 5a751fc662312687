"""What the gateway needs to know of a JSON request body.

A body is read once, into an :class:`Ask`, and otherwise passed on as it came:
:mod:`.splicing` replaces, adds or removes top-level members and leaves every
other byte alone. No object tree is ever built, so the work per request is one
linear pass at C speed, however long the prompt is. The bytes around the messages of a
short body are cached with what was read from them, since clients repeat them.

``stream`` counts only when it is JSON ``true``; ``"true"``, ``1`` and ``null`` are left
to the backend, and the content type of its response decides.

:source: OpenAI API reference (chat, completions, responses, embeddings);
    Anthropic Messages; llama.cpp ``tools/server/README.md`` (``n_predict``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from llmgw.core.duplicate_keys import check_members, check_pairs, is_usual
from llmgw.core.json_arrays import count_prompts, is_longer
from llmgw.core.json_members import read_members
from llmgw.core.json_shape import BodyLimits, Shape, check_shape, few_openers
from llmgw.core.spelling import check_spelling
from llmgw.core.unstreamed import UNSTREAMED, WRITTEN_OVER, asks_unstreamed, is_begun, is_miswritten
from llmgw.errors import InvalidRequest, ModelNotFound

__all__ = [
    "Ask",
    "BodyLimits",
    "estimate_tokens",
    "read_json",
]

OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")
"""Keys that bound the output; the first one present gives ``Ask.max_tokens``."""
SESSIONS = ("session_id", "prompt_cache_key")
"""Keys that identify a conversation: our own, and OpenAI's hint for cache affinity."""


class Ask(msgspec.Struct, frozen=True):
    """What a request asks for.

    :param model: as the client wrote it, escapes decoded; ``""`` only if it need not be given.
    :param stream: the client asked for server-sent events.
    :param max_tokens: the client's limit on output; ``None`` if it gave none or
        a negative one (llama.cpp's "no limit").
    :param max_tokens_key: the key it came from, also if it was negative.
    :param output_limits: every such key and its number, in order of precedence.
        Backends differ in which they obey: clamp them all (:func:`~.splicing.clamp_output`).
    :param include_usage: the client itself asked for usage at the end of the stream.
    :param n: choices asked for.
    :param prompts: number of prompts in a list of them; each is answered by itself.
    :param prompt_bytes: roughly the bytes of text in the prompt: the length of the body
        without long base64 strings, which are images or audio.
    :param session: a conversation id of up to 256 characters.
    :param return_tokens: ``/completion`` shall return the tokens of its answer too.
    :param unstreamed: no stream is wanted, and a stream could not convey all of the answer
        (:mod:`.unstreamed`).
    """

    model: str
    stream: bool = False
    max_tokens: int | None = None
    max_tokens_key: str | None = None
    output_limits: tuple[tuple[str, int], ...] = ()
    include_usage: bool = False
    n: int = 1
    prompts: int = 1
    prompt_bytes: int = 0
    session: str | None = None
    return_tokens: bool = False
    unstreamed: bool = False


_DEFAULTS = BodyLimits()
_CHOICES = ("n", "n_cmpl")
_LISTS = frozenset(("tools", "stop", "stop_sequences"))
_COMMON = frozenset((*OUTPUT_LIMITS, *WRITTEN_OVER))
_RARE = UNSTREAMED.union(SESSIONS, _CHOICES)
_SESSION_CHARS = 256
_NUMBER = re.compile(rb"[-\d]")
_OPEN_BRACE, _DOUBLE_QUOTE = b'{"'
_ANY_NUMBER = sys.maxsize
"""Stands for an unknown number of objects: then every list is counted."""
_MESSAGES = b'"messages":'
_AROUND_BYTES = 512
"""Up to so many bytes around the messages are worth caching."""
_NULL, _TRUE = msgspec.Raw(b"null"), msgspec.Raw(b"true")
_USAGE_WANTED = (msgspec.Raw(b'{"include_usage": true}'), msgspec.Raw(b'{"include_usage":true}'))
"""What nearly all ``stream_options`` look like."""
_decode_string = msgspec.json.Decoder(str).decode
_decode_integer = msgspec.json.Decoder(int | None).decode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode


def read_json(
    body: bytes,
    limits: BodyLimits = _DEFAULTS,
    *,
    exempt: bool = False,
    require_model: bool = True,
    shape: Shape | None = None,
) -> Ask:
    """Read what the gateway needs; the body itself stays as it is.

    :param exempt: for routes whose bodies are long flat lists (embeddings,
        token arrays): commas are not counted, brackets are.
    :param require_model: whether a missing ``model`` is an error.
    :param shape: the result of :func:`~llmgw.core.json_shape.shape_steps`, if the caller has
        run it. The caller then also runs
        :func:`~llmgw.core.duplicate_keys.duplicate_steps` for duplicate keys of nested objects.
    :raise InvalidRequest: for anything but a well-formed body, whatever the bytes are.
    """
    if not body:
        raise InvalidRequest("the body is empty; it must be a JSON object with 'model'", param="model")
    if body.startswith(b"\xef\xbb\xbf"):
        raise InvalidRequest("the body begins with a byte order mark; JSON has none")
    inside = shape is None
    opened = few_openers(body, limits) if inside else None
    prompt_bytes = len(body)
    few = opened is not None
    if opened is None:
        if shape is None:
            shape = check_shape(body, limits, exempt=exempt)
        opened = shape.opened
        prompt_bytes -= shape.opaque_bytes
    if not body.isascii():
        _check_utf8(body)
    if few:
        ask = _read_around(body, limits, opened, require_model)
        if ask is not None:
            return ask
    return _read(body, limits, opened, prompt_bytes, require_model, inside=inside)


def _read(
    body: bytes,
    limits: BodyLimits,
    opened: int,
    prompt_bytes: int,
    require_model: bool,
    *,
    inside: bool = True,
) -> Ask:
    """Read a body whose shape and text are known to be good.

    :param opened: how many objects and arrays it has, or an upper bound.
    :param inside: look for duplicate keys of nested objects, too.
    """
    found = read_members(body, limits.members)
    if inside:
        check_members(found.values())
    check_spelling(found)
    # Most bodies have few of the keys that are read: one test rules out a group of them.
    model = _model(found.get("model"), limits.model_chars, require_model)
    messages = found.get("messages")
    if (messages is not None and len(messages) > 2 * limits.messages) or not _LISTS.isdisjoint(found):
        _check_lists(found, limits, body, opened)
    prompt = found.get("prompt")
    common, rare = not _COMMON.isdisjoint(found), not _RARE.isdisjoint(found)
    output = _output_limits(found) if common else ()
    key, most = output[0] if output else (None, -1)
    stream = common and found.get("stream") == _TRUE
    options = found.get("stream_options") if common else None
    if options is not None and memoryview(options)[0] != _OPEN_BRACE:
        options = None
    return Ask(
        model,
        stream,
        most if most >= 0 else None,
        key,
        output,
        options is not None and _wants_usage(options),
        _choices(found, limits.n) if rare else 1,
        1 if prompt is None else _prompts(prompt, limits.messages),
        prompt_bytes,
        _session(found) if rare else None,
        rare and found.get("return_tokens") == _TRUE,
        not stream
        and (
            (common and is_miswritten(found))
            or (rare and asks_unstreamed(found))
            or (messages is not None and is_begun(messages))
        ),
    )


def _read_around(body: bytes, limits: BodyLimits, opened: int, require_model: bool) -> Ask | None:
    """Read a body by the bytes around its messages, which a client repeats in every request.

    If ``A[]B`` is JSON with that array as a value, and ``M`` is a JSON array, then ``AMB``
    is JSON with the same members; and all that matters of the messages is their number.

    :return: ``None`` decides nothing: read the whole body.
    """
    key = body.find(_MESSAGES, 0, _AROUND_BYTES)
    if key < 0:
        return None
    # Right behind the colon or one byte later: if that byte is not a space, parsing fails below.
    start = body.find(b"[", key + len(_MESSAGES), key + len(_MESSAGES) + 2)
    end = body.rfind(b"}]") + 2
    if not 0 < start < end or len(body) - end + start > _AROUND_BYTES:
        return None
    messages = body[start:end]
    try:
        if not is_usual(messages):
            _check_json(messages)
            check_pairs(messages)
        ask = _read_known(b"%b[]%b" % (body[:start], body[end:]), limits, require_model)
    except (msgspec.DecodeError, RecursionError, InvalidRequest):
        return None
    if ask is None or is_longer(messages, limits.messages, opened):
        return None
    return Ask(
        ask.model,
        ask.stream,
        ask.max_tokens,
        ask.max_tokens_key,
        ask.output_limits,
        ask.include_usage,
        ask.n,
        ask.prompts,
        len(body),
        ask.session,
        ask.return_tokens,
        ask.unstreamed or (not ask.stream and is_begun(messages)),
    )


@lru_cache(maxsize=256)
def _read_known(around: bytes, limits: BodyLimits, require_model: bool) -> Ask | None:
    try:
        return _read(around, limits, _ANY_NUMBER, 0, require_model)
    except InvalidRequest:
        return None  # reading the whole body reports why


def estimate_tokens(ask: Ask) -> int:
    """Tokens of the prompt, at least 1: one per 3.5 bytes of text."""
    return max(1, -(-2 * ask.prompt_bytes // 7))


def _check_utf8(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from None


def _model(raw: msgspec.Raw | None, most: int, required: bool) -> str:
    if raw is None or raw == _NULL:
        if required:
            raise InvalidRequest("'model' is missing", param="model")
        return ""
    if len(raw) > 12 * most + 2 and memoryview(raw)[0] == _DOUBLE_QUOTE:
        # One character takes at most 12 bytes (two escapes): no need to decode more.
        raise no_such_model(bytes(memoryview(raw)[1 : most + 1]).decode(errors="replace"))
    model = _string(raw)
    if not model:
        raise InvalidRequest("'model' must be a string that is not empty", param="model")
    if len(model) > most:
        raise no_such_model(model)
    return model


def no_such_model(name: str) -> ModelNotFound:
    """The error for a name that nobody serves, such as one longer than any name may be."""
    return ModelNotFound(f"no such model: {name[:256]!r}", param="model")


def _check_lists(found: Mapping[str, msgspec.Raw], limits: BodyLimits, body: bytes, opened: int) -> None:
    for name, most in (
        ("messages", limits.messages),
        ("tools", limits.tools),
        ("stop", limits.stop),
        ("stop_sequences", limits.stop),
    ):
        raw = found.get(name)
        if (
            raw is not None
            and is_longer(raw, most, opened)
            # ``opened`` may be an upper bound: count before refusing.
            and (opened == _ANY_NUMBER or is_longer(raw, most, check_shape(body, limits, exempt=True).opened))
        ):
            raise InvalidRequest(f"{name!r} has more than {most} elements", param=name)


def _prompts(raw: msgspec.Raw, most: int) -> int:
    count = count_prompts(raw, most)
    if count > most:
        raise InvalidRequest(f"'prompt' has more than {most} prompts", param="prompt")
    return count


def _choices(found: Mapping[str, msgspec.Raw], most: int) -> int:
    choices = 1
    for name in _CHOICES:
        raw = found.get(name)
        if raw is not None and (value := _integer(raw, name)) is not None:
            if not 1 <= value <= most:
                raise InvalidRequest(f"{name!r} must be 1 to {most}", param=name)
            choices = max(choices, value)
    return choices


def _output_limits(found: Mapping[str, msgspec.Raw]) -> tuple[tuple[str, int], ...]:
    given: tuple[tuple[str, int], ...] = ()
    for name in OUTPUT_LIMITS:
        raw = found.get(name)
        if raw is not None and (value := _integer(raw, name)) is not None:
            given += ((name, value),)
    return given


def _integer(raw: msgspec.Raw, name: str) -> int | None:
    """An integer, or ``None`` for null. ``8.0`` and ``1e3`` are integers to some backends, so they count."""
    try:
        return _decode_integer(raw)
    except msgspec.ValidationError:
        text = bytes(raw)
    if _NUMBER.match(text) and (value := float(text)).is_integer():
        return int(value)
    raise InvalidRequest(f"{name!r} must be an integer", param=name)


def _wants_usage(options: msgspec.Raw) -> bool:
    return options in _USAGE_WANTED or read_members(bytes(options)).get("include_usage") == _TRUE


def _session(found: Mapping[str, msgspec.Raw]) -> str | None:
    for name in SESSIONS:
        raw = found.get(name)
        if raw is not None and len(raw) <= 12 * _SESSION_CHARS + 2:
            session = _string(raw)
            if session and len(session) <= _SESSION_CHARS:
                return session
    return None


def _string(raw: msgspec.Raw) -> str | None:
    try:
        return _decode_string(raw)
    except msgspec.ValidationError:
        return None
