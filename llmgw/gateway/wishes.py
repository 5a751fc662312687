"""What a client asks of the gateway itself, by ``x-llmgw-`` headers of its request.

A wish that cannot be read is refused before the body is: who meant 20 seconds
and wrote ``20s`` must not find out from a call that takes half an hour.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llmgw.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT = b"x-llmgw-timeout"
INTERIM = b"x-llmgw-interim"
INTERIM_WORDS = frozenset({b"102", b"sse"})

_seconds = re.compile(rb"(?:\d{1,9}(?:\.\d{0,20})?|\.\d{1,20})").fullmatch
"""Room for what other languages print of a fraction, such as 0.30000000000000004."""


def verify(headers: Mapping[bytes, bytes]) -> None:
    """:raise InvalidRequest: a wish is not of the form that is read."""
    if TIMEOUT in headers:
        longest_s(headers)
    if INTERIM in headers:
        signs_of_life(headers)


def longest_s(headers: Mapping[bytes, bytes]) -> float | None:
    """The longest that the client will wait, in seconds, above 0; ``None``: it does not say.

    :raise InvalidRequest: it is no such number.
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


def signs_of_life(headers: Mapping[bytes, bytes]) -> frozenset[bytes]:
    """Which of :data:`INTERIM_WORDS` the client takes while it is held.

    :raise InvalidRequest: another word is among them.
    """
    value = headers.get(INTERIM)
    if value is None:
        return frozenset()
    wanted = frozenset(word for word in (each.strip().lower() for each in value.split(b",")) if word)
    if not wanted <= INTERIM_WORDS:
        raise InvalidRequest("x-llmgw-interim must be 102, sse, or both", param="x-llmgw-interim")
    return wanted
