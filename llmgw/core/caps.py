"""What one key, or one model, may ask of a backend: counts, lengths, features.

The bounds of ``[limits]`` are for all and keep the gateway itself well; these
are for who is trusted less, or for a model that is dear. They are looked at only
where there are some, in a second reading of the body's top level.

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
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from llmgw.core.body import Ask
from llmgw.core.json_rules import read_members
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
"""Top-level keys that ask for the probabilities of tokens."""
_NO_GRAMMAR = (None, False, "")
"""What stands for no grammar at all; an empty schema is one, for any JSON."""
_SCHEMALESS = (None, "text", "json_object")
"""Types of formats that are built in."""

_NUMBER_OR_END = b"-0123456789]"

_any = msgspec.json.Decoder().decode
_entries = msgspec.json.Decoder(list[msgspec.Raw]).decode
_list = re.compile(rb"\[[ \t\r\n]*(.)").match


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
    options = _mapping(found.get("options"))
    if caps.max_n is not None:
        _check_answers(caps.max_n, max(ask.n, _whole(found.get("best_of"))), _prompts(found.get("prompt")))
    _check(caps.max_tools, _length(found.get("tools")) + _length(found.get("functions")), "tools")
    stops = [_length(found.get(name)) for name in ("stop", "stop_sequences")]
    _check(caps.max_stop, max(*stops, _items(options.get("stop"))), "stop")
    if caps.max_logprobs is not None:
        _check(caps.max_logprobs, _logprobs(found), "logprobs")
    if caps.grammar is False:
        _check_grammar(found)


def clamp_options(body: bytes, most: int) -> dict[str, object]:
    """Changes for :func:`~llmgw.core.splicing.splice` after which Ollama's ``options.num_predict``
    is at most ``most``; zero and below mean no limit there."""
    options = _mapping(read_members(body).get("options"))
    wanted = options.get("num_predict")
    if isinstance(wanted, int) and not isinstance(wanted, bool) and 0 < wanted <= most:
        return {}
    return {"options": {**options, "num_predict": most}}


def _check(most: int | None, count: float, name: str) -> None:
    if most is not None and count > most:
        raise InvalidRequest(f"{name!r} may be {most} at most for this key or model", param=name)


def _check_answers(most: int, each: float, prompts: int) -> None:
    """A list of prompts is answered one by one, each so many times."""
    _check(most, each, "n")
    if each * prompts > most:
        asked = f"{prompts} prompts ask for {max(1, each) * prompts:g} answers"
        raise InvalidRequest(f"{asked}; {most} are allowed for this key or model", param="prompt")


def _prompts(raw: msgspec.Raw | None) -> int:
    """How many prompts ``prompt`` holds. A list with numbers in it is one, in tokens, and may be long."""
    begins = None if raw is None else _list(memoryview(raw))
    if raw is None or begins is None or begins[1] in _NUMBER_OR_END:
        return 1
    entries = _entries(raw)
    return 1 if any(memoryview(each)[0] in _NUMBER_OR_END for each in entries) else len(entries)


def _logprobs(found: Mapping[str, msgspec.Raw]) -> float:
    """How many alternatives for each token are wanted; ``true`` alone is one, as is a word
    in ``include``, and a number below zero all that there are."""
    counts = [_whole(found.get(name)) for name in LOGPROBS]
    included = found.get("include")
    words = [] if included is None else _any(included)
    if isinstance(words, list) and any(isinstance(each, str) and "logprobs" in each for each in words):
        counts.append(1)
    return math.inf if min(counts) < 0 else max(counts)


def _check_grammar(found: Mapping[str, msgspec.Raw]) -> None:
    for name in GRAMMARS:
        if name in found and _any(found[name]) not in _NO_GRAMMAR:
            raise InvalidRequest(f"{name!r} is not allowed for this key or model", param=name)
    for name, format in (
        ("response_format", _mapping(found.get("response_format"))),
        ("text", _mapping(found.get("text")).get("format")),
        ("output_format", _mapping(found.get("output_format"))),
        ("output_config", _mapping(found.get("output_config")).get("format")),
    ):
        if isinstance(format, dict) and (format.get("type") not in _SCHEMALESS or "schema" in format):
            raise InvalidRequest(f"{name!r} with a schema is not allowed for this key or model", param=name)
    format = found.get("format")
    if format is not None and isinstance(_any(format), dict):  # Ollama: a schema, where "json" is a word
        raise InvalidRequest("'format' with a schema is not allowed for this key or model", param="format")


def _whole(raw: msgspec.Raw | None) -> float:
    """A number that stands for a count; ``true`` is 1, and what is no number is 0."""
    value = None if raw is None else _any(raw)
    return value if isinstance(value, int | float) else 0


def _length(raw: msgspec.Raw | None) -> int:
    return 0 if raw is None else _items(_any(raw))


def _items(value: Any) -> int:
    """Entries of a list; a bare string is one."""
    if isinstance(value, list):
        return len(value)
    return 1 if isinstance(value, str) and value else 0


def _mapping(raw: msgspec.Raw | None) -> dict[str, Any]:
    value = None if raw is None else _any(raw)
    return value if isinstance(value, dict) else {}
