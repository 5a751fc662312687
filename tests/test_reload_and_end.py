"""What a reload leaves for the next start, and what an operator reads of a drain."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from pathlib import Path

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
    gateway_with,
    post,
)

from llmgw.config.schema import Config
from llmgw.daemon import NEEDS_RESTART

OPERATIONS = Path(__file__).parent.parent / "docs" / "operations.md"


def reloaded(gateway: Gateway) -> list[str]:
    status, body = gateway.admin("/api/reload", "POST", 30.0)
    assert status == 200, body
    named: list[str] = json.loads(body)["needs_restart"]
    return named


@pytest.mark.parametrize("workers", [1, 2])
def test_what_needs_a_restart_is_told_until_there_was_one(tmp_path: Path, workers: int) -> None:
    backend = Scripted()
    with gateway_with(tmp_path, backend, config=f"workers = {workers}\n") as gateway:
        good = gateway.config_path.read_text()
        gateway.config_path.write_text(good + "[breaker]\nopen_s = 3.0\n")
        assert reloaded(gateway) == ["breaker"]
        assert reloaded(gateway) == ["breaker"]
        gateway.config_path.write_text(good + "[breaker]\nopen_s = 3.0\n[retry]\nratio = 0.5\n")
        assert reloaded(gateway) == ["breaker", "retry"]
        if workers > 1:
            assert gateway.admin("/api/restart", "POST", 60.0)[0] == 200
            assert reloaded(gateway) == []
        else:
            gateway.config_path.write_text(good)
            assert reloaded(gateway) == []
    backend.close()


def test_the_table_of_what_a_reload_takes_over_has_every_key() -> None:
    row = r"^\| at (?:once|the next start) \| (.*?)(?:: a reload.*)? \|$"
    rows = re.findall(row, OPERATIONS.read_text(), re.MULTILINE)
    at_once, at_next = (set(re.findall(r"`\[*([a-z_]+)\]*`", row)) for row in rows)
    keys = set(Config.__struct_fields__) - set(Config.not_keys)
    fixed = {"admin_token_file" if key == "admin_token" else key for key in NEEDS_RESTART}
    assert at_next == fixed
    assert at_once == {"admin_token_file" if key == "admin_token" else key for key in keys} - fixed


def test_a_drain_is_told_with_what_it_waits_for_and_what_it_cuts(tmp_path: Path) -> None:
    stop = threading.Event()

    def held(line: Line, request: Received) -> None:
        line.send(SSE_HEAD)
        while not stop.wait(0.02):
            line.send(chunk(event("tick")))
        line.send(LAST_CHUNK)

    backend = Scripted(held)
    config = "[drain]\nlame_duck_s = 0.5\nfinish_s = 1.5\nabort_s = 1.0\n"
    with gateway_with(tmp_path, backend, config=config) as gateway:
        clients = [gateway.client() for _ in range(3)]
        for client in clients:
            client.send(post(body=chat_body(stream=True)))
            client.read_until(b"tick")
        gateway.process.send_signal(signal.SIGTERM)
        eventually(lambda: "ending: 3 requests at work" in gateway.log)
        clients.pop().close()
        assert gateway.process.wait(15) == 0
    [began, cut] = re.findall(r"#(?:info|warn)\] (ending: .*)", gateway.log)
    left = "connections are taken for 0.5 s more, then 1.5 s are left to finish"
    assert began == f"ending: 3 requests at work; {left}"
    assert cut == "ending: 2 requests cut, as drain.finish_s (1.5 s) is over"
    stop.set()
    backend.close()


@pytest.mark.parametrize(("signals", "reads"), [(1, True), (2, False)])
def test_a_client_that_lags_behind_has_abort_s_to_read_the_end(
    tmp_path: Path, signals: int, reads: bool
) -> None:
    """A second signal leaves it a second."""
    full = threading.Event()

    def flood(line: Line, request: Received) -> None:
        line.send(SSE_HEAD)
        line.sock.settimeout(0.5)
        try:
            while True:
                line.send(chunk(event("x" * 50_000)))
        except OSError:
            full.set()

    backend = Scripted(flood)
    config = "[drain]\nlame_duck_s = 0\nfinish_s = 0.3\nabort_s = 8.0\n"
    with gateway_with(tmp_path, backend, config=config) as gateway, gateway.client() as client:
        client.send(post(body=chat_body(stream=True)))
        client.read_until(b"xxx")
        assert full.wait(20)
        for _ in range(signals):
            gateway.process.send_signal(signal.SIGTERM)
            eventually(lambda: "ending: " in gateway.log)
        eventually(lambda: " cut, as " in gateway.log)
        time.sleep(2.0)
        assert (gateway.process.poll() is None) == reads
        assert client.is_closed()
        assert (b"the gateway is stopping" in client.buffer) == reads
        assert gateway.process.wait(15) == 0
    backend.close()


def test_an_end_with_nothing_at_work_cuts_nothing(tmp_path: Path) -> None:
    backend = Scripted()
    with gateway_with(tmp_path, backend) as gateway:
        assert gateway.stop() == 0
    [began] = re.findall(r"#(?:info|warn)\] (ending: .*)", gateway.log)
    assert began == "ending: 0 requests at work; 5 s are left to finish"
    backend.close()
