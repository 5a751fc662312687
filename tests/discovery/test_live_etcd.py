"""A real gateway and a real etcd: backends come, go and flap, and etcd is killed under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Gateway,
    Line,
    Received,
    Scripted,
    chat_body,
    chunk,
    event,
    eventually,
    post,
)
from real_etcd import Etcd

CONFIG = """
[router]
plugin = "round-robin"
[log]
access = "access.log"
[[discovery]]
plugin = "etcd"
endpoints = ["{url}"]
prefix = "/llmgw/"
hold_down_s = {hold_s}
mass_hold_s = 5.0
"""


@pytest.fixture
def backends() -> Iterator[list[Scripted]]:
    found = [Scripted() for _ in range(3)]
    yield found
    for each in found:
        each.close()


@pytest.fixture
def gateway(tmp_path: Path, etcd: Etcd, backends: list[Scripted], request: Any) -> Iterator[Gateway]:
    """Before the first two of the backends, of which etcd tells."""
    for id, backend in zip("ab", backends, strict=False):
        etcd.put(f"/llmgw/{id}", doc(backend))
    hold_s = getattr(request, "param", 0.5)
    found = Gateway(tmp_path, CONFIG.format(url=etcd.url, hold_s=hold_s))
    yield found
    found.stop()
    assert "Traceback" not in found.log, found.log


def doc(backend: Scripted, **more: Any) -> dict[str, Any]:
    return {"url": backend.url, "models": ["m"], "max_connections": 50, **more}


def ids(gateway: Gateway) -> set[str]:
    return {each["id"] for each in gateway.state["backends"] if not each["removed"]}


class Load:
    """Requests one after the other, until it is over."""

    def __init__(self, gateway: Gateway) -> None:
        self.statuses: list[int] = []
        self._gateway = gateway
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.statuses.append(self._gateway.ask(post(body=chat_body(stream=True))).status)
            except OSError:
                self.statuses.append(0)
            time.sleep(0.005)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_etcd_killed_under_load_fails_no_request_and_loses_no_backend(
    etcd: Etcd, gateway: Gateway, backends: list[Scripted]
) -> None:
    eventually(lambda: ids(gateway) == {"a", "b"})
    with Load(gateway) as load:
        etcd.kill()
        eventually(lambda: not gateway.state["discovery"][0]["connected"])
        seen = len(load.statuses)
        eventually(lambda: len(load.statuses) > seen + 50)
        assert ids(gateway) == {"a", "b"}
        assert gateway.admin("/readyz")[0] == 200
        etcd.start()
        etcd.put("/llmgw/c", doc(backends[2]))
        eventually(lambda: ids(gateway) == {"a", "b", "c"}, 20)
        eventually(lambda: backends[2].requests)
        # Everything is gone at a time: for now nothing is believed.
        etcd.wipe()
        eventually(lambda: len(gateway.state["discovery"][0]["held"]) == 3, 20)
        seen = len(load.statuses)
        eventually(lambda: len(load.statuses) > seen + 20)
        assert ids(gateway) == {"a", "b", "c"}
        for id, backend in zip("abc", backends, strict=True):
            etcd.put(f"/llmgw/{id}", doc(backend))
        eventually(lambda: not gateway.state["discovery"][0]["held"])
    assert set(load.statuses) == {200}
    assert gateway.state["discovery"][0]["error"] == ""


def test_a_lease_that_ends_drains_its_backend(etcd: Etcd, gateway: Gateway, backends: list[Scripted]) -> None:
    go_on = threading.Event()

    def slowly(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("one")))
        go_on.wait(20)
        line.send(chunk(event("two")), chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    backends[2].play(slowly)
    etcd.put("/llmgw/c", doc(backends[2], models=["only-c"]), etcd.lease(2))
    eventually(lambda: "c" in ids(gateway))
    with gateway.client(20) as client:
        client.send(post(body=chat_body("only-c", stream=True)))
        client.read_until(b"one")
        eventually(lambda: ids(gateway) == {"a", "b"}, 20)
        assert gateway.ask(post(body=chat_body("only-c"))).status == 404
        go_on.set()
        client.read_until(b"[DONE]\n\n")
    eventually(lambda: {each["id"] for each in gateway.state["backends"]} == {"a", "b"})


@pytest.mark.parametrize("gateway", [3.0], indirect=True)
def test_a_registration_that_flaps_does_not_flap_traffic(
    etcd: Etcd, gateway: Gateway, backends: list[Scripted]
) -> None:
    etcd.put("/llmgw/c", doc(backends[2]))
    eventually(lambda: ids(gateway) == {"a", "b", "c"})
    with Load(gateway) as load:
        for _ in range(10):
            etcd.delete("/llmgw/b")
            time.sleep(0.05)
            assert ids(gateway) == {"a", "b", "c"}
            etcd.put("/llmgw/b", doc(backends[1]))
            time.sleep(0.05)
    assert set(load.statuses) == {200}
    assert "removed" not in gateway.log


def test_bad_documents_are_told_and_ignored_and_a_change_takes_effect(
    etcd: Etcd, gateway: Gateway, backends: list[Scripted]
) -> None:
    etcd.put("/llmgw/bad", "no json")
    etcd.put("/llmgw/far", {"url": "http://169.254.169.254"})
    etcd.put("/llmgw/a", doc(backends[0], weight=7, labels={"zone": "x"}))
    eventually(lambda: len(gateway.state["discovery"][0]["refused"]) == 2)
    refused = {each["key"]: each["why"] for each in gateway.state["discovery"][0]["refused"]}
    assert set(refused) == {"/llmgw/bad", "/llmgw/far"}

    def a() -> Any:
        [found] = [each for each in gateway.state["backends"] if each["id"] == "a"]
        return found

    eventually(lambda: a()["weight"] == 7.0)
    assert (a()["weight"], a()["labels"], a()["source"]) == (7.0, {"zone": "x"}, "etcd")
    assert ids(gateway) == {"a", "b"}
    eventually(lambda: "/llmgw/far ignored" in gateway.log)
