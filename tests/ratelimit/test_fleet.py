"""Fleets of gateways on a model of the store: what is admitted in any window, whatever happens.

Each row of the table in ``docs/rate-limits.md`` stands here, with its bound. All
dice are seeded; a run of ten seconds takes a fraction of one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from fleet import Fleet, excess, left, poisson
from twisted.internet.defer import Deferred

from llmgw.values import Cost, Decision, Policy, Usage

RATE, BURST = 100.0, 100.0
Loads = Sequence[float | Callable[[random.Random], list[float]]]


def run(
    loads: Loads,
    until_s: float,
    *,
    rate_per_s: float = RATE,
    burst: float = BURST,
    seed: int = 1,
    on_loss: str = "local",
    prepare: Callable[[Fleet], None] | None = None,
) -> Fleet:
    """As many gateways as loads (requests a second each, or arrivals); all of them have ended."""
    policy = Policy("p", requests_per_minute=rate_per_s * 60, burst_s=burst / rate_per_s)
    fleet = Fleet(len(loads), policy, seed=seed, on_loss=on_loss)
    if prepare is not None:
        prepare(fleet)
    dice = random.Random(seed)
    arrivals = [load(dice) if callable(load) else poisson(load, until_s, dice) for load in loads]
    fleet.run(arrivals, until_s)
    fleet.end()
    return fleet


def held_in_advance(burst: float, gateways: int) -> float:
    """What all gateways together may hold beside what is in the bucket."""
    return max(0.1 * burst, gateways)


def over(fleet: Fleet, rate_per_s: float = RATE, burst: float = BURST) -> float:
    """Admitted beyond ``burst + rate x window``, in the worst window."""
    return excess(fleet.admitted, rate_per_s) - burst


def utilisation(fleet: Fleet, seconds: float, rate_per_s: float = RATE, burst: float = BURST) -> float:
    """Of what could have been admitted."""
    return len(fleet.admitted) / min(fleet.offered, burst + rate_per_s * seconds)


def burst_at(second: float, before: float, then: float) -> Callable[[random.Random], list[float]]:
    """A steady load, and a much heavier one from ``second`` on, for a second."""
    return lambda dice: poisson(before, second, dice) + poisson(then, second + 1.0, dice, second)


@pytest.mark.parametrize("gateways", [2, 4, 16])
@pytest.mark.parametrize(("load", "seconds"), [(80.0, 4.0), (300.0, 4.0), (1000.0, 2.5)])
def test_without_a_fault(gateways: int, load: float, seconds: float) -> None:
    fleet = run([load / gateways] * gateways, seconds)
    assert over(fleet) <= held_in_advance(BURST, gateways)
    assert utilisation(fleet, seconds) >= 0.95
    if load > RATE:
        least, most = min(fleet.by_gateway), max(fleet.by_gateway)
        assert most <= 3.5 * least  # nobody is starved, by luck or by a slower way to the store


def test_skewed_load() -> None:
    fleet = run([240, 40, 15, 5], 6.0)
    assert over(fleet) <= held_in_advance(BURST, 4)
    assert utilisation(fleet, 6.0) >= 0.95


@pytest.mark.parametrize(("gateways", "burst"), [(4, 100.0), (16, 200.0)])
def test_a_burst_upon_a_steady_load(gateways: int, burst: float) -> None:
    fleet = run([burst_at(3.0, 80 / gateways, 5000 / gateways)] * gateways, 4.0, burst=burst)
    assert over(fleet, burst=burst) <= held_in_advance(burst, gateways)


def test_a_burst_upon_silence() -> None:
    fleet = run([burst_at(1.0, 0.0, 1250.0)] * 4, 2.0)
    assert over(fleet) <= held_in_advance(BURST, 4)
    assert len(fleet.admitted) >= 0.95 * (BURST + RATE * 1.0)


def test_small_limits_are_exact() -> None:
    fleet = run([2.0] * 4, 15.0, rate_per_s=1.0, burst=10.0)
    assert over(fleet, 1.0, 10.0) <= 0.01  # the store's clock and ours differ by the way there
    assert utilisation(fleet, 15.0, 1.0, 10.0) >= 0.95
    assert sum(limiter.waited for limiter in fleet.limiters) >= len(fleet.admitted)


def test_a_flood_costs_the_store_nothing() -> None:
    fleet = run([2000.0], 2.0, rate_per_s=1.0, burst=10.0)
    assert fleet.offered > 3500
    assert fleet.model.calls <= 30
    assert fleet.limiters[0].from_memory >= 0.99 * fleet.refused


def test_a_steady_load_is_answered_from_what_is_held() -> None:
    fleet = run([500.0, 500.0], 4.0, rate_per_s=2000.0, burst=20_000.0)
    assert len(fleet.admitted) == fleet.offered
    assert sum(limiter.waited for limiter in fleet.limiters) <= 0.05 * fleet.offered
    assert fleet.model.calls <= 2 * 25 * 4


def away(begin_s: float, end_s: float) -> Callable[[Fleet], None]:
    def prepare(fleet: Fleet) -> None:
        fleet.at(begin_s, lambda: fleet.go(False))
        fleet.at(end_s, lambda: fleet.go(True))

    return prepare


@pytest.mark.parametrize("loads", [[75.0] * 4, [240, 40, 15, 5]], ids=["even", "skewed"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_store_is_away(loads: Loads, seed: int) -> None:
    fleet = run(loads, 9.0, seed=seed, prepare=away(3.0, 6.0))
    assert over(fleet) <= held_in_advance(BURST, 4) + 0.1 * BURST
    assert utilisation(fleet, 9.0) >= 0.8
    assert not any(limiter.degraded for limiter in fleet.limiters)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_store_is_flushed_and_then_away(seed: int) -> None:
    def prepare(fleet: Fleet) -> None:
        fleet.at(2.5, fleet.model.flush)
        away(2.7, 5.0)(fleet)

    fleet = run([75.0] * 4, 8.0, seed=seed, prepare=prepare)
    assert over(fleet) <= BURST  # promised
    assert over(fleet) <= 2 * held_in_advance(BURST, 4) + 0.1 * BURST


def test_the_store_is_away_just_after_the_begin() -> None:
    fleet = run([75.0] * 4, 5.0, prepare=away(0.3, 3.0))
    assert over(fleet) <= held_in_advance(BURST, 4) + 0.1 * BURST


@pytest.mark.parametrize("rtt_s", [0.06, 0.09, 0.15, 0.3])
def test_the_store_is_slow_from_the_begin(rtt_s: float) -> None:
    """Some answers come in time and some do not; or none ever does."""

    def prepare(fleet: Fleet) -> None:
        for store in fleet.stores:
            store.rtt_s = rtt_s

    fleet = run([75.0] * 4, 6.0, prepare=prepare)
    assert sum(limiter.late for limiter in fleet.limiters) > 0
    assert over(fleet) <= held_in_advance(BURST, 4) + 0.1 * BURST


def test_the_store_is_away_and_the_limit_is_closed() -> None:
    fleet = run([75.0] * 4, 9.0, on_loss="closed", prepare=away(3.0, 6.0))
    during = [at for at in fleet.admitted if 3.0 < at < 6.0]
    assert len(during) <= held_in_advance(BURST, 4)
    assert over(fleet) <= held_in_advance(BURST, 4)


def test_the_store_is_away_and_the_limit_is_open() -> None:
    fleet = run([75.0] * 4, 9.0, on_loss="open", prepare=away(3.0, 6.0))
    during = [at for at in fleet.admitted if 3.01 < at < 5.99]
    assert len(during) == pytest.approx(300 * 2.98, rel=0.1)
    after = [at for at in fleet.admitted if at > 7.0]
    assert excess(after, RATE) <= BURST  # it is not held against anybody afterwards


def test_the_store_stands_still() -> None:
    def prepare(fleet: Fleet) -> None:
        fleet.at(3.0, lambda: [setattr(store, "stopped", True) for store in fleet.stores])
        # What lay before it is done late, and nobody hears of it.
        fleet.at(6.0, lambda: [store.resume() for store in fleet.stores])

    fleet = run([75.0] * 4, 9.0, prepare=prepare)
    assert over(fleet) <= held_in_advance(BURST, 4) + 0.1 * BURST
    assert utilisation(fleet, 9.0) >= 0.85


@pytest.mark.parametrize("seed", [1, 2])
def test_the_store_is_flushed_again_and_again(seed: int) -> None:
    def prepare(fleet: Fleet) -> None:
        for second in (2.0, 3.5, 5.0):
            fleet.at(second, fleet.model.flush)

    fleet = run([75.0] * 4, 6.5, seed=seed, prepare=prepare)
    assert over(fleet) <= BURST  # promised; and in fact the gateways remember
    assert over(fleet) <= 2 * held_in_advance(BURST, 4)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_failover_loses_the_last_moments(seed: int) -> None:
    lag_s = 0.05

    def prepare(fleet: Fleet) -> None:
        def snapshot() -> None:
            replica = fleet.model.copy()
            replica.server = "run-2"

            def promote() -> None:
                fleet.model = replica
                for store in fleet.stores:
                    store.model = replica
                fleet.go(True)

            fleet.at_soon(lag_s, lambda: fleet.go(False))
            fleet.at_soon(lag_s + 1.0, promote)

        fleet.at(3.02, snapshot)

    fleet = run([burst_at(3.0, 20.0, 1250.0)] * 4, 6.0, seed=seed, prepare=prepare)
    lost = sum(3.02 <= at <= 3.02 + lag_s for at in fleet.admitted)
    assert over(fleet) <= held_in_advance(BURST, 4) + 0.1 * BURST + min(BURST, lost)


def test_a_gateway_dies() -> None:
    fleet = run([75.0] * 4, 8.0, prepare=lambda fleet: fleet.at(3.0, lambda: fleet.kill(0)))
    assert over(fleet) <= held_in_advance(BURST, 4)
    assert utilisation(fleet, 8.0) >= 0.95


def test_a_restart_that_loses_everything_during_a_burst() -> None:
    def prepare(fleet: Fleet) -> None:
        def restart() -> None:
            fleet.model.flush()
            fleet.model.server = "run-2"
            fleet.go(True)

        fleet.at(3.2, lambda: fleet.go(False))
        fleet.at(4.2, restart)

    fleet = run([burst_at(3.0, 20.0, 1250.0)] * 4, 6.0, prepare=prepare)
    assert over(fleet) <= held_in_advance(BURST, 4) + 0.1 * BURST + BURST


def test_sixteen_keys_have_sixteen_limits() -> None:
    fleet = Fleet(2, Policy("p", requests_per_minute=600, burst_s=1.0))
    admitted = fleet.run_keys([40.0 if key < 4 else 20.0 for key in range(16)], 8.0)
    fleet.end()
    for times in admitted:
        assert excess(times, 10.0) <= 10.0 + held_in_advance(10.0, 2)
        assert len(times) >= 0.95 * (10.0 + 10.0 * 8.0)


# --- tokens, and requests under way ---------------------------------------------------


class Streams:
    """Requests that take a while: they reserve, run, and tell what they used."""

    def __init__(self, count: int, policy: Policy, seed: int, reserve: tuple[int, int], use: tuple[int, int]):
        self.fleet = Fleet(count, policy, seed=seed)
        self.dice = random.Random(seed)
        self.reserve, self.use = reserve, use
        self.running = self.most = 0
        self.charged: list[tuple[float, int]] = []
        self.done = 0
        fleet = self.fleet
        fleet.request = self._request  # type: ignore[method-assign]

    def run(self, rate_per_s: float, seconds: float) -> None:
        count = len(self.fleet.limiters)
        self.fleet.run([poisson(rate_per_s / count, seconds, self.dice) for _ in range(count)], seconds + 4.0)

    def _request(self, number: int) -> None:
        limiter = self.fleet.limiters[number]
        reserve = self.dice.randint(*self.reserve)

        def begin(decision: Decision) -> None:
            if not decision.allowed:
                return
            self.running += 1
            self.most = max(self.most, self.running)
            self.fleet.at_soon(self.dice.uniform(0.1, 0.6), lambda: end(decision))

        def end(decision: Decision) -> None:
            self.running -= 1
            self.done += 1
            if number in self.fleet.stopped:
                return
            used = self.dice.randint(*self.use)
            self.charged.append((self.fleet.now_s, used))
            limiter.settle(decision.reservation, Usage(0, 0, used))

        answer = limiter.admit("key", [self.fleet.policy], Cost(1, reserve))
        if isinstance(answer, Deferred):
            answer.addCallback(begin).addErrback(left)
        else:
            begin(answer)


@pytest.mark.parametrize(
    ("reserve", "use"),
    [((100, 100), (100, 100)), ((500, 1500), (20, 200)), ((50, 100), (100, 300))],
    ids=["exact", "reserved too much", "reserved too little"],
)
def test_tokens_are_counted_by_what_was_used(reserve: tuple[int, int], use: tuple[int, int]) -> None:
    rate, burst = 2000.0, 20_000.0
    streams = Streams(3, Policy("t", tokens_per_minute=rate * 60, burst_s=10.0), 1, reserve, use)
    streams.run(80.0, 10.0)
    times = [at for at, _ in streams.charged]
    spent = [float(used) for _, used in streams.charged]
    most = excess(times, rate, spent)
    # Beyond the burst: what is held in advance, and what those under way exceed their reserve by.
    beyond = max(0, use[1] - reserve[0]) * streams.most
    assert most <= burst + held_in_advance(burst, 3) + beyond + use[1]
    offered = 80.0 * 10.0 * sum(use) / 2
    assert sum(spent) >= 0.8 * min(offered, burst + rate * 10.0)
    # Everything is settled, and what was held is back.
    assert all(ledger.tokens.held == 0 for one in streams.fleet.limiters for ledger in one._ledgers.values())
    streams.fleet.end()


@pytest.mark.parametrize(("limit", "gateways"), [(4, 3), (40, 3), (100, 8)])
def test_requests_under_way_are_never_more_than_the_limit(limit: int, gateways: int) -> None:
    streams = Streams(gateways, Policy("c", concurrent=limit), 1, (0, 0), (0, 0))
    streams.run(limit / 0.35 * 2, 6.0)
    assert streams.most <= limit
    # A request takes 0.35 s on the average: twice as many come as have room.
    assert streams.done >= 0.8 * limit / 0.35 * 6.0
    assert streams.running == 0
    assert not any(streams.fleet.model.places.values())
    streams.fleet.end()


def test_places_of_a_dead_gateway_come_back() -> None:
    streams = Streams(2, Policy("c", concurrent=10), 1, (0, 0), (0, 0))
    streams.fleet.at(2.0, lambda: streams.fleet.kill(0))
    streams.run(60.0, 12.0)
    assert streams.most <= 10
    others = [held for held, _ in next(iter(streams.fleet.model.places.values()), {}).values()]
    assert sum(others) <= 10
    streams.fleet.end()


def test_places_are_told_again_to_a_store_that_forgot() -> None:
    streams = Streams(3, Policy("c", concurrent=30), 1, (0, 0), (0, 0))
    streams.fleet.at(2.0, streams.fleet.model.flush)
    streams.run(200.0, 4.0)
    assert streams.most <= 30 + 10  # who asks before the others have told may get what is theirs
    streams.fleet.end()
