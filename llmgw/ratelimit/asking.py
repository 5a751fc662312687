"""What the limiter ``redis`` has to say to the store: for the requests that wait, and for some ledgers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twisted.internet.defer import Deferred

    from llmgw.ratelimit.calls import Calls, Part
    from llmgw.ratelimit.ledger import Ledger
    from llmgw.values import Cost, Decision


class Waiting:
    """A request that waits for the store."""

    __slots__ = ("cost", "decided", "ledgers", "since_s")

    def __init__(
        self, ledgers: list[Ledger], cost: Cost, since_s: float, decided: Deferred[Decision]
    ) -> None:
        self.ledgers = ledgers
        self.cost = cost
        self.since_s = since_s
        self.decided = decided


def parts_of(ledgers: Iterable[Ledger], waiting: Sequence[Waiting], calls: Calls, now_s: float) -> list[Part]:
    """What to say for these ledgers, and for those who wait for them."""
    # Units, units of the first, whether it is too big; and requests for places.
    needs: dict[Any, tuple[float, float, bool]] = {}
    queues: dict[Any, int] = {}
    for one in waiting:
        for ledger in one.ledgers:
            for holding, amount in (
                (ledger.requests, one.cost.requests),
                (ledger.tokens, one.cost.tokens),
            ):
                if holding is not None:
                    whole = amount if amount <= holding.whole else holding.whole
                    units, head, big = needs.get(holding, (0.0, whole, amount > whole))
                    needs[holding] = (units + whole, head, big)
            if ledger.places is not None:
                queues[ledger.places] = queues.get(ledger.places, 0) + 1
    parts: list[Part] = []
    gateways, epoch, taking = calls.gateways, calls.epoch, not calls.alone
    for ledger in ledgers:
        for holding, name in ((ledger.requests, ledger.names[0]), (ledger.tokens, ledger.names[1])):
            if holding is not None and holding.asked is None:
                units, head, big = needs.get(holding, (0.0, 0.0, False))
                ask = holding.ask(now_s, gateways, epoch, waiting=units, head=head, big=big, taking=taking)
                if ask is not None:
                    parts.append((holding, ask, name))
        places = ledger.places
        if places is not None and places.asked is None:
            wish = places.ask(now_s, gateways, epoch, waiting=queues.get(places, 0), taking=taking)
            if wish is not None:
                parts.append((places, wish, ledger.names[2]))
    return parts
