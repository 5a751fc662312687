"""Real Redis servers and Sentinels (Debian ``redis-server``, ``redis-sentinel``), each its own process."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import eventually, free_port


class RedisServer:
    """One ``redis-server``, on a port that was free, with nothing kept on disk.

    :param directory: empty; logs and a Unix socket go there.
    :param arguments: more of the command line.
    """

    def __init__(self, directory: Path, *arguments: str, port: int | None = None, password: str = "") -> None:
        self.directory = directory
        self.port = free_port() if port is None else port
        self.socket_path = directory / "redis.sock"
        self.password = password
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _command(self) -> list[str]:
        return [
            *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
            *("--appendonly", "no", "--unixsocket", str(self.socket_path), "--dir", str(self.directory)),
            *(("--requirepass", self.password) if self.password else ()),
            *self._arguments,
        ]

    def start(self) -> None:
        """Start it, and wait until it answers."""
        log = (self.directory / "redis.log").open("ab")
        self._process = subprocess.Popen(self._command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        log.close()
        eventually(self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        log = (self.directory / "redis.log").read_text()
        assert self._process.poll() is None, log
        try:
            return self.ask("PING") is not None
        except (OSError, EOFError):
            return False

    def ask(self, *arguments: Any) -> Any:
        """One command on a connection of its own; an error reply is raised as ``RuntimeError``."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            stream = connection.makefile("rb")
            if self.password:
                connection.sendall(_encoded(("AUTH", self.password)))
                _reply(stream)
            connection.sendall(_encoded(arguments))
            return _reply(stream)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self, down_s: float = 0.0) -> None:
        """Kill it, and start an empty one on the same port."""
        self.kill()
        time.sleep(down_s)
        self.start()


class Sentinel(RedisServer):
    """One ``redis-sentinel`` that watches a master called ``mm``."""

    def __init__(self, directory: Path, master_port: int, quorum: int = 1, down_after_ms: int = 500) -> None:
        self._file = directory / "sentinel.conf"
        port = free_port()
        self._file.write_text(
            f"port {port}\nbind 127.0.0.1\nsentinel monitor mm 127.0.0.1 {master_port} {quorum}\n"
            f"sentinel down-after-milliseconds mm {down_after_ms}\nsentinel failover-timeout mm 2000\n"
            f"dir {directory}\n"
        )
        super().__init__(directory, port=port)

    def _command(self) -> list[str]:
        return ["redis-sentinel", str(self._file)]


def _encoded(arguments: tuple[Any, ...]) -> bytes:
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in arguments]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _reply(stream: Any) -> Any:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError("Redis closed the connection")
    kind, rest = line[:1], line[1:-2]
    if kind == b"-":
        raise RuntimeError(rest.decode())
    if kind == b"+":
        return rest.decode()
    if kind == b":":
        return int(rest)
    if kind == b"$":
        return None if rest == b"-1" else stream.read(int(rest) + 2)[:-2]
    return None if rest == b"-1" else [_reply(stream) for _ in range(int(rest))]


@pytest.fixture
def redis_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Starts servers: ``redis_servers(*arguments)``, or ``redis_servers(Sentinel, port)``."""
    if shutil.which("redis-server") is None or shutil.which("redis-sentinel") is None:
        pytest.skip("no redis-server here: apt-get install redis-server redis-sentinel")
    running: list[RedisServer] = []

    def start(*arguments: Any, **options: Any) -> RedisServer:
        kind: type[RedisServer] = RedisServer
        if arguments and isinstance(arguments[0], type):
            kind, arguments = arguments[0], arguments[1:]
        server = kind(tmp_path_factory.mktemp("redis"), *arguments, **options)
        running.append(server)
        return server

    try:
        yield start
    finally:
        for server in running:
            with contextlib.suppress(ProcessLookupError):
                server.signal(signal.SIGCONT)
            server.kill()


@pytest.fixture
def redis_server(redis_servers: Callable[..., Any]) -> RedisServer:
    """One server."""
    server = redis_servers()
    assert isinstance(server, RedisServer)
    return server
