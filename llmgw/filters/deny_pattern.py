"""Request filter ``deny-pattern``: refuses requests whose text holds certain words or patterns.

An example of a filter, and a blunt tool: it finds what is written, not what is
meant. Text is looked at decoded, so ``\\u0062omb`` is found as ``bomb``.

Words are searched as they are. Patterns are run by RE2, whose time is linear in
the text whatever the pattern is; Python's own ``re`` would let one prompt stop
the gateway for all (CWE-1333), so it is never used for them.

:source: RE2 syntax, https://github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from zope.interface import implementer

from llmgw.errors import ConfigError, ConfigFault, RequestRefused
from llmgw.interfaces import CONTRACT, IRequestFilter, IRequestFilterFactory
from llmgw.values import Caller, Submission

MAX_ENTRIES = 1000
MAX_PATTERN_CHARS = 1000
PATTERN_MEMORY_BYTES = 8 << 20

_any = msgspec.json.Decoder(float_hook=float).decode
"""Numbers do not matter: ``1e999`` is JSON, too."""


@implementer(IRequestFilter)
class DenyPattern:
    """:param words: lower case; one of them anywhere in the text is enough.

    :param patterns: one compiled expression, ``None`` for none.
    :param most_chars: of text that is looked at.
    """

    def __init__(self, words: tuple[str, ...], patterns: Any, message: str, most_chars: int) -> None:
        self._words = words
        self._patterns = patterns
        self._message = message
        self._most_chars = most_chars

    def check(self, submission: Submission, caller: Caller) -> None:
        """:raise RequestRefused: the text holds what is denied."""
        text = "\n".join(_limited(_strings(_decoded(submission)), self._most_chars))
        folded = text.lower()
        if any(word in folded for word in self._words) or (
            self._patterns is not None and self._patterns.search(text)
        ):
            raise RequestRefused(self._message)


@implementer(IRequestFilterFactory)
class DenyPatternFactory:
    """Options: ``words`` (array of texts, case does not matter), ``patterns`` (array of RE2
    expressions; needs the extra ``filters``), ``message``, ``most_chars`` (200,000)."""

    name = "deny-pattern"
    description = "refuses requests whose text holds given words or patterns"
    contract = CONTRACT

    def build(self, options: Mapping[str, Any]) -> DenyPattern:
        """:raise ConfigError: options are wrong."""
        faults = [
            ConfigFault(name, "unknown; the options are words, patterns, message, most_chars")
            for name in options
            if name not in ("words", "patterns", "message", "most_chars")
        ]
        words = _texts(options, "words", faults)
        patterns = _compiled(_texts(options, "patterns", faults), faults)
        message = options.get("message", "the request holds what is not allowed here")
        if not isinstance(message, str) or not 0 < len(message) <= 500:
            faults.append(ConfigFault("message", "must be a text of 1 to 500 characters"))
        most = options.get("most_chars", 200_000)
        if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= 10_000_000:
            faults.append(ConfigFault("most_chars", "must be a whole number of 1 to 10000000"))
        if faults:
            raise ConfigError(faults)
        return DenyPattern(tuple(word.lower() for word in words), patterns, message, most)


def _texts(options: Mapping[str, Any], name: str, faults: list[ConfigFault]) -> list[str]:
    values = options.get(name, [])
    if not isinstance(values, list) or len(values) > MAX_ENTRIES:
        faults.append(ConfigFault(name, f"must be an array of at most {MAX_ENTRIES} texts"))
        return []
    good = []
    for index, value in enumerate(values):
        if isinstance(value, str) and 0 < len(value) <= MAX_PATTERN_CHARS:
            good.append(value)
        else:
            where = f"{name}[{index}]"
            faults.append(ConfigFault(where, f"must be a text of 1 to {MAX_PATTERN_CHARS} characters"))
    return good


def _compiled(patterns: list[str], faults: list[ConfigFault]) -> Any:
    """All patterns as one expression of RE2."""
    if not patterns:
        return None
    try:
        re2 = importlib.import_module("re2")
    except ImportError:
        faults.append(ConfigFault("patterns", "need RE2: pip install 'llmgw[filters]'; words do not"))
        return None
    settings = re2.Options()
    settings.max_mem = PATTERN_MEMORY_BYTES
    settings.log_errors = False
    before = len(faults)
    for index, pattern in enumerate(patterns):
        try:
            re2.compile(pattern, settings)
        except re2.error as error:
            faults.append(ConfigFault(f"patterns[{index}]", f"is no RE2 expression: {_told(error)}"))
    if len(faults) > before:
        return None
    try:
        return re2.compile("|".join(f"(?:{pattern})" for pattern in patterns), settings)
    except re2.error as error:
        faults.append(ConfigFault("patterns", f"are too much together: {_told(error)}"))
        return None


def _told(error: Exception) -> str:
    cause = error.args[0] if error.args else error
    return cause.decode("utf-8", "replace") if isinstance(cause, bytes) else str(cause)


def _decoded(submission: Submission) -> Any:
    if submission.content_type.startswith("application/json"):
        return _any(submission.body)
    return submission.body.decode("utf-8", "replace")


def _strings(value: Any) -> Iterator[str]:
    """Every text in ``value`` in order, keys included, but no images and sounds."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            if not value.startswith("data:"):
                yield value
        elif isinstance(value, dict):
            for key in reversed(value):
                todo += (value[key], key)
        elif isinstance(value, list):
            todo += reversed(value)


def _limited(texts: Iterator[str], most_chars: int) -> Iterator[str]:
    for text in texts:
        if most_chars <= 0:
            return
        yield text[:most_chars]
        most_chars -= len(text)
