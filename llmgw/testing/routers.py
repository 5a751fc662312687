"""The contract of routers, as tests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from twisted.internet.task import Clock

from llmgw.errors import ConfigError
from llmgw.interfaces import IOrderingRouter, IRouter, IRouterFactory
from llmgw.testing.fakes import backends, candidate, request
from llmgw.testing.shared import FactoryContract, class_name, contract
from llmgw.values import (
    Backend,
    Choice,
    Event,
    Finished,
    FirstToken,
    HealthChanged,
    HealthReport,
    Request,
    Started,
)


class RouterContract(FactoryContract):
    """What every router must keep, whatever its policy.

    Fixed seeds: a failure is the same at each run.
    """

    interface = IRouterFactory
    product = IRouter

    def build(self, options: Mapping[str, Any], clock: Clock) -> Any:
        """Routers get no clock."""
        return self.factory.build(options)

    def make(self) -> Any:
        """A router whose dice, if it has any, are seeded."""
        try:
            return self.factory.build({**self.options, "seed": 7})
        except ConfigError:  # it takes no seed, so it must not need one
            return self.factory.build(self.options)

    def test_it_picks_only_candidates(self) -> None:
        """Any number, any make-up, known or unknown figures; ``None`` is allowed."""
        router, dice = self.make(), random.Random(1)
        for turn in range(300):
            candidates = backends(dice, dice.randint(1, 20))
            self._choose(router, _request(dice, turn), candidates, float(turn))

    def test_one_candidate_is_enough(self) -> None:
        """A set of one is lawful; so is one that nothing is known about."""
        router = self.make()
        self._choose(router, request(), [candidate()], 0.0)
        self._choose(router, request(max_tokens=None, key=None, session=None), [candidate("other")], 0.0)

    def test_candidates_may_change_from_call_to_call(self) -> None:
        """A backend may be gone, back, or have become another object of the same id."""
        router, dice = self.make(), random.Random(2)
        pool = backends(dice, 12)
        for turn in range(200):
            if turn % 10 == 0:
                pool = backends(dice, 12)
            chosen = dice.sample(pool, dice.randint(1, len(pool)))
            self._choose(router, _request(dice, turn), chosen, turn / 10)

    def test_the_candidates_are_left_alone(self) -> None:
        """Neither the sequence nor a profile is written to; a tuple does as well as a list."""
        router, dice = self.make(), random.Random(3)
        for turn in range(50):
            candidates = backends(dice, 8)
            before = [repr(backend) for backend in candidates]
            order = list(candidates)
            self._choose(router, _request(dice, turn), candidates, float(turn))
            assert len(candidates) == len(order), "the sequence of candidates was changed"
            assert all(a is b for a, b in zip(candidates, order, strict=True)), "the sequence was changed"
            assert [repr(backend) for backend in candidates] == before, "a candidate was changed"
            self._choose(router, _request(dice, turn), tuple(candidates), float(turn))

    def test_a_large_fleet_is_no_trouble(self) -> None:
        """Linear in the candidates: 2,000 of them end at once, not timed here."""
        router, dice = self.make(), random.Random(4)
        candidates = backends(dice, 2000)
        for turn in range(5):
            self._choose(router, _request(dice, turn), candidates, float(turn))

    def test_time_may_stand_still(self) -> None:
        """Many calls in one turn of the reactor see the same ``now_s``."""
        router, dice = self.make(), random.Random(5)
        candidates = backends(dice, 5)
        for turn in range(50):
            self._choose(router, _request(dice, turn), candidates, 0.0)

    def test_events_may_come_in_any_order(self) -> None:
        """Also of backends never seen or long removed, doubled, or with nothing told."""
        router, dice = self.make(), random.Random(6)
        for turn in range(300):
            candidates = backends(dice, dice.randint(1, 6))
            for _ in range(dice.randrange(4)):
                assert router.observe(_event(dice, float(turn))) is None, "observe returned something"
            self._choose(router, _request(dice, turn), candidates, float(turn))

    def test_every_attempt_has_its_events(self) -> None:
        """The usual life: choose, started, first token, finished."""
        router, dice = self.make(), random.Random(7)
        candidates = backends(dice, 6)
        now_s = 0.0
        for turn in range(200):
            asked = _request(dice, turn)
            chosen = self._choose(router, asked, candidates, now_s)
            if chosen is None:
                continue
            router.observe(Started(asked.id, chosen.id, now_s))
            ok = dice.random() < 0.9
            if ok:
                router.observe(FirstToken(asked.id, chosen.id, now_s + 0.2, 0.2))
            reason = "done" if ok else dice.choice(("connect", "timeout", "reset", "status_500"))
            router.observe(Finished(asked.id, chosen.id, now_s + 1.0, ok, reason, 1.0, 100, 20, 30, 0.1))
            now_s += dice.random()

    def test_the_same_seed_gives_the_same_choices(self) -> None:
        """Dice come from the option ``seed`` alone, so that a run can be repeated."""
        assert self._run(self.make()) == self._run(self.make()), "two equal runs chose differently"

    def test_an_ordering_router_picks_one_that_waits(self) -> None:
        """``order`` is optional; where offered, it returns an index."""
        router, dice = self.make(), random.Random(9)
        if not IOrderingRouter.providedBy(router):
            return
        for turn in range(100):
            waiting = [_request(dice, number) for number in range(dice.randint(1, 20))]
            index = router.order(waiting, backends(dice, 1)[0], float(turn))
            assert 0 <= index < len(waiting), f"order returned {index} for {len(waiting)} waiting"

    def _run(self, router: Any) -> list[str | None]:
        dice, answers = random.Random(8), []
        for turn in range(200):
            candidates = backends(dice, 8)
            chosen = self._choose(router, _request(dice, turn), candidates, float(turn))
            answers.append(chosen.id if chosen else None)
            router.observe(_event(dice, float(turn)))
        return answers

    def _choose(
        self, router: Any, asked: Request, candidates: Sequence[Backend], now_s: float
    ) -> Backend | None:
        answer = router.choose(asked, candidates, now_s)
        if answer is None:
            return None
        if isinstance(answer, Choice):
            assert isinstance(answer.score, (float, int)), (
                f"the score is {answer.score!r}, which is no number"
            )
            assert answer.score == answer.score, "the score is not a number"
            assert isinstance(answer.why, str), "why is not text"
            assert "\n" not in answer.why, "why is more than one line"
            lawful = answer.slot is None or (isinstance(answer.slot, int) and answer.slot >= 0)
            assert lawful, f"slot is {answer.slot!r}"
            answer = answer.backend
        assert isinstance(answer, Backend), f"choose returned {answer!r}"
        assert any(answer is each for each in candidates), f"{answer.id!r} is not one of the candidates"
        return answer


def router_contract(factory: Any, options: Mapping[str, Any] | None = None) -> type[RouterContract]:
    """Tests for a router's factory, built with ``options``."""
    name = class_name(factory, RouterContract)
    return contract(RouterContract, name, factory=factory, options=options or {})


