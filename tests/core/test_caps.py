"""What a key or a model may ask: each cap by itself, every spelling of what it caps."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest

from llmgw.config.schema import Limits
from llmgw.core.body import BodyLimits, read_json
from llmgw.core.caps import GRAMMARS, check_caps, clamp_options
from llmgw.core.splicing import splice
from llmgw.errors import InvalidRequest
from llmgw.values import Caps


def refusal(caps: Caps, prompt_tokens: int = 10, **members: Any) -> str | None:
    """The key at fault, ``None`` if the request is allowed."""
    body = json.dumps({"model": "m", "messages": [], **members}).encode()
    try:
        check_caps(caps, read_json(body), prompt_tokens, body)
    except InvalidRequest as error:
        return error.param
    return None


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("caps", "members", "param"),
    [
        (Caps(), {"n": 8, "stop": ["a"] * 16, "logprobs": True, "grammar": "root ::= x"}, None),
        (Caps(max_n=2), {"n": 2}, None),
        (Caps(max_n=2), {"n": 3}, "n"),
        (Caps(max_n=2), {"n_cmpl": 3}, "n"),
        (Caps(max_n=2), {"best_of": 3}, "n"),
        (Caps(max_n=2), {"best_of": None}, None),
        (Caps(max_n=2), {"prompt": ["a", "b"]}, None),
        (Caps(max_n=2), {"prompt": ["a", "b", "c"]}, "prompt"),
        (Caps(max_n=2), {"prompt": ["a", "b"], "n": 2}, "prompt"),
        (Caps(max_n=2), {"prompt": [[1, 2], [3], "c"]}, "prompt"),
        (Caps(max_n=2), {"prompt": [1, 2, 3]}, None),
        (Caps(max_n=2), {"prompt": ["a", 2, "c"]}, None),
        (Caps(max_n=2), {"prompt": []}, None),
        (Caps(max_n=5000), {"prompt": ["a"] * 5001}, "prompt"),
        (Caps(max_n=2000), {"prompt": ["a"] * 2001}, "prompt"),
        (Caps(max_tools=5000), {"functions": [1] * 5001}, "tools"),
        (Caps(max_tools=5000), {"functions": [1] * 5000}, None),
        (Caps(max_stop=1), {"options": {"x": "a" * 300_000}}, "options"),
        (Caps(max_logprobs=0), {"include": ["a" * 50] * 10_000}, "logprobs"),
        (Caps(max_logprobs=0), {"logprobs": ["a" * 50] * 10_000}, None),
        (Caps(grammar=False), {"response_format": {"x": "a" * 300_000}}, "response_format"),
        (Caps(max_n=2), {"prompt": [-1, "b", "c"]}, None),
        (Caps(max_n=2), {"prompt": {"a": 1}}, None),
        (Caps(max_n=2), {"prompt": "abc", "n": 2}, None),
        (Caps(), {"prompt": ["a"] * 50}, None),
        (Caps(max_logprobs=0), {"include": ["message.output_text.logprobs"]}, "logprobs"),
        (Caps(max_logprobs=1), {"include": ["message.output_text.logprobs"]}, None),
        (Caps(max_logprobs=0), {"include": ["reasoning.encrypted_content", 5]}, None),
        (Caps(max_logprobs=0), {"include": None}, None),
        (Caps(max_stop=1), {"stop": "a"}, None),
        (Caps(max_stop=0), {"stop": "a"}, "stop"),
        (Caps(max_stop=0), {"stop": ""}, None),
        (Caps(max_stop=0), {"stop": None}, None),
        (Caps(max_stop=1), {"stop": ["a", "b"]}, "stop"),
        (Caps(max_stop=1), {"stop_sequences": ["a", "b"]}, "stop"),
        (Caps(max_stop=1), {"options": {"stop": ["a", "b"]}}, "stop"),
        (Caps(max_stop=1), {"options": "junk"}, None),
        (Caps(max_tools=1), {"tools": [TOOL]}, None),
        (Caps(max_tools=1), {"tools": [TOOL, TOOL]}, "tools"),
        (Caps(max_tools=1), {"tools": [TOOL], "functions": [TOOL]}, "tools"),
        (Caps(max_tools=0), {"tools": []}, None),
        (Caps(max_logprobs=0), {}, None),
        (Caps(max_logprobs=0), {"logprobs": False, "top_logprobs": 0}, None),
        (Caps(max_logprobs=0), {"logprobs": None}, None),
        (Caps(max_logprobs=0), {"logprobs": True}, "logprobs"),
        (Caps(max_logprobs=1), {"logprobs": True}, None),
        (Caps(max_logprobs=5), {"logprobs": True, "top_logprobs": 6}, "logprobs"),
        (Caps(max_logprobs=5), {"logprobs": 6}, "logprobs"),
        (Caps(max_logprobs=5), {"n_probs": 6}, "logprobs"),
        (Caps(max_logprobs=5), {"n_probs": "many"}, None),
        (Caps(max_logprobs=5), {"prompt_logprobs": 6}, "logprobs"),
        (Caps(max_logprobs=5), {"logprobs": True, "top_logprobs": -1}, "logprobs"),
        (Caps(max_logprobs=5), {"prompt_logprobs": -1}, "logprobs"),
        (Caps(grammar=True), {"grammar": "x"}, None),
        (Caps(grammar=False), {"grammar": ""}, None),
        (Caps(grammar=False), {"json_schema": None, "regex": False}, None),
        (Caps(grammar=False), {"response_format": {"type": "json_object"}}, None),
        (Caps(grammar=False), {"response_format": {"type": "text"}}, None),
        (Caps(grammar=False), {"response_format": {"type": "json_schema"}}, "response_format"),
        (Caps(grammar=False), {"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        (Caps(grammar=False), {"text": {"format": {"type": "json_schema"}}}, "text"),
        (Caps(grammar=False), {"text": {"format": {"type": "text"}}}, None),
        (Caps(grammar=False), {"text": {"format": 5}}, None),
        (Caps(grammar=False), {"format": "json"}, None),
        (Caps(grammar=False), {"text": {"format": None}}, None),
        (Caps(grammar=False), {"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
        (Caps(grammar=False), {"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        (Caps(grammar=False), {"output_config": {"effort": "low"}}, None),
        (Caps(grammar=False), {"format": {"type": "object"}}, "format"),
        (Caps(grammar=False), {"format": {}}, "format"),
        (Caps(grammar=False), {"format": None}, None),
    ],
)
def test_each_cap(caps: Caps, members: dict[str, Any], param: str | None) -> None:
    assert refusal(caps, **members) == param


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_kind_of_grammar(name: str) -> None:
    assert refusal(Caps(grammar=False), **{name: ["x"]}) == name
    # An empty schema stands for any JSON; it is compiled all the same.
    assert refusal(Caps(grammar=False), **{name: {}}) == name


def test_a_long_prompt_is_refused_whatever_the_body_is() -> None:
    assert refusal(Caps(max_prompt_tokens=10), 10) is None
    assert refusal(Caps(max_prompt_tokens=10), 11) == "messages"
    with pytest.raises(InvalidRequest, match="about 11 tokens"):
        check_caps(Caps(max_prompt_tokens=10), read_json(b'{"model":"m"}'), 11, b"")
    check_caps(Caps(max_n=1), read_json(b'{"model":"m","n":2}'), 1, b"")


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"num_predict": 50}, None),
        ({"num_predict": 0}, {"num_predict": 100}),
        ({"num_predict": 101}, {"num_predict": 100}),
        ({"num_predict": -1, "seed": 3}, {"num_predict": 100, "seed": 3}),
        ({"num_predict": True}, {"num_predict": 100}),
        ({"seed": 3}, {"seed": 3, "num_predict": 100}),
        (None, {"num_predict": 100}),
    ],
)
def test_ollamas_limit_is_inside_its_options(options: Any, changed: Any) -> None:
    body = json.dumps({"model": "m", "options": options}).encode()
    changes = clamp_options(body, 100)
    assert (changes == {}) == (changed is None)
    assert json.loads(splice(body, changes))["options"] == (changed or options)


def test_a_number_beyond_all_is_more_than_any_cap() -> None:
    """It is JSON, though no float: what is a count is refused, and what is none stays as it came."""

    def refuse(caps: Caps, members: bytes) -> str | None:
        body = b'{"model":"m",%b}' % members
        with pytest.raises(InvalidRequest) as caught:
            check_caps(caps, read_json(body), 1, body)
        return caught.value.param

    everything = Caps(max_n=8, max_tools=8, max_stop=8, max_logprobs=8, grammar=False)
    assert refuse(everything, b'"best_of":1e999') == "n"
    assert refuse(everything, b'"n_probs":1e999') == "logprobs"
    assert refuse(everything, b'"top_logprobs":-1e999') == "logprobs"
    rest = b'"include":[1e999],"text":{"a":-1e999,"format":{"b":1e999}}'
    body = b'{"model":"m",%b,"options":{"num_predict":1e999,"top_k":[1e999, 1.50]}}' % rest
    check_caps(everything, read_json(body), 1, body)
    assert splice(body, clamp_options(body, 9)) == body.replace(
        b'{"num_predict":1e999,"top_k":[1e999, 1.50]}', b'{"num_predict":9,"top_k":[1e999, 1.50]}'
    )


def test_the_deepest_body_that_may_be_configured_is_read_to_its_bottom() -> None:
    """Parsers count Python's calls, too, of which a gateway has some dozens under way."""
    (rule,) = get_type_hints(Limits, include_extras=True)["json_depth"].__metadata__
    levels = rule.most - 3

    def read(calls: int) -> None:
        if calls:
            read(calls - 1)
        else:
            check_caps(Caps(max_logprobs=0, grammar=False), read_json(body, limits), 1, body)

    for opener, closer in ((b"[", b"]"), (b'{"a": ', b"}")):
        deep = b"[{}, %b1%b]" % (opener * levels, closer * levels)
        body = b'{"model":"m","logprobs":%b,"text":{"format":%b}}' % (deep, deep)
        limits = BodyLimits(depth=rule.most)
        read(100)


def test_the_tightest_of_several() -> None:
    assert Caps.tightest([]) is None
    assert Caps.tightest([Caps(), Caps()]) is None
    merged = Caps.tightest([Caps(max_n=3, grammar=True), Caps(max_n=2, max_stop=0, grammar=False), Caps()])
    assert merged == Caps(max_n=2, max_stop=0, grammar=False)
