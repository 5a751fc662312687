"""The whole corpus against a gateway process: requests over TCP and TLS, and a backend's
responses over both, in one piece and cut in two.

Nothing behind a refusal may be answered, so the statuses on a connection tell all:
there is one for each whole request, and one for the refusal. The quick part cuts each
message once, at a place that its name decides; the slow part at every byte.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from corpus import MORE_REQUESTS, MORE_RESPONSES, REQUESTS, RESPONSES, RequestCase, ResponseCase
from corpus_attacks import ATTACKS
from harness import Gateway, Line, Received, Scripted, chat_body, eventually, free_port, post

from llmgw.demo.certificate import ensure_certificate

ALL = REQUESTS + MORE_REQUESTS + ATTACKS
ANSWERS = RESPONSES + MORE_RESPONSES
LAST = b"GET /health HTTP/1.1\r\nHost: gw.example\r\nConnection: close\r\n\r\n"
PAUSE_S = 0.004
AT_ONCE = 48
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")

Sent = tuple[RequestCase, int]
"""A case and where it is cut; 0 is not at all."""


class Door:
    """Sends cut messages to one listener, many connections at once."""

    def __init__(self, port: int, context: ssl.SSLContext | None) -> None:
        self._port = port
        self._context = context

    def statuses(self, sent: list[Sent]) -> list[tuple[int, ...]]:
        """Of each, the statuses that came back until the gateway closed."""
        found: list[tuple[int, ...]] = []
        for start in range(0, len(sent), AT_ONCE):
            found += self._batch(sent[start : start + AT_ONCE])
        return found

    def _batch(self, sent: list[Sent]) -> list[tuple[int, ...]]:
        socks = [self._connected() for _ in sent]
        for sock, (case, cut) in zip(socks, sent, strict=True):
            self._send(sock, raw_of(case)[:cut] if cut else raw_of(case))
        if any(cut for _, cut in sent):
            time.sleep(PAUSE_S)
            for sock, (case, cut) in zip(socks, sent, strict=True):
                if cut:
                    self._send(sock, raw_of(case)[cut:])
        return [self._read(sock) for sock in socks]

    def _connected(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port), 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock if self._context is None else self._context.wrap_socket(sock)

    @staticmethod
    def _send(sock: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):  # refused already, and closed
            sock.sendall(data)

    @staticmethod
    def _read(sock: socket.socket) -> tuple[int, ...]:
        data = b""
        with sock, contextlib.suppress(OSError):
            while piece := sock.recv(65536):
                data += piece
        # Whether 100 is sent depends on whether the body is there already.
        return tuple(int(status) for status in _STATUS.findall(data) if status != b"100")


def raw_of(case: RequestCase) -> bytes:
    """What is sent: a good case is followed by a last request, whose answer ends the connection."""
    return case.raw if case.status else case.raw + LAST


def expected(case: RequestCase) -> int:
    """How many statuses a case has to bring; of those that close by themselves one less."""
    closes = re.search(rb"(?i)connection:[^\r]*close|HTTP/1\.0(?![^$]*keep-alive)", case.raw) is not None
    return len(case.bodies) + (0 if closes and not case.status else 1)


@pytest.fixture(scope="module")
def backend() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


@pytest.fixture(scope="module")
def secure_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scripted, Path]]:
    folder = tmp_path_factory.mktemp("tls-backend")
    files = ensure_certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    scripted = Scripted(tls=context)
    yield scripted, files.authority
    scripted.close()


@pytest.fixture(scope="module")
def gateway(
    backend: Scripted, secure_backend: tuple[Scripted, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("corpus")
    files = ensure_certificate(folder)
    plain, secure = free_port(), free_port()
    config = f"""
    listen = ["tcp:{plain}:interface=127.0.0.1",
              "ssl:{secure}:interface=127.0.0.1:privateKey={files.key}:certKey={files.certificate}"]
    [breaker]
    fall = 100000
    consecutive = 100000
    ratio_min = 1000000
    [retry]
    attempts = 0
    [timeouts]
    # No connection is kept: who sends two answers to one request could else
    # answer whoever is next, which no reader can tell from a true answer.
    upstream_idle_s = 0.000001
    [[health]]
    plugin = "http"
    interval_s = 600.0
    [overload]
    shed_lag_s = 60
    refuse_lag_s = 60
    close_lag_s = 60
    [[backends]]
    id = "plain"
    url = "{backend.url}"
    models = ["plain"]
    max_connections = 1000
    [[backends]]
    id = "secure"
    url = "{secure_backend[0].url}"
    models = ["secure"]
    max_connections = 1000
    tls.ca_file = "{secure_backend[1]}"
    """
    gateway = Gateway(folder, config)
    gateway.port = plain
    gateway.secure_port = secure  # type: ignore[attr-defined]
    yield gateway
    eventually(gateway.is_idle)
    gateway.stop()
    assert "Traceback" not in gateway.log, gateway.log
    assert "Unhandled" not in gateway.log, gateway.log


@pytest.fixture(params=["tcp", "tls"])
def door(request: pytest.FixtureRequest, gateway: Gateway) -> Door:
    if request.param == "tcp":
        return Door(gateway.port, None)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return Door(gateway.secure_port, context)  # type: ignore[attr-defined]


def place(name: str, size: int) -> int:
    """Where the quick part cuts: anywhere, and for each name the same place."""
    return 1 + zlib.crc32(name.encode()) % (size - 1)


def test_requests_whole_and_cut_once(door: Door) -> None:
    whole = door.statuses([(case, 0) for case in ALL])
    for case, statuses in zip(ALL, whole, strict=True):
        assert len(statuses) == expected(case), (case.name, statuses)
        if case.status:
            assert statuses[-1] == case.status, (case.name, statuses)
    cut = door.statuses([(case, place(case.name, len(raw_of(case)))) for case in ALL])
    for case, once, twice in zip(ALL, whole, cut, strict=True):
        assert once == twice, case.name


@pytest.mark.slow
def test_requests_cut_at_every_byte(door: Door) -> None:
    """Of messages over 1 KB at every 97th byte: what they try is their length."""
    whole = dict(zip([case.name for case in ALL], door.statuses([(case, 0) for case in ALL]), strict=True))
    sent = [
        (case, at)
        for case in ALL
        for at in range(1, len(raw_of(case)), 1 if len(raw_of(case)) < 1024 else 97)
    ]
    assert len(sent) > 20_000
    for (case, at), statuses in zip(sent, door.statuses(sent), strict=True):
        assert statuses == whole[case.name], (case.name, at)


# --- responses --------------------------------------------------------------------------


def play(line: Line, request: Received) -> None:
    """The case that the request names, cut where it says, and the end of the connection."""
    asked = request.json
    case, cut = ANSWERS[asked["case"]], asked["cut"]
    with contextlib.suppress(OSError):
        line.send(*((case.raw[:cut], case.raw[cut:]) if cut else (case.raw,)), gap_s=PAUSE_S)
    if isinstance(line.sock, ssl.SSLSocket):
        # An end without the alert is no end: the answer would count as cut.
        with contextlib.suppress(OSError):
            line.sock.settimeout(0.5)
            line.sock.unwrap()
    line.close()


Outcome = tuple[int, bytes, bool]


def outcomes(gateway: Gateway, model: str, asked: list[tuple[int, int]]) -> list[Outcome]:
    """Status, body and whether it is whole, of each case and cut."""

    def one(each: tuple[int, int]) -> Outcome:
        request = post(body=chat_body(model=model, case=each[0], cut=each[1]))
        answer = gateway.ask(request)
        ours = answer.status >= 500 and answer.clean
        return answer.status, b"" if ours else answer.body, answer.clean

    with ThreadPoolExecutor(24) as pool:
        return list(pool.map(one, asked))


POSTED = [number for number, case in enumerate(ANSWERS) if case.method == "POST"]


def check(case: ResponseCase, outcome: Outcome) -> None:
    """A whole answer of a good case; of a bad one nothing that passes for whole."""
    status, body, clean = outcome
    if not case.code:
        # Bytes behind the end are another answer's, and are never passed on.
        assert (status, body, clean) == (case.status, case.body, True), case.name
    else:
        assert status == 502 or not clean, case.name
        assert b"EVIL" not in body


@pytest.fixture(params=["plain", "secure"])
def model(request: pytest.FixtureRequest, backend: Scripted, secure_backend: tuple[Scripted, Path]) -> str:
    for scripted in (backend, secure_backend[0]):
        scripted.play(play)
    return str(request.param)


def test_responses_whole_and_cut_once(gateway: Gateway, model: str) -> None:
    whole = outcomes(gateway, model, [(number, 0) for number in POSTED])
    for number, outcome in zip(POSTED, whole, strict=True):
        check(ANSWERS[number], outcome)
    cuts = [
        (number, place(ANSWERS[number].name, len(ANSWERS[number].raw)) if len(ANSWERS[number].raw) > 1 else 0)
        for number in POSTED
    ]
    for number, outcome in zip(POSTED, outcomes(gateway, model, cuts), strict=True):
        check(ANSWERS[number], outcome)
    assert all(each["idle_connections"] == 0 for each in gateway.state["backends"])


@pytest.mark.slow
def test_responses_cut_at_every_byte(gateway: Gateway, model: str) -> None:
    asked = [
        (number, at)
        for number in POSTED
        for at in range(1, len(ANSWERS[number].raw), 1 if len(ANSWERS[number].raw) < 1024 else 997)
    ]
    for (number, _), outcome in zip(asked, outcomes(gateway, model, asked), strict=True):
        check(ANSWERS[number], outcome)
