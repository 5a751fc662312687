"""A new daemon takes over from a running one, as real processes under load."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import TWISTD, Gateway, Scripted, backend_table, eventually, free_port
from streaming_load import StreamingLoad, short_streams

DRAIN = "[drain]\nlame_duck_s = 0.3\nfinish_s = 10.0\nabort_s = 1.0\n"


def is_alive(pid: int) -> bool:
    try:
        return "\tZ" not in Path(f"/proc/{pid}/status").read_text().split("State:")[1].split("\n")[0]
    except OSError:
        return False


@pytest.fixture
def backend() -> Iterator[Scripted]:
    scripted = Scripted(short_streams())  # type: ignore[arg-type]
    yield scripted
    scripted.close()


@contextlib.contextmanager
def ended_after(pids: list[int]) -> Iterator[None]:
    """Whoever took over is nobody's child any more."""
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        for pid in pids:
            eventually(lambda pid=pid: not is_alive(pid), 20)  # type: ignore[misc]


def successor_of(gateway: Gateway, count: int = 1) -> int:
    """The process id of the last one that started."""
    words = "a successor is starting: pid "
    eventually(lambda: gateway.log.count(words) >= count)
    return int(gateway.log.split(words)[count].split()[0])


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_new_one_takes_over_and_nobody_notices(tmp_path: Path, backend: Scripted, workers: int) -> None:
    pidfile = tmp_path / "gw.pid"
    table = backend_table(backend, more='models = ["m"]\nmax_connections = 500')
    gateway = Gateway(tmp_path, f"workers = {workers}\n" + DRAIN + table, options=[f"--pidfile={pidfile}"])
    old = gateway.process.pid
    pids: list[int] = []
    with ended_after(pids):
        try:
            assert int(pidfile.read_text()) == old
            with StreamingLoad(gateway.port, 4) as load, StreamingLoad(gateway.port, 3, keep=True) as kept:
                load.wait_done(4)
                gateway.process.send_signal(signal.SIGUSR2)
                pids.append(successor_of(gateway))
                assert gateway.process.wait(60) == 0
                load.wait_done(4)
                kept.wait_done(3)
            load.check()
            kept.check()
            assert int(pidfile.read_text()) == pids[0]
            assert gateway.admin("/readyz")[0] == 200
            # And it can hand over itself, whatever number of workers is wanted by now.
            text = gateway.config_path.read_text()
            gateway.config_path.write_text(text.replace(f"workers = {workers}", f"workers = {3 - workers}"))
            with StreamingLoad(gateway.port, 4) as load:
                load.wait_done(2)
                os.kill(pids[0], signal.SIGUSR2)
                pids.append(successor_of(gateway, 2))
                eventually(lambda: not is_alive(pids[0]), 60)
                load.wait_done(4)
            load.check()
            assert len(gateway.state.get("workers", [])) == (2 if workers == 1 else 0)
        finally:
            gateway.stop()
    assert not pidfile.exists()
    assert "Traceback" not in gateway.log, gateway.log


def test_one_that_does_not_start_changes_nothing(tmp_path: Path, backend: Scripted) -> None:
    gateway = Gateway(tmp_path, DRAIN + backend_table(backend))
    good = gateway.config_path.read_text()
    try:
        gateway.config_path.write_text(good + "[limits]\nbody_bytes = -1\n")
        with StreamingLoad(gateway.port, 2) as load:
            gateway.process.send_signal(signal.SIGUSR2)
            eventually(lambda: "did not start" in gateway.log, 30)
            load.wait_done(2)
        load.check()
        assert "limits.body_bytes" in gateway.log
        assert gateway.process.poll() is None
    finally:
        assert gateway.stop() == 0


NOBODY = pwd.getpwnam("nobody")
SOURCES = Path(__file__).parent.parent


