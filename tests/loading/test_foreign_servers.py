"""A loader before a server that is none of its own: it serves, and why nothing is loaded is told."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import (
    Gateway,
    Line,
    Received,
    Scripted,
    answer_completion,
    backend_table,
    chat_body,
    eventually,
    json_response,
    post,
)

from .scenes import closing, gateway_before, states

LLAMA_SERVER = {
    "/v1/models": json_response({"data": [{"id": "m"}]}),
    "/props": json_response({"total_slots": 2}),
}
VLLM = {"/v1/models": json_response({"data": [{"id": "m", "max_model_len": 4096}]})}
OLLAMA = {
    "/v1/models": json_response({"data": [{"id": "m"}]}),
    "/api/tags": json_response({"models": [{"name": "m", "size": 1}]}),
    "/api/ps": json_response({"models": [{"name": "m", "size": 1}]}),
}
KINDS = {"b0": "ollama", "llama": "llama-server"}
QUICK_LOOKS = '[[health]]\nplugin = "llamacpp"\ninterval_s = 2.0\n'
NONE = json_response({"error": {"message": "no"}}, 404)


class Server(Scripted):
    """A server of some kind: ``paths`` are what it has beside completions.

    :ivar wait_s: before it tells that it lacks a path.
    """

    def __init__(self, paths: dict[str, bytes]) -> None:
        self.paths = dict(paths)
        self.wait_s = 0.0
        super().__init__(self._play, probes=paths)

    def _play(self, line: Line, request: Received) -> None:
        if request.method == "GET":
            if request.target not in self.paths:
                time.sleep(self.wait_s)
            line.send(self.paths.get(request.target, NONE))
        else:
            answer_completion(line, request)


GOS_OWN = (
    b"HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\nContent-Length: 18\r\n\r\n404 page not found"
)
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 17\r\n\r\nOllama is running"


@contextlib.contextmanager
def before(folder: Path, server: Server, backend: str, *, config: str = "") -> Iterator[Gateway]:
    with closing(server), gateway_before(folder, server, backend=backend, config=config) as gateway:
        yield gateway


def chat(gateway: Gateway) -> Any:
    return gateway.ask(post(body=chat_body("m")))


def backend(gateway: Gateway) -> dict[str, Any]:
    found: dict[str, Any] = gateway.state["backends"][0]
    return found


def backend_of(gateway: Gateway, id: str) -> dict[str, Any]:
    return next(each for each in gateway.state["backends"] if each["id"] == id)


@pytest.mark.parametrize("models", ["", 'models = ["m"]\n'], ids=["asked", "listed"])
@pytest.mark.parametrize(
    ("setting", "paths", "why"),
    [
        ('kind = "ollama"', LLAMA_SERVER, "it is no Ollama (404 from /api/tags)"),
        ('loader = "ollama"', VLLM, "it is no Ollama (404 from /api/tags)"),
        ('loader = "llamacpp-router"', OLLAMA, "it is no llama-server in router mode (404 from /models)"),
    ],
)
def test_what_it_serves_is_had_and_why_nothing_is_loaded_is_told(
    tmp_path: Path, setting: str, paths: dict[str, bytes], why: str, models: str
) -> None:
    server = Server(paths)
    server.wait_s = 0.5  # long enough for a request to come before it is known
    with before(tmp_path, server, setting + "\n" + models) as gateway:
        assert chat(gateway).status == 200
        eventually(lambda: backend(gateway)["detail"] == f"ok, but {why}")
        assert backend(gateway)["cold"] is None
        assert gateway.admin("/api/models/m/load", "POST")[0] == 404
        assert gateway.log.count(f"backend b0: {why}: nothing is loaded there by name") == 1


def test_a_server_that_is_exchanged_for_the_right_one_gets_its_loader(tmp_path: Path) -> None:
    server = Server(VLLM)
    with before(tmp_path, server, 'kind = "ollama"\nmodels = ["m"]', config=QUICK_LOOKS) as gateway:
        eventually(lambda: backend(gateway)["cold"] is None)
        server.paths |= OLLAMA
        eventually(lambda: states(gateway) == {"m": "loaded"})
        eventually(lambda: backend(gateway)["detail"] == "ok")
        server.paths["/api/ps"] = json_response({"models": []})
        eventually(lambda: backend(gateway)["cold"] == ["m"])
        assert "backend b0: its models can be loaded by name" in gateway.log


def test_a_server_that_will_not_tell_is_no_foreign_one(tmp_path: Path) -> None:
    """It wants another key: nothing is known of its models, and the reason is seen."""
    refused = json_response({"error": "no such key"}, 401)
    server = Server({**OLLAMA, "/api/tags": refused})
    with before(tmp_path, server, 'kind = "ollama"\nmodels = ["m"]') as gateway:
        eventually(lambda: backend(gateway)["detail"] == "ok, but /api/tags says: no such key")
        assert chat(gateway).json["error"]["code"] == "no_backend"
        assert backend(gateway)["cold"] == ["m"]


def test_an_ollama_of_which_nothing_was_said_is_found_and_left_to_itself(tmp_path: Path) -> None:
    """It is asked as one, beside a llama-server of the same model; but what it loads is its own affair."""
    ollama = Server({**OLLAMA, "/": PAGE, "/health": GOS_OWN, "/props": GOS_OWN})
    llama = Server(LLAMA_SERVER)
    with closing(llama), before(tmp_path, ollama, "", config=backend_table(llama, "llama", "")) as gateway:
        eventually(lambda: {each["id"]: each["kind"] for each in gateway.state["backends"]} == KINDS)
        assert [gateway.ask(post("/api/chat", chat_body("m"))).status for _ in range(6)] == [200] * 6
        assert not [each for each in llama.requests if each.target == "/api/chat"]
        assert backend_of(gateway, "b0")["cold"] is None
        assert gateway.admin("/api/models/m/load", "POST")[0] == 404
