"""A real etcd for tests, which may be killed, stopped and started again.

A plugin of ``tests/conftest.py``, since more than one folder of tests uses it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import eventually, free_port


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


class Etcd:
    """One member, on a free port that it keeps.

    :param flags: further options of the server.
    :param peers: names of a whole cluster to peer URLs, this one's ``name`` among them;
        such a member is up only when most of them are.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        scheme: str = "http",
        verify: Any = True,
        name: str = "one",
        peers: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._name = name
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self.token = ""
        for attempt in range(5):
            self.port = free_port()
            self.url = f"{scheme}://127.0.0.1:{self.port}"
            self._peers = peers or {name: f"http://127.0.0.1:{free_port()}"}
            self._client = httpx.Client(base_url=self.url, trust_env=False, timeout=5, verify=verify)
            if peers is not None:
                return
            try:
                self.start()
                return
            except AssertionError:
                # Another test's process may have taken a port in between.
                if attempt == 4 or "address already in use" not in (folder / "etcd.log").read_text():
                    raise
                shutil.rmtree(folder / "data", ignore_errors=True)

    def start(self, wait: bool = True) -> None:
        """Begin, or go on with the data that are there."""
        peer = self._peers[self._name]
        cluster = ",".join(f"{name}={url}" for name, url in self._peers.items())
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "etcd",
                    *("--data-dir", str(self.folder / "data"), "--name", self._name, "--unsafe-no-fsync"),
                    *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", cluster, *self._flags),
                ],
                stdout=log,
                stderr=log,
            )
        if wait:
            eventually(self.is_up, 20)

    def kill(self) -> None:
        """As a crash."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self, on: bool) -> None:
        """SIGSTOP, or go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def wipe(self) -> None:
        """It comes back as another, empty store."""
        self.kill()
        shutil.rmtree(self.folder / "data")
        self.start()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._client.close()

    def call(self, path: str, **body: Any) -> Any:
        """A call of the JSON gateway."""
        headers = {"authorization": self.token} if self.token else {}
        answer = self._client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def log_in(self, name: str, password: str) -> None:
        """For the calls from now on."""
        self.token = ""
        self.token = self.call("/v3/auth/authenticate", name=name, password=password)["token"]

    def enable_users(self) -> None:
        """From now on: ``root``, and ``reader`` and ``writer`` of ``/llmgw/``, each with ``NAME-word``."""
        for user, kind in (("root", ""), ("reader", "READ"), ("writer", "READWRITE")):
            self.call("/v3/auth/user/add", name=user, password=f"{user}-word")
            self.call("/v3/auth/role/add", name=user)
            self.call("/v3/auth/user/grant", user=user, role=user)
            if kind:
                perm = {"key": b64("/llmgw/"), "range_end": b64("/llmgw0"), "permType": kind}
                self.call("/v3/auth/role/grant", name=user, perm=perm)
        self.call("/v3/auth/enable")
        self.log_in("root", "root-word")

    def put(self, key: str, value: Any, lease: str | None = None) -> int:
        """:return: the revision."""
        text = value if isinstance(value, str) else json.dumps(value)
        more = {"lease": lease} if lease else {}
        return int(self.call("/v3/kv/put", key=b64(key), value=b64(text), **more)["header"]["revision"])

    def delete(self, key: str) -> None:
        self.call("/v3/kv/deleterange", key=b64(key))

    def keys(self, prefix: str = "/llmgw/") -> dict[str, Any]:
        """Keys and their documents."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        found = self.call("/v3/kv/range", key=b64(prefix), range_end=b64(end)).get("kvs", [])
        return {
            base64.b64decode(kv["key"]).decode(): json.loads(base64.b64decode(kv["value"])) for kv in found
        }

    def lease(self, ttl_s: int) -> str:
        return str(self.call("/v3/lease/grant", TTL=str(ttl_s))["ID"])

    def compact(self) -> None:
        """Forget all that was."""
        revision = self.call("/v3/kv/range", key=b64("x"))["header"]["revision"]
        self.call("/v3/kv/compaction", revision=revision, physical=True)

    def is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "etcd.log").read_text()
        try:
            return self._client.get("/health").json().get("health") == "true"
        except (httpx.TransportError, ValueError):
            return False


class Relay:
    """A way to a port that can be cut and mended; its own port stays."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.mend()

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Close all that is open, and refuse what comes."""
        listener, self._listener = self._listener, None
        for each in [listener, *self._open]:
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
        self._open = []

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Etcd]]:
    """``(*flags)`` to a server of the test's own."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd here (Debian: etcd-server)")
    made: list[Etcd] = []

    def make(*flags: str, **more: Any) -> Etcd:
        made.append(Etcd(tmp_path_factory.mktemp("etcd"), *flags, **more))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def etcd(etcd_server: Callable[..., Etcd]) -> Etcd:
    """One without anything special."""
    return etcd_server()
