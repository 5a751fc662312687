"""The source ``llamacpp`` on the real llama.cpp server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from llmgw.demo.processes import Child
from llmgw.health.llamacpp import LlamaCppHealth
from llmgw.health.target import Target
from llmgw.values import HealthReport

pytestmark = pytest.mark.real

KEY = "only-for-this-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Two slots of 2048 tokens, behind a key."""
    pytest.importorskip("xllamacpp", reason="no real llama.cpp server for this platform")
    from llmgw.demo.tiny_gguf import write_model

    directory: Path = tmp_path_factory.mktemp("health")
    model = write_model(directory / "model.gguf", 2, 128, "chat")
    command = [sys.executable, "-m", "llmgw.demo.llama_server", "--alias", "tiny", "--api-key", KEY]
    child = Child("health", [*command, "--model", str(model)], directory / "log")
    try:
        child.wait_listening()
        yield child
    finally:
        child.stop()


async def first_report(server: Child, headers: dict[str, str]) -> HealthReport:
    from twisted.internet import reactor

    first: Deferred[HealthReport] = Deferred()
    source = LlamaCppHealth(reactor, 60.0, 5.0)  # type: ignore[arg-type]
    source.start(Target(reactor, "b0", server.url, headers), first.callback)
    report = await first.addTimeout(30, reactor)  # type: ignore[arg-type]
    source.stop()
    await deferLater(reactor, 0)  # type: ignore[arg-type]
    return report


@pytest_twisted.ensureDeferred
async def test_it_tells_everything(server: Child) -> None:
    report = await first_report(server, {"authorization": f"Bearer {KEY}"})
    assert report == HealthReport(
        alive=True,
        models=("tiny",),
        slots=2,
        busy_slots=0,
        deferred=0,
        context_length=2048,
        kind="llama-server",
        detail="ok",
    )


@pytest_twisted.ensureDeferred
async def test_without_its_key_it_is_alive_and_says_why_it_tells_nothing(server: Child) -> None:
    report = await first_report(server, {})
    assert report == HealthReport(alive=True, detail="ok, but 401 from /props: it wants another api_key_file")
