"""Certificates and keys, judged before anybody is served with them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from authority import Authority, write_secret
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from llmgw.certificates import BadPair, find, now_utc, read_certificates, read_directory, read_pair


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_a_pair_of_two_files_or_of_one(authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue("a.example")
    certificate, key = issued.write(tmp_path, "two")
    certificate.write_bytes(issued.certificate_pem + authority.pem)
    pair = read_pair(str(certificate), str(key))
    assert [each.serial_number for each in pair.chain] == [issued.serial, authority.certificate.serial_number]
    both = str(issued.write(tmp_path, "one.pem")[0])
    assert read_pair(both, both).leaf == pair.leaf
    assert "PRIVATE" not in repr(pair)


def test_what_is_wrong_with_a_pair_names_the_file(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("a.example"), authority.issue("b.example")
    certificate, key = good.write(tmp_path, "good")
    _, wrong_key = other.write(tmp_path, "other")
    weak = rsa.generate_private_key(65537, 1024)
    weak_certificate, weak_key = authority.issue("w.example", key=weak).write(tmp_path, "weak")
    locked = tmp_path / "locked.key"
    write_secret(
        locked,
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        ),
    )
    open_key = tmp_path / "open.key"
    open_key.write_bytes(good.key_pem)
    open_key.chmod(0o644)
    cut = tmp_path / "cut.crt"
    cut.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    empty = tmp_path / "empty.crt"
    empty.write_bytes(b"")
    unreadable = tmp_path / "unreadable.key"
    unreadable.mkdir(0o700)  # which root cannot read either
    for certificate_path, key_path, told in [
        (certificate, wrong_key, "good.crt: does not belong to the private key in"),
        (certificate, tmp_path / "no.key", "no.key: cannot be read: No such file"),
        (tmp_path / "no.crt", key, "no.crt: cannot be read: No such file"),
        (certificate, unreadable, "unreadable.key: cannot be read: Is a directory"),
        (certificate, locked, "locked.key: the private key has a passphrase"),
        (certificate, open_key, "open.key: is open to other users (mode 0644): chmod 600"),
        (certificate, certificate, "is open to other users"),
        (cut, key, "cut.crt: holds a certificate that cannot be read"),
        (empty, key, "empty.crt: holds no certificate in PEM"),
        (weak_certificate, weak_key, "weak.key: an RSA key of 1024 bits is too short, 2048 are the least"),
    ]:
        with pytest.raises(BadPair, match=r".") as caught:
            read_pair(str(certificate_path), str(key_path))
        assert told in str(caught.value)
    certificate.chmod(0o600)
    with pytest.raises(BadPair, match=r"good\.crt: holds no private key in PEM"):
        read_pair(str(certificate), str(certificate))
    assert len(read_certificates(str(certificate))) == 1


def test_what_an_operator_should_know(authority: Authority, tmp_path: Path) -> None:
    def pair(**dates: float):
        issued = authority.issue("a.example", **dates)
        certificate, key = issued.write(tmp_path, "x")
        return read_pair(str(certificate), str(key))

    now = now_utc()
    assert pair(days=29).warnings(now) == []
    [soon] = pair(days=3).warnings(now)
    assert f"x.crt: expires on {now + timedelta(days=3):%Y-%m-%d}" in soon
    [late] = pair(days=-2).warnings(now)
    assert "x.crt: expired on" in late
    [early] = pair(days=29, begins_days=2).warnings(now)
    assert "x.crt: is not valid before" in early
    assert not pair(days=-2).is_valid_at(now)


def test_a_directory_serves_by_file_name(authority: Authority, tmp_path: Path) -> None:
    for file in ("Api.Example.com.pem", "_.example.com", "default.pem"):
        authority.issue("api.example.com", "*.example.com").write(tmp_path, file)
    (tmp_path / "notes.txt").write_text("not looked at")
    (tmp_path / ".hidden.pem").write_text("nor this")
    pairs = read_directory(str(tmp_path))
    assert set(pairs.by_name) == {"api.example.com", "*.example.com"}
    assert pairs.default.source.endswith("/default.pem")
    assert len(list(pairs)) == 3
    assert find(pairs.by_name, "API.example.com.") is pairs.by_name["api.example.com"]
    assert find(pairs.by_name, "else.example.com") is pairs.by_name["*.example.com"]
    assert find(pairs.by_name, "a.b.example.com") is None
    assert find(pairs.by_name, "example.com") is None
    assert pairs.warnings(now_utc()) == []


def test_a_name_that_its_certificate_does_not_bear_is_told(authority: Authority, tmp_path: Path) -> None:
    authority.issue("a.example").write(tmp_path, "b.example.pem")
    [told] = read_directory(str(tmp_path)).warnings(now_utc())
    assert told.endswith("b.example.pem: is not a certificate for b.example")


def test_a_directory_that_leaves_something_open_is_refused(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(BadPair, match="No such file"):
        read_directory(str(tmp_path / "none"))
    with pytest.raises(BadPair, match=r"holds no NAME\.pem and no NAME\.crt"):
        read_directory(str(tmp_path))
    authority.issue("a.example").write(tmp_path, "a.example.pem")
    only = read_directory(str(tmp_path))
    assert only.default is only.by_name["a.example"]
    authority.issue("b.example").write(tmp_path, "b.example")
    with pytest.raises(BadPair, match=r"does not say which one is the default: name one default\.pem"):
        read_directory(str(tmp_path))
    assert read_directory(str(tmp_path), only.default).default is only.default
    authority.issue("b.example").write(tmp_path, "b.example.pem")
    with pytest.raises(BadPair, match=r"b\.example\.pem: there is another certificate for b\.example"):
        read_directory(str(tmp_path))
