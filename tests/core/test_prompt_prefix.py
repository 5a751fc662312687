"""Hashes of prompts: equal beginnings, bounded work."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmgw.core.prompt import BLOCK_BYTES, MAX_BLOCKS, READ_BYTES, is_batch, prefix_of

TEXT = "The harbour master counted ships. "


def turn(number: int, size: int = 1000) -> dict[str, str]:
    return {"role": ("user", "assistant")[number % 2], "content": f"{number}: {TEXT * (size // len(TEXT))}"}


def chat(turns: int, size: int = 1000, **fields: Any) -> bytes:
    """A conversation, as clients write it; ``stream`` comes after the messages."""
    messages = [turn(number, size) for number in range(turns)]
    return json.dumps({"model": "x", **fields, "messages": messages, "stream": True}).encode()


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@pytest.mark.parametrize("size", [1000, READ_BYTES // 4, READ_BYTES])
def test_a_conversation_that_grows_shares_its_beginning(size: int) -> None:
    for turns in (1, 2, 3):
        before = prefix_of(chat(turns, size, max_tokens=turns), "m")
        after = prefix_of(chat(turns + 2, size, max_tokens=99), "m")
        assert common(before, after) >= len(before) - 1 > 0


def test_what_is_not_the_prompt_does_not_count() -> None:
    assert prefix_of(chat(3), "m") == prefix_of(chat(3, temperature=0.5, user="ada", n=1), "m")
    assert prefix_of(chat(3, tools=[{"x": TEXT * 100}]), "m") == prefix_of(chat(3), "m")


def test_another_model_or_another_beginning_shares_nothing() -> None:
    assert common(prefix_of(chat(3), "m"), prefix_of(chat(3), "n")) == 0
    assert common(prefix_of(chat(3), "m"), prefix_of(chat(3, system="Be kind."), "m")) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": TEXT * 100},
        {"prompt": [1] * 1000},
        {"input": TEXT * 100},
        {"messages": [turn(0)]},
        {"system": TEXT * 100, "messages": []},
        {"instructions": TEXT * 100, "input": "x"},
    ],
)
def test_every_kind_of_prompt_has_blocks(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    assert len(body) // BLOCK_BYTES - 1 <= len(prefix_of(body, "m")) <= len(body) // BLOCK_BYTES


def test_a_short_prompt_and_none_have_no_blocks() -> None:
    assert prefix_of(chat(1, 10), "m") == ()
    assert prefix_of(b"{}", "m") == ()


@pytest.mark.parametrize("key", ["messages", "prompt", "input"])
@pytest.mark.parametrize("spaced", [True, False])
def test_long_bodies_are_known_by_their_window(key: str, spaced: bool) -> None:
    text = TEXT * (READ_BYTES // len(TEXT) + 1)
    separators = (", ", ": ") if spaced else (",", ":")
    bodies = [
        json.dumps({**first, key: text}, separators=separators).encode()
        for first in ({"model": "m"}, {"model": "longer", "seed": 12345})
    ]
    one, other = (prefix_of(body, "m") for body in bodies)
    assert one == other
    assert len(one) > READ_BYTES // BLOCK_BYTES - 1


def test_a_long_body_whose_prompt_begins_late_is_known_by_its_own_beginning() -> None:
    body = json.dumps({"tools": "x" * READ_BYTES, "messages": [turn(0)]}).encode()
    assert prefix_of(body, "m") == prefix_of(body, "m") != ()


def test_work_is_bounded() -> None:
    assert len(prefix_of(chat(2, 1 << 20), "m")) == MAX_BLOCKS


def test_a_crossing_of_the_limit_misses_nothing_in_a_chat() -> None:
    below, above = chat(4, READ_BYTES // 5), chat(6, READ_BYTES // 5)
    assert len(below) < READ_BYTES < len(above)
    one, other = prefix_of(below, "m"), prefix_of(above, "m")
    assert common(one, other) >= len(one) - 1


@pytest.mark.parametrize(
    ("prompt", "batch"),
    [("text", False), (["a", "b"], True), ([1, 2], True), ({"a": 1}, False), (None, False)],
)
def test_several_prompts_are_told_from_one(prompt: Any, batch: bool) -> None:
    assert is_batch(json.dumps({"prompt": prompt}).encode()) is batch
    assert not is_batch(b"{}")
