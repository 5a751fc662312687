"""Pipes, devices and folders where a file is meant: nobody waits for them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Gateway, eventually

from llmgw.certificates import BadPair, read_certificates, read_pair
from llmgw.config import load_config
from llmgw.discovery.http_client import TlsFiles
from llmgw.errors import ConfigError
from llmgw.plain_files import MOST_BYTES, open_plain, read_plain

START_S = 20.0
MAIN = "from llmgw.commands.main import main; main()"
ONE = '[[backends]]\nid = "a"\nurl = "http://127.0.0.1:1"\n'
SECURE = ONE.replace("http:", "https:")


def folder(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


KINDS = {"a pipe": os.mkfifo, "a folder": folder, "a device": device, "a socket": bound}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@kinds
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "it"
    make(path)
    before = len(os.listdir("/proc/self/fd"))
    for read in (open_plain, read_plain):
        with pytest.raises(OSError, match=re.escape(str(path))):
            read(str(path))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_is_read_whole_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_bytes(b"x" * MOST_BYTES)
    assert len(read_plain(str(path))) == MOST_BYTES
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(OSError, match="it is larger than 64 MiB"):
        read_plain(str(path))


@kinds
def test_certificates_and_keys_are_files(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "it.pem"
    make(path)
    path.chmod(0o700) if not path.is_symlink() else None
    with pytest.raises(BadPair, match=r"it\.pem"):
        read_certificates(str(path))
    with pytest.raises(BadPair, match=r"it\.pem"):
        read_pair(str(path), str(path))
    with pytest.raises(OSError, match=r"it\.pem"):
        TlsFiles(str(path)).options("h")
    with pytest.raises(OSError, match=r"it\.pem"):
        TlsFiles(None, str(path)).options("h")


KEYS = {
    "admin_token_file": "admin_token_file = 'it'\n" + ONE,
    "auth[0]": "auth = ['keys:it']\n" + ONE,
    "listen[0]": "listen = ['ssl:0:interface=127.0.0.1:privateKey=it']\n" + ONE,
    "backends[0].api_key_file": ONE + "api_key_file = 'it'\n",
    "backends[0].tls.ca_file": SECURE + "tls = {ca_file = 'it'}\n",
    "backends[0].tls.cert_file": SECURE + "tls = {cert_file = 'it'}\n",
    "backends[0].tls.key_file": SECURE + "tls = {cert_file = 'it', key_file = 'it'}\n",
    "store.password_file": ONE + "[store]\nurl = 'redis://h'\npassword_file = 'it'\n",
    "store.sentinel_password_file": ONE + "[store]\nurl = 'redis+sentinel://h/m'\n"
    "sentinel_password_file = 'it'\n",
    "store.ca_file": ONE + "[store]\nurl = 'rediss://h'\nca_file = 'it'\n",
    "discovery[0].ca_file": "[[discovery]]\nplugin = 'etcd'\nendpoints = ['https://h:1']\nca_file = 'it'\n",
    "discovery[0].password_file": "[[discovery]]\nplugin = 'etcd'\nendpoints = ['http://h:1']\n"
    "username = 'u'\npassword_file = 'it'\n",
    "discovery[0].token_file": "[[discovery]]\nplugin = 'kubernetes'\nservice = 's'\ntoken_file = 'it'\n",
}  # fmt: skip


@pytest.mark.parametrize("make", [os.mkfifo, device], ids=["pipe", "device"])
@pytest.mark.parametrize("key", KEYS)
def test_no_key_of_the_file_keeps_a_check_waiting(
    tmp_path: Path, key: str, make: Callable[[Path], None]
) -> None:
    (tmp_path / "gw.toml").write_text(KEYS[key])
    make(tmp_path / "it")
    command = [sys.executable, "-c", MAIN, "check", str(tmp_path / "gw.toml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert checked.returncode != 0
    said = " ".join((checked.stdout + checked.stderr).split())
    assert key.partition(".")[0] in said
    assert "regular file" in said


@kinds
def test_a_configuration_is_a_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "it")
    with pytest.raises(ConfigError, match="cannot read the file"):
        load_config(str(tmp_path / "it"))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    path = tmp_path_factory.mktemp("reload")
    for name in ("word", "found.toml"):
        (path / name).write_text("x = 1\n" if name == "found.toml" else "word\n")
        (path / name).chmod(0o600)
    found = "[[discovery]]\nplugin = 'static'\nfile = 'found.toml'\ninterval_s = 0.1\n"
    running = Gateway(path, ONE + "api_key_file = 'word'\n" + found)
    yield running
    running.stop()


@pytest.mark.parametrize("name", ["llmgw.toml", "word"])
def test_a_pipe_in_the_place_of_a_file_keeps_no_reload_waiting(gateway: Gateway, name: str) -> None:
    """The old configuration goes on serving, and the operator is told why."""
    path = gateway.folder / name
    aside = path.rename(path.with_suffix(".aside"))
    os.mkfifo(path, 0o600)
    status, answer = gateway.admin("/api/reload", "POST")
    assert status >= 400
    assert b"it is no regular file" in answer
    assert gateway.admin("/readyz")[0] == 200
    aside.rename(path)
    assert gateway.admin("/api/reload", "POST")[0] == 200


def test_a_pipe_in_the_place_of_a_watched_file_keeps_nobody_waiting(gateway: Gateway) -> None:
    path = gateway.folder / "found.toml"
    path.unlink()
    os.mkfifo(path)
    eventually(lambda: "it is no regular file" in gateway.log, START_S)
    assert gateway.admin("/readyz")[0] == 200
