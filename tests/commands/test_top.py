"""``llmgw top`` and ``llmgw explain`` before a running gateway, with and without a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import issue
from click.testing import CliRunner, Result
from harness import Gateway, Scripted, backend_table, chat_body, eventually, free_port, post

from llmgw.commands import figures
from llmgw.commands import top as top_module
from llmgw.commands.explain import explain
from llmgw.commands.top import Seen, frame, top

TOKEN = "top-secret-of-the-operator"
MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background has it ignored
from llmgw.commands.main import main
main()
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two backends and an alias; one request has been answered, one refused."""
    folder = tmp_path_factory.mktemp("top")
    one, two = Scripted(), Scripted()
    text = '[[models]]\nname = "small"\ntarget = "m"\n'
    text += backend_table(one, "first", 'models = ["m"]\nmax_connections = 4')
    text += backend_table(two, "second", 'models = ["other"]')
    running = Gateway(folder, text)
    running.ask(post())
    running.ask(post(body=chat_body("none")))
    eventually(lambda: json.loads(running.admin("/api/decisions")[1])["total"] == 2)
    yield running
    running.stop()
    one.close()
    two.close()


@pytest.fixture
def admin(gateway: Gateway) -> list[str]:
    return ["--admin", f"http://127.0.0.1:{gateway.admin_port}"]


