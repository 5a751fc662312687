"""The official ``ollama`` package for Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import LAST_CHUNK, Line, Received, Scripted, chunk, gateway_with, json_response
from live_gateway import LiveGateway

ollama = pytest.importorskip("ollama")

WORDS = [{"role": "user", "content": "Hello"}]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"


def part(text: str, *, done: bool = False) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"model": "m", "created_at": "2026-01-01T00:00:00Z", "message": message, "done": done}


def answer(line: Line, request: Received) -> None:
    """As an Ollama that has ``m`` in memory: a stream unless told otherwise, which is cut after ``cut``."""
    if request.method == "GET":
        line.send(json_response({"models": [{"name": "m", "model": "m"}]}))
        return
    asked = json.loads(request.body)
    if asked.get("stream") is False:
        line.send(json_response(part("Hello there", done=True)))
        return
    parts = [chunk(json.dumps(part(text)).encode() + b"\n") for text in ("Hello", " there")]
    line.send(HEAD, *parts)
    if asked["messages"][-1]["content"] == "cut":
        line.reset()
    else:
        line.send(chunk(json.dumps(part("", done=True)).encode() + b"\n") + LAST_CHUNK)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    backend = Scripted(answer)
    folder: Path = tmp_path_factory.mktemp("ollama")
    with gateway_with(folder, backend, more='models = ["m"]\nkind = "ollama"') as gateway:
        yield ollama.Client(host=f"http://127.0.0.1:{gateway.port}", trust_env=False, timeout=20)
    backend.close()


def connect(gateway: LiveGateway, key: str) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    return ollama.Client(host=gateway.url, headers=headers, verify=gateway.tls, trust_env=False, timeout=20)


def test_chat(client: Any) -> None:
    assert client.chat("m", WORDS).message.content == "Hello there"
    parts = list(client.chat("m", WORDS, stream=True))
    assert "".join(part.message.content for part in parts) == "Hello there"
    assert parts[-1].done


def test_models_are_listed(client: Any) -> None:
    assert [model.model for model in client.list().models] == ["m"]


def test_a_stream_that_is_cut_is_an_error_with_words(client: Any) -> None:
    seen = []
    with pytest.raises(ollama.ResponseError, match="could not be used"):
        for part in client.chat("m", [{"role": "user", "content": "cut"}], stream=True):
            seen.append(part.message.content)
    assert seen == ["Hello", " there"]


@pytest.mark.real
def test_refusals_are_words(live_gateway: LiveGateway) -> None:
    with pytest.raises(ollama.ResponseError, match="the API key is not valid") as caught:
        connect(live_gateway, "lgw_nobody00_" + "x" * 43).list()
    assert caught.value.status_code == 401
    client = connect(live_gateway, live_gateway.keys["all"])
    with pytest.raises(ollama.ResponseError, match="no such model: 'nothing'") as caught:
        client.chat("nothing", WORDS)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"^no such path: /api/embed"):
        client.embed("tiny", "Hello")
