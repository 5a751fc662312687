"""What a llama-server in router mode does with its models, in the very words of b11434.

:class:`RouterBrain` only decides; :class:`RouterServer` is one that listens, and
``tests/loading`` asks it on a clock of the test's.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from harness import Line, Received, Scripted, answer_completion, chunk, json_response

Said = tuple[int, Any]

NOTICED_S = 0.1
_META = {"n_ctx": 1024, "n_ctx_train": 32_768, "n_params": 3_215_744, "size": 6_440_448}


class RouterBrain:
    """
    :param most: ``--models-max``; 0 is no limit.
    :param load_s: seconds that a load takes, for all models or by name.
    :param broken: models whose file cannot be loaded.
    :param autoload: a chat may cause a load; false is ``--no-models-autoload``.
    :ivar undone: models that are unloaded at the end of their next load, as by somebody else.
    :ivar loads: every load begun, in order; ``unloads`` likewise.
    :ivar evicted: what a full server threw out by itself.
    :ivar busy: requests at work by model.
    """

    def __init__(
        self,
        *models: str,
        most: int = 4,
        load_s: float | dict[str, float] = 0.2,
        broken: Iterable[str] = (),
        slots: int = 2,
        autoload: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models = list(models)
        self.most = most
        self.load_s = load_s
        self.broken = set(broken)
        self.slots = slots
        self.autoload = autoload
        self.undone: set[str] = set()
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.evicted: list[str] = []
        self.busy: dict[str, int] = dict.fromkeys(models, 0)
        self.served: dict[str, int] = dict.fromkeys(models, 0)
        self.most_busy: dict[str, int] = dict.fromkeys(models, 0)
        self.most_loaded = 0
        self.lock = threading.RLock()
        self._clock = clock
        self._states = dict.fromkeys(models, "unloaded")
        self._ready_s: dict[str, float] = {}
        self._failed: set[str] = set()
        self._dead_s: dict[str, float] = {}
        self._used: dict[str, float] = {}

    def state(self, model: str) -> str:
        """As ``status.value``."""
        with self.lock:
            if model in self._dead_s:
                if self._clock() >= self._dead_s[model]:
                    del self._dead_s[model]
                    self._states[model] = "unloaded"
                    self._failed.add(model)
            elif self._states[model] == "loading" and self._clock() >= self._ready_s[model]:
                if model in self.broken:
                    self._states[model] = "unloaded"
                    self._failed.add(model)
                elif model in self.undone:
                    self.undone.discard(model)
                    self._states[model] = "unloaded"
                else:
                    self._states[model] = "loaded"
            self.most_loaded = max(self.most_loaded, sum(s == "loaded" for s in self._states.values()))
            return self._states[model]

    def running(self) -> list[str]:
        with self.lock:
            return [model for model in self.models if self.state(model) != "unloaded"]

    def load(self, model: str) -> Said:
        with self.lock:
            if model not in self.models:
                return _error(404, "File Not Found", "not_found_error")
            if self.state(model) != "unloaded":
                return _error(400, "model is already running")
            running = self.running()
            if self.most and len(running) >= self.most:
                idle = [each for each in running if self._states[each] == "loaded"]
                if not idle:
                    return _error(500, "model limit reached, try again later", "server_error")
                gone = min(idle, key=lambda each: self._used.get(each, 0.0))
                self.evicted.append(gone)
                self._states[gone] = "unloaded"
            self.loads.append(model)
            self._failed.discard(model)
            self._states[model] = "loading"
            took_s = self.load_s[model] if isinstance(self.load_s, dict) else self.load_s
            self._ready_s[model] = self._clock() + took_s
            return 200, {"success": True}

    def unload(self, model: str) -> Said:
        with self.lock:
            if model not in self.models:
                return _error(404, "File Not Found", "not_found_error")
            if self.state(model) == "unloaded":
                return _error(400, "model is not running")
            self.unloads.append(model)
            if self.state(model) == "loading":
                self._failed.add(model)  # the process is ended in the middle of it, with status 1
            self._states[model] = "unloaded"
            return 200, {"success": True}

    def crash(self, model: str) -> None:
        """The model's process is killed, which the server takes a moment to notice."""
        with self.lock:
            assert self.state(model) != "unloaded"
            self._dead_s[model] = self._clock() + NOTICED_S

    def end_loads(self) -> None:
        """What is being loaded is there now."""
        with self.lock:
            self._ready_s = dict.fromkeys(self._ready_s, self._clock())

    def restart(self) -> None:
        """As after a crash: nothing is in memory."""
        with self.lock:
            self._states = dict.fromkeys(self.models, "unloaded")
            self._failed.clear()

    def listed(self) -> Any:
        """``GET /models``."""
        data = []
        for model in self.models:
            value = self.state(model)
            status: dict[str, Any] = {
                "value": value,
                "args": self._args(model, 0 if value == "unloaded" else 41234),
                "preset": f"[{model}]\nctx-size = 2048\nmodel = /models/{model}.gguf\n\n",
            }
            if model in self._failed:
                status |= {"failed": True, "exit_code": 1}
            data.append(
                {
                    "id": model,
                    "aliases": [],
                    "tags": [],
                    "object": "model",
                    "owned_by": "llamacpp",
                    "created": 1_700_000_000,
                    "status": status,
                    "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
                    "source": "models_dir",
                    "can_remove": False,
                }
                | ({"meta": _META} if value == "loaded" else {})
            )
        return {"data": data, "object": "list"}

    def answer(self, method: str, target: str, body: bytes = b"") -> Said | None:
        """What is said to the questions of the control plane; ``None`` for all others."""
        parts = urlsplit(target)
        model = parse_qs(parts.query).get("model", [""])[0]
        if method == "POST":
            if parts.path not in ("/models/load", "/models/unload"):
                return None
            name = json.loads(body)["model"]
            return self.load(name) if parts.path == "/models/load" else self.unload(name)
        if parts.path in ("/models", "/v1/models"):
            return 200, self.listed()
        if parts.path == "/health":
            return 200, {"status": "ok"}
        if parts.path == "/props" and not model:
            return 200, {"role": "router", "max_instances": self.most, "models_autoload": self.autoload}
        if parts.path in ("/slots", "/metrics", "/props"):
            if model not in self.models:
                return _error(400, "model name is missing from the request")
            if self.state(model) != "loaded":
                return _error(400, "model is not loaded")
            if parts.path == "/props":
                return 200, {"total_slots": self.slots, "default_generation_settings": {"n_ctx": 2048}}
            with self.lock:
                busy = self.busy[model]
            return 200, [{"id": n, "n_ctx": 2048, "is_processing": n < busy} for n in range(self.slots)]
        return _error(404, "File Not Found", "not_found_error")

    def _args(self, model: str, port: int) -> list[str]:
        own = ["--port", str(port), "--alias", model, "--model", f"/models/{model}.gguf"]
        return ["llama-server", "--host", "127.0.0.1", "--ctx-size", "2048", *own]

    # --- requests ---

    def enter(self, model: str) -> Said | None:
        """A chat begins; ``None`` when the model is there, which may take its load."""
        if model not in self.models:
            return _error(400, f"model '{model}' not found")
        if self.state(model) == "unloaded":
            if not self.autoload:
                return _error(400, "model is not loaded")
            self.load(model)
        while self.state(model) == "loading":
            time.sleep(0.01)
        if self.state(model) == "unloaded":
            return _error(500, f"model name={model} failed to load", "server_error")
        if model in self._dead_s:
            return 500, b"proxy error: Failed to read connection"
        with self.lock:
            self._used[model] = self._clock()
            self.busy[model] += 1
            self.most_busy[model] = max(self.most_busy[model], self.busy[model])
        return None

    def leave(self, model: str) -> None:
        with self.lock:
            self.busy[model] -= 1
            self.served[model] += 1


