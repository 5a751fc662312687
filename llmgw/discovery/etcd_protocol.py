"""etcd's v3 API as its JSON gateway speaks it: what to send, and what the answers mean.

No I/O. Keys and values travel in base64, 64-bit numbers as strings, and fields
that are zero or empty are left out.

:source: etcd 3.4 ``api_grpc_gateway.md`` and ``rpc.proto``; etcd-server 3.4.23 as observed.
"""

from __future__ import annotations

import base64
import binascii
import enum
from collections.abc import Mapping
from typing import Any

from msgspec import Struct


class EtcdError(Exception):
    """etcd has answered, and what it said is no use.

    :param code: the gRPC code, 0 if it told none.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


UNAUTHENTICATED = 16
OUT_OF_RANGE = 11
NOT_FOUND = 5


class Heard(enum.Enum):
    """What a message of a watch was.

    ``COMPACTED``: the revision to resume from is gone. ``ANOTHER``: this is not the
    store that was read before. In both cases only reading everything anew helps.
    """

    CREATED = "created"
    CHANGED = "changed"
    PROGRESS = "progress"
    COMPACTED = "compacted"
    ANOTHER = "another"


class Item(Struct, frozen=True):
    """A key's value; ``created`` is the revision that made it."""

    value: bytes
    created: int


def b64(data: bytes) -> str:
    """As keys and values are sent."""
    return base64.b64encode(data).decode()


def range_end(prefix: bytes) -> bytes:
    """The first key behind all that begin with ``prefix``; a zero byte means no end."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b"\0"


class Mirror:
    """All keys under a prefix as of one revision.

    :ivar items: by key.
    :ivar revision: everything up to it is in ``items``; ``None``: nothing is known, or
        not any more, and the whole must be read.
    """

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self.items: dict[bytes, Item] = {}
        self.revision: int | None = None
        self._cluster = ""

    def range_request(self) -> dict[str, Any]:
        """For ``/v3/kv/range``: everything, as a majority of the members knows it."""
        return {"key": b64(self.prefix or b"\0"), "range_end": b64(range_end(self.prefix))}

    def watch_request(self) -> dict[str, Any]:
        """For ``/v3/watch``: what comes behind the revision that is known."""
        assert self.revision is not None
        return {
            "create_request": {
                **self.range_request(),
                "start_revision": str(self.revision + 1),
                "progress_notify": True,
            }
        }

    def load(self, answer: Mapping[str, Any]) -> None:
        """Take in the answer of a range.

        :raise EtcdError: it is none; nothing has changed.
        """
        header = _table(answer, "header")
        revision = _number(header.get("revision"))
        items = dict(map(_item, _list(answer, "kvs")))
        self.items, self.revision, self._cluster = items, revision, str(header.get("cluster_id", ""))

    def take(self, message: Mapping[str, Any]) -> Heard:
        """Take in a message of the watch.

        :raise EtcdError: it is an error, or no message of a watch; nothing has changed.
        """
        if "error" in message:
            raise error_of(message)
        result = _table(message, "result")
        header = result.get("header")
        revision = _number(_table(result, "header").get("revision")) if header is not None else 0
        if _number(result.get("compact_revision")):
            self.revision = None
            return Heard.COMPACTED
        if result.get("canceled"):
            raise EtcdError(
                f"the watch was refused: {str(result.get('cancel_reason') or 'no reason told')[:200]}"
            )
        if result.get("created"):
            cluster = str(_table(result, "header").get("cluster_id", ""))
            if cluster != self._cluster or (self.revision or 0) > revision:
                self.revision = None
                return Heard.ANOTHER
            return Heard.CREATED
        events = _list(result, "events")
        if not events:
            # Told by etcd when all up to here has been sent.
            self.revision = max(self.revision or 0, revision)
            return Heard.PROGRESS
        changes = [self._change(event) for event in events]
        for key, item in changes:
            if item is None:
                self.items.pop(key, None)
            else:
                self.items[key] = item
        self.revision = max(self.revision or 0, revision)
        return Heard.CHANGED

    def _change(self, event: Any) -> tuple[bytes, Item | None]:
        if not isinstance(event, Mapping):
            raise EtcdError("an event is no object")
        key, item = _item(event.get("kv"))
        return key, None if event.get("type") == "DELETE" else item


def error_of(answer: Any) -> EtcdError:
    """The error that an answer tells: of a call, or inside a stream."""
    table = answer.get("error") if isinstance(answer, Mapping) else None
    if isinstance(table, Mapping):
        return EtcdError(str(table.get("message", table))[:200], _number(table.get("grpc_code")))
    if isinstance(answer, Mapping):
        text = answer.get("message") or table or "no reason told"
        return EtcdError(str(text)[:200], _number(answer.get("code")))
    return EtcdError("an answer that is no object")


def _item(kv: Any) -> tuple[bytes, Item]:
    if not isinstance(kv, Mapping):
        raise EtcdError("a key-value pair is no object")
    return _bytes(kv.get("key")), Item(_bytes(kv.get("value")), _number(kv.get("create_revision")))


def _bytes(value: Any) -> bytes:
    if value is None:
        return b""
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise EtcdError(f"not base64: {str(value)[:40]!r}") from None


def _number(value: Any) -> int:
    try:
        return int(value or 0)
    except (ValueError, TypeError):
        raise EtcdError(f"not a number: {str(value)[:40]!r}") from None


def _table(answer: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = answer.get(key)
    if not isinstance(value, Mapping):
        raise EtcdError(f"an answer without {key}")
    return value


def _list(answer: Mapping[str, Any], key: str) -> list[Any]:
    value = answer.get(key) or []
    if not isinstance(value, list):
        raise EtcdError(f"an answer whose {key} is no list")
    return value
