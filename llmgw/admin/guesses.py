"""Wrong tokens at the admin listener: counted by who shows them, as wrong keys are on the public one.

Asked only after a token was refused, so the right one is never held up by what
others do from its address. What keeps guessers out is the token's length; 429 tells
a program that goes on with an old token to stop, and the log tells the operator.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from twisted.logger import Logger

from llmgw.errors import GatewayError, RateLimited

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.web.server import Request

    from llmgw.access.flood import FailureFlood

TELL_EVERY_S = 60.0


class Guesses:
    """
    :param flood: counts by network, in bounded memory.
    :param clock: monotonic seconds.
    """

    log = Logger()

    def __init__(self, flood: FailureFlood, clock: Callable[[], float]) -> None:
        self._flood = flood
        self._clock = clock
        self._told_s = -inf

    def refusal(self, request: Request, *, tried: bool) -> GatewayError:
        """What a caller is told who was not let in; call it once for each request.

        :param tried: something was shown that was never good. Only that counts.
        """
        now_s = self._clock()
        peer = str(getattr(request.getClientAddress(), "host", "unix"))
        wait_s = self._flood.failed(peer, now_s) if tried else 0.0
        if not wait_s:
            return GatewayError("a token is needed", status=401, code="unauthorized")
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            self.log.warn("admin listener: too many wrong tokens from {peer}", peer=peer)
        return RateLimited("too many wrong tokens from this address", retry_after_s=wait_s)
