"""JSON objects, one per line, as they arrive in pieces from a watch.

Both etcd's gateway and the Kubernetes API write one object and a line end for each event. The
line end is the only separator; it cannot occur inside an object, since JSON escapes it in
strings, and both write without indentation.
"""

from __future__ import annotations

from typing import Any

import msgspec

MOST_BYTES = 16 << 20


class NotJsonLinesError(ValueError):
    """The stream is malformed; nothing after the fault can be trusted."""


class JsonLines:
    """Cuts a stream into objects.

    :param most_bytes: the longest line.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._rest: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The objects that are whole with ``data``; empty lines are passed over.

        :raise NotJsonLinesError: a line is too long, no JSON, or no object. What
            was whole before it in ``data`` is lost; begin a new stream.
        """
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join([*self._rest, whole[0]])
            self._rest, self._size = [], 0
        self._rest.append(rest)
        self._size += len(rest)
        if self._size > self._most_bytes or any(len(line) > self._most_bytes for line in whole):
            raise NotJsonLinesError(f"a line is longer than {self._most_bytes} bytes")
        return [_object(line) for line in whole if line.strip()]

    def end(self) -> None:
        """The stream is over.

        :raise NotJsonLinesError: in the middle of an object.
        """
        if b"".join(self._rest).strip():
            raise NotJsonLinesError("the stream ended in the middle of an object")


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotJsonLinesError(f"a line is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise NotJsonLinesError(f"a line is no object but a {type(value).__name__}")
    return value
