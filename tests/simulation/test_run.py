"""Whole runs: the gateway's behaviour around a router, and the figures of the study."""

import subprocess
import sys

import msgspec
import pytest

from llmgw.routing.adaptive import Adaptive
from llmgw.routing.least_connections import LeastConnections
from llmgw.routing.round_robin import RoundRobin
from llmgw.routing.weighted_least_connections import WeightedLeastConnections
from llmgw.simulation.fleets import article_fleet, mixed_fleet
from llmgw.simulation.node import NodeSpec
from llmgw.simulation.report import summary
from llmgw.simulation.run import Settings, simulate
from llmgw.simulation.workload import Job, Workload, article, chat, mixed
from llmgw.values import Choice, Finished, FirstToken, HealthChanged, Started

FREE = Settings(cap="none")
NODE = NodeSpec("n", slots=2, prefill_rate=1000.0, step_s=0.01)


def job(number: int, at_s: float, output: int = 10, prompt: int = 100, **more) -> Job:
    return Job(
        id=f"r{number}",
        at_s=at_s,
        pieces=((number, prompt),),
        prompt_tokens=prompt,
        output_tokens=output,
        answer=-number,
        guess=prompt,
        prefix=(),
        **more,
    )


def load(*jobs: Job) -> Workload:
    return Workload("some", list(jobs), len(jobs))


def mean_ms(result) -> float:
    return summary(result)["ttft_s"]["mean"] * 1000.0


class Scripted:
    """A router that does what a function says and keeps what it is told."""

    def __init__(self, choose):
        self.events = []
        self._choose = choose

    def choose(self, request, candidates, now_s):
        return self._choose(request, candidates, now_s)

    def observe(self, event):
        self.events.append(event)


# --- what the study found (routing.md, section 1) ---


@pytest.mark.parametrize(
    ("share", "least_ms", "most_ms", "formula_ms"),
    [(0.02, 135, 160, 39.2), (0.03, 140, 200, 40.6), (0.05, 200, 800, 42.7)],
)
def test_the_articles_setting_at_the_loads_where_its_figures_hold(share, least_ms, most_ms, formula_ms):
    fleet = article_fleet()
    workload = article(1, fleet, share)
    robin = mean_ms(simulate(workload, fleet, lambda _: RoundRobin(), FREE))
    formula = mean_ms(simulate(workload, fleet, lambda _: Adaptive(), FREE))
    assert least_ms < robin < most_ms
    assert formula == pytest.approx(formula_ms, rel=0.15)


def test_round_robin_is_unstable_from_eight_per_cent():
    fleet = article_fleet()
    short, long = (
        mean_ms(simulate(article(1, fleet, 0.08, count), fleet, lambda _: RoundRobin(), FREE))
        for count in (1000, 4000)
    )
    assert short > 1000.0
    assert long > 1.5 * short  # the longer it runs, the worse it gets


def test_the_feedback_term_loses_to_plain_weights_under_load():
    fleet = mixed_fleet()
    workload = mixed(1, fleet, 0.85, 2000)
    plain = mean_ms(simulate(workload, fleet, lambda _: WeightedLeastConnections(), FREE))
    assert plain < mean_ms(simulate(workload, fleet, lambda _: Adaptive(), FREE))


# --- runs ---


def test_the_same_arguments_give_the_same_run():
    fleet = mixed_fleet()
    settings = Settings(gateways=3, max_wait_s=5.0)
    one, other = (
        simulate(chat(4, fleet, 0.8, 300), fleet, lambda _: LeastConnections(), settings) for _ in range(2)
    )
    assert msgspec.to_builtins(one) == msgspec.to_builtins(other)


def test_every_job_ends_exactly_once():
    fleet = mixed_fleet()
    result = simulate(chat(4, fleet, 0.8, 400), fleet, lambda _: LeastConnections())
    assert len({record.id for record in result.records}) == len(result.records) == 400


def test_progress_is_told_now_and_then():
    seen = []
    fleet = article_fleet()
    simulate(article(1, fleet, 0.05, 350), fleet, lambda _: LeastConnections(), progress=seen.append)
    assert seen == [100, 200, 300]


def test_an_idle_node_shows_its_idle_time():
    (record,) = simulate(load(job(1, 5.0)), [NODE], lambda _: LeastConnections()).records
    assert record.ttft_s == pytest.approx(NODE.idle_ttft_s(100) + 2 * Settings().wire_s)
    assert record.e2e_s == pytest.approx(record.ttft_s + 9 * 0.01)
    assert (record.asked, record.outcome, record.output_tokens) == (("n",), "done", 10)


def test_a_conversation_goes_on_after_its_answer():
    second = job(2, 0.0)
    first = job(1, 1.0, follow=second, think_s=7.0)
    result = simulate(Workload("chat", [first], 2), [NODE], lambda _: LeastConnections())
    one, two = result.records
    assert two.arrived_s == pytest.approx(1.0 + one.e2e_s + 7.0)


