"""Certificates with their keys, read from files and judged before anybody is served with them.

What a server shows by name is a :class:`Pair`. Reading is strict: a key that does
not belong to its certificate, a file that others may read, a second certificate
for one name are told here, with the file's name, and never at the first handshake.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from llmgw.plain_files import read_plain
from llmgw.private_files import mode_fault

SOON = timedelta(days=14)
"""A certificate with less time left is worth a warning."""
DEFAULT_NAME = "default"
LEAST_RSA_BITS = 2048


class BadPair(ValueError):
    """A file that will not do; the message names it."""


@dataclass(frozen=True)
class Pair:
    """A certificate, what stands between it and its authority, and its private key.

    :param source: the certificate's file, for messages.
    :param chain: the server's own certificate first.
    """

    source: str
    chain: tuple[x509.Certificate, ...]
    key: Any = field(repr=False)

    @property
    def leaf(self) -> x509.Certificate:
        """The server's own certificate."""
        return self.chain[0]

    @property
    def expires(self) -> datetime:
        """When the first certificate of the chain runs out."""
        return min(each.not_valid_after_utc for each in self.chain)

    def is_valid_at(self, now: datetime) -> bool:
        """Whether every certificate of the chain is within its time."""
        return max(each.not_valid_before_utc for each in self.chain) <= now <= self.expires

    def covers(self, name: str) -> bool:
        """Whether clients that ask for ``name``, itself perhaps ``*.…``, will accept it (RFC 6125)."""
        return any(own == name or own == _wildcard_of(name) for own in self._names())

    def warnings(self, now: datetime) -> list[str]:
        """What an operator should know, each with the file's name."""
        begins = max(each.not_valid_before_utc for each in self.chain)
        if now > self.expires:
            what, when = "expired on", self.expires
        elif now < begins:
            what, when = "is not valid before", begins
        elif self.expires - now < SOON:
            what, when = "expires on", self.expires
        else:
            return []
        return [f"{self.source}: {what} {when:%Y-%m-%d %H:%M} UTC"]

    def _names(self) -> list[str]:
        try:
            found = self.leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return []
        return [name.lower() for name in found.get_values_for_type(x509.DNSName)]


@dataclass(frozen=True)
class Pairs:
    """All that one listener serves.

    :param by_name: by the name a client asks for, lower case, ``*.…`` for all names one level below.
    :param default: for clients that name nothing (RFC 6066 section 3), or nothing that is here.
    """

    default: Pair
    by_name: Mapping[str, Pair] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Pair]:
        seen = {id(self.default): self.default, **{id(pair): pair for pair in self.by_name.values()}}
        return iter(seen.values())

    def warnings(self, now: datetime) -> list[str]:
        """What an operator should know."""
        told = [line for pair in self for line in pair.warnings(now)]
        for name, pair in self.by_name.items():
            if not pair.covers(name):
                told.append(f"{pair.source}: is not a certificate for {name}")
        return told


def read_pair(certificate_path: str, key_path: str) -> Pair:
    """The certificate chain in one PEM file and the private key in another, or the same.

    :raise BadPair: something is wrong with one of them.
    """
    key = _read_key(key_path)
    chain = read_certificates(certificate_path)
    if key.public_key() != chain[0].public_key():
        raise BadPair(f"{certificate_path}: does not belong to the private key in {key_path}")
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size < LEAST_RSA_BITS:
        short = f"an RSA key of {key.key_size} bits is too short"
        raise BadPair(f"{key_path}: {short}, {LEAST_RSA_BITS} are the least")
    return Pair(certificate_path, tuple(chain), key)


def read_certificates(path: str) -> list[x509.Certificate]:
    """Every certificate in a PEM file, at least one.

    :raise BadPair: it cannot be read, or holds none.
    """
    data = _read(path)
    if b"-----BEGIN CERTIFICATE-----" not in data:
        raise BadPair(f"{path}: holds no certificate in PEM")
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise BadPair(f"{path}: holds a certificate that cannot be read") from None


def read_directory(path: str, default: Pair | None = None) -> Pairs:
    """A directory of ``NAME.pem`` (key and chain) or ``NAME.crt`` with ``NAME.key``.

    ``*.example.com`` may be spelt ``_.example.com``. ``default`` is what
    serves unknown names; without it the pair called ``default`` does, or the only one.

    :raise BadPair: any file in it will not do, a name is there twice, or none is the default.
    """
    try:
        files = sorted(os.listdir(path))
    except OSError as error:
        raise BadPair(f"{path}: cannot be read: {error.strerror}") from None
    by_name: dict[str, Pair] = {}
    for file in files:
        stem, suffix = os.path.splitext(file)
        if file.startswith(".") or suffix not in (".pem", ".crt"):
            continue
        whole = os.path.join(path, file)
        key = whole if suffix == ".pem" else os.path.join(path, stem + ".key")
        name = stem.lower().rstrip(".")
        if name.startswith("_."):
            name = "*" + name[1:]
        if name in by_name:
            raise BadPair(f"{whole}: there is another certificate for {name}: {by_name[name].source}")
        by_name[name] = read_pair(whole, key)
    own = by_name.pop(DEFAULT_NAME, None)
    default = default or own
    if default is None:
        if len(by_name) != 1:
            what = "does not say which one is the default" if by_name else "holds no NAME.pem and no NAME.crt"
            cure = f"name one {DEFAULT_NAME}.pem, or give privateKey= and certKey="
            raise BadPair(f"{path}: {what}: {cure}")
        [default] = by_name.values()
    return Pairs(default, by_name)


def find(by_name: Mapping[str, Any], name: str) -> Any:
    """What serves ``name``: its own entry, or the one for all names beside it, or ``None``."""
    name = name.lower().rstrip(".")
    found = by_name.get(name)
    return found if found is not None else by_name.get(_wildcard_of(name))


def now_utc() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


def _wildcard_of(name: str) -> str:
    return "*." + name.partition(".")[2]


def _read_key(path: str) -> Any:
    try:
        fault = mode_fault(os.stat(path).st_mode, path)
    except OSError as error:
        raise BadPair(f"{path}: cannot be read: {error.strerror}") from None
    if fault:
        raise BadPair(f"{path}: {fault}")
    raw = _read(path)
    try:
        return serialization.load_pem_private_key(raw, None)
    except TypeError:
        raise BadPair(f"{path}: the private key has a passphrase, which nobody is here to type") from None
    except ValueError:
        raise BadPair(f"{path}: holds no private key in PEM that can be read") from None


def _read(path: str) -> bytes:
    try:
        return read_plain(path)
    except OSError as error:
        raise BadPair(f"{path}: cannot be read: {error.strerror}") from None
