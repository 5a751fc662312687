"""``llmgw demo`` from outside: what is printed, how it ends, and that nothing is left."""

from __future__ import annotations

import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmgw.commands import demo as demo_module
from llmgw.commands.demo import demo, gateway_command

COMMAND = [sys.executable, "-c", "from llmgw.commands.main import main; main()", "demo"]
FREE_PORTS = ["--port", "0", "--admin-port", "0"]
real = pytest.mark.real


@contextmanager
def running(directory: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*COMMAND, *FREE_PORTS, "--dir", str(directory), *options]
    # Without a buffer, which select would not see.
    process = subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=20)


def read_until(process: subprocess.Popen[bytes], wanted: str, within_s: float = 40) -> str:
    assert process.stdout is not None
    deadline_s = time.monotonic() + within_s
    seen = ""
    while wanted not in seen:
        left_s = deadline_s - time.monotonic()
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, left_s))
        data = process.stdout.read(4096) if ready else b""
        assert data, f"no {wanted!r} in:\n{seen}"
        seen += data.decode()
    return seen


def server_pids(printed: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)", printed)]


def is_gone(pid: int) -> bool:
    """Ended, if perhaps not collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def all_gone(pids: list[int], within_s: float = 10) -> bool:
    deadline_s = time.monotonic() + within_s
    while not all(map(is_gone, pids)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


@real
def test_it_shows_an_answer_and_ends_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    command = [*COMMAND, *FREE_PORTS, "--dir", str(tmp_path), "--servers", "real", "--seconds", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^backend (fast|mid|slow), first token after \d+ ms", ended.stdout, re.MULTILINE)
    assert re.search(r"Dashboard +http://127\.0\.0\.1:\d+/", ended.stdout)
    assert "curl -N --cacert" in ended.stdout
    assert "from openai import" in ended.stdout
    assert "\x1b" not in ended.stdout  # plain, since this is no terminal
    secret = (tmp_path / "key.txt").read_text().strip()
    assert secret not in ended.stdout
    pids = server_pids(ended.stdout)
    assert len(pids) == 3
    assert all_gone(pids)


@real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_with_status_0(tmp_path: Path, number: int) -> None:
    with running(tmp_path, "--servers", "simulated") as process:
        printed = read_until(process, "Ctrl-C stops everything.")
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 0, printed + output.decode()
    assert b"Stopped." in output
    assert all_gone(server_pids(printed))


@real
@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_nothing_outlives_a_killed_demo(tmp_path: Path) -> None:
    with running(tmp_path, "--servers", "auto") as process:
        pids = server_pids(read_until(process, "Ctrl-C stops everything."))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if children.exists():  # a kernel option
            pids = [int(pid) for pid in children.read_text().split()]
        process.kill()
        process.wait()
    assert len(pids) >= 3
    assert all_gone(pids)


def test_a_busy_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(demo, ["--dir", str(tmp_path), "--port", str(port)])
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert f"port {port}" in result.output
    assert "--port" in result.output


def test_a_directory_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(demo, ["--dir", str(tmp_path / "file" / "demo"), *FREE_PORTS])
    assert result.exit_code == 1
    assert result.output.count("\n") == 1


@real
def test_a_gateway_that_does_not_start_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('no such luck')"]
    monkeypatch.setattr(demo_module, "gateway_command", lambda config: broken)
    result = CliRunner().invoke(demo, ["--dir", str(tmp_path), "--servers", "simulated", *FREE_PORTS])
    assert result.exit_code == 1
    assert "the gateway ended with 1" in result.output
    assert "no such luck" in result.output


def test_the_fast_reactor_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, expected in ((object(), True), (None, False)):
        monkeypatch.setattr(demo_module, "find_spec", lambda name, found=found: found)
        assert ("--reactor=uvloop" in gateway_command(Path("llmgw.toml"))) is expected


@pytest.mark.parametrize("options", [["--seconds", "0"], ["--servers", "none"], ["--port", "70000"]])
def test_a_wrong_option_is_a_usage_error(options: list[str]) -> None:
    assert CliRunner().invoke(demo, options).exit_code == 2
