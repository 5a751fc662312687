"""The same on a scripted router and, where ``LLMGW_LLAMA_SERVER`` names a binary, on llama-server itself.

How to build one stands in ``docs/development.md``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from harness import Gateway, chat_body, eventually, free_port, post
from router_brain import RouterBrain, RouterServer

from llmgw.demo.processes import Child

from .scenes import Crowd, gateway_before, metrics, states, statuses

MODELS = ("one", "two", "three")
BINARY = os.environ.get("LLMGW_LLAMA_SERVER", "")
KINDS = ["scripted", *(["llama-server"] if BINARY else [])]


class Somewhere:
    """Where a server listens, as scenes want it."""

    def __init__(self, url: str) -> None:
        self.url = url


@contextlib.contextmanager
def scripted(folder: Path, model: Path) -> Iterator[str]:
    server = RouterServer(RouterBrain(*MODELS, "broken", most=2, load_s=0.3, broken=["broken"]))
    try:
        yield server.url
    finally:
        server.close()


@contextlib.contextmanager
def real(folder: Path, model: Path) -> Iterator[str]:
    """Two models of three in memory, two slots each."""
    models = folder / "models"
    models.mkdir()
    for name in MODELS:
        (models / f"{name}.gguf").symlink_to(model)
    (models / "broken.gguf").write_bytes(b"GGUF, but no model")
    port = free_port()
    argv = [BINARY, "--models-dir", str(models), "--models-max", "2", "-c", "2048", "-np", "2"]
    argv += ["--no-models-autoload", "--host", "127.0.0.1", "--port", str(port)]
    process = Child("llama-server", argv, folder / "llama-server.log", announces=False)
    url = f"http://127.0.0.1:{port}"

    def listens() -> bool:
        assert process.returncode() is None, process.log_tail()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health", trust_env=False).status_code == 200
        return False

    try:
        eventually(listens, 30.0)
        yield url
    finally:
        process.stop()


@pytest.fixture(scope="module", params=KINDS)
def gateway(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_models: Callable[..., Path],
) -> Iterator[Gateway]:
    """It finds out by itself what is behind it."""
    folder = tmp_path_factory.mktemp("router")
    serve = scripted if request.param == "scripted" else real
    with (
        serve(folder, tiny_models()) as url,
        gateway_before(folder / "gateway", Somewhere(url), backend="", backoff_s=0.5) as made,  # type: ignore[arg-type]
    ):
        eventually(lambda: set(states(made)) >= set(MODELS))
        yield made


def loads(gateway: Gateway, outcome: str = "loaded") -> float:
    told = metrics(gateway)
    return sum(
        value
        for name, value in told.items()
        if name.startswith("llmgw_model_loads_total") and f'outcome="{outcome}"' in name
    )


def unload_all(gateway: Gateway) -> None:
    for model in MODELS:
        gateway.admin(f"/api/models/{model}/unload", "POST")
    eventually(lambda: all(states(gateway)[model] == "unloaded" for model in MODELS))


def test_one_load_for_all_who_ask(gateway: Gateway) -> None:
    unload_all(gateway)
    before = loads(gateway)
    crowd = Crowd()
    asked = [crowd.ask(gateway, MODELS[number % 2], max_tokens=8) for number in range(12)]
    assert statuses(asked) == {200: 12}
    eventually(lambda: loads(gateway) == before + 2)


def test_more_models_than_fit(gateway: Gateway) -> None:
    unload_all(gateway)
    crowd = Crowd()
    asked = [crowd.ask(gateway, MODELS[number % 3], max_tokens=8) for number in range(18)]
    assert statuses(asked) == {200: 18}
    assert sum(state == "loaded" for state in states(gateway).values()) <= 2


def test_a_broken_file_is_told(gateway: Gateway) -> None:
    before = loads(gateway, "failed")
    answer = gateway.ask(post(body=chat_body("broken")))
    assert (answer.status, answer.json["error"]["code"]) == (503, "model_loading")
    assert "exit code" in answer.json["error"]["message"]
    eventually(lambda: loads(gateway, "failed") == before + 1)
    assert states(gateway)["broken"] == "failed"


def test_streams_are_held_too(gateway: Gateway) -> None:
    unload_all(gateway)
    answer = gateway.ask(post(body=chat_body("three", stream=True, max_tokens=8)))
    assert answer.status == 200
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_the_operator_loads_and_unloads(gateway: Gateway) -> None:
    unload_all(gateway)
    assert json.loads(gateway.admin("/api/models/one/load", "POST")[1])["status"] == "loading"
    eventually(lambda: states(gateway)["one"] == "loaded")
    unload_all(gateway)


def test_slots_are_known(gateway: Gateway) -> None:
    """Two of each, so of eight requests two are at work at a time."""
    crowd = Crowd()
    asked = [crowd.ask(gateway, "one", max_tokens=8) for _ in range(8)]
    answers = [each.result(30) for each in asked]
    assert {each.status for each in answers} <= {200, 503}, answers
    assert sum(each.status == 200 for each in answers) >= 2, answers
