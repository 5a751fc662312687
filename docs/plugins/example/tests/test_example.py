"""Two lines prove the contract; the rest is about what is ours alone."""

import pytest
from llmgw_example.health import plain
from llmgw_example.router import sticky
from twisted.internet.task import Clock

from llmgw.errors import ConfigError
from llmgw.testing import candidate, health_source_contract, request, router_contract

TestRouter = router_contract(sticky, {"spill_share": 0.5})
TestHealth = health_source_contract(plain, {"interval_s": 2.0})


def fleet(**fields):
    return [candidate(f"gpu-{number}", max_connections=10, **fields) for number in range(5)]


def test_a_conversation_stays():
    router, candidates = sticky.build({}), fleet()
    first = router.choose(request(session="talk"), candidates, 0.0)
    again = router.choose(request(id="req-2", session="talk"), candidates[::-1], 9.0)
    assert first.backend is again.backend


def test_only_the_conversations_of_a_lost_backend_move():
    router, candidates = sticky.build({}), fleet()
    names = [f"talk-{number}" for number in range(200)]
    before = {name: router.choose(request(session=name), candidates, 0.0).backend.id for name in names}
    after = {name: router.choose(request(session=name), candidates[1:], 0.0).backend.id for name in names}
    assert all(before[name] == after[name] for name in names if before[name] != "gpu-0")
    assert set(before.values()) == {f"gpu-{number}" for number in range(5)}


def test_a_busy_backend_is_passed_over():
    router, candidates = sticky.build({}), fleet()
    home = router.choose(request(session="talk"), candidates, 0.0).backend
    home.profile.in_flight = 8
    choice = router.choose(request(session="talk"), candidates, 0.0)
    assert choice.backend is not home
    assert choice.why == "sticky"


def test_when_all_are_busy_it_stays_at_home():
    router = sticky.build({})
    home = router.choose(request(session="talk"), fleet(), 0.0).backend
    choice = router.choose(request(session="talk"), fleet(in_flight=9), 0.0)
    assert choice.backend.id == home.id
    assert choice.why == "sticky, all busy"


@pytest.mark.parametrize("spill_share", [0, 1.5, "much", True, None, float("nan")])
def test_a_wrong_share_is_refused_by_name(spill_share):
    with pytest.raises(ConfigError) as caught:
        sticky.build({"spill_share": spill_share})
    assert [fault.where for fault in caught.value.faults] == ["spill_share"]


@pytest.mark.parametrize("options", [{"path": "health"}, {"interval_s": 1.0}, {"interval_s": float("nan")}])
def test_wrong_health_options_are_refused_by_name(options):
    with pytest.raises(ConfigError) as caught:
        plain.build(options, Clock())
    assert [fault.where for fault in caught.value.faults] == list(options)
