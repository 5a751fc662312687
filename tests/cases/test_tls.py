"""Cases on TLS, with the daemon as a process: reload, handshakes that fail, names, client certificates."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from authority import Authority, Issued
from harness import (
    LAST_CHUNK,
    SSE_HEAD,
    WAIT_S,
    Client,
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
    free_port,
    post,
)

from llmgw.core.proxy_header import V2_START


class Tls(Client):
    """A client that trusts one authority."""

    sock: Any

    def __init__(
        self,
        port: int,
        authority: Authority,
        name: str | None = "gw.example",
        *,
        before: bytes = b"",
        context: ssl.SSLContext | None = None,
        session: ssl.SSLSession | None = None,
    ) -> None:
        super().__init__(port)
        self.sock.sendall(before)
        context = context or trusting(authority)
        self.sock = context.wrap_socket(self.sock, server_hostname=name, session=session)

    @property
    def serial(self) -> int:
        """Of the certificate that was shown."""
        return int(self.sock.getpeercert()["serialNumber"], 16)

    def ask(self, request: bytes | None = None) -> Any:
        self.send(request if request is not None else post())
        return self.read_answer()


def trusting(authority: Authority, *, check_name: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.pem.decode())
    context.check_hostname = check_name
    return context


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def clients_authority() -> Authority:
    return Authority("clients' authority")


@pytest.fixture(scope="module")
def backend() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


class Ports:
    plain = 0
    sni = 0
    proxied = 0
    mutual = 0
    optional = 0
    modern = 0


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory,
    authority: Authority,
    clients_authority: Authority,
    backend: Scripted,
) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("tls")
    authority.issue("gw.example").write(folder, "server")
    authority.issue("a.example").write(folder / "certs", "a.example.pem")
    authority.issue("*.b.example").write(folder / "certs", "_.b.example")
    authority.issue("default.example").write(folder / "certs", "default.pem")
    clients_authority.write(folder / "clients.pem")
    for name in vars(Ports):
        if not name.startswith("_"):
            setattr(Ports, name, free_port())
    pair = "privateKey=server.key:certKey=server.crt:interface=127.0.0.1"
    listen = [
        f"llmtls:tcp:{Ports.plain}:{pair}",
        f"llmtls:tcp:{Ports.sni}:certs=certs:interface=127.0.0.1",
        rf"llmtls:haproxy\:tcp\:{Ports.proxied}:{pair}",
        f"llmtls:tcp:{Ports.mutual}:clientCA=clients.pem:{pair}",
        f"llmtls:tcp:{Ports.optional}:clientCA=clients.pem:clientCerts=optional:{pair}",
        f"llmtls:tcp:{Ports.modern}:minimum=1.3:{pair}",
    ]
    config = f"listen = {json.dumps(listen)}\n"
    config += '[log]\naccess = "access.log"\n[timeouts]\ntls_handshake_s = 1.0\nclose_grace_s = 1.0\n'
    running = Gateway(folder, config + backend_table(backend, "b", 'models = ["m"]'))
    yield running
    running.stop()
    assert "Traceback" not in running.log
    assert "Unhandled" not in running.log


@pytest.fixture(autouse=True)
def _afresh(gateway: Gateway, backend: Scripted) -> Iterator[None]:
    backend.play(answer_completion)
    yield
    eventually(gateway.is_idle)
    assert not backend.errors


def reload(gateway: Gateway) -> tuple[int, Any]:
    status, body = gateway.admin("/api/reload", "POST")
    return status, json.loads(body)


def log_since(gateway: Gateway, size: int, words: str) -> str:
    def found() -> str | None:
        lines = gateway.log_path.read_bytes()[size:].decode(errors="replace").splitlines()
        return next((line for line in lines if words in line), None)

    told: str = eventually(found)
    return told


# --- S-TLS-1: reload ----------------------------------------------------------------


def test_s_tls_1_a_new_certificate_is_shown_and_no_stream_breaks(
    gateway: Gateway, backend: Scripted, authority: Authority
) -> None:
    go_on = threading.Event()

    def script(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("one")))
        go_on.wait(WAIT_S)
        line.send(chunk(event("two")), chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    backend.play(script)
    with Tls(Ports.plain, authority) as streaming:
        old = streaming.serial
        streaming.send(post(body=chat_body(stream=True)))
        streaming.read_until(b"one")
        new = authority.issue("gw.example")
        new.write(gateway.folder, "server")
        assert new.serial != old
        with Tls(Ports.plain, authority) as early:
            assert early.serial == old  # nothing is looked at unasked
        assert reload(gateway) == (200, {"status": "reloaded", "needs_restart": []})
        for port in (Ports.plain, Ports.modern):
            with Tls(port, authority) as late:
                assert late.serial == new.serial
        go_on.set()
        assert b"two" in streaming.read_until(b"[DONE]")
    backend.play(answer_completion)
    newer = authority.issue("gw.example")
    newer.write(gateway.folder, "server")
    gateway.process.send_signal(signal.SIGHUP)

    def is_shown() -> bool:
        with Tls(Ports.plain, authority) as client:
            return client.serial == newer.serial

    eventually(is_shown)


def test_s_tls_1_a_pair_that_does_not_match_is_refused_and_the_old_one_stays(
    gateway: Gateway, authority: Authority
) -> None:
    with Tls(Ports.plain, authority) as client:
        old = client.serial
    certificate = gateway.folder / "server.crt"
    kept = certificate.read_bytes()
    size = gateway.log_path.stat().st_size
    try:
        for content, told in [
            (authority.issue("gw.example").certificate_pem, "does not belong to the private key"),
            (b"", "holds no certificate in PEM"),
        ]:
            certificate.write_bytes(content)
            status, answer = reload(gateway)
            assert status == 400
            assert f"{certificate}: {told}" in json.dumps(answer)
            assert "listen[0]" in json.dumps(answer)
            with Tls(Ports.plain, authority) as client:
                assert client.serial == old
                assert client.ask().status == 200
        gateway.process.send_signal(signal.SIGHUP)
        assert str(certificate) in log_since(gateway, size, "holds no certificate")
    finally:
        certificate.write_bytes(kept)
    assert reload(gateway)[0] == 200


def test_an_expired_certificate_does_not_replace_a_good_one(gateway: Gateway, authority: Authority) -> None:
    with Tls(Ports.plain, authority) as client:
        old = client.serial
    paths = [gateway.folder / "server.crt", gateway.folder / "server.key"]
    kept = [(path, path.read_bytes()) for path in paths]
    authority.issue("gw.example", days=-1).write(gateway.folder, "server")
    status, answer = reload(gateway)
    for path, content in kept:
        path.write_bytes(content)
    assert status == 400
    assert "expired on" in json.dumps(answer)
    with Tls(Ports.plain, authority) as client:
        assert client.serial == old


def test_a_name_that_is_added_to_the_directory_is_served_after_a_reload(
    gateway: Gateway, authority: Authority
) -> None:
    issued = authority.issue("new.example")
    issued.write(gateway.folder / "certs", "new.example.pem")
    assert reload(gateway)[0] == 200
    with Tls(Ports.sni, authority, "new.example", context=trusting(authority, check_name=True)) as client:
        assert client.serial == issued.serial


def test_reloads_under_load_cut_and_refuse_nothing(
    gateway: Gateway, backend: Scripted, authority: Authority
) -> None:
    go_on = threading.Event()

    def script(line: Line, request: Received) -> None:
        if b'"long"' not in request.body:
            answer_completion(line, request)
            return
        line.send(SSE_HEAD, chunk(event("one")))
        go_on.wait(60)
        line.send(chunk(event("two")), chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    backend.play(script)
    faults: list[str] = []
    seen: set[int] = set()
    done = [0]

    def call() -> None:
        while not go_on.is_set():
            try:
                with Tls(Ports.plain, authority) as client:
                    seen.add(client.serial)
                    answer = client.ask()
                    if answer.status != 200 or not answer.clean:
                        faults.append(str(answer.status))
            except (OSError, AssertionError) as error:
                faults.append(repr(error))
            done[0] += 1

    streams = [Tls(Ports.plain, authority) for _ in range(4)]
    for stream in streams:
        stream.send(post(body=chat_body(stream=True, user="long")))
        stream.read_until(b"one")
    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    for _ in range(20):
        authority.issue("gw.example").write(gateway.folder, "server")
        assert reload(gateway)[0] == 200
        before = done[0]
        eventually(lambda before=before: done[0] > before)  # type: ignore[misc]
    go_on.set()
    for caller in callers:
        caller.join()
    for stream in streams:
        with stream:
            assert b"two" in stream.read_until(b"[DONE]")
    assert not faults
    assert len(seen) > 10


# --- S-TLS-2: handshakes that never end ----------------------------------------------


def test_s_tls_2_handshakes_that_never_finish_are_closed(gateway: Gateway, authority: Authority) -> None:
    hello = client_hello()
    begun_s = time.monotonic()
    stuck = [socket.create_connection(("127.0.0.1", Ports.plain), WAIT_S) for _ in range(60)]
    for half in stuck[::2]:
        half.sendall(hello[: len(hello) // 2])
    with Tls(Ports.plain, authority) as client:
        assert client.ask().status == 200
    before = gateway.state["refusals"].get("tls_handshake_timeout", 0)
    for each in stuck:
        with each:
            try:
                assert each.recv(100) == b""
            except ConnectionResetError:
                pass
    assert time.monotonic() - begun_s < WAIT_S
    assert before <= 60
    eventually(lambda: gateway.state["refusals"].get("tls_handshake_timeout", 0) >= 60)
    eventually(lambda: gateway.state["connections"] == 0)


def test_s_tls_2_they_do_not_use_up_the_connection_cap(
    tmp_path: Path, authority: Authority, backend: Scripted
) -> None:
    authority.issue("gw.example").write(tmp_path, "server")
    port = free_port()
    listen = f"llmtls:tcp:{port}:interface=127.0.0.1:privateKey=server.key:certKey=server.crt"
    config = f'listen = ["{listen}"]\n[limits]\nconnections = 90\n'
    running = Gateway(tmp_path, config + backend_table(backend, "b", 'models = ["m"]'))
    half = client_hello()[:100]
    try:
        with Tls(port, authority) as steady:
            assert steady.ask().status == 200
            stuck = [socket.create_connection(("127.0.0.1", port), WAIT_S) for _ in range(200)]
            for each in stuck:
                with contextlib.suppress(OSError):
                    each.sendall(half)
            with Tls(port, authority) as late:
                assert late.ask().status == 200
            assert steady.ask().status == 200
        refusals = running.state["refusals"]
        assert refusals["awaiting_first_request"] >= 200 - 64
        assert "connections" not in refusals
        for each in stuck:
            each.close()
    finally:
        running.stop()
    assert "Traceback" not in running.log


def client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="gw.example")
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def test_a_peer_that_never_says_goodbye_holds_nothing(gateway: Gateway, authority: Authority) -> None:
    context = trusting(authority)
    plain = socket.create_connection(("127.0.0.1", Ports.plain), WAIT_S)
    with context.wrap_socket(plain, server_hostname="gw.example", suppress_ragged_eofs=False) as sock:
        sock.sendall(post(headers="Connection: close\r\n"))
        while sock.recv(65536):
            pass
        # close_notify has come; ours is never sent. The grace is one second here.
        eventually(lambda: gateway.state["connections"] == 0)


@pytest.mark.parametrize("kind", ["ssl:{}", "llmtls:tcp:{}", "tcp:{}"])
def test_connections_over_the_cap_are_closed_whatever_the_listener(
    tmp_path: Path, authority: Authority, backend: Scripted, kind: str
) -> None:
    authority.issue("gw.example").write(tmp_path, "server")
    port = free_port()
    listen = f"{kind.format(port)}:interface=127.0.0.1"
    if "tls" in kind or "ssl" in kind:
        listen += ":privateKey=server.key:certKey=server.crt"
    config = f'listen = ["{listen}"]\n[limits]\nconnections = 2\n'
    running = Gateway(tmp_path, config + backend_table(backend, "b"))
    try:
        kept = [socket.create_connection(("127.0.0.1", port), WAIT_S) for _ in range(2)]
        eventually(lambda: running.state["connections"] == 2)
        for _ in range(3):
            with contextlib.suppress(ConnectionResetError):
                late = socket.create_connection(("127.0.0.1", port), WAIT_S)
                with late:
                    assert late.recv(1) == b""
        assert running.state["refusals"]["connections"] == 3
        assert running.state["connections"] == 2
        for each in kept:
            each.close()
    finally:
        running.stop()
    assert "Traceback" not in running.log


# --- S-TLS-3: renegotiation -----------------------------------------------------------


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")


def s_client(*options: str) -> subprocess.Popen[bytes]:
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{Ports.plain}", *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def until(client: subprocess.Popen[bytes], words: bytes) -> None:
    assert client.stdout is not None
    for line in client.stdout:
        if words in line:
            return
    raise AssertionError(f"never said {words!r}")


@needs_openssl
def test_s_tls_3_renegotiation_is_refused(gateway: Gateway) -> None:
    with s_client("-tls1_2") as client:
        assert client.stdin is not None
        assert client.stdout is not None
        until(client, b"Extended master secret")
        client.stdin.write(b"R\n")
        client.stdin.flush()
        told = client.stdout.read().decode()
    assert "RENEGOTIATING" in told
    assert re.search(r"no renegotiation|:error:", told), told


# --- S-TLS-4: names and client certificates -------------------------------------------


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (None, "default.example"),
        ("unknown.example", "default.example"),
        ("a.example", "a.example"),
        ("A.Example", "a.example"),
        ("x.b.example", "*.b.example"),
        ("x.y.b.example", "default.example"),
        ("b.example", "default.example"),
    ],
)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_s_tls_4_the_certificate_is_chosen_by_name(
    gateway: Gateway, authority: Authority, asked: str | None, shown: str, version: ssl.TLSVersion
) -> None:
    context = trusting(authority)
    context.maximum_version = version
    with Tls(Ports.sni, authority, asked, context=context) as client:
        names = [value for _, value in client.sock.getpeercert()["subjectAltName"]]
        assert names == [shown]
        assert client.ask().status == 200


def mutual(authority: Authority, folder: Path, issued: Issued | None) -> ssl.SSLContext:
    context = trusting(authority)
    if issued is not None:
        context.load_cert_chain(*issued.write(folder, "client"))
    return context


def test_s_tls_4_client_certificates(
    gateway: Gateway, authority: Authority, clients_authority: Authority, tmp_path: Path
) -> None:
    good = clients_authority.issue("robot-7", client=True)
    refused = {
        "did not return a certificate": None,
        "client certificate expired": clients_authority.issue("old\n\x1b[31m", days=-1, client=True),
        "client certificate signed by an authority that is not known": Authority().issue("no", client=True),
        "client certificate not made for clients": clients_authority.issue("server.example"),
    }
    for told, issued in refused.items():
        size = gateway.log_path.stat().st_size
        count = gateway.state["refusals"].get("tls", 0)
        with (
            pytest.raises((ssl.SSLError, OSError)),
            Tls(Ports.mutual, authority, context=mutual(authority, tmp_path, issued)) as client,
        ):
            client.send(post())
            client.sock.recv(1)
        line = log_since(gateway, size, "TLS handshake failed")
        assert told in line
        assert line.isprintable()
        assert gateway.state["refusals"]["tls"] == count + 1
    for port in (Ports.mutual, Ports.optional):
        with Tls(port, authority, context=mutual(authority, tmp_path, good)) as client:
            client.send(post(headers=f"x-request-id: mutual-{port}\r\n"))
            assert client.read_answer().status == 200
    with Tls(Ports.optional, authority) as client:
        client.send(post(headers="x-request-id: nobody\r\n"))
        assert client.read_answer().status == 200
    gateway.process.send_signal(signal.SIGHUP)  # writes the access log
    eventually(lambda: any(line["id"] == "nobody" for line in gateway.access))
    lines = {line["id"]: line for line in gateway.access}
    assert lines[f"mutual-{Ports.mutual}"]["certificate"] == "CN=robot-7"
    assert lines[f"mutual-{Ports.optional}"]["certificate"] == "CN=robot-7"
    assert "certificate" not in lines["nobody"]


# --- what is offered -------------------------------------------------------------------


def test_http_1_1_is_all_that_is_offered(gateway: Gateway, authority: Authority) -> None:
    for offered, taken in [(["h2", "http/1.1"], "http/1.1"), (["http/1.0"], "http/1.0"), ([], None)]:
        context = trusting(authority)
        if offered:
            context.set_alpn_protocols(offered)
        with Tls(Ports.plain, authority, context=context) as client:
            assert client.sock.selected_alpn_protocol() == taken
            assert client.ask().status == 200
    context = trusting(authority)
    context.set_alpn_protocols(["h2"])
    with pytest.raises(ssl.SSLError, match="no application protocol"):
        Tls(Ports.plain, authority, context=context)


def test_old_versions_and_weak_suites_are_refused(gateway: Gateway, authority: Authority) -> None:
    context = trusting(authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with Tls(Ports.plain, authority, context=context) as client:
        assert client.sock.version() == "TLSv1.2"
    with pytest.raises(ssl.SSLError):
        Tls(Ports.modern, authority, context=context)
    for suites in ("ECDHE-ECDSA-AES128-SHA256", "ECDHE-ECDSA-AES256-CCM", "AES128-GCM-SHA256"):
        context = trusting(authority)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(suites)
        with pytest.raises(ssl.SSLError):
            Tls(Ports.plain, authority, context=context)


def test_only_the_three_groups_are_taken(gateway: Gateway, authority: Authority) -> None:
    for group, taken in [("X25519", True), ("prime256v1", True), ("secp384r1", True), ("secp521r1", False)]:
        # Python's own call for it knows fewer names, the older its OpenSSL is.
        told = subprocess.run(
            ["openssl", "s_client", "-connect", f"127.0.0.1:{Ports.plain}", "-groups", group, "-tls1_3"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert ("New, TLSv1.3" in told.stdout) is taken, (group, told.stdout)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("name", ["a.example", None])
def test_sessions_are_resumed(
    gateway: Gateway, authority: Authority, version: ssl.TLSVersion, name: str | None
) -> None:
    context = trusting(authority)
    context.maximum_version = context.minimum_version = version
    with Tls(Ports.sni, authority, name, context=context) as first:
        assert first.ask().status == 200
        session = first.sock.session
    with Tls(Ports.sni, authority, name, context=context, session=session) as second:
        assert second.sock.session_reused
        assert second.ask().status == 200


@needs_openssl
def test_a_key_update_in_the_middle_is_taken(gateway: Gateway) -> None:
    with s_client("-tls1_3") as client:
        assert client.stdin is not None
        assert client.stdout is not None
        for _ in range(3):
            client.stdin.write(b"K\n")
            client.stdin.flush()
            until(client, b"KEYUPDATE")
        client.stdin.write(post(headers="Connection: close\r\n"))
        client.stdin.flush()
        assert b"200 OK" in client.stdout.read()


# --- the PROXY protocol before TLS -----------------------------------------------------


def test_the_proxy_header_comes_before_tls(gateway: Gateway, authority: Authority) -> None:
    for index, header in enumerate(
        [
            b"PROXY TCP4 192.0.2.77 198.51.100.1 5000 443\r\n",
            V2_START + b"\x21\x11\x00\x0c" + bytes([192, 0, 2, 77, 198, 51, 100, 1]) + b"\x13\x88\x01\xbb",
        ]
    ):
        with Tls(Ports.proxied, authority, before=header) as client:
            client.send(post(headers=f"x-request-id: proxied-{index}\r\n"))
            assert client.read_answer().status == 200
    gateway.process.send_signal(signal.SIGHUP)
    for index in range(2):
        line = eventually(lambda index=index: [x for x in gateway.access if x["id"] == f"proxied-{index}"])[0]
        assert line["peer"] == "192.0.2.77"


def test_tls_without_a_proxy_header_is_refused(gateway: Gateway, authority: Authority) -> None:
    size = gateway.log_path.stat().st_size
    with pytest.raises((ssl.SSLError, OSError)):
        Tls(Ports.proxied, authority)
    assert "does not begin with a PROXY header" in log_since(gateway, size, "refused")
