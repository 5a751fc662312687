"""A long run under everything at once: mixed clients, faults between gateway and backends, reloads.

    python benchmarks/soak.py [--minutes 45] [--out benchmarks/results/soak.json]

Two backends stand behind fault proxies, which break in turn for some seconds each minute; a third one
never breaks. Clients stream, ask for whole answers, leave early, send nonsense, read slowly, and come
over TLS. Every minute the configuration is reloaded. Looked at each second: memory, descriptors,
requests in flight. At the end: the slope of memory after the first fifth of the time, what is left
of descriptors and requests, and every answer that nothing explains.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from harness import (  # noqa: E402
    LAST_CHUNK,
    SSE_HEAD,
    Client,
    Gateway,
    Line,
    Received,
    Scripted,
    chat_body,
    chunk,
    event,
    free_port,
    json_response,
    post,
)

from llmgw.demo.certificate import ensure_certificate  # noqa: E402
from llmgw.testing import FAULTS, Fault, FaultProxy  # noqa: E402

CLIENTS = 10
FAULT_EVERY_S = 12.0
FAULT_S = 4.0
RELOAD_EVERY_S = 60.0
EXPLAINED = {"done", "cut", "left", "status_400", "status_429", "status_502", "status_503", "status_504"}
"""What clients may meet while backends break: an answer, a visible cut, a refusal that says why."""

CONFIG = """
listen = [
  "tcp:{port}:interface=127.0.0.1",
  "llmtls:tcp:{tls_port}:interface=127.0.0.1:privateKey={key}:certKey={cert}",
]
[timeouts]
response_head_s = 3.0
first_token_s = 3.0
stream_idle_s = 3.0
write_stall_s = 3.0
[[rate_limits]]
requests_per_minute = 1000000
tokens_per_minute = 100000000
[breaker]
open_s = 1.0
lone_open_s = 0.5
[log]
access = "access.log"
"""


def answer(line: Line, asked: Received) -> None:
    """A stream of some events, or a whole answer."""
    body = asked.json
    if not body.get("stream"):
        line.send(json_response({"choices": [{"index": 0, "message": {"content": "x" * 500}}]}))
        return
    line.send(SSE_HEAD)
    for number in range(body.get("events", 20)):
        line.send(chunk(event(f"{number} " + "x" * 50)))
        time.sleep(0.01)
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":20}}\n\n'
    line.send(chunk(usage + b"data: [DONE]\n\n") + LAST_CHUNK)


class Run:
    """Everything that goes on at once.

    :ivar counts: what became of requests.
    :ivar strange: answers that nothing explains.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.until_s = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.strange: list[str] = []
        self.samples: list[tuple[float, float, int, int]] = []
        self.reloads = 0
        self.faults: Counter[str] = Counter()
        self.backends = [Scripted(answer) for _ in range(3)]
        self.proxies = [FaultProxy("127.0.0.1", each.port) for each in self.backends[:2]]
        files = ensure_certificate(folder)
        self.tls_port, port = free_port(), free_port()
        config = CONFIG.format(port=port, tls_port=self.tls_port, key=files.key, cert=files.certificate)
        urls = [proxy.url for proxy in self.proxies] + [self.backends[2].url]
        for number, url in enumerate(urls):
            config += f'[[backends]]\nid = "b{number}"\nurl = "{url}"\nmodels = ["m"]\nmax_connections = 40\n'
        self.gateway = Gateway(folder, config)
        self.gateway.port = port
        self.context = ssl.create_default_context(cafile=str(files.authority))

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until_s

    # --- clients ---

    def client(self, number: int) -> None:
        """One client after the other, of kinds drawn at random."""
        dice = random.Random(number)
        kinds: list[Callable[[random.Random], str]] = [
            self.stream,
            self.stream,
            self.whole,
            self.whole,
            self.leaver,
            self.nonsense,
            self.secure,
            self.slow_reader,
        ]
        while not self.over:
            kind = dice.choice(kinds)
            try:
                outcome = kind(dice)
            except (OSError, AssertionError) as error:
                outcome = f"{kind.__name__}: {type(error).__name__}: {error}"
            self.counts[outcome if outcome in EXPLAINED else "strange"] += 1
            if outcome not in EXPLAINED and len(self.strange) < 200:
                self.strange.append(outcome)

    def stream(self, dice: random.Random) -> str:
        with Client(self.gateway.port, 20) as client:
            client.send(post(body=chat_body(stream=True, events=dice.randint(1, 40))))
            return self._judge(client)

    def whole(self, dice: random.Random) -> str:
        with Client(self.gateway.port, 20) as client:
            for _ in range(dice.randint(1, 5)):
                client.send(post(body=chat_body(pad="x" * dice.choice((0, 100, 100_000)))))
                outcome = self._judge(client)
                if outcome != "done":
                    return outcome
            return "done"

    def leaver(self, dice: random.Random) -> str:
        with Client(self.gateway.port, 20) as client:
            client.send(post(body=chat_body(stream=True, events=200)))
            time.sleep(dice.random() / 2)
        return "left"

    def nonsense(self, dice: random.Random) -> str:
        with Client(self.gateway.port, 20) as client:
            raw = post(body=b'{"model":"m"') if dice.random() < 0.5 else dice.randbytes(200) + b"\r\n\r\n"
            client.send(raw)
            answer = client.read_answer()
            return "status_400" if answer.status in (400, 405, 414, 431, 505) else f"nonsense {answer.status}"

    def secure(self, dice: random.Random) -> str:
        with socket.create_connection(("127.0.0.1", self.tls_port), 20) as raw:
            client = Client.__new__(Client)
            client.sock = self.context.wrap_socket(raw, server_hostname="localhost")
            client.buffer = b""
            client.send(post(body=chat_body(stream=True, events=10)))
            return self._judge(client)

    def slow_reader(self, dice: random.Random) -> str:
        with Client(self.gateway.port, 20) as client:
            client.send(post(body=chat_body(stream=True, events=300)))
            time.sleep(2)
            return "left"

    @staticmethod
    def _judge(client: Client) -> str:
        answer = client.read_answer()
        if answer.status == 200:
            return "done" if answer.clean else "cut"
        return f"status_{answer.status}"

    # --- what disturbs ---

    def disturb(self) -> None:
        """One fault after the other at one proxy or the other."""
        dice = random.Random(0)
        kinds = [kind for kind in FAULTS if kind != "none"]
        number = 0
        while not self.over:
            time.sleep(FAULT_EVERY_S - FAULT_S)
            kind, proxy = kinds[number % len(kinds)], self.proxies[number % 2]
            number += 1
            proxy.play(Fault(kind, at=dice.randrange(600), only=b"POST" if dice.random() < 0.5 else b""))
            self.faults[kind] += 1
            time.sleep(FAULT_S)
            proxy.play(Fault())

    def reload(self) -> None:
        while not self.over:
            time.sleep(min(RELOAD_EVERY_S, max(0.1, self.until_s - time.monotonic())))
            status, body = self.gateway.admin("/api/reload", "POST")
            self.reloads += 1
            if status != 200:
                self.strange.append(f"reload: {status} {body!r}")

    # --- what is looked at ---

    def watch(self) -> None:
        begun = time.monotonic()
        while not self.over:
            self.samples.append((time.monotonic() - begun, self.memory_mib(), *self.open_things()))
            time.sleep(1)

    def memory_mib(self) -> float:
        text = Path(f"/proc/{self.gateway.process.pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) / 1024

    def open_things(self) -> tuple[int, int]:
        """Descriptors, and requests in flight."""
        try:
            in_flight = int(self.gateway.state["in_flight"])
        except OSError:
            in_flight = -1
        return len(os.listdir(f"/proc/{self.gateway.process.pid}/fd")), in_flight

    def go(self) -> dict[str, Any]:
        """All of it. :return: the report."""
        fresh = self.open_things()[0]
        threads = [threading.Thread(target=self.client, args=(number,)) for number in range(CLIENTS)]
        threads += [threading.Thread(target=each) for each in (self.disturb, self.reload, self.watch)]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.monotonic() - begun
        for proxy in self.proxies:
            proxy.play(Fault())
        time.sleep(6)  # kept connections and stalled clients have gone by then
        left = self.open_things()
        state = self.gateway.state
        status = self.gateway.stop()
        log = self.gateway.log
        for proxy in self.proxies:
            proxy.close()
        settled = [sample for sample in self.samples if sample[0] > took_s / 5]
        return {
            "machine": f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}",
            "minutes": took_s / 60,
            "requests": sum(self.counts.values()),
            "outcomes": dict(self.counts.most_common()),
            "faults": dict(self.faults),
            "reloads": self.reloads,
            "memory_mib": {
                "first": self.samples[0][1],
                "after_a_fifth": settled[0][1],
                "last": self.samples[-1][1],
                "most": max(sample[1] for sample in self.samples),
                "by_fifth": [
                    statistics.fmean(mib for at, mib, _, _ in self.samples if int(at * 5 / took_s) == fifth)
                    for fifth in range(5)
                ],
                "slope_per_10_min": slope([(at, mib) for at, mib, _, _ in settled]) * 600,
                "slope_per_10_min_of_the_second_half": slope(
                    [(at, mib) for at, mib, _, _ in self.samples if at > took_s / 2]
                )
                * 600,
            },
            "descriptors": {
                "fresh": fresh,
                "median": statistics.median(sample[2] for sample in settled),
                "left": left[0],
            },
            "left": {
                "in_flight": left[1],
                "by_backend": [backend["in_flight"] for backend in state["backends"]],
                "held_bytes": state["held_bytes"],
                "waiting": state["waiting"],
            },
            "unexplained": self.strange,
            "exit_status": status,
            "tracebacks": log.count("Traceback"),
            "unhandled": log.count("Unhandled"),
            "wanted": {"slope_per_10_min": "below 1", "unexplained": [], "left": 0, "tracebacks": 0},
        }


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line with the least squares."""
    times, values = [at for at, _ in points], [value for _, value in points]
    return statistics.linear_regression(times, values).slope


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack():
        report = Run(Path(folder), given.minutes * 60).go()
    text = json.dumps(report, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    sys.exit(0 if not report["unexplained"] and report["left"]["in_flight"] == 0 else 1)


if __name__ == "__main__":
    main()
