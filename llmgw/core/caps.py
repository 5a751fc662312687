"""What one key, or one model, may ask of a backend: counts, lengths, features.

The bounds of ``[limits]`` apply to everybody and protect the gateway itself; these are for
callers that are trusted less, or for expensive models. Only where there are caps, they are
checked in a second reading of the body's top level.

:source: OpenAI API reference (``n``, ``stop``, ``tools``, ``logprobs``,
    ``response_format``, ``include``, lists of prompts); Anthropic Messages
    (``output_format``, ``output_config``);
    llama.cpp ``tools/server/README.md`` (``n_probs``, ``grammar``, ``json_schema``);
    vLLM (``guided_…``, ``structured_outputs``; ``prompt_logprobs``; -1 logprobs are
    the whole vocabulary) and SGLang (``regex``, ``ebnf``) for what they call a
    grammar; Ollama ``docs/api.md`` (``options``, ``format``) and its runner, where
    ``num_predict`` limits only above 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from llmgw.core.body import Ask
from llmgw.core.json_arrays import count_elements, count_prompts
from llmgw.core.json_members import members_of, read_members
from llmgw.errors import InvalidRequest
from llmgw.values import Caps

GRAMMARS = (
    "grammar",
    "json_schema",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "regex",
    "ebnf",
)
"""Top-level keys that make a backend compile what the client wrote."""
LOGPROBS = ("logprobs", "top_logprobs", "n_probs", "prompt_logprobs")
"""Top-level keys that request the probabilities of tokens."""
_NO_GRAMMAR = (b"null", b"false", b'""')
"""Values that stand for no grammar; an empty schema is one, for any JSON."""
_SCHEMALESS = (None, "text", "json_object")
"""Types of formats that are built in, without a schema of the client."""

MAX_OBJECT_BYTES = 1 << 18
"""Longer objects are not built to be looked into."""
_OPEN_BRACE, _DOUBLE_QUOTE = b'{"'
_NULL = msgspec.Raw(b"null")

_any = msgspec.json.Decoder(float_hook=float).decode
"""``1e999`` is JSON, and more than any cap."""


def check_caps(caps: Caps, ask: Ask, prompt_tokens: int, body: bytes) -> None:
    """Refuse what ``caps`` do not allow, but for output tokens, which are cut down
    (:func:`llmgw.core.splicing.clamp_output`), and the answer's size, which comes later.

    :param prompt_tokens: the estimate.
    :param body: JSON that ``core.body`` has found to be good; empty for other bodies.
    :raise InvalidRequest: with the key at fault as ``param``.
    """
    most = caps.max_prompt_tokens
    if most is not None and prompt_tokens > most:
        raise InvalidRequest(
            f"the prompt has about {prompt_tokens} tokens; {most} are allowed", param="messages"
        )
    if not body:
        return
    found = read_members(body)
    if caps.max_n is not None:
        _check_answers(caps.max_n, max(ask.n, _whole(found.get("best_of"))), found.get("prompt"))
    if caps.max_tools is not None:
        tools = [_length(found.get(name), caps.max_tools) for name in ("tools", "functions")]
        _check(caps.max_tools, sum(tools), "tools")
    if caps.max_stop is not None:
        stops = [_length(found.get(name), caps.max_stop) for name in ("stop", "stop_sequences")]
        stops.append(_items(_mapping(found, "options").get("stop")))
        _check(caps.max_stop, max(stops), "stop")
    if caps.max_logprobs is not None:
        _check(caps.max_logprobs, _logprobs(found), "logprobs")
    if caps.grammar is False:
        _check_grammar(found)


def clamp_options(body: bytes, most: int) -> dict[str, object]:
    """Changes for :func:`~llmgw.core.splicing.splice` after which Ollama's ``options.num_predict``
    is at most ``most``; zero and below mean no limit there."""
    options = _members(read_members(body), "options")
    wanted = _any(options.get("num_predict", _NULL))
    if isinstance(wanted, int) and not isinstance(wanted, bool) and 0 < wanted <= most:
        return {}
    return {"options": {**options, "num_predict": most}}


def _check(most: int, count: float, name: str) -> None:
    if count > most:
        raise InvalidRequest(f"{name!r} may be {most} at most for this key or model", param=name)


def _check_answers(most: int, each: float, prompt: msgspec.Raw | None) -> None:
    """A list of prompts is answered one by one, each so many times."""
    _check(most, each, "n")
    if prompt is not None and each * count_prompts(prompt, most) > most:
        raise InvalidRequest(
            f"the prompts ask for more than {most} answers, which is all for this key or model",
            param="prompt",
        )


def _logprobs(found: Mapping[str, msgspec.Raw]) -> float:
    """How many alternatives for each token are wanted; ``true`` alone is one, as is a word
    in ``include``, and a number below zero all that there are."""
    counts = [_whole(found.get(name)) for name in LOGPROBS]
    included = found.get("include")
    if included is not None and _includes_logprobs(included):
        counts.append(1)
    return math.inf if min(counts) < 0 else max(counts)


def _includes_logprobs(raw: msgspec.Raw) -> bool:
    if len(raw) > MAX_OBJECT_BYTES:
        return True  # nobody can say otherwise at a fair price
    words = _any(raw)
    return isinstance(words, list) and any(isinstance(each, str) and "logprobs" in each for each in words)


def _check_grammar(found: Mapping[str, msgspec.Raw]) -> None:
    for name in GRAMMARS:
        if name in found and bytes(memoryview(found[name])[:6]) not in _NO_GRAMMAR:
            raise InvalidRequest(f"{name!r} is not allowed for this key or model", param=name)
    for name, format in (
        ("response_format", _mapping(found, "response_format")),
        ("text", _mapping(found, "text").get("format")),
        ("output_format", _mapping(found, "output_format")),
        ("output_config", _mapping(found, "output_config").get("format")),
    ):
        if isinstance(format, dict) and (format.get("type") not in _SCHEMALESS or "schema" in format):
            raise InvalidRequest(f"{name!r} with a schema is not allowed for this key or model", param=name)
    format = found.get("format")
    if format is not None and memoryview(format)[0] == _OPEN_BRACE:  # Ollama: a schema
        raise InvalidRequest("'format' with a schema is not allowed for this key or model", param="format")


def _whole(raw: msgspec.Raw | None) -> float:
    """A number that stands for a count; ``true`` is 1, and what is no number is 0."""
    value = None if raw is None or len(raw) > MAX_OBJECT_BYTES else _any(raw)
    return value if isinstance(value, int | float) else 0


def _length(raw: msgspec.Raw | None, most: int) -> int:
    """Entries of a list, one more than ``most`` at most; a bare string is one."""
    if raw is None or memoryview(raw)[0] != _DOUBLE_QUOTE:
        return 0 if raw is None else count_elements(raw, most)
    return int(len(raw) > len('""'))


def _items(value: Any) -> int:
    """As :func:`_length`."""
    if isinstance(value, list):
        return len(value)
    return 1 if isinstance(value, str) and value else 0


def _mapping(found: Mapping[str, msgspec.Raw], name: str) -> dict[str, Any]:
    """What an object holds; nothing, if it is none.

    :raise InvalidRequest: it is longer than anything that is meant there.
    """
    return {key: _any(raw) for key, raw in _members(found, name).items()}


def _members(found: Mapping[str, msgspec.Raw], name: str) -> dict[str, msgspec.Raw]:
    """As :func:`_mapping`, each value as it came."""
    raw = found.get(name)
    if raw is not None and len(raw) > MAX_OBJECT_BYTES and memoryview(raw)[0] == _OPEN_BRACE:
        raise InvalidRequest(f"{name!r} is longer than {MAX_OBJECT_BYTES} bytes", param=name)
    return members_of(raw)
