r"""Routers side by side in front of three real llama-servers of unlike speed.

    python benchmarks/routers_real.py [--rounds 4] [--requests 40] [--streams 3] \
        [--routers adaptive,round-robin]

One llama.cpp server runs freely, one at half and one at 0.15 of the time
(SIGSTOP duty cycle). One gateway per router stands in front of the same three,
and the same load, prompts included, goes through them in turn (A B, B A, …), so
that what the machine does meanwhile hits all alike. Load: ``--streams`` clients,
each sending its next streamed request when its last one has ended; every prompt
is new, so no prompt cache helps. TTFT is taken at the client, at the first
event with content. Writes ``benchmarks/results/routers_real.json`` and prints a table.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.request import urlopen

from llmgw.demo.fleet import Fleet
from llmgw.demo.layout import FLEET, MODEL, ensure_model

HERE = Path(__file__).parent
WORDS = [
    "gateway",
    "server",
    "queue",
    "token",
    "prompt",
    "slot",
    "cache",
    "model",
    "stream",
    "answer",
    "fast",
    "slow",
    "node",
    "route",
    "limit",
    "health",
    "first",
    "last",
    "short",
    "long",
    "warm",
    "cold",
    "busy",
    "idle",
    "open",
    "close",
    "send",
    "read",
    "write",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Gateway:
    """One gateway process with one router."""

    def __init__(self, folder: Path, router: str, urls: dict[str, str]) -> None:
        self.port, self.admin = free_port(), free_port()
        config = folder / f"{router}.toml"
        text = (
            f'listen = ["tcp:{self.port}:interface=127.0.0.1"]\n'
            f'admin = ["tcp:{self.admin}:interface=127.0.0.1"]\n'
            f'auth = ["anonymous"]\n[router]\nplugin = "{router}"\n'
            '[log]\naccess = ""\n[drain]\nlame_duck_s = 0\n'
        )
        for plan in FLEET:
            text += (
                f'[[backends]]\nid = "{plan.id}"\nurl = "{urls[plan.id]}"\nweight = {plan.weight}\n'
                f'models = ["{MODEL}"]\n'
            )
        config.write_text(text)
        start = "from twisted.scripts.twistd import run; run()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, "-n", "--pidfile=", "llmgw", "-c", str(config)],
            stdout=(folder / f"{router}.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        end = time.monotonic() + 20
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{self.admin}/readyz", timeout=1) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def shares(self) -> dict[str, int]:
        """Requests per backend so far."""
        with urlopen(f"http://127.0.0.1:{self.admin}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, int] = collections.Counter()
        for line in lines:
            if line.startswith("llmgw_requests_total{") and 'status="200"' in line:
                backend = line.split('backend="')[1].split('"')[0]
                found[backend] += int(float(line.rsplit(" ", 1)[1]))
        return dict(found)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def ask(port: int, prompt: str, tokens: int) -> tuple[float, float]:
    """One streamed request. :return: TTFT and whole time, seconds."""
    body = json.dumps(
        {
            "model": MODEL,
            "stream": True,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": prompt}],
        }
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    begun = time.monotonic()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read()[:200]!r}")
    first = 0.0
    for line in response:
        if not first and line.startswith(b"data: {"):
            delta = json.loads(line[6:])["choices"]
            if delta and delta[0]["delta"].get("content"):
                first = time.monotonic() - begun
    connection.close()
    whole = time.monotonic() - begun
    return first or whole, whole


def run_block(port: int, streams: int, prompts: list[tuple[str, int]]) -> list[tuple[float, float]]:
    """The same prompts in the same order through ``streams`` closed loops."""
    waiting = collections.deque(prompts)
    done: list[tuple[float, float]] = []

    def loop() -> None:
        while waiting:
            try:
                prompt, tokens = waiting.popleft()
            except IndexError:
                return
            done.append(ask(port, prompt, tokens))

    threads = [threading.Thread(target=loop) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40, help="per router and round")
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--routers", default="adaptive,round-robin")
    options = parser.parse_args()
    names = options.routers.split(",")
    dice = random.Random(1)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        fleet = Fleet(ensure_model(folder), folder)
        fleet.start()
        gateways: dict[str, Gateway] = {}
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        try:
            for name in names:
                gateways[name] = Gateway(folder, name, dict(fleet.urls))
            for index in range(options.rounds):
                for name in names if index % 2 == 0 else names[::-1]:
                    prompts = [
                        (" ".join(dice.choice(WORDS) for _ in range(dice.choice((40, 80, 160)))), 24)
                        for _ in range(options.requests)
                    ]
                    results[name] += run_block(gateways[name].port, options.streams, prompts)
            shares = {name: gateway.shares() for name, gateway in gateways.items()}
        finally:
            for gateway in gateways.values():
                gateway.stop()
            fleet.stop()
    table = {}
    for name in names:
        ttft = [first * 1000 for first, _ in results[name]]
        whole = [all_ * 1000 for _, all_ in results[name]]
        table[name] = {
            "requests": len(ttft),
            "ttft_ms": {
                "mean": round(statistics.fmean(ttft), 1),
                "p50": round(percentile(ttft, 0.5), 1),
                "p95": round(percentile(ttft, 0.95), 1),
                "p99": round(percentile(ttft, 0.99), 1),
            },
            "whole_ms": {"mean": round(statistics.fmean(whole), 1), "p99": round(percentile(whole, 0.99), 1)},
            "requests_by_backend": shares[name],
        }
    command = "python benchmarks/routers_real.py " + " ".join(sys.argv[1:])
    told = {
        "command": command.strip(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "servers": {plan.id: plan.share for plan in FLEET},
        "routers": table,
    }
    path = HERE / "results" / "routers_real.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{'router':28} {'mean':>8} {'p50':>8} {'p95':>8} {'p99':>8}   TTFT in ms; requests by backend")
    for name, row in table.items():
        t = row["ttft_ms"]
        print(
            f"{name:28} {t['mean']:8} {t['p50']:8} {t['p95']:8} {t['p99']:8}   {row['requests_by_backend']}"
        )


if __name__ == "__main__":
    main()
