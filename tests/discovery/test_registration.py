"""The document that stands for one backend."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.config import BackendConfig, parse_backend
from llmgw.config.reader import keys_of
from llmgw.discovery.registration import Registration, read_registration, write_registration
from llmgw.errors import ConfigError

URL = "http://10.0.0.1:8080"


@pytest.mark.parametrize(
    ("document", "table"),
    [
        ({"url": URL}, {"id": "gpu-0", "url": URL}),
        ({"url": URL, "id": "other"}, {"id": "other", "url": URL}),
        ({"url": URL, "context": 4096, "caps": 3}, {"context_length": 4096, "max_connections": 3}),
        ({"url": URL, "context_length": 4096, "context": 4096}, {"context_length": 4096}),
        ({"url": URL, "max_connections": 5, "slots": 2}, {"max_connections": 5}),
        ({"url": URL, "slots": 2, "models": None}, {"max_connections": 2}),
        (
            {
                "url": URL,
                "models": ["m"],
                "weight": 2,
                "labels": {"zone": "x"},
                "kind": "openai",
                "raw": True,
            },
            {"models": ["m"], "weight": 2.0, "labels": {"zone": "x"}, "kind": "openai", "raw": True},
        ),
        (
            {"url": URL, "timeouts": {"first_token_s": 5}, "health": "http"},
            {"timeouts": {"first_token_s": 5}},
        ),
    ],
)
def test_a_document_is_a_backend(document: dict[str, Any], table: dict[str, Any]) -> None:
    found = read_registration("/llmgw/gpu-0", msgspec.json.encode(document))
    assert found.pop("key") == "/llmgw/gpu-0"
    assert found.items() >= table.items()
    parse_backend(found)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "truncated"),
        (b"no", "JSON|truncated|malformed"),
        (b"[]", "object"),
        (b"{}", "url"),
        (b'{"url": 7}', r"\$.url"),
        (b'{"url": "u", "modles": []}', "modles"),
        (b'{"url": "u", "weight": "2"}', "weight"),
        (b'{"url": "u", "models": "m"}', "models"),
        (b'{"url": "u", "kind": "x"}', "kind"),
        (b'{"url": "u", "context": 1, "context_length": 2}', "differ"),
        (b'{"url": "\xff"}', ""),
        (b"[" * 70_000, "longer"),
        (b"[" * 60_000, ""),
    ],
)
def test_one_that_is_none_says_why(raw: bytes, why: str) -> None:
    found = read_registration("/llmgw/x", raw)
    assert set(found) == {"key", "fault"}
    assert found["fault"]
    assert re.search(why, found["fault"])


@given(st.binary(max_size=60))
def test_no_document_does_harm(raw: bytes) -> None:
    assert read_registration("/llmgw/x", raw)["key"] == "/llmgw/x"


def test_what_is_written_is_read() -> None:
    told = Registration(
        URL, id="a", models=["m", "n"], slots=4, context_length=2048, labels={"b": "1", "a": "2"}
    )
    raw = write_registration(told)
    assert raw == write_registration(told)
    assert b"null" not in raw
    assert read_registration("/llmgw/zzz", raw) == {
        "key": "/llmgw/zzz",
        "id": "a",
        "url": URL,
        "models": ["m", "n"],
        "context_length": 2048,
        "max_connections": 4,
        "labels": {"b": "1", "a": "2"},
    }


def test_the_schema_has_every_key_of_a_backend_that_names_no_file() -> None:
    words = {"caps", "context", "slots"}
    assert {*Registration.__struct_fields__} - words == {*keys_of(BackendConfig)} - {"api_key_file"}


def test_a_document_may_not_start_programs() -> None:
    raw = b'{"url": "http://10.0.0.1", "loader": {"plugin": "command", "command": ["sh"]}}'
    table = read_registration("x", raw)
    del table["key"]
    with pytest.raises(ConfigError, match="loader"):
        parse_backend(table)
