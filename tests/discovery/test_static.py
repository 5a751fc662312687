"""Backends in a file that is watched."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.task import Clock

from llmgw.builtins import static_discovery
from llmgw.errors import ConfigError
from llmgw.testing import discovery_contract

_numbers = itertools.count()


def write(path: Path, text: str) -> None:
    """As careful writers do: whole, under another name first."""
    new = path.with_suffix(f".{next(_numbers)}")
    new.write_text(text)
    new.replace(path)


class TestStaticContract(discovery_contract(static_discovery)):  # type: ignore[misc]
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "backends.json"
        self.options = {"file": str(self.path)}

    def know(self, clock: Clock, entries: Sequence[Mapping[str, Any]]) -> None:
        write(self.path, json.dumps({"backends": list(entries)}))


@pytest.fixture
def watched(tmp_path: Path) -> Any:
    clock, path, told = Clock(), tmp_path / "found.toml", []
    discovery = static_discovery.build({"file": str(path), "interval_s": 1.0}, clock)
    discovery.start(told.append)
    yield clock, path, told, discovery
    discovery.stop()


def test_a_file_that_comes_later_is_found(watched: Any) -> None:
    clock, path, told, discovery = watched
    assert (told, discovery.connected) == ([], False)
    assert discovery.error == "No such file or directory"
    write(path, '[[backends]]\nid = "a"\nurl = "http://10.0.0.1"\nweight = 2.0\n')
    clock.advance(1)
    assert told == [[{"id": "a", "url": "http://10.0.0.1", "weight": 2.0}]]
    assert (discovery.connected, discovery.error) == (True, "")


def test_an_unchanged_file_is_told_once(watched: Any) -> None:
    clock, path, told, discovery = watched
    write(path, "backends = []")
    clock.pump([1.0] * 5)
    assert told == [[]]
    assert discovery.contact_s == 5


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[[backends]]\nid = "a', "TOML"),
        ("", "must hold backends"),
        ("backends = 7", "list of tables"),
        ("backends = [7]", "list of tables"),
        ("backends = []\nelse = 1", "nothing else"),
        (f"x = {'[' * 5000}", "TOML|nested"),
    ],
)
def test_a_broken_file_changes_nothing_and_is_looked_at_again(watched: Any, text: str, why: str) -> None:
    clock, path, told, discovery = watched
    write(path, "backends = []")
    clock.advance(1)
    write(path, text)
    clock.advance(1)
    assert len(told) == 1
    assert not discovery.connected
    assert re.search(why, discovery.error)
    path.unlink()
    clock.advance(1)
    assert len(told) == 1
    write(path, "backends = []")
    clock.advance(1)
    assert len(told) == 2
    assert discovery.error == ""


def test_bytes_that_are_no_text_are_told(watched: Any) -> None:
    clock, path, _, discovery = watched
    path.write_bytes(b"\xff\xfe")
    clock.advance(1)
    assert discovery.error == "not UTF-8 (at byte 0)"


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({}, "file"),
        ({"file": ""}, "file"),
        ({"file": "x", "interval_s": 0}, "interval_s"),
        ({"file": 7}, "file"),
    ],
)
def test_wrong_options_are_faults_with_their_keys(options: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        static_discovery.build(options, Clock())
    assert [fault.where for fault in refused.value.faults] == [where]
