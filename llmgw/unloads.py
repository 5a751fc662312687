"""Unloading of models: for another model, when they are idle, or for the operator.

No running request is cut: the model gets no new requests, and is unloaded when the last one has
ended, those of other gateways included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from llmgw.foreign import at_most

if TYPE_CHECKING:
    from llmgw.loads import Loads
    from llmgw.shelf import Shelf

LOOK_S = 0.25


class Unloads:
    """:ivar tasks: running unloads that do not belong to a load."""

    log = Logger()

    def __init__(self, loads: Loads) -> None:
        self.tasks: set[Deferred[Any]] = set()
        self._loads = loads
        self._reactor = loads.gateway.reactor

    async def unload(self, shelf: Shelf, model: str, why: str) -> bool:
        """Unload a model without running requests.

        :param why: ``evicted``, ``idle`` or ``operator``.
        :return: whether it was unloaded.
        """
        give_up_s = self._loads.config.give_up_s
        try:
            await at_most(give_up_s, maybeDeferred(shelf.loader.unload, model), self._reactor)
        except CancelledError:
            raise
        except Exception as error:
            self.log.error(
                "backend {backend}: unloading {model} failed: {why}",
                backend=shelf.id,
                model=model,
                why=str(error),
            )
            return False
        shelf.mark(model, "unloaded")
        self._loads.gateway.metrics.unloaded(shelf.id, model, why)
        self.log.info("backend {backend}: unloaded {model} ({why})", backend=shelf.id, model=model, why=why)
        return True

    def begin(self, shelf: Shelf, model: str, why: str) -> None:
        """Unload it as soon as possible."""
        task = Deferred.fromCoroutine(self._retire(shelf, model, why))
        self.tasks.add(task)

        def over(_: Any) -> None:
            self.tasks.discard(task)

        task.addErrback(lambda failure: failure.trap(CancelledError) and None)
        task.addErrback(lambda failure: self.log.failure("unloading {model}", failure, model=model))
        task.addBoth(over)

    def is_idle(self, shelf: Shelf, model: str, idle_s: float, now_s: float) -> bool:
        """Whether it has not been requested for ``idle_s``, and no request waits for it."""
        return (
            now_s - shelf.used_s(model) >= idle_s
            and shelf.states[model] == "loaded"
            and not shelf.changing
            and not shelf.busy(model)
            and not any(self._loads.gateway.holding.count(name) for name in shelf.names_of(model))
        )

    async def _retire(self, shelf: Shelf, model: str, why: str) -> None:
        while shelf.changing:
            await deferLater(self._reactor, LOOK_S)
        locks, url = self._loads.locks, shelf.backend.url
        shelf.changing = True
        shelf.leave([model])
        lock = await locks.take("backend", url)
        try:
            while lock is not None and lock.valid and not await shelf.idle(model):
                if why == "idle":
                    return
                await locks.tell_leaving(lock, url, (model,))
                await deferLater(self._reactor, LOOK_S)
            if lock is not None and lock.valid:
                await self.unload(shelf, model, why)
        finally:
            shelf.leave([model], on=False)
            shelf.changing = False
            await locks.forget_leaving(url)
            if lock is not None:
                await lock.release()
