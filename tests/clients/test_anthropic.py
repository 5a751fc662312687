"""The official ``anthropic`` package for Python, before llama-server's ``/v1/messages``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live_gateway import CAPPED_TOKENS, LiveGateway, wait_until

anthropic = pytest.importorskip("anthropic")

pytestmark = pytest.mark.real

WORDS: list[Any] = [{"role": "user", "content": "Hello"}]
ENDLESS = {"temperature": 0, "top_k": 1}
"""A greedy bigram model goes in circles. (llama-server drops ``ignore_eos`` on this route.)"""
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "Tells the weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


def connect(gateway: LiveGateway, key: str = "all", **options: Any) -> Any:
    options = {"max_retries": 0, "timeout": 30, "api_key": gateway.keys.get(key, key), **options}
    transport = anthropic.DefaultHttpxClient(verify=gateway.tls, trust_env=False)
    return anthropic.Anthropic(base_url=gateway.url, http_client=transport, **options)


@pytest.fixture
def client(live_gateway: LiveGateway) -> Iterator[Any]:
    with connect(live_gateway) as client:
        yield client


def test_a_message(client: Any) -> None:
    message = client.messages.create(
        model="tiny", messages=WORDS, max_tokens=8, extra_body={"temperature": 0}
    )
    assert (message.type, message.role) == ("message", "assistant")
    assert message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 8


def test_a_streamed_message_says_the_same(client: Any) -> None:
    asked = {"model": "pair", "messages": WORDS, "max_tokens": 12, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason


def test_tools(client: Any) -> None:
    asked = {"model": "tiny", "tools": TOOLS, "max_tokens": 100, "extra_body": {"temperature": 0}}
    with client.messages.stream(**asked, messages=WORDS) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    call = next(block for block in message.content if block.type == "tool_use")
    assert call.name == "weather"
    assert "city" in call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    talk = [
        *WORDS,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**{**asked, "max_tokens": 8}, messages=talk).content


def test_tokens_are_counted(client: Any) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=WORDS)
    message = client.messages.create(model="tiny", messages=WORDS, max_tokens=1)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_an_alias_with_a_ceiling(client: Any) -> None:
    message = client.messages.create(model="capped", messages=WORDS, max_tokens=500, extra_body=ENDLESS)
    assert message.usage.output_tokens == CAPPED_TOKENS
    assert message.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("key", "asked", "error", "kind"),
    [
        ("all", {"model": "claude-9"}, "NotFoundError", "not_found_error"),
        ("scoped", {"model": "tiny"}, "PermissionDeniedError", "permission_error"),
        ("lgw_nobody00_" + "x" * 43, {"model": "tiny"}, "AuthenticationError", "authentication_error"),
        ("all", {"model": "tiny", "max_tokens": "many"}, "BadRequestError", "invalid_request_error"),
    ],
)
def test_our_errors_have_its_form(
    live_gateway: LiveGateway, key: str, asked: dict[str, Any], error: str, kind: str
) -> None:
    with connect(live_gateway, key) as client, pytest.raises(getattr(anthropic, error)) as caught:
        client.messages.create(**{"messages": WORDS, "max_tokens": 4, **asked})
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == kind
    assert caught.value.body["error"]["message"]


def test_errors_of_count_tokens_have_its_form_too(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.count_tokens(model="claude-9", messages=WORDS)
    assert caught.value.body["error"]["type"] == "not_found_error"


def test_the_servers_own_refusal_of_a_long_prompt_is_passed_on(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(
            model="tiny", messages=[{"role": "user", "content": "harbour " * 4000}], max_tokens=4
        )
    assert caught.value.body["error"]["type"] == "exceed_context_size_error"


def test_a_request_id_is_kept(client: Any) -> None:
    message = client.messages.with_raw_response.create(
        model="tiny", messages=WORDS, max_tokens=1, extra_headers={"x-request-id": "mine-8"}
    )
    assert message.headers["x-request-id"] == "mine-8"


def test_it_waits_while_all_slots_are_busy(live_gateway: LiveGateway, while_full: Callable[..., Any]) -> None:
    with connect(live_gateway, max_retries=8) as client:
        answer = while_full(
            lambda: client.messages.with_raw_response.create(model="big", messages=WORDS, max_tokens=1)
        )
    assert answer.retries_taken >= 1
    assert answer.parse().content


def test_without_retries_it_is_told_when_to_come_back(
    live_gateway: LiveGateway, while_full: Callable[..., Any]
) -> None:
    with connect(live_gateway) as client, pytest.raises(anthropic.APIStatusError) as caught:
        while_full(lambda: client.messages.create(model="big", messages=WORDS, max_tokens=1))
    assert caught.value.status_code == 503
    assert caught.value.body["error"]["type"] == "overloaded_error"
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_closed_stream_frees_its_place(live_gateway: LiveGateway, client: Any) -> None:
    with client.messages.stream(model="big", messages=WORDS, max_tokens=8000, extra_body=ENDLESS) as stream:
        next(iter(stream.text_stream))
        assert live_gateway.backend("big")["in_flight"] == 1
    assert wait_until(lambda: live_gateway.backend("big")["in_flight"] == 0, 1)
