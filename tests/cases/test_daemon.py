"""The gateway as a daemon: start, refusal to start, reload, and the end."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from harness import (
    COMPLETION,
    LAST_CHUNK,
    SSE_HEAD,
    TWISTD,
    Client,
    Gateway,
    Line,
    Received,
    Scripted,
    backend_table,
    chat_body,
    chunk,
    event,
    eventually,
    free_port,
    gateway_with,
    json_response,
    post,
)

IS_ROOT = os.geteuid() == 0
FAST = "[drain]\nlame_duck_s = 0.3\nfinish_s = 1.5\nabort_s = 1.0\n"
KEYS = {"one": "the-first-key-0123456789", "two": "the-second-key-012345678"}


def key_file(path: Path, *ids: str) -> Path:
    path.write_text(
        "".join(
            f'[keys.{id}]\nname = "{id}"\nhash = "sha256:{sha256(KEYS[id].encode()).hexdigest()}"\n'
            for id in ids
        )
    )
    path.chmod(0o600)
    return path


def asked_with(id: str, **fields: object) -> bytes:
    return post(body=chat_body(**fields), headers=f"Authorization: Bearer {KEYS[id]}\r\n")


@pytest.fixture
def backend() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


def run(folder: Path, *arguments: str, daemon: bool = False) -> subprocess.CompletedProcess[str]:
    """``twistd``, until it ends (or, as a daemon, until it has started)."""
    options = ["--pidfile=gw.pid", "--logfile=gw.log"] if daemon else ["-n", "--pidfile="]
    return subprocess.run(
        [*TWISTD, *options, *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=False
    )


def is_alive(pid: int) -> bool:
    """Not gone, and no zombie that nobody has waited for."""
    try:
        return " Z" not in Path(f"/proc/{pid}/status").read_text().split("State:")[1].split("\n")[0].replace(
            "\t", " "
        )
    except OSError:
        return False


class Daemon:
    """A gateway that went into the background."""

    def __init__(self, folder: Path, config: str, *options: str) -> None:
        self.folder = folder
        self.port = free_port()
        (folder / "llmgw.toml").write_text(f'listen = ["tcp:{self.port}:interface=127.0.0.1"]\n' + config)
        self.started = run(folder, *options, "llmgw", "-c", "llmgw.toml", daemon=True)
        self.pid = int((folder / "gw.pid").read_text()) if self.started.returncode == 0 else 0

    @property
    def log(self) -> str:
        return (self.folder / "gw.log").read_text()

    def ask(self, request: bytes) -> int:
        with Client(self.port) as client:
            client.send(request)
            return client.read_answer().status

    def stop(self, number: int = signal.SIGINT) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            eventually(lambda: not is_alive(self.pid))


@contextlib.contextmanager
def daemon(folder: Path, config: str, *options: str) -> Iterator[Daemon]:
    running = Daemon(folder, config, *options)
    try:
        assert running.started.returncode == 0, running.started
        yield running
    finally:
        running.stop()


# --- start -------------------------------------------------------------------------


def test_twistd_puts_it_into_the_background(tmp_path: Path, backend: Scripted) -> None:
    config = '[log]\naccess = "logs/access.log"\n' + FAST + backend_table(backend)
    (tmp_path / "logs").mkdir()
    with daemon(tmp_path, config) as running:
        assert (running.started.stdout, running.started.stderr) == ("", "")
        assert is_alive(running.pid)
        eventually(lambda: running.ask(post()) == 200)
        assert os.readlink(f"/proc/{running.pid}/cwd") == str(tmp_path)
        umask = re.search(r"Umask:\s*(\d+)", Path(f"/proc/{running.pid}/status").read_text())
        assert umask
        assert umask[1] == "0077"
        os.kill(running.pid, signal.SIGTERM)
        eventually(lambda: not is_alive(running.pid), 5)
        assert not (tmp_path / "gw.pid").exists()
        assert "Traceback" not in running.log
        assert "serves tcp:" in running.log
    access = tmp_path / "logs" / "access.log"
    assert [json.loads(line)["status"] for line in access.read_text().splitlines()][-1] == 200
    assert access.stat().st_mode & 0o077 == 0


def test_paths_count_from_the_file_wherever_it_is_started(tmp_path: Path, backend: Scripted) -> None:
    """Also after a reload, when the daemon has long left the directory of its start."""
    (tmp_path / "etc").mkdir()
    key_file(tmp_path / "etc" / "keys.toml", "one")
    port = free_port()
    config = tmp_path / "etc" / "gw.toml"
    head = f'listen = ["tcp:{port}:interface=127.0.0.1"]\nauth = ["keys:keys.toml"]\n'
    config.write_text(head + '[log]\naccess = "access.log"\n' + FAST + backend_table(backend))
    started = run(tmp_path, "--rundir=/", f"--logfile={tmp_path}/gw.log", f"--pidfile={tmp_path}/gw.pid",
                  "llmgw", "-c", "etc/gw.toml", daemon=True)  # fmt: skip
    assert started.returncode == 0, started
    running = Daemon.__new__(Daemon)
    running.folder, running.port, running.started = tmp_path, port, started
    running.pid = int((tmp_path / "gw.pid").read_text())
    try:
        assert os.readlink(f"/proc/{running.pid}/cwd") == "/"
        eventually(lambda: running.ask(asked_with("one")) == 200)
        assert running.ask(asked_with("two")) == 401
        key_file(tmp_path / "etc" / "keys.toml", "two")
        os.kill(running.pid, signal.SIGHUP)
        eventually(lambda: running.ask(asked_with("two")) == 200)
    finally:
        running.stop()
    assert (tmp_path / "etc" / "access.log").exists()


@pytest.mark.skipif(not IS_ROOT, reason="only root can become somebody else")
def test_root_gives_its_rights_up_after_binding(backend: Scripted) -> None:
    nobody = pwd.getpwnam("nobody")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o755)
        (folder / "logs").mkdir()
        os.chown(folder / "logs", nobody.pw_uid, nobody.pw_gid)
        keys = key_file(folder / "keys.toml", "one")  # readable for root alone
        config = (
            f'auth = ["keys:{keys}"]\n[log]\naccess = "logs/access.log"\n' + FAST + backend_table(backend)
        )
        with daemon(folder, config, "--uid=nobody", f"--gid={nobody.pw_gid}") as running:
            status = Path(f"/proc/{running.pid}/status").read_text()
            for name, wanted in (("Uid", nobody.pw_uid), ("Gid", nobody.pw_gid)):
                found = re.search(rf"{name}:\s*(.*)", status)
                assert found
                assert set(found[1].split()) == {str(wanted)}
            eventually(lambda: running.ask(asked_with("one")) == 200)
            # The key file can't be read again; the old keys stay, and the log says why.
            os.kill(running.pid, signal.SIGHUP)
            eventually(lambda: "reload refused" in running.log)
            assert "keys.toml" in running.log
            assert running.ask(asked_with("one")) == 200
            assert "Traceback" not in running.log
        assert (folder / "logs" / "access.log").stat().st_uid == nobody.pw_uid
    finally:
        shutil.rmtree(folder)


def test_no_file_at_all_is_needed(tmp_path: Path, backend: Scripted) -> None:
    port = free_port()
    listen = f"tcp:{port}:interface=127.0.0.1"
    process = subprocess.Popen(
        [
            *TWISTD,
            "-n",
            "--pidfile=",
            "llmgw",
            "--listen",
            listen,
            "--backend",
            f"{backend.url},model=m,weight=2",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:

        def status() -> int:
            try:
                with Client(port) as client:
                    client.send(post())
                    return client.read_answer().status
            except OSError:
                return 0

        assert eventually(lambda: status() == 200)
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert b"Traceback" not in output
    # The access log goes to standard output where nothing else is said.
    assert [json.loads(line)["status"] for line in output.splitlines() if line.startswith(b"{")][-1] == 200


# --- what does not start ---------------------------------------------------------------


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.mark.parametrize(("background", "which"), [(False, "listen"), (True, "listen"), (True, "admin")])
def test_a_port_that_is_taken_is_one_clear_line(tmp_path: Path, background: bool, which: str) -> None:
    with taken_port() as port:
        other = free_port()
        ports = {"listen": other, "admin": other, which: port}
        if which == "listen":
            ports["admin"] = free_port()
        arguments = [f"--{name}=tcp:{number}:interface=127.0.0.1" for name, number in ports.items()]
        ended = run(tmp_path, "llmgw", *arguments, "--backend=http://127.0.0.1:9", daemon=background)
    assert ended.returncode != 0
    said = ended.stdout + ended.stderr
    assert "Traceback" not in said
    assert f"cannot listen on tcp:{port}" in said
    eventually(lambda: not (tmp_path / "gw.pid").exists())
    assert "Address already" in said
    if not background:  # twistd cuts what a daemon says at 100 bytes
        assert "in use" in said
        assert said.count("llmgw: cannot") == 1
    else:
        eventually(lambda: "in use" in (tmp_path / "gw.log").read_text())


@pytest.mark.parametrize("background", [False, True])
def test_an_access_log_that_can_not_be_written_is_one_clear_line(tmp_path: Path, background: bool) -> None:
    (tmp_path / "access.log").mkdir()
    config = f'listen = ["tcp:{free_port()}:interface=127.0.0.1"]\n[log]\naccess = "access.log"\n'
    (tmp_path / "gw.toml").write_text(config + '[[backends]]\nid = "b"\nurl = "http://127.0.0.1:9"\n')
    ended = run(tmp_path, "llmgw", "-c", "gw.toml", daemon=background)
    assert ended.returncode != 0
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "cannot write the access log" in ended.stdout + ended.stderr
    eventually(lambda: not (tmp_path / "gw.pid").exists())


WRONG = """
listen = ["tcp:0x", "nowhere:1"]
auth = ["keys:none.toml", 5]
typo = 1
[timeouts]
connect_s = -1
[router]
plugin = "none"
[[health]]
plugin = "http"
interval_s = 0.1
[[health]]
[rate_limiter]
plugin = "none"
[[discovery]]
plugin = "none"
[[filters]]
plugin = "none"
[log]
access = "none/access.log"
[[backends]]
id = "a"
url = "ftp://x"
[[backends]]
id = "a"
url = "http://127.0.0.1:9"
weight = "much"
[[backends]]
id = "b"
url = "http://127.0.0.1:10"
health = "none"
loader = "none-such"
"""
PLACES = [
    *("typo", "timeouts.connect_s", "backends[0].url", "backends[1].id", "backends[1].weight", "listen[0]"),
    *("listen[1]", "auth[0]", "auth[1]", "router.plugin", "health[0].interval_s", "health[1].plugin"),
    *("rate_limiter.plugin", "discovery[0].plugin", "filters[0].plugin", "log.access"),
    *("backends[2].health", "backends[2].loader"),
]


@pytest.mark.parametrize("background", [False, True])
def test_a_wrong_configuration_lists_every_fault(tmp_path: Path, background: bool) -> None:
    (tmp_path / "gw.toml").write_text(WRONG)
    for extra in ([],) if background else ([], ["--check"]):
        ended = run(tmp_path, "llmgw", "-c", "gw.toml", *extra, daemon=background)
        assert ended.returncode == 1
        assert "Traceback" not in ended.stderr
        told = sorted(line.split(": ")[2].removesuffix(".plugin") for line in ended.stderr.splitlines())
        assert told == sorted(place.removesuffix(".plugin") for place in PLACES), ended.stderr
        assert not (tmp_path / "gw.pid").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--listen=tcp:0"], "auth"),
        (["-c", "missing.toml"], "missing.toml"),
        (["--auth=keys:missing.toml"], "missing.toml"),
        (["--auth=nonsense:x"], "nonsense"),
    ],
)
def test_what_is_refused_at_the_start_is_named(tmp_path: Path, arguments: list[str], named: str) -> None:
    ended = run(tmp_path, "llmgw", "--backend=http://127.0.0.1:9", *arguments)
    assert ended.returncode != 0
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr


def test_check_says_good_and_starts_nothing(tmp_path: Path) -> None:
    ended = run(
        tmp_path, "llmgw", "--listen=tcp:0:interface=127.0.0.1", "--backend=http://127.0.0.1:9", "--check"
    )
    assert (ended.returncode, "good" in ended.stdout) == (0, True)
    (tmp_path / "gw.toml").write_text('[router]\nplugin = "no-such-router"\n')
    ended = run(tmp_path, "llmgw", "-c", "gw.toml", "--check")
    assert (ended.returncode, "no-such-router" in ended.stderr) == (1, True)


# --- reload ------------------------------------------------------------------------


def ticking(stop: threading.Event) -> object:
    """A script that streams until told to stop."""

    def script(line: Line, request: Received) -> None:
        if b"stream" not in request.body:
            line.send(json_response(COMPLETION))
            return
        line.send(SSE_HEAD)
        while not stop.wait(0.05):
            line.send(chunk(event("tick")))
        line.send(chunk(b"data: [DONE]\n\n"), LAST_CHUNK)

    return script


def reloaded(gateway: Gateway, how: str) -> None:
    """Reload, and wait for the outcome in the log."""
    before = gateway.log.count(" reload")
    if how == "signal":
        gateway.process.send_signal(signal.SIGHUP)
    else:
        assert gateway.admin("/api/reload", "POST")[0] in (200, 400, 409, 422)
    eventually(lambda: gateway.log.count(" reload") > before or how != "signal")


def test_a_reload_takes_keys_and_backends_and_leaves_streams_alone(tmp_path: Path) -> None:
    stop = threading.Event()
    old, new = (
        Scripted(ticking(stop)),
        Scripted(lambda line, _: line.send(json_response({**COMPLETION, "id": "new"}))),
    )  # type: ignore[arg-type]
    keys = key_file(tmp_path / "keys.toml", "one")
    config = f'auth = ["keys:{keys}"]\n' + FAST
    with gateway_with(tmp_path, old, config=config) as gateway:
        text = gateway.config_path.read_text()
        with gateway.client() as client:
            client.send(asked_with("one", stream=True))
            client.read_until(b"tick")
            key_file(tmp_path / "keys.toml", "two")
            gateway.config_path.write_text(text.replace(old.url, new.url).replace('id = "b0"', 'id = "b1"'))
            reloaded(gateway, "signal")
            assert gateway.ask(asked_with("one")).status == 401
            assert gateway.ask(asked_with("two")).json["id"] == "new"
            # The stream of a key and a backend that are no more goes on.
            client.buffer = b""
            client.read_until(b"tick")
            stop.set()
            client.read_until(b"[DONE]")
            client.read_until(LAST_CHUNK)
        eventually(lambda: [found["id"] for found in gateway.state["backends"]] == ["b1"])
    for backend in (old, new):
        backend.close()


@pytest.mark.parametrize("how", ["signal", "admin"])
def test_a_wrong_file_changes_nothing_and_is_told(tmp_path: Path, backend: Scripted, how: str) -> None:
    keys = key_file(tmp_path / "keys.toml", "one")
    with gateway_with(tmp_path, backend, config=f'auth = ["keys:{keys}"]\n' + FAST) as gateway:
        good = gateway.config_path.read_text()
        for wrong, named in (
            (good + "\n[timeouts]\nconnect_s = -1\n", "timeouts.connect_s"),
            (good.replace("keys.toml", "gone.toml"), "gone.toml"),
            ("]", "TOML"),
        ):
            gateway.config_path.write_text(wrong)
            if how == "signal":
                reloaded(gateway, how)
                eventually(lambda named=named: named in gateway.log)
            else:
                status, body = gateway.admin("/api/reload", "POST")
                assert status >= 400
                assert named in body.decode()
            assert gateway.ask(asked_with("one")).status == 200
        key_file(tmp_path / "keys.toml", "two")
        gateway.config_path.write_text(good)
        reloaded(gateway, how)
        assert gateway.ask(asked_with("two")).status == 200
        assert gateway.ask(asked_with("one")).status == 401


def test_a_reload_reopens_the_access_log_and_survives_if_it_can_not(
    tmp_path: Path, backend: Scripted
) -> None:
    with gateway_with(tmp_path, backend, config=FAST) as gateway:
        log = tmp_path / "access.log"
        gateway.ask(post())
        log.rename(tmp_path / "first")
        reloaded(gateway, "signal")
        gateway.ask(post())
        log.rename(tmp_path / "second")
        log.mkdir()
        reloaded(gateway, "signal")
        eventually(lambda: "not reopened" in gateway.log)
        gateway.ask(post())
        log.rmdir()
        reloaded(gateway, "signal")
        gateway.ask(post())
        reloaded(gateway, "signal")
        lines = [
            len(path.read_text().splitlines()) for path in (tmp_path / "first", tmp_path / "second", log)
        ]
        assert lines == [1, 2, 1]


def test_a_reload_does_not_forget_how_many_descriptors_there_are(tmp_path: Path, backend: Scripted) -> None:
    """Each request needs two of them, so connections are capped by their number."""
    shell = 'ulimit -n 300; exec "$0" "$@"'
    port, admin = free_port(), free_port()
    (tmp_path / "gw.toml").write_text(
        f'listen = ["tcp:{port}:interface=127.0.0.1"]\nadmin = ["tcp:{admin}:interface=127.0.0.1"]\n'
        + FAST
        + backend_table(backend)
    )
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["/bin/sh", "-c", shell, *TWISTD, "-n", "--pidfile=", "llmgw", "-c", "gw.toml"],
            cwd=tmp_path,
            stdout=out,
            stderr=out,
        )
    try:
        eventually(lambda: "serves" in log.read_text())
        process.send_signal(signal.SIGHUP)
        eventually(lambda: "reloaded" in log.read_text())
        clients = [Client(port) for _ in range(60)]
        time.sleep(0.2)
        kept = 0
        for client in clients:
            client.sock.settimeout(0.01)
            try:
                kept += client.sock.recv(1) != b""
            except TimeoutError:
                kept += 1
            except OSError:
                pass
            client.close()
        assert kept == 22  # (300 - 256) / 2
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


# --- the end -----------------------------------------------------------------------


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return True
    return False


def test_s_drn_1_sigterm_lets_streams_finish_and_ends_with_0(tmp_path: Path) -> None:
    """Three streams: one short, one that is finished in time, one endless."""
    stop, never = threading.Event(), threading.Event()
    scripts = {"short": ticking(stop), "endless": ticking(never)}

    def script(line: Line, request: Received) -> None:
        scripts[request.json.get("user", "short")](line, request)  # type: ignore[operator]

    backend = Scripted(script)
    gateway = Gateway(tmp_path, FAST + backend_table(backend))
    try:
        short, endless, idle = (gateway.client() for _ in range(3))
        short.send(post(body=chat_body(stream=True, user="short")))
        endless.send(post(body=chat_body(stream=True, user="endless")))
        for client in (short, endless):
            client.read_until(b"tick")
        idle.send(post())
        assert idle.read_answer().get("connection") is None
        gateway.process.send_signal(signal.SIGTERM)
        # Not ready first, while the listener still takes what comes.
        eventually(lambda: gateway.admin("/readyz")[0] == 503, 1)
        assert gateway.admin("/livez")[0] == 200
        assert gateway.ask(post()).status == 200
        eventually(lambda: refused(gateway.port), 2)
        assert idle.is_closed(2)
        stop.set()
        short.read_until(b"[DONE]")
        assert short.read_until(LAST_CHUNK)
        assert short.is_closed(2)
        # The endless one is cut: an error event, and no last chunk.
        assert endless.is_closed(5)
        assert b'"error"' in endless.buffer
        assert not endless.buffer.endswith(LAST_CHUNK)
        assert gateway.process.wait(5) == 0
        assert "Traceback" not in gateway.log
    finally:
        never.set()
        gateway.stop()
        backend.close()


SLOW = "[drain]\nlame_duck_s = 30.0\nfinish_s = 30.0\n"


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)])
def test_s_drn_1_a_second_signal_ends_it_at_once(tmp_path: Path, numbers: tuple[int, int]) -> None:
    stop = threading.Event()
    backend = Scripted(ticking(stop))  # type: ignore[arg-type]
    gateway = Gateway(tmp_path, SLOW + backend_table(backend))
    try:
        with gateway.client() as client:
            client.send(post(body=chat_body(stream=True)))
            client.read_until(b"tick")
            gateway.process.send_signal(numbers[0])
            eventually(lambda: gateway.admin("/readyz")[0] == 503, 2)
            begun = time.monotonic()
            gateway.process.send_signal(numbers[1])
            assert gateway.process.wait(4) == 0
            assert time.monotonic() - begun < 2.5
            assert client.is_closed(1)
            assert not client.buffer.endswith(LAST_CHUNK)
    finally:
        stop.set()
        gateway.stop()
        backend.close()
    assert "Traceback" not in gateway.log


def test_sigint_waits_for_no_load_balancer(tmp_path: Path) -> None:
    """No lame duck time; what runs may finish for five seconds."""
    stop = threading.Event()
    backend = Scripted(ticking(stop))  # type: ignore[arg-type]
    gateway = Gateway(tmp_path, SLOW + backend_table(backend))
    try:
        with gateway.client() as client:
            client.send(post(body=chat_body(stream=True)))
            client.read_until(b"tick")
            gateway.process.send_signal(signal.SIGINT)
            eventually(lambda: refused(gateway.port), 2)
            client.buffer = b""
            client.read_until(b"tick")
            stop.set()
            client.read_until(b"[DONE]")
            client.read_until(LAST_CHUNK)
        assert gateway.process.wait(3) == 0
    finally:
        stop.set()
        gateway.stop()
        backend.close()
    assert "Traceback" not in gateway.log


def test_drain_by_the_admin_listener_is_as_sigterm(tmp_path: Path, backend: Scripted) -> None:
    gateway = Gateway(tmp_path, FAST + backend_table(backend))
    try:
        assert gateway.admin("/api/drain", "POST")[0] in (200, 202)
        assert gateway.process.wait(4) == 0
    finally:
        gateway.stop()


def test_a_request_that_is_on_its_way_when_the_end_begins_is_answered(
    tmp_path: Path, backend: Scripted
) -> None:
    """From a client that has just come, from one that has sent half of it, and from one
    whose answer began before and is over only now."""
    stop = threading.Event()
    backend.play(ticking(stop))  # type: ignore[arg-type]
    gateway = Gateway(tmp_path, "[drain]\nlame_duck_s = 0.0\nfinish_s = 20.0\n" + backend_table(backend))
    whole = post(body=chat_body(stream=True))
    try:
        with gateway.client() as used, gateway.client() as half, gateway.client() as new:
            used.send(whole)
            used.read_until(b"tick")
            half.send(whole[:30])
            eventually(lambda: gateway.state["connections"] == 3)
            gateway.process.send_signal(signal.SIGTERM)
            eventually(lambda: refused(gateway.port), 5)
            stop.set()
            new.send(whole)
            half.send(whole[30:])
            used.read_until(LAST_CHUNK)
            used.send(whole)
            for client in (new, half, used):
                answer = client.read_answer()
                assert (answer.status, answer.get("connection")) == (200, "close")
        assert gateway.process.wait(10) == 0
    finally:
        gateway.stop()
