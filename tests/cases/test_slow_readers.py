"""A client that takes a long answer slowly gets all of it, also where the gateway has the whole
and the connection ends with it."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from certificates import issue
from harness import Scripted, event, eventually, free_port, gateway_with, trusting

from cases.scenes import DONE, STEADY, STOP, Scene, ask_whole, scene, side_by_side, streaming

SIZE = 16 << 20
"""More than sockets hold by themselves."""
RATE = 4 << 20
CONFIG = STEADY + "\n[timeouts]\nkeepalive_s = 1\nclose_grace_s = 0.5\nwrite_stall_s = 2\n"
LLAMA = 'models = ["m"]\nkind = "llama-server"'
"""Its answers are put together, and then written at once."""
ANSWER = streaming(*[event("x" * (SIZE // 64))] * 64, STOP, DONE)
CLOSING = "Connection: close\r\n"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Scene]:
    with scene(tmp_path, CONFIG, b=LLAMA) as found:
        found.backend.play(ANSWER)
        yield found


class Slow:
    """A client with a small window."""

    def __init__(self, port: int, request: bytes, *, tls: bool = False) -> None:
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        self.sock.settimeout(10)
        self.sock.connect(("127.0.0.1", port))
        if tls:
            self.sock = trusting().wrap_socket(self.sock)
        self.sock.sendall(request)
        self.got = 0

    def read(self, most: int = 2 * SIZE) -> int:
        """Read until ``most`` bytes have come, or the answer's end. :return: how many came."""
        begun = time.monotonic()
        data = b"-"
        while self.got < most and data and not data.endswith(b"}"):
            data = self.sock.recv(65536)
            self.got += len(data)
            time.sleep(max(0.0, self.got / RATE - (time.monotonic() - begun)))
        return self.got


def test_a_long_answer_reaches_a_slow_client_whole(here: Scene) -> None:
    requests = [
        ask_whole(headers=CLOSING),
        ask_whole().replace(b"HTTP/1.1", b"HTTP/1.0"),
        ask_whole(),
    ]
    for size in side_by_side(lambda request: Slow(here.gateway.port, request).read(), requests):
        assert size >= SIZE


def test_over_tls_too(tmp_path: Path) -> None:
    """There a close waits for the client's own, with the answer's end still on its way."""
    files, port = issue(tmp_path), free_port()
    listen = f"llmtls:tcp:{port}:interface=127.0.0.1:privateKey={files.key}:certKey={files.certificate}"
    backend = Scripted(ANSWER)
    with gateway_with(tmp_path, backend, config=f'listen = ["{listen}"]\n' + CONFIG, more=LLAMA) as gateway:
        eventually(lambda: gateway.state["backends"])
        for headers in (CLOSING, ""):
            assert Slow(port, ask_whole(headers=headers), tls=True).read() >= SIZE
    backend.close()


def test_a_connection_is_idle_from_when_its_answer_was_taken(here: Scene) -> None:
    client = Slow(here.gateway.port, ask_whole())
    assert client.read() >= SIZE
    time.sleep(0.5)
    client.sock.sendall(ask_whole())
    assert client.sock.recv(12) == b"HTTP/1.1 200"
    client.sock.close()


def test_a_client_that_takes_nothing_more_is_cut(here: Scene) -> None:
    for headers in ("", CLOSING):
        client = Slow(here.gateway.port, ask_whole(headers=headers))
        client.read(1 << 20)
        eventually(lambda: here.gateway.state["connections"] == 0, 6.0)
        client.sock.close()


def test_an_ending_gateway_waits_for_answers_on_their_way(tmp_path: Path) -> None:
    backend = Scripted(ANSWER)
    with gateway_with(tmp_path, backend, config=CONFIG, more=LLAMA) as gateway, ThreadPoolExecutor() as pool:
        clients = [Slow(gateway.port, ask_whole(headers=headers)) for headers in ("", CLOSING)]
        reading = [pool.submit(client.read) for client in clients]
        eventually(gateway.is_idle)
        gateway.process.send_signal(signal.SIGINT)
        assert [each.result() >= SIZE for each in reading] == [True, True]
        assert gateway.process.wait(5) == 0
    backend.close()
