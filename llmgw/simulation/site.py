"""The servers and the wires to them: what gateways share, and what faults act on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Any

from llmgw.simulation.clock import Clock
from llmgw.simulation.node import Node, NodeSpec, Work
from llmgw.values import HealthReport

CONNECT_S = 2.0
"""The gateway's time-out for a connection."""

RESEND_S = 1.0
"""When a lost SYN is sent again (RFC 6298, 2.1)."""


class Place:
    """A node and the state of the way to it.

    :ivar refuses_until_s: nobody listens there.
    :ivar loads_until_s: it answers that its model is loading.
    :ivar lost_until_s: nothing passes the wire in either direction.
    :ivar failing: share of requests that get ``failure`` at once.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.refuses_until_s = -inf
        self.loads_until_s = -inf
        self.lost_until_s = -inf
        self.failing = 0.0
        self.failure = "status_503"


class Site:
    """:param wire_s: one way between gateway and server.
    :param dice: for nodes that fail by chance.
    """

    def __init__(self, clock: Clock, specs: Sequence[NodeSpec], wire_s: float, dice: Random) -> None:
        self.clock = clock
        self.places = {spec.id: Place(Node(spec, clock)) for spec in specs}
        self._wire_s = wire_s
        self._dice = dice

    def send(self, node_id: str, work: Work) -> None:
        """A request leaves a gateway."""
        now_s, place = self.clock.now_s, self.places[node_id]
        if now_s < place.lost_until_s:
            if place.lost_until_s <= now_s + RESEND_S:
                self.clock.at(now_s + RESEND_S + self._wire_s, self._arrive, place, work)
            else:
                self.clock.at(now_s + CONNECT_S, work.failed, work, "connect")
        else:
            self.clock.at(now_s + self._wire_s, self._arrive, place, work)

    def back(self, node_id: str, call: Callable[..., object], *args: Any) -> None:
        """Something leaves a server for a gateway; a lost wire delays it."""
        now_s = self.clock.now_s
        at_s = max(now_s, self.places[node_id].lost_until_s) + self._wire_s
        self.clock.at(at_s, call, *args)

    def abandon(self, node_id: str, work: Work) -> None:
        """A gateway closes the connection of ``work``; a lost wire delays it."""
        place = self.places[node_id]
        at_s = max(self.clock.now_s, place.lost_until_s) + self._wire_s
        work.gone = True
        self.clock.at(at_s, place.node.cancel, work)

    def report(self, node_id: str) -> HealthReport:
        """What a health check finds now."""
        now_s, place = self.clock.now_s, self.places[node_id]
        node = place.node
        if now_s < place.lost_until_s or now_s < node.hung_until_s:
            return HealthReport(alive=False, detail="no answer")
        if now_s < place.refuses_until_s:
            return HealthReport(alive=False, refused=True, detail="connection refused")
        if now_s < place.loads_until_s:
            return HealthReport(alive=True, loading=True, detail="loading")
        return HealthReport(
            alive=True,
            slots=node.spec.slots,
            busy_slots=node.busy_slots,
            deferred=len(node.deferred),
            kind="llama-server",
        )

    def _arrive(self, place: Place, work: Work) -> None:
        now_s = self.clock.now_s
        if work.gone:
            return
        if now_s < place.refuses_until_s:
            work.failed(work, "refused")
        elif now_s < place.loads_until_s:
            work.failed(work, "loading")
        elif place.failing and self._dice.random() < place.failing:
            work.failed(work, place.failure)
        else:
            place.node.submit(work)
