"""Where the daemon writes: what cannot be made there is told before it starts."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import TWISTD

from llmgw import writable
from llmgw.config import Config, load_config

BACKEND = '[[backends]]\nid = "a"\nurl = "http://127.0.0.1:9"\n'
IS_ROOT = os.geteuid() == 0
NOBODY = pwd.getpwnam("nobody")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody may look into; only we may write there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def config(folder: Path, text: str) -> Config:
    path = folder / "llmgw.toml"
    path.write_text(text + BACKEND)
    return load_config(str(path))


def check(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "llmgw.toml").write_text(text + BACKEND)
    return subprocess.run(
        [*TWISTD, *options, "llmgw", "-c", "llmgw.toml", "--check"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[log]\naccess = "no/access.log"\n', "log.access: there is no folder {}/no"),
        ('[log]\naccess = "here"\n', "log.access: {}/here is a folder"),
        ('listen = ["unix:no/llmgw.sock"]\n', "listen[0]: there is no folder {}/no"),
        ('admin = ["unix:plain:mode=600"]\n', "admin[0]: {}/plain is there, and is no socket"),
        ('listen = ["proxied:unix:no/x"]\n', "listen[0]: there is no folder {}/no"),
    ],
)
def test_what_keeps_it_from_starting_is_a_fault(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "plain").touch()
    ended = check(tmp_path, text)
    assert ended.returncode == 1
    assert ended.stderr == f"llmgw: {tmp_path}/llmgw.toml: {told.format(tmp_path)}\n"


def test_places_that_will_do(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left.sock"))  # as of one that was killed
    (tmp_path / "old.log").touch()
    text = f'listen = ["unix:{tmp_path}/left.sock"]\nadmin = ["unix:{tmp_path}/new.sock"]\n[log]\naccess = '
    for access in ('"old.log"', '"new.log"', '"-"', '""'):
        assert writable.cannot_start(config(tmp_path, text + access + "\n")) == []


def test_a_state_that_cannot_be_kept_is_worth_a_warning(tmp_path: Path) -> None:
    table = '[[discovery]]\nplugin = "dns"\nquery = "llm.example"\nport = 8080\nstate_file = "no/dns.json"\n'
    ended = check(tmp_path, table)
    assert ended.returncode == 0, ended.stderr
    assert f"warning: discovery[0].state_file: there is no folder {tmp_path}/no" in ended.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--pidfile=no/llmgw.pid"], "--pidfile: there is no folder {}/no"),
        (["--logfile=no/llmgw.log"], "--logfile: there is no folder {}/no"),
        (["--rundir=no"], "--rundir: there is no folder {}/no"),
        (["--pidfile=", "--logfile=-"], ""),
    ],
)
def test_twistds_own_files_are_looked_at(tmp_path: Path, options: list[str], told: str) -> None:
    ended = check(tmp_path, '[log]\naccess = "gone/x"\n' if told else "", *options)
    assert (ended.returncode, told.format(tmp_path) in ended.stderr) == (1 if told else 0, True)
    assert not told or "log.access" in ended.stderr, "every fault is told at once"


@pytest.mark.skipif(not IS_ROOT, reason="only root can become somebody else")
def test_whom_the_daemon_becomes_has_to_be_able_to_write(shared: Path) -> None:
    (shared / "logs").mkdir()
    ours = '[log]\naccess = "logs/access.log"\n'
    ended = check(shared, ours, "--uid=nobody")
    assert ended.returncode == 1
    assert f"log.access: {shared}/logs cannot be written to by the user nobody" in ended.stderr
    assert check(shared, ours).returncode == 0
    os.chown(shared / "logs", NOBODY.pw_uid, NOBODY.pw_gid)
    assert check(shared, ours, "--uid=nobody").returncode == 0
    (shared / "logs" / "access.log").touch()  # of root, as an earlier run has left it
    ended = check(shared, ours, "--uid=nobody")
    assert f"log.access: {shared}/logs/access.log cannot be written to by the user nobody" in ended.stderr


@pytest.mark.skipif(not IS_ROOT, reason="only root can become somebody else")
def test_root_is_root_again_afterwards(shared: Path) -> None:
    before = (os.geteuid(), os.getegid(), os.getgroups())
    with writable.acting_as((NOBODY.pw_uid, None)):
        assert (os.geteuid(), os.getegid()) == (NOBODY.pw_uid, NOBODY.pw_gid)
        assert "nobody" in writable.file_fault(str(shared / "x"))
    assert (os.geteuid(), os.getegid(), os.getgroups()) == before
