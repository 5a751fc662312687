"""The workers' decisions and history as those of one gateway: what each has new is fetched and joined.

Once a second while somebody listens, else every five seconds, so that whoever
opens the dashboard finds the last ten minutes there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from llmgw.admin.history import EVERY_S, MOST
from llmgw.gateway import recent

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

    from llmgw.workers.crew import Crew

LIVE_S = 1.0


class Joined:
    """Plain values from several workers; see :class:`llmgw.admin.events.Feed`."""

    def __init__(self, name: str, most: int) -> None:
        self.name = name
        self.total = 0
        self._items: deque[Any] = deque(maxlen=most)

    def add(self, items: Sequence[Any]) -> None:
        """Append ``items``."""
        self.total += len(items)
        self._items.extend(items)

    def since(self, seen: int) -> list[Any]:
        """Those after the first ``seen``, as far as they are kept."""
        wanted = min(self.total - seen, len(self._items))
        return list(islice(self._items, len(self._items) - wanted, None))


class Feeds:
    """Asks the crew.

    :param listeners: how many listen to events now.
    """

    log = Logger()

    def __init__(self, crew: Crew, listeners: Callable[[], int], reactor: IReactorTime) -> None:
        self.decisions = Joined(recent.Recent.name, recent.MOST)
        self.history = Joined("history", MOST)
        self._crew = crew
        self._listeners = listeners
        self._ticks = 0
        self._samples: list[Mapping[str, Any]] = []
        self._loop = LoopingCall(self._tick)
        self._loop.clock = reactor

    def start(self) -> None:
        """Begin to ask."""
        self._loop.start(LIVE_S, now=False)

    def stop(self) -> None:
        """Ask no more."""
        if self._loop.running:
            self._loop.stop()

    def _tick(self) -> Deferred[None] | None:
        self._ticks += 1
        due = self._ticks % round(EVERY_S / LIVE_S) == 0
        if not due and not self._listeners():
            return None
        asking = Deferred.fromCoroutine(self._ask(due))
        return asking.addErrback(lambda failure: self.log.failure("asking workers for what is new", failure))

    async def _ask(self, due: bool) -> None:
        decisions: list[Any] = []
        for _, told in await self._crew.ask("news", all=True):
            decisions += told["decisions"]
            self._samples += told["history"]
        self.decisions.add(sorted(decisions, key=lambda line: float(line["at"] + line["duration_s"])))
        if due:
            samples, self._samples = self._samples, []
            if samples:
                self.history.add([joined(samples)])


def joined(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One sample of what several workers took in the same time, see :mod:`llmgw.admin.history`."""
    whole: dict[str, Any] = {
        "at": max(sample["at"] for sample in samples),
        "every_s": EVERY_S,
        "rejected": {},
        "backends": {},
    }
    for key in ("requests", "errors", "output_tokens", "in_flight", "waiting"):
        whole[key] = sum(sample[key] for sample in samples)
    for sample in samples:
        for reason, count in sample["rejected"].items():
            whole["rejected"][reason] = whole["rejected"].get(reason, 0) + count
        for name, own in sample["backends"].items():
            whole["backends"].setdefault(name, []).append(own)
    whole["backends"] = {name: _joined_backend(parts) for name, parts in whole["backends"].items()}
    return whole


def _joined_backend(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    whole = {"requests": sum(part["requests"] for part in parts)}
    timed = [part for part in parts if "ttft_s" in part]
    if timed:
        weight = sum(part["requests"] for part in timed)
        whole["ttft_s"] = round(sum(part["ttft_s"] * part["requests"] for part in timed) / weight, 6)
    return whole
