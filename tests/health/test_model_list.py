"""Model lists, as servers write them and as they should not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.health.model_list import ModelList, read_model_list


def listing(*entries: object) -> bytes:
    return json.dumps({"object": "list", "data": entries}).encode()


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (listing({"id": "a"}, {"id": "b"}), ("a", "b")),
        (listing({"id": "a"}, {"id": "a"}), ("a",)),
        (listing(), ()),
        (b'{"object":"list","data":null}', ()),
        (listing({"id": ""}, {"id": 5}, {}, 7, None, "a", {"id": "b"}), ("b",)),
        (listing({"id": "a", "status": {"value": "unloaded"}}), ("a",)),
        (listing({"id": "a", "status": {"value": "unloaded", "failed": True}}, {"id": "b"}), ("b",)),
        (listing({"id": "a", "status": "loaded"}), ("a",)),
    ],
)
def test_names_are_told_once_and_nonsense_is_left_out(body: bytes, names: tuple[str, ...]) -> None:
    assert read_model_list(body) == ModelList(names)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<!doctype html><html><body>Welcome to nginx</body></html>",
        b"[]",
        b"null",
        b"{}",
        b'{"data": 1}',
        b'{"data": {"id": "a"}}',
        b'{"data": [{"id": "a"}',
        b"\xff\xfe",
        b'{"data": [{"id": "\xff"}]}',
        b"[" * 100_000,
        b'{"data":' + b"[" * 100_000,
        b'{"error":{"message":"Invalid API Key","code":401}}',
    ],
)
def test_what_is_no_model_list_tells_nothing(body: bytes) -> None:
    assert read_model_list(body) is None


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ((8192, 4096), 4096),
        ((None,), None),
        (("4096",), None),
        ((True,), None),
        ((0, -1), None),
        ((4.5, 2048), 2048),
    ],
)
def test_the_smallest_window_is_told(lengths: tuple[object, ...], told: int | None) -> None:
    entries = [{"id": f"m{number}", "max_model_len": length} for number, length in enumerate(lengths)]
    listed = read_model_list(listing(*entries))
    assert listed is not None
    assert listed.context_length == told


@given(st.binary())
def test_no_bytes_raise(body: bytes) -> None:
    read_model_list(body)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["id", "status", "failed", "max_model_len", "data"]), inner, max_size=3
        )
    ),
    max_leaves=10,
)


@given(_JSON)
def test_no_json_raises(value: object) -> None:
    read_model_list(json.dumps({"data": value}).encode())
    read_model_list(json.dumps(value).encode())
