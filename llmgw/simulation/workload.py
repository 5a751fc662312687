"""What callers ask for, and when.

A workload is a list of first jobs with their arrival times. A job of a
conversation names the next one, which arrives ``think_s`` after its answer; so
slow service delays the conversation, as people do.

Rates are given as load: the share of what the fleet can carry for ever with
nothing cached. All dice are seeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count as counter
from math import exp, log
from random import Random

from msgspec import Struct

from llmgw.simulation.node import NodeSpec
from llmgw.simulation.prompt import BLOCK_TOKENS, Pieces, block_hashes, length

GUESS_NOISE = 0.1
"""Relative error (one sigma) of the gateway's estimate of a prompt's tokens."""


class Job(Struct):
    """One request to come.

    :param at_s: arrival, for first jobs.
    :param answer: id of the piece that its answer is.
    :param guess: what the gateway takes the prompt's tokens for.
    :param follow: the conversation's next job.
    :param think_s: from this job's end to the arrival of ``follow``.
    """

    id: str
    at_s: float
    pieces: Pieces
    prompt_tokens: int
    output_tokens: int
    answer: int
    guess: int
    prefix: tuple[int, ...]
    session: str | None = None
    max_tokens: int | None = None
    follow: Job | None = None
    think_s: float = 0.0


class Workload(Struct):
    """:param jobs: first jobs, by arrival.
    :param size: jobs in all, those that follow included.
    """

    name: str
    jobs: list[Job]
    size: int


class Maker:
    """Makes jobs with ids and pieces that no other has.

    :param block_tokens: as the gateway would cut prompts for ``Request.prefix``.
    """

    def __init__(self, seed: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.dice = Random(seed)
        self.block_tokens = block_tokens
        self._ids = counter(1)
        self._pieces = counter(1_000_000)

    def piece(self) -> int:
        """An id for text that nobody else has."""
        return next(self._pieces)

    def job(
        self,
        at_s: float,
        pieces: Pieces,
        output_tokens: int,
        *,
        session: str | None = None,
        max_tokens: int | None = None,
    ) -> Job:
        """A job around ``pieces``."""
        tokens = max(1, length(pieces))
        noise = 1.0 + GUESS_NOISE * self.dice.gauss(0.0, 1.0)
        return Job(
            id=f"r{next(self._ids)}",
            at_s=at_s,
            pieces=pieces,
            prompt_tokens=tokens,
            output_tokens=max(1, output_tokens),
            answer=self.piece(),
            guess=max(1, round(tokens * max(0.3, noise))),
            prefix=block_hashes(pieces, self.block_tokens),
            session=session,
            max_tokens=max_tokens,
        )

    def lognormal(self, mean: float, sigma: float, least: int, most: int) -> int:
        """A whole number with about that mean; ``sigma`` is that of its logarithm."""
        value = exp(log(mean) - sigma * sigma / 2 + sigma * self.dice.gauss(0.0, 1.0))
        return min(most, max(least, round(value)))


def rate_for(fleet: Sequence[NodeSpec], load: float, prompt_tokens: float, output_tokens: float) -> float:
    """Requests per second that are ``load`` of the fleet's capacity for such requests."""
    return load * sum(node.requests_per_s(prompt_tokens, output_tokens) for node in fleet)


def arrivals(dice: Random, rate: float, number: int, shape: float = 1.0) -> list[float]:
    """Arrival times with gamma gaps: ``shape`` 1 is Poisson, less comes in bursts."""
    at_s = 0.0
    times = []
    for _ in range(number):
        at_s += dice.gammavariate(shape, 1.0 / (shape * rate))
        times.append(at_s)
    return times


