"""What a request took is free as soon as it is over, without waiting for the garbage collector.

A ring of references keeps all that hangs on it until the next collection, which
comes after thousands of requests: that is memory, and caches that are never warm.
"""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import issue
from harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Gateway,
    Line,
    Received,
    Scripted,
    TlsClient,
    answer_completion,
    backend_table,
    chat_body,
    chunk,
    event,
    eventually,
    free_port,
    json_response,
    post,
)

TIMES = 5
OTHERS = ("llmgw.health.", "llmgw.wire.pool._Connector")
"""Probes, which are few; and what Twisted's connector holds, which is in a ring with its transport."""
COLLECTOR = """
import gc, os, signal

def look(*_):
    path = os.environ["GARBAGE"]
    gc.collect()
    found = sorted({f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage})
    gc.garbage.clear()
    with open(path + ".new", "w") as file:
        file.write(repr(found))
    os.rename(path + ".new", path)
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)

signal.signal(signal.SIGRTMIN, look)
"""
"""For the gateway's process: on a signal, write the types of what only the collector finds."""


class Here:
    """A gateway that tells what it leaves to the collector."""

    def __init__(self, folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(COLLECTOR)
        self.told = folder / "garbage"
        files = issue(folder)
        self.port, self.tls_port = free_port(), free_port()
        self.backends = {"plain": Scripted(), "llama": Scripted()}
        config = (
            f'listen = ["tcp:{self.port}:interface=127.0.0.1", '
            f'"llmtls:tcp:{self.tls_port}:interface=127.0.0.1:privateKey={files.key}:'
            f'certKey={files.certificate}"]\n'
        )
        for name, kind in (("plain", "openai"), ("llama", "llama-server")):
            config += backend_table(self.backends[name], name, f'models = ["{name}"]\nkind = "{kind}"')
        config += f'[[backends]]\nid = "gone"\nurl = "http://127.0.0.1:{free_port()}"\nmodels = ["plain"]\n'
        environment = {"PYTHONPATH": str(folder), "GARBAGE": str(self.told)}
        self.gateway = Gateway(folder, config, port=self.port, environment=environment)

    def play(self, script: Callable[[Line, Received], None]) -> None:
        for backend in self.backends.values():
            backend.play(script)

    def left(self) -> list[str]:
        """Types of ours that only the collector has found since the last look."""
        eventually(self.gateway.is_idle)
        self.told.unlink(missing_ok=True)
        os.kill(self.gateway.process.pid, signal.SIGRTMIN)
        eventually(self.told.exists)
        found: list[str] = ast.literal_eval(self.told.read_text())
        return [name for name in found if name.startswith("llmgw.") and not name.startswith(OTHERS)]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    here = Here(tmp_path_factory.mktemp("garbage"))
    try:
        yield here
    finally:
        here.gateway.stop()
    assert "Traceback" not in here.gateway.log, here.gateway.log


def whole(line: Line, request: Received) -> None:
    """A stream in pieces."""
    if not request.json.get("stream"):
        answer_completion(line, request)
        return
    pieces = [chunk(event(word)) for word in ("one", "two", "three")]
    line.send(SSE_HEAD, *pieces, chunk(b"data: [DONE]\n\n") + LAST_CHUNK, gap_s=0.01)


def cut(line: Line, request: Received) -> None:
    """A stream that ends in the middle."""
    line.send(SSE_HEAD, chunk(event("one")), chunk(event("two")), gap_s=0.01)
    line.reset()


def refused(line: Line, request: Received) -> None:
    line.send(json_response({"error": {"message": "no"}}, 500))


def stream(model: str = "plain") -> bytes:
    return post(body=chat_body(model, stream=True))


def ask_on_one(here: Here, request: bytes) -> None:
    with here.gateway.client() as client:
        for _ in range(TIMES):
            client.send(request)
            if not client.read_answer().clean:
                return  # and the connection is closed


def ask_on_new_ones(here: Here, request: bytes) -> None:
    for _ in range(TIMES):
        here.gateway.ask(request)


def ask_by_tls(here: Here, request: bytes) -> None:
    for _ in range(TIMES):
        with TlsClient(here.tls_port) as client:
            client.send(request)
            client.read_answer()


@pytest.mark.parametrize("ask", [ask_on_one, ask_on_new_ones, ask_by_tls])
@pytest.mark.parametrize(
    ("script", "request_"),
    [
        pytest.param(whole, post(body=chat_body("plain")), id="an answer"),
        pytest.param(whole, stream(), id="a stream"),
        pytest.param(whole, post(body=chat_body("llama")), id="an assembled answer"),
        pytest.param(cut, stream(), id="a cut stream"),
        pytest.param(refused, stream(), id="a backend's error"),
        pytest.param(whole, stream("none"), id="no such model"),
        pytest.param(whole, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", id="health"),
    ],
)
def test_a_request_leaves_nothing(
    here: Here,
    ask: Callable[[Here, bytes], None],
    script: Callable[[Line, Received], None],
    request_: bytes,
) -> None:
    here.play(script)
    ask(here, request_)
    here.left()
    ask(here, request_)
    assert here.left() == []


@pytest.mark.parametrize(
    "request_", [post(body=b"{"), b"GET / HTTP/9\r\n\r\n", b"\0" * 20, post(length=99)], ids=repr
)
def test_nor_does_a_refusal(here: Here, request_: bytes) -> None:
    def ask() -> None:
        for _ in range(TIMES):
            with here.gateway.client() as client:
                client.send(request_)
                client.sock.settimeout(0.2)
                client.is_closed(0.2)

    ask()
    here.left()
    ask()
    assert here.left() == []


@pytest.mark.parametrize("request_", [stream(), stream("llama"), post(body=chat_body("llama"))], ids=repr)
def test_nor_does_a_client_that_leaves(here: Here, request_: bytes) -> None:
    """Before the head, and in the middle of a stream."""

    def hang(line: Line, request: Received) -> None:
        line.read_request()

    def begin(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("one")), chunk(event("two")), gap_s=0.01)
        line.read_request()

    def ask() -> None:
        for script in (hang, begin):
            here.play(script)
            for _ in range(TIMES):
                with here.gateway.client() as client:
                    client.send(request_)
                    eventually(lambda: not here.gateway.is_idle())
                    if script is begin and b'"stream"' in request_ and b"plain" in request_:
                        client.read_until(b"two")

    ask()
    here.left()
    ask()
    assert here.left() == []