def run(command: Any, *arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(command, list(arguments), **options)


# --- top ----------------------------------------------------------------------


def test_without_a_terminal_one_picture_is_printed(admin: list[str]) -> None:
    result = run(top, *admin)
    assert result.exit_code == 0, result.output
    for words in ("live", "2 of 2 nodes take requests", "first", "0/4", "closed", "404 model not found"):
        assert words in result.output
    assert "\x1b" not in result.output


def test_once_as_json_is_the_state(admin: list[str]) -> None:
    state = json.loads(run(top, *admin, "--once", "--json").output)
    assert [each["id"] for each in state["backends"]] == ["first", "second"]


def test_json_is_a_line_for_each_change(gateway: Gateway, admin: list[str]) -> None:
    command = [sys.executable, "-c", MAIN, "top", *admin, "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert child.stdout is not None
    before = json.loads(child.stdout.readline())
    gateway.ask(post())
    after = json.loads(child.stdout.readline())
    assert after["requests"] > before["requests"]
    child.send_signal(signal.SIGINT)
    assert child.wait(10) == 0
    child.stdout.close()


def read_until(terminal: int, words: bytes, within_s: float = 15.0) -> bytes:
    end, seen = time.monotonic() + within_s, b""
    while words not in seen:
        assert time.monotonic() < end, seen.decode(errors="replace")[-6000:]
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 65536)
    return seen


def resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def test_in_a_terminal_it_is_live_follows_its_size_and_ends_on_ctrl_c(
    gateway: Gateway, admin: list[str]
) -> None:
    # Not os.execv: readline sets COLUMNS behind Python's back.
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    # Not pty.fork, which may hang in a process with threads.
    terminal, its_side = pty.openpty()
    own_terminal = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    child = subprocess.Popen(
        [sys.executable, "-c", own_terminal + MAIN, "top", *admin],
        stdin=its_side,
        stdout=its_side,
        stderr=its_side,
        env={**environment, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(its_side)
    resize(terminal, 40, 140)
    read_until(terminal, b"nodes take requests")
    gateway.ask(post(body=chat_body("asked-for-live")))
    read_until(terminal, b"asked-for-live")
    resize(terminal, 10, 60)
    small: list[bytes] = []
    end = time.monotonic() + 15
    seen = b""
    while not small:  # a whole picture of the fleet, with no room for decisions any more
        assert time.monotonic() < end, seen.decode(errors="replace")[-3000:]
        seen += read_until(terminal, b"\x1b[H")
        pictures = seen.split(b"\x1b[H")[1:-1]
        small = [each for each in pictures if b"second" in each and b"asked-for-live" not in each]
    os.write(terminal, b"\x03")
    deadline = time.monotonic() + 10
    status = None
    while status is None and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                os.read(terminal, 65536)
            except OSError:
                pass  # it has closed its side
        status = child.poll()
    assert status == 0
    os.close(terminal)


def test_a_picture_of_a_gateway_that_is_gone_is_stale() -> None:
    seen = Seen()
    state = {"router": "r", "backends": [], "in_flight": 0, "waiting": 0, "draining": False}
    seen.take("state", state, 100.0)
    from rich.console import Console

    def shown(now_s: float) -> str:
        console = Console(width=120)
        with console.capture() as captured:
            console.print(frame(seen, "http://g", 120, 30, now_s))
        return captured.get()

    assert "live" in shown(105.0)
    assert "STALE for 20 s" in shown(120.0)
    seen.why = "Connection refused"
    assert "Connection refused" in shown(101.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--admin", "http://127.0.0.1:1"], "nobody listens there"),
        (["--admin", "127.0.0.1:9901"], "http:// or https://"),
    ],
)
def test_what_cannot_be_reached_is_one_line(arguments: list[str], words: str) -> None:
    result = run(top, *arguments)
    assert result.exit_code in (1, 2)
    assert words in result.output
    assert "Traceback" not in result.output


def test_the_wrong_listener_is_named(gateway: Gateway) -> None:
    result = run(top, "--admin", f"http://127.0.0.1:{gateway.port}")
    assert result.exit_code == 1
    assert "is it the admin listener?" in result.output


def test_a_listener_with_tls_is_told_from_one_without(gateway: Gateway, tmp_path: Path) -> None:
    files = issue(tmp_path)
    backend = Scripted()
    port = free_port()
    tls = f"llmtls:tcp:{port}:privateKey={files.key}:certKey={files.certificate}:interface=127.0.0.1"
    listen = f'listen = ["tcp:0:interface=127.0.0.1", "{tls}"]\n'
    secured = Gateway(tmp_path, listen + backend_table(backend))
    try:
        in_clear = run(top, "--admin", f"http://127.0.0.1:{port}")
        assert (
            in_clear.output
            == f"Error: http://127.0.0.1:{port}: closes without an answer: use https:// if it speaks TLS\n"
        )
        untrusted = run(top, "--admin", f"https://127.0.0.1:{port}")
        assert "its certificate is not trusted" in untrusted.output
        assert "SSL_CERT_FILE" in untrusted.output
        trusted = run(
            top, "--admin", f"https://localhost:{port}", env={"SSL_CERT_FILE": str(files.authority)}
        )
        assert "is it the admin listener?" in trusted.output
        no_tls = run(top, "--admin", f"https://127.0.0.1:{gateway.admin_port}")
        assert "no TLS there" in no_tls.output
        assert "http://" in no_tls.output
    finally:
        secured.stop()
        backend.close()


def test_a_token_is_read_from_a_file(tmp_path: Path) -> None:
    backend = Scripted()
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    gateway = Gateway(tmp_path, f"admin_token_file = 'token'\n{backend_table(backend)}")
    admin = ["--admin", f"http://127.0.0.1:{gateway.admin_port}"]
    try:
        refused = run(top, *admin)
        assert refused.exit_code == 1
        assert "--token-file" in refused.output
        assert run(top, *admin, "--token-file", str(token)).exit_code == 0
        environment = {"LLMGW_ADMIN": admin[1], "LLMGW_ADMIN_TOKEN_FILE": str(token)}
        assert run(explain, "--model", "m", env=environment).exit_code == 0
    finally:
        gateway.stop()
        backend.close()


# --- explain ------------------------------------------------------------------


def test_explain_tells_the_choice_the_others_and_the_reasons(admin: list[str]) -> None:
    result = run(explain, *admin, "--model", "small")
    assert result.exit_code == 0, result.output
    assert "first would take small (as m)" in result.output
    assert "left out  second  does not serve the model" in result.output


def test_explain_reads_a_file_or_standard_input(admin: list[str], tmp_path: Path) -> None:
    (tmp_path / "body.json").write_bytes(chat_body("m"))
    told = json.loads(run(explain, *admin, "--json", str(tmp_path / "body.json")).output)
    assert told["choice"] == "first"
    assert run(explain, *admin, "-", input=chat_body("m")).exit_code == 0


def test_explain_of_what_nobody_takes_fails(gateway: Gateway, admin: list[str]) -> None:
    gateway.admin("/api/backends/second/drain", "POST")
    result = run(explain, *admin, "--model", "other")
    gateway.admin("/api/backends/second/undrain", "POST")
    assert result.exit_code == 1
    assert "Nobody would take other now. no_backend" in result.output
    unknown = run(explain, *admin, "--model", "none")
    assert unknown.exit_code == 1
    assert "model_not_found" in unknown.output
    assert run(explain, *admin).exit_code == 2


# --- figures ------------------------------------------------------------------


def test_figures_and_pictures_of_one_line() -> None:
    assert [figures.seconds(each) for each in (None, 0.0042, 0.21, 1.5, 61.0)] == [
        "–",
        "4.2 ms",
        "210 ms",
        "1.50 s",
        "61 s",
    ]
    assert [figures.figure(each) for each in (None, 3.0, 1e-30, 0.456, 1234.0, 2.5e6)] == [
        "–",
        "3",
        "0.00",
        "0.456",
        "1.2k",
        "2.5M",
    ]
    assert figures.bar(3, 4) == "███░"
    assert figures.bar(16, 64) == "██░░░░░░"
    assert figures.bar(9, 4) == "████"
    assert figures.bar(1, None) == ""
    assert figures.spark([None, 0.0, 1.0], 1.0) == " ▁█"
    assert figures.spark([0.0], 0.0) == "▁"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "ready"),
        ({"in_flight": 4}, "full"),
        ({"standing": "down", "available": False}, "down"),
        ({"standing": "ejected", "available": False}, "taken out"),
        ({"breaker": "half_open"}, "on trial"),
        ({"warmth": 0.4}, "warming up"),
        ({"loading": True, "available": False}, "loading"),
        ({"draining": True, "available": False}, "draining"),
        ({"standing": "odd", "available": False}, "odd"),
    ],
)
def test_a_backends_state_in_a_word(fields: dict[str, Any], word: str) -> None:
    node = {"id": "a", "standing": "ready", "breaker": "closed", "warmth": 1.0, "available": True}
    assert figures.state_of({**node, "in_flight": 0, "cap": 4, **fields})[0] == word


def test_a_slow_backend_is_one_that_its_peers_are_not() -> None:
    nodes = [
        {"id": name, "models": ["m"], "ttft_s": ttft} for name, ttft in (("a", 0.9), ("b", 0.1), ("c", 0.2))
    ]
    assert [figures.is_slow(node, nodes) for node in nodes] == [True, False, False]
    assert not figures.is_slow(nodes[0], [nodes[0], {**nodes[1], "models": ["another"]}])
    assert top_module.STALE_S > 5