def _request(dice: random.Random, number: int) -> Request:
    return request(
        id=f"req-{number}",
        model=dice.choice(("m", "other")),
        prompt_tokens=dice.choice((0, 1, 100, 100_000)),
        max_tokens=dice.choice((None, 0, 1, 4096)),
        prefix=tuple(dice.getrandbits(64) for _ in range(dice.choice((0, 1, 4, 40)))),
        session=dice.choice((None, "s1", "s2", "sitzung-ü")),
        key=dice.choice((None, "key-1")),
        streaming=dice.random() < 0.5,
    )


def _event(dice: random.Random, at_s: float) -> Event:
    request_id = f"req-{dice.randrange(400)}"
    backend_id = dice.choice(("b0", "b1", "b19", "never-seen", ""))
    match dice.randrange(5):
        case 0:
            return Started(request_id, backend_id, at_s)
        case 1:
            return FirstToken(request_id, backend_id, at_s, dice.choice((0.0, 0.3, 900.0)))
        case 2:
            return Finished(request_id, backend_id, at_s, False, "connect", 0.0)
        case 3:
            return Finished(request_id, backend_id, at_s, True, "done", 2.0, 10, 10, 0, 0.0)
        case _:
            report = dice.choice(
                (
                    HealthReport(alive=False, refused=True),
                    HealthReport(alive=True, loading=True),
                    HealthReport(alive=True, slots=4, busy_slots=4, deferred=3, kv_use=1.0),
                )
            )
            return HealthChanged(backend_id, at_s, report)
