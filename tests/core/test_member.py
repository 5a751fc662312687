"""What members tell, by reports and by answers, and what is made of it."""

from __future__ import annotations

import pytest
from fleets import ALIVE, LOADING, REFUSED, TIMEOUT, fail, fleet, ids, refusal, report, request

from llmgw.errors import (
    ModelLoading,
    NoBackend,
    Overloaded,
)
from llmgw.values import Event, HealthReport

# --- busy and loading ----------------------------------------------------------------


def test_a_busy_answer_pauses_without_blame() -> None:
    """S-CB-2."""
    subject = fleet(2)
    for _ in range(50):
        subject.lease("b0", request(), 0.0).finish(0.0, False, "busy", busy_until_s=5.0)
    assert ids(subject, 4.9) == ["b1"]
    assert ids(subject, 5.0) == ["b0", "b1"]
    view = subject.members["b0"].view
    assert view.failure_streak == 0
    assert view.warmth == pytest.approx(0.1)
    subject.candidates(request(), 10.0)
    assert view.warmth == 1.0


def test_a_pause_is_a_minute_at_most() -> None:
    subject = fleet(1)
    subject.lease("b0", request(), 0.0).finish(0.0, False, "status_503", busy_until_s=1e9)
    error = refusal(subject, 0.0)
    assert isinstance(error, Overloaded)
    assert 48.0 <= (error.retry_after_s or 0) <= 60.0
    assert ids(subject, 60.0) == ["b0"]


def test_a_busy_trial_frees_its_place() -> None:
    subject = fleet(2)
    fail(subject, "b0")
    subject.candidates(request(), 5.0)
    subject.lease("b0", request(), 5.0).finish(5.0, False, "busy", busy_until_s=6.0)
    assert ids(subject, 6.0) == ["b0", "b1"]


def test_loading_is_told_with_the_time_that_remains() -> None:
    subject = fleet(1)
    report(subject, "b0", LOADING, 0.0)
    report(subject, "b0", LOADING, 5.0)
    error = refusal(subject, 5.0)
    assert isinstance(error, ModelLoading)
    assert 10.0 <= (error.retry_after_s or 0) <= 12.5
    report(subject, "b0", ALIVE, 30.0)
    assert ids(subject, 30.0) == ["b0"]
    report(subject, "b0", LOADING, 100.0)
    assert 30.0 <= (refusal(subject, 100.0).retry_after_s or 0) <= 37.5  # as long as last time


def test_a_loaded_backend_starts_slowly() -> None:
    subject = fleet(2)
    report(subject, "b0", LOADING, 0.0)
    assert ids(subject, 1.0) == ["b1"]
    report(subject, "b0", ALIVE, 10.0)
    subject.candidates(request(), 10.0)
    assert subject.members["b0"].view.warmth == pytest.approx(0.1)


def test_a_request_that_hears_of_loading_is_believed_for_a_while() -> None:
    subject = fleet(2)
    for _ in range(2):
        subject.lease("b0", request(), 0.0).finish(0.0, False, "loading")
    assert ids(subject, 4.9) == ["b1"]
    assert isinstance(refusal(subject, 4.9, exclude={"b1"}), ModelLoading)
    assert ids(subject, 5.0) == ["b0", "b1"]
    assert subject.members["b0"].view.failure_streak == 0


def test_loading_that_no_look_has_told_is_doubted_once() -> None:
    subject = fleet(2)
    doubted: list[str] = []
    subject.doubted = doubted.append
    for _ in range(3):
        subject.lease("b0", request(), 0.0).finish(0.0, True, "loading")
    assert doubted == ["b0"]
    report(subject, "b0", LOADING, 1.0)
    subject.lease("b0", request(), 1.0).finish(20.0, True, "loading")  # known by now
    assert doubted == ["b0"]
    report(subject, "b0", ALIVE, 30.0)
    subject.lease("b0", request(), 31.0).finish(31.0, True, "loading")
    assert doubted == ["b0", "b0"]


def test_full_beats_loading_and_loading_beats_dead() -> None:
    subject = fleet(3, max_connections=1)
    report(subject, "b0", [REFUSED] * 3)
    report(subject, "b1", LOADING)
    subject.lease("b2", request(), 0.0)
    assert isinstance(refusal(subject), Overloaded)
    assert isinstance(refusal(subject, exclude={"b2"}), ModelLoading)
    assert isinstance(refusal(subject, exclude={"b1", "b2"}), NoBackend)


# --- health --------------------------------------------------------------------------


def test_refused_three_times_is_down_and_alive_twice_is_up() -> None:
    """S-HLT-1: in a row, and with hysteresis."""
    subject = fleet(2)
    report(subject, "b0", [REFUSED, REFUSED, ALIVE, REFUSED, REFUSED])
    assert ids(subject) == ["b0", "b1"]
    report(subject, "b0", REFUSED)
    assert ids(subject) == ["b1"]
    report(subject, "b0", [ALIVE, REFUSED, ALIVE])
    assert ids(subject) == ["b1"]
    report(subject, "b0", ALIVE)
    assert ids(subject) == ["b0", "b1"]
    assert subject.members["b0"].view.warmth == pytest.approx(0.1)


