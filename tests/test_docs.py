"""The documentation builds without a warning, and the configurations it shows are good ones."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from test_example_config import AnyFile

from llmgw.config import parse_config
from llmgw.gateway.routes import MODEL, ROUTES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "reference" not in page.parts),
]
OTHER_FILES = {"keys", "pepper_file", "nodes", "project", "tool", "build-system"}
"""Top keys of blocks that are no configuration: key files, simulated fleets, packages."""
BACKEND = '\n[[backends]]\nid = "shown"\nurl = "http://127.0.0.1:1"\n'


def blocks() -> list[object]:
    found: list[object] = []
    for page in PAGES:
        for block in re.finditer(r"(?ms)^ *```toml\n(.*?)^ *```", page.read_text(encoding="utf-8")):
            line = page.read_text(encoding="utf-8")[: block.start()].count("\n") + 2
            found.append(pytest.param(block[1], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-d", tmp_path / "d"]
    built = subprocess.run([*command, ".", tmp_path / "html"], cwd=ROOT, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    shown = (tmp_path / "html" / "docs" / "reference" / "config.html").read_text(encoding="utf-8")
    assert "upstream_idle_s" in shown


@pytest.mark.parametrize("block", blocks())
def test_a_configuration_that_is_shown_is_a_good_one(block: str) -> None:
    table = tomllib.loads(block)
    if OTHER_FILES & set(table):
        return
    if not {"backends", "discovery"} & set(table):
        block += BACKEND
    if "auth" not in table:
        block = 'auth = ["anonymous"]\n' + block
    parse_config(block, source="shown", base_dir="/etc/llmgw", files=AnyFile())


def test_the_paths_that_are_told_are_those_that_are_served() -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    table = page.partition("## What is served")[2].partition("\n\nEverything else")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    told = [path for cell in cells for path in re.findall(r"`([^`]+)`", cell)]
    assert sorted(told) == sorted([*ROUTES, MODEL.path])
