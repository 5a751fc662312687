"""What a client that asked for it hears while its model is loaded, and what all others do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Client, Gateway, Line, Received, chat_body, eventually, json_response, post
from router_brain import RouterBrain, RouterServer

from .scenes import closing, gateway_before, states

LOADED = [f"m{number}" for number in range(12)]
BROKEN = [f"broken{number}" for number in range(4)]
SLOW = "slow"
REFUSING, PLAIN = "refusing", "plain"
COMMENT = b": loading\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
DONE = b"data: [DONE]\n\n"


class Server(RouterServer):
    """One that does not always stream when it should."""

    def answer(self, line: Line, request: Received) -> bool:
        model = request.json["model"]
        if model == REFUSING:
            error = {"message": "no such grammar", "type": "invalid_request_error", "code": 400}
            line.send(json_response({"error": error}, 400))
        elif model == PLAIN:
            line.send(json_response({"choices": []}))
        return model in (REFUSING, PLAIN)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, RouterBrain]]:
    """A gateway whose loads take a second, of which each test takes models of its own."""
    load_s = dict.fromkeys((*LOADED, *BROKEN, REFUSING, PLAIN), 1.0) | {SLOW: 3600.0}
    brain = RouterBrain(*LOADED, *BROKEN, SLOW, REFUSING, PLAIN, most=0, load_s=load_s, broken=BROKEN)
    server = Server(brain)
    hold = "min_s = 2.0\nmax_s = 2.0\ninterim_s = 0.1"
    with (
        closing(server),
        gateway_before(tmp_path_factory.mktemp("signs"), server, hold=hold) as gateway,
    ):
        eventually(lambda: states(gateway))
        yield gateway, brain


@pytest.fixture
def gateway(scene: tuple[Gateway, RouterBrain]) -> Gateway:
    return scene[0]


@pytest.fixture(scope="module")
def models() -> Iterator[str]:
    return iter(LOADED)


@pytest.fixture(scope="module")
def broken() -> Iterator[str]:
    return iter(BROKEN)


def heads(client: Client) -> list[int]:
    """The statuses of one request, up to the final one."""
    found: list[int] = []
    while not found or found[-1] < 200:
        found.append(client.read_head()[0])
    return found


def ask(
    gateway: Gateway, model: str, interim: str = "", path: str = "/v1/chat/completions", **fields: Any
) -> bytes:
    """All that comes for a request, with its connection closed at the end."""
    headers = "connection: close\r\n" + (f"x-llmgw-interim: {interim}\r\n" if interim else "")
    with gateway.client(20.0) as client:
        client.send(post(path, chat_body(model, **fields), headers))
        data = b""
        while piece := client.sock.recv(65536):
            data += piece
    return data


def test_102_is_sent_to_who_asks_for_it_five_times_at_most(gateway: Gateway, models: Iterator[str]) -> None:
    with gateway.client(20.0) as client:
        client.send(post(body=chat_body(next(models)), headers="x-llmgw-interim: 102\r\n"))
        found = heads(client)
    assert found[-1] == 200
    assert 2 <= len(found) - 1 <= 5
    assert set(found[:-1]) == {102}


def test_five_at_most_where_the_hold_is_long(gateway: Gateway) -> None:
    with gateway.client(20.0) as client:
        client.send(post(body=chat_body(SLOW), headers="x-llmgw-interim: 102\r\n"))
        assert heads(client) == [102] * 5 + [503]


def test_who_does_not_ask_hears_nothing(gateway: Gateway, models: Iterator[str]) -> None:
    with gateway.client(20.0) as client:
        client.send(post(body=chat_body(next(models), stream=True)))
        assert heads(client) == [200]


def test_http_1_0_knows_no_interim_responses(gateway: Gateway, models: Iterator[str]) -> None:
    with gateway.client(20.0) as client:
        client.send(post(body=chat_body(next(models)), headers="x-llmgw-interim: 102\r\n", version="1.0"))
        assert heads(client) == [200]


def test_a_stream_may_begin_with_comments(gateway: Gateway, models: Iterator[str]) -> None:
    with gateway.client(20.0) as client:
        client.send(post(body=chat_body(next(models), stream=True), headers="x-llmgw-interim: sse\r\n"))
        answer = client.read_answer()
    assert answer.status == 200
    assert answer.clean
    assert answer.get("content-type") == "text/event-stream"
    assert answer.get("x-request-id")
    assert answer.body.startswith(COMMENT * 2)
    rest = answer.body.replace(COMMENT, b"")
    assert b'"content":"hi"' in rest
    assert rest.endswith(DONE)


def test_an_anthropic_stream_begins_with_pings(gateway: Gateway, models: Iterator[str]) -> None:
    data = ask(gateway, next(models), "sse", "/v1/messages", stream=True)
    assert PING in data
    assert COMMENT not in data


def test_who_wants_no_stream_gets_none(gateway: Gateway, models: Iterator[str]) -> None:
    data = ask(gateway, next(models), "sse")
    assert data.startswith(b"HTTP/1.1 200 ")
    assert b"application/json" in data
    assert COMMENT not in data


def test_both_may_be_asked_for(gateway: Gateway, models: Iterator[str]) -> None:
    assert COMMENT in ask(gateway, next(models), "102, SSE", stream=True)
    assert b"HTTP/1.1 102 " in ask(gateway, next(models), "102, sse")


def test_a_failed_load_is_an_event_once_the_stream_has_begun(gateway: Gateway, broken: Iterator[str]) -> None:
    data = ask(gateway, next(broken), "sse", stream=True)
    assert data.startswith(b"HTTP/1.1 200 ")
    error = json.loads(data.rpartition(b"data: ")[2].partition(b"\n\n")[0])["error"]
    assert error["code"] == "model_loading"
    assert "exit code 1" in error["message"]
    assert not data.endswith(b"0\r\n\r\n"), "it ends so that nobody takes it for whole"


def test_errors_after_pings_have_the_form_of_the_api(gateway: Gateway, broken: Iterator[str]) -> None:
    data = ask(gateway, next(broken), "sse", "/v1/messages", stream=True)
    kind, _, rest = data.rpartition(b"event: error\ndata: ")
    assert kind
    told = json.loads(rest.partition(b"\n\n")[0])
    assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")
    data = ask(gateway, next(broken), "sse", "/v1/responses", stream=True)
    told = json.loads(data.rpartition(b"event: error\ndata: ")[2].partition(b"\n\n")[0])
    assert (told["type"], told["code"], told["sequence_number"]) == ("error", "model_loading", 0)
    assert told["error"]["code"] == "model_loading"


def test_time_that_is_over_is_an_event_too(gateway: Gateway) -> None:
    data = ask(gateway, SLOW, "sse", stream=True)
    assert b'"code":"model_loading"' in data
    assert data.count(COMMENT) >= 3


@pytest.mark.parametrize(
    ("model", "words", "code"),
    [
        (REFUSING, "no such grammar", "invalid_request_error"),
        (PLAIN, "answered 200 in place of a stream", "upstream_error"),
    ],
)
def test_what_a_backend_says_in_place_of_a_stream_is_an_event(
    gateway: Gateway, model: str, words: str, code: str
) -> None:
    data = ask(gateway, model, "sse", stream=True)
    assert data.startswith(b"HTTP/1.1 200 ")
    assert data.count(b"HTTP/1.1 ") == 1, "there is one status"
    error = json.loads(data.rpartition(b"data: ")[2].partition(b"\n\n")[0])["error"]
    assert words in error["message"]
    assert error["code"] == code


def test_a_client_that_leaves_amid_signs_is_forgotten(scene: tuple[Gateway, RouterBrain]) -> None:
    gateway, _ = scene
    for interim in ("102", "sse"):
        client = gateway.client()
        client.send(post(body=chat_body(SLOW, stream=True), headers=f"x-llmgw-interim: {interim}\r\n"))
        client.read_head()
        client.close()
    eventually(gateway.is_idle)


def test_a_key_may_be_told_unasked(tmp_path: Path) -> None:
    from llmgw.access import credentials, key_file
    from llmgw.demo.certificate import write_private

    id = credentials.new_id()
    secret = credentials.new_key(id)
    hashed = f"sha256:{credentials.digest(secret, None).hex()}"
    held = key_file.KeyFile({id: key_file.Key(id=id, name="told", hash=hashed, interim=True)})
    write_private(tmp_path / "keys.toml", key_file.dump(held).encode())
    server = RouterServer(RouterBrain("m", load_s=1.0))
    hold = "min_s = 2.0\nmax_s = 2.0\ninterim_s = 0.1"
    config = 'auth = ["keys:keys.toml"]\n'
    with closing(server), gateway_before(tmp_path, server, hold=hold, config=config) as gateway:
        eventually(lambda: states(gateway))
        with gateway.client(20.0) as client:
            client.send(post(body=chat_body("m"), headers=f"authorization: Bearer {secret}\r\n"))
            found = heads(client)
        assert found[-1] == 200
        assert 102 in found
