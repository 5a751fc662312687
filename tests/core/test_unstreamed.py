"""What only an answer in one piece can tell is known by the request."""

from __future__ import annotations

import pytest

from llmgw.core.body import read_json

ALONE = [
    '"logprobs":true',
    '"logprobs":2',
    '"n_probs":1',
    '"return_tokens":true',
    '"response_fields":["content"]',
    '"n_indent":1',
    '"verbose":true',
    '"continue_final_message":true',
    '"continue_final_message":"content"',
    '"reasoning_format":"deepseek-legacy"',
    '"stream":"true"',
    '"stream":1',
    '"stream":{}',
    '"return_progress":"x"',
    '"return_progress":0',
    '"stream_options":{"include_usage":"x"}',
    '"stream_options":{"include_usage":1}',
    '"messages":[{"role":"user"},{"role":"assistant","content":"The"}]',
    '"messages":[{"content":"}]","role" : "assistant"}]',
    '"messages":[{"role":"user"},{"content":"\\"role\\":\\"user\\"","role":"assistant"}]',
]
STREAMED = [
    '"logprobs":false,"top_logprobs":2',
    '"logprobs":0',
    '"logprobs":null',
    '"n_probs":0',
    '"return_tokens":false',
    '"response_fields":[]',
    '"n_indent":0',
    '"verbose":false',
    '"continue_final_message":null',
    '"reasoning_format":"deepseek"',
    '"reasoning_format":null',
    '"stream":false',
    '"stream":null',
    '"return_progress":true',
    '"return_progress":null',
    '"stream_options":{"include_usage": true}',
    '"stream_options":{"include_usage":false}',
    '"stream_options":{"include_usage":null,"other":1}',
    '"stream_options":{}',
    '"stream_options":"x"',
    '"messages":[{"role":"assistant","content":"The"},{"role":"user"}]',
    '"messages":[{"role":"user","content":"\\"role\\":\\"assistant\\""}]',
    '"messages":[]',
    '"messages":"assistant"',
    '"messages":null',
    '"stop":["a"],"n":2,"tools":[{"role":"assistant"}]',
]


@pytest.mark.parametrize("around", ["", ',"metadata":{"a":[1]}', f',"padding":"{"x" * 600}"'])
@pytest.mark.parametrize("members", [*ALONE, *STREAMED])
def test_it_is_known_what_a_stream_does_not_tell(members: str, around: str) -> None:
    body = f'{{"model":"m",{members}{around}}}'.encode()
    assert read_json(body).unstreamed == (members in ALONE)


@pytest.mark.parametrize("members", ALONE)
def test_who_wants_a_stream_gets_what_it_tells(members: str) -> None:
    if '"stream":' not in members:
        assert not read_json(f'{{"model":"m","stream":true,{members}}}'.encode()).unstreamed
