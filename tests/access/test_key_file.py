"""The key file: every fault by its path, and edits that lose nothing."""

from __future__ import annotations

import os
import stat
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.access import key_file
from llmgw.access.key_file import Key, KeyFile, add, dump, edit, load, parse, revoke
from llmgw.errors import ConfigError
from llmgw.values import Caller, Policy

HASH = "sha256:" + "0123456789abcdef" * 4
OTHER_HASH = "sha256:" + "f" * 64
NOON = datetime(2027, 1, 31, 12, tzinfo=UTC)
KEY_IN_THE_WRONG_PLACE = "lgw_k7m2p9xa_" + "Zq" * 24 + "Q"

FULL = f"""
# Keys of the house.
[keys.k7m2p9xa]     # Ada's
name = "ada"
hash = "{HASH}"
models = ["llama-3-8b", "gpt-4o-mini"]
requests_per_minute = 600
tokens_per_minute = 2e5
concurrent = 4
expires = 2027-01-31T12:00:00Z
show_backend = true
show_decision = true
interim = true
loaded_only = true
created = "2026-01-31t13:00:00.5+01:00"

[keys.old-one]
name = "bob"
hash = "{OTHER_HASH}"
revoked = 2026-02-01T00:00:00+00:00
"""


def faults(text: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "keys.toml")
    assert str(caught.value).startswith("keys.toml: ")
    return {fault.where: fault.what for fault in caught.value.faults}


def one(line: str) -> str:
    fields = {"name": 'name = "ada"', "hash": f'hash = "{HASH}"'}
    fields[line.split(" ")[0]] = line
    return "[keys.a]\n" + "\n".join(fields.values())


def test_all_fields_are_read() -> None:
    key = parse(FULL).keys["k7m2p9xa"]
    assert (key.name, key.hash, key.models) == ("ada", HASH, ("llama-3-8b", "gpt-4o-mini"))
    assert (key.requests_per_minute, key.tokens_per_minute, key.concurrent) == (600, 200_000.0, 4)
    assert (key.expires, key.revoked) == (NOON, None)
    assert key.created == datetime(2026, 1, 31, 12, 0, 0, 500_000, tzinfo=UTC)


def test_a_key_becomes_its_caller() -> None:
    caller = parse(FULL).keys["k7m2p9xa"].caller()
    assert caller.id == "k7m2p9xa"
    assert caller.models == {"llama-3-8b", "gpt-4o-mini"}
    assert caller.policies == (
        Policy("keys.k7m2p9xa", requests_per_minute=600, tokens_per_minute=200_000, concurrent=4),
    )
    assert caller.show_backend
    assert caller.show_decision
    assert caller.interim
    assert caller.loaded_only


def test_a_bare_key_may_use_all_models_and_has_no_limits_of_its_own() -> None:
    caller = parse(FULL).keys["old-one"].caller()
    assert caller == Caller(id="old-one")


@pytest.mark.parametrize("limit", ["requests_per_minute = 0.5", "tokens_per_minute = 7", "concurrent = 1"])
def test_any_one_limit_makes_a_policy(limit: str) -> None:
    assert len(parse(one(limit)).keys["a"].caller().policies) == 1


@pytest.mark.parametrize(
    ("key", "now", "state"),
    [
        ("k7m2p9xa", NOON.timestamp() - 1, "live"),
        ("k7m2p9xa", NOON.timestamp(), "expired"),
        ("old-one", 0.0, "revoked"),
    ],
)
def test_states(key: str, now: float, state: str) -> None:
    assert parse(FULL).keys[key].state(now) == state


