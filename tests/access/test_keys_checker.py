"""The checker ``keys``."""

from __future__ import annotations

from pathlib import Path

import pytest
from twisted.cred.checkers import ICredentialsChecker
from twisted.cred.error import UnauthorizedLogin
from twisted.cred.strcred import ICheckerFactory
from twisted.plugin import IPlugin
from zope.interface.verify import verifyObject

from llmgw.access import keys
from llmgw.access.credentials import ApiKey, IApiKey, ICallers, digest, new_key
from llmgw.access.keys import KeysChecker, KeysCheckerFactory
from llmgw.errors import ConfigError
from llmgw.values import Policy

ADA = new_key("ada22222")
BOB = new_key("bob22222")
IMPORTED = "an imported secret, with blanks"
NOW = 1_800_000_000.0


class House:
    """A key file, its checker and the wall clock."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.toml"
        self.now_unix_s = NOW
        self.write(
            table("ada22222", ADA, "models = ['m']\nconcurrent = 2"),
            table("bob22222", BOB, "expires = 2027-01-15T08:00:01Z"),
            table("gone", "x" * 30, "revoked = 2026-01-01T00:00:00Z"),
            table("legacy", IMPORTED),
        )
        self.checker = KeysChecker(str(self.path), lambda: self.now_unix_s)

    def write(self, *tables: str) -> None:
        self.path.write_text("\n".join(tables))
        self.path.chmod(0o600)

    def who(self, secret: str) -> bytes:
        return self.checker.requestAvatarId(ApiKey(secret, "10.0.0.1"))


def table(key_id: str, secret: str, more: str = "", pepper: bytes | None = None) -> str:
    kind = "sha256" if pepper is None else "hmac-sha256"
    return f"[keys.{key_id}]\nname = '{key_id}'\nhash = '{kind}:{digest(secret, pepper).hex()}'\n{more}\n"


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_provides_its_interfaces(house: House) -> None:
    verifyObject(ICredentialsChecker, house.checker)
    verifyObject(ICallers, house.checker)


@pytest.mark.parametrize(
    ("secret", "key_id"), [(ADA, b"ada22222"), (IMPORTED, b"legacy")], ids=["made", "imported"]
)
def test_a_known_key_gives_its_id_at_once(house: House, secret: str, key_id: bytes) -> None:
    assert house.who(secret) == key_id


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "sk-wrong-123",
        pytest.param(ADA[:-1], id="one short"),
        pytest.param(ADA + " ", id="a blank more"),
        pytest.param(ADA.upper(), id="upper case"),
        "x" * 30,
        "lgw_ada22222_",
        "\udc80",
        "é",
        "\0" * 9999,
    ],
)
def test_any_other_key_is_refused_in_one_way(house: House, secret: str) -> None:
    with pytest.raises(UnauthorizedLogin) as caught:
        house.who(secret)
    assert caught.value.args == ("unknown key",)


def test_a_hash_is_no_key(house: House) -> None:
    for kept in (digest(ADA).hex(), f"sha256:{digest(ADA).hex()}", digest(ADA).decode("latin-1")):
        with pytest.raises(UnauthorizedLogin):
            house.who(kept)


def test_a_key_expires_by_the_wall_clock_and_is_refused_like_an_unknown_one(house: House) -> None:
    assert house.who(BOB) == b"bob22222"
    house.now_unix_s = NOW + 1.0
    with pytest.raises(UnauthorizedLogin) as caught:
        house.who(BOB)
    assert caught.value.args == ("unknown key",)


def test_a_clock_a_day_ahead_does_not_shut_out_for_good(house: House) -> None:
    house.now_unix_s = NOW + 86_400.0
    assert house.who(ADA) == b"ada22222"
    house.now_unix_s = NOW
    assert house.who(BOB) == b"bob22222"


def test_caller_behind_a_key(house: House) -> None:
    caller = house.checker.caller(b"ada22222")
    assert (caller.id, caller.models) == ("ada22222", {"m"})
    assert caller.policies == (Policy("keys.ada22222", concurrent=2),)
    assert house.checker.caller(b"ada22222") is caller


@pytest.mark.parametrize("avatar_id", [b"gone", b"nobody", b"", ()])
def test_no_caller_behind_what_is_no_live_key(house: House, avatar_id: bytes) -> None:
    with pytest.raises(UnauthorizedLogin):
        house.checker.caller(avatar_id)


def test_reload_follows_the_file(house: House) -> None:
    house.write(table("bob22222", BOB, "interim = true"))
    assert house.who(ADA) == b"ada22222"
    house.checker.reload()
    assert house.checker.caller(house.who(BOB)).interim
    with pytest.raises(UnauthorizedLogin):
        house.who(ADA)
    with pytest.raises(UnauthorizedLogin):
        house.checker.caller(b"ada22222")


@pytest.mark.parametrize("damage", ["[keys.ada22222]\nname = 1\n", "not toml", None, "unsafe"])
def test_a_reload_that_fails_keeps_the_last_good_keys(house: House, damage: str | None) -> None:
    if damage is None:
        house.path.unlink()
    elif damage == "unsafe":
        house.path.chmod(0o644)
    else:
        house.write(damage)
    with pytest.raises(ConfigError):
        house.checker.reload()
    assert house.checker.caller(house.who(ADA)).id == "ada22222"


def test_peppered_keys_and_older_ones_work_side_by_side(tmp_path: Path) -> None:
    house = House(tmp_path)
    pepper = b"0123456789abcdef"
    (tmp_path / "pepper").write_bytes(pepper + b"\n")
    (tmp_path / "pepper").chmod(0o600)
    house.write("pepper_file = 'pepper'", table("ada22222", ADA, pepper=pepper), table("bob22222", BOB))
    house.checker.reload()
    assert (house.who(ADA), house.who(BOB)) == (b"ada22222", b"bob22222")
    with pytest.raises(UnauthorizedLogin):
        house.who(IMPORTED)
    (tmp_path / "pepper").write_bytes(b"another pepper, not the same")
    house.checker.reload()
    with pytest.raises(UnauthorizedLogin):
        house.who(ADA)


def test_a_key_seen_before_is_not_hashed_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    assert house.who(ADA) == b"ada22222"
    monkeypatch.setattr(keys, "digest", None)
    assert house.who(ADA) == b"ada22222"


def test_a_wrong_key_is_hashed_every_time_and_never_remembered(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    monkeypatch.setattr(keys, "digest", lambda secret, pepper=None: hashed.append(secret) or digest(secret))
    for secret in ["sk-wrong-123", "x" * 30, ADA[:-1]] * 3:
        with pytest.raises(UnauthorizedLogin):
            house.who(secret)
    assert len(hashed) == 9
    assert not house.checker._seen


def test_memory_of_seen_keys_is_bounded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MAX_SEEN", 2)
    for secret in (ADA, BOB, IMPORTED, ADA, BOB):
        house.who(secret)
        assert len(house.checker._seen) <= 2


def test_nothing_shows_a_secret(house: House) -> None:
    house.who(ADA)
    with pytest.raises(UnauthorizedLogin) as caught:
        house.who("sk-wrong-123-and-more")
    assert "sk-wrong" not in repr(caught.value)
    assert "sk-wrong" not in repr(vars(house.checker))
    assert ADA not in repr(vars(house.checker))


def test_factory_builds_it_from_a_path(house: House) -> None:
    factory = KeysCheckerFactory()
    verifyObject(ICheckerFactory, factory)
    verifyObject(IPlugin, factory)
    assert (factory.authType, factory.credentialInterfaces) == ("keys", (IApiKey,))
    assert factory.authHelp
    assert factory.argStringFormat
    checker = factory.generateChecker(str(house.path))
    assert checker.requestAvatarId(ApiKey(ADA, "")) == b"ada22222"


def test_factory_wants_a_path_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keys:PATH"):
        KeysCheckerFactory().generateChecker("")
    with pytest.raises(ConfigError, match="No such file"):
        KeysCheckerFactory().generateChecker(str(tmp_path / "none.toml"))
