"""On every reactor that is offered, a connection that was reset is lost, once and soon."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness import (
    SSE_HEAD,
    Gateway,
    Line,
    Received,
    Scripted,
    backend_table,
    chat_body,
    chunk,
    event,
    eventually,
    post,
)

RESET = '''
"""Resets connections, and says what Twisted makes of it: for each the bytes and the reason."""
import json, socket, struct, sys
from twisted.application.reactors import installReactor

reactor = installReactor(sys.argv[1])
from twisted.internet.protocol import Factory, Protocol

LATE, PAUSED, WRITING = "late", "paused", "writing"
found = {}


class Reset(Protocol):
    got, name = 0, None

    def dataReceived(self, data):
        if self.name is None:
            name, _, data = data.partition(b"|")
            self.name = name.decode()
            if self.name == PAUSED:
                self.transport.pauseProducing()
                reactor.callLater(0.3, self.transport.resumeProducing)
            elif self.name == WRITING:
                self.transport.pauseProducing()
                reactor.callLater(0.2, self.transport.write, b"x")
            elif self.name == LATE:
                self.transport.write(b"y" * (1 << 24))
                reactor.callLater(0.2, self.transport.write, b"x")
        self.got += len(data)

    def connectionLost(self, reason):
        # A write that fails lets go of what was not read.
        got = None if self.name == WRITING else self.got
        found.setdefault(self.name, []).append([got, reason.type.__name__])


def begin():
    sizes = {"none": 0, "short": 10, "long": 100_000, LATE: 5, PAUSED: 70_000, WRITING: 5}
    for name, size in sizes.items():
        sock = socket.create_connection(("127.0.0.1", port.getHost().port))
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sent = sock.send(name.encode() + b"|" + b"z" * size)
        expected[name] = sent - len(name) - 1
        reactor.callLater(0.05 if name in (LATE, PAUSED, WRITING) else 0, sock.close)


expected = {}
factory = Factory.forProtocol(Reset)
port = reactor.listenTCP(0, factory, interface="127.0.0.1")
reactor.callLater(0.01, begin)
reactor.callLater(1.5, reactor.stop)
reactor.run()
print(json.dumps([expected, found]))
'''


@pytest.fixture(params=["epoll", "asyncio", "uvloop"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found == "uvloop":
        pytest.importorskip("uvloop")
    return found


def test_a_connection_that_is_reset_is_lost(name: str) -> None:
    ran = subprocess.run([sys.executable, "-c", RESET, name], capture_output=True, text=True, check=True)
    expected, found = json.loads(ran.stdout)
    expected["writing"] = None
    assert found == {each: [[got, "ConnectionLost"]] for each, got in expected.items()}
    assert not ran.stderr


def test_a_client_that_resets_its_connection_is_told_to_the_backend(name: str, tmp_path: Path) -> None:
    closed = threading.Semaphore(0)

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("a")))
        line.wait_closed(5.0)
        closed.release()

    backend = Scripted(script)
    gateway = Gateway(tmp_path, backend_table(backend), options=[f"--reactor={name}"])
    try:
        with gateway.client() as client:
            client.send(post(body=chat_body(stream=True)))
            client.read_until(event("a"))
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert closed.acquire(timeout=5.0)
        eventually(gateway.is_idle)
        eventually(lambda: gateway.state["connections"] == 0)
        assert "Traceback" not in gateway.log
    finally:
        gateway.stop()
        backend.close()