def test_the_hash_is_not_in_a_keys_repr() -> None:
    assert repr(parse(FULL).keys["k7m2p9xa"]) == "<Key k7m2p9xa>"
    assert HASH not in repr(parse(FULL))


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "[keys]\n"])
def test_a_file_without_keys_is_good(text: str) -> None:
    assert parse(text) == KeyFile({})


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('name = ""', "1 to 128"),
        ("name = 3", "1 to 128"),
        ('name = "a\\nb"', "printable"),
        ('hash = "md5:00"', "64 hex digits"),
        ("hash = 5", "64 hex digits"),
        (f'hash = "{HASH.upper()}"', "64 hex digits"),
        (f'hash = "{HASH}0"', "64 hex digits"),
        (f'hash = "hmac-{HASH}"', "needs a pepper_file"),
        ("models = []", "leave it out"),
        ('models = "all"', "a list"),
        ("models = [1]", "a list"),
        ('models = [""]', "a list"),
        ("requests_per_minute = 0", "above 0"),
        ("requests_per_minute = -1", "above 0"),
        ("requests_per_minute = true", "above 0"),
        ("requests_per_minute = nan", "above 0"),
        ("tokens_per_minute = inf", "above 0"),
        ('tokens_per_minute = "9"', "above 0"),
        ('criticality = "vip"', "sheddable, standard, critical"),
        ("criticality = []", "sheddable, standard, critical"),
        ("concurrent = 0", "whole number"),
        ("concurrent = 1.5", "whole number"),
        ("concurrent = true", "whole number"),
        ("expires = 2027-01-31", "RFC 3339"),
        ("expires = 2027-01-31T12:00:00", "RFC 3339"),
        ('expires = "2027-01-31T12:00:00"', "RFC 3339"),
        ('expires = "2027-02-31T12:00:00Z"', "RFC 3339"),
        ('expires = "tomorrow"', "RFC 3339"),
        ("revoked = true", "RFC 3339"),
        ("created = 12:00:00", "RFC 3339"),
        ("interim = 1", "true or false"),
        ('show_backend = "yes"', "true or false"),
        ("model = []", "unknown key"),
    ],
)
def test_each_fault_is_named_by_its_path(line: str, part: str) -> None:
    found = faults(one(line))
    assert list(found) == [f"keys.a.{line.split(' ')[0]}"]
    assert part in found[f"keys.a.{line.split(' ')[0]}"]


def test_all_faults_are_told_at_once() -> None:
    text = f"""
    colour = "red"
    pepper_file = 3
    [keys.a]
    nam = "x"
    [keys."b c"]
    name = "b"
    hash = "{HASH}"
    concurrent = 0
    [keys.d]
    name = "d"
    hash = "{HASH}"
    [keys.anonymous]
    name = "e"
    hash = "{OTHER_HASH}"
    """
    assert list(faults(text)) == [
        "colour",
        "pepper_file",
        "keys.a.name",
        "keys.a.hash",
        "keys.a.nam",
        "keys.b c",
        "keys.b c.concurrent",
        "keys.d.hash",
        "keys.anonymous",
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("keys = 5", "keys"),
        ("keys = []", "keys"),
        ("[keys]\na = 1", "keys.a"),
        ("[[keys.a]]\nname = ''", "keys.a"),
    ],
)
def test_what_should_be_a_table_and_is_not(text: str, where: str) -> None:
    assert list(faults(text)) == [where]


@pytest.mark.parametrize(
    "text",
    [
        f"[keys.{KEY_IN_THE_WRONG_PLACE}]\nname = 'a'\nhash = '{HASH}'",
        f"[keys.a]\nname = 'a'\nhash = '{KEY_IN_THE_WRONG_PLACE}'",
        f"[keys.a]\nname = 'a'\nhash = '{HASH}'\n{KEY_IN_THE_WRONG_PLACE} = 1",
        f"{KEY_IN_THE_WRONG_PLACE} = 1",
        f"[keys.{KEY_IN_THE_WRONG_PLACE}]\n[keys.{KEY_IN_THE_WRONG_PLACE}]\n",
        f"a = {{{KEY_IN_THE_WRONG_PLACE} = 1, {KEY_IN_THE_WRONG_PLACE} = 2}}",
        f"[keys.a]\nname = {KEY_IN_THE_WRONG_PLACE}",
    ],
)
def test_a_key_in_the_wrong_place_is_not_repeated_in_the_message(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "keys.toml")
    assert KEY_IN_THE_WRONG_PLACE[13:] not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_broken_toml_is_told_with_its_line() -> None:
    assert "line 2" in faults("[keys.a]\nname =\n")[""]


