"""Fast reading of the most common objects of an answer, each in a single typed decoding.

Every field that could say anything else must be null or absent, which ``msgspec`` checks in the
same pass. Other objects are left to :mod:`llmgw.core.payload`. :func:`read_chunk` and
:func:`read_completion` return exactly what it would; :func:`plain_test` is a little less exact,
and documents in what.

:source: ``timings`` and the shapes of llama.cpp's answers: recordings of build b11549.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import astuple

from llmgw.core.payload import ABSENT, COUNT_LIMIT, UNREADABLE, Said, Tokens, add_timings, measured

_Whole = Annotated[int, Meta(ge=0, lt=COUNT_LIMIT)]


class _Cached(Struct, gc=False):
    cached_tokens: _Whole | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: _Whole
    completion_tokens: _Whole
    prompt_tokens_details: _Cached | None = None
    input_tokens: Raw = ABSENT  # of other dialects, present even if null
    cache_read_input_tokens: Raw = ABSENT


class _Timings(Struct, gc=False):  # in the order of measured()
    cache_n: _Whole | None = None
    prompt_n: _Whole | None = None
    prompt_ms: float | None = None
    predicted_n: _Whole | None = None
    predicted_ms: float | None = None
    predicted_per_second: float | None = None


class _Completion(Struct, gc=False):
    usage: _Usage
    object: Literal["chat.completion", "text_completion"] | None = None
    timings: _Timings | None = None
    error: None = None
    type: None = None


_completion = msgspec.json.Decoder(_Completion)


def read_completion(body: bytes) -> Said | None:
    """The result of :func:`~llmgw.core.payload.read_body` for a common answer to ``chat`` or
    ``completion``.

    :return: ``None`` decides nothing: use that function.
    """
    try:
        fields = _completion.decode(body)
    except UNREADABLE:
        return None
    usage, timings = fields.usage, fields.timings
    if usage.input_tokens is not ABSENT or usage.cache_read_input_tokens is not ABSENT:
        return None
    details = usage.prompt_tokens_details
    cached = None if details is None else details.cached_tokens
    said = Said(told=Tokens(usage.prompt_tokens, cached, usage.completion_tokens))
    if timings is not None:
        add_timings(said, *measured(*astuple(timings)))
    return said


class _Delta(Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None


class _Choice(Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: None = None


class _Chunk(Struct, gc=False):
    choices: list[_Choice]
    object: Literal["chat.completion.chunk", "text_completion"] | None = None
    usage: None = None
    timings: None = None
    error: None = None
    type: None = None
    response: None = None
    stop: None = None
    stop_type: None = None
    done: None = None
    tokens_predicted: Raw = ABSENT  # these two mean something even if null
    eval_count: Raw = ABSENT


_chunk = msgspec.json.Decoder(_Chunk)


def read_chunk(payload: bytes) -> bool | None:
    """Whether an event of ``chat`` or ``completion`` that has nothing else carries content.

    :return: ``None`` decides nothing: use :func:`~llmgw.core.payload.read`.
    """
    try:
        chunk = _chunk.decode(payload)
    except UNREADABLE:
        return None
    if not chunk.choices or chunk.tokens_predicted is not ABSENT or chunk.eval_count is not ABSENT:
        return None
    for choice in chunk.choices:
        delta = choice.delta
        if choice.text or (
            delta is not None
            and (delta.content or delta.reasoning_content or delta.reasoning or delta.refusal)
        ):
            return True
    return False


# An event is plain if it decodes as one of these: msgspec checks that in less time than two
# substring searches take.


class _PlainChoice(Struct, gc=False):
    finish_reason: None = None


class _PlainChunk(Struct, gc=False):
    choices: list[_PlainChoice]
    usage: None = None
    timings: None = None
    error: None = None


class _PlainNative(Struct, gc=False):
    stop: bool
    timings: None = None
    error: None = None


class _PlainBlockDelta(Struct, gc=False):
    type: Literal["content_block_delta"]
    error: None = None


class _PlainDelta(Struct, gc=False):
    type: str
    delta: str
    timings: None = None
    error: None = None


_plain_chunk = msgspec.json.Decoder(_PlainChunk).decode
_plain_native = msgspec.json.Decoder(_PlainNative).decode
_plain_block_delta = msgspec.json.Decoder(_PlainBlockDelta).decode
_plain_delta = msgspec.json.Decoder(_PlainDelta).decode

_PLAIN: dict[str, Callable[[bytes], object]] = {
    "chat": _plain_chunk,
    "completion": _plain_chunk,
    "native": lambda payload: not _plain_native(payload).stop,
    "messages": _plain_block_delta,
    "responses": lambda payload: _plain_delta(payload).type.endswith(".delta"),
}


def plain_test(dialect: str) -> Callable[[bytes], object] | None:
    """A function that tests whether an event is one more piece of the answer and nothing else;
    ``None`` if the dialect has no such test.

    It returns a true or a false value, or raises one of :data:`UNREADABLE`, which also means no: a
    wrapper around it would cost a sixth of the time for an event. It is exact for ends, errors,
    usage and timings: an event that passes has none of these. It is approximate for content: a
    role-only chunk passes, too.
    """
    return _PLAIN.get(dialect)
