"""What a router costs: microseconds per decision and per request's events.

    python benchmarks/router_cost.py [--requests N] [ROUTER …]

Each router lives through a fleet at work: requests come at 20 per second and
backend, most of them turns of conversations with a growing prefix, each chosen,
started, given its first token and finished, all interleaved. So the figures hold
what the router does again after each event, not only a decision on idle state.
``least`` is what the machine can do: the same requests are gone through nine times,
each stretch of fifty counts with its shortest time; ``mean`` holds what the machine
did beside. Then: the prefix index filled to its
bound, and hashing prompts of growing length.
"""

from __future__ import annotations

import argparse
import gc
import random
import tracemalloc
from statistics import mean
from time import perf_counter
from typing import Any

from llmgw import builtins
from llmgw.core.prefix import PrefixIndex, hash_blocks
from llmgw.values import Backend, Choice, Finished, FirstToken, Profile, Request, Started

BLOCKS = 32
ROUNDS = 9
STRETCH = 50


def fleet(count: int) -> list[Backend]:
    """Machines of four kinds."""
    kinds = ((10.0, 16), (4.0, 8), (2.0, 4), (1.0, 4))
    return [
        Backend(f"backend-{number}", weight=kinds[number % 4][0], slots=kinds[number % 4][1])
        for number in range(count)
    ]


def requests(count: int, blocks: int) -> list[Request]:
    """Turns of 200 conversations that share four system prompts."""
    dice = random.Random(1)
    talks = [[dice.randrange(4) * 100 + block for block in range(4)] for _ in range(200)]
    made = []
    for number in range(count):
        at = dice.randrange(len(talks))
        talk = talks[at]
        talk += [dice.getrandbits(32) for _ in range(3)]
        prefix = tuple(talk[:blocks])
        made.append(Request(f"r{number}", "m", 128 * len(talk), prefix=prefix if blocks else ()))
        if len(talk) > max(blocks, 8):
            del talk[4:]
    return made


def live(router: Any, backends: list[Backend], asked: list[Request]) -> list[tuple[float, float]]:
    """Seconds spent choosing and observing, for each stretch of requests."""
    found = []
    by_id = {each.id: each for each in backends}
    under_way: list[tuple[Request, str, float]] = []
    most = 4 * len(backends)
    now_s = choosing_s = observing_s = 0.0
    for number, request in enumerate(asked, 1):
        now_s += 0.05 / len(backends)
        begun = perf_counter()
        answer = router.choose(request, backends, now_s)
        choosing_s += perf_counter() - begun
        chosen = answer.backend if isinstance(answer, Choice) else answer
        profile: Profile = by_id[chosen.id].profile
        profile.in_flight += 1
        events: list[Any] = [
            Started(request.id, chosen.id, now_s),
            FirstToken(request.id, chosen.id, now_s + 0.1, 0.1),
        ]
        under_way.append((request, chosen.id, now_s))
        if len(under_way) > most:
            old, where, since_s = under_way.pop(0)
            by_id[where].profile.in_flight -= 1
            tokens = old.prompt_tokens
            events.append(
                Finished(old.id, where, now_s, True, "done", now_s - since_s, tokens, tokens // 2, 100, 0.05)
            )
        begun = perf_counter()
        for event in events:
            router.observe(event)
        observing_s += perf_counter() - begun
        if number % STRETCH == 0:
            found.append((choosing_s, observing_s))
            choosing_s = observing_s = 0.0
    return found


def main() -> None:
    """Print the tables."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    reader.add_argument("routers", nargs="*", default=["expected-ttft", "peak-ewma", "prefix-hash"])
    reader.add_argument("--requests", type=int, default=2000)
    chosen = reader.parse_args()
    factories = {
        each.name: each for each in vars(builtins).values() if isinstance(each, builtins.RouterFactory)
    }
    print(f"{'router':28} {'backends':>8} {'blocks':>6} {'choose µs':>18} {'events µs':>18}")
    print(f"{'':28} {'':8} {'':6} {'least':>9}{'mean':>9} {'least':>9}{'mean':>9}")
    gc.disable()
    for name in chosen.routers:
        for count in (10, 100):
            for blocks in (0, BLOCKS):
                asked = requests(chosen.requests, blocks)
                rounds = []
                for _ in range(ROUNDS):
                    router = factories[name].build({"seed": 1} if name == "expected-ttft" else {})
                    rounds.append(live(router, fleet(count), asked))
                    gc.collect()
                figures = []
                for which in (0, 1):
                    each = [
                        [taken[which] / STRETCH * 1e6 for taken in stretch]
                        for stretch in zip(*rounds, strict=True)
                    ]
                    figures += [mean(min(times) for times in each), mean(mean(times) for times in each)]
                print(
                    f"{name:28} {count:8} {blocks:6} {figures[0]:9.1f}{figures[1]:9.1f}"
                    f" {figures[2]:9.1f}{figures[3]:9.1f}"
                )
    tracemalloc.start()
    most = 32768
    index = PrefixIndex(most)
    dice = random.Random(2)
    for number in range(4 * most // 16):
        index.insert([dice.getrandbits(32) for _ in range(16)], f"backend-{number % 10}", 8)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(
        f"\nprefix index at its bound of {most}: {len(index)} landmarks, {size / len(index):.0f} bytes each"
    )
    print("\nhash_blocks, blocks of 512 bytes, at most 32 of them")
    for length in (1_000, 10_000, 100_000, 1_000_000):
        text = random.Random(3).randbytes(length)
        taken_s = min(_timed(text) for _ in range(50))
        print(f"  prompt of {length:9,} bytes: {taken_s * 1e6:6.1f} µs")


def _timed(text: bytes) -> float:
    begun = perf_counter()
    hash_blocks(text, 512, 32)
    return perf_counter() - begun


if __name__ == "__main__":
    main()
