"""Reads a server's ``/v1/models``, as leniently as possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct


class ModelList(Struct, frozen=True):
    """The models that a server accepts, each once.

    :param context_length: the smallest window given, in tokens (vLLM, SGLang).
    """

    names: tuple[str, ...]
    context_length: int | None = None


class _Answer(Struct):
    data: list[Any] | None


_decode = msgspec.json.Decoder(_Answer).decode


def read_model_list(body: bytes) -> ModelList | None:
    """Read a model list; ``None`` if ``body`` is not one (an HTML page, an error).

    Malformed entries are left out, as are models whose load failed (``status.failed``, listed by
    llama-server's router). ``data`` may be ``null``, as Ollama writes it while it has no model.
    """
    try:
        entries = _decode(body).data or []
    except (msgspec.DecodeError, RecursionError):
        return None
    names: dict[str, None] = {}
    lengths: list[int] = []
    for entry in entries:
        if not isinstance(entry, Mapping):
            continue
        name = entry.get("id")
        status = entry.get("status")
        failed = isinstance(status, Mapping) and status.get("failed") is True
        if not isinstance(name, str) or not name or failed:
            continue
        names[name] = None
        length = positive(entry.get("max_model_len"))
        if length is not None:
            lengths.append(length)
    return ModelList(tuple(names), min(lengths, default=None))


def positive(value: Any) -> int | None:
    """``value`` if it is a whole number above zero."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""How gzip and zstd begin (RFC 1952 section 2.3.1, RFC 8878 section 3.1.1)."""

UNREADABLE = "it compresses answers, though none is asked for: nothing can be read from them"


def is_compressed(body: bytes) -> bool:
    """Some proxies compress whatever passes."""
    return body.startswith(COMPRESSED)
