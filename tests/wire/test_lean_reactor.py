"""The reactor ``lean``: Twisted's own tests of reactors, and what only it can."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("select").epoll  # noqa: B018

MODULES = ["core", "fdset", "posixbase", "process", "sigchld", "stdio"]
MODULES += ["tcp", "threads", "time", "tls", "udp", "unix"]
RUN_TWISTEDS_OWN = """
import sys
from twisted.internet.test.reactormixins import ReactorBuilder

LEFT_OUT = {
    "test_logPrefix": "no context for lines of the legacy log: that is what makes it lean",
    "test_lostFileDescriptor": "epoll forgets what was closed; for EPollReactor Twisted skips it by name",
    "test_changeUID": "EPollReactor fails it, too, where root runs it",
}
ReactorBuilder._reactors = ["llmgw.wire.lean_reactor.LeanReactor"]
make = ReactorBuilder.makeTestCaseClasses.__func__

def make_without(cls):
    classes = make(cls)
    for name, case in classes.items():
        for method, why in LEFT_OUT.items():
            if hasattr(case, method):
                def skipped(self, *args):
                    pass
                skipped.skip = why
                setattr(case, method, skipped)
    return classes

ReactorBuilder.makeTestCaseClasses = classmethod(make_without)
from twisted.scripts.trial import run
sys.argv = ["trial", "--reporter=text", "--temp-directory=" + sys.argv[1], *sys.argv[2:]]
run()
"""


def test_it_passes_twisteds_own_tests_of_reactors(tmp_path: Path) -> None:
    names = [f"twisted.internet.test.test_{name}" for name in MODULES]
    result = subprocess.run(
        [sys.executable, "-c", RUN_TWISTEDS_OWN, str(tmp_path / "trial"), *names],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    end = result.stdout.strip().splitlines()[-1]
    assert result.returncode == 0, result.stdout[-3000:]
    passed = re.fullmatch(r"PASSED \(skips=\d+, successes=(\d+)\)", end)
    assert passed is not None, end
    assert int(passed[1]) > 300


def run(source: str) -> list[str]:
    """The lines that a program prints which has the reactor as ``reactor``."""
    begin = (
        "from twisted.application.reactors import installReactor\n"
        "from twisted.internet.protocol import Factory, Protocol\n"
        "from twisted.logger import globalLogBeginner, textFileLogObserver\n"
        "import sys\n"
        "globalLogBeginner.beginLoggingTo([textFileLogObserver(sys.stdout)], redirectStandardIO=False)\n"
        "reactor = installReactor('lean')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", begin + source], capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout.splitlines()


def test_calls_at_the_end_of_a_turn_come_after_its_events_and_before_the_next() -> None:
    lines = run(
        """
class Reads(Protocol):
    def dataReceived(self, data):
        print("read")
        reactor.call_at_end_of_turn(lambda: print("end"))
        Reads.count += 1
        if Reads.count == 2:
            reactor.call_at_end_of_turn(reactor.stop)

Reads.count = 0
import os
ends = [os.pipe() for _ in range(2)]
from twisted.internet.fdesc import setNonBlocking
from twisted.internet.abstract import FileDescriptor

class Pipe(FileDescriptor):
    def __init__(self, number):
        super().__init__(reactor)
        self.fileno = lambda: number
        self.connected = 1
    def doRead(self):
        self.stopReading()
        Reads().dataReceived(os.read(self.fileno(), 10))

for reading, writing in ends:
    os.write(writing, b"x")
    Pipe(reading).startReading()
reactor.run()
"""
    )
    assert [line for line in lines if line in ("read", "end")] == ["read", "read", "end", "end"]


def test_a_call_outside_of_a_turn_is_not_kept_waiting() -> None:
    lines = run(
        """
from time import monotonic
begun = monotonic()
reactor.callLater(30, reactor.stop)
reactor.call_at_end_of_turn(reactor.stop)
reactor.run()
print(monotonic() - begun < 10)
"""
    )
    assert lines[-1] == "True"


def test_a_call_that_raises_is_logged_and_the_others_are_made() -> None:
    lines = run(
        """
reactor.call_at_end_of_turn(lambda: 1 / 0)
reactor.call_at_end_of_turn(reactor.stop)
reactor.run()
print("over")
"""
    )
    assert lines[-1] == "over"
    assert any("ZeroDivisionError" in line for line in lines)


def test_a_read_that_raises_ends_its_connection_alone() -> None:
    lines = run(
        """
class Served(Protocol):
    def dataReceived(self, data):
        if data == b"bad":
            1 / 0
        self.transport.write(b"fine")
    def connectionLost(self, reason):
        print("lost", reason.type.__name__)

class Asks(Protocol):
    def connectionMade(self):
        self.transport.write(self.factory.word)
    def dataReceived(self, data):
        print(data.decode())
        reactor.stop()
    def connectionLost(self, reason):
        if self.factory.word == b"bad":
            connect(b"good")

def connect(word):
    from twisted.internet.protocol import ClientFactory
    factory = ClientFactory.forProtocol(Asks)
    factory.word = word
    reactor.connectTCP("127.0.0.1", port.getHost().port, factory)

port = reactor.listenTCP(0, Factory.forProtocol(Served), interface="127.0.0.1")
connect(b"bad")
reactor.run()
"""
    )
    assert "lost ZeroDivisionError" in lines
    assert "fine" in lines
