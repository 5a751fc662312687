"""A file of /proc is opened once and read anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmgw.proc_file import ProcFile


def test_it_is_opened_once_and_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened.append(path), real(path, *rest))[1])
    path = tmp_path / "statm"
    file = ProcFile(str(path))
    assert not opened
    for said in (b"1 2", b"3 4"):
        path.write_bytes(said)
        assert file.read() == said
    assert opened == [str(path)]


def test_what_cannot_be_read_is_tried_anew(tmp_path: Path) -> None:
    path = tmp_path / "statm"
    file = ProcFile(str(path))
    with pytest.raises(FileNotFoundError):
        file.read()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        file.read()
    path.rmdir()
    path.write_bytes(b"1")
    assert file.read() == b"1"


def test_it_is_closed_with_its_reader(tmp_path: Path) -> None:
    path = tmp_path / "statm"
    path.write_bytes(b"1")
    before = set(os.listdir("/proc/self/fd"))
    file = ProcFile(str(path))
    file.read()
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    del file
    assert set(os.listdir("/proc/self/fd")) <= before
