"""Keys in other letters: refused where they pass for one that is read, left alone elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmgw.core import body, caps, prompt
from llmgw.core.body import read_json
from llmgw.core.spelling import READ, check_spelling
from llmgw.errors import InvalidRequest


@pytest.mark.parametrize("name", sorted(READ))
def test_every_key_that_is_read_is_read_as_it_is_spelled_only(name: str) -> None:
    check_spelling(["model", name])
    for spelled in (name.upper(), name.title(), name[:-1] + name[-1].upper()):
        with pytest.raises(InvalidRequest, match="passes for") as caught:
            check_spelling(["model", spelled])
        assert caught.value.param == name


@pytest.mark.parametrize(("spelled", "param"), [("\u017ftream", "stream"), ("max_to\u212aens", "max_tokens")])
def test_letters_outside_ascii_are_folded_as_go_folds_them(spelled: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_spelling([spelled])
    assert caught.value.param == param
    assert caught.value.message.isascii()


@pytest.mark.parametrize("key", ["topK", "userId", "maxTokens", "MODELS", "metadata", "1", "", "\u6a21", "K"])
def test_other_keys_may_be_spelled_as_they_like(key: str) -> None:
    check_spelling(["model", key])


@pytest.mark.parametrize(
    "text",
    [
        '{"model":"m","Model":"x"}',
        '{"MODEL":"x","model":"m"}',
        '{"model":"m","m\\u006fdeL":"x"}',
        '{"model":"m","messages":[{"role":"user"}],"Max_Tokens":9}',
        '{"model":"m","Messages":[]}',
    ],
)
def test_a_body_with_such_a_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="passes for"):
        read_json(text.encode())


def test_none_that_is_read_is_forgotten() -> None:
    texts = [Path(module.__file__).read_text() for module in (body, caps, prompt)]
    reads = r'(?:found\.get\(|_mapping\([^"]+, )"(\w+)"'
    literal = {name for text in texts for name in re.findall(reads, text)}
    assert {"include", "options", "output_config", "prompt"} <= literal
    named = {*caps.GRAMMARS, *caps.LOGPROBS, *body.OUTPUT_LIMITS, *body.SESSIONS}
    assert literal | named <= READ