# --- the gateway ---


def test_at_the_cap_a_request_is_refused_at_once():
    jobs = [job(number, 1.0 + number / 1000, output=500) for number in range(1, 4)]
    result = simulate(load(*jobs), [NODE], lambda _: LeastConnections())
    assert [record.outcome for record in result.records] == ["overloaded", "done", "done"]
    refused = result.records[0]
    assert (refused.asked, refused.ttft_s, refused.e2e_s) == ((), None, 0.0)


@pytest.mark.parametrize(
    "settings", [Settings(cap="none"), Settings(cap=3), Settings(overcommit=1)], ids=["none", "3", "+1"]
)
def test_above_the_slots_they_wait_in_the_server(settings):
    jobs = [job(number, 1.0 + number / 1000, output=500) for number in range(1, 4)]
    result = simulate(load(*jobs), [NODE], lambda _: LeastConnections(), settings)
    assert [record.outcome for record in result.records] == ["done"] * 3
    assert max(record.ttft_s for record in result.records) > 4.0


def test_a_bounded_wait_gets_the_first_slot_that_frees():
    jobs = [job(1, 1.0, output=500), job(2, 1.001, output=100), job(3, 1.002), job(4, 1.003)]
    result = simulate(load(*jobs), [NODE], lambda _: LeastConnections(), Settings(max_wait_s=60.0))
    by_id = {record.id: record for record in result.records}
    assert [record.outcome for record in result.records] == ["done"] * 4
    assert 0.5 < by_id["r3"].waited_s < 2.0
    assert by_id["r3"].ttft_s > by_id["r3"].waited_s
    assert by_id["r4"].waited_s > by_id["r3"].waited_s


def test_a_bounded_wait_is_bounded_in_time_and_number():
    jobs = [job(number, 1.0 + number / 1000, output=1000) for number in range(1, 6)]
    settings = Settings(max_wait_s=2.0, max_waiting=2)
    result = simulate(load(*jobs), [NODE], lambda _: LeastConnections(), settings)
    refused = [record for record in result.records if record.outcome == "overloaded"]
    assert [record.e2e_s for record in refused] == pytest.approx([0.0, 2.0, 2.0])


def test_the_router_orders_the_wait():
    class ShortestFirst(LeastConnections):
        def order(self, waiting, backend, now_s):
            assert [each.id for each in waiting] == sorted(each.id for each in waiting)
            assert backend.id == "n"
            return min(range(len(waiting)), key=lambda index: waiting[index].prompt_tokens)

    node = NodeSpec("n", slots=1, prefill_rate=1000.0, step_s=0.01)
    jobs = [job(1, 1.0, output=100), job(2, 1.1, prompt=900), job(3, 1.2, prompt=90), job(4, 1.3, prompt=400)]
    result = simulate(
        load(*jobs), [node], lambda _: ShortestFirst(), Settings(max_wait_s=60.0, max_waiting=9)
    )
    assert [record.id for record in result.records] == ["r1", "r3", "r4", "r2"]


def test_none_from_the_router_waits_if_waiting_is_allowed():
    def until_three(request, candidates, now_s):
        return candidates[0] if now_s >= 3.0 else None

    jobs = [job(1, 1.0), job(2, 2.0)]
    refused = simulate(load(*jobs), [NODE], lambda _: Scripted(until_three))
    assert {record.outcome for record in refused.records} == {"overloaded"}
    waited = simulate(load(*jobs), [NODE], lambda _: Scripted(until_three), Settings(max_wait_s=30.0))
    assert {record.outcome for record in waited.records} == {"done"}


def test_events_come_as_the_contract_says():
    router = Scripted(lambda request, candidates, now_s: candidates[0])
    simulate(load(job(1, 1.0)), [NODE], lambda _: router)
    health, *rest = [event for event in router.events if event.at_s == 0.0 or event.at_s >= 1.0]
    assert isinstance(health, HealthChanged)
    assert health.report.slots == 2
    started, first, finished = [event for event in rest if not isinstance(event, HealthChanged)]
    assert (type(started), type(first), type(finished)) == (Started, FirstToken, Finished)
    assert first.ttft_s == pytest.approx(0.1105)
    assert (finished.prompt_tokens, finished.cached_tokens, finished.output_tokens) == (100, 0, 10)
    assert finished.prompt_s == pytest.approx(0.110)


def test_the_profile_is_the_gateways_own():
    seen = []

    def look(request, candidates, now_s):
        profile = candidates[0].profile
        seen.append((profile.in_flight, profile.prefill_rate, profile.token_rate, candidates[0].slots))
        return candidates[0]

    simulate(load(job(1, 1.0), job(2, 5.0)), [NODE], lambda _: Scripted(look))
    assert seen[0] == (0, None, None, 2)
    assert seen[1] == pytest.approx((0, 100 / 0.110, 100.0, 2))


