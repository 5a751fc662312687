"""One gateway's share of a concurrency limit that it has in common with others.

The shared store keeps the number of places that each gateway has; together they do not
exceed the limit. A gateway states its whole number with each call, and each call renews
it for a while: calling twice does no harm, and the places of a gateway that died expire.
"""

from __future__ import annotations

from math import ceil, inf

from msgspec import Struct

from llmgw.core.bucket_share import HEADROOM, PERIOD_S, SHARE

RENEW_S = 1.0
"""Time between two calls that only renew; well below the 5 s after which the script lets places expire."""

PAUSE_S = 0.05
"""How long a refusal is believed: places may be given back at any time."""


class ConcurrencyAsk(Struct, frozen=True, array_like=True, tag=1):
    """What a call says about one gateway's places; the script reads the fields in this order.

    :param running: running requests; their places are ours whatever the limit is.
    :param want: places wanted, including those.
    """

    limit: int
    running: int
    want: int


class ConcurrencyShare:
    """One gateway's part of one concurrency limit.

    :ivar running: requests running here.
    :ivar held: places that the store has given us; while above ``running``, a request may start at once.
    :ivar started: requests that asked since the last call; whoever decides adds to it.
    """

    __slots__ = ("asked", "epoch", "full_until_s", "held", "limit", "renewed_s", "running", "started")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self.held = 0
        self.started = 0
        self.asked: ConcurrencyAsk | None = None
        self.epoch: str | None = None
        self.full_until_s = -inf
        self.renewed_s = -inf

    def resize(self, limit: int) -> None:
        """Change the limit; places beyond it may no longer be used."""
        self.limit = limit
        self.held = min(self.held, limit)

    def alone(self, gateways: int) -> int:
        """How many requests may run while the store is away: what we hold, or an even share of the limit."""
        return max(1, self.held, self.limit // max(1, gateways))

    def ask(
        self, now_s: float, gateways: int, epoch: str | None, *, waiting: int = 0, taking: bool = True
    ) -> ConcurrencyAsk | None:
        """What to say in a call that goes out now; ``None`` if there is nothing to say.

        :param waiting: waiting requests; each may need a place.
        """
        spare = 0
        if taking and gateways and self.started:
            spare = min(int(SHARE * self.limit / gateways), ceil(HEADROOM * self.started))
        want = self.running + waiting + spare
        ours = self.held > 0 or self.running > 0
        extend = ours and (self.epoch != epoch or now_s - self.renewed_s >= RENEW_S - PERIOD_S / 2.0)
        enough = want == self.held or (want > self.held and not waiting and now_s < self.full_until_s)
        if enough and not extend:
            return None
        self.started = 0
        # What is given back is no longer ours from here on, whatever becomes of the call.
        self.held = min(self.held, want)
        self.asked = ConcurrencyAsk(self.limit, self.running, want)
        return self.asked

    def answered(self, now_s: float, held: int, epoch: str) -> None:
        """The answer to the last :meth:`ask`."""
        ask = self.asked
        assert ask is not None
        self.asked = None
        self.held = held
        self.epoch = epoch
        self.renewed_s = now_s
        if held < ask.want:
            self.full_until_s = now_s + PAUSE_S

    def failed(self) -> None:
        """There will be no answer."""
        self.asked = None

    def at_rest(self) -> bool:
        """No request is running, and the store holds nothing for us."""
        return self.running == 0 and self.held == 0 and self.asked is None