def _error(status: int, message: str, kind: str = "invalid_request_error") -> Said:
    return status, {"error": {"message": message, "type": kind, "code": status}}


class _Probes(dict[str, bytes]):
    """Answers to the probes of the harness, which go by target."""

    def __init__(self, brain: RouterBrain) -> None:
        super().__init__()
        self._brain = brain

    def get(self, target: str, default: Any = None) -> Any:
        said = self._brain.answer("GET", target)
        return default if said is None else json_response(said[1], said[0])


class RouterServer(Scripted):
    """One that listens.

    :param serve_s: seconds that a chat takes.
    :param events: it has ``/models/sse``.
    :ivar held: cleared, chats do not end.
    :ivar asked: what came for the control plane.
    """

    def __init__(self, brain: RouterBrain, *, serve_s: float = 0.0, events: bool = False) -> None:
        self.brain = brain
        self.serve_s = serve_s
        self.events = events
        self.asked: list[str] = []
        self.held = threading.Event()
        self.held.set()
        super().__init__(self._play)
        self.probes = _Probes(brain)

    def _play(self, line: Line, request: Received) -> None:
        if request.target.startswith("/models"):
            self.asked.append(f"{request.method} {request.target}")
        if request.target == "/models/sse" and self.events:
            self._tell_events(line)
            return
        said = self.brain.answer(request.method, request.target, request.body)
        if said is None:
            said = self.brain.enter(request.json.get("model", ""))
        else:
            line.send(json_response(said[1], said[0]))
            return
        if said is not None:
            line.send(json_response(said[1], said[0]))
            return
        try:
            time.sleep(self.serve_s)
            self.held.wait(30.0)
            if not self.answer(line, request):
                answer_completion(line, request)
        finally:
            self.brain.leave(request.json["model"])

    def answer(self, line: Line, request: Received) -> bool:
        """Another answer than the usual one to a chat, for subclasses. :return: there was one."""
        return False

    def _tell_events(self, line: Line) -> None:
        line.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        told: dict[str, str] = {}
        while True:
            for model in self.brain.models:
                value = self.brain.state(model)
                if told.setdefault(model, value) != value:
                    told[model] = value
                    event = {"model": model, "event": "status_change", "data": {"status": value}}
                    line.send(chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
            time.sleep(0.01)
