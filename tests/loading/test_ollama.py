"""Loader for Ollama: its three calls, as its documentation has them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from llmgw import testing
from llmgw.errors import ConfigError, ForeignServer, ModelLoading
from llmgw.loading.ollama import Ollama, OllamaFactory
from llmgw.testing.fakes import Answer, FakeHealthTarget


class Target(FakeHealthTarget):
    """An Ollama with ``llama3:latest``, ``phi:3b`` and an embedding model."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.names = {"llama3:latest": 4_000, "phi:3b": 2_000, "embed:latest": 300}
        self.loaded: dict[str, Any] = {}
        self.broken: str | None = None
        self.silent = False

    def _answered(self, path: str, answer: Answer, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        status, said = self._say(path)
        told: Answer = None if self.silent else (status, json.dumps(said).encode())
        return super()._answered(path, told, timeout_s)

    def _say(self, path: str) -> tuple[int, Any]:
        if path == "/api/tags":
            return 200, {"models": [{"name": n, "model": n, "size": s} for n, s in self.names.items()]}
        if path == "/api/ps":
            return 200, {"models": [{"name": n, "size": 1, "size_vram": 9_000} for n in self.loaded]}
        body = json.loads(self.posted[-1][1])
        name = body["model"] if ":" in body["model"] else body["model"] + ":latest"
        if name not in self.names:
            return 404, {"error": f"model '{body['model']}' not found"}
        if name.startswith("embed") and path == "/api/generate":
            return 400, {"error": f'"{name}" does not support generate'}
        if self.broken:
            return 500, {"error": self.broken}
        if body["keep_alive"] == 0:
            self.loaded.pop(name, None)
        else:
            self.loaded[name] = body["keep_alive"]
        return 200, {"model": name, "done": True, "done_reason": "load"}


class _Contract(testing.ModelLoaderContract):
    factory = OllamaFactory()
    model = "llama3"

    def make(self, clock: Clock) -> Any:
        return self.factory.build({}, Target(clock), clock)


TestContract = _Contract


def wait(clock: Clock, asking: Deferred[Any], within_s: float = 5.0) -> Any:
    results: list[Any] = []
    asking.addBoth(results.append)
    while not results and within_s > 0:
        clock.advance(0.5)
        within_s -= 0.5
    if isinstance(results[0], Failure):
        results[0].raiseException()
    return results[0]


def test_what_is_in_memory_and_what_is_not() -> None:
    clock = Clock()
    target = Target(clock)
    loader = Ollama(target)
    wait(clock, loader.load("llama3"))
    assert wait(clock, loader.models()) == {
        "llama3:latest": "loaded",
        "llama3": "loaded",
        "phi:3b": "unloaded",
        "embed:latest": "unloaded",
        "embed": "unloaded",
    }
    assert (loader.sizes["llama3"], loader.sizes["phi:3b"]) == (9_000, 2_000)
    assert target.loaded == {"llama3:latest": -1}
    wait(clock, loader.unload("llama3"))
    assert target.loaded == {}
    wait(clock, loader.unload("nobody"))


def test_an_embedding_model_is_loaded_by_an_embedding_call() -> None:
    clock = Clock()
    target = Target(clock)
    wait(clock, Ollama(target, keep_alive="24h").load("embed"))
    assert target.loaded == {"embed:latest": "24h"}
    assert target.posted[-1][0] == "/api/embed"


def test_a_failed_load_is_told_in_ollamas_words() -> None:
    clock = Clock()
    target = Target(clock)
    target.broken = "model requires more system memory (9 GiB) than is available (4 GiB)"
    with pytest.raises(ModelLoading, match="requires more system memory"):
        wait(clock, Ollama(target).load("phi:3b"))


def test_a_load_without_end_is_given_up() -> None:
    clock = Clock()
    target = Target(clock)
    target.silent = True
    with pytest.raises(ModelLoading, match="not ready after 3 s"):
        wait(clock, Ollama(target, load_timeout_s=3.0).load("phi:3b"))


def test_what_is_no_ollama_is_told() -> None:
    clock = Clock()
    loader = Ollama(FakeHealthTarget(clock, otherwise=(404, b"<html>")))
    with pytest.raises(ForeignServer, match=r"it is no Ollama \(404 from /api/tags\)"):
        wait(clock, loader.models())


def test_options_are_checked_all_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        OllamaFactory().build(
            {"load_timeout_s": -1, "keep_alive": 0, "x": 1}, FakeHealthTarget(Clock()), Clock()
        )
    assert [fault.where for fault in refused.value.faults] == ["load_timeout_s", "keep_alive", "x"]
