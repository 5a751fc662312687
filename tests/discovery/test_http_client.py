"""Questions to servers that hang, flood, cut, speak nonsense, or are somebody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from certificates import issue
from harness import free_port
from twisted.internet import reactor, ssl
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater

from llmgw.discovery import http_client
from llmgw.discovery.http_client import AwayError, HttpClient, QuietError, StatusError, TlsFiles

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Played(Protocol):
    """Plays a script once the head of a request is here."""

    factory: Any
    head = b""

    def connectionMade(self) -> None:
        self.factory.open.append(self)

    def dataReceived(self, data: bytes) -> None:
        if b"\r\n\r\n" not in self.head:
            self.head += data
            if b"\r\n\r\n" in self.head:
                self.factory.script(self.transport)

    def connectionLost(self, reason: Any = None) -> None:
        self.factory.open.remove(self)


class Server(Factory):
    protocol = Played
    noisy = False

    def __init__(self, script: Callable[[Any], None], tls: Any = None) -> None:
        self.script = script
        self.open: list[Any] = []
        listen: Any = reactor
        if tls is None:
            self.port = listen.listenTCP(0, self, interface="127.0.0.1")
        else:
            self.port = listen.listenSSL(0, self, tls, interface="127.0.0.1")
        number = self.port.getHost().port
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{number}/x"

    async def close(self) -> None:
        """Fails unless the client has left nothing open."""
        for _ in range(200):
            if not self.open:
                break
            await pause(0.01)
        assert not self.open
        await self.port.stopListening()


def pause(seconds: float) -> Deferred[None]:
    return deferLater(reactor, seconds)  # type: ignore[arg-type]


def client(**files: Any) -> HttpClient:
    return HttpClient(reactor, TlsFiles(**files), 2.0)


def answering(*pieces: bytes, close: bool = True) -> Callable[[Any], None]:
    def script(transport: Any) -> None:
        transport.write(b"".join(pieces))
        if close:
            transport.loseConnection()

    return script


def whole(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


async def raised(asking: Any) -> Exception:
    try:
        await Deferred.fromCoroutine(asking)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest_twisted.ensureDeferred
async def test_an_answer_is_status_and_body_and_leaves_nothing_open() -> None:
    server = Server(answering(whole(b"{}", "404 No"), close=False))
    assert await client().ask("POST", server.url, {"x": "y"}, b"body", 5) == (404, b"{}")
    await server.close()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (lambda transport: None, "no answer in 0.2 s"),
        (lambda transport: transport.abortConnection(), "closed the connection"),
        (answering(b"nonsense\r\n\r\n"), ""),
        (answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"), "closed the connection"),
        (answering(CHUNKED + b"zz\r\n", close=False), ""),
        (answering(whole(b"x" * 300)), "more than 200 bytes"),
        (answering(CHUNKED + b"1ff\r\n" + b"x" * 300, close=False), "more than 200 bytes"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_what_is_no_answer_says_why(script: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "ANSWER_BYTES", 200)
    server = Server(script)
    error = await raised(client().ask("GET", server.url, {}, None, 0.2))
    assert isinstance(error, AwayError)
    assert why in str(error)
    assert str(error)
    await server.close()


@pytest_twisted.ensureDeferred
async def test_nobody_there_is_away() -> None:
    error = await raised(client().ask("GET", f"http://127.0.0.1:{free_port()}/", {}, None, 5))
    assert isinstance(error, AwayError)
    assert "refused" in str(error)


@pytest_twisted.ensureDeferred
async def test_a_stream_is_handed_on_as_it_comes() -> None:
    fed: list[bytes] = []
    server = Server(answering(CHUNKED, b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n", close=False))
    await client().stream("POST", server.url, {}, b"{}", fed.append, open_s=5, silence_s=5)
    assert b"".join(fed) == b"onetwo"
    await server.close()


@pytest.mark.parametrize(
    ("script", "kind", "why"),
    [
        (lambda transport: None, AwayError, "no answer in 0.2 s"),
        (answering(CHUNKED, close=False), AwayError, "no answer in 0.2 s"),
        (answering(CHUNKED, b"3\r\none\r\n", close=False), QuietError, "nothing came for 0.1 s"),
        (answering(CHUNKED, b"3\r\non"), AwayError, "closed the connection"),
        (answering(whole(b"why", "503 No")), StatusError, "status 503"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_how_a_stream_can_end(script: Any, kind: Any, why: str) -> None:
    server = Server(script)
    error = await raised(
        client().stream("GET", server.url, {}, None, lambda data: None, open_s=0.2, silence_s=0.1)
    )
    assert type(error) is kind
    assert why in str(error)
    if isinstance(error, StatusError):
        assert error.body == b"why"
    await server.close()


@pytest_twisted.ensureDeferred
async def test_one_that_need_not_speak_first_is_merely_quiet() -> None:
    server = Server(answering(CHUNKED, close=False))
    error = await raised(
        client().stream("GET", server.url, {}, None, print, open_s=0.2, silence_s=0.3, speaks_first=False)
    )
    assert isinstance(error, QuietError)
    await server.close()


@pytest_twisted.ensureDeferred
async def test_what_the_feed_raises_ends_the_stream_and_comes_out() -> None:
    def feed(data: bytes) -> None:
        raise KeyError("mine")

    server = Server(answering(CHUNKED, b"3\r\none\r\n", b"3\r\ntwo\r\n", close=False))
    error = await raised(client().stream("GET", server.url, {}, None, feed, open_s=5, silence_s=5))
    assert isinstance(error, KeyError)
    await server.close()


@pytest.mark.parametrize("script", [lambda transport: None, answering(CHUNKED, b"3\r\none\r\n", close=False)])
@pytest_twisted.ensureDeferred
async def test_cancelling_closes_and_leaves_nothing(script: Any) -> None:
    server = Server(script)
    fed: list[bytes] = []
    for ask in (
        lambda: client().ask("GET", server.url, {}, None, 5),
        lambda: client().stream("GET", server.url, {}, None, fed.append, open_s=5, silence_s=5),
    ):
        asking = Deferred.fromCoroutine(ask())
        errors: list[Any] = []
        asking.addErrback(lambda failure, errors=errors: errors.append(failure.value))
        await pause(0.05)
        asking.cancel()
        assert [type(error) for error in errors] == [CancelledError]
    await server.close()


@pytest.mark.parametrize("delay_s", [None, 0, 0.0005, 0.002])
@pytest_twisted.ensureDeferred
async def test_cancelling_while_the_request_goes_out_is_a_cancelling(delay_s: float | None) -> None:
    server = Server(lambda transport: None)
    body = b"x" * 4_000_000  # takes several turns to be written
    for ask in (
        lambda: client().ask("POST", server.url, {}, body, 5),
        lambda: client().stream("POST", server.url, {}, body, print, open_s=5, silence_s=5),
    ):
        asking = Deferred.fromCoroutine(ask())
        errors: list[Any] = []
        asking.addErrback(lambda failure, errors=errors: errors.append(failure.value))
        if delay_s is not None:
            await pause(delay_s)
        asking.cancel()
        await pause(0.05)
        assert [type(error) for error in errors] == [CancelledError]
    await server.close()


@pytest_twisted.ensureDeferred
async def test_who_is_there_is_verified_and_who_we_are_is_shown(tmp_path: Path) -> None:
    ours, others = issue(tmp_path / "a"), issue(tmp_path / "b")
    identity = ssl.PrivateCertificate.loadPEM(ours.certificate.read_bytes() + ours.key.read_bytes())
    trust = ssl.Certificate.loadPEM(ours.authority.read_bytes())
    seen: list[Any] = []

    def script(transport: Any) -> None:
        seen.append(transport.getPeerCertificate() is not None)
        transport.write(whole(b"{}"))

    server = Server(script, identity.options(trust))
    ca, cert, key = (str(path) for path in (ours.authority, ours.certificate, ours.key))
    known = client(ca_file=ca, cert_file=cert, key_file=key)
    assert await known.ask("GET", server.url, {}, None, 5) == (200, b"{}")
    assert seen == [True]
    for stranger in (client(), client(ca_file=str(others.authority), cert_file=cert, key_file=key)):
        error = await raised(stranger.ask("GET", server.url, {}, None, 5))
        assert isinstance(error, AwayError)
        assert str(error).startswith("TLS: ")
        assert "certificate verify failed" in str(error)
    error = await raised(client(ca_file="/no/such").ask("GET", server.url, {}, None, 5))
    assert "TLS: " in str(error)
    await server.close()
    await pause(0.02)


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"])
def test_files_that_hold_no_certificate_are_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.pem"
    path.write_text(text)
    for files in ({"ca_file": str(path)}, {"cert_file": str(path)}):
        with pytest.raises(ValueError, match="certificate"):
            TlsFiles(**files).options("localhost")
