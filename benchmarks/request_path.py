"""CPU of one request, or of one event of a stream, inside the process: no sockets, no kernel.

    python benchmarks/request_path.py [--router NAME] [--events] [--profile | --rooms] [TIMES]

What a change costs or saves in our own Python shows here without a load generator
(``inside.py`` tells what is driven). Prints microseconds per request or event.
``--rooms`` tells how a profiler's time is spread over the rooms of the house; its own
cost weighs on short functions, so these are shares, not times.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
from collections import Counter
from pathlib import Path

from inside import Rig, least_us

import llmgw
from llmgw.tap import tune_memory

HOUSE = Path(llmgw.__file__).parent


def rooms(profile: cProfile.Profile) -> list[tuple[str, float]]:
    """Rooms by their share of the time. What a built-in function took is its caller's."""
    spent: Counter[str] = Counter()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, _), (_, _, own_s, _, callers) in stats.items():
        if file == "~":
            for (caller, _, _), told in callers.items():
                spent[_room(caller)] += told[2]
        else:
            spent[_room(file)] += own_s
    whole_s = sum(spent.values())
    return [(room, seconds / whole_s) for room, seconds in spent.most_common()]


def _room(file: str) -> str:
    try:
        inside = Path(file).relative_to(HOUSE)
    except ValueError:
        return "this driver" if Path(file).parent == Path(__file__).parent else "libraries"
    return f"{inside.parts[0]}/" if len(inside.parts) > 1 else inside.name


def main() -> None:
    tune_memory()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("times", nargs="?", type=int, default=5000)
    parser.add_argument("--router", default="expected-ttft")
    parser.add_argument("--events", action="store_true", help="events of one stream in place of requests")
    parser.add_argument("--profile", action="store_true", help="functions by their own time")
    parser.add_argument("--rooms", action="store_true", help="rooms by their share of the time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(folder, router=options.router, stream=options.events)
        if options.events:
            rig.begin_stream()
        work = rig.event if options.events else rig.ask
        for _ in range(200):
            work()
        if not options.events:
            rig.check()
        profile = cProfile.Profile()
        if options.profile or options.rooms:
            profile.enable()
        spent_us = least_us(work, options.times)
        profile.disable()
        if options.profile:
            profile.print_stats("tottime")
        if options.rooms:
            for room, share in rooms(profile):
                print(f"{share:6.1%}  {room}")
        print(f"{spent_us:.1f} us of CPU per {'event' if options.events else 'request'}")


if __name__ == "__main__":
    main()
