"""The daemon as operators start it, over TLS before real llama.cpp servers; shared by the session.

A plugin of ``tests/conftest.py``. What the fixture looks for at its end belongs
to every test that used it: nothing in flight, no traceback, no secret in a log.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmgw.access import credentials, key_file
from llmgw.demo.certificate import ensure_certificate, write_private
from llmgw.demo.processes import Child

SLOTS = {"wide": 4, "narrow": 2, "big": 1, "embed": 1, "rank": 1}
"""Backend id to slots."""
MODELS = ["big", "capped", "embed", "gpt-4o-mini", "pair", "rank", "tiny"]
"""All that a key without a scope may use."""
CAPPED_TOKENS = 4
WITHIN_S = 20.0
FREED_WITHIN_S = 2.0
"""After a client has left, its slot is free again."""


def wait_until(condition: Callable[[], bool], within_s: float = WITHIN_S, every_s: float = 0.02) -> bool:
    """Whether ``condition`` came true in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(every_s)
    return True


class LiveGateway:
    """A running gateway.

    :ivar url: of the public listener, ``https``; ``v1`` with ``/v1``.
    :ivar ca: the certificate authority's file.
    :ivar keys: ``all`` (every model, sees decisions), ``scoped`` (``embed`` alone),
        ``few`` (two requests a minute); name to secret.
    :ivar servers: backend id to URL.
    """

    def __init__(self, directory: Path, servers: Mapping[str, str]) -> None:
        self.directory = directory
        self.servers = servers
        self.ca = ensure_certificate(directory).authority
        self.keys: dict[str, str] = {}
        port, admin_port = _free_ports(2)
        self.port = port
        self.url = f"https://127.0.0.1:{port}"
        self.v1 = f"{self.url}/v1"
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self.access_log = directory / "access.log"
        self._write_keys()
        config = directory / "llmgw.toml"
        config.write_text(self._config(port, admin_port))
        command = [sys.executable, "-c", "from twisted.scripts.twistd import run; run()"]
        command += ["-n", "--pidfile=", "llmgw", "-c", str(config)]
        self.process = Child("gateway", command, directory / "gateway.log", announces=False)
        self._admin = httpx.Client(base_url=self.admin_url, trust_env=False, timeout=10)

    @property
    def tls(self) -> ssl.SSLContext:
        """What trusts the gateway's certificate."""
        return ssl.create_default_context(cafile=str(self.ca))

    def client(self, key: str | None = "all", **options: Any) -> Any:
        """An ``httpx.Client`` of the public listener."""
        headers = {"authorization": f"Bearer {self.keys[key]}"} if key is not None else {}
        return httpx.Client(
            base_url=self.url, headers=headers, verify=self.tls, trust_env=False, timeout=30, **options
        )

    def wait_ready(self) -> None:
        """Until ``/readyz`` says yes."""

        def ready() -> bool:
            assert self.process.returncode() is None, self.process.log_tail(40)
            try:
                return bool(self._admin.get("/readyz").status_code == 200)
            except httpx.TransportError:
                return False

        assert wait_until(ready), self.process.log_tail(40)

    def state(self) -> dict[str, Any]:
        """``/api/state``."""
        found: dict[str, Any] = self._admin.get("/api/state").json()
        return found

    def backend(self, backend_id: str) -> dict[str, Any]:
        """One backend of ``/api/state``."""
        return next(one for one in self.state()["backends"] if one["id"] == backend_id)

    def metrics(self) -> dict[str, float]:
        """``/metrics``: name with labels to value."""
        text = self._admin.get("/metrics").text
        lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def metric(self, name: str, *labels: str) -> float:
        """The sum over all label sets that hold ``labels``, each as ``name="value"``."""
        return sum(
            value
            for key, value in self.metrics().items()
            if key.partition("{")[0] == name and all(label in key for label in labels)
        )

    def access_lines(self) -> list[dict[str, Any]]:
        """What the access log holds now; it is written once a second."""
        if not self.access_log.exists():
            return []
        return [json.loads(line) for line in self.access_log.read_text().splitlines()]

    def access_line(self, request_id: str) -> dict[str, Any]:
        """The access line of one request."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [line for line in self.access_lines() if line["id"] == request_id]
            return bool(found)

        assert wait_until(there, 5, every_s=0.1), f"no access line of {request_id}"
        assert len(found) == 1
        return found[0]

    def send(self, body: object, path: str = "/v1/chat/completions", *, cut: int = 0) -> ssl.SSLSocket:
        """Send a request on a connection of its own; ``cut`` bytes of its body are kept back."""
        raw = json.dumps(body).encode()
        plain = socket.create_connection(("127.0.0.1", self.port), 10)
        connection = self.tls.wrap_socket(plain, server_hostname="127.0.0.1")
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self.keys['all']}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        connection.sendall(head.encode() + raw[: len(raw) - cut])
        return connection

    def is_idle(self) -> bool:
        """Nobody counts anything in flight."""
        state = self.state()
        return (
            state["in_flight"] == 0
            and not state["in_flight_by_key"]
            and state["held_bytes"] == 0
            and all(backend["in_flight"] == 0 for backend in state["backends"])
        )

    def busy_slots(self, backend_id: str) -> int:
        """Slots at work, as the server itself tells."""
        slots = httpx.get(f"{self.servers[backend_id]}/slots", trust_env=False, timeout=10).json()
        return sum(slot["is_processing"] for slot in slots)

    def wait_busy(self, backend_id: str) -> None:
        """Until the server works."""
        assert wait_until(lambda: self.busy_slots(backend_id) > 0, every_s=0.05), f"{backend_id} stays idle"

    def logs(self) -> dict[str, str]:
        """Every log file of the gateway's folder, as text."""
        return {path.name: path.read_text(errors="replace") for path in self.directory.glob("*.log")}

    def check_logs(self) -> None:
        """No log holds a traceback or a key."""
        for name, text in self.logs().items():
            assert "Traceback" not in text, f"{name}:\n{text}"
            for secret in self.keys.values():
                assert secret not in text, name

    def stop(self) -> int:
        """End it. :return: its exit status."""
        self._admin.close()
        return self.process.stop(timeout_s=10)

    def _write_keys(self) -> None:
        held: dict[str, key_file.Key] = {}
        for name, extra in {
            "all": {"show_backend": True, "show_decision": True},
            "scoped": {"models": ("embed",)},
            "few": {"requests_per_minute": 2.0},
        }.items():
            key_id = credentials.new_id()
            secret = self.keys[name] = credentials.new_key(key_id)
            hashed = f"sha256:{credentials.digest(secret, None).hex()}"
            held[key_id] = key_file.Key(id=key_id, name=name, hash=hashed, **extra)  # type: ignore[arg-type]
        write_private(self.directory / "keys.toml", key_file.dump(key_file.KeyFile(held)).encode())

    def _config(self, port: int, admin_port: int) -> str:
        parts = [
            f'listen = ["ssl:{port}:privateKey=key.pem:certKey=cert.pem:interface=127.0.0.1"]',
            f'admin = ["tcp:{admin_port}:interface=127.0.0.1"]',
            'auth = ["keys:keys.toml"]',
            "[log]",
            'access = "access.log"',
            "[drain]",
            "lame_duck_s = 0.0",
            "finish_s = 2.0",
            "abort_s = 1.0",
            "[[health]]",
            'plugin = "llamacpp"',
            "interval_s = 2.0",
            "[[rate_limits]]",
            'scope = "key"',
            "requests_per_minute = 60000",
            "tokens_per_minute = 1000000000",
            "[[models]]",
            'name = "gpt-4o-mini"',
            'target = "tiny"',
            "[[models]]",
            'name = "capped"',
            'target = "tiny"',
            f"max_tokens = {CAPPED_TOKENS}",
        ]
        for backend_id, url in self.servers.items():
            parts += ["[[backends]]", f'id = "{backend_id}"', f'url = "{url}"']
            if backend_id == "narrow":
                # A name of its own, so that a test can ask this server and no other.
                parts.append('models = ["tiny", "pair"]')
        return "\n".join([*parts, ""])