def test_a_choice_of_slot_reaches_the_server_only_where_it_is_allowed():
    def second(request, candidates, now_s):
        return Choice(candidates[0], slot=1)

    jobs = [job(1, 1.0, output=100), job(2, 1.1)]
    free = simulate(load(*jobs), [NODE], lambda _: Scripted(second), FREE)
    pinned = simulate(load(*jobs), [NODE], lambda _: Scripted(second), Settings(cap="none", slot_choice=True))
    assert [record.id for record in free.records] == ["r2", "r1"]
    assert [record.id for record in pinned.records] == ["r1", "r2"]


def test_a_router_that_raises_costs_nothing_but_its_advice():
    def broken(request, candidates, now_s):
        raise RuntimeError("no idea")

    router = Scripted(broken)
    router.observe = lambda event: 1 / 0
    result = simulate(load(job(1, 1.0)), [NODE], lambda _: router)
    assert result.records[0].outcome == "done"
    assert result.faults >= 4
    assert result.fault == "observe: ZeroDivisionError: division by zero"


def test_an_order_that_raises_or_points_nowhere_is_the_oldest_first():
    class Wrong(LeastConnections):
        def order(self, waiting, backend, now_s):
            return 99

    node = msgspec.structs.replace(NODE, slots=1)
    jobs = [job(number, 1.0 + number / 1000) for number in range(4)]
    settings = Settings(max_wait_s=60.0, max_waiting=9)
    result = simulate(load(*jobs), [node], lambda _: Wrong(), settings)
    assert [record.id for record in result.records] == ["r0", "r1", "r2", "r3"]
    assert result.fault == "order: IndexError: list index out of range"


def test_a_router_that_does_not_observe_is_not_told():
    router = Scripted(lambda request, candidates, now_s: candidates[0])
    router.observes = False
    simulate(load(job(1, 1.0)), [NODE], lambda _: router)
    assert router.events == []


def test_one_that_declines_does_not_hold_up_the_others():
    def only_short(request, candidates, now_s):
        return candidates[0] if request.prompt_tokens < 500 or now_s > 8.0 else None

    jobs = [job(1, 1.0, output=100), job(2, 1.1, output=300), job(3, 1.2, prompt=900), job(4, 1.3)]
    settings = Settings(max_wait_s=60.0, max_waiting=9)
    result = simulate(load(*jobs), [NODE], lambda _: Scripted(only_short), settings)
    assert [record.id for record in result.records] == ["r1", "r4", "r2", "r3"]


def test_a_prompt_beyond_a_nodes_window_goes_to_another():
    small = msgspec.structs.replace(NODE, id="small", context_length=50)
    result = simulate(load(*(job(n, n * 1.0) for n in range(1, 6))), [small, NODE], lambda _: RoundRobin())
    assert {record.node for record in result.records} == {"n"}


def test_a_client_without_patience_leaves_and_its_slot_is_free():
    jobs = [job(1, 1.0, prompt=50_000), job(2, 1.1, output=5)]
    node = msgspec.structs.replace(NODE, slots=1)
    result = simulate(load(*jobs), [node], lambda _: LeastConnections(), Settings(cap="none", patience_s=5.0))
    outcomes = {record.id: (record.outcome, record.e2e_s) for record in result.records}
    assert outcomes["r1"] == ("client_gone", pytest.approx(5.0))
    assert outcomes["r2"][0] == "client_gone" or outcomes["r2"][1] > 4.9


def test_a_silent_attempt_times_out():
    settings = Settings(cap="none", first_token_s=10.0)
    (record,) = simulate(
        load(job(1, 1.0, prompt=50_000)), [NODE], lambda _: LeastConnections(), settings
    ).records
    assert record.outcome == "timeout"
    assert 10.0 <= record.e2e_s <= 15.1


def test_several_gateways_know_only_their_own_requests():
    seen = set()

    def look(request, candidates, now_s):
        seen.add(candidates[0].profile.in_flight)
        return candidates[0]

    jobs = [job(number, 1.0 + number / 1000, output=1000) for number in range(16)]
    settings = Settings(cap="none", gateways=8)
    simulate(load(*jobs), [msgspec.structs.replace(NODE, slots=16)], lambda _: Scripted(look), settings)
    assert 0 in seen
    assert max(seen) < 8


def test_twisted_is_not_needed():
    modules = ("run", "report", "faults", "trace", "fleets", "workload", "plot")
    code = "import sys; " + "; ".join(f"import llmgw.simulation.{name}" for name in modules)
    subprocess.run([sys.executable, "-c", f"{code}; assert 'twisted' not in sys.modules"], check=True)
