"""What one gateway holds of a limit on requests under way that it shares with others.

The shared store keeps how many places each gateway has; all of them together
are no more than the limit. A gateway tells its whole number with each call, and
each call extends it for a while: telling it twice does no harm, and the places
of a gateway that died come back by themselves.
"""

from __future__ import annotations

from math import ceil, inf

from msgspec import Struct

from llmgw.core.holding import HEADROOM, PERIOD_S, SHARE

RENEW_S = 1.0
"""Between two calls that only extend; must stay well below the script's lifetime of 5 s."""

PAUSE_S = 0.05
"""How long a refusal is believed: places come back at any time."""


class PlacesAsk(Struct, frozen=True, array_like=True, tag=1):
    """What a call says of one gateway's places; the script reads the fields in this order.

    :param running: requests under way; these places are ours whatever the limit says.
    :param want: places wished for, those included.
    """

    limit: int
    running: int
    want: int


class Places:
    """One gateway's part of one concurrency limit.

    :ivar running: requests under way here.
    :ivar held: places that the store has for us; while more than ``running``, one may start at once.
    :ivar started: requests that asked since the last call; whoever decides adds to it.
    """

    __slots__ = ("asked", "epoch", "full_until_s", "held", "limit", "renewed_s", "running", "started")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self.held = 0
        self.started = 0
        self.asked: PlacesAsk | None = None
        self.epoch: str | None = None
        self.full_until_s = -inf
        self.renewed_s = -inf

    def resize(self, limit: int) -> None:
        """Go on with another limit; what is beyond it is no more ours to use."""
        self.limit = limit
        self.held = min(self.held, limit)

    def alone(self, gateways: int) -> int:
        """How many may run while the store is away: what we have, or else our even part."""
        return max(1, self.held, self.limit // max(1, gateways))

    def ask(
        self, now_s: float, gateways: int, epoch: str | None, *, waiting: int = 0, taking: bool = True
    ) -> PlacesAsk | None:
        """What to say in a call that goes out now; ``None``: nothing, don't call.

        :param waiting: requests that wait; each may need a place.
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
        # What is given back is no more ours from here on, whatever becomes of the call.
        self.held = min(self.held, want)
        self.asked = PlacesAsk(self.limit, self.running, want)
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
        """Nobody is under way, and the store has nothing for us."""
        return self.running == 0 and self.held == 0 and self.asked is None
