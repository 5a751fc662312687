"""Who takes what: the corpus of the tests, read by this gateway, h11, httptools, nginx and HAProxy.

    python benchmarks/http_differential.py [--markdown]

nginx and HAProxy stand as reverse proxies, in their default strictness, before a
server that answers 200 to whatever it is sent; that answer is what says that a request
was taken. Both are found in PATH and left out otherwise. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h11
import httptools

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "core"), str(ROOT / "tests")]

from corpus import MORE_REQUESTS, REQUESTS, RequestCase  # noqa: E402
from corpus_attacks import ATTACKS  # noqa: E402

from llmgw.core.http import HttpFault  # noqa: E402
from llmgw.core.request_reader import RequestReader  # noqa: E402

CASES = REQUESTS + MORE_REQUESTS + ATTACKS
SILENCE_S = 0.3
WAITS = "waits"
_OK = re.compile(rb"HTTP/1\.1 200 ")

Taken = tuple[int, bool]
"""Requests that were taken, and whether the reader still waits for more."""


class _Sink:
    """Counts whole requests."""

    def __init__(self) -> None:
        self.whole = 0

    def head_received(self, head: object) -> None:
        pass

    def body_received(self, data: bytes) -> None:
        pass

    def request_received(self) -> None:
        self.whole += 1


def read_by_llmgw(raw: bytes) -> Taken:
    """Our own reader."""
    sink = _Sink()
    reader = RequestReader(sink)
    try:
        reader.feed(raw)
        while reader.state == "done":
            reader.resume()
    except HttpFault:
        return sink.whole, False
    return sink.whole, reader.state != "idle"


def read_by_httptools(raw: bytes) -> Taken:
    """llhttp with its defaults."""
    count = [0]
    open_ = [False]

    class Protocol:
        def on_message_begin(self) -> None:
            open_[0] = True

        def on_message_complete(self) -> None:
            count[0] += 1
            open_[0] = False

    parser = httptools.HttpRequestParser(Protocol())
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        return count[0], False
    except httptools.HttpParserError:
        return count[0], False
    return count[0], open_[0]


def read_by_h11(raw: bytes) -> Taken:
    """h11 as a server."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(raw)
    taken = 0
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                return taken, connection.their_state is h11.SEND_BODY
            if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                if connection.their_state is h11.DONE and connection.our_state is h11.SEND_RESPONSE:
                    connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                    connection.send(h11.EndOfMessage())
                if connection.our_state is h11.DONE and connection.their_state is h11.DONE:
                    connection.start_next_cycle()
                    continue
                return taken, False
            if isinstance(event, h11.EndOfMessage):
                taken += 1
                if connection.our_state is h11.SEND_RESPONSE:
                    connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                    connection.send(h11.EndOfMessage())
                if connection.our_state is h11.DONE and connection.their_state is h11.DONE:
                    connection.start_next_cycle()
                else:
                    return taken, False
    except h11.ProtocolError:
        return taken, False


def read_through(port: int) -> Callable[[bytes], Taken]:
    """A proxy on ``port``: how many answers of the server behind it come back."""

    def read(raw: bytes) -> Taken:
        data, closed = b"", False
        with socket.create_connection(("127.0.0.1", port), 5) as sock:
            sock.settimeout(SILENCE_S)
            with contextlib.suppress(OSError):
                sock.sendall(raw)
                while piece := sock.recv(65536):
                    data += piece
                closed = True
        taken = len(_OK.findall(data))
        return taken, not closed and not data

    return read


# --- what stands there --------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serve(listener: socket.socket) -> None:
    """200 to each request, read by our reader; whatever it refuses ends the connection."""

    class Answering(_Sink):
        def __init__(self, sock: socket.socket) -> None:
            super().__init__()
            self._sock = sock

        def request_received(self) -> None:
            self._sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    def one(sock: socket.socket) -> None:
        reader = RequestReader(Answering(sock))
        with sock, contextlib.suppress(OSError, HttpFault):
            while data := sock.recv(65536):
                reader.feed(data)
                while reader.state == "done":
                    reader.resume()

    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=one, args=(sock,), daemon=True).start()


NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{ listen 127.0.0.1:{port};
    location / {{ proxy_pass http://127.0.0.1:{backend}; proxy_http_version 1.1; }} }}
}}
"""
HAPROXY = """
defaults
  mode http
  timeout client 5s
  timeout server 5s
  timeout connect 2s
  timeout http-request 5s
frontend in
  bind 127.0.0.1:{port}
  default_backend out
backend out
  server one 127.0.0.1:{backend}
"""


@contextlib.contextmanager
def proxy(name: str, config: str, command: list[str], backend: int) -> Iterator[int]:
    """A proxy at work before ``backend``."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        path = Path(folder) / f"{name}.conf"
        path.write_text(config.format(folder=folder, port=port, backend=backend))
        process = subprocess.Popen(
            [part.format(path=path) for part in command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            for _ in range(100):
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()
            process.wait(10)


def version(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"\d+\.\d+\.\d+", done.stdout + done.stderr)
    return found[0] if found else "?"


# --- the table ----------------------------------------------------------------------------


def verdicts(read: Callable[[bytes], Taken], parallel: int = 1) -> dict[str, Taken]:
    with ThreadPoolExecutor(parallel) as pool:
        return dict(
            zip([case.name for case in CASES], pool.map(lambda case: read(case.raw), CASES), strict=True)
        )


def wrong(case: RequestCase, taken: Taken) -> str:
    """What is wrong with a verdict: ``accepted``, ``waits``, ``refused``, or nothing."""
    count, waits = taken
    if case.want == "R":
        if count > len(case.bodies):
            return "accepted"
        return WAITS if waits and count <= len(case.bodies) else ""
    if case.want == "A" and count < max(1, len(case.bodies)):
        return "refused"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true", help="the table for the documentation")
    given = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    backend = listener.getsockname()[1]
    columns: dict[str, dict[str, Taken]] = {
        "llmgw": verdicts(read_by_llmgw),
        f"h11 {h11.__version__}": verdicts(read_by_h11),
        f"httptools {httptools.__version__}": verdicts(read_by_httptools),
    }
    for name, config, command, ask in (
        ("nginx", NGINX, ["nginx", "-c", "{path}"], ["nginx", "-v"]),
        ("HAProxy", HAPROXY, ["haproxy", "-f", "{path}"], ["haproxy", "-v"]),
    ):
        if shutil.which(command[0]) is None:
            print(f"no {name} here", file=sys.stderr)
            continue
        with proxy(name, config, command, backend) as port:
            columns[f"{name} {version(ask)}"] = verdicts(read_through(port), 16)
    wants = {want: sum(case.want == want for case in CASES) for want in "RAE"}
    summary = {
        name: {
            kind: [case.name for case in CASES if wrong(case, found[case.name]) == kind]
            for kind in ("accepted", WAITS, "refused")
        }
        for name, found in columns.items()
    }
    if not given.markdown:
        print(json.dumps({"cases": wants, "wrong": summary}, indent=1))
        return
    print(
        f"| {wants['R']} bad, {wants['A']} good | bad ones taken | bad ones waited for | good ones refused |"
    )
    print("| --- | --- | --- | --- |")
    for name, kinds in summary.items():
        print(f"| {name} | {len(kinds['accepted'])} | {len(kinds[WAITS])} | {len(kinds['refused'])} |")


if __name__ == "__main__":
    main()
