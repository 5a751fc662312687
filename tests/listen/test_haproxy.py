"""A real HAProxy, with the file we ship, before two gateways that speak TLS and the PROXY protocol."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from authority import Authority
from harness import (
    LAST_CHUNK,
    SSE_HEAD,
    WAIT_S,
    Client,
    Gateway,
    Line,
    Received,
    Scripted,
    answer_completion,
    backend_table,
    chat_body,
    chunk,
    event,
    eventually,
    free_port,
    post,
)

SHIPPED = Path(__file__).parents[2] / "etc" / "haproxy" / "haproxy.cfg"

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy (Debian: haproxy)")


class Balanced:
    """HAProxy before two gateways before one backend.

    :ivar gateways: by name; one may be restarted.
    :ivar go_on: what long streams wait for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        self.go_on = threading.Event()
        self.backend = Scripted(self._script)
        self.port = free_port()
        self.public = {name: free_port() for name in ("gateway-1", "gateway-2")}
        self.admin = {name: free_port() for name in self.public}
        self.gateways = {name: self.start(name) for name in self.public}
        self.haproxy = self._start_haproxy()
        try:
            for name in self.public:
                self.wait_for(name, "UP")
        except AssertionError:
            self.stop()
            raise

    def start(self, name: str) -> Gateway:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        self.authority.issue("localhost").write(folder, "server")
        listen = (
            f"llmtls:proxied:tcp:{self.public[name]}:interface=127.0.0.1:networks=127.0.0.1/32"
            ":privateKey=server.key:certKey=server.crt"
        )
        config = f'listen = ["{listen}"]\n[log]\naccess = "access.log"\n[drain]\nlame_duck_s = 1.5\n'
        return Gateway(
            folder,
            config + backend_table(self.backend, "b", 'models = ["m"]'),
            admin_port=self.admin[name],
        )

    def _start_haproxy(self) -> subprocess.Popen[bytes]:
        text = SHIPPED.read_text()
        stats = self.folder / "stats"
        for found, put in [
            (r"^global$", f"global\n    stats socket {stats} mode 600 level admin"),
            (r"bind :443", f"bind 127.0.0.1:{self.port}"),
            (r"inter 1s", "inter 200ms"),
            *(
                (rf"server {name} \S+", f"server {name} 127.0.0.1:{port} port {self.admin[name]}")
                for name, port in self.public.items()
            ),
        ]:
            text, count = re.subn(found, put, text, flags=re.MULTILINE)
            assert count == 1, found
        path = self.folder / "haproxy.cfg"
        path.write_text(text)
        log = (self.folder / "haproxy.log").open("wb")
        return subprocess.Popen(["haproxy", "-db", "-f", str(path)], stdout=log, stderr=log)

    def standing(self) -> dict[str, list[str]]:
        """HAProxy's own table, a row for each server."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.folder / "stats"))
            sock.sendall(b"show stat\n")
            text = b""
            while data := sock.recv(65536):
                text += data
        rows = [line.split(",") for line in text.decode().splitlines()]
        return {row[1]: row for row in rows if len(row) > 1}

    def wait_for(self, name: str, state: str) -> None:
        def is_so() -> bool:
            with contextlib.suppress(OSError, KeyError):
                return self.standing()[name][17].startswith(state)
            return False

        eventually(is_so)

    def client(self, source: str = "127.0.0.1") -> Client:
        client = Client.__new__(Client)
        client.buffer = b""
        plain = socket.create_connection(("127.0.0.1", self.port), WAIT_S, source_address=(source, 0))
        context = ssl.create_default_context(cadata=self.authority.pem.decode())
        client.sock = context.wrap_socket(plain, server_hostname="localhost")
        return client

    def ask(self, request: bytes | None = None, source: str = "127.0.0.1") -> Any:
        with self.client(source) as client:
            client.send(request or post(headers="Connection: close\r\n"))
            return client.read_answer()

    def stop(self) -> None:
        self.go_on.set()
        self.haproxy.kill()
        self.haproxy.wait()
        for gateway in self.gateways.values():
            gateway.stop()
        self.backend.close()

    def _script(self, line: Line, request: Received) -> None:
        if b'"long"' not in request.body:
            answer_completion(line, request)
            return
        line.send(SSE_HEAD, chunk(event("one")))
        self.go_on.wait(60)
        line.send(chunk(event("two")), chunk(b"data: [DONE]\n\n") + LAST_CHUNK)


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    scene = Balanced(tmp_path_factory.mktemp("balanced"))
    yield scene
    scene.stop()
    for gateway in scene.gateways.values():
        assert "Traceback" not in gateway.log, gateway.log
    assert not scene.backend.errors


class Load:
    """Callers that come one after another, each on a connection of its own, until told to stop."""

    def __init__(self, ask: Callable[[], Any], callers: int = 3) -> None:
        self.done = 0
        self.faults: list[str] = []
        self._ask = ask
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(callers)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        while not self._stop.is_set():
            try:
                answer = self._ask()
                if answer.status != 200 or not answer.clean:
                    self.faults.append(f"{answer.status} {answer.body!r}")
            except (OSError, AssertionError) as error:
                self.faults.append(repr(error))
            self.done += 1
            time.sleep(0.005)


def long_streams(balanced: Balanced, count: int) -> list[Client]:
    balanced.go_on.clear()
    clients = []
    for _ in range(count):
        client = balanced.client()
        client.send(post(body=chat_body(stream=True, user="long")))
        client.read_until(b"one")
        clients.append(client)
    return clients


def restart(balanced: Balanced, name: str) -> None:
    """As an operator does it: SIGTERM, wait for the end, start, wait until HAProxy uses it."""
    gateway = balanced.gateways[name]
    assert gateway.stop(signal.SIGTERM) == 0
    assert "Traceback" not in gateway.log, gateway.log
    balanced.gateways[name] = balanced.start(name)
    balanced.wait_for(name, "UP")


def test_streams_pass_untouched_and_clients_keep_their_address(balanced: Balanced) -> None:
    for index in range(4):
        request = post(
            body=chat_body(stream=True), headers=f"Connection: close\r\nx-request-id: addr-{index}\r\n"
        )
        answer = balanced.ask(request, source=f"127.0.0.{10 + index}")
        assert answer.status == 200
        assert answer.clean
        assert answer.body == (
            event("hi")
            + b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        )

    def peers() -> dict[str, str]:
        lines = [line for gateway in balanced.gateways.values() for line in gateway.access]
        return {line["id"]: line["peer"] for line in lines if line["id"].startswith("addr-")}

    found = eventually(lambda: len(peers()) == 4 and peers())
    assert found == {f"addr-{index}": f"127.0.0.{10 + index}" for index in range(4)}


def test_nobody_comes_in_beside_the_balancer(balanced: Balanced) -> None:
    for source in ("127.0.0.1", "127.0.0.2"):
        with socket.create_connection(
            ("127.0.0.1", balanced.public["gateway-1"]), WAIT_S, source_address=(source, 0)
        ) as sock:
            # From the balancer's address without a header, from another with a good one.
            try:
                header = b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" if source == "127.0.0.2" else b""
                sock.sendall(header + b"\x16\x03\x01")
                assert sock.recv(100) == b""
            except ConnectionResetError:
                pass


def test_a_gateway_that_drains_cuts_nothing_and_refuses_nothing(balanced: Balanced) -> None:
    streams = long_streams(balanced, 6)
    held = {name: gateway.state["in_flight"] for name, gateway in balanced.gateways.items()}
    assert sorted(held.values()) == [3, 3]
    drained = balanced.gateways["gateway-1"]
    with Load(balanced.ask) as load:
        drained.process.send_signal(signal.SIGTERM)
        balanced.wait_for("gateway-1", "DOWN")
        eventually(lambda: not is_open(balanced.public["gateway-1"]))
        before = load.done
        eventually(lambda: load.done > before + 20)
        assert drained.process.poll() is None
        balanced.go_on.set()
        for client in streams:
            with client:
                assert b"two" in client.read_until(b"[DONE]")
        assert drained.stop(signal.SIGCONT) == 0
        balanced.gateways["gateway-1"] = balanced.start("gateway-1")
        balanced.wait_for("gateway-1", "UP")
    assert not load.faults
    assert load.done > 20


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_fifty_restarts_under_streams_cut_nothing_and_refuse_nothing(balanced: Balanced) -> None:
    def stream() -> Any:
        return balanced.ask(post(body=chat_body(stream=True), headers="Connection: close\r\n"))

    with Load(balanced.ask) as whole, Load(stream) as streamed:
        for index in range(50):
            streams = long_streams(balanced, 4)
            name = ("gateway-1", "gateway-2")[index % 2]
            release = threading.Timer(2.0, balanced.go_on.set)
            release.start()
            restart(balanced, name)
            for client in streams:
                with client:
                    assert b"two" in client.read_until(b"[DONE]")
    faults = whole.faults + streamed.faults
    assert not faults, (len(faults), faults[:5], (balanced.folder / "haproxy.log").read_text())
    print(json.dumps({"requests": whole.done, "streams": streamed.done + 200}))