def interpreter_for_all() -> tuple[str, dict[str, str]] | None:
    """A Python that ``nobody`` can run too, and what it needs to find us; ``None``: there is none."""
    paths = [str(SOURCES), *(path for path in sys.path if path.endswith("site-packages"))]
    environment = {**os.environ, "PYTHONPATH": ":".join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    code = f"import sys, llmgw.service; assert sys.version_info[:2] == {tuple(sys.version_info[:2])}"
    for program in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            tried = subprocess.run(
                [program, "-c", code],
                user=NOBODY.pw_uid,
                group=NOBODY.pw_gid,
                extra_groups=[],
                cwd="/",
                env=environment,
                capture_output=True,
                check=False,
            )
            if tried.returncode == 0:
                return program, environment
    return None


class InTheBackground:
    """A daemon that root has started, and that has become nobody since.

    :ivar folder: anybody may look into it; ``run`` in it is nobody's own, and all else root's.
    """

    def __init__(self, folder: Path, backend: Scripted, *, log_is_ours: bool) -> None:
        found = interpreter_for_all()
        if found is None:
            pytest.skip("no Python here that the user nobody can run")
        program, environment = found
        self.folder = folder
        self.port, self.admin_port = free_port(), free_port()
        folder.chmod(0o755)
        (folder / "run").mkdir()
        os.chown(folder / "run", NOBODY.pw_uid, NOBODY.pw_gid)
        self.log_path = folder / "gw.log"
        self.log_path.touch(0o644)
        if log_is_ours:
            os.chown(self.log_path, NOBODY.pw_uid, NOBODY.pw_gid)
        self.pidfile = folder / "run" / "gw.pid"
        config = folder / "llmgw.toml"
        listen = f'listen = ["tcp:{self.port}:interface=127.0.0.1"]\n'
        admin = f'admin = ["tcp:{self.admin_port}:interface=127.0.0.1"]\n'
        config.write_text(
            listen + admin + '[log]\naccess = "run/access.log"\n' + DRAIN + backend_table(backend)
        )
        config.chmod(0o644)
        options = [f"--pidfile={self.pidfile}", "--logfile=gw.log", "--uid=nobody", f"--gid={NOBODY.pw_gid}"]
        subprocess.run(
            [program, *TWISTD[1:], *options, "llmgw", "-c", "llmgw.toml"],
            cwd=folder,
            env=environment,
            check=True,
        )
        eventually(lambda: " serves " in self.log)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def pid(self) -> int:
        """What the pid file says."""
        return int(self.pidfile.read_text() or 0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_one_that_has_given_up_roots_rights_is_followed(open_folder: Path, backend: Scripted) -> None:
    daemon = InTheBackground(open_folder, backend, log_is_ours=True)
    pids = [daemon.pid]
    assert daemon.pidfile.stat().st_uid == 0, "twistd writes it while it is root"
    with ended_after(pids):
        for _ in range(2):
            with StreamingLoad(daemon.port, 4) as load:
                load.wait_done(2)
                os.kill(daemon.pid, signal.SIGUSR2)
                eventually(lambda: daemon.pid not in (0, *pids), 60)
                pids.append(daemon.pid)
                eventually(lambda: not is_alive(pids[-2]), 60)
                load.wait_done(4)
            load.check()
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        assert f"Uid:\t{NOBODY.pw_uid}\t{NOBODY.pw_uid}\t{NOBODY.pw_uid}" in status
        assert os.readlink(f"/proc/{daemon.pid}/fd/2") == os.devnull
    assert not daemon.pidfile.exists()
    assert "Traceback" not in daemon.log, daemon.log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_why_none_can_follow_is_told_in_the_background_too(open_folder: Path, backend: Scripted) -> None:
    """It has no terminal, and here may not even open its log."""
    daemon = InTheBackground(open_folder, backend, log_is_ours=False)
    with ended_after([daemon.pid]), StreamingLoad(daemon.port, 2) as load:
        old = daemon.pid
        os.kill(old, signal.SIGUSR2)
        eventually(lambda: "did not start: " in daemon.log, 30)
        said = daemon.log.partition("did not start: ")[2]
        assert "Permission denied" in said
        assert "gw.log" in said
        load.wait_done(2)
        assert daemon.pid == old
    load.check()


class Systemd:
    """What systemd does for a service: sockets at 3 and on, and an ear for its states."""

    def __init__(self, folder: Path, environment: dict[str, str], *options: str) -> None:
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(str(folder / "notify"))
        self.notify.settimeout(30)
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.listening.getsockname()[1]
        self.log_path = folder / "twistd.log"
        code = (
            "import os, sys; fd = int(sys.argv[1]); os.dup2(fd, 3, inheritable=True); "
            "os.environ.update(LISTEN_PID=str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"
        )
        number = self.listening.fileno()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(number), *TWISTD, "-n", "--pidfile=", "llmgw", *options],
                pass_fds=[number],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "NOTIFY_SOCKET": str(folder / "notify"), "LISTEN_FDS": "1", **environment},
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def told(self, what: str) -> str:
        """The next message that has ``what`` in it."""
        while True:
            message = self.notify.recv(4096).decode()
            if what in message:
                return message

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.notify.close()
        self.listening.close()


