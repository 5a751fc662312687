"""The contract of rate limiters, as tests under ``twisted.internet.task.Clock``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from llmgw.interfaces import IRateLimiter, IRateLimiterFactory
from llmgw.testing.shared import FactoryContract, class_name, contract
from llmgw.values import Cost, Decision, Policy, Usage

_ONE = Cost()
_UNITS = ("requests", "tokens", "concurrent")


class RateLimiterContract(FactoryContract):
    """What every limiter must keep within one process.

    Hooks for a limiter that has a store of its own:

    :meth:`start` brings a built limiter to work, :meth:`result` waits for a
    Deferred, :meth:`pass_time` lets seconds go by.
    """

    interface = IRateLimiterFactory
    product = IRateLimiter

    def start(self, limiter: Any, clock: Clock) -> None:
        """Called once after ``build``; does nothing here."""

    def result(self, answer: Decision | Deferred[Decision], clock: Clock) -> Decision:
        """The decision; a Deferred is given up to 100 ms of the clock, as the gateway does."""
        if isinstance(answer, Decision):
            return answer
        results: list[Any] = []
        answer.addBoth(results.append)
        for _ in range(20):
            if not results:
                clock.advance(0.005)
        assert results, "no decision within 100 ms"
        if isinstance(results[0], Failure):
            results[0].raiseException()
        assert isinstance(results[0], Decision), f"decided {results[0]!r}"
        return results[0]

    def pass_time(self, clock: Clock, seconds: float) -> None:
        """Let ``seconds`` go by."""
        clock.advance(seconds)

    def test_without_policies_everything_passes(self) -> None:
        """No limit configured."""
        with_none = self._gate()
        for _ in range(100):
            with_none.take(Cost(1, 1_000_000))

    def test_refusals_say_when_and_why(self) -> None:
        """``retry_after_s`` is above zero, and policy and unit name what ran out."""
        for policy, unit in (
            (Policy("r", requests_per_minute=2), "requests"),
            (Policy("t", tokens_per_minute=200), "tokens"),
            (Policy("c", concurrent=2), "concurrent"),
        ):
            gate = self._gate(policy)
            gate.take(Cost(1, 100))
            gate.take(Cost(1, 100))
            refused = gate.refuse(Cost(1, 100))
            assert refused.policy == policy.name, f"refused by {refused.policy!r}, not {policy.name!r}"
            assert refused.unit == unit, f"{refused.unit!r} ran out, not {unit!r}"

    def test_waiting_as_told_helps(self) -> None:
        """A client that obeys ``retry_after_s`` gets through."""
        for policy in (Policy("r", requests_per_minute=30), Policy("t", tokens_per_minute=3000)):
            gate = self._gate(policy)
            for _ in range(30):
                gate.done(gate.take(Cost(1, 100)), Usage(100))
            refused = gate.refuse(Cost(1, 100))
            self.pass_time(gate.clock, refused.retry_after_s + 0.001)
            gate.take(Cost(1, 100))

    def test_all_policies_are_charged_or_none(self) -> None:
        """A refusal by one policy costs nothing in the others."""
        gate = self._gate(
            Policy("requests", requests_per_minute=10),
            Policy("tokens", tokens_per_minute=1000),
            Policy("narrow", concurrent=1),
        )
        held = gate.take(Cost(1, 100))
        for _ in range(50):
            gate.refuse(Cost(1, 100))
        gate.done(held, Usage(100))
        for _ in range(9):
            gate.done(gate.take(Cost(1, 100)), Usage(100))

    def test_the_order_of_policies_does_not_matter(self) -> None:
        """The same, with the refusing policy first."""
        gate = self._gate(Policy("narrow", concurrent=1), Policy("requests", requests_per_minute=10))
        held = gate.take()
        for _ in range(50):
            gate.refuse()
        gate.done(held, Usage())
        for _ in range(9):
            gate.done(gate.take(), Usage())

    def test_settling_gives_one_place_back(self) -> None:
        """Concurrency is returned at ``settle``, one place for one reservation."""
        gate = self._gate(Policy("c", concurrent=2))
        first, second = gate.take(), gate.take()
        gate.refuse()
        gate.done(first, Usage(10, 0, 10))
        third = gate.take()
        gate.refuse()
        gate.done(second, None)
        gate.done(third, Usage())
        gate.take()
        gate.take()
        gate.refuse()

    def test_what_never_ran_costs_nothing(self) -> None:
        """``used=None`` returns requests, tokens and concurrency."""
        gate = self._gate(
            Policy("all", requests_per_minute=1, tokens_per_minute=100, concurrent=1),
        )
        for _ in range(20):
            gate.done(gate.take(Cost(1, 100)), None)
        gate.take(Cost(1, 100))

    def test_tokens_are_corrected_when_the_request_is_over(self) -> None:
        """An estimate too high is given back, one too low is charged after all."""
        gate = self._gate(Policy("t", tokens_per_minute=1000))
        gate.done(gate.take(Cost(1, 1000)), Usage(100, 0, 100))
        gate.done(gate.take(Cost(1, 800)), Usage(400, 0, 400))
        gate.refuse(Cost(1, 100))

        gate = self._gate(Policy("t", tokens_per_minute=1000))
        gate.done(gate.take(Cost(1, 100)), Usage(500, 0, 500))
        gate.refuse(Cost(1, 100))

    def test_a_stream_that_outgrows_its_estimate_pays_while_it_runs(self) -> None:
        """``top_up``, where there is one, is charged at once, and corrected with the rest."""
        gate = self._gate(Policy("t", tokens_per_minute=1000))
        top_up = getattr(gate.limiter, "top_up", None)
        if top_up is None:
            return
        taken = gate.take(Cost(1, 100))
        top_up(taken.reservation, 512)
        top_up(taken.reservation, 256)
        gate.refuse(Cost(1, 200))
        gate.done(taken, Usage(100, 0, 400))
        gate.done(gate.take(Cost(1, 500)), None)
        gate.refuse(Cost(1, 600))

    def test_each_key_has_its_own_and_global_is_shared(self) -> None:
        """Scope ``key`` counts per subject, scope ``global`` all together."""
        gate = self._gate(Policy("k", requests_per_minute=1))
        gate.take(subject="anna")
        gate.refuse(subject="anna")
        gate.take(subject="bert")

        gate = self._gate(Policy("g", scope="global", requests_per_minute=1))
        gate.take(subject="anna")
        gate.refuse(subject="bert")

    def test_policies_of_different_names_do_not_mix(self) -> None:
        """Two limits of one subject are two counts."""
        gate = self._gate()
        gate.take(policies=[Policy("a", requests_per_minute=1)])
        gate.take(policies=[Policy("b", requests_per_minute=1)])
        gate.refuse(policies=[Policy("a", requests_per_minute=1)])

    def test_a_policy_that_is_not_enforced_lets_pass(self) -> None:
        """``enforce = false`` only counts."""
        gate = self._gate(Policy("shadow", requests_per_minute=1, concurrent=1, enforce=False))
        for _ in range(10):
            gate.take()

    def test_a_cost_beyond_the_limit_is_an_answer_not_an_error(self) -> None:
        """One request may estimate more than a whole minute allows."""
        gate = self._gate(Policy("t", tokens_per_minute=10))
        decision = gate.ask(Cost(1, 1_000_000))
        if decision.allowed:  # into debt: the next one pays for it
            gate.done(decision, Usage(500_000, 0, 500_000))
            gate.refuse(Cost(1, 10))

    def test_cancelling_returns_what_was_taken(self) -> None:
        """Only for limiters whose ``admit`` returns a Deferred."""
        gate = self._gate(Policy("c", concurrent=1))
        answer = gate.limiter.admit("anna", gate.policies, Cost())
        if isinstance(answer, Decision):
            return
        answer.addErrback(lambda failure: None)
        answer.cancel()
        gate.take()

    def test_figures_for_a_scrape_are_figures(self) -> None:
        """``gauges`` is optional: a lawful name to a help text and a number."""
        limiter = self._gate().limiter
        for name, gauge in getattr(limiter, "gauges", dict)().items():
            assert re.fullmatch("[a-zA-Z_:][a-zA-Z0-9_:]*", name), f"{name!r} is no name of a metric"
            text, value = gauge
            assert isinstance(text, str), f"{name}: the help text is {text!r}"
            assert isinstance(value, (float, int)), f"{name} is {value!r}"

    def test_it_ends(self) -> None:
        """``stop`` is optional, and is waited for; not for long."""
        gate = self._gate()
        stopped = getattr(gate.limiter, "stop", lambda: None)()
        if isinstance(stopped, Deferred):
            results: list[Any] = []
            stopped.addBoth(results.append)
            for _ in range(20):
                gate.clock.advance(0.1)
            assert results, "stop did not end within 2 s"
            assert not isinstance(results[0], Failure), f"stop failed: {results[0]}"

    def _gate(self, *policies: Policy) -> _Gate:
        return _Gate(self, policies)


class _Gate:
    def __init__(self, owner: RateLimiterContract, policies: Sequence[Policy]) -> None:
        self.clock = Clock()
        self.clock.advance(1000.0)  # no clock begins at zero
        self.policies = policies
        self.limiter = owner.build(owner.options, self.clock)
        self._owner = owner
        owner.start(self.limiter, self.clock)

    def ask(
        self, cost: Cost = _ONE, subject: str = "anna", policies: Sequence[Policy] | None = None
    ) -> Decision:
        answer = self.limiter.admit(subject, self.policies if policies is None else policies, cost)
        decision = self._owner.result(answer, self.clock)
        if decision.allowed:
            assert decision.reservation is not None, "allowed without a reservation"
        else:
            names = [policy.name for policy in (self.policies if policies is None else policies)]
            assert decision.reservation is None, "refused with a reservation"
            assert decision.retry_after_s > 0, f"refused with retry_after_s {decision.retry_after_s}"
            assert decision.policy in names, f"refused by {decision.policy!r}, which is none of {names}"
            assert decision.unit in _UNITS, f"unit {decision.unit!r} is none of {_UNITS}"
        for state in (decision.requests, decision.tokens):
            if state is not None:
                assert state.remaining >= 0, f"remaining {state.remaining}"
                assert state.remaining <= state.limit, f"remaining {state.remaining} of {state.limit}"
                assert state.reset_s >= 0, f"reset in {state.reset_s} s"
        return decision

    def take(self, *args: Any, **kwargs: Any) -> Decision:
        decision = self.ask(*args, **kwargs)
        assert decision.allowed, f"refused by {decision.policy!r}: {decision.unit}"
        return decision

    def refuse(self, *args: Any, **kwargs: Any) -> Decision:
        decision = self.ask(*args, **kwargs)
        assert not decision.allowed, "allowed beyond the limit"
        return decision

    def done(self, decision: Decision, used: Usage | None) -> None:
        result = self.limiter.settle(decision.reservation, used)
        assert result is None, f"settle returned {result!r}"


def rate_limiter_contract(
    factory: Any, options: Mapping[str, Any] | None = None
) -> type[RateLimiterContract]:
    """Tests for a rate limiter's factory, built with ``options``."""
    name = class_name(factory, RateLimiterContract)
    return contract(RateLimiterContract, name, factory=factory, options=options or {})
