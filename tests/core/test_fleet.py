"""The fleet: hard constraints, pools, and who comes and goes."""

from __future__ import annotations

import pytest
from fleets import ALIVE, LOADING, REFUSED, fail, fleet, ids, refusal, report, request

from llmgw.core.breaker import State
from llmgw.core.fleet import BackendSpec, Fleet
from llmgw.errors import (
    ContextLengthExceeded,
    ModelNotFound,
    NoBackend,
    Overloaded,
)
from llmgw.values import HealthReport

# --- who serves what -----------------------------------------------------------------


def test_an_unknown_model_is_not_found() -> None:
    error = refusal(fleet(), ask=request("gpt-9"))
    assert isinstance(error, ModelNotFound)
    assert "gpt-9" in str(error)
    assert not fleet().serves("gpt-9")
    assert not fleet().knows("gpt-9")
    assert fleet().knows("m")


def test_an_empty_fleet_does_not_judge_names() -> None:
    assert isinstance(refusal(fleet(0)), NoBackend)


def test_one_whose_models_are_not_known_serves_any_name() -> None:
    subject = fleet(1)
    subject.put(BackendSpec("new", "http://new"), 0.0)
    assert subject.serves("anything")
    assert ids(subject) == ["b0", "new"]
    assert ids(subject, ask=request("anything")) == ["new"]
    assert subject.models() == {"m": ("b0",)}


def test_reported_models_are_served_and_configured_ones_win() -> None:
    subject = fleet(1)
    subject.put(BackendSpec("asked", "http://asked"), 0.0)
    for backend_id in ("b0", "asked"):
        report(subject, backend_id, HealthReport(alive=True, models=("x", "m")))
    assert subject.models() == {"m": ("b0", "asked"), "x": ("asked",)}
    assert not subject.serves("anything")


def test_names_from_callers_do_not_fill_the_memory() -> None:
    subject = fleet(0)
    subject.put(BackendSpec("new", "http://new"), 0.0)
    for number in range(100):
        ask = request(f"made-up-{number}")
        subject.candidates(ask, 0.0)
        subject.lease("new", ask, 0.0).finish(0.0, True, "done")
    assert len(subject.members["new"].breakers) == 1


def test_breakers_of_models_that_went_are_forgotten() -> None:
    subject = fleet(0)
    subject.put(BackendSpec("asked", "http://asked"), 0.0)
    report(subject, "asked", HealthReport(alive=True, models=("m",)))
    fail(subject, "asked", times=1)
    report(subject, "asked", HealthReport(alive=True, models=("x",)))
    assert subject.members["asked"].breakers == {}


# --- context -------------------------------------------------------------------------


def mixed_windows() -> Fleet:
    subject = fleet(0)
    for name, context in (("small", 100), ("large", 1000), ("also", 1000)):
        subject.put(BackendSpec(name, f"http://{name}", models=("m",), context_length=context), 0.0)
    return subject


def test_small_windows_are_skipped() -> None:
    assert ids(mixed_windows(), ask=request(prompt_tokens=101)) == ["also", "large"]


def test_an_estimate_is_never_refused() -> None:
    assert ids(mixed_windows(), ask=request(prompt_tokens=5000)) == ["also", "large"]


def test_an_exact_count_is_refused() -> None:
    error = refusal(mixed_windows(), exact_tokens=1001)
    assert isinstance(error, ContextLengthExceeded)
    assert "1001" in str(error)
    assert "1000" in str(error)
    assert ids(mixed_windows(), exact_tokens=1000) == ["also", "large"]


def test_an_unknown_window_may_fit() -> None:
    subject = mixed_windows()
    subject.put(BackendSpec("unknown", "http://unknown", models=("m",)), 0.0)
    assert ids(subject, exact_tokens=10**9) == ["unknown"]


def test_a_window_that_drains_is_away_and_not_missing() -> None:
    subject = fleet(0)
    subject.put(BackendSpec("small", "http://small", models=("m",), context_length=100), 0.0)
    subject.put(BackendSpec("large", "http://large", models=("m",), context_length=1000), 0.0)
    subject.drain("large")
    assert isinstance(refusal(subject, exact_tokens=500), NoBackend)
    assert ids(subject, ask=request(prompt_tokens=500)) == ["small"]


