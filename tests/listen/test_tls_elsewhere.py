"""TLS of our own in other places: the admin listener, a Unix socket, a socket that systemd passes."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from authority import Authority
from harness import Scripted, backend_table, eventually, free_port, post


class Started:
    """A gateway with a listener of each kind."""

    def __init__(self, folder: Path, backend: Scripted) -> None:
        self.folder = folder
        self.authority = Authority()
        self.context = ssl.create_default_context(cadata=self.authority.pem.decode())
        self.authority.issue("localhost").write(folder, "server.pem")
        self.admin_port = free_port()
        self.activated = socket.create_server(("127.0.0.1", 0))
        pem = "privateKey=server.pem"
        listen = [f"llmtls:systemd:INET:name=https:{pem}", f"llmtls:unix:gw.sock:{pem}"]
        admin = [f"llmtls:tcp:{self.admin_port}:interface=127.0.0.1:{pem}"]
        (folder / "llmgw.toml").write_text(
            f"listen = {json.dumps(listen)}\nadmin = {json.dumps(admin)}\nauth = ['anonymous']\n"
            + backend_table(backend, "b", 'models = ["m"]')
        )
        self._log = (folder / "log").open("wb")
        number = self.activated.fileno()
        # As systemd does it: the socket is descriptor 3 of the process that it starts.
        start = (
            f"import os; os.dup2({number}, 3); from twisted.scripts.twistd import run;"
            " os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1', 'LISTEN_FDNAMES': 'https'};"
            " run()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, "-n", "--pidfile=", "llmgw", "-c", "llmgw.toml"],
            cwd=folder,
            pass_fds=[number],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        eventually(self.is_ready, 20)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def admin(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection(
            "localhost", self.admin_port, context=self.context, timeout=10
        )
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return self.admin("/readyz")[0] == 200
        except OSError:
            return False

    def over(self, plain: socket.socket) -> tuple[int, bytes]:
        """One request through ``plain``. :return: the certificate's serial number, the answer."""
        with plain, self.context.wrap_socket(plain, server_hostname="localhost") as sock:
            sock.sendall(post(headers="Connection: close\r\n"))
            answer = b""
            while data := sock.recv(65536):
                answer += data
            return int(sock.getpeercert()["serialNumber"], 16), answer  # type: ignore[index, arg-type]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    backend = Scripted()
    made = Started(tmp_path_factory.mktemp("elsewhere"), backend)
    yield made
    made.process.terminate()
    made.process.wait(30)
    made.activated.close()
    backend.close()
    assert "Traceback" not in made.log
    assert "Unhandled" not in made.log


def test_everywhere_and_a_reload_renews_all_of_them(started: Started) -> None:
    def at_unix() -> socket.socket:
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(10)
        plain.connect(str(started.folder / "gw.sock"))
        return plain

    def at_systemds() -> socket.socket:
        return socket.create_connection(started.activated.getsockname(), 10)

    old, answer = started.over(at_unix())
    assert b"200 OK" in answer
    assert started.over(at_systemds())[0] == old
    new = started.authority.issue("localhost")
    new.write(started.folder, "server.pem")
    assert started.admin("/api/reload", "POST")[0] == 200
    for connect in (at_unix, at_systemds):
        serial, answer = started.over(connect())
        assert serial == new.serial
        assert b"200 OK" in answer
    pem = ssl.get_server_certificate(("127.0.0.1", started.admin_port))
    assert pem.encode() == new.certificate_pem
    assert b"llmgw_certificate_expires_seconds 1" in started.admin("/metrics")[1]
