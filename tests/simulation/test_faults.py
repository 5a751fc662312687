"""Faults: what callers notice of them, and how faults are written."""

import pytest

from llmgw.errors import ConfigError
from llmgw.routing.least_connections import LeastConnections
from llmgw.routing.weighted_least_connections import WeightedLeastConnections
from llmgw.simulation.faults import FAULTS, parse_fault
from llmgw.simulation.fleets import article_fleet, mixed_fleet
from llmgw.simulation.report import share_of, summary
from llmgw.simulation.run import Settings, simulate
from llmgw.simulation.workload import mixed


def run(*lines, fleet=None, load=0.5, count=1500, router=WeightedLeastConnections, **settings):
    fleet = fleet or mixed_fleet()
    return simulate(
        mixed(2, fleet, load, count),
        fleet,
        lambda _: router(),
        Settings(cap="none", **settings),
        faults=[parse_fault(line) for line in lines],
    )


def test_a_restarted_node_loses_its_streams_and_comes_back():
    result = run("restart node=a100-1 at=20 down=3 load=5", count=3000)
    errors = summary(result)["errors"]
    assert set(errors) <= {"reset", "loading"}
    before, during, after = (
        share_of(result, "a100-1", *span) for span in ((5.0, 20.0), (22.0, 27.0), (75.0, 1e9))
    )
    assert before > 0.2
    assert during < 0.15
    assert after > 0.6 * before


def test_only_streams_that_had_begun_are_lost():
    result = run("restart node=a100-1 at=20")
    assert summary(result)["retries"] > 0
    for record in result.records:
        if record.outcome != "done":
            assert record.outcome == "reset"


def test_all_nodes_restart_in_turn():
    result = run("rolling-restart at=10 gap=15 down=1 load=4", count=2500)
    errors = summary(result)["errors"]
    assert 0 < sum(errors.values()) < 0.1 * 2500


def test_after_a_partition_all_goes_on():
    result = run("partition at=20 for=3")
    broken = [record for record in result.records if record.outcome != "done"]
    assert len(broken) < 100
    assert all(17.0 < record.arrived_s < 23.1 for record in broken)
    assert summary(result)["ttft_s"]["p99"] > 0.5


def test_a_node_that_fails_fast_is_taken_out():
    result = run("fail-fast node=a100-1 at=20 for=40 share=0.6")
    assert share_of(result, "a100-1", 25.0, 58.0) < 0.5 * share_of(result, "a100-1", 0.0, 20.0)
    assert set(summary(result)["errors"]) <= {"status_503"}
    assert summary(result)["retries"] > 0


@pytest.mark.parametrize("line", ["slow node=a100-1 at=20 for=10 factor=20", "hang node=a100-1 at=20 for=20"])
def test_slow_and_hung_nodes_cost_time_and_no_request(line):
    result, well = run(line), run()
    assert summary(result)["errors"] == {}
    assert summary(result)["ttft_s"]["p99"] > summary(well)["ttft_s"]["p99"]


def test_a_node_that_joins_is_not_asked_before():
    result = run("join node=a100-1 at=20")
    assert share_of(result, "a100-1", 0.0, 19.9) == 0.0
    assert share_of(result, "a100-1", 60.0, 1e9) > 0.1


@pytest.mark.parametrize(("line", "harm"), [("reversed-weights", 5.0), ("equal-weights", 1.2)])
def test_wrong_weights_harm_those_who_trust_them(line, harm):
    fleet = article_fleet()
    wrong = run(line, fleet=fleet)
    well = run(fleet=fleet)
    assert summary(wrong)["ttft_s"]["mean"] > harm * summary(well)["ttft_s"]["mean"]
    same = run(line, fleet=fleet, router=LeastConnections)
    assert summary(same) == summary(run(fleet=fleet, router=LeastConnections))


def test_faults_work_with_several_gateways():
    result = run("restart at=20", "slow node=worst at=5", gateways=4)
    assert len(result.records) == 1500


# --- how they are written ---


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_has_defaults(name):
    fault = parse_fault(name)
    assert fault.kind is FAULTS[name]
    assert fault.numbers == fault.kind.numbers


def test_values_are_read():
    fault = parse_fault("  slow  node=xeon at=1.5 factor=3 ")
    assert (fault.node, fault.numbers) == ("xeon", {"at": 1.5, "for": 10.0, "factor": 3.0})


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("", "no such fault; there are restart"),
        ("restrat", "no such fault"),
        ("restart at", "'at' is not a key with a value; keys are node, at, down, load"),
        ("restart for=3", "keys are"),
        ("restart node=", "keys are"),
        ("restart at=soon", "at must be a number"),
        ("restart at=-1", "at must be a number"),
        ("restart at=inf", "at must be a number"),
        ("fail-fast share=2", "share must be a number from 0 to 1"),
        ("slow factor=0", "factor must be above 0"),
        ("equal-weights node=a", "keys are none"),
    ],
)
def test_a_wrong_line_is_refused_with_what_is_wrong(line, what):
    with pytest.raises(ConfigError) as caught:
        parse_fault(line)
    assert what in str(caught.value)


def test_a_node_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no such node 'b200'; there are a100, 4090, xeon"):
        run("restart node=b200", fleet=article_fleet(), count=1)
