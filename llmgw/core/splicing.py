"""The few changes that the gateway makes to a JSON body: top-level members are replaced in place.

Every other byte stays as it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from llmgw.core.json_members import find_members, members_of, read_members

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmgw.core.body import Ask

REMOVE: Final = object()
"""As a value for :func:`splice`: the member is removed."""
_KEEP: Final = object()

_encode = msgspec.json.Encoder().encode


def splice(body: bytes, changes: Mapping[str, object]) -> bytes:
    """``body`` with some top-level members replaced, added or removed.

    Keys are compared after decoding; a replaced member keeps its place and the spelling of its
    key, new ones are appended. Every other byte stays, white space included; with a removed
    member goes the comma before it (with the first one, the comma after it).

    :param changes: new values by key: anything that JSON can represent, or :data:`REMOVE`.
    :raise InvalidRequest: as :func:`~.body.read_json`, for a body that is no object or has a duplicate key.
    """
    if not changes:
        return body
    whole = memoryview(body)
    found = find_members(body)
    first = next(iter(found.values()))[0] if found else body.index(b"{") + 1
    out: list[bytes | memoryview] = [whole[:first]]
    before, empty = first, True
    for key, (start, value_start, end) in found.items():
        value = changes.get(key, _KEEP)
        if value is not REMOVE:
            if not empty:
                out.append(whole[before:start])
            if value is _KEEP:
                out.append(whole[start:end])
            else:
                out += (whole[start:value_start], _encode(value))
            empty = False
        before = end
    for key, value in changes.items():
        if key not in found and value is not REMOVE:
            if not empty:
                out.append(b",")
            out += (_encode(key), b":", _encode(value))
            empty = False
    out.append(whole[before:])
    return b"".join(out)


def clamp_output(ask: Ask, most: int, key: str = "max_tokens") -> dict[str, object]:
    """Changes for :func:`splice` after which no output limit is above ``most``, nor 0,
    which Ollama reads as no limit.

    :param key: the key to set if the client gave none; which one depends on the route
        (``max_output_tokens`` on ``/v1/responses``, ``n_predict`` on ``/completion``).
    :return: empty if the client's own limits are low enough.
    """
    if not ask.output_limits:
        return {key: most}
    return {name: most for name, value in ask.output_limits if not 0 < value <= most}


def asking_usage(body: bytes) -> dict[str, object]:
    """Changes for :func:`splice` after which the stream ends with its usage.

    Other ``stream_options`` of the client stay as they came, except for vLLM's running totals,
    which vLLM only sends together with ``include_usage``.
    """
    wanted = members_of(read_members(body).get("stream_options"))
    wanted.pop("continuous_usage_stats", None)
    return {"stream_options": {**wanted, "include_usage": True}}
