"""What one gateway process holds: streams, idle connections, slow readers, overload, large bodies.

    python benchmarks/holds.py [JOB …] [--seconds 20] [--scale 1.0] [--out FILE.json]

Jobs are ``streams``, ``idle-tls``, ``slow-readers``, ``overload``, ``large-body``; all without any named.
``--scale 0.1`` asks for a tenth of the connections, to see that it works. The figures that are
wanted stand beside those that were found; nothing fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from targets import HEADER, HERE, Stage, Target, llmgw, staged

STREAMS = 2000
IDLE = 5000
SLOW = 300
CAP = 16
OVERLOAD = 5
BODY_BYTES = 20_000_000
ECHO = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    client, _ = server.accept()
    client.recv(65536)
    client.sendall(b"HTTP/1.1 503 Busy\\r\\n\\r\\n")
    client.close()
"""
"""A process that does nothing but answer: what the machine takes by itself at that moment."""


def rss_kib(target: Target) -> int:
    """Resident memory of the gateway's first process."""
    for line in Path(f"/proc/{target.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise RuntimeError("no VmRSS")


def load(stage: Stage, port: int, options: str) -> dict[str, Any]:
    """Run the load generator; ``options`` with ``:`` for a blank inside a directive."""
    words = [word.replace(":", " ") if word.startswith("[") else word for word in options.split()]
    command = [str(stage.folder / "load"), "-p", str(port), "-H", HEADER, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def request(body: dict[str, Any], length: int | None = None) -> bytes:
    """A POST as bytes; with ``length``, its head alone."""
    raw = json.dumps(body).encode()
    size = len(raw) if length is None else length
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n{HEADER}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    return head.encode() + (b"" if length is not None else raw)


def stream_body(directive: str, model: str = "mock") -> dict[str, Any]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": directive}]}


# --- the jobs -----------------------------------------------------------------------------


def streams(stage: Stage, target: Target, seconds: float, scale: float) -> dict[str, Any]:
    """Many streams of two events a second; the time that the gateway adds to an event."""
    many = int(STREAMS * scale)
    # Begun one after the other, over a third of the time: streams in step would measure their own queue.
    rate = many / (seconds / 3)
    options = f"-c {many} -n {many} -r {rate:.0f} -s [n={int(2 * seconds)}:i=500:s=200]"
    direct = load(stage, stage.mock_port, options)
    before = rss_kib(target)
    peak = [before]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            peak[0] = max(peak[0], rss_kib(target))

    watcher = threading.Thread(target=watch)
    watcher.start()
    through = load(stage, target.port, options)
    ended.set()
    watcher.join()
    return {
        "streams": many,
        "ok": through["ok"],
        "events": through["events"],
        "direct_p99_ms": direct["transit_p99"] / 1000,
        "through_p99_ms": through["transit_p99"] / 1000,
        "added_p99_ms": (through["transit_p99"] - direct["transit_p99"]) / 1000,
        "kib_per_stream": (peak[0] - before) / many,
        "wanted": {"added_p99_ms": 25, "events": many * int(2 * seconds)},
    }


def idle_tls(stage: Stage, target: Target, seconds: float, scale: float) -> dict[str, Any]:
    """Connections over TLS that had one request and are kept; memory of each."""
    many = int(IDLE * scale)
    context = ssl.create_default_context(cafile=str(stage.certificate.authority))
    context.check_hostname = False
    before = rss_kib(target)
    begun = time.monotonic()
    held = []
    for _ in range(many):
        sock = context.wrap_socket(socket.create_connection(("127.0.0.1", target.tls_port or 0)))
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        held.append(sock)
    took_s = time.monotonic() - begun
    grown = rss_kib(target) - before
    for sock in held:
        sock.close()
    # The gateway returns free memory each half minute.
    closed = time.monotonic()
    while rss_kib(target) - before > grown / 2 and time.monotonic() - closed < 45:
        time.sleep(1)
    return {
        "connections": many,
        "opened_in_s": took_s,
        "kib_per_connection": grown / many,
        "kib_left_afterwards": rss_kib(target) - before,
        "seconds_until_then": time.monotonic() - closed,
        "wanted": {"kib_per_connection": 40},
    }


def slow_readers(stage: Stage, target: Target, seconds: float, scale: float) -> dict[str, Any]:
    """Streams as fast as they go whose clients read nothing; memory of each."""
    many = int(SLOW * scale)
    before = rss_kib(target)
    held = []
    for _ in range(many):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", target.port))
        sock.sendall(request(stream_body("[n=100000 i=0 s=4000]")))
        held.append(sock)
    time.sleep(min(seconds, 10))
    grown = rss_kib(target) - before
    for sock in held:
        sock.close()
    return {"readers": many, "kib_per_reader": grown / many, "wanted": {"kib_per_reader": 256}}


def overload(stage: Stage, target: Target, seconds: float, scale: float) -> dict[str, Any]:
    """Five times as many requests as a small fleet can take: what it still does, and how soon it says no."""
    directive = "[n=10:i=50:s=200]"
    capacity = load(stage, target.port, f"-m small -c {CAP} -d {seconds} -w {CAP} -s {directive}")
    peak = capacity["ok"] / capacity["seconds"]
    refusals: list[float] = []
    answers: list[float] = []
    ended = threading.Event()
    echo = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert echo.stdout is not None
    echo_port = int(echo.stdout.readline())

    def ask(port: int, raw: bytes, found: list[float]) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            begun = time.perf_counter()
            sock.sendall(raw)
            if sock.recv(65536).startswith(b"HTTP/1.1 503"):
                found.append((time.perf_counter() - begun) * 1000)

    def probe() -> None:
        raw = request(stream_body(directive.replace(":", " "), "small"))
        while not ended.is_set():
            ask(target.port, raw, refusals)
            ask(echo_port, raw, answers)
            time.sleep(0.05)

    prober = threading.Thread(target=probe)
    prober.start()
    rate = OVERLOAD * peak
    pressed = load(stage, target.port, f"-m small -c {int(rate)} -r {rate:.0f} -d {seconds} -s {directive}")
    ended.set()
    prober.join()
    echo.kill()
    ranked, bare = sorted(refusals), sorted(answers)
    return {
        "capacity_per_s": peak,
        "offered_per_s": rate,
        "goodput_per_s": pressed["ok"] / pressed["seconds"],
        "goodput_share": pressed["ok"] / pressed["seconds"] / peak,
        "refused": pressed["bad"],
        "errors": pressed["errors"],
        "refusal_p50_ms": statistics.median(ranked) if ranked else None,
        "refusal_p99_ms": ranked[int(len(ranked) * 0.99)] if ranked else None,
        "bare_p50_ms": statistics.median(bare) if bare else None,
        "bare_p99_ms": bare[int(len(bare) * 0.99)] if bare else None,
        "wanted": {"goodput_share": 0.9, "refusal_p99_ms": 5},
    }


def gaps_ms(port: int, seconds: float) -> list[float]:
    """Times between the reads of one stream with an event each 20 ms."""
    found = []
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(request(stream_body(f"[n={int(seconds * 50)} i=20 s=200]")))
        last: float | None = None
        data = b""
        while b"data: [DONE]" not in data:
            data = data[-32:] + sock.recv(65536)
            now = time.perf_counter()
            if last is not None:
                found.append((now - last) * 1000)
            last = now
    return sorted(found)


def large_body(stage: Stage, target: Target, seconds: float, scale: float) -> dict[str, Any]:
    """20 MB bodies whose model stands last, while another client's stream goes on."""
    filler = "x" * int(BODY_BYTES * scale)
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{filler}"}}
    for kind, content in (("image", [image]), ("code", '{\n"y"}' * int(BODY_BYTES * scale / 10))):
        body = json.dumps({"messages": [{"role": "user", "content": content}], "model": "mock"}).encode()
        raw = request({}, len(body)) + body
        quiet = gaps_ms(target.port, 4)
        statuses: list[bytes] = []
        took: list[float] = []

        def send(raw: bytes = raw, statuses: list[bytes] = statuses, took: list[float] = took) -> None:
            for _ in range(4):
                with socket.create_connection(("127.0.0.1", target.port)) as sock:
                    begun = time.perf_counter()
                    sock.sendall(raw)
                    statuses.append(sock.recv(65536)[:12])
                    took.append(time.perf_counter() - begun)
                time.sleep(0.3)

        sender = threading.Thread(target=send)
        sender.start()
        disturbed = gaps_ms(target.port, 4)
        sender.join()
        result = {
            "answers": sorted({status.decode() for status in statuses}),
            "seconds_each": statistics.median(took),
            "longest_gap_ms": disturbed[-1],
            "longest_gap_without_ms": quiet[-1],
            "wanted": {"longest_gap_ms": 50 + 20},
        }
        if kind == "image":
            first = result
    return {"image": first, "code": result}


JOBS: dict[str, Callable[[Stage, Target, float, float], dict[str, Any]]] = {
    "streams": streams,
    "idle-tls": idle_tls,
    "slow-readers": slow_readers,
    "overload": overload,
    "large-body": large_body,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    unknown = set(given.jobs) - set(JOBS)
    if unknown:
        parser.error(f"no such job: {', '.join(sorted(unknown))}")
    results: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}",
        "load_average_before": os.getloadavg(),
    }
    with staged(HERE / "build" / "holds") as stage:
        small = (
            f'[[backends]]\nid = "small"\nurl = "http://localhost:{stage.mock_port}"\n'
            f'models = ["small"]\nmax_connections = {CAP}\n'
        )
        for name in given.jobs or JOBS:
            target = llmgw(stage, f"llmgw-{name}", more=small)
            results[name] = JOBS[name](stage, target, given.seconds, given.scale)
            print(name, json.dumps(results[name], indent=1), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
