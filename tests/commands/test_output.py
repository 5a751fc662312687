"""What becomes of the words of `llmgw`: on a full disk, into a closed pipe, in a locale without UTF-8."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmgw.access import key_file

COMMAND = [sys.executable, "-c", "from llmgw.commands.main import main; main()"]


def run(
    *arguments: str, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.run(
        [*COMMAND, *arguments], env={**os.environ, **(environment or {})}, timeout=60, check=False, **settings
    )


def closed_stdout() -> None:
    os.close(1)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_locale_cannot_show_is_a_question_mark_and_no_traceback(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "keys.toml"
    assert run("keys", "new", "--file", str(path), "Zoë → ✓").returncode == 0
    told = run(
        "keys", "list", "--file", str(path), environment={"PYTHONIOENCODING": encoding}, encoding="latin-1"
    )
    assert told.returncode == 0, told.stderr
    assert ("Zoë ? ?" if encoding == "latin-1" else "Zo? ? ?") in told.stdout


def test_a_path_that_is_no_text_is_told_all_the_same(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.toml"
    Path(os.fsdecode(path)).write_text("workers = 0\n")
    for encoding in ("utf-8", "ascii"):
        told = run("check", os.fsdecode(path), environment={"PYTHONIOENCODING": encoding})
        assert told.returncode == 1
        assert "Traceback" not in told.stderr
        assert "workers: must be at least 1" in told.stdout + told.stderr


@pytest.mark.parametrize("arguments", [("plugins",), ("plugins", "--json"), ("simulate", "--requests", "20")])
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        told = run(*arguments, stdout=full)
    assert told.returncode == 1
    assert told.stderr.splitlines()[-1] == "Error: cannot write: No space left on device"
    assert "Traceback" not in told.stderr


def test_a_key_that_nobody_could_be_shown_says_how_to_be_rid_of_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    with Path("/dev/full").open("w") as full:
        told = run("keys", "new", "--file", str(path), "ada", stdout=full)
    [key_id] = key_file.load(str(path))[0].keys
    assert told.returncode == 1
    assert f"llmgw keys revoke --file {path} {key_id}" in told.stderr
    assert "lgw_" not in told.stderr
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        told = run("keys", "new", "--file", str(path), "grace", "--json", stdout=reader.stdin)
    [_, key_id] = key_file.load(str(path))[0].keys
    assert told.returncode == 1
    assert f"llmgw keys revoke --file {path} {key_id}" in told.stderr


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_no_key_is_made_where_there_is_no_standard_output(tmp_path: Path, options: tuple[str, ...]) -> None:
    path = tmp_path / "keys.toml"
    told = run("keys", "new", "--file", str(path), "ada", *options, stdout=None, preexec_fn=closed_stdout)
    assert told.returncode == 1
    assert re.search("standard output is closed", told.stderr)
    assert not path.exists()