@pytest.mark.parametrize("workers", ["2", pytest.param("1", marks=pytest.mark.slow)])
def test_under_systemd(tmp_path: Path, backend: Scripted, workers: str) -> None:
    """An activated socket, ready when it serves, pings, reloads, a successor, the end."""
    config = tmp_path / "gw.toml"
    config.write_text(
        'listen = ["systemd:domain=INET:name=public"]\nauth = ["anonymous"]\n'
        f'workers = {workers}\n[log]\naccess = ""\n' + DRAIN + backend_table(backend)
    )
    environment = {"LISTEN_FDNAMES": "public", "WATCHDOG_USEC": "3000000"}
    systemd = Systemd(tmp_path, environment, "-c", str(config))
    pids: list[int] = []
    with ended_after(pids):
        try:
            ready = systemd.told("READY=1")
            assert f"MAINPID={systemd.process.pid}" in ready
            with StreamingLoad(systemd.port, 3) as load:
                load.wait_done(3)
                systemd.told("WATCHDOG=1")
                systemd.process.send_signal(signal.SIGHUP)
                assert "MONOTONIC_USEC=" in systemd.told("RELOADING=1")
                assert "STATUS=reloaded" in systemd.told("READY=1")
                systemd.process.send_signal(signal.SIGUSR2)
                new = int(systemd.told("MAINPID=").split("MAINPID=")[1].split()[0])
                assert new != systemd.process.pid
                pids.append(new)
                assert systemd.process.wait(60) == 0
                load.wait_done(3)
            load.check()
            os.kill(new, signal.SIGTERM)
            assert "EXTEND_TIMEOUT_USEC=" in systemd.told("STOPPING=1")
            eventually(lambda: not is_alive(new), 30)
            assert "Traceback" not in systemd.log, systemd.log
        finally:
            systemd.close()


def test_sockets_of_systemd_that_cannot_be_used_are_explained(tmp_path: Path) -> None:
    systemd = Systemd(
        tmp_path,
        {"LISTEN_FDNAMES": ""},
        *("-l", "systemd:domain=INET:name=public", "-b", "http://127.0.0.1:9", "--auth=anonymous"),
    )
    try:
        assert systemd.process.wait(30) == 1
        assert "set FileDescriptorName=" in systemd.log
        assert "listen[0]" in systemd.log
        assert "Traceback" not in systemd.log
    finally:
        systemd.close()


@pytest.mark.slow
def test_fifty_changes_under_streams_cut_nothing_and_refuse_nobody(tmp_path: Path) -> None:
    """Rolling restarts with reloads, and successors: each worker, and the parent, many times."""
    backend = Scripted(short_streams(30))  # type: ignore[arg-type]
    table = backend_table(backend, more='models = ["m"]\nmax_connections = 500')
    gateway = Gateway(tmp_path, "workers = 2\n" + DRAIN + table)
    pids: list[int] = []
    main = gateway.process.pid
    with ended_after(pids):
        try:
            with StreamingLoad(gateway.port, 8) as load, StreamingLoad(gateway.port, 4, keep=True) as kept:
                for number in range(50):
                    if number % 5 == 4:
                        os.kill(main, signal.SIGUSR2)
                        main = successor_of(gateway, len(pids) + 1)
                        pids.append(main)
                        eventually(lambda: gateway.log.count("serves: finishing here") == len(pids), 60)
                    else:
                        status, body = gateway.admin("/api/restart", "POST", within_s=120)
                        assert status == 200, body
                        assert gateway.admin("/api/reload", "POST", within_s=60)[0] == 200
                    load.wait_done(2)
            load.check()
            kept.check()
            print(f"{load.counts['done'] + kept.counts['done']} streams, none cut, nobody refused")
        finally:
            gateway.stop()
            backend.close()
    assert "Traceback" not in gateway.log, gateway.log
