"""Observers for ``twistd --logger``: what they write, and that the daemon takes them."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Client, eventually, free_port
from twisted.logger import ILogObserver, Logger, LogPublisher
from twisted.python.failure import Failure
from zope.interface.verify import verifyObject

from llmgw.log_lines import Journal, JsonLines
from llmgw.values import Secret


def told(make: Any, speak: Any) -> str:
    """What an observer writes of what ``speak(log)`` says."""
    out = io.BytesIO()
    observer = make(out)
    verifyObject(ILogObserver, observer)
    speak(Logger("llmgw.tests", observer=LogPublisher(observer)))
    return out.getvalue().decode()


def fail(log: Logger) -> None:
    try:
        raise ZeroDivisionError("by nothing")
    except ZeroDivisionError:
        log.failure("counting {what}", what="sheep", failure=Failure())


def test_a_json_line_has_fields_of_its_own() -> None:
    text = told(
        JsonLines,
        lambda log: log.warn(
            "{backend}: {count} of {share}", backend="a\nb", count=3, share=0.5, secret=Secret("x")
        ),
    )
    assert text.count("\n") == 1
    line = json.loads(text)
    assert line.pop("at") > 0
    assert line == {
        "level": "warn",
        "source": "llmgw.tests",
        "text": "a\nb: 3 of 0.5",
        "backend": "a\nb",
        "count": 3,
        "share": 0.5,
    }


def test_a_failure_brings_its_traceback() -> None:
    line = json.loads(told(JsonLines, fail))
    assert (line["level"], line["text"]) == ("critical", "counting sheep")
    assert "ZeroDivisionError: by nothing" in line["traceback"]


def test_fields_cannot_take_the_places_of_ours() -> None:
    def speak(log: Logger) -> None:
        log.info("x", at="never", source="somebody", text="no", odd=float("inf"))

    line = json.loads(told(JsonLines, speak))
    assert (line["level"], line["source"], line["text"]) == ("info", "llmgw.tests", "x")
    assert line["at"] != "never"
    assert "odd" not in line


def test_the_journal_gets_a_priority_on_each_line() -> None:
    assert told(Journal, lambda log: log.info("well")) == "<6>llmgw.tests: well\n"
    assert told(Journal, lambda log: log.error("one\ntwo")) == "<3>llmgw.tests: one\n<3>two\n"
    lines = told(Journal, fail).splitlines()
    assert lines[0] == "<2>llmgw.tests: counting sheep"
    assert len(lines) > 3
    assert all(line.startswith("<2>") for line in lines)


def test_a_reader_that_has_gone_does_not_end_the_gateway() -> None:
    class Closed(io.BytesIO):
        def write(self, data: Any) -> int:
            raise BrokenPipeError

    Journal(Closed())({"log_format": "x", "log_time": 0.0})


def answers(port: int) -> bool:
    """The event loop turns."""
    try:
        with Client(port) as client:
            client.send(b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n")
            return client.read_answer("GET").status == 200
    except OSError:
        return False


@pytest.mark.parametrize(
    ("factory", "first"), [("llmgw.log_lines.json_lines", b'{"at":'), ("llmgw.log_lines.journal", b"<6>")]
)
def test_twistd_takes_them(tmp_path: Path, factory: str, first: bytes) -> None:
    command = [sys.executable, "-c", "from twisted.scripts.twistd import run; run()", "-n", "--pidfile="]
    port = free_port()
    command += [f"--logger={factory}", "llmgw", "--listen", f"tcp:{port}:interface=127.0.0.1"]
    command += ["--backend", f"http://127.0.0.1:{free_port()}"]
    with (tmp_path / "out").open("wb") as out:
        child = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
    try:
        eventually(lambda: answers(port), 20)
    finally:
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 0
    lines = [line for line in (tmp_path / "out").read_bytes().splitlines() if line]
    assert any(b"serves" in line for line in lines)
    # The access log is there too: always JSON.
    assert all(line.startswith((first, b"<", b'{"at":')) for line in lines), lines
