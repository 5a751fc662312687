"""Loader that starts servers on this machine: real processes, and a few that are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from harness import free_port
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ProcessTerminated
from twisted.internet.task import Clock, deferLater
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure

from llmgw import testing
from llmgw.errors import ConfigError, ModelLoading
from llmgw.health.target import Target
from llmgw.loading.command import Command, CommandFactory
from llmgw.testing.fakes import FakeHealthTarget

SERVED = str(Path(__file__).with_name("served.py"))


# --- the contract, with processes that are not ---------------------------------


class FakeProcess:
    def __init__(self, reactor: FakeReactor, protocol: Any) -> None:
        self.reactor = reactor
        self.protocol = protocol

    def closeStdin(self) -> None:
        pass

    def signalProcess(self, name: str) -> None:
        self.reactor.running = None
        self.protocol.processEnded(Failure(ProcessTerminated(signal=15, status=0)))


class FakeReactor(Clock):
    """A clock that starts processes which are ready at once."""

    running: FakeProcess | None = None

    def spawnProcess(self, protocol: Any, *args: Any, **how: Any) -> None:
        self.running = protocol.transport = FakeProcess(self, protocol)
        protocol.connectionMade()


class OwnPort(FakeHealthTarget):
    def get(self, path: str, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        there = self._clock.running is not None  # type: ignore[attr-defined]
        self.answers[path] = (200, b'{"total_slots":2}') if there else ConnectionRefusedError()
        return super().get(path, timeout_s)


class TestContract(testing.ModelLoaderContract):
    factory = CommandFactory()
    options = {"command": ["true", "{path}"], "models": {"m": "m.gguf"}}  # noqa: RUF012
    model = "m"

    def make(self, clock: Clock) -> Any:
        clock.__class__ = FakeReactor
        return self.factory.build(self.options, OwnPort(clock), clock)


# --- real processes -------------------------------------------------------------


def _reactor() -> Any:
    from twisted.internet import reactor

    return reactor


class House:
    """A loader with a port, and models whose files say how long they take."""

    def __init__(self, folder: Path, what: str = "", port: int | None = None, **options: Any) -> None:
        self.port = port or free_port()
        models = {}
        for name, load_s in {"m": 0.2, "n": 0.0}.items():
            path = folder / f"{name}.gguf"
            path.write_text(str(load_s))
            models[name] = str(path)
        models["gone"] = str(folder / "gone.gguf")
        target = Target(_reactor(), "local", f"http://127.0.0.1:{self.port}", {})
        self.loader: Command = CommandFactory().build(
            {
                "command": [sys.executable, SERVED, "{port}", "{path}", *([what] if what else [])],
                "models": models,
                **options,
            },
            target,
            _reactor(),
        )
        self.changes = 0
        self.loader.start(self._note)

    def _note(self) -> None:
        self.changes += 1

    async def states(self) -> dict[str, str]:
        return dict(await self.loader.models())

    @property
    def pid(self) -> int:
        process = self.loader._process
        assert process is not None
        assert process.transport is not None
        return int(process.transport.pid)  # type: ignore[attr-defined]


@asynccontextmanager
async def house(folder: Path, what: str = "", **options: Any) -> AsyncIterator[House]:
    """One whose process is gone at the end."""
    made = House(folder, what, **options)
    try:
        yield made
    finally:
        await made.loader.stop()
    assert made.loader._process is None


async def reason(loading: Deferred[None]) -> str:
    try:
        await loading
    except ModelLoading as error:
        return error.message
    raise AssertionError("it was loaded")


@pytest_twisted.ensureDeferred
async def test_a_load_starts_the_server_and_an_unload_ends_it(tmp_path: Path) -> None:
    async with house(tmp_path) as made:
        assert await made.states() == {"m": "unloaded", "n": "unloaded", "gone": "unloaded"}
        loading = made.loader.load("m")
        await deferLater(_reactor(), 0.05)
        assert (await made.states())["m"] == "loading"
        await loading
        assert (await made.states())["m"] == "loaded"
        assert made.loader.slots == {"m": 3}
        pid = made.pid
        await made.loader.load("m")
        assert made.pid == pid, "what is loaded is not started again"
        await made.loader.load("n")
        assert await made.states() == {"m": "unloaded", "n": "loaded", "gone": "unloaded"}
        await made.loader.unload("m")
        assert (await made.states())["n"] == "loaded"
        await made.loader.unload("n")
        assert made.loader.slots == {}
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest_twisted.ensureDeferred
async def test_a_server_that_ends_before_it_is_ready_is_told_with_code_and_last_words(tmp_path: Path) -> None:
    async with house(tmp_path, "crash") as made:
        told = await reason(made.loader.load("m"))
        assert "exit code 1" in told
        assert "out of memory" in told
        assert (await made.states())["m"] == "failed"
        assert "exit code" in await reason(made.loader.load("gone"))
        assert "not among the models" in await reason(made.loader.load("zzz"))


@pytest_twisted.ensureDeferred
async def test_a_server_that_is_never_ready_is_killed(tmp_path: Path) -> None:
    async with house(tmp_path, "silent", ready_s=0.5) as made:
        loading = made.loader.load("m")
        await deferLater(_reactor(), 0.1)
        pid = made.pid
        assert "not ready after 0.5 s" in await reason(loading)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest_twisted.ensureDeferred
async def test_a_server_that_is_deaf_to_sigterm_is_killed(tmp_path: Path) -> None:
    async with house(tmp_path, "deaf", stop_s=0.1) as made:
        await made.loader.load("n")
        pid = made.pid
        await made.loader.unload("n")
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert (await made.states())["n"] == "unloaded"


@pytest_twisted.ensureDeferred
async def test_a_server_that_ends_by_itself_is_noticed_at_once(tmp_path: Path) -> None:
    lines: list[str] = []

    def watch(event: Any) -> None:
        lines.append(str(event.get("line", event.get("why", ""))))

    globalLogPublisher.addObserver(watch)
    try:
        async with house(tmp_path) as made:
            await made.loader.load("n")
            os.kill(made.pid, signal.SIGKILL)
            process = made.loader._process
            assert process is not None
            await process.ended
            assert (await made.states())["n"] == "failed"
            assert made.changes == 1
            await made.loader.load("n")
    finally:
        globalLogPublisher.removeObserver(watch)
    assert any("signal 9" in line for line in lines)
    assert any("reading" in line for line in lines), "what the process writes is logged"


@pytest_twisted.ensureDeferred
async def test_another_server_on_the_port_is_no_success(tmp_path: Path) -> None:
    async with house(tmp_path) as first:
        await first.loader.load("n")
        second = House(tmp_path, port=first.port)
        assert "another server" in await reason(second.loader.load("n"))


@pytest_twisted.ensureDeferred
async def test_giving_up_a_load_ends_the_process(tmp_path: Path) -> None:
    async with house(tmp_path, "silent") as made:
        loading = made.loader.load("m")
        await deferLater(_reactor(), 0.1)
        process = made.loader._process
        assert process is not None
        loading.cancel()
        with pytest.raises(CancelledError):
            await loading
        await process.ended


def test_the_server_ends_with_a_gateway_that_is_killed(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_text("0")
    code = (
        "import os, subprocess, sys, time\n"
        "bound = [sys.executable, '-m', 'llmgw.loading.bound', str(os.getpid())]\n"
        "child = subprocess.Popen([*bound, *sys.argv[1:]])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    argv = [sys.executable, "-c", code, sys.executable, SERVED, str(free_port()), str(model)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as gateway:
        assert gateway.stdout is not None
        pid = int(gateway.stdout.readline())
        assert b"reading" in gateway.stdout.readline()
        gateway.kill()
    deadline_s = time.monotonic() + 10.0
    while _runs(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_command_that_cannot_be_run_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmgw.loading.bound", str(os.getpid()), "/no/such/program"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot run /no/such/program" in done.stderr


def test_options_are_checked_all_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        CommandFactory().build(
            {"command": "llama-server", "models": {}, "environment": [], "directory": "/no", "odd": 1},
            FakeHealthTarget(Clock(), url="http://10.0.0.1:8080"),
            Clock(),
        )
    assert {fault.where for fault in refused.value.faults} == {
        *("command", "models", "environment", "directory", "plugin", "odd")
    }
    with pytest.raises(ConfigError, match="no program 'no-such-program'"):
        CommandFactory().build(
            {"command": ["no-such-program"], "models": {"m": "m"}}, FakeHealthTarget(Clock()), Clock()
        )


def test_braces_that_are_not_ours_stay() -> None:
    spawned: list[list[str]] = []

    class Reactor(FakeReactor):
        def spawnProcess(self, protocol: Any, *args: Any, **how: Any) -> None:
            spawned.append(args[1])
            super().spawnProcess(protocol, *args, **how)

    clock = Reactor()
    words = ["true", '{"enable_thinking": false}', "--port={port}", "{host}", "{model}", "{path}"]
    loader = CommandFactory().build(
        {"command": words, "models": {"m": "/a b.gguf"}},
        OwnPort(clock, url="http://127.0.0.1:8081"),
        clock,
    )
    done: list[Any] = []
    loader.load("m").addBoth(done.append)
    clock.pump([0.1] * 10)
    assert done == [None]
    assert spawned[0][5:] == ['{"enable_thinking": false}', "--port=8081", "127.0.0.1", "m", "/a b.gguf"]
