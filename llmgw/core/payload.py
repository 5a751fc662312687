"""What one JSON object of an answer says: content, tokens, timings, end, error.

The object may be the data of an event, an NDJSON line or a whole body, in any dialect: their
fields do not clash, so :func:`read` and :func:`read_body` go by the shape and need no dialect.
Common objects are read more cheaply by :mod:`llmgw.core.usual`.

:source: ``chat``, ``completion``, ``native``: llama.cpp ``tools/server/README.md``
    and recordings of build b11549; ``responses``, ``messages``: the OpenAI and
    Anthropic API references; Ollama ``docs/api.md`` (durations in nanoseconds).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw, Struct

_ERROR_LIMIT = 200
COUNT_LIMIT = 1 << 40
ABSENT = Raw(b"")
"""Stands for an absent field."""

UNREADABLE = (ValueError, RecursionError)
"""The errors of a decoder."""


class Tokens(Struct):
    """Token counts as reported; ``None`` where nothing was reported.

    :param prompt: the whole prompt, cached part included.
    """

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None


class Timings(Struct):
    """The backend's own measurements.

    :param prompt_s: seconds it spent on the uncached part of the prompt.
    :param token_rate: output tokens per second.
    """

    prompt_s: float | None = None
    token_rate: float | None = None


class Said(Struct):
    """What one object says.

    :param content: it has content: text, reasoning, a refusal, audio or a tool call.
    :param finished: it says that the answer, or one of its choices, is complete.
    :param error: a short message, if it reports an error.
    :param choice: index of the choice that it is about; ``None`` if it is about none.
    :param alone: its list of choices is empty: it was sent only for its usage.
    :param told: token counts at the end of an answer, or running totals.
    :param opening: token counts at the beginning of an answer (Anthropic ``message_start``).
    :param timings: the backend's own measurements.
    :param timed: token counts among those measurements.
    """

    content: bool = False
    finished: bool = False
    error: str | None = None
    choice: int | None = None
    alone: bool = False
    told: Tokens | None = None
    opening: Tokens | None = None
    timings: Timings | None = None
    timed: Tokens | None = None


class _Object(Struct):
    """Slices of the fields that matter; all others are skipped."""

    choices: Raw = ABSENT
    index: Raw = ABSENT
    usage: Raw = ABSENT
    timings: Raw = ABSENT
    error: Raw = ABSENT
    object: Raw = ABSENT
    type: Raw = ABSENT
    message: Raw = ABSENT
    delta: Raw = ABSENT
    response: Raw = ABSENT
    content_block: Raw = ABSENT
    content: Raw = ABSENT
    thinking: Raw = ABSENT
    stop: Raw = ABSENT
    stop_type: Raw = ABSENT
    done: Raw = ABSENT
    tokens_evaluated: Raw = ABSENT
    tokens_predicted: Raw = ABSENT
    prompt_eval_count: Raw = ABSENT
    prompt_eval_duration: Raw = ABSENT
    eval_count: Raw = ABSENT
    eval_duration: Raw = ABSENT


_object = msgspec.json.Decoder(_Object)
_objects = msgspec.json.Decoder(list[_Object])
_any = msgspec.json.Decoder()


def read(payload: bytes) -> Said | None:
    """Read one event, line or small object; ``None`` if it is not a JSON object."""
    try:
        fields = _object.decode(payload)
    except UNREADABLE:
        return None
    said = _read_outcome(fields)
    choices = _list(fields.choices)
    if choices:
        said.choice = _count(_get(choices[0], "index")) or 0
    else:
        said.alone = fields.choices is not ABSENT
    kind = _value(fields.type)
    if kind == "message_start":
        said.opening = _usage(_get(_value(fields.message), "usage"))
        return said
    said.content = _has_content(fields, choices, kind)
    said.finished = (
        any(_get(choice, "finish_reason") for choice in choices)
        or kind in ("message_stop", "response.completed", "response.incomplete")
        or _value(fields.stop) is True
        or _text(fields.stop_type)  # response_fields may leave nothing else
        or _value(fields.done) is True
    )
    return said


def read_body(body: bytes) -> list[Said]:
    """Read a whole JSON body, only for tokens, timings and errors.

    llama-server answers with a list if ``/completion`` got several prompts.
    """
    try:
        return [_read_outcome(_object.decode(body))]
    except msgspec.ValidationError:
        try:
            return [_read_outcome(fields) for fields in _objects.decode(body)]
        except UNREADABLE:
            return []
    except UNREADABLE:
        return []


_NESTED = rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})"
_FRAGMENTS = {key: re.compile(key + _NESTED) for key in (b'"usage"', b'"timings"')}


def read_fragment(part: bytes) -> Said:
    """Read a part of a body that is too large to keep: its last usage and timings objects."""
    found: dict[bytes, Raw] = {}
    for key, pattern in _FRAGMENTS.items():
        at = part.rfind(key)
        match = pattern.match(part, at) if at >= 0 else None
        found[key] = Raw(match[1]) if match else ABSENT
    return _read_outcome(_Object(usage=found[b'"usage"'], timings=found[b'"timings"']))


def _read_outcome(fields: _Object) -> Said:
    said = Said(error=_error(fields))
    response = _value(fields.response)
    usage = _value(fields.usage) or _get(response, "usage")
    timings = _value(fields.timings)
    if isinstance(timings, dict):
        add_timings(said, *_timings(timings))
    if isinstance(usage, dict):
        said.told = _usage(usage)
    elif fields.tokens_predicted is not ABSENT and _value(fields.stop) is not False:
        said.choice = _count(_value(fields.index)) or 0
        # tokens_cached is the number of tokens in the slot afterwards, not what was reused.
        said.told = Tokens(
            prompt=_count(_value(fields.tokens_evaluated)),
            cached=said.timed.cached if said.timed else None,
            output=_count(_value(fields.tokens_predicted)),
        )
    elif fields.eval_count is not ABSENT:
        output = _count(_value(fields.eval_count))
        said.told = Tokens(prompt=_count(_value(fields.prompt_eval_count)), output=output)
        prompt_s = _seconds(_value(fields.prompt_eval_duration), 1e-9)
        output_s = _seconds(_value(fields.eval_duration), 1e-9)
        rate = output / output_s if output and output_s else None
        said.timings = Timings(prompt_s, rate)
    return said


def _usage(usage: Any) -> Tokens | None:
    if not isinstance(usage, dict):
        return None
    if "input_tokens" not in usage and "cache_read_input_tokens" not in usage:
        cached = _count(_get(usage.get("prompt_tokens_details"), "cached_tokens"))
        output = _count(usage.get("completion_tokens", usage.get("output_tokens")))
        return Tokens(_count(usage.get("prompt_tokens")), cached, output)
    prompt, output = _count(usage.get("input_tokens")), _count(usage.get("output_tokens"))
    if "cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage:
        # Anthropic: input_tokens are only those neither read from a cache nor written to one.
        cached = _count(usage.get("cache_read_input_tokens"))
        made = _count(usage.get("cache_creation_input_tokens"))
        return Tokens((prompt or 0) + (cached or 0) + (made or 0), cached, output)
    return Tokens(prompt, _count(_get(usage.get("input_tokens_details"), "cached_tokens")), output)


_MEASURES = ("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "predicted_per_second")


def _timings(timings: dict[str, Any]) -> tuple[Timings, Tokens]:
    return measured(*map(timings.get, _MEASURES))


def add_timings(said: Said, timings: Timings, timed: Tokens) -> None:
    """Add measurements to ``said``, if there are any.

    They are all zero before the first batch of the prompt has been processed.
    """
    if timed.prompt or timed.output:
        said.timings, said.timed = timings, timed


def measured(
    cache_n: Any,
    prompt_n: Any,
    prompt_ms: Any,
    predicted_n: Any,
    predicted_ms: Any,
    predicted_per_second: Any,
) -> tuple[Timings, Tokens]:
    """The values of llama-server's ``timings``, by their names there."""
    cached, fresh, output = _count(cache_n), _count(prompt_n), _count(predicted_n)
    rate = _seconds(predicted_per_second, 1.0)
    if not rate and output and output > 1:
        output_s = _seconds(predicted_ms, 1e-3)
        rate = output / output_s if output_s else None
    prompt = None if fresh is None else fresh + (cached or 0)
    # For a single token the reported rate is 0, which means nothing.
    return Timings(_seconds(prompt_ms, 1e-3), rate or None), Tokens(prompt, cached, output)