@given(st.text() | st.text(alphabet='[]keys.a="\n{}#,:0T-'))
def test_any_text_is_read_or_refused_with_a_clear_error(text: str) -> None:
    with suppress(ConfigError):
        parse(text)


names = st.text(min_size=1, max_size=20).filter(str.isprintable)
moments = st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
keys_of_any_kind = st.builds(
    Key,
    id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,8}", fullmatch=True).filter(
        lambda text: text != "anonymous"
    ),
    name=names,
    hash=st.binary(min_size=32, max_size=32).map(lambda raw: f"sha256:{raw.hex()}"),
    models=st.none()
    | st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=3).map(tuple),
    requests_per_minute=st.none() | st.floats(1e-3, 1e9) | st.integers(1, 10**9),
    tokens_per_minute=st.none() | st.floats(1e-3, 1e9),
    concurrent=st.none() | st.integers(1, 10**6),
    expires=st.none() | moments,
    show_backend=st.booleans(),
    interim=st.booleans(),
    revoked=st.none() | moments,
)


@given(st.lists(keys_of_any_kind, max_size=4, unique_by=(lambda key: key.id, lambda key: key.hash)))
def test_what_is_written_is_read_back(keys: list[Key]) -> None:
    file = KeyFile({key.id: key for key in keys}, 'pepper \\ "x"')
    assert parse(dump(file)) == file
    text = 'pepper_file = "p"\n# kept\n'
    for key in keys:
        text = add(text, key)
    assert parse(text).keys == file.keys
    assert "# kept" in text


# --- editing ------------------------------------------------------------------

NEW = Key(id="n", name="new", hash="sha256:" + "a" * 64)


def test_adding_keeps_comments_and_order() -> None:
    text = add(FULL, NEW)
    assert text.startswith(FULL.rstrip())
    assert list(parse(text).keys) == ["k7m2p9xa", "old-one", "n"]


def test_adding_works_where_text_cannot_be_appended() -> None:
    text = add(f"keys = {{a = {{name = 'a', hash = '{HASH}'}}}}", NEW)
    assert list(parse(text).keys) == ["a", "n"]


@pytest.mark.parametrize(
    ("key", "what"),
    [
        (Key(id="old-one", name="x", hash=NEW.hash), "exists already"),
        (Key(id="n", name="x", hash=HASH), "the same secret as keys.k7m2p9xa"),
    ],
)
def test_no_id_and_no_secret_twice(key: Key, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        add(FULL, key)


def test_revoking_marks_one_key_and_keeps_the_rest_as_it_was() -> None:
    text = revoke(FULL, "k7m2p9xa", NOON)
    assert "[keys.k7m2p9xa]     # Ada's\nrevoked = 2027-01-31T12:00:00Z\nname" in text
    assert text.replace("revoked = 2027-01-31T12:00:00Z\n", "") == FULL
    assert parse(text).keys["k7m2p9xa"].revoked == NOON


def test_revoking_again_changes_nothing() -> None:
    assert revoke(FULL, "old-one", NOON) == FULL


@pytest.mark.parametrize(
    "text",
    [
        f"[keys]\na = {{name = 'a', hash = '{HASH}'}}",
        f"[keys.'a']\nname = 'a'\nhash = '{HASH}'",
        f"[keys.b]\nname = 'b'\nhash = '{OTHER_HASH}'\nmodels = ['''\n[keys.a]\n''']\n"
        f"[keys.a]\nname = 'a'\nhash = '{HASH}'\n",
        f"[keys.a]\r\nname = 'a'\r\nhash = '{HASH}'\r\n",
    ],
)
def test_revoking_works_however_the_table_is_written(text: str) -> None:
    before = parse(text)
    after = parse(revoke(text, "a", NOON))
    assert after.keys["a"].revoked == NOON
    assert {**after.keys, "a": before.keys["a"]} == before.keys


def test_revoking_who_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no key has the id zz"):
        revoke(FULL, "zz", NOON)
    with pytest.raises(ConfigError) as caught:
        revoke(FULL, KEY_IN_THE_WRONG_PLACE, NOON)
    assert KEY_IN_THE_WRONG_PLACE[13:] not in str(caught.value)


# --- files --------------------------------------------------------------------


def written(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_file_that_others_cannot_touch_is_loaded(tmp_path: Path, mode: int) -> None:
    file, pepper = load(written(tmp_path / "keys.toml", FULL, mode))
    assert (len(file.keys), pepper) == (2, None)


@pytest.mark.parametrize(
    ("mode", "what"),
    [(0o644, "open to other users"), (0o602, "open to other users"), (0o660, "writable by its group")],
)
def test_a_file_that_others_can_touch_is_refused_with_the_cure(tmp_path: Path, mode: int, what: str) -> None:
    path = written(tmp_path / "keys.toml", FULL, mode)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: is {what} (mode {mode:04o}): chmod 600 {path}"


@pytest.mark.parametrize(("name", "what"), [("absent.toml", "No such file"), ("", "Is a directory")])
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, name: str, what: str) -> None:
    path = str(tmp_path / name)
    with pytest.raises(ConfigError, match=f"cannot be read: {what}"):
        load(path)


def test_a_pipe_in_its_place_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="is no regular file"):
        load(str(path))


