"""The filter ``deny-pattern``: what it finds, what it passes by, and that no text takes it long."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from llmgw.builtins import deny_pattern
from llmgw.errors import ConfigError, RequestRefused
from llmgw.testing import submission
from llmgw.values import Caller

CALLER = Caller("anonymous")


def denied(options: dict[str, Any], body: bytes | dict[str, Any], **fields: Any) -> str | None:
    """The refusal's message, ``None`` if it passes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        deny_pattern.build(options).check(submission(raw, **fields), CALLER)
    except RequestRefused as error:
        return error.message
    return None


def said(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}


@pytest.mark.parametrize(
    ("options", "text", "found"),
    [
        ({}, "anything", False),
        ({"words": ["Bomb"]}, "how to build a BOMB", True),
        ({"words": ["bomb"]}, "how to build a boat", False),
        (
            {"patterns": [r"(?i)ignore\s+(all\s+)?previous\s+instructions"]},
            "Ignore  previous\ninstructions",
            True,
        ),
        ({"patterns": [r"\b\d{16}\b"]}, "card 1234567812345678", True),
        ({"patterns": [r"\b\d{16}\b", "x{3}"]}, "xxx", True),
        ({"patterns": ["^secret$"]}, "no secret", False),
        ({"patterns": ["(?i)GRÜN"]}, "grün", True),
    ],
)
def test_words_and_patterns(options: dict[str, Any], text: str, found: bool) -> None:
    assert (denied(options, said(text)) is not None) == found


def test_escapes_hide_nothing() -> None:
    assert denied({"words": ["bomb"]}, b'{"prompt":"\\u0062\\u006fmb"}')
    assert denied({"words": ["a/b"]}, b'{"prompt":"a\\/b"}')


def test_numbers_that_no_float_holds_hide_nothing() -> None:
    assert denied({"words": ["bomb"]}, b'{"seed":1e999,"prompt":"\\u0062omb"}')
    assert denied({"words": ["bomb"]}, b'{"seed":-1e999,"prompt":"boat"}') is None


def test_images_are_passed_by_and_keys_are_not() -> None:
    assert denied({"words": ["bomb"]}, {"image_url": {"url": "data:image/png;base64,bomb"}}) is None
    assert denied({"words": ["bomb"]}, {"bomb": 1})


def test_other_bodies_are_looked_at_as_they_are() -> None:
    form = b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\na bomb\xff\r\n--x--\r\n'
    assert denied({"words": ["bomb"]}, form, content_type="multipart/form-data; boundary=x")


def test_only_so_much_is_looked_at() -> None:
    body = {"a": "x" * 50, "b": "bomb"}
    assert denied({"words": ["bomb"], "most_chars": 50}, body) is None
    assert denied({"words": ["bomb"]}, body)


def test_the_message_is_the_operators() -> None:
    assert denied({"words": ["bomb"], "message": "not here"}, said("bomb")) == "not here"


@pytest.mark.parametrize(
    ("options", "where", "what"),
    [
        ({"word": []}, "word", "unknown"),
        ({"words": "bomb"}, "words", "array"),
        ({"words": ["a"] * 1001}, "words", "1000"),
        ({"words": ["a", ""]}, "words[1]", "1 to 1000 characters"),
        ({"words": [5]}, "words[0]", "1 to 1000 characters"),
        ({"patterns": ["a", "("]}, "patterns[1]", "no RE2 expression"),
        ({"patterns": [r"(a)\1"]}, "patterns[0]", "no RE2 expression"),
        ({"patterns": ["(?=a)"]}, "patterns[0]", "no RE2 expression"),
        ({"patterns": ["a" * 1001]}, "patterns[0]", "1 to 1000 characters"),
        ({"message": ""}, "message", "1 to 500"),
        ({"most_chars": True}, "most_chars", "whole number"),
        ({"most_chars": 0}, "most_chars", "whole number"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(ConfigError) as raised:
        deny_pattern.build(options)
    (fault,) = raised.value.faults
    assert (fault.where, what in fault.what) == (where, True), fault.what


def test_patterns_that_are_too_much_together() -> None:
    with pytest.raises(ConfigError) as raised:
        deny_pattern.build({"patterns": [f"x{number}[a-z]{{900}}" for number in range(900)]})
    assert raised.value.faults[0].where == "patterns"


def test_without_re2_patterns_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(ConfigError, match=r"llmgw\[filters\]"):
        deny_pattern.build({"patterns": ["a"]})
    assert denied({"words": ["bomb"]}, said("bomb"))


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|aa)+$", r"(.*a){12}b", r"\s+x", r"(\w+\s?)*!"])
def test_no_text_takes_a_pattern_long(pattern: str) -> None:
    """Each of these takes a backtracking engine minutes or years."""
    begun = time.process_time()
    for text in ("a" * 100_000, " " * 100_000, "aa " * 30_000):
        denied({"patterns": [pattern]}, said(text))
    assert time.process_time() - begun < 5
