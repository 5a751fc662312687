"""Real llama.cpp servers for tests, started when first asked for and shared by the session.

A plugin of ``tests/conftest.py``, since more than one folder of tests uses them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmgw.demo.processes import Child
from llmgw.demo.tiny_gguf import Kind, write_model

StartServer = Callable[..., Child]
"""``(kind="chat", *flags, shared=True, layers=2, ff=128)``, see :func:`llama_servers`."""


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``(kind, layers, ff)`` to a model file, each made once."""
    directory = tmp_path_factory.mktemp("models")

    def model(kind: Kind = "chat", layers: int = 2, ff: int = 128) -> Path:
        path = directory / f"{kind}-{layers}x{ff}.gguf"
        return path if path.exists() else write_model(path, layers, ff, kind)

    return model


@pytest.fixture(scope="session")
def tiny_model(tiny_models: Callable[..., Path]) -> Path:
    """The chat model that the servers have when nothing else is said."""
    return tiny_models()


@pytest.fixture(scope="session")
def llama_servers(
    tiny_models: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServer]:
    """Starts real servers on free ports; equal ones are the same server.

    ``llama_servers("chat", "--parallel", "4").url``; ``shared=False`` gives one that
    a test may stop, slow down or kill.
    """
    pytest.importorskip("xllamacpp", reason="no real llama.cpp server for this platform")
    logs = tmp_path_factory.mktemp("servers")
    shared_ones: dict[tuple[object, ...], Child] = {}
    all_of_them: list[Child] = []

    def start(kind: Kind = "chat", *flags: str, shared: bool = True, layers: int = 2, ff: int = 128) -> Child:
        wanted = (kind, flags, layers, ff)
        if shared and wanted in shared_ones:
            return shared_ones[wanted]
        special = () if kind == "chat" else (f"--{kind}",)
        name = f"{kind}-{len(all_of_them)}"
        command = [sys.executable, "-m", "llmgw.demo.llama_server", "--alias", "tiny", *special, *flags]
        server = Child(name, [*command, "--model", str(tiny_models(kind, layers, ff))], logs / f"{name}.log")
        all_of_them.append(server)
        server.wait_listening()
        if shared:
            shared_ones[wanted] = server
        return server

    try:
        yield start
    finally:
        for server in all_of_them:
            server.stop()


@pytest.fixture(scope="session")
def llama_url(llama_servers: StartServer) -> str:
    """A chat server with two slots of 2048 tokens."""
    return llama_servers().url
