"""Options: every fault at once, each by its name."""

from __future__ import annotations

import pytest

from llmgw.errors import ConfigError
from llmgw.routing.options import Number, read_numbers

KNOWN = {
    "share": Number(default=0.5, least=0.0, most=1.0),
    "pause_s": Number(default=5.0, above=0.0),
    "seed": Number(default=None, whole=True),
}


def test_absent_options_have_their_defaults() -> None:
    assert read_numbers({}, KNOWN) == {"share": 0.5, "pause_s": 5.0, "seed": None}


def test_given_options_are_taken() -> None:
    assert read_numbers({"share": 1, "seed": 7}, KNOWN) == {"share": 1, "pause_s": 5.0, "seed": 7}


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("share", -0.1, "must be 0 or more"),
        ("share", 1.1, "must be 1 or less"),
        ("share", True, "must be a number"),
        ("share", "0.5", "must be a number"),
        ("share", None, "must be a number"),
        ("share", float("nan"), "must be a number"),
        ("share", float("inf"), "must be a number"),
        ("pause_s", 0, "must be above 0"),
        ("seed", 1.5, "must be a whole number"),
        ("sharp", 1, "unknown; the options are share, pause_s, seed"),
    ],
)
def test_a_fault_says_where_and_what(name: str, value: object, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_numbers({name: value}, KNOWN)
    (fault,) = caught.value.faults
    assert (fault.where, fault.what) == (name, what)


def test_all_faults_are_told() -> None:
    with pytest.raises(ConfigError) as caught:
        read_numbers({"share": 9, "x": 1, "pause_s": -1}, KNOWN)
    assert [fault.where for fault in caught.value.faults] == ["share", "x", "pause_s"]


def test_without_options_that_is_said() -> None:
    with pytest.raises(ConfigError, match="x: unknown; there are no options"):
        read_numbers({"x": 1}, {})
