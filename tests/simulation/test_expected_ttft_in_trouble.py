"""The default router in trouble: what faults cost, and how soon they are forgotten."""

from __future__ import annotations

import pytest

from llmgw.routing.expected_ttft import ExpectedTtft
from llmgw.simulation.faults import parse_fault
from llmgw.simulation.fleets import article_fleet, mixed_fleet
from llmgw.simulation.report import share_of, summary
from llmgw.simulation.run import Result, Settings, simulate
from llmgw.simulation.workload import chat, mixed


def run(
    *faults: str,
    load: float = 0.5,
    count: int = 1500,
    seed: int = 5,
    gateways: int = 1,
    health_every_s: float = 5.0,
) -> Result:
    fleet = mixed_fleet()
    return simulate(
        mixed(seed, fleet, load, count),
        fleet,
        lambda number: ExpectedTtft(seed=number),
        Settings(cap="none", seed=seed, gateways=gateways, health_every_s=health_every_s),
        faults=[parse_fault(each) for each in faults],
    )


def mean_s(result: Result) -> float:
    return float(summary(result)["ttft_s"]["mean"])


def test_a_restarted_node_is_back_at_half_its_share_within_ten_seconds() -> None:
    for seed in (5, 6):
        result = run("restart node=a100-1 at=20 down=3 load=5", count=1500, seed=seed)
        before, after = share_of(result, "a100-1", 5.0, 20.0), share_of(result, "a100-1", 38.0, 60.0)
        assert after >= before / 2


def test_a_restarted_node_is_back_as_soon_where_nobody_sends_health_reports() -> None:
    for seed in (5, 6, 7):
        result = run("restart node=a100-1 at=20 down=3 load=5", count=800, seed=seed, health_every_s=1e6)
        before, after = share_of(result, "a100-1", 5.0, 20.0), share_of(result, "a100-1", 33.0, 43.0)
        assert after >= before / 2


def test_a_failing_node_gets_little_and_callers_notice_nothing() -> None:
    result = run("fail-fast node=a100-1 at=15 for=40 share=0.6", load=0.6, count=2500)
    assert share_of(result, "a100-1", 15.0, 55.0) <= 0.03
    assert not summary(result)["errors"]


@pytest.mark.parametrize(("load", "most"), [(0.2, 0.03), (0.6, 0.04)])
def test_a_small_fleet_soon_knows_who_fails(load: float, most: float) -> None:
    """From the first request on, in a hundred of them, whichever node it is."""
    fleet = article_fleet()
    for node in fleet:
        shares = []
        for seed in range(1, 7):
            result = simulate(
                mixed(seed, fleet, load, 100),
                fleet,
                lambda number: ExpectedTtft(seed=number),
                Settings(cap="none", seed=seed),
                faults=[parse_fault(f"fail-fast node={node.id} at=0 for=3600 share=0.6")],
            )
            assert not summary(result)["errors"]
            shares.append(share_of(result, node.id, 0.0, 1e9))
        assert sum(shares) / len(shares) <= most


@pytest.mark.parametrize("share", [0.02, 0.05])
def test_requests_that_fail_now_and_then_at_all_nodes_cost_little(share: float) -> None:
    """None of them is ill, and without one or two the others could not do the work."""
    faults = [f"fail-fast node={node.id} at=0 for=3600 share={share}" for node in mixed_fleet()]
    costs = [
        mean_s(run(*faults, load=0.7, seed=each)) / mean_s(run(load=0.7, seed=each)) for each in (5, 6, 7)
    ]
    assert sum(costs) / len(costs) <= 1.5


@pytest.mark.parametrize("node", ["a100", "4090"])
def test_who_failed_is_back_soon_where_the_others_are_hard_pressed(node: str) -> None:
    fleet = article_fleet()
    result = simulate(
        mixed(2, fleet, 0.5, 1000),
        fleet,
        lambda number: ExpectedTtft(seed=number),
        Settings(cap="none", seed=2),
        faults=[parse_fault(f"fail-fast node={node} at=30 for=20 share=0.6")],
    )
    assert share_of(result, node, 80.0, 100.0) >= 0.5 * share_of(result, node, 0.0, 30.0)


def test_a_rolling_restart_costs_only_streams_that_had_begun() -> None:
    errors = summary(run("rolling-restart at=10 gap=8 down=1 load=3"))["errors"]
    assert set(errors) <= {"reset"}
    assert sum(errors.values()) < 40


def test_nothing_is_refused_once_a_partition_is_over() -> None:
    result = run("partition at=15 for=3")
    late = [record for record in result.records if record.arrived_s > 24.0]
    assert late
    assert all(record.outcome == "done" for record in late)


@pytest.mark.parametrize(
    "fault", ["slow node=4090-1 at=15 for=10 factor=20", "hang node=4090-1 at=15 for=10"]
)
def test_one_that_stalls_is_left_and_taken_back(fault: str) -> None:
    result = run(fault, load=0.7)
    before, during = share_of(result, "4090-1", 2.0, 15.0), share_of(result, "4090-1", 17.0, 25.0)
    assert during < 0.6 * before
    assert share_of(result, "4090-1", 30.0, 1e9) > 0.5 * before
    assert not summary(result)["errors"]


def test_a_newcomer_is_not_flooded() -> None:
    result = run("join node=a100-2 at=20", load=0.7)
    assert share_of(result, "a100-2", 30.0, 1e9) > 0.1
    node = next(node for node in mixed_fleet() if node.id == "a100-2")
    first = [record for record in result.records if record.node == node.id and record.arrived_s < 25.0]
    assert len(first) > 5  # long prompts among them, since it is idle
    waited = [(record.ttft_s or 0.0) - node.idle_ttft_s(record.prompt_tokens) for record in first]
    assert sum(waited) / len(waited) < 0.6


@pytest.mark.parametrize(("fault", "most"), [("equal-weights", 1.15), ("reversed-weights", 1.3)])
def test_wrong_weights_cost_little(fault: str, most: float) -> None:
    costs = [mean_s(run(fault, seed=seed)) / mean_s(run(seed=seed)) for seed in (5, 6)]
    assert sum(costs) / 2 <= most


@pytest.mark.parametrize(("gateways", "most"), [(2, 2.0), (4, 2.5), (8, 2.5)])
def test_several_gateways_do_not_run_to_the_same_node(gateways: int, most: float) -> None:
    fleet = mixed_fleet()

    def of(number: int) -> float:
        result = simulate(
            chat(3, fleet, 0.6, 800),
            fleet,
            lambda seed: ExpectedTtft(seed=seed),
            Settings(cap="none", slot_choice=True, seed=3, gateways=number),
        )
        return mean_s(result)

    assert of(gateways) <= most * of(1)
