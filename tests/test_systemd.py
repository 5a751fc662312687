"""What systemd and the daemon tell each other, without processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock

from llmgw.systemd import Notifier, why_not_activated

PUBLIC = "systemd:domain=INET:name=public"
GOOD = {"LISTEN_FDS": "2", "LISTEN_PID": "7", "LISTEN_FDNAMES": "public:private"}


@pytest.mark.parametrize(
    ("text", "environment", "why"),
    [
        ("tcp:1", {}, ""),
        (PUBLIC, {}, "no LISTEN_FDS"),
        ("llmtls:systemd:INET:name=public:certs=x", {}, "no LISTEN_FDS"),
        (PUBLIC, {**GOOD, "LISTEN_PID": "8"}, "for process 8"),
        (PUBLIC, {**GOOD, "LISTEN_FDS": "none"}, "LISTEN_FDS is 'none'"),
        (PUBLIC, {**GOOD, "LISTEN_FDNAMES": "public"}, "2 sockets and 1 names"),
        ("systemd:domain=INET:name=web", GOOD, "no socket of the name 'web': systemd passed public, private"),
        ("systemd:domain=INET:index=2", GOOD, "no socket number 2"),
        ("systemd:domain=INET", GOOD, "needs index="),
        ("systemd:domain=FOO:name=public", GOOD, "domain must be"),
    ],
)
def test_why_a_socket_is_not_there(text: str, environment: dict[str, str], why: str) -> None:
    found = why_not_activated(text, environment, 7)
    assert why in found
    assert bool(found) == bool(why)


class Ear:
    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        messages = []
        while True:
            try:
                messages.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return messages


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    made = Ear(str(tmp_path / "notify"))
    yield made
    made.socket.close()


def notifier(clock: Clock, ear: Ear, **more: str) -> Notifier:
    return Notifier(clock, {"NOTIFY_SOCKET": ear.socket.getsockname(), **more})


def test_a_watchdog_is_satisfied_from_the_reactor_once_we_serve(ear: Ear) -> None:
    clock = Clock()
    ours = notifier(clock, ear, WATCHDOG_USEC="30000000", WATCHDOG_PID=str(os.getpid()))
    clock.advance(60)
    assert ear.heard() == []
    ours.ready()
    assert ear.heard() == [f"READY=1\nMAINPID={os.getpid()}", "WATCHDOG=1"]
    clock.advance(9.9)
    assert ear.heard() == []
    clock.advance(0.2)
    assert ear.heard() == ["WATCHDOG=1"]
    # A successor's to satisfy from then on, and ours to be silent.
    ours.main_process(42)
    ours.stopping(5.0)
    clock.advance(60)
    assert ear.heard() == ["MAINPID=42"]
    assert not clock.getDelayedCalls()


@pytest.mark.parametrize("more", [{"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}, {}])
def test_no_watchdog_no_pings(ear: Ear, more: dict[str, str]) -> None:
    clock = Clock()
    notifier(clock, ear, **more).ready()
    assert len(ear.heard()) == 1
    assert not clock.getDelayedCalls()


def test_a_reload_is_told_with_what_came_of_it(ear: Ear) -> None:
    clock = Clock()
    clock.advance(1.5)
    ours = notifier(clock, ear)
    assert ours.around(succeed(["listen"])).result == ["listen"]
    assert ear.heard() == [
        "RELOADING=1\nMONOTONIC_USEC=1500000",
        "READY=1\nSTATUS=reloaded; a restart is needed for listen",
    ]
    refused: Deferred[list[str]] = ours.around(fail(ValueError("a\nb")))
    refused.addErrback(lambda _: [])
    assert ear.heard()[1] == "READY=1\nSTATUS=reload refused: a b"


def test_nobody_listens_and_nobody_minds(ear: Ear, tmp_path: Path) -> None:
    Notifier(Clock(), {}).ready()
    gone = Notifier(Clock(), {"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    gone.ready()
    gone.stopping(1.0)
    gone.stop()
    assert ear.heard() == []
