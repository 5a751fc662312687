"""Regular expressions that every supported Python reads alike."""

import re
from pathlib import Path

import llmgw

POSSESSIVE_GROUP = re.compile(r"[^\\]\)[*+?]\+|\(\?>")


def test_no_possessive_or_atomic_groups() -> None:
    """They match wrongly before CPython 3.11.5 (python/cpython#106052), which Debian 12 has;
    possessive repeats of one character or class are sound."""
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted(Path(llmgw.__file__).parent.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if POSSESSIVE_GROUP.search(line)
    ]
    assert found == []