def article(seed: int, fleet: Sequence[NodeSpec], load: float = 0.03, count: int = 2000) -> Workload:
    """The article's setting: ``count`` short prompts of one length, Poisson arrivals."""
    maker = Maker(seed)
    rate = rate_for(fleet, load, 200, 170)
    jobs = [
        maker.job(at_s, ((maker.piece(), 200),), maker.lognormal(170, 0.6, 8, 1000))
        for at_s in arrivals(maker.dice, rate, count)
    ]
    return Workload("article", jobs, count)


def mixed(
    seed: int, fleet: Sequence[NodeSpec], load: float = 0.7, count: int = 3000, shape: float = 1.0
) -> Workload:
    """Chats, questions on long documents, and short classifications, all unrelated."""
    maker = Maker(seed)
    dice = maker.dice
    sizes = []
    for _ in range(count):
        kind = dice.random()
        if kind < 0.6:
            sizes.append((maker.lognormal(350, 0.8, 20, 4000), maker.lognormal(180, 0.7, 4, 1500)))
        elif kind < 0.75:
            sizes.append((maker.lognormal(4000, 0.6, 500, 12_000), maker.lognormal(120, 0.6, 4, 800)))
        else:
            sizes.append((maker.lognormal(200, 0.5, 20, 1000), maker.lognormal(8, 0.5, 1, 40)))
    mean_prompt = sum(prompt for prompt, _ in sizes) / count
    mean_output = sum(output for _, output in sizes) / count
    rate = rate_for(fleet, load, mean_prompt, mean_output)
    times = arrivals(dice, rate, count, shape)
    jobs = [
        maker.job(at_s, ((maker.piece(), prompt),), output)
        for at_s, (prompt, output) in zip(times, sizes, strict=True)
    ]
    return Workload("mixed" if shape == 1.0 else "bursts", jobs, count)


def bursts(seed: int, fleet: Sequence[NodeSpec], load: float = 0.6, count: int = 3000) -> Workload:
    """The mixed requests, arriving in clumps (gamma gaps of shape 0.3)."""
    return mixed(seed, fleet, load, count, shape=0.3)


def chat(
    seed: int,
    fleet: Sequence[NodeSpec],
    load: float = 0.6,
    count: int = 3000,
    systems: int = 8,
    think_s: float = 7.0,
) -> Workload:
    """Conversations of several turns, each turn's prompt holding all before it.

    Half of the prompt tokens are taken to be cached when ``load`` is turned into
    a rate, which is what a router without affinity about gets.

    :param systems: different system prompts, of 300 to 1,500 tokens.
    :param think_s: mean time between an answer and the next question.
    """
    maker = Maker(seed)
    dice = maker.dice
    heads = [(maker.piece(), dice.randint(300, 1500)) for _ in range(systems)]
    firsts: list[Job] = []
    made = prompt_sum = output_sum = 0
    while made < count:
        session = f"s{len(firsts) + 1}"
        turns = min(count - made, 1 + min(14, int(dice.expovariate(1 / 5.0))))
        pieces: Pieces = (dice.choice(heads),)
        last: Job | None = None
        for _ in range(turns):
            pieces = (*pieces, (maker.piece(), maker.lognormal(90, 0.9, 5, 2000)))
            job = maker.job(0.0, pieces, maker.lognormal(170, 0.7, 4, 1200), session=session)
            pieces = (*pieces, (job.answer, job.output_tokens))
            made += 1
            prompt_sum += job.prompt_tokens
            output_sum += job.output_tokens
            if last is None:
                firsts.append(job)
            else:
                last.follow = job
                last.think_s = dice.expovariate(1 / think_s)
            last = job
    rate = rate_for(fleet, load, 0.5 * prompt_sum / count, output_sum / count)
    for job, at_s in zip(firsts, arrivals(dice, rate * len(firsts) / count, len(firsts)), strict=True):
        job.at_s = at_s
    return Workload("chat", firsts, count)


def chain(job: Job) -> Iterable[Job]:
    """``job`` and all that follow it."""
    at: Job | None = job
    while at is not None:
        yield at
        at = at.follow
