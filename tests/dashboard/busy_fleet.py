"""A gateway before a fleet of unlike simulated servers, with callers at work."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness import Client, Gateway, eventually, free_port

from llmgw.access import credentials, key_file
from llmgw.demo.certificate import write_private
from llmgw.demo.processes import Child

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

    :param more: top-level keys and tables of the configuration.
    :param away: one backend more, where nobody listens.
    :param only: of :data:`SERVERS`.
    :param token: of the admin listener.
    """

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *,
        more: str = "",
        away: bool = False,
        only: Sequence[str] = tuple(SERVERS),
        token: str = "",
    ) -> None:
        self._token = token
        self.keys: dict[str, str] = {}
        self._write_keys(folder)
        servers = {id: self._start(stack, folder, id, *SERVERS[id]) for id in only}
        for server in servers.values():
            server.wait_listening(20)
        self.servers = servers
        text = f"auth = ['keys:keys.toml']\n{more}\n[log]\naccess = 'access.log'\n"
        text += "[[models]]\nname = 'gpt-4o-mini'\ntarget = 'llama-3-8b'\n"
        text += "[[health]]\nplugin = 'llamacpp'\ninterval_s = 2.0\n"
        text += "[drain]\nlame_duck_s = 0.0\nfinish_s = 1.0\n"
        text += "[[rate_limits]]\nname = 'fair'\ntokens_per_minute = 60000\nconcurrent = 12\n"
        for id, server in servers.items():
            text += f"[[backends]]\nid = '{id}'\nurl = '{server.url}'\nlabels = {{rack = 'r1'}}\n"
        if away:
            text += f"[[backends]]\nid = 'gpu-2'\nmodels = ['{MODEL}']\n"
            text += f"url = 'http://127.0.0.1:{free_port()}'\n"
        port, admin_port = free_port(), free_port()
        text = f'admin = ["tcp:{admin_port}:interface=127.0.0.1"]\n{text}'
        self._text = f'listen = ["tcp:{port}:interface=127.0.0.1"]\n{text}'
        self.folder, self.port, self.admin_port = folder, port, admin_port
        self.url = f"http://127.0.0.1:{admin_port}"
        self.start_gateway()
        stack.callback(lambda: self.gateway.stop())

    def start_gateway(self) -> None:
        """Start it, for the first time or again, and wait until it knows its servers."""
        self.gateway = Gateway(self.folder, self._text, port=self.port, admin_port=self.admin_port)
        eventually(lambda: self.available() >= len(self.servers), 20)

    def state(self) -> dict[str, Any]:
        """``/api/state``."""
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        request = urllib.request.Request(f"{self.url}/api/state", headers=headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def available(self) -> int:
        """How many backends may be chosen."""
        return sum(each["available"] for each in self.state()["backends"])

    def ask(self, key: str = "ada", **fields: Any) -> bytes:
        """A request on a connection of its own, read to its end. :return: the answer's body."""
        with Client(self.port, 60) as client:
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
