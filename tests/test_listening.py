"""Sockets that are opened here, held for others, or taken over."""

from __future__ import annotations

import itertools
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.protocol import Factory, Protocol

from llmgw.listening import ACCEPTS_AT_A_TIME, Sockets


class Greeter(Protocol):
    def connectionMade(self) -> None:
        self.transport.write(self.factory.word)  # type: ignore[union-attr, attr-defined]
        self.transport.loseConnection()  # type: ignore[union-attr]


def greeting(word: bytes) -> Factory:
    factory = Factory.forProtocol(Greeter)
    factory.word = word
    return factory


def listen(sockets: Sockets, text: str, word: bytes = b"hello") -> Any:
    done: list[Any] = []
    endpoint = serverFromString(sockets.reactor_for(text), text)
    endpoint.listen(greeting(word)).addCallbacks(done.append, done.append)
    return done[0]


async def greeted(address: Any) -> bytes:
    """What the one who accepts there says."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as client:
        client.connect(address)
        client.setblocking(False)
        for _ in range(500):
            try:
                return client.recv(100)
            except BlockingIOError:
                waiting: Deferred[None] = Deferred()
                reactor.callLater(0.01, waiting.callback, None)  # type: ignore[attr-defined]
                await waiting
    raise AssertionError("nobody accepts")


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    ports: list[Any] = []
    yield ports
    for port in ports:
        if port.connected:
            pytest_twisted.blockon(port.stopListening())


def dups(sockets: Sockets) -> list[tuple[str, int]]:
    return [(name, os.dup(number)) for name, number in sockets.descriptors()]


@pytest_twisted.ensureDeferred
async def test_who_holds_does_not_accept_and_who_takes_over_does(opened: list[Any]) -> None:
    holder = Sockets(reactor, accepts=False)
    text = "tcp:0:interface=127.0.0.1:backlog=7"
    port = listen(holder, text, b"the holder")
    opened.append(port)
    address = ("127.0.0.1", port.getHost().port)
    server = Sockets(reactor, dups(holder))
    opened.append(listen(server, text, b"the server"))
    assert not server.close_unclaimed()
    for _ in range(3):
        assert await greeted(address) == b"the server"
    # The end of one is not the end of the socket.
    await opened.pop().stopListening()
    again = Sockets(reactor, dups(holder))
    opened.append(listen(again, text, b"the next"))
    assert await greeted(address) == b"the next"


@pytest_twisted.ensureDeferred
async def test_one_that_is_bound_where_another_wants_to_listen_is_taken(opened: list[Any]) -> None:
    """The daemon's endpoint may have another name by now: ``tcp`` became ``llmtls``, say."""
    first = Sockets(reactor)
    port = listen(first, "tcp:0:interface=127.0.0.1")
    number = port.getHost().port
    inherited = dups(first)
    await port.stopListening()
    second = Sockets(reactor, inherited)
    opened.append(listen(second, f"tcp:{number}:interface=127.0.0.1:backlog=9", b"taken over"))
    assert await greeted(("127.0.0.1", number)) == b"taken over"
    # And what is not wanted any more is closed.
    opened.append(listen(first, "tcp:0:interface=127.0.0.1"))
    unwanted = dups(first)
    number = unwanted[-1][1]
    Sockets(reactor, unwanted).close_unclaimed()
    assert unwanted == []
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)


@pytest_twisted.ensureDeferred
async def test_the_file_of_a_unix_socket_stays_while_anybody_serves_it(
    tmp_path: Path, opened: list[Any]
) -> None:
    path = str(tmp_path / "gw.sock")
    text = f"unix:{path}:mode=600"
    holder = Sockets(reactor, accepts=False)
    held = listen(holder, text)
    opened.append(held)
    server = Sockets(reactor, dups(holder))
    port = listen(server, text, b"over unix")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert await greeted(path) == b"over unix"
    await port.stopListening()
    assert os.path.exists(path)
    # Handed over: the old one's end leaves the file, the new one's removes it.
    new = Sockets(reactor, dups(holder))
    opened.append(listen(new, text, b"the new one"))
    holder.let_go()
    await held.stopListening()
    assert await greeted(path) == b"the new one"
    await opened.pop().stopListening()
    new.remove_files()
    assert not os.path.exists(path)


@pytest_twisted.ensureDeferred
async def test_what_systemd_passed_is_known_by_its_number(tmp_path: Path, opened: list[Any]) -> None:
    path = str(tmp_path / "activated.sock")
    with socket.socket(socket.AF_UNIX) as passed:
        passed.bind(path)
        passed.listen(5)
        sockets = Sockets(reactor)
        stand_in = sockets.reactor_for("systemd:domain=UNIX:index=0")
        port = stand_in.adoptStreamPort(passed.fileno(), socket.AF_UNIX, greeting(b"activated"))
        assert sockets.activated() == {passed.fileno(): port.fileno()}
        assert await greeted(path) == b"activated"
        await port.stopListening()
        # The file is systemd's.
        assert os.path.exists(path)
        assert sockets.activated() == {}


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest_twisted.ensureDeferred
async def test_a_burst_of_connections_lets_others_have_their_turn(
    kind: str, tmp_path: Path, opened: list[Any]
) -> None:
    text = f"unix:{tmp_path / 's'}:backlog=200" if kind == "unix" else "tcp:0:interface=127.0.0.1:backlog=200"
    port = listen(Sockets(reactor), text)
    opened.append(port)
    taken: list[int] = []
    port.factory.buildProtocol = lambda address: taken.append(0)  # refuses, which closes it
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    address = str(tmp_path / "s") if kind == "unix" else ("127.0.0.1", port.getHost().port)
    clients = [socket.socket(family) for _ in range(100)]
    for client in clients:
        client.connect(address)
    turns = [0]
    while len(taken) < 100:
        turn: Deferred[None] = Deferred()
        reactor.callLater(0, turn.callback, None)  # type: ignore[attr-defined]
        await turn
        turns.append(len(taken))
    for client in clients:
        client.close()
    assert max(after - before for before, after in itertools.pairwise(turns)) <= ACCEPTS_AT_A_TIME
