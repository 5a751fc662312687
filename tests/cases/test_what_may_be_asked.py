"""Caps of keys and models, and request filters, before scripted backends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import strange_plugins
from harness import (
    COMPLETION,
    LAST_CHUNK,
    SSE_HEAD,
    Answer,
    Gateway,
    Line,
    Received,
    Scripted,
    answer_completion,
    backend_table,
    chat_body,
    chunk,
    event,
    eventually,
    gateway_with,
    json_response,
    post,
)

KEY = "a-key-of-0123456789-letters"
CONFIG = """
[[filters]]
plugin = "deny-pattern"
words = ["forbidden"]
message = "not here"

[[models]]
name = "alias"
target = "m"
max_logprobs = 0
max_tokens = 50
max_n = 3
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Scripted]]:
    folder = tmp_path_factory.mktemp("asked")
    backend = Scripted()
    path = folder / "keys.toml"
    path.write_text(
        f'[keys.one]\nname = "one"\nhash = "sha256:{sha256(KEY.encode()).hexdigest()}"\n'
        "max_tokens = 100\nmax_prompt_tokens = 1000\nmax_n = 2\nmax_stop = 1\nmax_tools = 0\n"
        "grammar = false\nmax_response_bytes = 2000\n"
    )
    path.chmod(0o600)
    more = 'models = ["m"]\nkind = "openai"'
    with gateway_with(folder, backend, config=f'auth = ["keys:{path}"]\n' + CONFIG, more=more) as gateway:
        yield gateway, backend
    backend.close()


@pytest.fixture
def gateway(made: tuple[Gateway, Scripted]) -> Gateway:
    return made[0]


@pytest.fixture
def backend(made: tuple[Gateway, Scripted]) -> Scripted:
    made[1].play(answer_completion)
    return made[1]


def ask(gateway: Gateway, path: str = "/v1/chat/completions", **fields: Any) -> Answer:
    return gateway.ask(post(path, chat_body(**fields), headers=f"Authorization: Bearer {KEY}\r\n"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x" * 8000}]}, "messages"),
        ({"n": 3}, "n"),
        ({"stop": ["a", "b"]}, "stop"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"json_schema": {}}, "json_schema"),
        ({"model": "alias", "prompt_logprobs": -1}, "logprobs"),
        ({"model": "alias", "logprobs": True}, "logprobs"),
    ],
)
def test_what_is_over_a_cap_is_refused_with_its_name(
    gateway: Gateway, backend: Scripted, fields: dict[str, Any], param: str
) -> None:
    answer = ask(gateway, **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert backend.requests == []


@pytest.mark.parametrize(
    ("path", "fields", "sent"),
    [
        ("/v1/chat/completions", {}, {"max_tokens": 100}),
        ("/v1/chat/completions", {"max_tokens": 7}, {"max_tokens": 7}),
        ("/v1/chat/completions", {"max_completion_tokens": 500}, {"max_completion_tokens": 100}),
        ("/v1/chat/completions", {"max_tokens": -1}, {"max_tokens": 100}),
        # To Ollama 0 is no limit.
        ("/v1/chat/completions", {"max_tokens": 0}, {"max_tokens": 1}),
        ("/v1/chat/completions", {"model": "alias"}, {"max_tokens": 50}),
        # Under a name that the path does not obey a limit is none.
        ("/v1/responses", {"max_tokens": 7}, {"max_tokens": 7, "max_output_tokens": 7}),
        ("/v1/responses", {"max_output_tokens": 7}, {"max_output_tokens": 7}),
        ("/v1/chat/completions", {"n_predict": 500}, {"n_predict": 100, "max_tokens": 100}),
        ("/v1/embeddings", {"input": "x"}, {}),
    ],
)
def test_output_is_cut_down_under_every_name(
    gateway: Gateway, backend: Scripted, path: str, fields: dict[str, Any], sent: dict[str, int]
) -> None:
    assert ask(gateway, path, **fields).status == 200
    body = backend.requests[0].json
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
    assert {name: body[name] for name in names if name in body} == sent


def test_an_answer_that_tells_its_length_is_refused_whole(gateway: Gateway, backend: Scripted) -> None:
    backend.play(lambda line, request: line.send(json_response({**COMPLETION, "x": "y" * 3000})))
    answer = ask(gateway)
    assert (answer.status, answer.json["error"]["code"]) == (502, "response_too_large")
    assert answer.get("x-should-retry") == "false"
    backend.play(answer_completion)
    assert ask(gateway).status == 200
    assert gateway.state["backends"][0]["failure_streak"] == 0


def test_a_stream_that_grows_too_long_is_broken_off(gateway: Gateway, backend: Scripted) -> None:
    closed: list[float] = []

    def endless(line: Line, request: Received) -> None:
        line.send(SSE_HEAD)
        try:
            while True:
                line.send(chunk(event("x" * 100)))
        except OSError:
            closed.append(1)

    backend.play(endless)
    answer = ask(gateway, stream=True)
    assert (answer.status, answer.clean) == (200, False)
    assert len(answer.body) < 3000
    assert b"response_too_large" in answer.body
    eventually(lambda: closed)
    eventually(gateway.is_idle)
    assert gateway.state["backends"][0]["failure_streak"] == 0


def test_a_stream_within_the_cap_is_whole(gateway: Gateway, backend: Scripted) -> None:
    sent = chunk(event("x" * 100)) * 5
    backend.play(lambda line, request: line.send(SSE_HEAD, sent, LAST_CHUNK))
    answer = ask(gateway, stream=True)
    assert (answer.clean, answer.body.count(b"xxx")) == (True, answer.body.count(b"xxx"))
    assert answer.body == event("x" * 100) * 5


def test_a_filter_refuses_before_anybody_is_asked(gateway: Gateway, backend: Scripted) -> None:
    answer = ask(gateway, messages=[{"role": "user", "content": "a FORBIDDEN thing"}])
    assert (answer.status, answer.json["error"]["code"]) == (403, "request_refused")
    assert answer.json["error"]["message"] == "not here"
    assert answer.get("x-should-retry") == "false"
    escaped = json.dumps({"model": "m", "prompt": "x"}).replace("x", "\\u0066orbidden").encode()
    request = post("/v1/completions", escaped, headers=f"Authorization: Bearer {KEY}\r\n")
    assert gateway.ask(request).status == 403
    assert backend.requests == []


def test_s_plg_1_filters(tmp_path: Path) -> None:
    """A filter that misbehaves costs its request, or nothing, and never the gateway."""
    backend = Scripted()
    gateway = Gateway(tmp_path, backend_table(backend), environment=strange_plugins.installed(tmp_path))
    plain = gateway.config_path.read_text()
    faults = 0
    try:
        for does in ("raise", "exit", "nonsense", "never", "block"):
            for on_error in ("refuse", "pass"):
                table = f'[[filters]]\nplugin = "strange"\ndoes = "{does}"\non_error = "{on_error}"\n'
                gateway.config_path.write_text(plain + table)
                assert gateway.admin("/api/reload", "POST")[0] == 200
                status = gateway.ask(post()).status
                assert (does, status) == (does, 200 if on_error == "pass" or does == "block" else 500)
                faults += does != "block"
                assert f"llmgw_filter_faults {faults}\n" in gateway.admin("/metrics")[1].decode()
        eventually(gateway.is_idle)
    finally:
        assert gateway.stop() == 0
        backend.close()
    assert "the filter strange raised" in gateway.log
    assert "the filter strange held up the event loop" in gateway.log
    assert "Unhandled" not in gateway.log
