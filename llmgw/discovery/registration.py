"""The JSON document that stands for one backend in a store: the schema, both ways.

Written by ``llmgw register`` or by hand, read by the ``etcd`` discovery. It is a
``[[backends]]`` table in JSON, less what names files, and with a few shorter
words; ``docs/discovery.md`` shows it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

MOST_BYTES = 64 << 10


class Registration(Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """One backend.

    :param id: absent: the last part of the document's key.
    :param max_connections: requests in flight that one gateway may have there.
    :param caps: another word for it.
    :param slots: parallel sequences that the server has; the cap where no other is told.
    :param context_length: tokens of one slot.
    :param context: another word for it.
    """

    url: str
    id: str | None = None
    models: list[str] | None = None
    weight: float | None = None
    context_length: int | None = None
    context: int | None = None
    max_connections: int | None = None
    caps: int | None = None
    slots: int | None = None
    labels: dict[str, str] | None = None
    kind: Literal["auto", "llama-server", "openai", "ollama"] | None = None
    health: str | None = None
    raw: bool | None = None
    tls: dict[str, Any] | None = None
    timeouts: dict[str, Any] | None = None
    loader: dict[str, Any] | None = None
    max_models: int | None = None
    model_memory_bytes: int | None = None


_decode = msgspec.json.Decoder(Registration).decode
_RENAMED = {"context_length", "context", "max_connections", "caps", "slots"}
_PLAIN = tuple(name for name in Registration.__struct_fields__ if name not in _RENAMED)


def read_registration(key: str, raw: bytes) -> dict[str, Any]:
    """A document as a ``[[backends]]`` table, with its ``key``.

    One that cannot be read gives ``key`` and ``fault`` alone, which says why.
    """
    try:
        if len(raw) > MOST_BYTES:
            raise ValueError(f"longer than {MOST_BYTES} bytes")
        return {"key": key, **_table(key, _decode(raw))}
    except (ValueError, RecursionError) as error:
        return {"key": key, "fault": str(error) or "nested too deeply"}


def _table(key: str, told: Registration) -> dict[str, Any]:
    found = {name: getattr(told, name) for name in _PLAIN}
    found["context_length"] = _either(told, "context_length", "context")
    cap = _either(told, "max_connections", "caps")
    found["max_connections"] = told.slots if cap is None else cap
    table = {name: value for name, value in found.items() if value is not None}
    return {"id": key.rpartition("/")[2], **table}


def _either(told: Registration, name: str, other: str) -> Any:
    """What one of two words for the same says.

    :raise ValueError: both say something, and not the same.
    """
    values = [value for value in (getattr(told, name), getattr(told, other)) if value is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise ValueError(f"{name} and {other} mean the same and differ")
    return values[0] if values else None


def write_registration(told: Registration) -> bytes:
    """The document, always the same for the same."""
    return msgspec.json.encode(told, order="deterministic")
