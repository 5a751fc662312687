"""A browser, and a gateway before a fleet of unlike simulated servers, with callers at work."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import Client, Gateway, eventually, free_port

from llmgw.access import credentials, key_file
from llmgw.demo.certificate import write_private
from llmgw.demo.processes import Child

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SERVERS = {
    # id: slots, tokens read per second, tokens written per second
    "gpu-0": (4, 6000, 220),
    "gpu-1": (4, 5000, 190),
    "old-box": (2, 350, 40),
    "laptop": (2, 1500, 70),
}
MODEL = "llama-3-8b"


class Fleet:
    """A running gateway, its servers, and the keys of its callers by name.

    :ivar away: the address of a backend where nobody listens.
    """

    def __init__(self, folder: Path, stack: ExitStack, *, more: str = "", away: bool = False) -> None:
        self.keys: dict[str, str] = {}
        self._write_keys(folder)
        servers = {id: self._start(stack, folder, id, *figures) for id, figures in SERVERS.items()}
        self.servers = servers
        text = f"auth = ['keys:keys.toml']\n{more}\n[log]\naccess = 'access.log'\n"
        text += "[[models]]\nname = 'gpt-4o-mini'\ntarget = 'llama-3-8b'\n"
        text += "[[health]]\nplugin = 'llamacpp'\ninterval_s = 2.0\n"
        text += "[drain]\nlame_duck_s = 0.0\nfinish_s = 1.0\n"
        text += "[[rate_limits]]\nname = 'fair'\ntokens_per_minute = 60000\nconcurrent = 12\n"
        for id, server in servers.items():
            text += f"[[backends]]\nid = '{id}'\nurl = '{server.url}'\nlabels = {{rack = 'r1'}}\n"
        if away:
            text += (
                f"[[backends]]\nid = 'gpu-2'\nurl = 'http://127.0.0.1:{free_port()}'\nmodels = ['{MODEL}']\n"
            )
        self.gateway = Gateway(folder, text)
        stack.callback(self.gateway.stop)
        self.url = f"http://127.0.0.1:{self.gateway.admin_port}"
        eventually(
            lambda: sum(each["available"] for each in self.gateway.state["backends"]) >= len(SERVERS), 20
        )

    def ask(self, key: str = "ada", **fields: Any) -> bytes:
        """A request on a connection of its own, read to its end. :return: the answer's body."""
        with Client(self.gateway.port, 60) as client:
            client.send(self.request(key, **fields))
            return client.read_answer().body

    def request(self, key: str, path: str = "/v1/chat/completions", **fields: Any) -> bytes:
        """A request's bytes."""
        fields = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8,
            **fields,
        }
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {self.keys.get(key, key)}\r\n"
        return f"{head}user-agent: test\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    @contextmanager
    def busy(self, callers: int = 9, tokens: int = 60) -> Iterator[None]:
        """Callers with prompts and answers of many lengths, while this lasts."""
        over = threading.Event()
        numbers = itertools.count()

        def call() -> None:
            while not over.is_set():
                at = next(numbers)
                words = "lorem ipsum dolor " * (3 + at * 7 % 60)
                try:
                    self.ask(
                        "grace" if at % 3 == 0 else "ada",
                        model=("gpt-4o-mini", MODEL, MODEL)[at % 3],
                        messages=[{"role": "user", "content": words}],
                        max_tokens=tokens // 2 + at * 13 % tokens,
                        stream=at % 4 != 0,
                    )
                except (OSError, AssertionError):
                    pass
                time.sleep(0.02)

        threads = [threading.Thread(target=call, daemon=True) for _ in range(callers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(30)

    def _start(self, stack: ExitStack, folder: Path, id: str, slots: int, prefill: int, decode: int) -> Child:
        command = [sys.executable, "-m", "llmgw.demo.simulated", "--alias", MODEL, "--parallel", str(slots)]
        command += ["--ctx", str(slots * 8192), "--prefill", str(prefill), "--decode", str(decode)]
        server = Child(id, command, folder / f"{id}.log")
        stack.callback(server.stop)
        server.wait_listening(20)
        return server

    def _write_keys(self, folder: Path) -> None:
        held = {}
        for name in ("ada", "grace"):
            key_id = credentials.new_id()
            secret = self.keys[name] = credentials.new_key(key_id)
            hashed = f"sha256:{credentials.digest(secret, None).hex()}"
            held[key_id] = key_file.Key(id=key_id, name=name, hash=hashed, requests_per_minute=3000.0)
        write_private(folder / "keys.toml", key_file.dump(key_file.KeyFile(held)).encode())


@contextmanager
def fleet_at(folder: Path, **options: Any) -> Iterator[Fleet]:
    """A fleet that ends with this."""
    with ExitStack() as stack:
        yield Fleet(folder, stack, **options)


def is_open(port: int) -> bool:
    """Somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One for the tests of a module; they leave it as it was."""
    with fleet_at(tmp_path_factory.mktemp("fleet"), away=True) as running:
        yield running
        assert "Traceback" not in running.gateway.log, running.gateway.log
