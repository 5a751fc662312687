"""Real processes, a real Redis, real faults: what the limiter ``redis`` lets pass, beside what it promises.

    python benchmarks/limiter_faults.py [ROW …] [--seed N]

Needs ``redis-server`` and ``redis-sentinel`` on the path. For each row, some limiter
processes share one limit of 100 requests a second with a bucket of 100, each under
a load of its own; something is done to Redis or to one of them meanwhile. Each
process notes when it admitted; afterwards all notes are laid on one another (they
have one clock) and the worst window is looked for. Prints a Markdown table; the
exit status tells whether every row kept its promise.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE.parents[1] / "tests" / "ratelimit")]

RATE, BURST = 100.0, 100.0
STAMP = struct.Struct("=d")
Note = tuple[float, int, bool]
"""When it was decided, for which key, and whether it was allowed."""

# --- one limiter process ---------------------------------------------------------


def work(url: str, sentinel: str, on_loss: str, arrivals: Path, notes: Path, keys: int) -> None:
    """Wait for a line with the time to begin, then admit at each arrival; note each decision at once."""
    from twisted.internet import reactor
    from twisted.internet.defer import Deferred
    from twisted.internet.task import LoopingCall

    from llmgw.ratelimit.plugin import RedisRateLimiterFactory
    from llmgw.values import Cost, Decision, Policy, Usage

    reactor.seconds = time.monotonic  # type: ignore[attr-defined]
    where = {"sentinels": [sentinel], "master": "mm"} if sentinel else {"url": url}
    limiter = RedisRateLimiterFactory().build({**where, "on_redis_loss": on_loss}, reactor)
    policy = (Policy("p", requests_per_minute=RATE * 60, burst_s=BURST / RATE),)
    times = [each[0] for each in STAMP.iter_unpack(arrivals.read_bytes())]
    times.reverse()
    out = notes.open("wb", buffering=0)
    dice = random.Random(len(times))
    begin_s = 0.0

    def note(decision: Decision, key: int) -> None:
        out.write(STAMP.pack(time.monotonic()) + bytes([key, decision.allowed]))
        if decision.allowed:
            limiter.settle(decision.reservation, Usage())

    def turn() -> None:
        now_s = time.monotonic() - begin_s
        while times and times[-1] <= now_s:
            times.pop()
            key = dice.randrange(keys)
            answer = limiter.admit(f"key-{key}", policy, Cost())
            if isinstance(answer, Deferred):
                answer.addCallback(note, key)
            else:
                note(answer, key)
        if not times:
            looping.stop()
            reactor.callLater(0.2, reactor.stop)  # type: ignore[attr-defined]

    looping = LoopingCall(turn)

    def ready() -> None:
        if not limiter.store.up:
            reactor.callLater(0.01, ready)  # type: ignore[attr-defined]
            return
        print("ready", flush=True)
        nonlocal begin_s
        begin_s = float(sys.stdin.readline())
        looping.start(0.002)

    limiter.store.start()
    reactor.callWhenRunning(ready)  # type: ignore[attr-defined]
    reactor.run()  # type: ignore[attr-defined]


class Worker:
    """A limiter process and its notes."""

    def __init__(
        self, folder: Path, number: int, url: str, sentinel: str, on_loss: str, times: list[float], keys: int
    ) -> None:
        self.notes = folder / f"notes-{number}"
        arrivals = folder / f"arrivals-{number}"
        arrivals.write_bytes(b"".join(map(STAMP.pack, times)))
        command = [
            sys.executable,
            str(HERE),
            "--worker",
            url,
            sentinel,
            on_loss,
            str(arrivals),
            str(self.notes),
        ]
        self.process = subprocess.Popen(
            [*command, str(keys)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def begin(self, at_s: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{at_s}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def noted(self) -> list[Note]:
        """Every decision."""
        data = self.notes.read_bytes()
        step = STAMP.size + 2
        whole = len(data) - len(data) % step
        return [
            (STAMP.unpack_from(data, at)[0], data[at + STAMP.size], bool(data[at + STAMP.size + 1]))
            for at in range(0, whole, step)
        ]


# --- what is done to them ---------------------------------------------------------


class SlowProxy:
    """Passes bytes on to a port, ``delay_s`` late."""

    def __init__(self, port: int) -> None:
        import socket

        self.delay_s = 0.0
        self._port = port
        self._socket = socket
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = self._socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                return
            for one in (near, far):
                one.setsockopt(self._socket.IPPROTO_TCP, self._socket.TCP_NODELAY, 1)
            for source, sink in ((near, far), (far, near)):
                queue: Queue[tuple[float, bytes]] = Queue()
                threading.Thread(target=self._read, args=(source, queue), daemon=True).start()
                threading.Thread(target=self._write, args=(sink, queue), daemon=True).start()

    def _read(self, source: Any, queue: Queue[tuple[float, bytes]]) -> None:
        data = b"."
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            queue.put((time.monotonic() + self.delay_s / 2, data))

    def _write(self, sink: Any, queue: Queue[tuple[float, bytes]]) -> None:
        while True:
            due_s, data = queue.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            with contextlib.suppress(OSError):
                if not data:
                    sink.shutdown(self._socket.SHUT_RDWR)
                    return
                sink.sendall(data)


class Stage:
    """One run: a Redis, workers, and time."""

    def __init__(self, row: Row, folder: Path, seed: int) -> None:
        from redis_servers import RedisServer, Sentinel

        self.row = row
        self._servers: list[Any] = []

        def start(kind: Any, *arguments: Any) -> Any:
            place = folder / f"server-{len(self._servers)}"
            place.mkdir()
            self._servers.append(kind(place, *arguments))
            return self._servers[-1]

        self.redis = start(RedisServer)
        self.replica = None
        sentinel = ""
        if row.sentinel:
            self.replica = start(RedisServer, "--replicaof", "127.0.0.1", str(self.redis.port))
            until(lambda: b"master_link_status:up" in self.replica.ask("INFO", "replication"))
            watch = start(Sentinel, self.redis.port)
            until(lambda: b"slaves=1" in watch.ask("INFO", "sentinel"))
            sentinel = f"127.0.0.1:{watch.port}"
        self.proxy = SlowProxy(self.redis.port) if row.proxy else None
        port = self.redis.port if self.proxy is None else self.proxy.port
        url = f"redis://127.0.0.1:{port}/0"
        dice = random.Random(seed)
        self.workers = [
            Worker(folder, number, url, sentinel, row.on_loss, load(dice, row.seconds), row.keys)
            for number, load in enumerate(row.loads)
        ]

    def run(self) -> Outcome:
        """Let it happen."""
        try:
            for worker in self.workers:
                worker.wait_ready()
            begin_s = time.monotonic() + 0.1
            for worker in self.workers:
                worker.begin(begin_s)
            for at_s, action in self.row.script:
                time.sleep(max(0.0, begin_s + at_s - time.monotonic()))
                action(self)
            time.sleep(max(0.0, begin_s + self.row.seconds - time.monotonic()))
            for worker in self.workers:
                worker.end()
            notes = sorted(note for worker in self.workers for note in worker.noted())
        finally:
            for worker in self.workers:
                worker.process.kill()
                worker.process.wait()
            for server in self._servers:
                with contextlib.suppress(ProcessLookupError):
                    server.signal(signal.SIGCONT)
                server.kill()
        return Outcome(self.row, notes)


def until(condition: Callable[[], bool]) -> None:
    """Wait for it, 30 s at most."""
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


# --- rows -----------------------------------------------------------------------

Load = Callable[[random.Random, float], list[float]]
Action = Callable[[Stage], Any]


def steady(rate_per_s: float) -> Load:
    """Independent callers."""
    from fleet import poisson

    return lambda dice, until_s: poisson(rate_per_s, until_s, dice)


def bursts(rate_per_s: float, then: float) -> Load:
    """A light load, and a second of a heavy one every three."""
    from fleet import poisson

    def times(dice: random.Random, until_s: float) -> list[float]:
        heavy = [
            at for second in range(2, int(until_s), 3) for at in poisson(then, second + 1.0, dice, second)
        ]
        return sorted(poisson(rate_per_s, until_s, dice) + heavy)

    return times


@dataclass
class Row:
    """One line of the table.

    :param extra: admitted in any window at most beyond ``B + rW + H``.
    :param promise: the same in words.
    :param least: utilisation at least, where anything is promised.
    """

    name: str
    loads: Sequence[Load]
    script: Sequence[tuple[float, Action]] = ()
    extra: float = 0.0
    promise: str = "B + rW + H"
    least: float = 0.0
    seconds: float = 10.0
    on_loss: str = "local"
    sentinel: bool = False
    proxy: bool = False
    keys: int = 1


@dataclass
class Outcome:
    """What came of it."""

    row: Row
    notes: list[Note] = field(repr=False)

    def excess(self, key: int) -> float:
        """Admitted beyond ``rate x window`` for one key, in its worst window."""
        from fleet import excess

        return excess([at for at, each, allowed in self.notes if each == key and allowed], RATE)

    @property
    def most(self) -> float:
        return max(self.excess(key) for key in range(self.row.keys))

    @property
    def bound(self) -> float:
        return BURST + max(0.1 * BURST, len(self.row.loads)) + self.row.extra

    @property
    def utilisation(self) -> float:
        """Admitted, of what one bucket would have admitted at these very moments; the least of all keys."""
        return min(self._utilisation(key) for key in range(self.row.keys))

    def _utilisation(self, key: int) -> float:
        level, last, could, did = BURST, 0.0, 0, 0
        for at, each, allowed in self.notes:
            if each == key:
                level = min(BURST, level + (at - last) * RATE)
                last = at
                did += allowed
                if level >= 1.0:
                    level -= 1.0
                    could += 1
        return did / could

    @property
    def kept(self) -> bool:
        return self.most <= self.bound and self.utilisation >= self.row.least

    def line(self) -> str:
        """Of the table."""
        row = self.row
        return (
            f"| {row.name} | {row.promise} | {self.bound:.0f} | {self.most:.0f} | {self.utilisation:.2f} |"
            + ("" if self.kept else " **broken** |")
        )


def redis_signal(number: signal.Signals) -> Action:
    return lambda stage: stage.redis.signal(number)


def worker_signal(number: signal.Signals) -> Action:
    return lambda stage: stage.workers[0].process.send_signal(number)


def ask_redis(*words: str) -> Action:
    return lambda stage: stage.redis.ask(*words)


def slow(delay_s: float) -> Action:
    return lambda stage: setattr(stage.proxy, "delay_s", delay_s)


H = 0.1 * BURST
THREE = [steady(100.0)] * 3
AWAY = {"extra": H, "promise": "B + rW + H + 0.1 B"}
STOP, CONT = redis_signal(signal.SIGSTOP), redis_signal(signal.SIGCONT)


def rows() -> dict[str, Row]:
    """By a short name."""
    return {
        "under": Row("nothing, 0.8 of the limit, 4 gateways", [steady(20.0)] * 4, least=0.95),
        "steady2": Row("nothing, 3 times the limit, 2 gateways", [steady(150.0)] * 2, least=0.95),
        "steady4": Row("nothing, 3 times the limit, 4 gateways", [steady(75.0)] * 4, least=0.95),
        "bursty": Row("nothing, bursts of 20 times the limit, 4 gateways", [bursts(15.0, 500.0)] * 4),
        "skewed": Row(
            "nothing, 3 times the limit, skewed 16 : 3 : 1",
            [steady(240.0), steady(45.0), steady(15.0)],
            least=0.95,
        ),
        "keys": Row(
            "nothing, 16 keys at twice their limits, 2 gateways",
            [steady(1600.0)] * 2,
            least=0.95,
            keys=16,
            seconds=6,
        ),
        "kill-gateway": Row("a gateway is killed", THREE, [(3.0, worker_signal(signal.SIGKILL))], least=0.9),
        "stop-gateway": Row(
            "a gateway stands still for 3 s",
            THREE,
            [(3.0, worker_signal(signal.SIGSTOP)), (6.0, worker_signal(signal.SIGCONT))],
            least=0.9,
        ),
        "script-flush": Row("SCRIPT FLUSH", THREE, [(3.0, ask_redis("SCRIPT", "FLUSH"))], least=0.95),
        "flush": Row(
            "FLUSHALL, twice",
            THREE,
            [(3.0, ask_redis("FLUSHALL")), (6.0, ask_redis("FLUSHALL"))],
            extra=BURST,
            promise="B + rW + H + B",
        ),
        "stop": Row("Redis stands still for 3 s", THREE, [(3.0, STOP), (6.0, CONT)], **AWAY),  # type: ignore[arg-type]
        "kill": Row(
            "Redis is killed, and is back empty after 3 s",
            THREE,
            [(3.0, lambda stage: stage.redis.kill()), (6.0, lambda stage: stage.redis.start())],
            extra=H + BURST,
            promise="B + rW + H + 0.1 B + B",
        ),
        "closed": Row(
            "Redis stands still for 3 s, `closed`", THREE, [(3.0, STOP), (6.0, CONT)], on_loss="closed"
        ),
        "slow": Row(
            "Redis answers 200 ms late for 4 s",
            THREE,
            [(3.0, slow(0.2)), (7.0, slow(0.0))],
            proxy=True,
            **AWAY,  # type: ignore[arg-type]
        ),
        "slowish": Row(
            "Redis answers 30 ms late for 4 s",
            THREE,
            [(3.0, slow(0.03)), (7.0, slow(0.0))],
            proxy=True,
            **AWAY,  # type: ignore[arg-type]
        ),
        "failover": Row(
            "Sentinel fails over, the master is killed",
            THREE,
            [(3.0, lambda stage: stage.redis.kill())],
            extra=H + BURST,
            promise="B + rW + H + 0.1 B + what was lost",
            sentinel=True,
            seconds=15.0,
        ),
    }


def play(row: Row, seed: int = 1) -> Outcome:
    """One row, from an empty Redis."""
    with tempfile.TemporaryDirectory() as folder:
        return Stage(row, Path(folder), seed).run()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", nargs="*", help=f"of {', '.join(rows())}; all by default")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print("| What happens | Promised | Bound | Worst window | Utilisation |\n| --- | --- | --- | --- | --- |")
    kept = True
    for name, row in rows().items():
        if not options.row or name in options.row:
            outcome = play(row, options.seed)
            print(outcome.line(), flush=True)
            kept = kept and outcome.kept
    return 0 if kept else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _url, _sentinel, _on_loss, _arrivals, _notes, _keys = sys.argv[2:]
        work(_url, _sentinel, _on_loss, Path(_arrivals), Path(_notes), int(_keys))
    else:
        sys.exit(main())
