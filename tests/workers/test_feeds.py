"""Decisions and history of several workers as one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Gateway, Scripted, backend_table, eventually, post

from llmgw.workers.feeds import Joined, joined


def sample(**fields: Any) -> dict[str, Any]:
    usual = {"at": 5.0, "every_s": 5.0, "requests": 0, "errors": 0, "rejected": {}, "output_tokens": 0}
    return {**usual, "in_flight": 0, "waiting": 0, "backends": {}, **fields}


def test_samples_add_up_and_means_are_weighted() -> None:
    whole = joined(
        [
            sample(requests=3, rejected={"a": 1}, backends={"x": {"requests": 3, "ttft_s": 0.1}}),
            sample(at=6.0, requests=2, rejected={"a": 1, "b": 2}, in_flight=4, backends={
                "x": {"requests": 1, "ttft_s": 0.5}, "y": {"requests": 1}}),
            sample(backends={"x": {"requests": 2}}),
        ]
    )  # fmt: skip
    assert whole == sample(
        at=6.0,
        requests=5,
        rejected={"a": 2, "b": 2},
        in_flight=4,
        backends={"x": {"requests": 6, "ttft_s": 0.2}, "y": {"requests": 1}},
    )


def test_a_joined_feed_keeps_the_newest() -> None:
    feed = Joined("numbers", 3)
    feed.add([1, 2])
    feed.add([3, 4])
    assert (feed.total, feed.since(0), feed.since(3), feed.since(4)) == (4, [2, 3, 4], [4], [])


@contextlib.contextmanager
def crew(folder: Path) -> Iterator[Gateway]:
    """Two workers that have answered four requests."""
    backend = Scripted()
    gateway = Gateway(folder, "workers = 2\n[drain]\nlame_duck_s = 0.0\n" + backend_table(backend))
    try:
        eventually(lambda: gateway.state["backends"] and gateway.state["models"], 20)
        for _ in range(4):
            assert gateway.ask(post()).status == 200
        yield gateway
    finally:
        gateway.stop()
        backend.close()
    assert "Traceback" not in gateway.log, gateway.log


def test_a_listener_hears_what_the_workers_decided_within_a_second_or_two(tmp_path: Path) -> None:
    with crew(tmp_path) as gateway, gateway.admin_client() as listener:
        listener.send(b"GET /api/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        eventually(lambda: json.loads(gateway.admin("/api/decisions")[1])["total"] == 4, 15)
        (line, *_) = json.loads(gateway.admin("/api/decisions")[1])["items"]
        assert (line["backend"], line["outcome"]) == ("b", "done")
        assert b"event: decisions" in listener.read_until(b'"outcome":"done"')
        assert gateway.state["requests"] == 4


@pytest.mark.slow
def test_history_is_kept_while_nobody_listens(tmp_path: Path) -> None:
    with crew(tmp_path) as gateway:
        eventually(lambda: json.loads(gateway.admin("/api/history")[1])["items"], 20)
        sample = json.loads(gateway.admin("/api/history")[1])["items"][0]
        assert sample["every_s"] == 5.0
