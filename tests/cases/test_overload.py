"""The overload ladder of a gateway process: what each level stops, and what goes on.

Memory stands in for load: its thresholds are moved below or above what the process uses.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Gateway,
    Line,
    Received,
    Scripted,
    answer_completion,
    backend_table,
    chat_body,
    chunk,
    event,
    eventually,
    post,
)

LEVELS = ("calm", "shedding", "refusing", "closed", "cutting")
KEYS = {name: f"a-{name}-key-of-0123456789" for name in ("sheddable", "standard", "critical")}


def thresholds(level: str) -> str:
    """An ``[overload]`` table with which the process is at ``level`` and stays there."""
    names = ("shed_memory", "refuse_memory", "close_memory", "cut_memory")
    reached = LEVELS.index(level)
    shares = [f"{name} = {0.0 if place < reached else 1.0}" for place, name in enumerate(names)]
    # Late beats of a busy machine are not what is tested here.
    return "\n".join(["[overload]", "shed_lag_s = 50", "refuse_lag_s = 50", "close_lag_s = 50", *shares, ""])


class Ladder:
    """A gateway whose level the test sets."""

    def __init__(self, folder: Path) -> None:
        self.backend = Scripted()
        path = folder / "keys.toml"
        path.write_text(
            "".join(
                f'[keys.{name}]\nname = "{name}"\nhash = "sha256:{sha256(key.encode()).hexdigest()}"\n'
                f'criticality = "{name}"\n'
                for name, key in KEYS.items()
            )
        )
        path.chmod(0o600)
        config = f'auth = ["keys:{path}"]\n{thresholds("calm")}\n[admission]\nmax_wait_s = 0.05\n'
        config += '[log]\naccess = "access.log"\n'
        self.gateway = Gateway(
            folder, config + backend_table(self.backend, more='models = ["m"]\nmax_connections = 2')
        )

    def be(self, level: str) -> None:
        """Reload, and wait until the level is reached."""
        path = self.gateway.config_path
        path.write_text(re.sub(r"(?s)\[overload\].*?\n(?=\[|\n)", thresholds(level), path.read_text()))
        assert self.gateway.admin("/api/reload", "POST")[0] == 200
        eventually(lambda: self.gateway.state["overload"]["level"] == level)

    def ask(self, key: str, **fields: object) -> tuple[int, str]:
        """Status and error code."""
        answer = self.gateway.ask(post(body=chat_body(**fields), headers=bearer(key)))
        return answer.status, answer.json.get("error", {}).get("code", "")


def bearer(key: str) -> str:
    return f"Authorization: Bearer {KEYS[key]}\r\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ladder]:
    ladder = Ladder(tmp_path_factory.mktemp("overload"))
    yield ladder
    eventually(ladder.gateway.is_idle)
    ladder.gateway.stop()
    ladder.backend.close()
    assert not ladder.backend.errors
    assert "Traceback" not in ladder.gateway.log, ladder.gateway.log


@pytest.fixture
def ladder(made: Ladder) -> Iterator[Ladder]:
    made.backend.play(answer_completion)
    yield made
    # Falling takes its two seconds, so only a level that keeps the next test out is left.
    if made.gateway.state["overload"]["level"] in ("closed", "cutting"):
        made.be("calm")


def test_sheddable_callers_are_refused_first(ladder: Ladder) -> None:
    ladder.be("shedding")
    assert ladder.ask("sheddable") == (503, "overloaded")
    assert ladder.ask("standard") == (200, "")
    assert ladder.ask("critical") == (200, "")
    assert len(ladder.backend.requests) == 2


def test_critical_callers_are_refused_last(ladder: Ladder) -> None:
    ladder.be("refusing")
    assert ladder.ask("sheddable") == (503, "overloaded")
    assert ladder.ask("standard") == (503, "overloaded")
    assert ladder.ask("critical") == (200, "")
    for path in ("/health", "/v1/models"):
        request = f"GET {path} HTTP/1.1\r\nHost: gw\r\n{bearer('standard')}\r\n".encode()
        assert ladder.gateway.ask(request, "GET").status == 200
    metrics = ladder.gateway.admin("/metrics")[1]
    assert b"llmgw_overload_level 2\n" in metrics
    assert re.search(rb"llmgw_memory_share 0\.\d", metrics)


def test_a_refusal_comes_before_the_body_and_says_when_to_come_back(ladder: Ladder) -> None:
    ladder.be("refusing")
    with ladder.gateway.client() as client:
        # A head alone; no body will ever come.
        client.send(
            post(headers=bearer("standard"), length=20_000_000).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        )
        answer = client.read_answer()
        assert (answer.status, answer.json["error"]["code"]) == (503, "overloaded")
        assert 1 <= int(answer.get("retry-after") or 0) <= 60


def test_a_key_that_is_not_known_is_told_so(ladder: Ladder) -> None:
    ladder.be("refusing")
    assert ladder.gateway.ask(post(headers="Authorization: Bearer wrong\r\n")).status == 401


def held(release: threading.Event) -> Callable[[Line, Received], None]:
    """A script: a stream that ends when it is released."""

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("a")))
        release.wait(20)
        line.send(chunk(event("b")), chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    return script


def test_nobody_new_waits_and_what_runs_goes_on(ladder: Ladder) -> None:
    ladder.be("calm")
    release = threading.Event()
    ladder.backend.play(held(release))
    with ladder.gateway.client() as one, ladder.gateway.client() as two:
        for client in (one, two):
            client.send(post(body=chat_body(stream=True), headers=bearer("standard")))
            assert b'"a"' in client.read_until(b"\n\n\r\n")
        waits = "llmgw_wait_seconds_count 1\n"
        ladder.ask("standard")
        assert waits in ladder.gateway.admin("/metrics")[1].decode()
        ladder.be("shedding")
        assert ladder.ask("standard") == (503, "overloaded")
        assert waits in ladder.gateway.admin("/metrics")[1].decode()
        ladder.be("closed")
        release.set()
        for client in (one, two):
            assert b'"b"' in client.read_until(b"0\r\n\r\n")


def test_a_closed_gateway_takes_no_connection_and_lets_idle_ones_go(ladder: Ladder) -> None:
    ladder.be("shedding")
    with ladder.gateway.client() as idle:
        idle.send(b"GET /health HTTP/1.1\r\nHost: gw\r\n\r\n")
        assert idle.read_answer("GET").status == 200
        ladder.be("closed")
        assert idle.is_closed()
    with ladder.gateway.client() as late:
        assert late.is_closed()
        assert late.buffer == b""
    assert ladder.gateway.state["refusals"]["overload"] >= 1
    assert ladder.gateway.admin("/readyz")[0] == 200
    ladder.be("calm")
    assert ladder.ask("standard") == (200, "")


def test_at_the_end_of_memory_only_those_who_do_not_read_are_cut(ladder: Ladder) -> None:
    ladder.be("shedding")
    release = threading.Event()

    def flood(line: Line, request: Received) -> None:
        if request.json.get("flood"):
            line.send(SSE_HEAD)
            while not release.is_set():
                line.send(chunk(event("x" * 60_000)))
        else:
            held(release)(line, request)

    ladder.backend.play(flood)
    with ladder.gateway.client() as lazy, ladder.gateway.client() as reader:
        lazy.send(post(body=chat_body(stream=True, flood=True), headers=bearer("standard")))
        reader.send(post(body=chat_body(stream=True), headers=bearer("standard")))
        assert b'"a"' in reader.read_until(b"\n\n\r\n")
        ladder.be("cutting")
        eventually(lambda: ladder.gateway.state["refusals"].get("cut_by_overload"))
        release.set()
        assert b'"b"' in reader.read_until(b"0\r\n\r\n")
        assert lazy.is_closed()


def test_each_change_of_level_is_logged_once(ladder: Ladder) -> None:
    ladder.be("shedding")
    before = ladder.gateway.log.count("overload: refusing")
    ladder.be("refusing")
    ladder.ask("standard")
    ladder.ask("standard")
    assert ladder.gateway.log.count("overload: refusing") == before + 1
