"""Make servers slower than they are: run each for a share of every period, stop it for the rest.

Unlike ``nice`` or a heavier model, the share holds whether or not the other
servers are busy, and unlike a control group it needs no rights: measured on two
cores with one model, shares 1, 0.5 and 0.125 of 20 ms gave times to the first
token of 1 : 2.0 : 8.8 alone and 1 : 2.4 : 10 together. A short question to a
stopped server waits at most one period.

The loop is a process of its own. It lets all of them run again when it ends in any
way that can be noticed: by a signal, by an error, by the death of the process that
started it. Only a SIGKILL of this process itself leaves a server stopped, until
whoever started it notices.

:source: the idea is ``cpulimit``'s; ``pidfd_open(2)`` against reused process ids.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmgw.demo.processes import end_with_parent

PERIOD_S = 0.02


class Step(NamedTuple):
    """At ``at`` (share of a period) send ``number`` to the target of that index."""

    at: float
    target: int
    number: int


def plan(shares: Sequence[float]) -> list[Step]:
    """The steps of one period, in time's order.

    The targets take turns as far as their shares allow, so that two of them
    compete less with a third that always runs.

    :param shares: each above 0; one of 1 or more is never stopped.
    :raise ValueError: a share is not above 0.
    """
    steps: list[Step] = []
    begin = 0.0
    for target, share in enumerate(shares):
        if not share > 0:
            raise ValueError(f"a share must be above 0, not {share}")
        if share >= 1:
            continue
        begin = min(begin, 1 - share)
        steps.append(Step(begin, target, signal.SIGCONT))
        steps.append(Step(begin + share, target, signal.SIGSTOP))
        begin += share
    return sorted(steps)


class Budget:
    """What CPU time a process may use: ``share`` of the time that passes, and one turn more.

    Time that it leaves unused is not saved.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._at_s: float | None = None
        self._used_s = 0.0
        self._over_s = 0.0

    def allows(self, now_s: float, used_s: float) -> bool:
        """Whether it may run now. :param used_s: CPU time it has used in all."""
        if self._at_s is not None:
            more_s = used_s - self._used_s - self._share * (now_s - self._at_s)
            self._over_s = max(0.0, self._over_s + more_s)
        self._at_s, self._used_s = now_s, used_s
        return self._over_s <= self._share * PERIOD_S


class Target:
    """A process to be stopped and continued, by a handle that is never another process's.

    :raise ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # Linux; elsewhere the id itself has to do.
        self._handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        if self._handle is None:
            os.kill(pid, 0)

    def used_s(self) -> float | None:
        """CPU time of all its threads so far; ``None`` where that cannot be known."""
        if self._handle is None:
            return None
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # clock_getcpuclockid(3) of Linux
        except OSError:
            return None

    def send(self, number: int) -> bool:
        """Send a signal; ``False`` when the process is gone."""
        try:
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def keep(targets: Sequence[Target], shares: Sequence[float], going: Callable[[], bool]) -> None:
    """Run the cycle while ``going()`` and at least one target lives; all run again afterwards."""
    steps = plan(shares)
    alive = {step.target for step in steps}
    budgets = {target: Budget(shares[target]) for target in alive}
    started_s = time.monotonic()
    try:
        while alive and going():
            for step in steps:
                if step.target not in alive:
                    continue
                time.sleep(max(0.0, started_s + step.at * PERIOD_S - time.monotonic()))
                target = targets[step.target]
                if step.number == signal.SIGCONT:
                    used_s = target.used_s()
                    if used_s is not None and not budgets[step.target].allows(time.monotonic(), used_s):
                        continue
                if not target.send(step.number):
                    alive.discard(step.target)
            # A late turn is not made up for: the next period begins when it should, or now.
            started_s = max(started_s + PERIOD_S, time.monotonic() - PERIOD_S)
    finally:
        for target in targets:
            target.send(signal.SIGCONT)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m llmgw.demo.duty PID:SHARE…``"""
    parent = os.getppid()
    parser = argparse.ArgumentParser(
        prog="python -m llmgw.demo.duty", description="Let each process run for a share of the time."
    )
    parser.add_argument("pair", nargs="+", metavar="PID:SHARE")
    try:
        pairs = [
            (int(pid), float(share))
            for pid, _, share in (p.partition(":") for p in parser.parse_args(arguments).pair)
        ]
        plan([share for _, share in pairs])
    except ValueError as error:
        parser.error(str(error))
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    end_with_parent(parent, signal.SIGTERM)
    try:
        targets = [Target(pid) for pid, _ in pairs]
    except ProcessLookupError as error:
        parser.error(f"no such process: {error}")
    print("listening", flush=True)
    keep(targets, [share for _, share in pairs], lambda: not stopping)
    return 0


if __name__ == "__main__":
    sys.exit(main())
