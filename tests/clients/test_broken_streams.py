"""What the official clients raise when a stream breaks: an error of theirs, with our words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import SSE_HEAD, Gateway, Line, Received, Scripted, chunk, event, gateway_with

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

WORDS: list[Any] = [{"role": "user", "content": "Hello"}]
EVENTS = {
    "/v1/chat/completions": event("Hello"),
    "/v1/responses": (
        b"event: response.output_text.delta\n"
        b'data: {"type":"response.output_text.delta","delta":"Hello","item_id":"i","output_index":0,'
        b'"content_index":0,"logprobs":[],"sequence_number":0}\n\n'
    ),
    "/v1/messages": (
        b"event: message_start\n"
        b'data: {"type":"message_start","message":{"id":"i","type":"message","role":"assistant","model":"m",'
        b'"content":[],"stop_reason":null,"stop_sequence":null,'
        b'"usage":{"input_tokens":1,"output_tokens":0}}}\n\n'
    ),
}


def one_event(line: Line, request: Received) -> None:
    line.send(SSE_HEAD, chunk(EVENTS[request.target]))
    time.sleep(0.05)
    line.reset()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    backend = Scripted(one_event)
    with gateway_with(
        tmp_path_factory.mktemp("broken"), backend, config="[breaker]\nconsecutive = 100\n"
    ) as gateway:
        yield gateway
    backend.close()


def chat(url: str) -> Any:
    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key="x", http_client=openai.DefaultHttpxClient(trust_env=False)
    )
    return client.chat.completions.create(model="m", messages=WORDS, stream=True)


def responses(url: str) -> Any:
    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key="x", http_client=openai.DefaultHttpxClient(trust_env=False)
    )
    return client.responses.create(model="m", input="Hello", stream=True)


def messages(url: str) -> Any:
    client = anthropic.Anthropic(
        base_url=url, api_key="x", http_client=anthropic.DefaultHttpxClient(trust_env=False)
    )
    return client.messages.create(model="m", max_tokens=5, messages=WORDS, stream=True)


@pytest.mark.parametrize(
    ("call", "raised"),
    [(chat, openai.APIError), (responses, openai.APIError), (messages, anthropic.APIStatusError)],
)
def test_a_cut_stream_is_raised_with_our_words(
    gateway: Gateway, call: Callable[[str], Any], raised: type[Exception]
) -> None:
    came = []
    with pytest.raises(raised, match="could not be used"):
        for one in call(f"http://127.0.0.1:{gateway.port}"):
            came.append(one)
    assert len(came) == 1, "the error is no event of the answer"
