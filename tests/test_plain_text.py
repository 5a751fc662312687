"""What strangers wrote, in a line of ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import ConfigError, ConfigFault
from llmgw.plain_text import plain


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("as it is: ünï \\x1b 'x'", "as it is: ünï \\x1b 'x'"),
        ("\x1b[2Jgone\r\nllmgw: good", "\\x1b[2Jgone\\r\\nllmgw: good"),
        ("\u202eright to left\u2028", "\\u202eright to left\\u2028"),
        ("\ud800", "\\ud800"),
        ("", ""),
    ],
)
def test_what_is_not_printable_is_escaped(text: str, told: str) -> None:
    assert plain(text, 100) == told


def test_what_is_long_keeps_its_beginning_and_its_end() -> None:
    text = f"must be a name, not {'x' * 100_000}; did you mean y?"
    told = plain(text, 100)
    assert len(told) == 100
    assert told.startswith("must be a name, not xxx")
    assert told.endswith("xxx; did you mean y?")
    assert plain("\x00" * 1_000_000, 100).count("\\x00") >= 20


@given(st.text(), st.integers(4, 60))
def test_it_is_always_one_short_printable_line(text: str, most: int) -> None:
    told = plain(text, most)
    assert told.isprintable()
    assert len(told) <= most


def test_a_fault_is_fit_to_be_told_whoever_made_it() -> None:
    fault = ConfigFault(f"router.{'k' * 5000}", f"must be a number, not {'v' * 5000 + chr(27)}[31m")
    assert len(str(fault)) < 1500
    assert "\x1b" not in str(ConfigError([fault], "llmgw.toml"))
    assert (len(fault.where), len(fault.what)) == (200, 1000)
