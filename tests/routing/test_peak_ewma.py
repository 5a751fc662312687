"""Peak EWMA: believes bad news at once, good news slowly."""

from __future__ import annotations

import pytest
from candidates import backend, pick, picks

from llmgw import builtins
from llmgw.errors import ConfigError
from llmgw.routing.peak_ewma import PeakEwma
from llmgw.routing.turns import MOST_REMEMBERED
from llmgw.testing import router_contract
from llmgw.values import Finished, HealthChanged, HealthReport, Started

TestPeakEwma = router_contract(builtins.peak_ewma)


def ended(name: str, at_s: float, duration_s: float, ok: bool = True, reason: str = "done") -> Finished:
    return Finished("r", name, at_s, ok, reason, duration_s)


def test_the_faster_one_is_chosen_until_it_has_more_to_do() -> None:
    router = PeakEwma()
    router.observe(ended("fast", 0.0, 1.0))
    router.observe(ended("slow", 0.0, 3.0))
    assert pick(router, [backend("fast", in_flight=1), backend("slow", in_flight=1)]) == "fast"
    assert pick(router, [backend("fast", in_flight=6), backend("slow", in_flight=1)]) == "slow"


def test_bad_news_counts_at_once_and_good_news_slowly() -> None:
    router = PeakEwma(tau_s=10.0)
    router.observe(ended("a", 0.0, 1.0))
    router.observe(ended("b", 0.0, 2.0))
    both = [backend("a", in_flight=1), backend("b", in_flight=1)]
    router.observe(ended("a", 1.0, 5.0))
    assert pick(router, both, 1.0) == "b"
    router.observe(ended("a", 1.5, 0.5))
    assert pick(router, both, 1.5) == "b"
    router.observe(ended("a", 40.0, 0.5))
    assert pick(router, both, 40.0) == "a"


def test_one_that_fails_fast_does_not_look_fast() -> None:
    router = PeakEwma()
    router.observe(ended("good", 0.0, 1.0))
    router.observe(ended("bad", 0.0, 1.0))
    router.observe(ended("bad", 0.1, 0.001, ok=False, reason="status_500"))
    assert pick(router, [backend("bad", in_flight=1), backend("good", in_flight=1)]) == "good"


def test_failures_are_not_doubled_without_end() -> None:
    router = PeakEwma()
    for _ in range(2000):
        router.observe(ended("bad", 0.0, 0.0, ok=False, reason="reset"))
    choice = router.choose(None, [backend("bad", in_flight=1)], 0.0)  # type: ignore[arg-type]
    assert choice.score <= 200.0


def test_an_idle_one_is_forgiven_and_asked_again() -> None:
    router = PeakEwma(tau_s=10.0)
    router.observe(ended("was-slow", 0.0, 60.0))
    router.observe(ended("steady", 0.0, 1.0))
    both = [backend("was-slow"), backend("steady", in_flight=40)]
    assert pick(router, both, 0.0) == "steady"
    assert pick(router, both, 60.0) == "was-slow"


def test_clients_who_leave_say_nothing() -> None:
    router = PeakEwma()
    router.observe(ended("a", 0.0, 1.0))
    router.observe(ended("b", 0.0, 2.0))
    router.observe(ended("a", 0.0, 900.0, reason="client_gone"))
    router.observe(Started("r", "a", 0.0))
    router.observe(HealthChanged("a", 0.0, HealthReport(True)))
    assert pick(router, [backend("a"), backend("b")]) == "a"


def test_unmeasured_ones_take_turns_and_cold_ones_come_last() -> None:
    router = PeakEwma()
    assert picks(router, [backend("a"), backend("b")], 10) == {"a": 5, "b": 5}
    assert pick(router, [backend("cold", warmth=0.0), backend("warm", in_flight=9)]) == "warm"
    assert pick(router, [backend("cold", warmth=0.0)]) == "cold"


def test_memory_is_bounded() -> None:
    router = PeakEwma()
    for number in range(3 * MOST_REMEMBERED):
        router.observe(ended(f"b{number}", 0.0, 1.0))
    assert len(router._means) <= MOST_REMEMBERED + 1


@pytest.mark.parametrize("options", [{"tau_s": 0}, {"default_ms": -1}, {"unknown": 1}])
def test_wrong_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        builtins.peak_ewma.build(options)
    assert [fault.where for fault in caught.value.faults] == list(options)