def _error(fields: _Object) -> str | None:
    error = _value(fields.error)
    kind = _value(fields.type)
    if not error:
        if _value(fields.object) == "error" or kind == "error":
            error = _value(fields.message) or "error"
        elif fields.response is not ABSENT and kind == "response.failed":
            error = _get(_value(fields.response), "error") or "error"
    if not error:
        return None
    message = error if isinstance(error, str) else _get(error, "message") or _get(error, "type")
    return message[:_ERROR_LIMIT] if isinstance(message, str) else "error"


_DELTA_FIELDS = (
    "content",
    "reasoning_content",
    "reasoning",
    "refusal",
    "tool_calls",
    "function_call",
    "audio",
)


def _has_content(fields: _Object, choices: list[Any], kind: Any) -> bool:
    if choices:
        return any(
            _get(choice, "text") or any(_get(_get(choice, "delta"), name) for name in _DELTA_FIELDS)
            for choice in choices
        )
    if isinstance(kind, str):
        if kind == "content_block_delta":
            delta = _value(fields.delta)
            return any(_get(delta, name) for name in ("text", "thinking", "partial_json"))
        if kind == "content_block_start":
            return bool(_get(_value(fields.content_block), "type") == "tool_use")
        return kind.endswith(".delta") and bool(_value(fields.delta))
    message = _value(fields.message)
    if isinstance(message, dict):
        return any(message.get(name) for name in ("content", "thinking", "tool_calls"))
    return any(_text(raw) for raw in (fields.content, fields.response, fields.thinking))


def _value(raw: Raw) -> Any:
    if raw is ABSENT:
        return None
    try:
        return _any.decode(raw)
    except UNREADABLE:
        return None


def _list(raw: Raw) -> list[Any]:
    value = _value(raw)
    return value if isinstance(value, list) else []


def _text(raw: Raw) -> bool:
    value = _value(raw)
    return isinstance(value, str) and value != ""


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _count(value: Any) -> int | None:
    """A number of tokens, if the value can be one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < COUNT_LIMIT:
        return None
    return int(value)


def _seconds(value: Any, unit: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        return None
    return value * unit