@pytest.fixture(scope="session")
def live_gateway(
    llama_servers: Callable[..., Child], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveGateway]:
    """Two chat servers of one model, a slow one with one slot and a long context, an embedder, a ranker."""
    big = ("--parallel", "1", "--ctx", "16384", "--batch", "256", "--alias", "big")
    servers = {
        "wide": llama_servers("chat", "--parallel", "4", "--ctx", "8192"),
        "narrow": llama_servers("chat"),
        "big": llama_servers("chat", *big, layers=4, ff=1024),
        "embed": llama_servers("embedding", "--parallel", "1", "--alias", "embed"),
        "rank": llama_servers("rerank", "--parallel", "1", "--alias", "rank"),
    }
    gateway = LiveGateway(
        tmp_path_factory.mktemp("gateway"), {name: one.url for name, one in servers.items()}
    )
    try:
        gateway.wait_ready()
        yield gateway
        assert wait_until(gateway.is_idle, 3), gateway.state()
        assert gateway.stop() == 0
        gateway.check_logs()
    finally:
        gateway.stop()


@pytest.fixture
def http(live_gateway: LiveGateway) -> Iterator[httpx.Client]:
    """A plain client of the live gateway, with the key that may do everything."""
    with live_gateway.client() as client:
        yield client


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
