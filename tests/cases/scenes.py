"""A gateway before scripted backends, and looks at what a request left behind."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Answer,
    Client,
    Gateway,
    Line,
    Received,
    Script,
    Scripted,
    backend_table,
    chat_body,
    chunk,
    event,
    eventually,
    post,
)

DONE = b"data: [DONE]\n\n"
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":7,"total_tokens":18,'
    b'"prompt_tokens_details":{"cached_tokens":5}}}\n\n'
)
STEADY = """
[breaker]
fall = 100000
consecutive = 100000
ratio_min = 1000000
"""
"""Nothing that a test does to a backend takes it out."""

T = TypeVar("T")
R = TypeVar("R")

_ids = itertools.count(1)


def request_id(what: str = "case") -> str:
    """An id to find the access line by."""
    return f"{what}-{next(_ids)}"


def ask_stream(
    path: str = "/v1/chat/completions", *, id: str = "", headers: str = "", **fields: Any
) -> bytes:
    """A request for a stream."""
    named = f"x-request-id: {id}\r\n" if id else ""
    return post(path, chat_body(**{"stream": True, **fields}), headers=named + headers)


def ask_whole(path: str = "/v1/chat/completions", *, id: str = "", headers: str = "", **fields: Any) -> bytes:
    """A request for one JSON object."""
    named = f"x-request-id: {id}\r\n" if id else ""
    return post(path, chat_body(**fields), headers=named + headers)


def streaming(*pieces: bytes, end: bytes = LAST_CHUNK, gap_s: float = 0.0, head: bytes = SSE_HEAD) -> Script:
    """A script: a stream of ``pieces``, a chunk each, then ``end``."""

    def script(line: Line, request: Received) -> None:
        line.send(head)
        line.send(*[chunk(piece) for piece in pieces], gap_s=gap_s)
        if end:
            line.send(end)

    return script


def by_case(scripts: Mapping[str, Script]) -> Script:
    """A script: the one that the request's ``case`` names, for cases that run side by side."""
    return lambda line, request: scripts[request.json["case"]](line, request)


def side_by_side(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """``call`` with each of ``items``, all at once; the results in order."""
    todo = list(items)
    with ThreadPoolExecutor(len(todo)) as pool:
        return list(pool.map(call, todo))


def silent(line: Line, request: Received) -> None:
    """A script: nothing, until the gateway closes."""
    line.wait_closed(30.0)


def answered(response: bytes) -> Script:
    """A script: these bytes."""
    return lambda line, request: line.send(response)


@contextlib.contextmanager
def nobody_accepts() -> Iterator[str]:
    """A URL where a connection neither comes about nor is refused: the queue of its listener is full."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}"


class Scene:
    """A gateway and its backends.

    :ivar backends: by id.
    """

    def __init__(self, gateway: Gateway, backends: dict[str, Scripted]) -> None:
        self.gateway = gateway
        self.backends = backends
        self._expected: list[tuple[str, dict[str, Any]]] = []

    @property
    def backend(self) -> Scripted:
        """The first one."""
        return next(iter(self.backends.values()))

    def client(self, timeout_s: float = 10.0) -> Client:
        return self.gateway.client(timeout_s)

    def ask(self, request: bytes) -> Answer:
        return self.gateway.ask(request)

    def line(self, id: str) -> dict[str, Any]:
        """The access line of a request; it is written within a second."""
        found: dict[str, Any] = eventually(
            lambda: next((line for line in self.gateway.access if line["id"] == id), None)
        )
        return found

    def expect(self, id: str, **fields: Any) -> None:
        """The request's access line will have ``fields``; looked at when the gateway has ended,
        since lines are written once a second."""
        self._expected.append((id, fields))

    def check_lines(self) -> None:
        """Compare what :meth:`expect` was told."""
        lines = {line["id"]: line for line in self.gateway.access}
        for id, fields in self._expected:
            found = {name: lines[id].get(name) for name in fields}
            assert found == fields, f"{id}: {lines[id]}"

    def settled(self, within_s: float = 3.0) -> None:
        """Nothing is in flight, soon."""
        eventually(self.gateway.is_idle, within_s)

    def member(self, id: str) -> dict[str, Any]:
        """A backend as ``/api/state`` shows it."""
        found: dict[str, Any] = next(each for each in self.gateway.state["backends"] if each["id"] == id)
        return found

    def count(self, name: str) -> float:
        """The sum of a counter's series."""
        lines = self.gateway.admin("/metrics")[1].decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name
        )

    def play(self, script: Script) -> None:
        """One script for all of them."""
        for backend in self.backends.values():
            backend.play(script)

    def drop_kept(self) -> None:
        """Close the connections that the gateway keeps."""
        for backend in self.backends.values():
            for line in list(backend.open_lines):
                line.close()
        eventually(lambda: not any(each["idle_connections"] for each in self.gateway.state["backends"]))

    def asked(self) -> dict[str, int]:
        """How many requests each backend got, those without left out."""
        return {id: len(each.requests) for id, each in self.backends.items() if each.requests}

    def memory(self, what: str) -> float:
        """MiB of the gateway: ``VmRSS`` now, or ``VmHWM`` at most since :meth:`forget_peak`."""
        for line in Path(f"/proc/{self.gateway.process.pid}/status").read_text().splitlines():
            if line.startswith(what):
                return int(line.split()[1]) / 1024
        raise AssertionError(what)

    def forget_peak(self) -> None:
        """Begin a new ``VmHWM``."""
        Path(f"/proc/{self.gateway.process.pid}/clear_refs").write_text("5")


@contextlib.contextmanager
def scene(folder: Path, config: str = STEADY, *, tables: str = "", **backends: str) -> Iterator[Scene]:
    """A gateway before one scripted backend for each of ``backends``: id to the lines of its table.

    At the end nothing may be in flight, and no error of ours in the log.

    :param tables: more of the configuration, such as a backend that is none.
    """
    scripted = {id: Scripted() for id in backends}
    text = config
    if "[log]" not in text:
        text += '\n[log]\naccess = "access.log"\n'
    for id, more in backends.items():
        text += backend_table(scripted[id], id, more)
    text += tables
    gateway = Gateway(folder, text)
    here = Scene(gateway, scripted)
    try:
        yield here
        eventually(gateway.is_idle)
    finally:
        gateway.stop()
        for backend in scripted.values():
            backend.close()
    here.check_lines()
    for word in ("Traceback", "Unhandled"):
        assert word not in gateway.log, gateway.log
    faults = [error for backend in scripted.values() for error in backend.errors]
    assert not faults, faults


def elapsed_since(begun_s: float) -> float:
    return time.monotonic() - begun_s


__all__ = [
    "DONE",
    "LAST_CHUNK",
    "SSE_HEAD",
    "STEADY",
    "STOP",
    "USAGE",
    "Answer",
    "Client",
    "Line",
    "Received",
    "Scene",
    "Script",
    "Scripted",
    "answered",
    "ask_stream",
    "ask_whole",
    "by_case",
    "chunk",
    "elapsed_since",
    "event",
    "eventually",
    "nobody_accepts",
    "post",
    "request_id",
    "scene",
    "side_by_side",
    "silent",
    "streaming",
]