def test_a_reported_window_counts_and_a_configured_one_wins() -> None:
    subject = fleet(1)
    report(subject, "b0", HealthReport(alive=True, context_length=50))
    assert isinstance(refusal(subject, exact_tokens=51), ContextLengthExceeded)
    subject = fleet(1, context_length=100)
    report(subject, "b0", HealthReport(alive=True, context_length=50))
    assert ids(subject, exact_tokens=51) == ["b0"]


# --- caps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "slots", "cap"), [(None, None, 64), (None, 4, 4), (2, 4, 2), (8, 4, 8), (None, 0, 64)]
)
def test_the_cap_is_configured_or_the_slots_or_64(
    configured: int | None, slots: int | None, cap: int
) -> None:
    subject = fleet(1, max_connections=configured)
    report(subject, "b0", HealthReport(alive=True, slots=slots))
    assert subject.candidates(request(), 0.0)[0].max_connections == cap


def test_a_full_backend_is_skipped_and_a_full_fleet_is_overloaded() -> None:
    subject = fleet(2, max_connections=1)
    held = subject.lease("b0", request(), 0.0)
    assert ids(subject) == ["b1"]
    subject.lease("b1", request(), 0.0)
    assert isinstance(refusal(subject), Overloaded)
    held.finish(1.0, True, "done")
    assert ids(subject) == ["b0"]


def test_retry_after_is_the_time_to_the_next_free_slot() -> None:
    subject = fleet(1, max_connections=4)
    subject.lease("b0", request(), 0.0).finish(40.0, True, "done")
    for _ in range(4):
        subject.lease("b0", request(), 40.0)
    waits = [refusal(subject).retry_after_s or 0 for _ in range(200)]
    assert 10.0 <= min(waits) < 10.5
    assert 12.0 < max(waits) <= 12.5


@pytest.mark.parametrize(("took_s", "least", "most"), [(0.001, 1, 1.25), (5000, 48, 60)])
def test_retry_after_is_clamped(took_s: float, least: float, most: float) -> None:
    subject = fleet(1, max_connections=1)
    subject.lease("b0", request(), 0.0).finish(took_s, True, "done")
    subject.lease("b0", request(), 0.0)
    assert least <= (refusal(subject).retry_after_s or 0) <= most


def test_what_was_tried_is_left_out() -> None:
    subject = fleet(2)
    assert ids(subject, exclude=frozenset({"b0"})) == ["b1"]
    assert isinstance(refusal(subject, exclude=frozenset({"b0", "b1"})), NoBackend)


# --- breakers and pools --------------------------------------------------------------


def test_a_failing_backend_is_ejected_and_the_rest_serve() -> None:
    """S-HLT-3: failing fast must not attract traffic."""
    subject = fleet(3)
    fail(subject, "b0")
    assert ids(subject) == ["b1", "b2"]
    assert not subject.members["b0"].view.available


def test_fifty_times_400_open_nothing() -> None:
    """S-CB-1."""
    subject = fleet(2)
    for _ in range(50):
        subject.lease("b0", request(), 0.0).finish(0.0, False, "status_400")
    assert ids(subject) == ["b0", "b1"]
    assert subject.members["b0"].view.failure_streak == 0


def test_breakers_are_per_model() -> None:
    subject = fleet(2, models=("m", "n"))
    fail(subject, "b0")
    assert ids(subject) == ["b1"]
    assert ids(subject, ask=request("n")) == ["b0", "b1"]


@pytest.mark.parametrize(("size", "out"), [(2, 1), (3, 1), (4, 2), (5, 2), (10, 5)])
def test_at_most_half_of_a_pool_is_ejected_but_one_may_always_go(size: int, out: int) -> None:
    subject = fleet(size)
    for number in range(size):
        fail(subject, f"b{number}", times=30)
    assert len(ids(subject)) == size - out


def test_the_only_one_is_never_ejected() -> None:
    subject = fleet(1)
    fail(subject, "b0", times=100)
    assert ids(subject) == ["b0"]


def test_the_only_one_pauses_a_second_when_refused() -> None:
    subject = fleet(1)
    fail(subject, "b0", times=1, refused=True)
    error = refusal(subject, 0.5)
    assert isinstance(error, NoBackend)
    assert 1.0 <= (error.retry_after_s or 0) <= 1.25
    assert ids(subject, 1.0) == ["b0"]


