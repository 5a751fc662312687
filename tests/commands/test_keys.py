"""``llmgw keys``: the key on standard output, everything else on standard error."""

from __future__ import annotations

import json
import re
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmgw.access import key_file
from llmgw.access.credentials import ApiKey, digest, new_key
from llmgw.access.keys import KeysChecker
from llmgw.commands.keys import keys
from llmgw.values import Policy


class Shell:
    """Runs commands on one key file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "keys.toml"

    def __call__(self, command: str, *arguments: str, stdin: bytes | None = None, code: int = 0) -> Result:
        result = CliRunner().invoke(keys, [command, "--file", str(self.path), *arguments], input=stdin)
        assert result.exit_code == code, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    def new(self, *arguments: str) -> tuple[str, key_file.Key]:
        secret = self("new", *arguments).stdout.removesuffix("\n")
        return secret, key_file.load(str(self.path))[0].keys[secret.split("_")[1]]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_new_prints_the_key_alone_on_a_line_and_the_gateway_takes_it(shell: Shell) -> None:
    result = shell("new", "ada")
    assert re.fullmatch(r"lgw_[a-z2-9]{8}_[A-Za-z0-9_-]{49}\n", result.stdout)
    secret = result.stdout.strip()
    checker = KeysChecker(str(shell.path))
    assert checker.requestAvatarId(ApiKey(secret, "")) == secret.split("_")[1].encode()
    assert "reload" in result.stderr


def test_the_file_is_private_and_holds_only_the_hash(shell: Shell) -> None:
    secret, key = shell.new("ada")
    assert stat.S_IMODE(shell.path.stat().st_mode) == 0o600
    assert secret.split("_", 2)[2] not in shell.path.read_text()
    assert key.hash == f"sha256:{digest(secret).hex()}"
    assert key.created is not None


def test_all_options_reach_the_file(shell: Shell) -> None:
    _, key = shell.new(
        "Ada [laptop]",
        *(
            "--models",
            "llama-3-8b, gpt-4o-mini,",
            "--requests-per-minute",
            "600",
            "--tokens-per-minute",
            "0.5",
        ),
        *("--concurrent", "4", "--expires", "2099-01-31T12:00:00Z"),
        *("--show-backend", "--show-decision", "--interim", "--loaded-only"),
    )
    assert key.expires == datetime(2099, 1, 31, 12, tzinfo=UTC)
    caller = key.caller()
    assert (key.name, caller.models) == ("Ada [laptop]", {"llama-3-8b", "gpt-4o-mini"})
    assert caller.policies == (
        Policy(f"keys.{key.id}", requests_per_minute=600, tokens_per_minute=0.5, concurrent=4),
    )
    assert caller.show_backend
    assert caller.show_decision
    assert caller.interim
    assert caller.loaded_only
    assert "requests_per_minute = 600\n" in shell.path.read_text()


@pytest.mark.parametrize(
    ("span", "length"),
    [
        ("30d", timedelta(days=30)),
        ("12h", timedelta(hours=12)),
        ("5m", timedelta(minutes=5)),
        ("2w", timedelta(14)),
    ],
)
def test_expiry_as_a_span(shell: Shell, span: str, length: timedelta) -> None:
    _, key = shell.new("ada", "--expires", span)
    assert key.expires is not None
    assert abs(key.expires - datetime.now(UTC) - length) < timedelta(seconds=60)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--expires", "soon"),
        ("--expires", "0d"),
        ("--expires", "999999w"),
        ("--expires", "2099-01-31T12:00:00"),
        ("--expires", "2001-01-31T12:00:00Z"),
        ("--requests-per-minute", "0"),
        ("--requests-per-minute", "nan"),
        ("--tokens-per-minute", "-3"),
        ("--tokens-per-minute", "inf"),
        ("--concurrent", "0"),
        ("--concurrent", "1.5"),
        ("--models", " , "),
        ("--secret-file", "/nowhere/secret"),
        ("--unknown",),
    ],
)
def test_wrong_usage_is_told_and_writes_nothing(shell: Shell, arguments: tuple[str, ...]) -> None:
    result = shell("new", "ada", *arguments, code=2)
    assert arguments[0] in result.stderr
    assert result.stdout == ""
    assert list(shell.folder.iterdir()) == []


def test_a_name_that_cannot_be_shown_is_refused_and_no_key_is_printed(shell: Shell) -> None:
    result = shell("new", "a\nb", code=1)
    assert "printable" in result.stderr
    assert result.stdout == ""


def test_two_keys_may_have_one_name_during_a_change(shell: Shell) -> None:
    first, _ = shell.new("ada")
    second, _ = shell.new("ada")
    checker = KeysChecker(str(shell.path))
    assert checker.requestAvatarId(ApiKey(first, "")) != checker.requestAvatarId(ApiKey(second, ""))


def test_an_id_that_is_taken_is_not_given_again(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["aaaaaaaa", "aaaaaaaa", "bbbbbbbb"])
    monkeypatch.setattr("llmgw.access.credentials.new_id", lambda: next(ids))
    shell.new("first")
    assert shell.new("second")[1].id == "bbbbbbbb"


@pytest.mark.parametrize("where", ["file", "-"])
def test_an_existing_secret_is_imported_and_not_shown(shell: Shell, where: str) -> None:
    secret = "sk-0123456789abcdefghij"
    source = shell.folder / "secret"
    source.write_text(f"{secret}\n")
    option = str(source) if where == "file" else "-"
    result = shell("new", "ada", "--secret-file", option, stdin=source.read_bytes())
    assert result.stdout == ""
    assert secret not in result.output
    assert secret not in shell.path.read_text()
    checker = KeysChecker(str(shell.path))
    assert checker.caller(checker.requestAvatarId(ApiKey(secret, ""))).id in result.stderr


@pytest.mark.parametrize(
    ("secret", "part"),
    [
        (b"too-short\n", "9 characters"),
        (b"", "0 characters"),
        ("é".encode() * 20, "printable ASCII"),
        (b"x" * 30 + b"\nsecond line", "printable ASCII"),
        (b"\xff" * 30, "printable ASCII"),
        (b"x" * 5000, "longer than 4096"),
        pytest.param(new_key("k7m2p9xa").encode()[:-2], "checksum", id="two short"),
    ],
)
def test_a_secret_that_cannot_be_a_key_is_refused_unseen(shell: Shell, secret: bytes, part: str) -> None:
    result = shell("new", "ada", "--secret-file", "-", stdin=secret, code=1)
    assert part in result.stderr
    assert not secret.strip() or secret.strip().decode("latin-1") not in result.output
    assert list(shell.folder.iterdir()) == []


def test_a_secret_is_not_imported_twice(shell: Shell) -> None:
    secret, _ = shell.new("ada")
    before = shell.path.read_text()
    result = shell("new", "bob", "--secret-file", "-", stdin=secret.encode(), code=1)
    assert "the same secret" in result.stderr
    assert shell.path.read_text() == before


def test_with_a_pepper_the_hash_is_an_hmac(shell: Shell) -> None:
    pepper = shell.folder / "pepper"
    pepper.write_text("0123456789abcdef")
    pepper.chmod(0o600)
    shell.path.write_text('pepper_file = "pepper"\n')
    shell.path.chmod(0o600)
    secret, key = shell.new("ada")
    assert key.hash == f"hmac-sha256:{digest(secret, b'0123456789abcdef').hex()}"
    pepper.chmod(0o644)
    result = shell("new", "bob", code=1)
    assert "chmod 600" in result.stderr
    assert result.stdout == ""


def test_list_shows_names_states_and_limits_and_no_hash(shell: Shell) -> None:
    _, key = shell.new(
        "[red]ada[/red]", "--models", "m", "--requests-per-minute", "2000", "--concurrent", "3"
    )
    shell.new("bob")
    shell("revoke", "bob")
    text = shell("list").stdout
    for part in (key.id, "[red]ada[/red]", "live", "revoked", "2,000 req/min, 3 at once", "all", "never"):
        assert part in text
    assert key.hash[7:] not in text


def test_list_shows_expired_keys_and_keys_without_a_birthday(shell: Shell) -> None:
    shell.path.write_text(
        f"[keys.a]\nname = 'a'\nhash = 'sha256:{'0' * 64}'\nexpires = 2001-01-01T00:00:00Z\n"
    )
    shell.path.chmod(0o600)
    text = shell("list").stdout
    assert "expired" in text
    assert "2001-01-01 00:00Z" in text


def test_list_as_json(shell: Shell) -> None:
    _, key = shell.new("ada", "--models", "m", "--expires", "2099-01-31T12:00:00Z")
    shown = json.loads(shell("list", "--json").stdout)
    assert [(row["id"], row["name"], row["state"], row["models"]) for row in shown] == [
        (key.id, "ada", "live", ["m"])
    ]
    assert shown[0]["expires"] == "2099-01-31T12:00:00+00:00"
    assert "hash" not in shown[0]


@pytest.mark.parametrize("by", ["name", "id"])
def test_revoke_makes_the_key_worthless(shell: Shell, by: str) -> None:
    secret, key = shell.new("ada")
    result = shell("revoke", "ada" if by == "name" else key.id)
    assert key.id in result.stderr
    assert result.stdout == ""
    assert KeysChecker(str(shell.path))._entries == {}
    assert secret not in result.output
    again = shell("revoke", key.id)
    assert "already" in again.stderr


def test_revoke_by_a_name_that_several_have_asks_for_the_id(shell: Shell) -> None:
    _, first = shell.new("ada")
    _, second = shell.new("ada")
    result = shell("revoke", "ada", code=1)
    assert first.id in result.stderr
    assert second.id in result.stderr
    shell("revoke", first.id)
    assert second.id in shell("revoke", "ada").stderr


def test_revoke_does_not_repeat_what_may_be_a_key(shell: Shell) -> None:
    shell.new("ada")
    stranger = new_key("k7m2p9xa")
    result = shell("revoke", stranger, code=1)
    assert "no key has that name or id" in result.stderr
    assert stranger not in result.output


@pytest.mark.parametrize("command", [("list",), ("revoke", "ada")])
def test_a_file_that_is_not_there(shell: Shell, command: tuple[str, ...]) -> None:
    result = shell(*command, code=1)
    assert "No such file" in result.stderr
    assert list(shell.folder.iterdir()) == []


@pytest.mark.parametrize("command", [("list",), ("revoke", "ada"), ("new", "ada")])
@pytest.mark.parametrize(
    ("text", "mode", "part"), [("x = 1\n", 0o600, "x: unknown key"), ("", 0o644, "chmod 600")]
)
def test_a_faulty_or_unsafe_file_is_told_and_left_alone(
    shell: Shell, command: tuple[str, ...], text: str, mode: int, part: str
) -> None:
    shell.path.write_text(text)
    shell.path.chmod(mode)
    result = shell(*command, code=1)
    assert part in result.stderr
    assert result.stdout == ""
    assert shell.path.read_text() == text


def test_a_folder_that_is_not_there(shell: Shell) -> None:
    shell.path = shell.folder / "none" / "keys.toml"
    result = shell("new", "ada", code=1)
    assert "No such file or directory" in result.stderr
    assert result.stdout == ""


def test_file_is_required() -> None:
    for command in (["new", "ada"], ["list"], ["revoke", "ada"]):
        result = CliRunner().invoke(keys, command)
        assert result.exit_code == 2
        assert "--file" in result.stderr


def test_new_and_revoke_as_json(shell: Shell, tmp_path: Path) -> None:
    made = json.loads(shell("new", "ada", "--json").stdout)
    assert (made["name"], made["file"]) == ("ada", str(shell.path))
    assert KeysChecker(str(shell.path)).requestAvatarId(ApiKey(made["key"], "")) == made["id"].encode()
    secret = tmp_path / "secret"
    secret.write_text(new_key("imported2"))
    assert json.loads(shell("new", "bob", "--secret-file", str(secret), "--json").stdout)["key"] is None
    revoked = {"id": made["id"], "name": "ada"}
    assert json.loads(shell("revoke", "ada", "--json").stdout) == {**revoked, "was_revoked": False}
    assert json.loads(shell("revoke", made["id"], "--json").stdout) == {**revoked, "was_revoked": True}
