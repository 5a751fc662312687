"""Generators: seeded, and as loaded as they say."""

from itertools import pairwise

import msgspec
import pytest

from llmgw.simulation.fleets import article_fleet, mixed_fleet
from llmgw.simulation.prompt import common, length
from llmgw.simulation.workload import Workload, article, bursts, chain, chat, mixed

MAKERS = (article, mixed, chat, bursts)


def jobs_of(workload: Workload):
    return [job for first in workload.jobs for job in chain(first)]


@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_gives_the_same_jobs_and_another_gives_others(make):
    fleet = article_fleet()
    one, same, other = (make(seed, fleet, 0.5, 50) for seed in (1, 1, 2))
    assert msgspec.to_builtins(one) == msgspec.to_builtins(same)
    assert msgspec.to_builtins(one) != msgspec.to_builtins(other)


@pytest.mark.parametrize("make", MAKERS)
def test_jobs_are_as_many_as_asked_for_and_consistent(make):
    workload = make(3, article_fleet(), 0.5, 200)
    jobs = jobs_of(workload)
    assert len(jobs) == workload.size == 200
    assert len({job.id for job in jobs}) == 200
    for job in jobs:
        assert length(job.pieces) == job.prompt_tokens
        assert len(job.prefix) == job.prompt_tokens // 128
        assert job.guess >= 1
    assert [job.at_s for job in workload.jobs] == sorted(job.at_s for job in workload.jobs)


def test_load_is_a_share_of_what_the_fleet_can_carry():
    fleet = mixed_fleet()
    slow, fast = mixed(1, fleet, 0.2, 2000), mixed(1, fleet, 0.8, 2000)
    assert slow.jobs[-1].at_s / fast.jobs[-1].at_s == pytest.approx(4.0)
    workload = article(1, fleet, 0.5, 4000)
    capacity = sum(node.requests_per_s(200, 170) for node in fleet)
    assert 4000 / workload.jobs[-1].at_s == pytest.approx(0.5 * capacity, rel=0.06)


def test_bursts_come_in_clumps():
    def variation(workload):
        times = [job.at_s for job in workload.jobs]
        gaps = [after - before for before, after in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2

    fleet = article_fleet()
    assert variation(mixed(1, fleet, 0.5, 3000)) == pytest.approx(1.0, rel=0.25)
    assert variation(bursts(1, fleet, 0.5, 3000)) == pytest.approx(1 / 0.3, rel=0.3)


def test_a_turn_begins_with_all_that_was_said_before():
    workload = chat(1, article_fleet(), 0.5, 300)
    turns = 0
    for first in workload.jobs:
        for job in chain(first):
            if job.follow is not None:
                turns += 1
                assert job.follow.session == job.session
                assert common(job.pieces, job.follow.pieces) == job.prompt_tokens
                assert job.follow.pieces[len(job.pieces)] == (job.answer, job.output_tokens)
                assert job.follow.prefix[: len(job.prefix)] == job.prefix
    assert turns > 150