def test_half_open_takes_one_and_the_others_are_sent_elsewhere() -> None:
    """S-CB-3."""
    subject = fleet(2)
    fail(subject, "b0")
    assert ids(subject, 5.0) == ["b0", "b1"]
    trial = subject.lease("b0", request(), 5.0)
    for _ in range(500):
        assert ids(subject, 5.0) == ["b1"]
    trial.finish(6.0, True, "client_gone")
    assert ids(subject, 6.0) == ["b0", "b1"]


def test_recovery_ends_in_quiet() -> None:
    subject = fleet(2)
    member = subject.members["b0"]
    fail(subject, "b0")
    for _ in range(3):
        subject.candidates(request(), 5.0)
        subject.lease("b0", request(), 5.0).finish(5.0, True, "done")
    subject.candidates(request(), 5.0)
    assert member.view.warmth == pytest.approx(0.1)
    assert member.view.available
    subject.candidates(request(), 20.0)
    assert member.view.warmth == pytest.approx(0.55)
    subject.candidates(request(), 35.0)
    assert member.view.warmth == 1.0
    assert member.quiet


def test_probes_shorten_the_way_back() -> None:
    subject = fleet(2)
    fail(subject, "b0")
    subject.candidates(request(), 5.0)
    report(subject, "b0", [ALIVE, ALIVE, ALIVE], 6.0)
    subject.lease("b0", request(), 6.0).first_token(7.0)
    assert subject.members["b0"].breakers["m"].state is State.SLOW_START


def test_loading_is_no_proof_of_health() -> None:
    subject = fleet(2)
    fail(subject, "b0")
    subject.candidates(request(), 5.0)
    report(subject, "b0", [LOADING, LOADING, LOADING], 6.0)
    subject.lease("b0", request(), 6.0).finish(7.0, True, "done")
    assert subject.members["b0"].breakers["m"].state is State.HALF_OPEN


def test_panic_ignores_ejections_but_not_refused_checks() -> None:
    subject = fleet(5)
    fail(subject, "b0")
    fail(subject, "b1")
    assert ids(subject) == ["b2", "b3", "b4"]
    assert subject.panics == 0
    for backend_id in ("b2", "b3"):
        report(subject, backend_id, [REFUSED] * 3)
    assert ids(subject) == ["b0", "b1", "b4"]
    assert subject.panics == 1
    assert subject.members["b0"].view.available


def test_a_full_fleet_in_panic_is_overloaded() -> None:
    subject = fleet(2, max_connections=1)
    fail(subject, "b0")
    report(subject, "b1", [REFUSED] * 3)
    subject.lease("b0", request(), 0.0)
    assert isinstance(refusal(subject), Overloaded)


def test_all_ejected_and_tried_is_no_backend_until_one_opens() -> None:
    subject = fleet(2)
    fail(subject, "b0")
    error = refusal(subject, 1.0, exclude={"b1"})
    assert isinstance(error, NoBackend)
    assert 4.0 <= (error.retry_after_s or 0) <= 5.0


# --- members come and go -------------------------------------------------------------


def test_a_changed_setting_keeps_the_profile() -> None:
    subject = fleet(1)
    lease = subject.lease("b0", request(), 0.0)
    subject.put(BackendSpec("b0", "http://10.0.0.0:8080", weight=7.0, models=("x",)), 1.0)
    backend = subject.candidates(request("x"), 1.0)[0]
    assert (backend.weight, backend.profile.in_flight) == (7.0, 1)
    lease.finish(2.0, True, "done")
    assert backend.profile.in_flight == 0
    assert not subject.serves("m")


def test_a_changed_url_is_another_server() -> None:
    subject = fleet(1)
    lease = subject.lease("b0", request(), 0.0)
    subject.drain("b0")
    subject.put(BackendSpec("b0", "http://10.0.0.99:8080", models=("m",)), 1.0)
    assert subject.members["b0"].draining
    subject.undrain("b0")
    backend = subject.candidates(request(), 1.0)[0]
    assert backend.profile.in_flight == 0
    assert backend.profile.warmth == pytest.approx(0.1)
    lease.finish(2.0, True, "done")
    assert backend.profile.in_flight == 0
    assert list(subject.members) == ["b0"]


def test_one_that_joins_a_fleet_at_work_starts_slowly() -> None:
    subject = fleet(1)
    assert subject.candidates(request(), 0.0)[0].profile.warmth == 1.0
    subject.lease("b0", request(), 0.0)
    subject.put(BackendSpec("late", "http://late", models=("m",)), 100.0)
    subject.candidates(request(), 115.0)
    assert subject.members["late"].view.warmth == pytest.approx(0.55)


