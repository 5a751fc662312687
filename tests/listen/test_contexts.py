"""OpenSSL contexts: made of good files alone, kept while they are good, and only so long."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from authority import Authority
from OpenSSL import SSL

from llmgw.certificates import BadPair
from llmgw.listen import contexts as module
from llmgw.listen.contexts import GROUPS, TICKET_KEYS_S, Contexts, TlsFiles, reason_of, set_groups


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    path = str(Authority().issue("localhost").write(tmp_path, "one.pem")[0])
    return TlsFiles(key=path)


def shake_hands(server: SSL.Connection, session: Any = None, context: ssl.SSLContext | None = None) -> Any:
    """A client that has shaken hands with ``server`` and read its tickets."""
    server.set_accept_state()
    context = context or client_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, session=session)
    for _ in range(4):
        for step in (client.do_handshake, server.do_handshake):
            try:
                step()
            except (ssl.SSLWantReadError, SSL.WantReadError):
                pass
            if outgoing.pending:
                server.bio_write(outgoing.read())
            try:
                incoming.write(server.bio_read(65536))
            except SSL.WantReadError:
                pass
    server.send(b"x")
    incoming.write(server.bio_read(65536))
    assert client.read(1) == b"x"
    return client


def client_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_ticket_keys_live_half_a_day(files: TlsFiles) -> None:
    now_s = [100.0]
    contexts = Contexts(files.read(), lambda: now_s[0])
    context = client_context()

    def connect(session: Any = None) -> Any:
        return shake_hands(contexts.serverConnectionForTLS(None), session, context)

    session = connect().session
    now_s[0] += TICKET_KEYS_S - 1
    assert connect(session).session_reused
    now_s[0] += 2
    assert not connect(session).session_reused
    assert connect(connect().session).session_reused


OLD_NAMES = {
    "TLS_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
}
"""Suites of TLS 1.3, and what they were in 1.2."""
AES_128, AES_256, CHACHA = OLD_NAMES


@pytest.mark.parametrize("version", [SSL.TLS1_2_VERSION, SSL.TLS1_3_VERSION])
@pytest.mark.parametrize(
    ("offered", "taken"),
    [
        ([AES_256, CHACHA, AES_128], AES_128),
        ([CHACHA, AES_256, AES_128], CHACHA),
        ([AES_256, CHACHA], AES_256),
    ],
)
def test_the_cheapest_suite_is_taken_unless_the_client_has_no_aes(
    files: TlsFiles, version: int, offered: list[str], taken: str
) -> None:
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_max_proto_version(version)
    context.set_tls13_ciphersuites(":".join(offered).encode())
    context.set_cipher_list(":".join(OLD_NAMES[each] for each in offered).encode())
    client = SSL.Connection(context, None)
    server = Contexts(files.read(), lambda: 0.0).serverConnectionForTLS(None)
    client.set_connect_state()
    server.set_accept_state()
    for _ in range(3):
        for side, other in ((client, server), (server, client)):
            with suppress(SSL.WantReadError):
                side.do_handshake()
            with suppress(SSL.WantReadError):
                other.bio_write(side.bio_read(65536))
    assert client.get_cipher_name() in (taken, OLD_NAMES[taken])


def test_a_connection_takes_what_is_in_use_when_it_begins(files: TlsFiles, tmp_path: Path) -> None:
    contexts = Contexts(files.read(), lambda: 0.0)
    early = contexts.serverConnectionForTLS(None)
    other = Authority().issue("localhost")
    contexts.use(TlsFiles(key=str(other.write(tmp_path, "two.pem")[0])).read())
    late = contexts.serverConnectionForTLS(None)
    shown = [shake_hands(each).getpeercert(True) for each in (early, late)]
    assert shown[0] != shown[1] == ssl.PEM_cert_to_DER_cert(other.certificate_pem.decode())


def test_the_groups_can_be_set_with_this_pyopenssl() -> None:
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    assert set_groups(context)
    assert GROUPS == "X25519:P-256:P-384"


def test_without_the_private_handle_openssls_own_groups_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.SSL, "_lib", object())
    assert not set_groups(SSL.Context.__new__(SSL.Context))


def test_what_openssl_refuses_names_the_file(files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise SSL.Error([("SSL routines", "", "ee key too small")])

    monkeypatch.setattr(SSL.Context, "use_certificate", refuse)
    with pytest.raises(BadPair, match=r"one\.pem: ee key too small"):
        files.read()


def test_nothing_to_serve_is_told() -> None:
    with pytest.raises(BadPair, match="privateKey or certs is missing"):
        TlsFiles().read()


def test_reasons_are_openssls_words_and_nothing_else() -> None:
    assert reason_of(SSL.Error([("a", "b", "bad record mac")])) == "bad record mac"
    assert reason_of(SSL.Error([("a", "b", "")])) == "no reason given"
    assert reason_of(SSL.Error()) == "Error"
    assert reason_of(SSL.SysCallError(-1, "Unexpected EOF")) == "(-1, 'Unexpected EOF')"