def test_refused_once_is_enough_if_requests_saw_it_too() -> None:
    subject = fleet(2)
    fail(subject, "b0", times=1, refused=True)
    report(subject, "b0", REFUSED)
    assert ids(subject) == ["b1"]


def test_what_requests_saw_is_cleared_by_success() -> None:
    subject = fleet(2)
    fail(subject, "b0", times=1, refused=True)
    subject.lease("b0", request(), 0.0).finish(0.0, True, "done")
    report(subject, "b0", REFUSED)
    assert ids(subject) == ["b0", "b1"]


def test_three_time_outs_eject_like_an_opinion() -> None:
    subject = fleet(3)
    report(subject, "b0", [TIMEOUT] * 3)
    assert ids(subject) == ["b1", "b2"]
    report(subject, "b1", [TIMEOUT] * 3)
    assert ids(subject) == ["b0", "b1", "b2"]  # panic


def test_a_member_out_by_time_out_is_asked_about_again_soon() -> None:
    subject = fleet(2)
    report(subject, "b0", [TIMEOUT] * 3)
    error = refusal(subject, exclude={"b1"})
    assert isinstance(error, NoBackend)
    assert 5.0 <= (error.retry_after_s or 0) <= 6.25


def test_time_outs_and_ejections_share_the_half() -> None:
    subject = fleet(2)
    report(subject, "b0", [TIMEOUT] * 3)
    fail(subject, "b1")
    assert ids(subject) == ["b1"]


def test_a_refused_check_turns_the_opinion_into_a_fact() -> None:
    subject = fleet(2)
    report(subject, "b0", [TIMEOUT] * 3 + [REFUSED])
    report(subject, "b1", [REFUSED] * 3)
    assert isinstance(refusal(subject), NoBackend)
    report(subject, "b0", TIMEOUT)  # and no time-out turns it back
    assert isinstance(refusal(subject), NoBackend)


def test_time_outs_never_take_down_the_only_one() -> None:
    """S-HLT-1."""
    subject = fleet(1)
    report(subject, "b0", [TIMEOUT] * 10)
    assert ids(subject) == ["b0"]
    assert not subject.members["b0"].quiet


def test_refused_checks_take_down_the_only_one() -> None:
    subject = fleet(1)
    report(subject, "b0", [REFUSED] * 3)
    assert isinstance(refusal(subject), NoBackend)


def test_time_outs_do_not_count_while_streams_move() -> None:
    """S-HLT-1."""
    subject = fleet(2)
    lease = subject.lease("b0", request(), 0.0)
    lease.moved_s = 20.0
    report(subject, "b0", [TIMEOUT] * 10, 30.0)
    assert ids(subject, 30.0) == ["b0", "b1"]
    report(subject, "b0", [TIMEOUT] * 3, 40.0)
    assert ids(subject, 40.0) == ["b1"]


def test_a_request_that_waits_for_its_first_token_is_no_moving_stream() -> None:
    subject = fleet(2)
    subject.lease("b0", request(), 0.0)
    report(subject, "b0", [TIMEOUT] * 3, 1.0)
    assert ids(subject, 1.0) == ["b1"]


def test_reports_about_nobody_are_ignored() -> None:
    seen: list[Event] = []
    subject = fleet(1)
    subject.observe = seen.append
    report(subject, "gone", REFUSED)
    assert seen == []


def test_slots_and_kind_are_learnt_and_the_profile_stays() -> None:
    subject = fleet(1)
    before = subject.members["b0"].backend
    report(subject, "b0", HealthReport(alive=True, slots=4, kind="llama-server"))
    report(subject, "b0", HealthReport(alive=True))
    after = subject.members["b0"].backend
    assert after.slots == 4
    assert after.profile is before.profile
    assert subject.members["b0"].kind == "llama-server"


def test_what_comes_up_after_a_death_is_not_taken_for_what_was_there() -> None:
    subject = fleet(1, models=None)
    told = HealthReport(
        alive=True, slots=4, kind="llama-server", role="router", context_length=8, models=("m",)
    )
    report(subject, "b0", told)
    report(subject, "b0", [REFUSED, REFUSED, REFUSED])
    member = subject.members["b0"]
    assert (member.kind, member.backend.slots) == ("llama-server", 4)
    report(subject, "b0", ALIVE)
    assert (member.kind, member.role, member.backend.slots, member.backend.context_length) == (None,) * 4
    assert member.models == ("m",)
    report(subject, "b0", [HealthReport(alive=True, slots=2), ALIVE])
    assert member.backend.slots == 2
