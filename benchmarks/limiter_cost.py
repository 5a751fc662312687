"""What a limiter costs: CPU microseconds per request, ``local`` and ``redis`` in turn.

    python benchmarks/limiter_cost.py [--rounds N] [--rate REQUESTS_PER_S] [--keys N]

Needs ``redis-server`` on the path. A request is one ``admit`` and one ``settle``
against limits of requests, tokens and concurrency. Requests come at a steady
rate, as long as the process keeps up; the CPU time is that of the whole process,
so it holds what ``redis`` does beside: its calls, ten a second, and the reactor.
What the loop itself takes is measured by a limiter that does nothing, and taken off.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from time import monotonic, process_time
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater, react

from llmgw.ratelimit.local import LocalRateLimiter
from llmgw.ratelimit.plugin import RedisRateLimiterFactory
from llmgw.values import Cost, Decision, Policy, Usage

POLICIES = (Policy("p", requests_per_minute=1e6, tokens_per_minute=1e9, concurrent=10_000),)
COST = Cost(1, 900)
USED = Usage(300, 0, 500)
SECONDS = 0.6
TURN_S = 0.005
ALLOWED = Decision(True, [])


class Nothing:
    """The loop alone."""

    def admit(self, subject: str, policies: Any, cost: Cost) -> Decision:
        return ALLOWED

    def settle(self, reservation: Any, used: Usage | None) -> None:
        pass


async def one_round(reactor: Any, limiter: Any, rate: int, subjects: list[str]) -> float:
    """:return: CPU seconds per request."""
    gc.collect()
    waited = done = 0
    begun, cpu = monotonic(), process_time()
    while monotonic() - begun < SECONDS:
        for _ in range(int(rate * TURN_S)):
            done += 1
            decision = limiter.admit(subjects[done % len(subjects)], POLICIES, COST)
            if isinstance(decision, Deferred):
                waited += 1
                decision = await decision
            assert decision.allowed
            limiter.settle(decision.reservation, USED)
        await deferLater(reactor, TURN_S)
    return (process_time() - cpu) / done


async def measure(reactor: Any, rounds: int, rate: int, keys: int) -> None:
    """Interleaved, so that other work on the machine meets all of them alike."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", ""]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not socket.exists():
                await deferLater(reactor, 0.01)
            shared = RedisRateLimiterFactory().build({"url": f"unix://{socket}", "op_s": 5.0}, reactor)
            assert shared.store is not None
            shared.store.start()
            while not shared.store.up:
                await deferLater(reactor, 0.01)
            limiters = {"loop": Nothing(), "local": LocalRateLimiter(reactor.seconds), "redis": shared}
            subjects = [f"key-{number}" for number in range(keys)]
            taken: dict[str, list[float]] = {name: [] for name in limiters}
            for number in range(rounds + 1):
                for name, limiter in limiters.items():
                    each = await one_round(reactor, limiter, rate, subjects)
                    if number:  # the first one warms up
                        taken[name].append(each)
            loop = median(taken.pop("loop"))
            for name, each in taken.items():
                print(f"{name:6s} {(median(each) - loop) * 1e6:6.2f} µs per request")
            ratios = [
                (redis - loop) / (local - loop)
                for local, redis in zip(taken["local"], taken["redis"], strict=True)
            ]
            print(f"ratio  {median(ratios):6.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
            print(
                f"{rate}/s over {keys} keys; {shared.gauges()['llmgw_limiter_calls'][1]:.0f} calls,", end=" "
            )
            print(f"{shared.waited} requests waited")
            await shared.stop()
            await shared.store.close()
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rate", type=int, default=4000)
    parser.add_argument("--keys", type=int, default=16)
    options = parser.parse_args()

    def run(reactor: Any) -> Deferred[None]:
        return Deferred.fromCoroutine(measure(reactor, options.rounds, options.rate, options.keys))

    react(run)


if __name__ == "__main__":
    main()
