"""Charges streams that exceed their reservation while they run, not only at their end.

A request reserves tokens for its prompt and for the output it may have, or a guess where
it sets no limit. Once a second every stream beyond its reservation is charged
:data:`STEP` tokens more, or several times that, so that a long stream counts against its
limits before it ends. No stream is cut for it, and it costs nothing per chunk: the meter
has counted the tokens anyway.

:source: ``docs/rate-limits.md``.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from llmgw.errors import PLUGIN_FAULTS
from llmgw.wire.sweep import NEVER

if TYPE_CHECKING:
    from llmgw.gateway.account import Account
    from llmgw.gateway.gateway import Gateway

STEP = 256
EVERY_S = 1.0


class TopUps:
    """The running requests that a token limit applies to.

    :ivar deadline_s: when they are looked at next, for the sweep.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.deadline_s = NEVER
        self._gateway = gateway
        self._reserved: dict[Account, int] = {}

    def __len__(self) -> int:
        return len(self._reserved)

    def watch(self, account: Account, reserved: int) -> None:
        """Top the request up from now until its account is closed.

        :param reserved: tokens charged so far.
        """
        self._reserved[account] = reserved
        if self.deadline_s == NEVER:
            gateway = self._gateway
            self.deadline_s = gateway.clock() + EVERY_S
            gateway.sweep.add(self)

    def expired(self, now_s: float) -> None:
        """From the sweep: look at all of them, and drop those that have ended."""
        gateway = self._gateway
        top_up = getattr(gateway.limiter, "top_up", None)
        for account, reserved in list(self._reserved.items()):
            if account.charged is None:
                del self._reserved[account]
                continue
            used = account.used()
            if used is None or used.total <= reserved or top_up is None:
                continue
            more = STEP * ceil((used.total - reserved) / STEP)
            self._reserved[account] = reserved + more
            try:
                answer = top_up(account.charged, more)
            except PLUGIN_FAULTS:
                gateway.limiter_fault()
            else:
                if answer is not None:
                    gateway.limiter_will("top_up", answer)
        self.deadline_s = now_s + EVERY_S if self._reserved else NEVER