def test_a_file_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(b"# caf\xe9\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not UTF-8 at byte 5"):
        load(str(path))


def test_the_pepper_lies_beside_the_key_file(tmp_path: Path) -> None:
    written(tmp_path / "pepper", "0123456789abcdef\n")
    text = f'pepper_file = "pepper"\n[keys.a]\nname = "a"\nhash = "hmac-{HASH}"\n'
    file, pepper = load(written(tmp_path / "keys.toml", text))
    assert pepper == b"0123456789abcdef"
    assert list(file.keys) == ["a"]


@pytest.mark.parametrize(
    ("pepper", "mode", "what"),
    [
        ("0123456789abcdef", 0o644, "chmod 600"),
        ("short\n", 0o600, "at least 16 bytes"),
        (None, 0, "No such file"),
    ],
)
def test_a_bad_pepper_is_told(tmp_path: Path, pepper: str | None, mode: int, what: str) -> None:
    if pepper is not None:
        written(tmp_path / "pepper", pepper, mode)
    with pytest.raises(ConfigError, match=what) as caught:
        load(written(tmp_path / "keys.toml", 'pepper_file = "pepper"\n'))
    assert str(caught.value).startswith(f"{tmp_path}/pepper: ")


def test_a_new_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    edit(str(path), lambda text: add(text, NEW), create=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(load(str(path))[0].keys) == ["n"]
    assert sorted(os.listdir(tmp_path)) == ["keys.toml", "keys.toml.lock"]


def test_an_edited_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    edit(written(path, FULL, 0o640), lambda text: add(text, NEW))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_an_edited_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    written(path, FULL, 0o640)
    os.chown(path, 65534, 65534)
    edit(str(path), lambda text: add(text, NEW))
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    written(tmp_path / "real" / "keys.toml", FULL)
    link = tmp_path / "keys.toml"
    link.symlink_to("real/keys.toml")
    edit(str(link), lambda text: add(text, NEW))
    assert link.is_symlink()
    assert "n" in load(str(link))[0].keys


def test_editing_what_is_not_there_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        edit(str(tmp_path / "keys.toml"), lambda text: text)
    assert os.listdir(tmp_path) == []


def test_a_change_that_would_break_the_file_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    written(path, FULL)
    with pytest.raises(ConfigError, match="unknown key"):
        edit(str(path), lambda text: "x = 1\n" + text)
    assert path.read_text() == FULL


def test_a_write_that_fails_leaves_the_old_file_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    written(path, FULL)

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(key_file.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        edit(str(path), lambda text: add(text, NEW))
    assert path.read_text() == FULL
    assert sorted(os.listdir(tmp_path)) == ["keys.toml", "keys.toml.lock"]


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.toml")

    def write(first: int) -> None:
        for number in range(first, first + 10):
            key = Key(id=f"k{number}", name="x", hash=f"sha256:{number:064x}")
            edit(path, lambda text, key=key: add(text, key), create=True)

    writers = [threading.Thread(target=write, args=(first,)) for first in (0, 10, 20)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(load(path)[0].keys) == 30
