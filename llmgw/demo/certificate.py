"""A certificate for this machine's own name, made on the spot.

A throw-away authority signs one P-256 certificate for ``localhost``, ``127.0.0.1`` and
``::1``. The authority's key is never written down, so that whoever trusts its
certificate trusts this one server and nothing more.

:source: RFC 5280, section 4.2, for the extensions that strict verifiers want.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

HOSTS = ("localhost", "127.0.0.1", "::1")
LIFETIME = timedelta(days=90)
KEPT_WHILE = timedelta(days=7)
"""What is left of a certificate's life must be more than this for it to be used again."""


class CertificateFiles(NamedTuple):
    """Paths of PEM files."""

    certificate: Path
    """The server's."""
    key: Path
    """Its private key, readable by the owner alone."""
    authority: Path
    """What clients verify against."""


def ensure_certificate(
    directory: Path, hosts: Sequence[str] = HOSTS, now: datetime | None = None
) -> CertificateFiles:
    """Files for a server on ``hosts``: the ones in ``directory`` if they will do, new ones otherwise.

    :param now: an aware time; the clock's if absent.
    """
    now = datetime.now(UTC) if now is None else now
    files = CertificateFiles(directory / "cert.pem", directory / "key.pem", directory / "ca.pem")
    if not _usable(files, hosts, now):
        directory.mkdir(parents=True, exist_ok=True)
        _make(files, hosts, now)
    return files


def _usable(files: CertificateFiles, hosts: Sequence[str], now: datetime) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        authority = x509.load_pem_x509_certificate(files.authority.read_bytes())
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
        certificate.verify_directly_issued_by(authority)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:
        # Missing, cut short, of another kind, signed by another: there are many ways, with one answer.
        return False
    return (
        key.public_key() == certificate.public_key()
        and files.key.stat().st_mode & 0o077 == 0
        and list(names) == _names(hosts)
        and certificate.not_valid_before_utc <= now
        and certificate.not_valid_after_utc - now > KEPT_WHILE
    )


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return names


def _make(files: CertificateFiles, hosts: Sequence[str], now: datetime) -> None:
    # An hour back: clocks differ. Whole seconds: X.509 has no smaller ones.
    begin = now.replace(microsecond=0) - timedelta(hours=1)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "llmgw demo authority")])
    authority_id = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    authority = (
        x509.CertificateBuilder()
        .subject_name(authority_name)
        .issuer_name(authority_name)
        .public_key(authority_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(authority_id, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])]))
        .issuer_name(authority_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + LIFETIME)
        .add_extension(x509.SubjectAlternativeName(_names(hosts)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_id), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    write_private(
        files.key,
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    files.certificate.write_bytes(certificate.public_bytes(pem))
    files.authority.write_bytes(authority.public_bytes(pem))


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that was never readable by anyone but its owner."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
