"""The access log's file: moved away, deleted, not writable; and what reaches it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import Scripted, chat_body, eventually, gateway_with, post
from twisted.internet.task import Clock

from llmgw.gateway.access_log import FLUSH_S, AccessLine, AccessLog


class Log:
    """A log on a clock."""

    def __init__(self, path: Path) -> None:
        self.clock = Clock()
        self.log = AccessLog(str(path), self.clock)
        self.log.start()
        self._numbers = iter(range(1000))

    def write(self) -> str:
        """One line. :return: its id."""
        id = f"r{next(self._numbers)}"
        line = AccessLine(
            at=0.0, id=id, peer="p", method="GET", route="r", status=200, outcome="done", duration_s=0.0
        )
        self.log.write(line)
        return id

    def tick(self) -> None:
        self.clock.advance(FLUSH_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.log"


@pytest.fixture
def log(path: Path) -> Any:
    log = Log(path)
    yield log
    log.log.stop()
    assert not log.clock.getDelayedCalls()


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_a_file_that_was_moved_away_is_noticed_without_a_signal(log: Log, path: Path, tmp_path: Path) -> None:
    first = log.write()
    log.tick()
    path.rename(tmp_path / "old")
    second = log.write()  # written before the move was seen
    log.tick()
    third = log.write()
    log.tick()
    assert ids(tmp_path / "old") == [first, second]
    assert ids(path) == [third]


def test_what_is_zero_is_left_out() -> None:
    unused = (None, None, None, False, None, None, 0, "", 0.0, None, None, None, 0, None, None)
    line = AccessLine.of(1.0, "r", "p", "GET", "/health", 200, "done", 0.5, *unused)
    assert list(json.loads(msgspec.json.encode(line))) == [
        *("at", "id", "peer", "method", "route", "status", "outcome", "duration_s"),
    ]


def test_a_line_that_cannot_be_written_costs_no_other(log: Log, path: Path) -> None:
    first = log.write()
    for odd in (object(), "\ud800"):
        line = AccessLine(
            at=0.0,
            id="odd",
            peer="p",
            method="GET",
            route="r",
            status=200,
            outcome="done",
            duration_s=0.0,
            why=odd,  # type: ignore[arg-type]
        )
        log.log.write(line)
    second = log.write()
    log.tick()
    assert ids(path) == [first, second]
    assert log.log.dropped == 2
    third = log.write()
    log.tick()
    assert ids(path)[2:] == [third]


def test_a_long_reason_is_cut() -> None:
    used = (None, None, None, False, "b", "w" * 10_000, 1, "", 0.0, None, None, None, 0, None, None)
    assert len(AccessLine.of(1.0, "r", "p", "POST", "/", 200, "done", 0.5, *used).why or "") == 256


def test_a_deleted_file_is_made_anew(log: Log, path: Path) -> None:
    log.write()
    log.tick()
    path.unlink()
    log.tick()
    kept = log.write()
    log.tick()
    assert ids(path) == [kept]


def test_a_path_that_cannot_be_opened_is_told_once_and_lines_go_on_into_the_old_file(
    log: Log, path: Path, tmp_path: Path, capsys: Any
) -> None:
    from twisted.logger import capturedLogs

    log.write()
    log.tick()
    path.rename(tmp_path / "old")
    path.mkdir()
    with capturedLogs() as events:
        for _ in range(5):
            log.write()
            log.tick()
    assert len([event for event in events if "not reopened" in event["log_format"]]) == 1
    assert len(ids(tmp_path / "old")) == 6
    path.rmdir()
    log.tick()
    back = log.write()
    log.tick()
    assert ids(path) == [back]


def test_a_pipe_without_a_reader_is_refused_at_once(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device"):
        Log(path)


def test_a_pipe_that_is_full_costs_lines_and_no_time(path: Path) -> None:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = Log(path)
    first = log.write()
    log.tick()
    assert json.loads(os.read(reader, 65536))["id"] == first
    for _ in range(900):
        log.write()
    log.tick()
    assert 0 < log.log.dropped < 900
    os.close(reader)
    log.write()
    log.log.stop()


def test_a_sample_keeps_every_error(tmp_path: Path) -> None:
    backend = Scripted()
    with gateway_with(
        tmp_path, backend, config="[log]\naccess = 'access.log'\naccess_sample = 0.0\n"
    ) as gateway:
        for _ in range(5):
            assert gateway.ask(post()).status == 200
        assert gateway.ask(post(body=chat_body("none"))).status == 404
        eventually(lambda: gateway.access)
        assert [line["status"] for line in gateway.access] == [404]
    backend.close()
