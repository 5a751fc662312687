"""Leases: counted in and out, told, judged by their end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fleets import ALIVE, REFUSED, TIMEOUT, fail, fleet, report, request

from llmgw.core.fleet import BackendSpec, BreakerChange
from llmgw.errors import (
    GatewayError,
)
from llmgw.values import Event, Finished, FirstToken, HealthChanged, HealthReport, Started, Usage

# --- leases and events ---------------------------------------------------------------


def test_every_attempt_is_told_from_start_to_end() -> None:
    seen: list[Event] = []
    subject = fleet(1)
    subject.observe = seen.append
    lease = subject.lease("b0", request(), 1.0)
    assert lease.backend.id == "b0"
    lease.first_token(1.5)
    lease.first_token(1.6)
    usage = Usage(prompt_tokens=100, cached_tokens=20, output_tokens=30)
    lease.finish(3.0, True, "done", usage=usage, prompt_s=0.4, token_rate=20.0)
    lease.finish(4.0, False, "reset")
    lease.first_token(4.0)
    assert seen == [
        Started("r", "b0", 1.0),
        FirstToken("r", "b0", 1.5, 0.5),
        Finished("r", "b0", 3.0, True, "done", 2.0, 100, 20, 30, 0.4),
    ]
    view = subject.members["b0"].view
    assert (view.in_flight, view.ttft_s, view.prefill_rate) == (0, 0.5, pytest.approx(200.0))
    assert view.token_rate == 20.0


def test_without_usage_nothing_is_made_up() -> None:
    seen: list[Event] = []
    subject = fleet(1)
    subject.observe = seen.append
    subject.lease("b0", request(), 0.0).finish(1.0, False, "connect", refused=True)
    assert seen[-1] == Finished("r", "b0", 1.0, False, "connect", 1.0)


def test_where_nobody_wants_events_all_goes_on_without_them() -> None:
    subject = fleet(1)
    assert subject.observe is None
    report(subject, "b0", ALIVE, 1.0)
    lease = subject.lease("b0", request(), 1.0)
    lease.first_token(1.5)
    lease.finish(3.0, True, "done", usage=Usage(10, 0, 5), token_rate=2.0)
    view = subject.members["b0"].view
    assert (view.in_flight, view.ttft_s, view.token_rate) == (0, 0.5, 2.0)


def test_reports_are_told() -> None:
    seen: list[Event] = []
    subject = fleet(1)
    subject.observe = seen.append
    report(subject, "b0", ALIVE, 2.0)
    assert seen == [HealthChanged("b0", 2.0, ALIVE)]


def test_a_dropped_lease_is_returned_without_a_verdict() -> None:
    seen: list[Event] = []
    subject = fleet(1)
    subject.observe = seen.append
    lease = subject.lease("b0", request(), 1.0)
    lease.moved_s = 2.5
    lease.drop()
    lease.drop()
    view = subject.members["b0"].view
    assert (view.in_flight, view.failure_streak) == (0, 0)
    assert seen[1:] == [Finished("r", "b0", 2.5, True, "dropped", 1.5)]


def test_a_finished_lease_is_not_dropped() -> None:
    seen: list[Event] = []
    subject = fleet(1)
    subject.observe = seen.append
    lease = subject.lease("b0", request(), 0.0)
    lease.finish(1.0, True, "done")
    lease.drop()
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("ok", "reason", "streak"),
    [
        (True, "done", 0),
        (True, "client_gone", 1),
        (False, "client_gone", 1),
        (True, "dropped", 1),
        (True, "status_500", 1),  # a well-formed JSON 500 is the answer to a bad message
        (False, "status_404", 1),
        (False, "4xx", 1),
        (False, "deadline", 1),
        (False, "loading", 1),
        (False, "status_500", 2),
        (False, "timeout", 2),
        (False, "cut", 2),
        (False, "framing", 2),
    ],
)
def test_what_an_end_says_about_the_backend(ok: bool, reason: str, streak: int) -> None:
    subject = fleet(2)
    fail(subject, "b0", times=1)
    subject.lease("b0", request(), 0.0).finish(0.0, ok, reason)
    assert subject.members["b0"].view.failure_streak == streak


def test_what_a_breaker_does_is_told_with_the_reason() -> None:
    seen: list[BreakerChange] = []
    subject = fleet(2)
    subject.breaker_changed = seen.append
    fail(subject, "b0", 1.0)
    assert seen == [BreakerChange("b0", "m", "reset", 5, 5.0)]
    late = subject.lease("b0", request(), 2.0)
    late.finish(2.5, False, "cut")  # begun while it was out: nothing new
    assert len(seen) == 1
    subject.lease("b0", request(), 7.0).finish(7.0, False, "timeout_head")
    assert seen[1:] == [BreakerChange("b0", "m", "timeout_head", 7, 10.0)]
    for _ in range(2):
        subject.lease("b0", request(), 20.0).finish(20.0, True, "done")
    assert len(seen) == 2
    subject.lease("b0", request(), 20.0).first_token(20.0)
    assert seen[2:] == [BreakerChange("b0", "m")]
    # At the end of its slow start it is as any other.
    subject.lease("b0", request(), 60.0).finish(60.0, False, "reset")
    assert len(seen) == 3


def test_the_only_one_of_a_pool_that_fails_its_trial_is_no_news() -> None:
    seen: list[BreakerChange] = []
    subject = fleet(1)
    subject.breaker_changed = seen.append
    subject.lease("b0", request(), 0.0).finish(0.0, False, "refused", refused=True)
    assert seen == [BreakerChange("b0", "m", "refused", 1, 1.0)]
    trial = subject.lease("b0", request(), 0.5)  # begun before its time, over after it
    trial.finish(2.0, False, "reset")
    assert len(seen) == 1


def test_an_ejected_backend_says_why_in_its_picture() -> None:
    subject = fleet(2)
    report(subject, "b0", HealthReport(alive=True, detail="ok"))
    assert subject.snapshot(0.0)[0]["detail"] == "ok"
    fail(subject, "b0")
    assert subject.snapshot(0.0)[0]["detail"] == "its requests failed, the last one: reset"
    report(subject, "b0", [HealthReport(alive=False, detail="no answer in time")] * 3)
    assert subject.snapshot(0.0)[0]["detail"] == "no answer in time"


def test_where_models_are_not_known_no_callers_word_is_told() -> None:
    seen: list[BreakerChange] = []
    subject = fleet(0)
    subject.breaker_changed = seen.append
    for name in ("a", "b"):
        subject.put(BackendSpec(name, f"http://{name}"), 0.0)
    for _ in range(5):
        subject.lease("a", request("from a caller"), 0.0).finish(0.0, False, "reset")
    assert [change.model for change in seen] == [""]


def test_counts_hold_over_a_random_life() -> None:
    dice, subject = random.Random(5), fleet(4, max_connections=5)
    held: list[Any] = []
    waits: list[float] = []
    for step in range(5000):
        now_s = step / 10
        match dice.randrange(6):
            case 0 | 1 | 2:
                try:
                    chosen = dice.choice(subject.candidates(request(), now_s))
                except GatewayError as error:
                    waits.append(error.retry_after_s or 0.0)
                    continue
                assert chosen.profile.in_flight < 5
                assert chosen.profile.available
                held.append(subject.lease(chosen.id, request(), now_s))
            case 3 if held:
                lease = held.pop(dice.randrange(len(held)))
                lease.first_token(now_s)
                lease.finish(now_s, True, "done")
            case 4 if held:
                lease = held.pop(dice.randrange(len(held)))
                busy_until_s = now_s + 1 if dice.random() < 0.2 else None
                lease.finish(now_s, False, "reset", refused=dice.random() < 0.2, busy_until_s=busy_until_s)
            case _:
                report(subject, f"b{dice.randrange(4)}", dice.choice((ALIVE, ALIVE, TIMEOUT, REFUSED)), now_s)
        assert sum(member.view.in_flight for member in subject.members.values()) == len(held)
    assert min(waits) >= 1.0
    assert max(waits) <= 60.0
    for member in subject.members.values():
        assert len(member.leases) == member.view.in_flight
