"""Options that a client sets for its request by ``x-llmgw-`` headers.

An option that cannot be parsed is refused before the body is read: a client that meant
20 seconds and sent ``20s`` must not find out from a call that takes half an hour.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llmgw.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT = b"x-llmgw-timeout"
INTERIM = b"x-llmgw-interim"
INTERIM_KINDS = frozenset({b"102", b"sse"})

_seconds = re.compile(rb"(?:\d{1,9}(?:\.\d{0,20})?|\.\d{1,20})").fullmatch
"""As many digits as languages print of a fraction, such as 0.30000000000000004."""


def check(headers: Mapping[bytes, bytes]) -> None:
    """:raise InvalidRequest: an option is malformed."""
    if TIMEOUT in headers:
        timeout_s(headers)
    if INTERIM in headers:
        interim_kinds(headers)


def timeout_s(headers: Mapping[bytes, bytes]) -> float | None:
    """The longest that the client will wait, in seconds, above 0; ``None`` if it does not say.

    :raise InvalidRequest: it is not such a number.
    """
    value = headers.get(TIMEOUT)
    if value is None:
        return None
    wanted_s = float(value) if _seconds(value) else 0.0
    if wanted_s <= 0:
        raise InvalidRequest(
            "x-llmgw-timeout must be a number of seconds above 0, such as 20 or 0.5", param="x-llmgw-timeout"
        )
    return wanted_s


def interim_kinds(headers: Mapping[bytes, bytes]) -> frozenset[bytes]:
    """The signs of life, of :data:`INTERIM_KINDS`, that the client accepts while it is held.

    :raise InvalidRequest: anything else is among them.
    """
    value = headers.get(INTERIM)
    if value is None:
        return frozenset()
    wanted = frozenset(word for word in (each.strip().lower() for each in value.split(b",")) if word)
    if not wanted <= INTERIM_KINDS:
        raise InvalidRequest("x-llmgw-interim must be 102, sse, or both", param="x-llmgw-interim")
    return wanted
