"""`tests/constraints.txt` pins what the extra `test` brings."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYTHON = (3, 11)
"""For which the pins are made."""
PINS = Path(__file__).parent / "constraints.txt"


def pinned() -> dict[str, Requirement]:
    """By its plain name, each line's requirement."""
    lines = [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    found = {canonicalize_name(each.name): each for each in map(Requirement, lines)}
    assert len(found) == len(lines)
    return found


def wanted(name: str, extras: frozenset[str], seen: dict[tuple[str, str], set[str]]) -> None:
    """Everything that an installed package requires here, and who wants which versions of it."""
    try:
        requires = distribution(name).requires or []
    except PackageNotFoundError:
        return
    for extra in extras | {""}:
        for text in requires:
            each = Requirement(text)
            if each.marker is not None and not each.marker.evaluate({"extra": extra}):
                continue
            place = (canonicalize_name(each.name), ",".join(sorted(each.extras)))
            if place not in seen:
                seen[place] = set()
                wanted(each.name, frozenset(each.extras), seen)
            seen[place].add(str(each.specifier))


def test_every_package_that_the_tests_bring_is_pinned_to_a_version_that_all_accept() -> None:
    pins = pinned()
    seen: dict[tuple[str, str], set[str]] = {}
    wanted("llmgw", frozenset({"test"}), seen)
    assert len(seen) > 80
    names = {name for name, _ in seen} - {"llmgw"}
    missing = names - pins.keys()
    if sys.version_info[:2] != PYTHON:  # which needs other packages, such as those for what it lacks itself
        missing &= {
            canonicalize_name(Requirement(text).name) for text in distribution("llmgw").requires or []
        }
    assert not missing, f"not pinned: {sorted(missing)}; run `make pins`"
    for (name, _), specifiers in seen.items():
        if name == "llmgw":
            continue
        (version,) = (each.version for each in pins[name].specifier)
        for text in specifiers:
            assert Requirement(f"{name}{text}").specifier.contains(version, prereleases=True), (name, text)


def test_every_pin_is_one_version() -> None:
    assert all([each.operator for each in pin.specifier] == ["=="] for pin in pinned().values())
