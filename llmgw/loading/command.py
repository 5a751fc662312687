"""Model loader ``command``: a server on this machine, started and ended by the gateway.

For one box without anything else: a load starts the command with the model's
file, waits until ``/health`` says 200, and an unload ends the process: SIGTERM,
and SIGKILL when that does not help. One backend is one port, and has one model at
a time; more at a time are more backends.

What the process writes goes to the gateway's log, line by line. It ends with the
gateway, even with one that was killed (on Linux).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import Struct, field
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from zope.interface import implementer

from llmgw.interfaces import CONTRACT, IModelLoader, IModelLoaderFactory
from llmgw.loading.asking import Options, cannot, get_json

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

    from llmgw.interfaces import IHealthTarget

LOOK_S = 0.1
ANSWER_S = 2.0
LINE_BYTES = 1000
LAST_LINES = 3
"""So many lines of a process that ended are told as the reason."""
LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})


class Settings(Struct, frozen=True):
    """How the server is run.

    :param argv: words in which ``{port}``, ``{host}``, ``{model}`` and ``{path}`` are filled in.
    :param models: names to the files that ``{path}`` stands for.
    :param ready_s: most time from the start to the first 200 from ``/health``.
    :param stop_s: from SIGTERM to SIGKILL.
    """

    argv: tuple[str, ...]
    models: Mapping[str, str]
    ready_s: float = 300.0
    stop_s: float = 10.0
    directory: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@implementer(IModelLoader)
class Command:
    """One server's port.

    :param reactor: also spawns processes.
    """

    log = Logger()
    capacity = 1
    starts_server = True

    def __init__(self, target: IHealthTarget, reactor: Any, settings: Settings) -> None:
        self.slots: dict[str, int] = {}
        self._target = target
        self._reactor = reactor
        self._settings = settings
        self._states = dict.fromkeys(settings.models, "unloaded")
        self._process: _Process | None = None
        self._changed: Callable[[], None] | None = None

    def models(self) -> Deferred[Mapping[str, str]]:
        """See :class:`llmgw.interfaces.IModelLoader`."""
        return succeed(dict(self._states))

    def load(self, model: str) -> Deferred[None]:
        """Start the server with ``model``, in place of the one that runs. Cancelling ends it."""
        return Deferred.fromCoroutine(self._load(model))

    def unload(self, model: str) -> Deferred[None]:
        """End the server if it runs ``model``."""
        process = self._process
        if process is None or process.model != model:
            return succeed(None)
        return self._end(process)

    def start(self, changed: Callable[[], None]) -> None:
        """Tell of a server that ends by itself."""
        self._changed = changed

    def stop(self) -> Deferred[None]:
        """End the server."""
        self._changed = None
        return succeed(None) if self._process is None else self._end(self._process)

    # --- inside ---

    async def _load(self, model: str) -> None:
        if model not in self._settings.models:
            raise cannot(model, "it is not among the models of the command")
        if self._process is not None:
            if self._process.model == model and self._states[model] == "loaded":
                return
            await self._end(self._process)
        if await self._answers() is not None:
            raise cannot(model, "another server listens on its port already")
        process = self._process = self._spawn(model)
        self._states[model] = "loading"
        try:
            await self._ready(process)
        except CancelledError:
            process.signal("KILL")
            raise
        except Exception:
            process.signal("KILL")
            if not process.gone:
                await process.ended
            self._states[model] = "failed"
            raise
        status, props = await self._props()
        slots = props.get("total_slots") if status == 200 and isinstance(props, Mapping) else None
        self.slots = {model: slots} if isinstance(slots, int) and slots > 0 else {}
        if not process.gone:
            self._states[model] = "loaded"

    async def _ready(self, process: _Process) -> None:
        left = max(1, round(self._settings.ready_s / LOOK_S))
        while not process.gone:
            if await self._answers() == 200 and not process.gone:
                return
            left -= 1
            if left <= 0:
                raise cannot(process.model, f"not ready after {self._settings.ready_s:g} s")
            await self._pause(process)
        raise cannot(process.model, process.why())

    async def _answers(self) -> int | None:
        """The status of ``/health``, ``None`` when nobody answers."""
        try:
            status, _ = await self._target.get("/health", ANSWER_S)
        except CancelledError:
            raise
        except Exception:
            return None
        return status

    async def _props(self) -> tuple[int, Any]:
        try:
            return await get_json(self._target, "/props", ANSWER_S)
        except CancelledError:
            raise
        except Exception:
            return 0, None

    def _pause(self, process: _Process) -> Deferred[None]:
        """A short while, or until the process ends."""
        pause: Deferred[None] = Deferred()
        call = self._reactor.callLater(LOOK_S, process.wake)
        process.waiting = pause

        def over(outcome: Any) -> Any:
            process.waiting = None
            if call.active():
                call.cancel()
            return outcome

        return pause.addBoth(over)

    def _spawn(self, model: str) -> _Process:
        settings, parts = self._settings, urlsplit(self._target.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        filled = {
            "{port}": str(port),
            "{host}": parts.hostname or "",
            "{model}": model,
            "{path}": settings.models[model],
        }
        process = _Process(model, self._target.id, self._process_ended)
        argv = [sys.executable, "-m", "llmgw.loading.bound", str(os.getpid())]
        argv += [_filled(word, filled) for word in settings.argv]
        self._reactor.spawnProcess(
            process, argv[0], argv, env={**os.environ, **settings.environment}, path=settings.directory
        )
        self.log.info("backend {backend}: starting {argv}", backend=self._target.id, argv=argv[4:])
        return process

    async def _finish(self, process: _Process) -> None:
        process.signal("TERM")
        killing = self._reactor.callLater(self._settings.stop_s, process.signal, "KILL")
        try:
            if not process.gone:
                await process.ended
        finally:
            if killing.active():
                killing.cancel()

    def _end(self, process: _Process) -> Deferred[None]:
        process.asked = True
        return Deferred.fromCoroutine(self._finish(process))

    def _process_ended(self, process: _Process) -> None:
        model = process.model
        if self._process is process:
            self._process = None
            self.slots = {}
        if process.asked:
            self._states[model] = "unloaded"
            self.log.info("backend {backend}: ended {model}", backend=self._target.id, model=model)
        else:
            self._states[model] = "failed"
            self.log.error(
                "backend {backend}: the server of {model} ended: {why}",
                backend=self._target.id,
                model=model,
                why=process.why(),
            )
        if self._changed is not None:
            self._changed()


class _Process(ProcessProtocol):
    """A server's process.

    :ivar asked: its end was wanted.
    :ivar ended: fires when it is gone; for one who waits.
    :ivar waiting: fired early when it ends.
    """

    log = Logger()

    def __init__(self, model: str, backend_id: str, on_end: Callable[[_Process], None]) -> None:
        self.model = model
        self.asked = False
        self.gone = False
        self.ended: Deferred[None] = Deferred()
        self.waiting: Deferred[None] | None = None
        self._backend_id = backend_id
        self._on_end = on_end
        self._rest = {1: b"", 2: b""}
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._code: int | None = None
        self._signal: int | None = None

    def connectionMade(self) -> None:
        self.transport.closeStdin()  # type: ignore[union-attr]

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        *lines, rest = (self._rest[childFD] + data).split(b"\n")
        self._rest[childFD] = rest[:LINE_BYTES]
        for line in lines:
            self._wrote(line)

    def processEnded(self, reason: Any) -> None:
        for rest in self._rest.values():
            self._wrote(rest)
        self._code = reason.value.exitCode
        self._signal = reason.value.signal
        self.gone = True
        self._on_end(self)
        self.wake()
        self.ended.callback(None)

    def wake(self) -> None:
        """End a pause."""
        if self.waiting is not None and not self.waiting.called:
            self.waiting.callback(None)

    def signal(self, name: str) -> None:
        """Send a signal; nothing happens when it is gone."""
        try:
            if self.transport is not None and not self.gone:
                self.transport.signalProcess(name)
        except ProcessExitedAlready:
            pass

    def why(self) -> str:
        """How it ended, with its last words."""
        how = f"exit code {self._code}" if self._signal is None else f"signal {self._signal}"
        return ": ".join([how, *([" | ".join(self._last)] if self._last else [])])

    def _wrote(self, line: bytes) -> None:
        text = "".join(
            sign if sign.isprintable() else " " for sign in line[:LINE_BYTES].decode("utf-8", "replace")
        )
        if text.strip():
            self._last.append(text.strip()[:200])
            self.log.info("{backend}: {line}", backend=self._backend_id, line=text)


def _filled(word: str, values: Mapping[str, str]) -> str:
    """Only our own names are filled in: other braces may be the command's."""
    for name, value in values.items():
        word = word.replace(name, value)
    return word


