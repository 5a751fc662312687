from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.demo.certificate import CertificateFiles, ensure_certificate

NOW = datetime(2027, 1, 31, 12, tzinfo=UTC)


def test_the_certificate_is_p256_and_names_this_machine(tmp_path: Path) -> None:
    files = ensure_certificate(tmp_path, now=NOW)
    certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["localhost", "127.0.0.1", "::1"]
    assert certificate.not_valid_before_utc < NOW < certificate.not_valid_after_utc


def test_the_private_key_is_its_owners_alone(tmp_path: Path) -> None:
    assert ensure_certificate(tmp_path).key.stat().st_mode & 0o777 == 0o600


def test_only_the_servers_key_is_written(tmp_path: Path) -> None:
    ensure_certificate(tmp_path)
    with_key = [path.name for path in tmp_path.iterdir() if b"PRIVATE KEY" in path.read_bytes()]
    assert with_key == ["key.pem"]


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_a_strict_client_accepts_it_for_each_name(tmp_path: Path, name: str) -> None:
    files = ensure_certificate(tmp_path)
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_side.load_cert_chain(files.certificate, files.key)
    client_side = ssl.create_default_context(cafile=str(files.authority))
    client_side.verify_flags |= ssl.VERIFY_X509_STRICT
    assert shake_hands(server_side, client_side, name)


def test_a_client_refuses_it_for_another_name(tmp_path: Path) -> None:
    files = ensure_certificate(tmp_path)
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_side.load_cert_chain(files.certificate, files.key)
    client_side = ssl.create_default_context(cafile=str(files.authority))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server_side, client_side, "example.org")


def shake_hands(server_side: ssl.SSLContext, client_side: ssl.SSLContext, name: str) -> bool:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    client = client_side.wrap_bio(to_client, to_server, server_hostname=name)
    done = [False, False]
    for _ in range(10):
        for at, side in enumerate((client, server)):
            try:
                side.do_handshake()
                done[at] = True
            except ssl.SSLWantReadError:
                pass
    return all(done)


def test_a_good_one_is_used_again(tmp_path: Path) -> None:
    before = ensure_certificate(tmp_path, now=NOW).certificate.read_bytes()
    later = NOW + timedelta(days=80)
    assert ensure_certificate(tmp_path, now=later).certificate.read_bytes() == before


def test_one_near_its_end_is_replaced(tmp_path: Path) -> None:
    before = ensure_certificate(tmp_path, now=NOW).certificate.read_bytes()
    later = NOW + timedelta(days=84)
    files = ensure_certificate(tmp_path, now=later)
    assert files.certificate.read_bytes() != before
    assert x509.load_pem_x509_certificate(files.certificate.read_bytes()).not_valid_after_utc > later


@pytest.mark.parametrize(
    "spoil",
    [
        lambda files: files.certificate.unlink(),
        lambda files: files.key.unlink(),
        lambda files: files.authority.write_text("nonsense"),
        lambda files: files.key.write_text("nonsense"),
        lambda files: files.key.chmod(0o644),
    ],
    ids=["no certificate", "no key", "bad authority", "bad key", "open key"],
)
def test_a_spoilt_set_is_replaced(tmp_path: Path, spoil: Callable[[CertificateFiles], object]) -> None:
    files = ensure_certificate(tmp_path)
    before = files.certificate.read_bytes() if files.certificate.exists() else b""
    spoil(files)
    ensure_certificate(tmp_path)
    assert files.certificate.read_bytes() != before
    assert files.key.stat().st_mode & 0o777 == 0o600


def test_a_set_for_other_names_is_replaced(tmp_path: Path) -> None:
    before = ensure_certificate(tmp_path).certificate.read_bytes()
    assert ensure_certificate(tmp_path, ["example.org"]).certificate.read_bytes() != before
