"""``example-sticky``: a conversation stays with the backend that has its prompt in cache.

Rendezvous hashing: each (conversation, backend) pair has a fixed pseudo-random
mark, and the best mark wins. When a backend leaves, only its own conversations
move. A backend that is too busy is passed over for this once.

:source: Thaler, Ravishankar: A Name-Based Mapping Scheme for Rendezvous (1996).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from zope.interface import implementer

from llmgw.errors import ConfigError, ConfigFault
from llmgw.interfaces import IRouter, IRouterFactory
from llmgw.values import Backend, Choice, Event, Request


@implementer(IRouter)
class StickyRouter:
    """One conversation, one backend, as long as it has room.

    :param spill_share: share of a backend's cap from which on it is passed over, 0 to 1.
    """

    def __init__(self, spill_share: float) -> None:
        self._spill_share = spill_share

    def choose(self, request: Request, candidates: Sequence[Backend], now_s: float) -> Choice:
        """The best mark among those that have room; of all, if none has."""
        name = request.session or request.key or request.id
        roomy = [b for b in candidates if b.profile.in_flight < self._spill_share * b.max_connections]
        backend = max(roomy or candidates, key=lambda b: (_mark(name, b.id), b.id))
        return Choice(backend, score=_mark(name, backend.id), why="sticky" if roomy else "sticky, all busy")

    def observe(self, event: Event) -> None:
        """Nothing to learn: the choice follows from names and live counts."""


def _mark(name: str, backend_id: str) -> float:
    digest = blake2b(f"{name}\0{backend_id}".encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2**48


@implementer(IRouterFactory)
class StickyRouterFactory:
    """What the dropin holds an instance of."""

    name = "example-sticky"
    description = "keeps a conversation on one backend while that has room"
    contract = 1  # the number, not llmgw.interfaces.CONTRACT: it says what this code was written for

    def build(self, options: Mapping[str, Any]) -> StickyRouter:
        """Check every option; collect the faults, so that the operator sees all at once."""
        faults = [ConfigFault(key, "unknown option") for key in options if key != "spill_share"]
        spill_share = options.get("spill_share", 0.8)
        if isinstance(spill_share, bool) or not isinstance(spill_share, (int, float)):
            faults.append(ConfigFault("spill_share", f"not a number: {spill_share!r}"))
        elif not 0 < spill_share <= 1:
            faults.append(ConfigFault("spill_share", f"not above 0 and up to 1: {spill_share}"))
        if faults:
            raise ConfigError(faults)
        return StickyRouter(spill_share)


sticky = StickyRouterFactory()
