"""Certificates as tests want them: right ones, and wrong ones of every kind."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)


class Issued:
    """A certificate and its key, as PEM."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        self.certificate = certificate
        self.key = key
        self.certificate_pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.key_pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    @property
    def serial(self) -> int:
        return self.certificate.serial_number

    def write(self, folder: Path, name: str = "server") -> tuple[Path, Path]:
        """``NAME.crt`` and ``NAME.key``, or ``NAME.pem`` with both. :return: certificate, key."""
        folder.mkdir(parents=True, exist_ok=True)
        if name.endswith(".pem"):
            paths = folder / name, folder / name
            write_secret(paths[0], self.key_pem + self.certificate_pem)
            return paths
        paths = folder / f"{name}.crt", folder / f"{name}.key"
        paths[0].write_bytes(self.certificate_pem)
        write_secret(paths[1], self.key_pem)
        return paths


def write_secret(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)


class Authority:
    """Signs certificates; ``issue`` makes each with a new key."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.now(UTC).replace(microsecond=0)
        self.certificate = (
            self._builder(self._name, self._key.public_key(), now - 100 * DAY, now + 100 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.pem)
        return path

    def issue(
        self,
        *names: str,
        days: float = 29,
        begins_days: float = -1,
        client: bool = False,
        key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None,
    ) -> Issued:
        """A certificate for ``names``; ``days`` may be in the past."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC).replace(microsecond=0)
        use = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        begin = min(now + begins_days * DAY, now + days * DAY - DAY)
        certificate = (
            self._builder(subject, key.public_key(), begin, now + days * DAY)
            .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return Issued(certificate, key)

    def _builder(
        self, subject: x509.Name, key: object, begin: datetime, end: datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)  # type: ignore[arg-type]
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
        )


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
