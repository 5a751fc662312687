"""A gateway as a real process, and backends under the test's control.

Tests here are plain blocking code: the gateway runs in its own process, a
:class:`Scripted` backend serves each connection in a thread and plays what the
test tells it, byte for byte. Nothing uses a fixed port.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TWISTD = [sys.executable, "-c", "from twisted.scripts.twistd import run; run()"]
PROBES = ("/health", "/props", "/slots", "/metrics", "/v1/models")
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
WAIT_S = 10.0
LEAST_PORT, EPHEMERAL_PORTS = 12_000, 32_768
"""``ip_local_port_range`` begins at the second (Linux ``networking/ip-sysctl.rst``)."""


def free_port() -> int:
    """A port that was free a moment ago, and that the system gives to nobody by itself: a server
    that is restarted there would else find it taken by somebody's outgoing connection."""
    while True:
        port = LEAST_PORT + secrets.randbelow(EPHEMERAL_PORTS - LEAST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def eventually(check: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    """The first true value of ``check()``; fails when none comes in time."""
    end = time.monotonic() + within_s
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s} s: {check}")
        time.sleep(0.01)


def chunk(data: bytes) -> bytes:
    """``data`` as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    """A content event of the OpenAI chat dialect."""
    return b'data: {"choices":[{"index":0,"delta":{"content":%b}}]}\n\n' % json.dumps(text).encode()


def json_response(body: Any, status: int = 200, headers: str = "") -> bytes:
    """A whole JSON response with a length."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
    head += f"{headers}Content-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


COMPLETION = {
    "id": "c1",
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}


@dataclass
class Received:
    """A request as a backend got it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    head: bytes

    def get(self, name: str) -> str | None:
        """The one value of a header; fails if it was sent twice."""
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) <= 1, f"{name} sent {len(values)} times"
        return values[0] if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Line:
    """One connection at a backend, in the hands of its script."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self.number = number
        self.buffer = b""

    def send(self, *pieces: bytes, gap_s: float = 0.0) -> None:
        """Send pieces, each in a segment of its own when ``gap_s`` is given."""
        for index, piece in enumerate(pieces):
            if index and gap_s:
                time.sleep(gap_s)
            self.sock.sendall(piece)

    def reset(self) -> None:
        """Close with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        """Close with FIN."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def wait_closed(self, within_s: float = WAIT_S) -> float:
        """Wait until the gateway closes. :return: how long it took; fails after ``within_s``."""
        begun = time.monotonic()
        try:
            self.sock.settimeout(within_s)  # fails when the script has closed it already
            while self.sock.recv(65536):
                pass
        except TimeoutError:
            raise AssertionError(f"the gateway kept the connection for {within_s} s") from None
        except OSError:
            pass
        return time.monotonic() - begun

    def read_request(self, *, whole: bool = True) -> Received | None:
        """The next request; ``None`` when the gateway closed.

        :param whole: else only its head, and what of the body happened to come with it.
        """
        while b"\r\n\r\n" not in self.buffer:
            data = self._recv()
            if not data:
                return None
            self.buffer += data
        head, _, rest = self.buffer.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:])]
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        parts, size = [rest], len(rest)
        while whole and size < length:
            data = self._recv()
            if not data:
                return None
            parts.append(data)
            size += len(data)
        rest = b"".join(parts)
        self.buffer = rest[length:]
        return Received(method, target, headers, rest[:length], head)

    def _recv(self) -> bytes:
        try:
            return self.sock.recv(1 << 20)
        except OSError:
            return b""


Script = Callable[[Line, Received], None]


