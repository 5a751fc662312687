"""The ``command`` loader with llama.cpp's own server, behind a gateway."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import chat_body, eventually, free_port, post

from .scenes import Crowd, gateway_before, states, statuses

pytestmark = pytest.mark.real


class Somewhere:
    """A port that the gateway's own server will have."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"


def children_of(pid: int) -> list[int]:
    """Processes that it has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def test_two_models_take_turns_on_one_box(tmp_path: Path, tiny_models: Callable[..., Path]) -> None:
    pytest.importorskip("xllamacpp", reason="no real llama.cpp server for this platform")
    model = tiny_models()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, but no model")
    words = [sys.executable, "-m", "llmgw.demo.llama_server", "--alias", "{model}", "--model", "{path}"]
    words += ["--port", "{port}", "--parallel", "2"]
    files = f'{{one = "{model}", two = "{model}", broken = "{broken}"}}'
    backend = f'[backends.loader]\nplugin = "command"\ncommand = {words!r}\nmodels = {files}\nstop_s = 5.0\n'
    health = '[[health]]\nplugin = "llamacpp"\ninterval_s = 2.0\n'
    with gateway_before(tmp_path / "gateway", Somewhere(), backend=backend, config=health) as gateway:  # type: ignore[arg-type]
        eventually(lambda: states(gateway) == {"one": "unloaded", "two": "unloaded", "broken": "unloaded"})
        crowd = Crowd()
        asked = [crowd.ask(gateway, ("one", "two")[number % 2], max_tokens=4) for number in range(8)]
        assert statuses(asked) == {200: 8}
        assert sorted(states(gateway).values()) == ["loaded", "unloaded", "unloaded"]
        assert asked[0].result().json["model"] == "one"
        failed = gateway.ask(post(body=chat_body("broken")))
        assert (failed.status, failed.json["error"]["code"]) == (503, "model_loading")
        assert "exit code" in failed.json["error"]["message"]
        assert str(tmp_path) not in failed.json["error"]["message"], "paths are no business of clients"
        assert gateway.ask(post(body=chat_body("one", max_tokens=4))).status == 200
        (child,) = children_of(gateway.process.pid)
        assert "listening" in gateway.log, "what the server says is in the gateway's log"
    eventually(lambda: not os.path.exists(f"/proc/{child}"))
