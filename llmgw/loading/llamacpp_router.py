"""Model loader ``llamacpp-router``: a llama-server in router mode (``--models-dir``).

The server keeps each model in a process of its own. ``GET /models`` tells their
states, ``/models/load`` and ``/models/unload`` answer at once and work on; where
``/models/sse`` is there, it tells of each change, and else the states are asked
twice a second while a load is waited for.

A full server (``--models-max``) would unload its least recently used model for the
next one, busy or not. So the gateway unloads what it has chosen before it loads.

:source: llama.cpp ``tools/server/README.md`` (router mode); its behaviour as
    observed on b11434.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from twisted.internet.defer import CancelledError, Deferred
from zope.interface import implementer

from llmgw.errors import LoadUndone
from llmgw.interfaces import CONTRACT, IModelLoader, IModelLoaderFactory
from llmgw.loading.asking import Options, cannot, entries, get_json, post_json, strange, words_of

if TYPE_CHECKING:
    from twisted.internet.interfaces import IDelayedCall, IReactorTime

    from llmgw.interfaces import IHealthTarget

LOOK_S = 0.5
"""Between two looks while a load or an unload is waited for."""
MAX_SILENT = 3
"""After so many looks in a row without an answer a load counts as failed."""
WATCH_AGAIN_S = 5.0
FULL = "model limit reached"
"""It would have to throw out one that is being loaded; somebody else has asked for those."""
NO_EVENTS_AGAIN_S = 300.0
"""Until a server without ``/models/sse`` is asked for it again: it may have been renewed."""

_STATES = {
    "loaded": "loaded",
    "sleeping": "loaded",  # it wakes for a request by itself, within a second
    "loading": "loading",
    "downloading": "loading",
    "unloaded": "unloaded",
}


@implementer(IModelLoader)
class LlamaCppRouter:
    """One llama-server in router mode.

    :param timeout_s: for one answer; a load may take as long as it takes.
    :param events: follow ``/models/sse``.
    """

    def __init__(
        self, target: IHealthTarget, reactor: IReactorTime, timeout_s: float = 5.0, *, events: bool = True
    ) -> None:
        self.capacity: int | None = None
        self.slots: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.aliases: dict[str, str] = {}
        self._target = target
        self._reactor = reactor
        self._timeout_s = timeout_s
        self._events = events
        self._ids: dict[str, str] = {}  # by id and by alias
        self._exit_codes: dict[str, int] = {}
        self._asked: set[str] = set()  # loaded models whose slots were asked for
        self._pauses: set[Deferred[None]] = set()
        self._changed: Callable[[], None] | None = None
        self._watching: Deferred[Any] | None = None
        self._again: IDelayedCall | None = None

    # --- the interface ---

    def models(self) -> Deferred[Mapping[str, str]]:
        """See :class:`llmgw.interfaces.IModelLoader`; aliases are names too."""
        return Deferred.fromCoroutine(self._models())

    def load(self, model: str) -> Deferred[None]:
        """Ask for the load and follow it."""
        return Deferred.fromCoroutine(self._load(model))

    def unload(self, model: str) -> Deferred[None]:
        """Ask for it and see it gone."""
        return Deferred.fromCoroutine(self._unload(model))

    def busy(self, model: str) -> Deferred[int | None]:
        """Slots of a loaded model that are at work, whoever asked."""
        return Deferred.fromCoroutine(self._busy(model))

    def start(self, changed: Callable[[], None]) -> None:
        """Follow the server's events, if it has them."""
        self._changed = changed
        if self._events:
            self._watch()

    def stop(self) -> None:
        """Follow them no more."""
        self._changed = None
        if self._again is not None:
            self._again.cancel()
            self._again = None
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()

    # --- states ---

    async def _models(self) -> Mapping[str, str]:
        status, said = await get_json(self._target, "/models", self._timeout_s)
        if status != 200 or not isinstance(said, Mapping):
            raise strange("/models", status, said, "llama-server in router mode")
        if self.capacity is None:
            await self._learn_capacity()
        states: dict[str, str] = {}
        ids: dict[str, str] = {}
        for entry in entries(said, "data"):
            id = entry.get("id")
            if not isinstance(id, str) or not id:
                continue
            state = self._state_of(id, entry)
            if state == "loaded":
                await self._learn_slots(id, entry)
            else:
                self._asked.discard(id)
                self.slots.pop(id, None)
            aliases = entry.get("aliases")
            for name in (id, *(aliases if isinstance(aliases, list) else ())):
                if isinstance(name, str) and name:
                    ids[name] = id
                    states[name] = state
                    if id in self.slots:
                        self.slots[name] = self.slots[id]
        self._ids = ids
        self.aliases = {name: id for name, id in ids.items() if name != id}
        return states

    def _state_of(self, id: str, entry: Mapping[str, Any]) -> str:
        status = entry.get("status")
        if not isinstance(status, Mapping):
            return "loaded"  # not a router after all: what it lists, it serves
        size = meta.get("size") if isinstance(meta := entry.get("meta"), Mapping) else None
        if isinstance(size, int) and size > 0:
            self.sizes[id] = size
        state = _STATES.get(str(status.get("value")), "unloaded")
        if state == "unloaded" and status.get("failed") is True:
            code = status.get("exit_code")
            self._exit_codes[id] = code if isinstance(code, int) else 1
            return "failed"
        self._exit_codes.pop(id, None)
        return state

    async def _learn_capacity(self) -> None:
        status, props = await get_json(self._target, "/props", self._timeout_s)
        most = props.get("max_instances") if status == 200 and isinstance(props, Mapping) else None
        if isinstance(most, int) and most > 0:  # 0 is no limit
            self.capacity = most

    async def _learn_slots(self, id: str, entry: Mapping[str, Any]) -> None:
        """Once for each time it was loaded: by its arguments, else by its own word."""
        if id in self._asked:
            return
        slots = _slots_in(entry["status"].get("args")) if isinstance(entry.get("status"), Mapping) else None
        if slots is None:
            path = f"/props?model={quote(id, safe='')}&autoload=false"
            status, props = await get_json(self._target, path, self._timeout_s)
            slots = props.get("total_slots") if status == 200 and isinstance(props, Mapping) else None
        self._asked.add(id)  # only now: whoever asks meanwhile has to know them, too
        if isinstance(slots, int) and slots > 0:
            self.slots[id] = slots

    # --- loads ---

    async def _load(self, model: str) -> None:
        states = await self._models()
        if states.get(model) == "loaded":
            return
        id = self._ids.get(model, model)
        status, said, raw = await post_json(self._target, "/models/load", {"model": id}, self._timeout_s)
        if status == 404:
            raise cannot(model, "the server has no such model")
        words = words_of(status, said, raw)
        if status != 200 and FULL in words:
            raise LoadUndone(f"loading {model!r} failed: the server is full of models that it loads")
        if status != 200 and "already" not in words:
            raise cannot(model, words)
        seen = False  # a failure that was there before is none of this load
        looks = silent = 0
        while True:
            try:
                state = (await self._models()).get(model)
            except CancelledError:
                raise
            except Exception as error:
                silent += 1
                if silent == MAX_SILENT:
                    raise cannot(model, f"the server tells nothing: {error}") from None
                await self._pause()
                continue
            looks, silent = looks + 1, 0
            if state == "loaded":
                return
            seen = seen or state == "loading"
            if state is None:
                raise cannot(model, "the server does not list it any more")
            if state == "failed" and (seen or looks > 1):
                raise cannot(model, f"its process ended with exit code {self._exit_codes.get(id, 1)}")
            if state == "unloaded" and (seen or looks > 1):
                raise LoadUndone(f"loading {model!r} failed: it was unloaded again")
            await self._pause()

    async def _unload(self, model: str) -> None:
        id = self._ids.get(model, model)
        status, said, raw = await post_json(self._target, "/models/unload", {"model": id}, self._timeout_s)
        words = words_of(status, said, raw)
        if status not in (200, 404) and "not running" not in words and "not loaded" not in words:
            raise cannot(model, f"unloading: {words}")
        while (await self._models()).get(model) in ("loaded", "loading"):
            await self._pause()

    async def _busy(self, model: str) -> int | None:
        id = self._ids.get(model, model)
        path = f"/slots?model={quote(id, safe='')}&autoload=false"
        status, said = await get_json(self._target, path, self._timeout_s)
        if status != 200 or not isinstance(said, list):
            return None
        return sum(isinstance(slot, Mapping) and slot.get("is_processing") is True for slot in said)

    # --- events ---

    def _pause(self) -> Deferred[None]:
        """Until the next look is due, or an event tells of a change."""
        pause: Deferred[None] = Deferred()
        call = self._reactor.callLater(LOOK_S, self._end_pause, pause)

        def over(outcome: Any) -> Any:
            self._pauses.discard(pause)
            if call.active():
                call.cancel()
            return outcome

        self._pauses.add(pause)
        return pause.addBoth(over)

    def _end_pause(self, pause: Deferred[None]) -> None:
        if not pause.called:
            pause.callback(None)

    def _watch(self) -> None:
        self._again = None
        watching = self._watching = self._target.watch("/models/sse", self._received, self._timeout_s)
        watching.addCallbacks(
            lambda status: WATCH_AGAIN_S if status == 200 else NO_EVENTS_AGAIN_S, self._not_watched
        )
        watching.addCallback(self._watch_again)

    def _not_watched(self, failure: Any) -> float:
        if failure.check(CancelledError):
            return 0.0
        return WATCH_AGAIN_S

    def _watch_again(self, after_s: float) -> None:
        self._watching = None
        if self._changed is not None:
            self._again = self._reactor.callLater(after_s or WATCH_AGAIN_S, self._watch)

    def _received(self, data: bytes) -> None:
        """Something changed; what, is asked: one way to read a state is enough."""
        if b"data:" not in data:
            return
        for pause in list(self._pauses):
            self._end_pause(pause)
        if self._changed is not None:
            self._changed()


def _slots_in(args: Any) -> int | None:
    """The slots that a model's own command line sets; ``-1`` leaves it to the server."""
    if not isinstance(args, list):
        return None
    for flag, value in pairwise(args):
        if flag in ("-np", "--parallel", "--n-parallel") and isinstance(value, str) and value.isdecimal():
            return int(value)
    return None


@implementer(IModelLoaderFactory)
class LlamaCppRouterFactory:
    """Options: ``timeout_s`` (5, for one answer), ``events`` (true: follow ``/models/sse``)."""

    name = "llamacpp-router"
    description = "llama-server in router mode: /models, /models/load, /models/unload, /models/sse"
    contract = CONTRACT

    def build(
        self, options: Mapping[str, Any], target: IHealthTarget, reactor: IReactorTime
    ) -> LlamaCppRouter:
        """:raise ConfigError: options are wrong."""
        read = Options(options)
        timeout_s = read.seconds("timeout_s", 5.0)
        events = read.take("events", True)
        if not isinstance(events, bool):
            read.fault("events", f"must be true or false, not {events!r}")
        read.end()
        return LlamaCppRouter(target, reactor, timeout_s, events=bool(events))
