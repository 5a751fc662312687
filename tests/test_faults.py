"""The fault proxy itself: each fault is what it says, as a plain client sees it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from harness import eventually, free_port

from llmgw.testing import Fault, FaultProxy

ANSWER = b"0123456789" * 10


class Server:
    """Sends an answer for each request of 4 bytes."""

    def __init__(self) -> None:
        self.heard = b""
        self.closed = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while data := sock.recv(4):
                    self.heard += data
                    sock.sendall(ANSWER)
            except OSError:
                pass
            self.closed += 1

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", server.port) as proxy:
        yield proxy
    eventually(lambda: proxy.open == 0)


def ask(proxy: FaultProxy, request: bytes = b"POST", within_s: float = 0.3) -> tuple[bytes, str]:
    """What comes back, and how it ends: ``open``, ``closed`` or ``reset``."""
    got = b""
    try:
        sock = socket.create_connection(("127.0.0.1", proxy.port), 2)
    except ConnectionResetError:
        return got, "reset"  # so soon that connecting saw it
    with sock:
        sock.settimeout(within_s)
        try:
            sock.sendall(request)
            while data := sock.recv(65536):
                got += data
        except TimeoutError:
            return got, "open"
        except OSError:
            return got, "reset"
        return got, "closed"


@pytest.mark.parametrize(
    ("fault", "got", "end"),
    [
        (Fault(), ANSWER, "open"),
        (Fault("stall", at=7), ANSWER[:7], "open"),
        (Fault("stall"), b"", "open"),
        (Fault("cut", at=7), ANSWER[:7], "closed"),
        (Fault("reset", at=0), b"", "reset"),
        (Fault("truncate", at=7), ANSWER[:7] + b"ffff\r\ndata: {", "closed"),
        (Fault("corrupt", at=7), ANSWER[:7] + b'"' + ANSWER[8:], "open"),
        (Fault("black_hole"), b"", "open"),
        (Fault("drip", at=90, rate=1000), ANSWER, "open"),
        (Fault("delay", delay_s=0.05), ANSWER, "open"),
        (Fault("cut", at=1000), ANSWER, "open"),
        (Fault("stall", only=b"GET "), ANSWER, "open"),
        (Fault("cut", only=b"POST"), b"", "closed"),
    ],
    ids=str,
)
def test_what_a_client_sees(proxy: FaultProxy, fault: Fault, got: bytes, end: str) -> None:
    proxy.play(fault)
    assert ask(proxy) == (got, end)
    proxy.play(Fault())
    assert ask(proxy) == (ANSWER, "open")


def test_reset_after_some_bytes(proxy: FaultProxy) -> None:
    proxy.play(Fault("reset", at=7))
    got, end = ask(proxy)
    assert end == "reset"
    assert ANSWER.startswith(got)


def test_garbage_is_the_same_each_time(proxy: FaultProxy) -> None:
    proxy.play(Fault("garbage", at=5))
    first, end = ask(proxy)
    assert (first[:5], len(first), end) == (ANSWER[:5], 5 + 4096, "closed")
    assert ask(proxy)[0] == first


def test_refuse_and_reject_and_back(proxy: FaultProxy) -> None:
    for _ in range(3):
        proxy.play(Fault("refuse"))
        with pytest.raises(ConnectionRefusedError):
            ask(proxy)
        proxy.play(Fault("reject"))
        assert ask(proxy)[1] == "reset"
        proxy.play(Fault())
        assert ask(proxy) == (ANSWER, "open")


def test_unreachable_hangs_while_connecting(proxy: FaultProxy) -> None:
    proxy.play(Fault("unreachable"))
    with socket.socket() as sock:
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            sock.connect(("127.0.0.1", proxy.port))
    proxy.play(Fault())
    assert ask(proxy) == (ANSWER, "open")


def test_a_fault_begins_with_closing_what_is_open(proxy: FaultProxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), 2) as sock:
        sock.sendall(b"POST")
        assert sock.recv(1000) == ANSWER
        assert proxy.open == 2
        proxy.play(Fault("stall"))
        assert sock.recv(1000) == b""
    eventually(lambda: proxy.open == 0)


def test_a_client_that_leaves_closes_the_server_too(proxy: FaultProxy, server: Server) -> None:
    for fault in (Fault(), Fault("stall", at=7)):
        proxy.play(fault)
        before = server.closed
        ask(proxy, within_s=0.05)
        eventually(lambda before=before: server.closed > before)


def test_a_wrong_name_is_told() -> None:
    with pytest.raises(ValueError, match="no such fault: 'melt'; there are none, refuse"):
        Fault("melt")


def test_the_command(server: Server) -> None:
    port = free_port()
    command = [sys.executable, "-m", "llmgw.testing", f"127.0.0.1:{port}", f"127.0.0.1:{server.port}"]
    process = subprocess.Popen([*command, "cut", "--at", "3"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "closes in good order" in process.stdout.readline()
        with socket.create_connection(("127.0.0.1", port), 2) as sock:
            sock.sendall(b"POST")
            time.sleep(0.05)
            assert sock.recv(100) == ANSWER[:3]
    finally:
        process.terminate()
        process.communicate()
