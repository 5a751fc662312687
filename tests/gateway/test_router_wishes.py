"""What a router may ask for beside a backend: the prompt's prefix, and a slot of llama-server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Gateway, Scripted, backend_table, post
from ordering_router import installed
from twisted.internet.testing import MemoryReactorClock

from llmgw.config import parse_config
from llmgw.gateway.gateway import Gateway as Room
from llmgw.service import GatewayService

WORDS = [{"role": "user", "content": "hi"}]
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
LONG = "A long prompt begins alike. " * 100


class Here:
    """A gateway whose router asks for slot 1, before a llama-server and one that is none."""

    def __init__(self, gateway: Gateway, backends: dict[str, Scripted]) -> None:
        self.gateway = gateway
        self.backends = backends

    def sent(self, path: str, model: str, **fields: Any) -> Any:
        """The body that the backend of ``model`` gets."""
        backend = self.backends[model]
        backend.requests.clear()
        self.gateway.ask(post(path, json.dumps({"model": model, **fields}).encode()))
        return backend.requests[0].json


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    folder = tmp_path_factory.mktemp("wishes")
    backends = {"llama": Scripted(), "other": Scripted()}
    config = (
        '[admission]\nslot_choice = true\n[router]\nplugin = "smallest-first"\nslot = 1\nprefix = true\n'
        '[log]\naccess = "access.log"\n'
    )
    for model, kind in (("llama", "llama-server"), ("other", "openai")):
        config += backend_table(backends[model], model, f'models = ["{model}"]\nkind = "{kind}"')
    gateway = Gateway(folder, config, environment=installed(folder))
    try:
        yield Here(gateway, backends)
    finally:
        gateway.stop()
    assert "Traceback" not in gateway.log, gateway.log


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": WORDS}),
        (CHAT, {"messages": WORDS, "stream": True}),
        (CHAT, {"messages": WORDS, "id_slot": 7}),
        (TEXT, {"prompt": "hi"}),
        (NATIVE, {"prompt": "hi", "stream": True}),
    ],
)
def test_a_slot_is_asked_for_where_llama_server_obeys(here: Here, path: str, fields: dict[str, Any]) -> None:
    assert here.sent(path, "llama", **fields)["id_slot"] == 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": WORDS, "n": 2}),
        (TEXT, {"prompt": ["one", "two"]}),
        (NATIVE, {"prompt": [1, 2, 3]}),
        ("/infill", {"prompt": "hi"}),
        ("/v1/messages", {"messages": WORDS, "max_tokens": 3}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/tokenize", {"content": "hi"}),
    ],
)
def test_elsewhere_no_slot_is_asked_for(here: Here, path: str, fields: dict[str, Any]) -> None:
    assert "id_slot" not in here.sent(path, "llama", **fields)


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
def test_no_other_server_is_asked_for_a_slot(here: Here, path: str) -> None:
    assert "id_slot" not in here.sent(path, "other", messages=WORDS, prompt="hi")


def test_a_router_that_wants_the_prefix_gets_it_and_so_does_explain(here: Here) -> None:
    def why(content: str, model: str = "llama") -> str:
        body = {"model": model, "session_id": "s-1", "messages": [{"role": "user", "content": content}]}
        raw = json.dumps(body).encode()
        request = b"POST /api/explain HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw)
        told = explain(here.gateway, request + raw)
        id = f"r{len(asked)}"
        asked[id] = told
        here.gateway.ask(post(CHAT, raw, headers=f"x-request-id: {id}\r\n"))
        return told

    asked: dict[str, str] = {}
    one = why(LONG)
    assert one.endswith("session s-1")
    assert len(one.split()[1].split(",")) == 3
    assert why(LONG + "And goes on.") == one
    assert why("X" + LONG) != one
    assert why(LONG, "other") != one
    assert why("short") == "prefix  session s-1"
    here.gateway.stop()
    assert {line["id"]: line["why"] for line in here.gateway.access if line["id"] in asked} == asked


def explain(gateway: Gateway, request: bytes) -> str:
    """The router's reason, by ``POST /api/explain``."""
    with socket.create_connection(("127.0.0.1", gateway.admin_port), 10) as sock:
        sock.sendall(request)
        data = b""
        while piece := sock.recv(65536):
            data += piece
    found: str = json.loads(data.partition(b"\r\n\r\n")[2])["why"]
    return found


# --- what a router is told, without a process ---


def room(folder: Path, admission: str = "") -> Room:
    """A gateway that is not started, with two backends for "two" and one for "one"."""
    config = f'auth = ["anonymous"]\n[admission]\n{admission}\n'
    for id, models in (("a", '["one", "two"]'), ("b", '["two"]')):
        config += f'[[backends]]\nid = "{id}"\nurl = "http://{id}:1"\nmodels = {models}\n'
    service = GatewayService(parse_config(config, source="", base_dir=str(folder)), MemoryReactorClock())
    return service.gateway


class Wishing:
    """A router that writes down what it is told."""

    wants_prefix = True

    def __init__(self) -> None:
        self.told: list[dict[str, bool]] = []

    def adapt(self, **told: bool) -> None:
        self.told.append(told)


@pytest.mark.parametrize(
    ("admission", "alone"), [("", False), ("slot_choice = true", True), ("max_wait_s = 5", True)]
)
def test_prefixes_are_made_where_there_is_something_to_choose(
    tmp_path: Path, admission: str, alone: bool
) -> None:
    gateway = room(tmp_path, admission)
    gateway.use_router(Wishing())
    assert gateway.wants_prefix("two")
    assert gateway.wants_prefix("one") is alone
    gateway.use_router(object())
    assert not gateway.wants_prefix("two")


def test_a_router_is_told_what_becomes_of_its_answers(tmp_path: Path) -> None:
    router = Wishing()
    room(tmp_path).use_router(router)
    room(tmp_path, "slot_choice = true\nmax_wait_s = 5").use_router(router)
    assert router.told == [
        {"slot_choice": False, "may_wait": False},
        {"slot_choice": True, "may_wait": True},
    ]


def test_a_router_that_cannot_be_told_is_used_all_the_same(tmp_path: Path, expected_failures: Any) -> None:
    class Deaf:
        def adapt(self) -> None: ...

    gateway, deaf = room(tmp_path), Deaf()
    gateway.use_router(deaf)
    assert gateway.router is deaf
    assert expected_failures(TypeError)
