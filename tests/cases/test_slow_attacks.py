"""slowhttptest and idle handshakes against a gateway process: every bad connection is
gone within its deadline, and good requests are answered meanwhile (case S-SLW-1, S-TLS-2)."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Gateway, Scripted, backend_table, eventually, free_port, post

from llmgw.demo.certificate import ensure_certificate

ATTACKERS = 300
CONFIG = """
[timeouts]
tls_handshake_s = 3.0
request_head_s = 3.0
body_s = 5.0
write_stall_s = 3.0
keepalive_s = 4.0
close_grace_s = 1.0
"""

pytestmark = pytest.mark.slow


class Service:
    """Good requests, one after the other, while something else goes on."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.took_s: list[float] = []
        self.failed: list[object] = []

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            begun = time.monotonic()
            try:
                status = self._gateway.ask(post()).status
            except (OSError, AssertionError) as error:
                self.failed.append(error)
                continue
            if status != 200:
                self.failed.append(status)
            self.took_s.append(time.monotonic() - begun)

    def __enter__(self) -> Service:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def p99_s(self) -> float:
        return statistics.quantiles(self.took_s, n=100)[98]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("slow")
    files = ensure_certificate(folder)
    plain, secure = free_port(), free_port()
    listen = (
        f'listen = ["tcp:{plain}:interface=127.0.0.1",'
        f' "llmtls:tcp:{secure}:interface=127.0.0.1:privateKey={files.key}:certKey={files.certificate}"]\n'
    )
    backend = Scripted()
    gateway = Gateway(
        folder, listen + CONFIG + backend_table(backend, more='models = ["m"]\nmax_connections = 400')
    )
    gateway.port, gateway.secure_port = plain, secure  # type: ignore[attr-defined]
    yield gateway
    eventually(gateway.is_idle)
    gateway.stop()
    backend.close()
    assert "Traceback" not in gateway.log
    assert "Unhandled" not in gateway.log


@pytest.fixture(scope="module", autouse=True)
def fair_threads() -> Iterator[None]:
    """Attacker and good client are threads of one process here: else one waits 5 ms for the other."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def calm_p99_s(gateway: Gateway) -> float:
    """Of good requests when nothing else goes on, and the first ones are over."""
    with Service(gateway):
        time.sleep(1)
    with Service(gateway) as service:
        time.sleep(3)
    assert not service.failed
    return service.p99_s


def judge(service: Service, calm_p99_s: float) -> None:
    """No good request failed, and they were not much slower; half a second is a busy machine's due."""
    print(f"p99 {service.p99_s * 1000:.1f} ms, calm {calm_p99_s * 1000:.1f} ms, of {len(service.took_s)}")
    assert not service.failed
    assert service.p99_s < max(2 * calm_p99_s, 0.5)


@pytest.mark.parametrize(
    ("attack", "path"),
    [
        (("-H", "-i", "1"), "/v1/chat/completions"),
        (("-B", "-i", "1", "-s", "8192"), "/v1/chat/completions"),
        (("-R", "-a", "10", "-b", "3000"), "/v1/models"),
        (("-X", "-w", "10", "-y", "20", "-z", "5", "-n", "1", "-k", "3"), "/v1/models"),
    ],
    ids=["slowloris", "slow-body", "range", "slow-read"],
)
def test_slowhttptest(
    gateway: Gateway, calm_p99_s: float, attack: tuple[str, ...], path: str, tmp_path: Path
) -> None:
    """300 connections; the gateway holds none of them any more long before the tool gives up, at 20 s."""
    if shutil.which("slowhttptest") is None:
        pytest.skip("no slowhttptest here (Debian: slowhttptest)")
    command = ["slowhttptest", *attack, "-c", str(ATTACKERS), "-r", "150", "-l", "20", "-p", "3"]
    with Service(gateway) as service:
        tool = subprocess.Popen(
            [*command, "-u", f"http://127.0.0.1:{gateway.port}{path}"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        begun = time.monotonic()
        most = 0

        def gone() -> bool:
            nonlocal most
            open_now = gateway.state["connections"]
            most = max(most, open_now)
            # The tool's probes and the good client have one each.
            return time.monotonic() - begun > 3 and open_now <= 3

        eventually(gone, 16.0)
        took_s = time.monotonic() - begun
        tool.terminate()
        tool.wait(10)
    print(f"{attack[0]}: at most {most} open, none after {took_s:.1f} s")
    assert most > ATTACKERS // 3 or attack[0] == "-R"
    judge(service, calm_p99_s)


HANDSHAKES = """
import contextlib, socket, sys, time

port, count = map(int, sys.argv[1:])
hello = bytes.fromhex("16030100f8010000f40303") + b"\\x11" * 60
sockets = []
for number in range(count):
    sock = socket.create_connection(("127.0.0.1", port))
    if number % 3 == 1:
        sock.sendall(hello)
    sockets.append(sock)
begun = time.monotonic()
for second in range(3):
    for sock in sockets[2::3]:
        with contextlib.suppress(OSError):
            sock.sendall(hello[second : second + 1])
    time.sleep(1)
for sock in sockets:
    sock.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(100) == b""
print(time.monotonic() - begun)
"""
"""The attacker, a process of its own. A third of its connections says nothing, a third half a hello,
a third a byte a second. It tells in how many seconds all were gone."""


def test_handshakes_that_stop(gateway: Gateway, calm_p99_s: float) -> None:
    command = [sys.executable, "-c", HANDSHAKES, str(gateway.secure_port), str(ATTACKERS)]  # type: ignore[attr-defined]
    with Service(gateway) as service:
        told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    took_s = float(told.stdout)
    print(f"handshakes: {ATTACKERS} gone in {took_s:.1f} s")
    assert took_s < 3 + 1 + 1
    judge(service, calm_p99_s)