def answer_completion(line: Line, request: Received) -> None:
    """The script of a healthy backend: a stream when asked for one, else JSON."""
    if b'"stream": true' in request.body or b'"stream":true' in request.body:
        line.send(
            SSE_HEAD,
            chunk(event("hi")),
            chunk(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'),
            chunk(b"data: [DONE]\n\n") + LAST_CHUNK,
        )
    else:
        line.send(json_response(COMPLETION))


class Scripted:
    """A backend. ``script`` plays for each request that is no probe; it may close the line.

    :param probes: whole responses to probes by path, in place of 200 from ``/health``
        and 404 from the others; an empty one is never answered.
    :param tls: serve ``https`` with it, on the name ``localhost``.
    :ivar requests: what arrived, probes left out.
    :ivar probed: the probes.
    :ivar lines: connections that carried a request.
    :ivar open_lines: those of them that are open, from before :meth:`play` too.
    :ivar accepted: connections that were opened, probes' included.
    :ivar reads_bodies: else the script plays as soon as the head is here, and must
        end the connection.
    """

    def __init__(
        self,
        script: Script = answer_completion,
        *,
        probes: dict[str, bytes] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.script = script
        self.probes = {"/health": json_response({"status": "ok"}), **(probes or {})}
        self.tls = tls
        self.probed: list[Received] = []
        self.requests: list[Received] = []
        self.lines: list[Line] = []
        self.open_lines: set[Line] = set()
        self.accepted = 0
        self.reads_bodies = True
        self.errors: list[BaseException] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"https://localhost:{self.port}" if tls else f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def play(self, script: Script) -> None:
        """Change the script and forget what arrived."""
        self.script = script
        self.requests = []
        self.lines = []

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            # A thread in accept() would keep the port open.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(Line(sock, self.accepted),), daemon=True).start()

    def _serve(self, line: Line) -> None:
        try:
            if self.tls is not None:
                line.sock = self.tls.wrap_socket(line.sock, server_side=True)
            while True:
                request = line.read_request(whole=self.reads_bodies)
                if request is None:
                    break
                if request.method == "GET" and request.target.split("?")[0] in PROBES:
                    self.probed.append(request)
                    missing = json_response({"error": {"message": "no"}}, 404)
                    line.send(self.probes.get(request.target, missing))
                    continue
                self.requests.append(request)
                if line not in self.lines:
                    self.lines.append(line)
                self.open_lines.add(line)
                self.script(line, request)
                if line.sock.fileno() < 0:
                    break
        except OSError:
            pass
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.open_lines.discard(line)
            with contextlib.suppress(OSError):
                line.sock.close()


@dataclass
class Answer:
    """A response as a client got it.

    :ivar clean: it ended as its framing says.
    """

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    clean: bool
    raw: bytes = b""
    times: list[float] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) <= 1, f"{name} sent {len(values)} times"
        return values[0] if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """A raw client connection."""

    def __init__(self, port: int, timeout_s: float = WAIT_S) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout_s)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""

    def send(self, *pieces: bytes, gap_s: float = 0.0) -> None:
        for index, piece in enumerate(pieces):
            if index and gap_s:
                time.sleep(gap_s)
            self.sock.sendall(piece)

    def read_until(self, mark: bytes) -> bytes:
        """All bytes up to and with ``mark``."""
        while mark not in self.buffer:
            data = self.sock.recv(65536)
            if not data:
                raise AssertionError(f"closed before {mark!r}; got {self.buffer[-2000:]!r}")
            self.buffer += data
        found, _, self.buffer = self.buffer.partition(mark)
        return found + mark

    def read_head(self) -> tuple[int, list[tuple[str, str]]]:
        """Status and headers of the next response, interim ones included."""
        lines = self.read_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:-2])]
        return int(lines[0].split(" ")[1]), headers

    def read_answer(self, method: str = "POST") -> Answer:
        """The next final response, whole, or as far as it came."""
        status, headers = self.read_head()
        while 100 <= status < 200:
            status, headers = self.read_head()
        find = {name.lower(): value for name, value in headers}
        body, clean = b"", True
        try:
            if method == "HEAD" or status in (204, 304):
                pass
            elif find.get("transfer-encoding") == "chunked":
                while True:
                    size = int(self.read_until(b"\r\n")[:-2].split(b";")[0], 16)
                    piece = self._exactly(size + 2)
                    if size == 0:
                        break
                    body += piece[:-2]
            elif "content-length" in find:
                body = self._exactly(int(find["content-length"]))
            else:
                body, clean = self._rest()
        except (AssertionError, OSError) as error:
            partial, self.buffer = self.buffer, b""
            if isinstance(error, TimeoutError):
                raise
            return Answer(status, headers, body + partial, False)
        return Answer(status, headers, body, clean)

    def is_closed(self, within_s: float = WAIT_S) -> bool:
        """Whether the gateway closes within ``within_s``; bytes that still come are kept."""
        self.sock.settimeout(within_s)
        try:
            while True:
                data = self.sock.recv(65536)
                if not data:
                    return True
                self.buffer += data
        except TimeoutError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            data = self.sock.recv(65536)
            if not data:
                raise AssertionError("closed inside the body")
            self.buffer += data
        found, self.buffer = self.buffer[:size], self.buffer[size:]
        return found

    def _rest(self) -> tuple[bytes, bool]:
        try:
            while data := self.sock.recv(65536):
                self.buffer += data
        except ConnectionResetError:
            return self.buffer, False
        return self.buffer, True


