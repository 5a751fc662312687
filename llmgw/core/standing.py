"""The standings of a member of the fleet, in words that operators see, too."""

from __future__ import annotations

import enum


class Standing(enum.Enum):
    """Whether a member may be sent a request for a model.

    ``EJECTED`` is by passive checks (requests, timeouts of health checks), an opinion that panic
    ignores; ``DOWN`` is by refused health checks, a fact.
    """

    READY = "ready"
    EJECTED = "ejected"
    BUSY = "busy"
    LOADING = "loading"
    DOWN = "down"


class Down(enum.Enum):
    """Why health checks took a member out."""

    REFUSED = "refused"
    TIMEOUT = "timeout"