def test_a_removed_member_is_forgotten_after_its_last_lease() -> None:
    subject = fleet(2)
    first, second = (subject.lease("b0", request(), 0.0) for _ in range(2))
    subject.remove("b0", 1.0)
    assert ids(subject) == ["b1"]
    with pytest.raises(NoBackend):
        subject.lease("b0", request(), 1.0)
    first.finish(2.0, True, "done")
    assert "b0" in subject.members
    second.finish(2.0, False, "reset")
    assert "b0" not in subject.members
    with pytest.raises(NoBackend):
        subject.lease("b0", request(), 1.0)


def test_an_idle_member_is_removed_at_once_and_twice_does_no_harm() -> None:
    subject = fleet(1)
    subject.remove("b0", 0.0)
    subject.remove("b0", 0.0)
    assert dict(subject.members) == {}


def test_a_removed_member_may_come_back_before_it_was_forgotten() -> None:
    subject = fleet(1)
    lease = subject.lease("b0", request(), 0.0)
    spec = subject.members["b0"].spec
    subject.remove("b0", 0.0)
    subject.put(spec, 0.0)
    assert subject.candidates(request(), 0.0)[0].profile.in_flight == 1
    lease.finish(1.0, True, "done")
    assert ids(subject) == ["b0"]


def test_a_draining_member_gets_nothing_new() -> None:
    subject = fleet(2)
    subject.drain("b0")
    assert ids(subject) == ["b1"]
    subject.drain("b1")
    assert subject.serves("m")
    assert subject.models() == {"m": ("b0", "b1")}
    assert isinstance(refusal(subject), NoBackend)
    subject.undrain("b1")
    assert ids(subject) == ["b1"]


def test_draining_nobody_is_an_error() -> None:
    with pytest.raises(KeyError):
        fleet(1).drain("x")
    with pytest.raises(KeyError):
        fleet(1).undrain("x")


def test_a_draining_member_does_not_count_in_its_pool() -> None:
    subject = fleet(2)
    subject.drain("b1")
    fail(subject, "b0", times=50)
    assert ids(subject) == ["b0"]


def test_a_failure_of_a_member_that_left_the_pool_is_noted() -> None:
    subject = fleet(2)
    leases = [subject.lease("b0", request(), 0.0) for _ in range(5)]
    subject.drain("b0")
    for lease in leases:
        lease.finish(1.0, False, "reset")
    assert subject.members["b0"].breakers["m"].state is State.OPEN


# --- the picture for people ----------------------------------------------------------


def test_the_snapshot_tells_everything_in_plain_values() -> None:
    subject = fleet(2, weight=4.0, labels={"zone": "a"})
    report(subject, "b0", HealthReport(alive=True, slots=4, busy_slots=1, deferred=0, detail="fine"))
    fail(subject, "b1", refused=True)
    subject.lease("b0", request(), 0.0).first_token(0.2)
    first, second = subject.snapshot(1.0)
    assert first == {
        "id": "b0",
        "url": "http://10.0.0.0:8080",
        "models": ["m"],
        "in_flight": 1,
        "cap": 4,
        "slots": 4,
        "busy_slots": 1,
        "deferred": 0,
        "kv_use": None,
        "gpu_use": None,
        "ttft_s": 0.2,
        "ttft_samples": 1,
        "token_rate": None,
        "prefill_rate": None,
        "failure_streak": 0,
        "breaker": "closed",
        "breakers": {"m": "closed"},
        "standing": "ready",
        "available": True,
        "warmth": 1.0,
        "draining": False,
        "removed": False,
        "loading": False,
        "kind": None,
        "cold": None,
        "context_length": None,
        "weight": 4.0,
        "labels": {"zone": "a"},
        "detail": "fine",
    }
    assert (second["breaker"], second["available"], second["standing"]) == ("open", False, "ejected")


def test_the_snapshot_knows_silent_draining_and_loading_members() -> None:
    subject = fleet(1)
    subject.put(BackendSpec("new", "http://new"), 0.0)
    subject.drain("b0")
    report(subject, "new", LOADING)
    drained, silent = subject.snapshot(0.0)
    assert (drained["draining"], drained["available"], drained["breaker"]) == (True, False, "closed")
    assert (silent["models"], silent["loading"], silent["standing"]) == (None, True, "loading")