@functools.cache
def trusting() -> ssl.SSLContext:
    """What takes any certificate. Made before anybody connects: on a busy machine it takes longer
    than a server may wait for a handshake."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class TlsClient(Client):
    """A client over TLS that takes any certificate."""

    def __init__(self, port: int, timeout_s: float = WAIT_S) -> None:
        context = trusting()
        super().__init__(port, timeout_s)
        self.sock = context.wrap_socket(self.sock)


def chat_body(model: str = "m", **fields: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def post(
    path: str = "/v1/chat/completions",
    body: bytes | None = None,
    headers: str = "",
    *,
    length: int | None = None,
    version: str = "1.1",
) -> bytes:
    """A POST request as bytes; ``headers`` are whole lines with CRLF."""
    body = chat_body() if body is None else body
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/{version}\r\nHost: gw.example\r\nContent-Type: application/json\r\n{headers}"
    if "transfer-encoding" not in headers.lower():
        head += f"Content-Length: {size}\r\n"
    return head.encode() + b"\r\n" + body


class Gateway:
    """``twistd -n llmgw -c …`` as a child process.

    :param options: more of those of ``twistd``.
    :ivar port: of its plain public listener.
    :ivar admin_port: of its admin listener.
    """

    def __init__(
        self,
        folder: Path,
        config: str,
        *,
        environment: dict[str, str] | None = None,
        admin_port: int | None = None,
        port: int | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.admin_port = admin_port or free_port()
        head = ""
        if "listen =" not in config:
            head += f'listen = ["tcp:{self.port}:interface=127.0.0.1"]\n'
        if "admin =" not in config:
            head += f'admin = ["tcp:{self.admin_port}:interface=127.0.0.1"]\n'
        self.config_path = folder / "llmgw.toml"
        self.config_path.write_text(head + config)
        self.log_path = folder / "twistd.log"
        self._log = self.log_path.open("wb")
        self.process = subprocess.Popen(
            [*TWISTD, "-n", "--pidfile=", *options, "llmgw", "-c", str(self.config_path)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **(environment or {})},
        )
        eventually(self._is_ready, 60.0)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"the gateway ended:\n{self.log}"
        try:
            return self.admin("/readyz")[0] == 200
        except OSError:
            return False

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def access(self) -> list[dict[str, Any]]:
        """The access log's lines so far, when the config says ``access = "access.log"``."""
        path = self.folder / "access.log"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last may be half written
        return [json.loads(line) for line in whole.splitlines()]

    def admin(self, path: str, method: str = "GET", within_s: float = WAIT_S) -> tuple[int, bytes]:
        with socket.create_connection(("127.0.0.1", self.admin_port), within_s) as sock:
            sock.sendall(f"{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
            data = b""
            while piece := sock.recv(1 << 20):
                data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), body

    @property
    def state(self) -> dict[str, Any]:
        """``/api/state``."""
        found: dict[str, Any] = json.loads(self.admin("/api/state")[1])
        return found

    def client(self, timeout_s: float = WAIT_S) -> Client:
        return Client(self.port, timeout_s)

    def admin_client(self, timeout_s: float = WAIT_S) -> Client:
        return Client(self.admin_port, timeout_s)

    def ask(self, request: bytes, method: str = "POST") -> Answer:
        """One request on a connection of its own."""
        with self.client() as client:
            client.send(request)
            return client.read_answer(method)

    def is_idle(self) -> bool:
        """No request is counted anywhere."""
        state = self.state
        return state["in_flight"] == 0 and all(backend["in_flight"] == 0 for backend in state["backends"])

    def stop(self, number: int = signal.SIGINT) -> int:
        """End it. :return: the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._log.close()
        return status


def backend_table(backend: Scripted, id: str = "b", more: str = 'models = ["m"]') -> str:
    """A ``[[backends]]`` table; ``more`` are further lines."""
    return f'[[backends]]\nid = "{id}"\nurl = "{backend.url}"\n{more}\n'


@contextlib.contextmanager
def gateway_with(
    folder: Path, *backends: Scripted, config: str = "", more: str = 'models = ["m"]\nmax_connections = 100'
) -> Iterator[Gateway]:
    """A gateway in front of ``backends`` (ids b0, b1, …), ended afterwards.

    Unless ``config`` says otherwise: anybody may call, the access log goes to
    ``access.log``, and the gateway's log holds no traceback at the end.
    """
    text = config
    if "access =" not in text:
        text += '\n[log]\naccess = "access.log"\n'
    for index, backend in enumerate(backends):
        text += backend_table(backend, f"b{index}", more)
    gateway = Gateway(folder, text)
    try:
        yield gateway
    finally:
        gateway.stop()
    assert "Traceback" not in gateway.log, gateway.log
