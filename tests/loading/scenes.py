"""Gateways before servers in router mode, and many clients at once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from harness import Answer, Gateway, Scripted, chat_body, eventually, post

QUICK = """
[loading]
interval_s = 0.5
min_stay_s = {min_stay_s}
backoff_s = {backoff_s}
{loading}
[hold]
{hold}
[drain]
lame_duck_s = 0
finish_s = 1.0
[log]
access = "access.log"
"""


class Somewhere(Protocol):
    """Where a server listens."""

    url: str


@contextlib.contextmanager
def gateway_before(
    folder: Path,
    *servers: Somewhere,
    min_stay_s: float = 0.0,
    backoff_s: float = 10.0,
    loading: str = "",
    hold: str = "",
    config: str = "",
    backend: str = 'loader = "llamacpp-router"',
) -> Iterator[Gateway]:
    """At its end nobody is held, nothing is counted, and no error of ours is in the log."""
    folder.mkdir(exist_ok=True)
    text = config + QUICK.format(min_stay_s=min_stay_s, backoff_s=backoff_s, loading=loading, hold=hold)
    for number, server in enumerate(servers):
        text += f'[[backends]]\nid = "b{number}"\nurl = "{server.url}"\n{backend}\n'
    gateway = Gateway(folder, text)
    try:
        yield gateway
        if gateway.process.poll() is None:
            eventually(gateway.is_idle)
            assert gateway.state["holding"] == {}
            assert gateway.state["held_bytes"] == 0
    finally:
        gateway.stop()
    for word in ("Traceback", "Unhandled"):
        assert word not in gateway.log, gateway.log


@contextlib.contextmanager
def closing(*servers: Scripted) -> Iterator[None]:
    """Servers that listen no more afterwards, and met nothing they did not expect."""
    try:
        yield
    finally:
        for server in servers:
            server.close()
    for server in servers:
        assert not server.errors, server.errors


class Crowd:
    """Clients, each on a connection of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(64)

    def ask(self, gateway: Gateway, model: str, headers: str = "", **fields: Any) -> Future[Answer]:
        def asking() -> Answer:
            with gateway.client(60.0) as client:
                client.send(post(body=chat_body(model, **fields), headers=headers))
                return client.read_answer()

        return self._pool.submit(asking)


def statuses(asked: list[Future[Answer]], within_s: float = 60.0) -> Counter[int]:
    """How the answers came out."""
    return Counter(each.result(within_s).status for each in asked)


def held(gateway: Gateway, model: str = "m") -> int:
    """How many are held for a model."""
    return int(gateway.state["holding"].get(model, 0))


def states(gateway: Gateway, backend_id: str = "b0") -> dict[str, str]:
    """Models of a backend to their states, as ``/api/state`` tells them."""
    for each in gateway.state["loading"]["backends"]:
        if each["backend"] == backend_id:
            return {model: one["state"] for model, one in each["models"].items()}
    return {}


def metrics(gateway: Gateway) -> dict[str, float]:
    """``/metrics``: name with labels to value."""
    text = gateway.admin("/metrics")[1].decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}
