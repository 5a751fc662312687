"""The official ``openai`` package for Node, by ``scenarios.mjs``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_gateway import MODELS, LiveGateway, wait_until

pytestmark = pytest.mark.real

HERE = Path(__file__).parent
Scenario = Callable[[str], Any]


@pytest.fixture
def scenario(live_gateway: LiveGateway) -> Scenario:
    """``(name)``: what the scenario printed."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node")
    if not (HERE / "node_modules" / "openai").is_dir():
        pytest.skip("npm ci has not been run in tests/clients; make test does it")
    environment = {
        "PATH": os.environ["PATH"],
        "OPENAI_BASE_URL": live_gateway.v1,
        "OPENAI_API_KEY": live_gateway.keys["all"],
        "NODE_EXTRA_CA_CERTS": str(live_gateway.ca),
    }

    def run(name: str) -> Any:
        command = [node, str(HERE / "scenarios.mjs"), name]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=40, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return run


def test_chat_and_its_request_id(scenario: Scenario) -> None:
    said = scenario("chat")
    assert said["content"]
    assert said["usage"]["completion_tokens"] <= 8
    assert said["request_id"] == "node-1"


def test_a_streamed_chat_says_the_same(scenario: Scenario) -> None:
    said = scenario("stream")
    assert said["text"] == said["whole"] != ""
    assert said["usage"]["completion_tokens"] > 0


def test_tool_calls_from_a_stream(scenario: Scenario) -> None:
    said = scenario("tools")
    assert said["finish_reason"] == "tool_calls"
    assert said["call"]["name"] == "weather"
    assert "city" in json.loads(said["call"]["arguments"])


def test_two_choices_with_log_probabilities(scenario: Scenario) -> None:
    assert scenario("choices") == [[0, 4], [1, 4]]


def test_responses(scenario: Scenario) -> None:
    said = scenario("responses")
    assert said["text"]
    assert {"response.created", "response.output_text.delta", "response.completed"} <= set(said["types"])


def test_embeddings_come_as_numbers_and_as_base64(scenario: Scenario) -> None:
    said = scenario("embeddings")
    assert said["sizes"] == [896, 896]
    assert said["apart"] < 1e-6


def test_models(scenario: Scenario) -> None:
    said = scenario("models")
    assert said["ids"] == MODELS
    assert said["one"] == "gpt-4o-mini"
    assert (said["strange"]["name"], said["strange"]["code"]) == ("NotFoundError", "model_not_found")


def test_errors(scenario: Scenario) -> None:
    assert scenario("errors") == {
        "unknown": {
            "name": "NotFoundError",
            "status": 404,
            "code": "model_not_found",
            "type": "invalid_request_error",
        },
        "stranger": {
            "name": "AuthenticationError",
            "status": 401,
            "code": "invalid_api_key",
            "type": "authentication_error",
        },
        "long": {
            "name": "BadRequestError",
            "status": 400,
            "code": 400,
            "type": "exceed_context_size_error",
        },
    }


def test_it_waits_while_all_slots_are_busy(scenario: Scenario, while_full: Callable[..., Any]) -> None:
    assert while_full(lambda: scenario("retry"))["content"]


def test_an_aborted_stream_frees_its_place(scenario: Scenario, live_gateway: LiveGateway) -> None:
    said = scenario("abort")
    assert said["seen"] >= 3  # what had been read already is still handed out
    assert said["again"]
    assert wait_until(live_gateway.is_idle, 1)
