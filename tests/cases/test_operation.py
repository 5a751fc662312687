"""Section 9 of the cases: plugins that misbehave, a disk that is full, keys that must not be seen."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import strange_plugins
from harness import (
    TWISTD,
    Gateway,
    Scripted,
    backend_table,
    eventually,
    post,
)
from twisted.internet.task import Clock

from cases.scenes import ask_stream, ask_whole
from llmgw.gateway.access_log import AccessLog

MISBEHAVIOURS = (
    "raise",
    "exit",
    "base",
    "fail-base",
    "cancelled",
    "nonsense",
    "never",
    "never-cancelled",
    "twice",
    "block",
    "fail",
    "coroutine",
)


_running: list[Gateway] = []


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    """A test that fails leaves no process behind."""
    yield
    while _running:
        _running.pop().stop()


class Strange:
    """One gateway, tried with one misbehaving plugin after the other."""

    def __init__(self, folder: Path, tables: str = "") -> None:
        self.backend = Scripted()
        self.gateway = Gateway(
            folder,
            "rate_limits = [{ requests_per_minute = 100000 }]\n"
            # One that blocks makes the loop late, which is overload, and not what is tested here.
            "overload = { shed_lag_s = 60, refuse_lag_s = 60, close_lag_s = 60 }\n"
            + tables
            + backend_table(self.backend, more='models = ["m"]\nmax_connections = 50'),
            environment=strange_plugins.installed(folder),
        )
        _running.append(self.gateway)
        self.plain = self.gateway.config_path.read_text()

    def reload(self, table: str) -> None:
        self.gateway.config_path.write_text(self.plain + table)
        status, body = self.gateway.admin("/api/reload", "POST")
        assert status == 200, body

    def statuses(self, many: int = 4) -> set[int]:
        with ThreadPoolExecutor(many) as pool:
            requests = [ask_stream(), ask_whole()] * (many // 2)
            return {answer.status for answer in pool.map(self.gateway.ask, requests)}

    def end(self) -> None:
        eventually(self.gateway.is_idle)
        assert self.gateway.stop() == 0
        self.backend.close()
        for word in ("Unhandled", "never awaited"):
            assert word not in self.gateway.log, self.gateway.log


def test_s_plg_1_routers(tmp_path: Path) -> None:
    """Least connections take the place of a router that fails; learning that fails costs nothing."""
    strange = Strange(tmp_path)
    for does in MISBEHAVIOURS:  # a Deferred is nonsense here, whatever becomes of it
        strange.reload(f'[router]\nplugin = "strange"\ndoes = "{does}"\n')
        assert (does, strange.statuses()) == (does, {200})
    strange.reload('[router]\nplugin = "least-connections"\n')
    assert strange.statuses() == {200}
    assert strange.gateway.state["backends"][0]["failure_streak"] == 0
    assert "the router plugin raised" in strange.gateway.log
    strange.end()


@pytest.mark.parametrize("does", MISBEHAVIOURS)
def test_s_plg_1_rate_limiters(tmp_path: Path, does: str) -> None:
    """A limiter that fails lets requests pass, and is told of; it never holds one up for long."""
    strange = Strange(tmp_path, f'[rate_limiter]\nplugin = "strange"\ndoes = "{does}"\n')
    assert strange.statuses() == {200}
    passed = "llmgw_limiter_passed 0\n" not in strange.gateway.admin("/metrics")[1].decode()
    assert passed == (does not in ("twice", "block"))
    strange.end()  # its gauges and its stop misbehave too


@pytest.mark.parametrize(
    ("does", "words"), [("gauges-odd", "no lawful name"), ("gauges-text", "plugin raised")]
)
def test_a_limiters_odd_gauges_cost_no_scrape(tmp_path: Path, does: str, words: str) -> None:
    strange = Strange(tmp_path, f'[rate_limiter]\nplugin = "strange"\ndoes = "{does}"\n')
    status, text = strange.gateway.admin("/metrics")
    assert status == 200
    assert b"odd name" not in text
    assert (b"# HELP llmgw_strange Of two lines.\n# TYPE llmgw_strange gauge\nllmgw_strange 2\n" in text) == (
        does == "gauges-odd"
    )
    assert words in strange.gateway.log
    strange.end()


def test_s_plg_1_health_sources(tmp_path: Path) -> None:
    """A source that fails leaves its backend as it was; the start, and the end, are not held up."""
    strange = Strange(tmp_path)
    for does in MISBEHAVIOURS:  # a Deferred is nonsense here, whatever becomes of it
        strange.reload(f'[[health]]\nplugin = "strange"\ndoes = "{does}"\n')
        assert (does, strange.statuses()) == (does, {200})
    assert "a health source of backend b did not start" in strange.gateway.log
    strange.end()
    one = Strange(tmp_path, '[[health]]\nplugin = "strange"\ndoes = "raise"\n')
    assert one.statuses() == {200}
    one.end()


def test_a_router_with_a_choice_of_wrong_types_is_replaced_and_spoils_no_page_and_no_log(
    tmp_path: Path,
) -> None:
    strange = Strange(tmp_path, '[log]\naccess = "access.log"\n')
    for does in strange_plugins.WRONG_CHOICES:
        strange.reload(f'[router]\nplugin = "strange"\ndoes = "{does}"\n')
        assert (does, strange.statuses()) == (does, {200})
        assert strange.gateway.admin("/metrics")[0] == 200
        assert strange.gateway.admin("/api/state")[0] == 200
        assert strange.gateway.admin("/api/decisions")[0] == 200
        with strange.gateway.admin_client() as client:
            client.send(post("/api/explain").replace(b"gw.example", b"localhost"))
            explained = client.read_answer()
        assert explained.json["error"]["code"] == "router_failed", explained
    total = 4 * len(strange_plugins.WRONG_CHOICES)
    eventually(lambda: len(strange.gateway.access) == total)
    assert f"llmgw_router_faults {total}\n" in strange.gateway.admin("/metrics")[1].decode()
    assert "the router plugin chose b with a score of type str that is no number" in strange.gateway.log
    strange.end()


@pytest.mark.parametrize("does", strange_plugins.WRONG_DECISIONS)
def test_a_limiter_that_refuses_in_nonsense_lets_requests_pass(tmp_path: Path, does: str) -> None:
    strange = Strange(tmp_path, f'[rate_limiter]\nplugin = "strange"\ndoes = "{does}"\n')
    assert strange.statuses() == {200}
    assert "llmgw_limiter_passed 4\n" in strange.gateway.admin("/metrics")[1].decode()
    words = "refused" if does.startswith("refuse-") else "answered a decision of wrong types"
    assert f"the rate limiter plugin {words}" in strange.gateway.log
    strange.end()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("list", "its loader told list, which is no mapping of models to states"),
        ("none", "its loader told NoneType, which is no mapping of models to states"),
        ("states", "its loader told of 'm' that it is 'ready?'"),
        ("names", "its loader told of 3 that it is 'loaded'"),
    ],
)
def test_a_loader_that_tells_nonsense_tells_nothing(tmp_path: Path, does: str, words: str) -> None:
    backend = Scripted()
    table = f'loader = {{ plugin = "strange", does = "{does}" }}'
    gateway = Gateway(
        tmp_path, backend_table(backend, more=table), environment=strange_plugins.installed(tmp_path)
    )
    _running.append(gateway)
    eventually(lambda: gateway.state["backends"][0]["detail"] == f"ok, but {words}")
    assert f"backend b: cannot tell its models: {words}" in gateway.log
    assert "loading" not in gateway.log
    assert gateway.stop() == 0
    backend.close()


def test_a_loader_that_is_done_too_soon_is_not_asked_for_ever(tmp_path: Path) -> None:
    """Four times, as if somebody else undid it, and then it has failed."""
    backend = Scripted()
    config = "[hold]\nmin_s = 5.0\nmax_s = 10.0\n"
    config += backend_table(backend, more='loader = { plugin = "strange", does = "too-soon" }')
    gateway = Gateway(tmp_path, config, environment=strange_plugins.installed(tmp_path))
    _running.append(gateway)
    eventually(lambda: gateway.state["loading"]["backends"][0]["models"])
    answer = gateway.ask(ask_whole())
    assert answer.status == 503
    assert answer.json["error"]["code"] == "model_loading"
    assert "was loaded, and is not there" in answer.json["error"]["message"]
    assert gateway.log.count("backend b: loading m") == 4
    assert gateway.ask(ask_whole()).status == 503
    assert gateway.log.count("backend b: loading m") == 4
    assert gateway.stop() == 0
    backend.close()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("fail", "the rate limiter plugin raised"),
        ("raise", "the rate limiter plugin raised"),
        ("coroutine", "the rate limiter plugin returned from settle a coroutine"),
    ],
)
def test_a_limiter_that_fails_to_settle_is_told_once_and_counted(
    tmp_path: Path, does: str, words: str
) -> None:
    strange = Strange(tmp_path, f'[rate_limiter]\nplugin = "strange"\ndoes = "settles"\nsettle = "{does}"\n')
    for _ in range(3):
        assert strange.statuses() == {200}
    assert strange.gateway.log.count(words) == 1
    assert strange.gateway.log.count("Traceback") <= 1
    assert "llmgw_limiter_faults 12\n" in strange.gateway.admin("/metrics")[1].decode()
    strange.end()


def test_a_limiter_that_gives_no_answer_is_told(tmp_path: Path) -> None:
    strange = Strange(tmp_path, '[rate_limiter]\nplugin = "strange"\ndoes = "never"\n')
    assert strange.statuses() == {200}
    assert strange.gateway.log.count("the rate limiter plugin gave no answer within 0.1 s") == 1
    strange.end()


def test_a_full_disk_costs_access_lines_and_nothing_else(tmp_path: Path) -> None:
    """The gateway's own log is on it too."""
    backend = Scripted()
    path = tmp_path / "access.log"
    path.symlink_to("/dev/full")
    config = '[log]\naccess = "access.log"\n' + backend_table(backend)
    command = list(TWISTD)
    TWISTD[:] = ["sh", "-c", 'exec "$@" >/dev/full 2>&1', "sh", *command]
    try:
        gateway = Gateway(tmp_path, config)
    finally:
        TWISTD[:] = command
    try:
        for _ in range(5):
            assert gateway.ask(ask_whole()).status == 200
        eventually(lambda: "llmgw_access_log_dropped 5\n" in gateway.admin("/metrics")[1].decode())
        path.unlink()
        assert gateway.admin("/api/reload", "POST")[0] == 200
        assert gateway.ask(ask_whole()).status == 200
        eventually(lambda: len(gateway.access) == 1)
        eventually(gateway.is_idle)
    finally:
        assert gateway.stop() == 0
        backend.close()


class Disk(io.RawIOBase):
    """Has room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.data = b""

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = bytes(data[: self.room])
        self.room -= len(taken)
        self.data += taken
        return len(taken)


def test_a_line_that_a_full_disk_tore_does_not_spoil_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(100)
    log = AccessLog("access.log", Clock())
    monkeypatch.setattr(AccessLog, "_open", lambda self: setattr(self, "_file", disk))
    log.start()
    for room, dropped in ((100, 1), (0, 2), (10_000, 2)):
        disk.room = room
        log.write_fault(1.0, "an-id", "10.0.0.1", 400, "invalid_request")
        log.flush()
        assert log.dropped == dropped
    log.stop()
    torn, whole, empty = disk.data.split(b"\n")
    assert (len(torn), json.loads(whole)["id"], empty) == (100, "an-id", b"")
