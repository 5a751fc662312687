"""Runs one router on one workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from msgspec import Struct

from llmgw.core.breaker import BreakerRules
from llmgw.simulation.clock import Clock
from llmgw.simulation.exchange import Record
from llmgw.simulation.gateway import Gateway
from llmgw.simulation.node import NodeSpec
from llmgw.simulation.site import Site
from llmgw.simulation.workload import Job, Workload


class Settings(Struct, frozen=True):
    """How the gateways are set.

    :param gateways: each with its own fleet, router and no knowledge of the others.
    :param cap: requests of one gateway in flight at one node: ``"slots"`` as the
        gateway does by itself, ``"none"``, or a number.
    :param overcommit: added to the cap of ``"slots"``.
    :param max_wait_s: the bounded wait; 0 refuses at once.
    :param max_waiting: how many may wait, ``None`` for twice the capacity.
    :param slot_choice: the router's choice of slot is sent as ``id_slot``.
    :param first_token_s: an attempt without a first token fails after so long; looked
        at with the health checks.
    :param patience_s: a client leaves without its first token after so long; 0 is never.
    :param retries: attempts after the first one.
    :param wire_s: one way between gateway and server.
    :param health_every_s: between two health checks of one node.
    :param seed: of everything that is not in the workload.
    """

    gateways: int = 1
    cap: str | int = "slots"
    overcommit: int = 0
    max_wait_s: float = 0.0
    max_waiting: int | None = None
    slot_choice: bool = False
    first_token_s: float = 960.0
    patience_s: float = 0.0
    retries: int = 2
    wire_s: float = 0.00025
    health_every_s: float = 5.0
    breaker: BreakerRules = BreakerRules()
    seed: int = 1


class Result(Struct):
    """What a run gave.

    :param records: one for each job, in order of their ends.
    :param ended_s: simulated time of the last end.
    :param nodes: ids of all nodes.
    :param faults: how often the router raised.
    :param fault: the first time's words.
    """

    workload: str
    records: list[Record]
    ended_s: float
    nodes: tuple[str, ...]
    faults: int = 0
    fault: str = ""


class World:
    """Everything of one run, for faults to act on.

    :ivar absent: nodes that gateways do not know at first.
    :ivar weights: what gateways take nodes' weights for, where it is not the truth.
    """

    def __init__(
        self,
        workload: Workload,
        fleet: Sequence[NodeSpec],
        make_router: Callable[[int], Any],
        settings: Settings,
    ) -> None:
        self.clock = clock = Clock()
        self.dice = dice = Random(settings.seed)
        self.settings = settings
        self.records: list[Record] = []
        self.left = workload.size
        self.fleet = tuple(fleet)
        self.absent: set[str] = set()
        self.weights: dict[str, float] = {}
        self.site = Site(clock, fleet, settings.wire_s, Random(dice.random()))
        self.gateways = [
            Gateway(
                self.site,
                make_router(settings.seed + number),
                settings,
                Random(dice.random()),
                self._over,
            )
            for number in range(settings.gateways)
        ]
        for job in workload.jobs:
            clock.at(job.at_s, self._arrive, job)

    def meet(self, node_id: str) -> None:
        """Let all gateways have ``node_id`` from now on, with health checks."""
        every_s = self.settings.health_every_s
        for gateway in self.gateways:
            gateway.join(self.site.places[node_id].node, self.weights.get(node_id))
            self.clock.at(self.clock.now_s + every_s * self.dice.random(), self._look, gateway, node_id)

    def run(self, progress: Callable[[int], object] | None = None) -> None:
        """Run until every job has ended.

        :param progress: called with the number of ended jobs, now and then.
        """
        for node in self.fleet:
            if node.id not in self.absent:
                self.meet(node.id)
        step = self.clock.step
        told = self.left
        while self.left > 0 and step():
            if progress is not None and told - self.left >= 100:
                told = self.left
                progress(len(self.records))

    def _arrive(self, job: Job) -> None:
        gateways = self.gateways
        one = gateways[0] if len(gateways) == 1 else gateways[int(self.dice.random() * len(gateways))]
        one.request(job)

    def _over(self, job: Job, record: Record) -> None:
        self.records.append(record)
        self.left -= 1
        if job.follow is not None:
            self.clock.at(self.clock.now_s + job.think_s, self._arrive, job.follow)

    def _look(self, gateway: Gateway, node_id: str) -> None:
        gateway.look(node_id)
        self.clock.at(self.clock.now_s + self.settings.health_every_s, self._look, gateway, node_id)


def simulate(
    workload: Workload,
    fleet: Sequence[NodeSpec],
    make_router: Callable[[int], Any],
    settings: Settings | None = None,
    *,
    faults: Sequence[Callable[[World], object]] = (),
    progress: Callable[[int], object] | None = None,
) -> Result:
    """Run ``workload`` through gateways with such a router.

    :param make_router: builds one gateway's router; its argument is a seed.
    :param faults: each is called with the world before it begins, and books what it does.
    :param progress: called with the number of ended jobs, now and then.
    """
    world = World(workload, fleet, make_router, settings or Settings())
    for fault in faults:
        fault(world)
    world.run(progress)
    return Result(
        workload.name,
        world.records,
        world.clock.now_s,
        tuple(node.id for node in fleet),
        sum(gateway.faults for gateway in world.gateways),
        next((gateway.fault for gateway in world.gateways if gateway.fault), ""),
    )
