"""A watch's stream, cut at any byte, and with garbage in it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.json_lines import JsonLines, NotJsonLinesError

OBJECTS: list[dict[str, Any]] = [
    {"result": {"header": {"revision": "7"}, "created": True}},
    {"result": {"events": [{"type": "DELETE", "kv": {"key": "L2EvYg=="}}]}},
    {"text": 'a line end\nand a quote" and é'},
    {},
]
STREAM = b"".join(json.dumps(each).encode() + b"\n" for each in OBJECTS)


def test_byte_by_byte_is_as_all_at_once() -> None:
    assert JsonLines().feed(STREAM) == OBJECTS
    lines = JsonLines()
    found = [each for index in range(len(STREAM)) for each in lines.feed(STREAM[index : index + 1])]
    assert found == OBJECTS
    lines.end()


@given(st.lists(st.integers(min_value=0, max_value=len(STREAM)), max_size=12))
def test_cut_anywhere(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    lines = JsonLines()
    found = [each for a, b in itertools.pairwise(places) for each in lines.feed(STREAM[a:b])]
    assert found == OBJECTS


def test_empty_lines_and_carriage_returns_are_passed_over() -> None:
    assert JsonLines().feed(b'\n \r\n{"a":1}\r\n\n') == [{"a": 1}]


@pytest.mark.parametrize(
    "garbage",
    [
        b"<html>\n",
        b"[1]\n",
        b"7\n",
        b"null\n",
        b'{"a":\n',
        b"\xff\xfe\n",
        b'{"a":1}{"b":2}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_garbage_is_told(garbage: bytes) -> None:
    with pytest.raises(NotJsonLinesError):
        JsonLines().feed(garbage)


@pytest.mark.parametrize("data", [b"x" * 11, b'{"a":"%b"}\n' % (b"x" * 20)])
def test_a_line_has_an_end(data: bytes) -> None:
    with pytest.raises(NotJsonLinesError, match="longer than 10"):
        JsonLines(10).feed(data)


def test_a_line_that_grows_has_an_end() -> None:
    lines = JsonLines(10)
    lines.feed(b"12345")
    lines.feed(b"67890")
    with pytest.raises(NotJsonLinesError):
        lines.feed(b"1")


def test_an_end_in_the_middle_is_told() -> None:
    lines = JsonLines()
    assert lines.feed(b'{"a":1}\n{"b"') == [{"a": 1}]
    with pytest.raises(NotJsonLinesError, match="middle"):
        lines.end()


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_whatever_comes_it_answers_with_objects_or_says_what_is_wrong(pieces: list[bytes]) -> None:
    lines = JsonLines(100)
    try:
        for piece in pieces:
            assert all(isinstance(each, dict) for each in lines.feed(piece))
        lines.end()
    except NotJsonLinesError:
        pass
