"""Backends behind ``https``: verified by name, date and authority, and shown a certificate if they ask."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from authority import Authority, Issued
from harness import Gateway, Scripted, backend_table, chat_body, eventually, post

SECRET = "sk-not-for-strangers"


class Behind(Scripted):
    """One behind ``https`` that notes handshakes in which a client stayed to speak."""

    def __init__(self, folder: Path, name: str, issued: Issued, *, asks: Authority | None = None) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*issued.write(folder, name))
        if asks is not None:
            context.load_verify_locations(cadata=asks.pem.decode())
            context.verify_mode = ssl.CERT_REQUIRED
        super().__init__(tls=context)


class Fleet:
    """One gateway, a backend for each case; the model is called as the case."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        self.clients = Authority("gateways")
        other = Authority("somebody else")
        issue = self.authority.issue
        self.backends = {
            "good": Behind(folder, "good", issue("localhost")),
            "address": Behind(folder, "address", issue("127.0.0.1")),
            "wrong-name": Behind(folder, "wrong-name", issue("other.example")),
            "wrong-address": Behind(folder, "wrong-address", issue("localhost")),
            "expired": Behind(folder, "expired", issue("localhost", days=-1)),
            "stranger": Behind(folder, "stranger", other.issue("localhost")),
            "system": Behind(folder, "system", issue("localhost")),
            "unverified": Behind(folder, "unverified", other.issue("other.example", days=-1)),
            "asks": Behind(folder, "asks", issue("localhost"), asks=self.clients),
            "asks-in-vain": Behind(folder, "asks-in-vain", issue("localhost"), asks=self.clients),
            "renewed": Behind(folder, "renewed", other.issue("localhost")),
        }
        self.other = other
        ca = self.authority.write(folder / "ca.pem")
        self.renewed = self.authority.write(folder / "renewed-ca.pem")
        self.clients.issue("gateway", client=True).write(folder, "own")
        key = folder / "api.key"
        key.write_text(SECRET)
        key.chmod(0o600)
        config = "[breaker]\nconsecutive = 100000\nratio_min = 1000000\n"
        for id, backend in self.backends.items():
            if "address" in id:
                backend.url = backend.url.replace("localhost", "127.0.0.1")
            tls = {
                "system": "",
                "unverified": "verify = false",
                "asks": f'ca_file = "{ca}"\ncert_file = "own.crt"\nkey_file = "own.key"',
                "renewed": f'ca_file = "{self.renewed}"',
            }.get(id, f'ca_file = "{ca}"')
            config += backend_table(
                backend, id, f'models = ["{id}"]\napi_key_file = "{key}"\n[backends.tls]\n{tls}'
            )
        self.gateway = Gateway(folder, config)

    def detail(self, id: str) -> str:
        [found] = [each for each in self.gateway.state["backends"] if each["id"] == id]
        return str(found)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("https"))
    yield made
    made.gateway.stop()
    for backend in made.backends.values():
        backend.close()
    assert "Traceback" not in made.gateway.log
    assert "Unhandled" not in made.gateway.log
    assert SECRET not in made.gateway.log


@pytest.mark.parametrize("id", ["good", "address", "unverified", "asks"])
def test_one_that_passes_is_asked(fleet: Fleet, id: str) -> None:
    eventually(lambda: fleet.gateway.ask(post(body=chat_body(id))).status == 200)
    [request] = fleet.backends[id].requests[:1]
    assert request.get("authorization") == f"Bearer {SECRET}"


@pytest.mark.parametrize(
    "id", ["wrong-name", "wrong-address", "expired", "stranger", "system", "asks-in-vain"]
)
def test_one_that_fails_gets_not_a_byte_of_a_request(fleet: Fleet, id: str) -> None:
    answer = fleet.gateway.ask(post(body=chat_body(id)))
    assert answer.status in (502, 503)
    assert SECRET.encode() not in answer.body
    backend = fleet.backends[id]
    eventually(lambda: backend.accepted > 0)
    assert not backend.requests
    assert not backend.probed


def test_a_warning_is_told_where_nothing_is_verified(fleet: Fleet) -> None:
    assert "tls.verify: false: anybody on the way can pose as this backend" in fleet.gateway.log


def test_a_reload_reads_the_authorities_again(fleet: Fleet) -> None:
    assert fleet.gateway.ask(post(body=chat_body("renewed"))).status in (502, 503)
    fleet.other.write(fleet.renewed)
    assert fleet.gateway.admin("/api/reload", "POST")[0] == 200
    eventually(lambda: fleet.gateway.ask(post(body=chat_body("renewed"))).status == 200)
    fleet.renewed.write_bytes(b"nothing")
    status, body = fleet.gateway.admin("/api/reload", "POST")
    assert status == 400
    assert b"].tls: " in body
    assert b"ca.pem: holds no certificate in PEM" in body
    assert fleet.gateway.ask(post(body=chat_body("renewed"))).status == 200
    fleet.other.write(fleet.renewed)


def test_a_pair_of_ours_that_does_not_match_is_refused(fleet: Fleet) -> None:
    certificate = fleet.folder / "own.crt"
    kept = certificate.read_bytes()
    certificate.write_bytes(fleet.clients.issue("gateway", client=True).certificate_pem)
    status, body = fleet.gateway.admin("/api/reload", "POST")
    certificate.write_bytes(kept)
    assert status == 400
    assert b"].tls: " in body
    assert b"does not belong to the private key" in body
