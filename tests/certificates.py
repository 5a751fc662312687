"""A certificate that is good for both ends of a connection, from an authority of its own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Files(NamedTuple):
    """Paths of PEM files."""

    certificate: Path
    key: Path
    authority: Path


def issue(folder: Path) -> Files:
    """For ``localhost`` and ``127.0.0.1``, as server and as client."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Files(folder / "both.pem", folder / "both-key.pem", folder / "both-ca.pem")
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    now = datetime.now(UTC)

    def certificate(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )

    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    root = (
        certificate(authority, keys[0])
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(keys[0].public_key()), critical=False)
        .sign(keys[0], hashes.SHA256())
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    leaf = (
        certificate(x509.Name([]), keys[1])
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        # Without it Python's own clients refuse the certificate from 3.13 on.
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(keys[0].public_key()), critical=False
        )
        .sign(keys[0], hashes.SHA256())
    )
    files.authority.write_bytes(root.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        keys[1].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    files.key.chmod(0o600)
    return files
