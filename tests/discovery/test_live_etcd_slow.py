"""A minute of everything that can happen to etcd, and a cluster that loses members, under load."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Gateway, Scripted, chat_body, eventually, free_port, post
from real_etcd import Etcd

pytestmark = pytest.mark.slow

CONFIG = """
workers = {workers}
[router]
plugin = "round-robin"
[log]
access = "access.log"
[[discovery]]
plugin = "etcd"
endpoints = {urls}
timeout_s = 1.0
silence_s = 3.0
hold_down_s = 2.0
mass_hold_s = 20.0
"""
IDS = "abcde"


@pytest.fixture
def backends() -> Iterator[dict[str, Scripted]]:
    found = {id: Scripted() for id in IDS}
    yield found
    for each in found.values():
        each.close()


class Load:
    """Requests to each gateway, until it is over."""

    def __init__(self, *gateways: Gateway) -> None:
        self.statuses: list[int] = []
        self.bad: list[tuple[float, int, int]] = []
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in gateways]

    def _run(self, gateway: Gateway) -> None:
        while not self._over.is_set():
            try:
                self.statuses.append(gateway.ask(post(body=chat_body(stream=True))).status)
            except (OSError, AssertionError):
                self.statuses.append(0)
            if self.statuses[-1] != 200:
                self.bad.append((time.monotonic() - self._begun, gateway.port, self.statuses[-1]))
            time.sleep(0.01)

    def __enter__(self) -> Load:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join()


def ids(gateway: Gateway) -> set[str]:
    return {each["id"] for each in gateway.state["backends"] if not each["removed"]}


def start(folder: Path, workers: int, *urls: str) -> Gateway:
    folder.mkdir()
    return Gateway(folder, CONFIG.format(workers=workers, urls=list(urls)).replace("'", '"'))


def test_a_minute_of_faults_fails_no_request(
    etcd: Etcd, backends: dict[str, Scripted], tmp_path: Path
) -> None:
    dice = random.Random(7)

    def doc(id: str) -> dict[str, Any]:
        return {"url": backends[id].url, "models": ["m"], "max_connections": 50}

    def put_all() -> None:
        for id in IDS:
            etcd.put(f"/llmgw/{id}", doc(id))

    def crash() -> None:
        etcd.kill()
        time.sleep(dice.uniform(0, 2))
        etcd.start()

    def wipe() -> None:
        etcd.wipe()
        time.sleep(dice.uniform(0, 3))
        put_all()

    def hang() -> None:
        etcd.pause(True)
        time.sleep(dice.uniform(0, 5))
        etcd.pause(False)

    def empty() -> None:
        for id in IDS:
            etcd.delete(f"/llmgw/{id}")
        time.sleep(dice.uniform(0, 3))
        put_all()

    def flap() -> None:
        for _ in range(5):
            etcd.delete("/llmgw/a")
            etcd.put("/llmgw/a", doc("a"))

    def lose_history() -> None:
        etcd.kill()
        etcd.start()
        flap()
        etcd.compact()

    def garbage() -> None:
        etcd.put(
            "/llmgw/b", dice.choice(["", "{", "[]", '{"url": 7}', "\u0000", '{"url": "http://8.8.8.8"}'])
        )
        etcd.put("/llmgw/bad", "no json")

    faults = [crash, wipe, hang, empty, flap, lose_history, garbage]
    put_all()
    one, two = start(tmp_path / "one", 1, etcd.url), start(tmp_path / "two", 2, etcd.url)
    try:
        for gateway in (one, two):
            eventually(lambda gateway=gateway: ids(gateway) == set(IDS), 20)
        # Each worker has read etcd for itself: one that begins with an emptied store knows no better.
        # One serves when it knows of backends, and a second may take all requests before the other does.
        eventually(lambda: [each["state"] for each in two.state["workers"]] == ["serving"] * 2, 20)
        ask = post(body=chat_body())
        eventually(lambda: all(two.ask(ask).status == 200 for _ in range(30)), 20)
        done = []
        with Load(one, two) as load:
            end = time.monotonic() + 60
            while time.monotonic() < end or len(done) < len(faults):
                fault = faults[len(done) % len(faults)] if len(done) < len(faults) else dice.choice(faults)
                done.append(fault.__name__)
                fault()
                time.sleep(dice.uniform(0, 1))
                assert ids(one) >= set(IDS), done
            put_all()
            etcd.delete("/llmgw/bad")
            for gateway in (one, two):
                eventually(lambda gateway=gateway: not gateway.state["discovery"][0]["refused"], 30)
                eventually(lambda gateway=gateway: not gateway.state["discovery"][0]["held"], 30)
                assert ids(gateway) == set(IDS)
        assert not load.bad, (len(load.bad), load.bad[:3], load.bad[-3:], len(load.statuses), done)
        assert len(load.statuses) > 500
    finally:
        for gateway in (one, two):
            gateway.stop()
    for gateway in (one, two):
        assert "Traceback" not in gateway.log, gateway.log


def test_a_cluster_that_loses_the_member_that_is_asked(
    etcd_server: Callable[..., Etcd], backends: dict[str, Scripted], tmp_path: Path
) -> None:
    peers = {name: f"http://127.0.0.1:{free_port()}" for name in ("one", "two", "three")}
    members = [etcd_server(name=name, peers=peers) for name in peers]
    for member in members:
        member.start(wait=False)
    for member in members:
        eventually(member.is_up, 30)
    first, second, third = members

    def put(by: Etcd, id: str) -> None:
        document = {"url": backends[id].url, "models": ["m"], "max_connections": 50}
        eventually(lambda: _tried(lambda: by.put(f"/llmgw/{id}", document)), 20)

    put(first, "a")
    gateway = start(tmp_path / "gw", 1, *(member.url for member in members))
    try:
        eventually(lambda: ids(gateway) == {"a"}, 20)
        with Load(gateway) as load:
            first.kill()
            put(second, "b")
            eventually(lambda: ids(gateway) == {"a", "b"}, 20)
            # Without a majority nothing can be told, and nothing is lost.
            second.kill()
            eventually(lambda: not gateway.state["discovery"][0]["connected"], 30)
            assert ids(gateway) == {"a", "b"}
            first.start(wait=False)
            put(third, "c")
            eventually(lambda: ids(gateway) == {"a", "b", "c"}, 40)
        assert set(load.statuses) == {200}
    finally:
        gateway.stop()
    assert "Traceback" not in gateway.log


def _tried(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception:
        return None
