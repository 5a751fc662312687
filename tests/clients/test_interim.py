"""Clients as customers have them, held for a model, with the signs of life that they have asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import SSE_HEAD, Gateway, Line, Received, chunk, eventually, json_response
from loading.scenes import closing, gateway_before, metrics, states
from router_brain import RouterBrain, RouterServer

HERE = Path(__file__).parent
MODELS = [f"m{number}" for number in range(16)]
WORDS: list[Any] = [{"role": "user", "content": "Hello"}]
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 1},
}
EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 1},
    },
    {"type": "message_stop"},
]


class Server(RouterServer):
    """One that speaks Anthropic's dialect, too."""

    def answer(self, line: Line, request: Received) -> bool:
        if request.target != "/v1/messages":
            return False
        if not request.json.get("stream"):
            line.send(json_response(MESSAGE))
            return True
        line.send(SSE_HEAD)
        for event in EVENTS:
            line.send(chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()))
        line.send(b"0\r\n\r\n")
        return True


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Each load takes a second, and signs of life come each third of one."""
    server = Server(RouterBrain(*MODELS, most=0, load_s=1.0))
    hold = "min_s = 2.0\nmax_s = 2.0\ninterim_s = 0.1"
    with closing(server), gateway_before(tmp_path_factory.mktemp("held"), server, hold=hold) as made:
        eventually(lambda: states(made))
        yield made


@pytest.fixture(scope="module")
def models() -> Iterator[str]:
    return iter(MODELS)


@pytest.fixture
def model(gateway: Gateway, models: Iterator[str]) -> Iterator[str]:
    """One that nobody has loaded; at the end it was held for once."""
    name = next(models)
    yield name
    assert metrics(gateway)[f'llmgw_held_total{{model="{name}",outcome="released"}}'] == 1


def openai_client(gateway: Gateway, interim: str) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{gateway.port}/v1",
        api_key="none",
        max_retries=0,
        timeout=20,
        default_headers={"x-llmgw-interim": interim},
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


def anthropic_client(gateway: Gateway, interim: str) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{gateway.port}",
        api_key="none",
        max_retries=0,
        timeout=20,
        default_headers={"x-llmgw-interim": interim},
        http_client=anthropic.DefaultHttpxClient(trust_env=False),
    )


@pytest.mark.parametrize("interim", ["102", "sse"])
def test_openai(gateway: Gateway, model: str, interim: str) -> None:
    with openai_client(gateway, interim) as client:
        pieces = client.chat.completions.create(model=model, messages=WORDS, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "hi"


def test_openai_without_a_stream(gateway: Gateway, model: str) -> None:
    with openai_client(gateway, "102") as client:
        answer = client.chat.completions.create(model=model, messages=WORDS)
        assert answer.choices[0].message.content == "hi"


@pytest.mark.parametrize("interim", ["102", "sse"])
def test_anthropic(gateway: Gateway, model: str, interim: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": WORDS, "max_tokens": 8}
    with anthropic_client(gateway, interim) as client, client.messages.stream(**asked) as stream:
        assert stream.get_final_text() == "hi"


def test_anthropic_without_a_stream(gateway: Gateway, model: str) -> None:
    with anthropic_client(gateway, "102") as client:
        assert client.messages.create(model=model, messages=WORDS, max_tokens=8).content[0].text == "hi"


@pytest.mark.parametrize("interim", ["102", "sse"])
def test_httpx(gateway: Gateway, model: str, interim: str) -> None:
    with httpx.Client(trust_env=False, timeout=20) as client:
        answer = client.post(
            f"http://127.0.0.1:{gateway.port}/v1/chat/completions",
            json={"model": model, "messages": WORDS, "stream": True},
            headers={"x-llmgw-interim": interim},
        )
    assert answer.status_code == 200
    assert "[DONE]" in answer.text


@pytest.mark.parametrize("interim", ["102", "sse"])
def test_curl(gateway: Gateway, model: str, interim: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    body = json.dumps({"model": model, "messages": WORDS, "stream": True})
    url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
    command = ["curl", "-sSN", "--noproxy", "*", "-m", "20", "-w", "%{http_code}", "-d", body, url]
    ended = subprocess.run(
        [*command, "-H", f"x-llmgw-interim: {interim}"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.endswith("200")
    assert "[DONE]" in ended.stdout


@pytest.fixture
def node() -> str:
    """Its program; asked for before a model is, which would else miss its request."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("no Node")
    if not (HERE / "node_modules" / "openai").is_dir():
        pytest.skip("npm ci has not been run in tests/clients; make test does it")
    return found


@pytest.mark.parametrize("interim", ["102", "sse"])
def test_openai_for_node(node: str, gateway: Gateway, model: str, interim: str) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "OPENAI_BASE_URL": f"http://127.0.0.1:{gateway.port}/v1",
        "OPENAI_API_KEY": "none",
        "MODEL": model,
        "INTERIM": interim,
    }
    ended = subprocess.run(
        [node, str(HERE / "scenarios.mjs"), "held"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {"text": "hi"}
