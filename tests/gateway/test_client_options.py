"""What clients ask of the gateway by ``x-llmgw-`` headers: read, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Answer, Gateway, Received, Scripted, answer_completion, chat_body, gateway_with, post

from llmgw.gateway.client_options import interim_kinds, timeout_s

UNREADABLE = {
    "x-llmgw-timeout": [
        "", "0", "0.0", "-1", "+5", "soon", "20s", "nan", "inf", "1e3", "1_000", "0x10", "1,5", ".", "1.5.2",
        "9" * 10, "1" * 4000, "1." + "0" * 21, "\u0661".encode().decode("latin-1"),
    ],
    "x-llmgw-interim": ["103", "true", "102 sse", "sse, 102, more", "102;q=1", "1" * 4000],
}  # fmt: skip
CASES = [(name, value) for name, values in UNREADABLE.items() for value in values]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Scripted]]:
    backend = Scripted()
    with gateway_with(tmp_path_factory.mktemp("wishes"), backend) as gateway:
        yield gateway, backend
    backend.close()


@pytest.fixture
def gateway(made: tuple[Gateway, Scripted]) -> Gateway:
    made[1].play(answer_completion)
    return made[0]


@pytest.fixture
def received(made: tuple[Gateway, Scripted]) -> list[Received]:
    """What the backend gets from now on."""
    made[1].requests = []
    return made[1].requests


def ask(gateway: Gateway, *headers: tuple[str, str], path: str = "/v1/chat/completions") -> Answer:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return gateway.ask(post(path, chat_body(), headers=lines))


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda text: repr(text)[:30])
def test_a_wish_that_cannot_be_read_is_refused_by_name(
    gateway: Gateway, received: list[Received], name: str, value: str
) -> None:
    answer = ask(gateway, (name, value))
    assert answer.status == 400
    error = answer.json["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "invalid_request",
        name,
    )
    assert name in error["message"]
    assert not received


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_wish_is_refused_in_the_form_of_the_route(gateway: Gateway, name: str) -> None:
    anthropic = ask(gateway, (name, "no"), path="/v1/messages").json
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "invalid_request_error")
    assert name in anthropic["error"]["message"]
    assert name in ask(gateway, (name, "no"), path="/api/chat").json["error"]


def test_two_that_differ_are_no_wish(gateway: Gateway) -> None:
    assert ask(gateway, ("x-llmgw-timeout", "5"), ("x-llmgw-timeout", "7")).status == 400


def test_it_is_told_before_the_body_is_sent(gateway: Gateway) -> None:
    request = post(body=b"", headers="x-llmgw-timeout: 20s\r\nexpect: 100-continue\r\n", length=1000)
    with gateway.client() as client:
        client.send(request)
        assert client.read_answer().status == 400


def test_where_nothing_is_asked_of_a_backend_nothing_is_read(gateway: Gateway) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nHost: gw.example\r\nx-llmgw-timeout: no\r\n\r\n"
    assert gateway.ask(request).status == 200


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"20", 20.0),
        (b"0.5", 0.5),
        (b".5", 0.5),
        (b"5.", 5.0),
        (b"0.30000000000000004", 0.3),
        (b"999999999", 999999999.0),
    ],
)
def test_seconds_as_languages_print_them(value: bytes, seconds: float) -> None:
    assert timeout_s({b"x-llmgw-timeout": value}) == pytest.approx(seconds)


def test_words_are_a_list() -> None:
    assert interim_kinds({}) == interim_kinds({b"x-llmgw-interim": b""}) == frozenset()
    assert interim_kinds({b"x-llmgw-interim": b"102, SSE,"}) == {b"102", b"sse"}