@implementer(IModelLoaderFactory)
class CommandFactory:
    """Options: ``command`` (array of words with ``{port}``, ``{host}``, ``{model}``, ``{path}``),
    ``models`` (table of names to files), ``ready_s`` (300), ``stop_s`` (10), ``directory``,
    ``environment`` (table)."""

    name = "command"
    description = "a server on this machine, started and ended by the gateway"
    contract = CONTRACT

    def build(self, options: Mapping[str, Any], target: IHealthTarget, reactor: IReactorTime) -> Command:
        """:raise ConfigError: options are wrong, or the backend is not on this machine."""
        read = Options(options)
        argv = read.take("command", [])
        if not _are_words(argv) or not argv:
            read.fault("command", "must be an array of words, the first of them the program")
            argv = ["false"]
        elif shutil.which(argv[0]) is None:
            read.fault("command", f"there is no program {argv[0]!r} that can be run")
        models = read.take("models", {})
        if not _is_text_table(models) or not models:
            read.fault("models", "must be a table of model names to files, and not empty")
            models = {}
        environment = read.take("environment", {})
        if not _is_text_table(environment):
            read.fault("environment", "must be a table of strings")
            environment = {}
        directory = read.take("directory")
        if directory is not None and not (isinstance(directory, str) and os.path.isdir(directory)):
            read.fault("directory", f"must be a directory, not {directory!r}")
            directory = None
        settings = Settings(
            tuple(argv),
            models,
            read.seconds("ready_s", 300.0),
            read.seconds("stop_s", 10.0),
            directory,
            environment,
        )
        if urlsplit(target.url).hostname not in LOCAL:
            read.fault(
                "plugin", "command: the backend's url must be on this machine, such as http://127.0.0.1:8081"
            )
        read.end()
        return Command(target, reactor, settings)


def _are_words(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(each, str) for each in value)
    )


def _is_text_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(each, str) for pair in value.items() for each in pair
    )
