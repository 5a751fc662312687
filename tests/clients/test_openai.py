"""The official ``openai`` package for Python."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live_gateway import MODELS, LiveGateway, wait_until

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

pytestmark = pytest.mark.real

WORDS: list[Any] = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 1}


class Weather(pydantic.BaseModel):  # type: ignore[misc]
    """What a schema may ask for."""

    warm: bool


def connect(gateway: LiveGateway, key: str = "all", **options: Any) -> Any:
    options = {"max_retries": 0, "timeout": 30, "api_key": gateway.keys.get(key, key), **options}
    transport = openai.DefaultHttpxClient(verify=gateway.tls, trust_env=False)
    return openai.OpenAI(base_url=gateway.v1, http_client=transport, **options)


@pytest.fixture
def client(live_gateway: LiveGateway) -> Iterator[Any]:
    with connect(live_gateway) as client:
        yield client


# --- answers ----------------------------------------------------------------------


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=WORDS, max_tokens=8)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_says_the_same(client: Any) -> None:
    asked = {"model": "pair", "messages": WORDS, "max_tokens": 12, **GREEDY}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 4
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_usage_asked_for_has_none(client: Any) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=WORDS, max_tokens=3, stream=True))
    assert all(chunk.choices for chunk in chunks)


def test_the_streaming_helper_puts_tool_calls_together(client: Any) -> None:
    with client.chat.completions.stream(model="tiny", messages=WORDS, tools=TOOLS, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert answer.finish_reason == "tool_calls"
    assert "city" in json.loads(answer.message.tool_calls[0].function.arguments)


def test_a_tools_result_is_taken(client: Any) -> None:
    first = client.chat.completions.create(model="tiny", messages=WORDS, tools=TOOLS, **GREEDY).choices[0]
    call = first.message.tool_calls[0]
    assert first.finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert "city" in json.loads(call.function.arguments)
    talk = [*WORDS, first.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    second = client.chat.completions.create(model="tiny", messages=talk, tools=TOOLS, max_tokens=9, **GREEDY)
    assert second.choices[0].message.content


def test_log_probabilities(client: Any) -> None:
    asked = {
        "model": "tiny",
        "messages": WORDS,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 4,
        **GREEDY,
    }
    told = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(told) == 4
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in told)
    streamed = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**asked, stream=True)]
    assert sum(len(one.content) for one in streamed if one) == 4


def test_two_choices(client: Any) -> None:
    asked = {"model": "pair", "messages": WORDS, "n": 2, "max_tokens": 5}
    answer = client.chat.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.message.content for choice in answer.choices)
    seen = {
        choice.index
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
    }
    assert seen == {0, 1}


def test_a_schema_is_kept(client: Any) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=WORDS, response_format=Weather, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_text_completion(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt="The", max_tokens=5)
    assert answer.choices[0].text
    chunks = list(client.completions.create(model="tiny", prompt="The", max_tokens=5, stream=True))
    assert any(chunk.choices[0].text for chunk in chunks)


def test_responses(client: Any) -> None:
    answer = client.responses.create(model="tiny", input="Hello", max_output_tokens=6, temperature=0)
    assert answer.output_text
    assert answer.usage.output_tokens == 6
    with client.responses.create(model="tiny", input="Hello", max_output_tokens=6, stream=True) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_embeddings_come_as_numbers_and_as_base64(client: Any) -> None:
    numbers, packed = (
        client.embeddings.with_raw_response.create(
            model="embed", input=["fast", "soup"], encoding_format=form
        )
        for form in ("float", "base64")
    )
    vectors = [one["embedding"] for one in json.loads(numbers.text)["data"]]
    packed_ones = [base64.b64decode(one["embedding"]) for one in json.loads(packed.text)["data"]]
    assert [len(vector) for vector in vectors] == [896, 896]
    for vector, raw in zip(vectors, packed_ones, strict=True):
        assert struct.unpack(f"<{len(vector)}f", raw) == pytest.approx(vector, abs=1e-6)
    by_default = client.embeddings.create(model="embed", input=["fast", "soup"])
    assert by_default.data[0].embedding == pytest.approx(vectors[0], abs=1e-6)
    assert by_default.usage.prompt_tokens > 0


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == MODELS
    assert client.models.retrieve("gpt-4o-mini").id == "gpt-4o-mini"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing/of-the kind")


def test_the_asynchronous_client(live_gateway: LiveGateway) -> None:
    async def talk() -> list[str]:
        transport = openai.DefaultAsyncHttpxClient(verify=live_gateway.tls, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=live_gateway.v1, api_key=live_gateway.keys["all"], http_client=transport, max_retries=0
        ) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model="tiny", messages=WORDS, max_tokens=20, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(6)))

    assert all(asyncio.run(talk()))


# --- ids, errors, limits ------------------------------------------------------------


def test_a_request_id_is_kept(client: Any) -> None:
    asked = {"model": "tiny", "messages": WORDS, "max_tokens": 1}
    answer = client.chat.completions.create(**asked, extra_headers={"x-request-id": "mine-7.a:b_c"})
    assert answer._request_id == "mine-7.a:b_c"
    assert client.chat.completions.create(**asked)._request_id
    odd = client.chat.completions.create(**asked, extra_headers={"x-request-id": "no spaces"})
    assert odd._request_id != "no spaces"


def test_an_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=WORDS)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert caught.value.request_id


@pytest.mark.parametrize("key", ["lgw_nobody00_" + "x" * 43, "sk-something"])
def test_a_wrong_key_is_refused(live_gateway: LiveGateway, key: str) -> None:
    with connect(live_gateway, key) as client, pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model="tiny", messages=WORDS)
    assert caught.value.code == "invalid_api_key"
    assert key not in str(caught.value)


def test_a_model_outside_the_keys_scope_is_denied(live_gateway: LiveGateway) -> None:
    with connect(live_gateway, "scoped") as client, pytest.raises(openai.PermissionDeniedError) as caught:
        client.chat.completions.create(model="tiny", messages=WORDS)
    assert caught.value.code == "model_not_allowed"


@pytest.mark.parametrize("stream", [False, True])
def test_the_servers_own_refusal_of_a_long_prompt_is_passed_on(client: Any, stream: bool) -> None:
    long = [{"role": "user", "content": "harbour " * 4000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=long, stream=stream)
    assert caught.value.type == "exceed_context_size_error"
    assert caught.value.body["n_ctx"] == 2048


def test_a_keys_own_limit_is_told(live_gateway: LiveGateway) -> None:
    asked = {"model": "embed", "input": "soup"}
    with connect(live_gateway, "few") as client, pytest.raises(openai.RateLimitError) as caught:
        for _ in range(3):
            headers = client.embeddings.with_raw_response.create(**asked).headers
            assert headers["x-ratelimit-limit-requests"] == "2"
    headers = caught.value.response.headers
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(headers["retry-after"]) <= 60
    assert headers["x-ratelimit-remaining-requests"] == "0"


def test_it_waits_while_all_slots_are_busy(live_gateway: LiveGateway, while_full: Callable[..., Any]) -> None:
    with connect(live_gateway, max_retries=8) as client:
        answer = while_full(
            lambda: client.chat.completions.with_raw_response.create(
                model="big", messages=WORDS, max_tokens=1
            )
        )
    assert answer.retries_taken >= 1
    assert answer.parse().choices[0].message.content


def test_without_retries_it_is_told_when_to_come_back(
    live_gateway: LiveGateway, while_full: Callable[..., Any]
) -> None:
    with connect(live_gateway) as client, pytest.raises(openai.InternalServerError) as caught:
        while_full(lambda: client.chat.completions.create(model="big", messages=WORDS, max_tokens=1))
    assert caught.value.status_code == 503
    assert caught.value.code == "overloaded"
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_closed_stream_frees_its_place(live_gateway: LiveGateway, client: Any) -> None:
    stream = client.completions.create(
        model="big", prompt="The", stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert live_gateway.backend("big")["in_flight"] == 1
    stream.close()
    assert wait_until(lambda: live_gateway.backend("big")["in_flight"] == 0, 1)
    assert client.completions.create(model="big", prompt="The", max_tokens=1).choices[0].text


def test_a_client_that_does_not_trust_us_gets_nothing(live_gateway: LiveGateway) -> None:
    with (
        openai.OpenAI(
            base_url=live_gateway.v1,
            api_key=live_gateway.keys["all"],
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()
