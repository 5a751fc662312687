"""How a member of the fleet stands, in words that operators see too."""

from __future__ import annotations

import enum


class Standing(enum.Enum):
    """May a member be sent a request for a model?

    ``EJECTED`` is the passive kind of absence, an opinion that panic ignores;
    ``DOWN`` is the active kind.
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
