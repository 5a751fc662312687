"""How slowly a request body may arrive.

There is a minimum rate, from :data:`GRACE_S` on, and a time for the whole body, which is
longer for a body that needs longer at the minimum rate.
"""

from __future__ import annotations

GRACE_S = 5.0
"""For this long a body may arrive slower than the minimum rate."""


def is_too_slow(received: int, declared: int | None, elapsed_s: float, body_s: float, rate: float) -> bool:
    """Whether to give a body up.

    :param received: bytes so far.
    :param declared: ``Content-Length``, if there is one.
    :param elapsed_s: since the body was waited for; not before the grace time is over.
    :param body_s: seconds for a body of any size.
    :param rate: minimum rate in bytes per second, above 0.
    """
    allowed_s = max(body_s, max(received, declared or 0) / rate)
    return elapsed_s >= allowed_s or received < rate * elapsed_s
