"""One request on its way through a simulated gateway, and what is kept of it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from llmgw.values import Request

if TYPE_CHECKING:
    from llmgw.core.lease import Lease
    from llmgw.simulation.node import Work
    from llmgw.simulation.workload import Job

MODEL = "model"
"""The one name that all nodes serve."""


class Record(Struct):
    """What became of one job.

    :param ttft_s: from arrival at the gateway to the first token, waits and retries included.
    :param e2e_s: from arrival to the end, whatever it was.
    :param asked: nodes in the order they were asked.
    :param outcome: ``done``, the reason of the last attempt's failure, or the code
        of the gateway's own refusal.
    """

    id: str
    arrived_s: float
    ttft_s: float | None
    e2e_s: float
    asked: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outcome: str
    waited_s: float = 0.0

    @property
    def node(self) -> str:
        """Who was asked last, ``""`` if nobody was."""
        return self.asked[-1] if self.asked else ""


class Exchange:
    """One job under way."""

    __slots__ = (
        "arrived_s",
        "asked",
        "budgeted",
        "ended",
        "first_s",
        "job",
        "lease",
        "request",
        "sent_s",
        "waited_s",
        "work",
    )

    def __init__(self, job: Job, now_s: float) -> None:
        self.job = job
        self.arrived_s = now_s
        self.asked: tuple[str, ...] = ()
        self.budgeted = False
        self.ended = False
        self.first_s: float | None = None
        self.lease: Lease | None = None
        self.sent_s = 0.0
        self.request = Request(
            id=job.id,
            model=MODEL,
            prompt_tokens=job.guess,
            max_tokens=job.max_tokens,
            prefix=job.prefix,
            session=job.session,
            streaming=True,
        )
        self.waited_s = 0.0
        self.work: Work | None = None
