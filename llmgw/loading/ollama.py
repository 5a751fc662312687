"""Model loader ``ollama``: ``/api/tags`` tells what there is, ``/api/ps`` what is in memory.

A generate call without a prompt loads a model, and one with ``keep_alive`` 0
unloads it. Ollama also loads and unloads by itself, after its own rules
(``OLLAMA_MAX_LOADED_MODELS``, ``OLLAMA_KEEP_ALIVE``); the gateway sees what came of it.

:source: Ollama ``docs/api.md`` (Load a model, Unload a model, List running models).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, TimeoutError
from zope.interface import implementer

from llmgw.interfaces import CONTRACT, IModelLoader, IModelLoaderFactory
from llmgw.loading.asking import Options, cannot, entries, get_json, post_json, strange, words_of

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

    from llmgw.interfaces import IHealthTarget

LATEST = ":latest"


@implementer(IModelLoader)
class Ollama:
    """One Ollama server.

    :param timeout_s: for one answer.
    :param load_timeout_s: for a load, which is one answer too.
    :param keep_alive: how long Ollama itself keeps a model that the gateway has loaded:
        seconds, or text such as ``"24h"``; below zero for ever.
    :ivar sizes: of those in memory what they take there, else of their files.
    """

    def __init__(
        self,
        target: IHealthTarget,
        timeout_s: float = 5.0,
        load_timeout_s: float = 600.0,
        keep_alive: int | str = -1,
    ) -> None:
        self.sizes: dict[str, int] = {}
        self.aliases: dict[str, str] = {}
        self._target = target
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._keep_alive = keep_alive

    def models(self) -> Deferred[Mapping[str, str]]:
        """See :class:`llmgw.interfaces.IModelLoader`; ``m:latest`` is called ``m`` too."""
        return Deferred.fromCoroutine(self._models())

    def load(self, model: str) -> Deferred[None]:
        """A generate call without a prompt."""
        return Deferred.fromCoroutine(self._call(model, self._keep_alive, self._load_timeout_s))

    def unload(self, model: str) -> Deferred[None]:
        """The same with ``keep_alive`` 0."""
        return Deferred.fromCoroutine(self._call(model, 0, self._timeout_s))

    async def _models(self) -> Mapping[str, str]:
        states: dict[str, str] = {}
        for path, state in (("/api/tags", "unloaded"), ("/api/ps", "loaded")):
            status, said = await get_json(self._target, path, self._timeout_s)
            if status != 200 or not isinstance(said, Mapping):
                raise strange(path, status, said, "Ollama")
            for entry in entries(said, "models"):
                name = entry.get("name") or entry.get("model")
                if not isinstance(name, str) or not name:
                    continue
                size = entry.get("size_vram") or entry.get("size")
                short = name.removesuffix(LATEST)
                if short != name:
                    self.aliases[short] = name
                for each in {name, short}:
                    states[each] = state
                    if isinstance(size, int) and size > 0:
                        self.sizes[each] = size
        return states

    async def _call(self, model: str, keep_alive: int | str, timeout_s: float) -> None:
        body = {"model": model, "keep_alive": keep_alive, "stream": False}
        try:
            status, said, raw = await post_json(self._target, "/api/generate", body, timeout_s)
            if status == 400 and "does not support generate" in words_of(status, said):
                body["input"] = ""
                status, said, raw = await post_json(self._target, "/api/embed", body, timeout_s)
        except TimeoutError:
            raise cannot(model, f"not ready after {timeout_s:g} s") from None
        if status == 200 or (status == 404 and keep_alive == 0):
            return
        raise cannot(model, words_of(status, said, raw))


@implementer(IModelLoaderFactory)
class OllamaFactory:
    """Options: ``timeout_s`` (5, for one answer), ``load_timeout_s`` (600), ``keep_alive``
    (-1: only the gateway unloads what it has loaded)."""

    name = "ollama"
    description = "Ollama: /api/tags, /api/ps, and generate calls without a prompt"
    contract = CONTRACT

    def build(self, options: Mapping[str, Any], target: IHealthTarget, reactor: IReactorTime) -> Ollama:
        """:raise ConfigError: options are wrong."""
        read = Options(options)
        timeout_s = read.seconds("timeout_s", 5.0)
        load_timeout_s = read.seconds("load_timeout_s", 600.0)
        keep_alive = read.take("keep_alive", -1)
        if not isinstance(keep_alive, int | str) or isinstance(keep_alive, bool) or keep_alive in (0, ""):
            read.fault("keep_alive", f'must be seconds, or text such as "24h", not {keep_alive!r}')
        read.end()
        return Ollama(target, timeout_s, load_timeout_s, keep_alive)
