"""All workers: started again when they end, replaced one after another, asked together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import Logger

from llmgw.core.restarts import Restarts
from llmgw.errors import GatewayError
from llmgw.listening import Sockets
from llmgw.workers.child import Child
from llmgw.workers.messages import Begin, Setup

LOOK_EVERY_S = 1.0
READY_WITHIN_S = 60.0
"""A new worker that takes longer to become ready ends a rolling restart."""
POLL_S = 0.05
ANSWER_S = 5.0
"""A worker that takes longer to answer is left out of the picture."""


class Place:
    """Where one worker serves: at most one that takes requests, and those that finish.

    :ivar current: the one that serves or starts; ``None`` between two.
    :ivar leaving: those that finish their streams.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.current: Child | None = None
        self.leaving: set[Child] = set()
        self.restarts = Restarts()

    @property
    def state(self) -> str:
        """In a word, for the operator."""
        if self.current is not None:
            return "serving" if self.current.ready else "starting"
        return "given up" if self.restarts.given_up else "waiting to start"


class Crew:
    """As many workers as places.

    :param sockets: what they serve.
    :param changed: called when a worker's status has changed, or one is gone.
    :param departed: gets a worker that has ended.
    :ivar store: URL of the store that the parent runs, or empty.
    :ivar drained: backends that the operator has drained.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        setup: Setup,
        count: int,
        sockets: Sockets,
        *,
        reactor_name: str = "",
        changed: Callable[[], None] = lambda: None,
        departed: Callable[[Child], None] = lambda child: None,
    ) -> None:
        self.setup = setup
        self.store = ""
        self.drained: set[str] = set()
        self.places = [Place(number) for number in range(1, count + 1)]
        self.restarting = False
        self._reactor = reactor
        self._reactor_name = reactor_name
        self._sockets = sockets
        self._changed = changed
        self._departed = departed
        self._stopping = False
        self._timers: dict[int, Any] = {}
        self._loop = LoopingCall(self._look)
        self._loop.clock = reactor

    def __iter__(self) -> Iterator[Child]:
        """All processes, those that finish included."""
        for place in self.places:
            if place.current is not None:
                yield place.current
            yield from place.leaving

    @property
    def serving(self) -> list[Child]:
        """Those that take requests."""
        return [child for child in self if child.ready]

    @property
    def down(self) -> int:
        """Places that were given up."""
        return sum(place.restarts.given_up for place in self.places)

    # --- life -----------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers."""
        for place in self.places:
            self._fill(place)
        self._loop.start(LOOK_EVERY_S, now=False)

    async def restart(self) -> list[int]:
        """Replace the workers one after another: each new one is ready before the old
        one is told to finish. Places that were given up are tried again.

        :return: the new workers' process ids.
        :raise GatewayError: a new one did not become ready; the old one serves on,
            and so do those that were not replaced yet.
        """
        if self.restarting or self._stopping:
            why = "the gateway is stopping" if self._stopping else "a rolling restart is under way"
            raise GatewayError(why, status=409, code="conflict")
        self.restarting = True
        try:
            for place in self.places:
                await self._replace(place)
        finally:
            self.restarting = False
        return [place.current.pid for place in self.places if place.current is not None]

    async def _replace(self, place: Place) -> None:
        old, place.current = place.current, None
        timer = self._timers.pop(place.number, None)
        if timer is not None:
            timer.cancel()
        place.restarts.forgive()
        if old is not None:
            place.leaving.add(old)
        try:
            new = self._spawn(place)
        except OSError as error:
            self._take_back(place, old, None)
            raise GatewayError(f"worker {place.number}: {error}") from None
        place.current = new
        end_s = self._reactor.seconds() + READY_WITHIN_S
        while not new.ready:
            gone = place.current is not new
            if gone or self._stopping or self._reactor.seconds() > end_s:
                self._take_back(place, old, None if gone else new)
                why = new.end if gone else "it did not become ready"
                raise GatewayError(f"the new worker {place.number}: {why}; the old one serves on")
            await deferLater(self._reactor, POLL_S)
        if old is not None:
            old.drain(relieved=True)

    def _take_back(self, place: Place, old: Child | None, new: Child | None) -> None:
        """The old one goes on in its place."""
        if new is not None:
            place.leaving.add(new)
            place.current = None
            new.leaving = True
            new.kill()
        timer = self._timers.pop(place.number, None)
        if old is not None and old in place.leaving:
            place.leaving.discard(old)
            place.current = old
            if timer is not None:
                timer.cancel()
        elif timer is not None:
            self._timers[place.number] = timer

    def drain(self, *, interrupted: bool = False, relieved: bool = False) -> None:
        """Have all of them finish and end; nobody is started again.

        :param relieved: others accept on the same sockets.
        """
        self._stopping = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for child in self:
            child.drain(interrupted=interrupted, relieved=relieved)

    def hurry(self) -> None:
        """Have those that finish skip the waiting."""
        for child in self:
            child.hurry()

    def kill(self) -> None:
        """End what is left."""
        for child in self:
            child.kill()
        if self._loop.running:
            self._loop.stop()

    @property
    def gone(self) -> bool:
        """No process is left."""
        return not any(True for _ in self)

    # --- questions ------------------------------------------------------------------

    async def ask(self, what: str, *arguments: Any, all: bool = False) -> list[tuple[Child, Any]]:
        """What each worker answers, in the order of their places. One that fails or is late is left out.

        :param all: also those that finish.
        """
        asked = [child for child in self if child.status is not None and (all or not child.leaving)]
        return await self._gather(asked, [child.link.call(what, *arguments) for child in asked])

    async def ask_one(self, what: str, *arguments: Any) -> Any:
        """What one worker answers.

        :raise GatewayError: what it raised, or that nobody serves.
        """
        serving = self.serving
        if not serving:
            raise GatewayError("no worker serves now", status=503, code="no_worker")
        return await serving[0].link.call(what, *arguments).addTimeout(ANSWER_S, self._reactor)

    async def reload(self, setup: Setup) -> tuple[list[str], dict[int, str]]:
        """Have every worker take over ``setup``, which was verified; later ones begin with it.

        :return: what needs a restart, and by place why a worker kept the old one.
        """
        self.setup = setup
        for place in self.places:
            place.restarts.forgive()
            if place.current is None and place.number not in self._timers and not self._stopping:
                self._fill(place)
        children = [child for child in self if child.status is not None]
        fixed: list[str] = []
        refused: dict[int, str] = {}
        answers = [child.link.reload(setup).addTimeout(6 * ANSWER_S, self._reactor) for child in children]
        for child, (good, value) in zip(children, await _all(answers), strict=True):
            if child.leaving or child.link.transport is None or not child.link.connected:
                continue  # it has been replaced, or ends
            if good:
                fixed += [key for key in value if key not in fixed]
            else:
                refused[child.number] = value.getErrorMessage()
        return fixed, refused

    async def _gather(self, asked: list[Child], answers: list[Deferred[Any]]) -> list[tuple[Child, Any]]:
        for answer in answers:
            answer.addTimeout(ANSWER_S, self._reactor)
        results = await _all(answers)
        return [(child, value) for child, (good, value) in zip(asked, results, strict=True) if good]

    # --- our own --------------------------------------------------------------------

    def _fill(self, place: Place) -> None:
        self._timers.pop(place.number, None)
        try:
            place.current = self._spawn(place)
        except OSError as error:
            self.log.error("worker {number} cannot be started: {why}", number=place.number, why=error)
            self._again(place, str(error))

    def _spawn(self, place: Place) -> Child:
        child = Child(self._reactor, place.number, self._told, self._ended)
        sockets = self._sockets.descriptors()
        begin = Begin(place.number, self.setup, sockets, self.store, sorted(self.drained))
        child.start(begin, self._sockets.activated(), self._reactor_name)
        return child

    def _told(self, child: Child) -> None:
        place = self.places[child.number - 1]
        if child.status is not None and child.status.draining and not child.leaving and not self._stopping:
            # Somebody else told it to end.
            child.leaving = True
            if place.current is child:
                place.leaving.add(child)
                self._fill(place)
        self._changed()

    def _ended(self, child: Child) -> None:
        place = self.places[child.number - 1]
        place.leaving.discard(child)
        if place.current is child:
            place.current = None
            if not self._stopping:
                self._again(place, child.end)
        elif not child.leaving:
            self.log.error(
                "worker {number} (pid {pid}): {why}", number=child.number, pid=child.pid, why=child.end
            )
        self._departed(child)
        self._changed()

    def _again(self, place: Place, why: str) -> None:
        delay_s = place.restarts.ended(self._reactor.seconds())
        if delay_s is None:
            self.log.critical(
                "worker {number} ended again ({why}) and stays down: too many ends within a minute",
                number=place.number,
                why=why,
            )
            return
        self.log.error(
            "worker {number} ended ({why}); the next one starts in {delay:.1f} s",
            number=place.number,
            why=why,
            delay=delay_s,
        )
        self._timers[place.number] = self._reactor.callLater(delay_s, self._fill, place)

    def _look(self) -> None:
        for child in self:
            child.check()


async def _all(answers: list[Deferred[Any]]) -> list[tuple[bool, Any]]:
    """What came of each: ``(True, value)`` or ``(False, failure)``."""
    results: list[tuple[bool, Any]] = await DeferredList(answers, consumeErrors=True)
    return results
