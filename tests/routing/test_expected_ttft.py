"""Expected time to first token: what it learns, and what it then chooses.

Driven as the manual shows: plain values in, choices out. ``Play`` is a fleet of
paper whose machines take what their speed says, one prompt after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest

from llmgw import builtins
from llmgw.core.prefix import PrefixIndex
from llmgw.errors import ConfigError
from llmgw.interfaces import IOrderingRouter
from llmgw.routing import bounded_wait
from llmgw.routing import expected_ttft as module
from llmgw.routing.doubt import (
    BACK,
    GONE_FIRST_S,
    GONE_NEXT_S,
    GONE_SHARE,
    GROWTH,
    PROVEN,
    ROW,
    TRIAL_FIRST_S,
    TRIAL_LAST_S,
    TRIAL_LATE_S,
    TRIAL_SENT,
    Doubt,
    fails_anyhow,
)
from llmgw.routing.expected_ttft import ExpectedTtft
from llmgw.routing.line import Line
from llmgw.routing.pace import COUNT_MOST, Flight, Pace, Prices
from llmgw.routing.ttft_model import FOLLOWERS, LEFT_TICK_S, OUT_S, Lane
from llmgw.testing import router_contract
from llmgw.values import (
    Backend,
    Choice,
    Finished,
    FirstToken,
    HealthChanged,
    HealthReport,
    Profile,
    Request,
    Started,
)

TestExpectedTtft = router_contract(builtins.expected_ttft)
TestExpectedTtftThatDeclines = router_contract(
    builtins.expected_ttft, {"patience": 1.5, "index_landmarks": 50, "size_price": 0}
)


class Play:
    """Machines that read ``rates`` tokens per second, and a router before them."""

    def __init__(self, rates: dict[str, float], weights: dict[str, float] | None = None, **options: Any):
        self.router = ExpectedTtft.from_options({"seed": 1, **options})
        self.rates = rates
        self.now_s = 0.0
        self.fleet = [Backend(name, (weights or {}).get(name, 1.0), 4) for name in rates]
        self.chosen: Counter[str] = Counter()
        self.count = 0

    def ask(self, tokens: int = 500, prefix: Sequence[int] = (), among: Sequence[Backend] = ()) -> Choice:
        """Choose, without sending it."""
        self.count += 1
        request = Request(f"r{self.count}", "m", tokens, prefix=tuple(prefix))
        choice = self.router.choose(request, among or self.fleet, self.now_s)
        assert choice is not None
        return choice

    def serve(
        self,
        tokens: int = 500,
        prefix: Sequence[int] = (),
        cached: int = 0,
        ok: bool = True,
        reason: str = "done",
        slowness: float = 1.0,
        told: bool = True,
        among: Sequence[Backend] = (),
    ) -> str:
        """One request from choice to end, with nobody beside it."""
        name = self.ask(tokens, prefix, among).backend.id
        self.chosen[name] += 1
        id, begun_s = f"r{self.count}", self.now_s
        self.router.observe(Started(id, name, self.now_s))
        if ok:
            prompt_s = slowness * (tokens - cached) / self.rates[name]
            self.now_s += 0.01 + prompt_s
            self.router.observe(FirstToken(id, name, self.now_s, self.now_s - begun_s))
            self.now_s += 0.5
            figures = (tokens, cached, 50, prompt_s) if told else (None, None, None, None)
            self.router.observe(Finished(id, name, self.now_s, True, reason, self.now_s - begun_s, *figures))
        else:
            self.now_s += 0.01
            self.router.observe(Finished(id, name, self.now_s, False, reason, 0.01))
        return name

    def end(self, ok: bool = True, reason: str = "done") -> None:
        """What was asked for last starts and ends, its prompt of 300 tokens all new."""
        name = next(iter(reversed(self.router._asked.values()))).backend_id
        self.chosen[name] += 1
        id, begun_s = f"r{self.count}", self.now_s
        self.router.observe(Started(id, name, self.now_s))
        self.now_s += 0.01
        if ok:
            self.now_s += 300 / self.rates[name]
            self.router.observe(FirstToken(id, name, self.now_s, self.now_s - begun_s))
        self.router.observe(
            Finished(
                id, name, self.now_s, ok, reason, self.now_s - begun_s, 300, 0, 1, 300 / self.rates[name]
            )
        )

    def lane(self, name: str) -> Lane:
        return self.router._lanes[name]


# --- speed ------------------------------------------------------------------------


def test_speed_is_learned_without_weights() -> None:
    play = Play({"slow": 500.0, "fast": 8000.0, "middle": 2000.0})
    for _ in range(60):
        play.serve()
    assert play.chosen["fast"] > 50
    assert min(play.chosen.values()) >= 1


def test_wrong_weights_are_overruled() -> None:
    play = Play({"slow": 500.0, "fast": 8000.0}, {"slow": 10.0, "fast": 1.0})
    for _ in range(100):
        play.serve()
    assert play.chosen["fast"] > 80


def test_right_weights_are_believed_at_once() -> None:
    play = Play({"slow": 500.0, "fast": 8000.0}, {"slow": 1.0, "fast": 16.0})
    assert [play.serve() for _ in range(3)] == ["fast"] * 3


def test_backends_that_tell_nothing_are_judged_by_their_first_tokens() -> None:
    play = Play({"slow": 500.0, "fast": 8000.0})
    for _ in range(60):
        play.serve(told=False)
    assert play.chosen["fast"] > 45


def test_one_that_was_never_tried_is_chosen_in_words_and_not_for_a_figure_that_means_nothing() -> None:
    play = Play({"a": 1000.0, "b": 1000.0})
    play.serve(among=play.fleet[:1])
    assert play.ask().why.startswith("cost 0.")
    play.now_s += 60.0
    choice = play.ask()
    assert (choice.backend.id, choice.why) == ("b", "not tried yet")


def test_the_least_bad_says_what_is_bad() -> None:
    play = Play({"a": 1000.0})
    play.fleet = [Backend("a", slots=4, profile=Profile(kv_use=1.0))]
    assert play.ask().why == "its KV cache is full, and it is the least bad of 1"
    play = Play({"a": 1000.0})
    for _ in range(3):
        play.serve(ok=False, reason="timeout")
    assert play.ask().why == "it failed lately, and it is the least bad of 1"


@pytest.mark.parametrize("share", [0.4, 2.0])
def test_estimates_of_prompts_are_corrected_by_what_backends_count(share: float) -> None:
    """Else a prompt would cost too little, or too much, beside output and beside waiting for a slot."""
    right, wrong = Play({"a": 1000.0}), Play({"a": 1000.0})
    for _ in range(300):
        right.serve(500)
        wrong.ask(round(share * 500))
        id, begun_s = f"r{wrong.count}", wrong.now_s
        wrong.router.observe(Started(id, "a", begun_s))
        wrong.router.observe(FirstToken(id, "a", begun_s + 0.51, 0.51))
        wrong.now_s += 1.01
        wrong.router.observe(Finished(id, "a", wrong.now_s, True, "done", 1.01, 500, 0, 50, 0.5))
    assert wrong.ask(round(share * 500)).score == pytest.approx(right.ask(500).score, rel=0.05)


def test_estimates_are_not_corrected_beyond_reason() -> None:
    pace = Pace()
    for _ in range(1000):
        pace.count(1.0, 1000)
    assert pace.counted == COUNT_MOST
    for _ in range(3000):
        pace.count(1000.0, 1)
    assert pace.counted == 1.0 / COUNT_MOST
    pace = Pace()
    for _ in range(3000):
        pace.count(100.0, 95)
    assert pace.counted == 1.0


def test_rates_in_the_profile_stand_in_until_something_is_measured() -> None:
    router = ExpectedTtft()
    fleet = [
        Backend("a", profile=Profile(prefill_rate=100.0, token_rate=10.0)),
        Backend("b", profile=Profile(prefill_rate=5000.0, token_rate=90.0)),
    ]
    choice = router.choose(Request("r", "m", 2000), fleet, 0.0)
    assert choice is not None
    assert choice.backend.id == "b"


def test_a_slow_down_is_seen_at_the_first_late_token_and_forgotten() -> None:
    play = Play({"a": 8000.0, "b": 4000.0})
    for each in play.fleet * 15:
        play.serve(among=[each])
    assert play.ask().backend.id == "a"
    lane = play.lane("a")
    for _ in range(3):
        play.serve(slowness=40.0, among=play.fleet[:1])
    assert lane.slowness(play.now_s) > 5.0
    assert play.ask().backend.id == "b"
    assert lane.slowness(play.now_s + 200.0) < 1.1


def test_an_overdue_first_token_repels() -> None:
    play = Play({"a": 8000.0, "b": 4000.0})
    for each in play.fleet * 15:
        play.serve(among=[each])
    choice = play.ask()
    assert choice.backend.id == "a"
    play.router.observe(Started(f"r{play.count}", "a", play.now_s))
    play.now_s += 3.0
    assert play.ask(100).backend.id == "b"


def test_a_cache_that_was_gone_is_no_slowness() -> None:
    lane = Lane("a", 0.0)
    lane.refresh(Backend("a", slots=4), Pace(), Prices(), 0.0)
    flight = Flight("a", 1000.0, 10.0)
    lane.started("r", flight, 0.0)
    whole_s = lane.reading.slope * 1000.0
    lane.first_token("r", flight, whole_s, whole_s)
    assert lane.slowness(whole_s) == pytest.approx(1.0, abs=0.01)


def test_the_time_of_an_output_token_is_learned_apart_from_what_stops_it() -> None:
    """A stream stands still while other prompts are read: that is no slow machine."""
    play = Play({"one": 1000.0})
    for _ in range(60):  # of four streams at once each loses a second and a half to those that follow it
        begun = []
        for number in range(4):
            play.ask(500)
            id, begun_s = f"r{play.count}", play.now_s
            play.router.observe(Started(id, "one", begun_s))
            play.now_s += 0.5
            play.router.observe(FirstToken(id, "one", play.now_s, 0.5))
            begun.append((id, begun_s, 0.5 * (3 - number)))
        now_s = play.now_s
        for id, begun_s, stood_s in begun:
            play.now_s = max(play.now_s, now_s + 1.0)
            seconds = play.now_s - begun_s
            tokens = 1 + round((seconds - 0.5 - stood_s) / 0.02)
            play.router.observe(Finished(id, "one", play.now_s, True, "done", seconds, 500, 0, tokens, 0.5))
    stepping = play.lane("one").speed.stepping
    assert stepping.base + 4.0 * stepping.slope == pytest.approx(0.02, rel=0.15)


def test_where_nobody_counts_output_its_time_is_learned_as_a_whole() -> None:
    play = Play({"one": 1000.0})
    for _ in range(60):  # half a second of output each
        play.serve(told=False)
    stepping, pace = play.lane("one").speed.stepping, play.router._pace
    assert (stepping.base + stepping.slope) * pace.output == pytest.approx(0.5, rel=0.15)


def test_streams_are_counted_while_they_run_and_not_when_they_begin() -> None:
    lane = Lane("one", 0.0)
    lane.slots = 2
    first, second, third = (Flight("one", 1.0, 1.0) for _ in range(3))
    lane.started("first", first, 0.0)
    lane.first_token("first", first, 1.0, 1.0)
    lane.started("second", second, 2.0)
    lane.first_token("second", second, 3.0, 1.0)
    lane.started("third", third, 4.0)  # waits: there are but two slots
    lane.left("first", first, 5.0)
    assert first.beside == pytest.approx((1.0 + 3.0 * 2.0) / 4.0)
    lane.first_token("third", third, 6.0, 2.0)
    lane.others_are(1)
    lane.left("second", second, 6.0)
    assert second.beside == pytest.approx(2.0 + 1.0)
    lane.left("third", third, 6.0)  # all at once: it had no stream
    assert third.beside == 1.0


def test_an_idle_one_is_tried_now_and_then() -> None:
    play = Play({"a": 8000.0, "b": 6000.0})
    for each in play.fleet * 10:
        play.serve(among=[each])
    assert play.ask().backend.id == "a"
    play.lane("b")._used_s = play.now_s - 100.0
    play.lane("b").until_s = play.now_s
    assert play.ask(2000).backend.id == "a"  # a trial is for short prompts
    assert play.ask(50).backend.id == "b"


def test_one_that_joins_is_tried_within_seconds_whatever_its_weight() -> None:
    play = Play({"old": 8000.0, "new": 8000.0}, {"old": 10.0, "new": 0.01})
    for _ in range(10):
        play.serve(among=play.fleet[:1])
    begun_s = play.now_s
    while play.serve() != "new":
        assert play.now_s < begun_s + 15.0


# --- load -------------------------------------------------------------------------


def test_waiting_prompts_count_by_their_tokens() -> None:
    play = Play({"a": 1000.0, "b": 1000.0})
    for _ in range(10):
        play.serve()
    first = play.ask(8000).backend.id
    play.router.observe(Started(f"r{play.count}", first, play.now_s))
    for _ in range(3):
        choice = play.ask(100)
        assert choice.backend.id != first
        play.router.observe(Started(f"r{play.count}", choice.backend.id, play.now_s))


def test_a_free_slot_is_worth_more_than_speed() -> None:
    play = Play({"fast": 8000.0, "slow": 2000.0})
    for _ in range(20):
        play.serve()
    play.fleet[0].profile.in_flight = 4
    play.now_s += 1.0
    assert play.ask(200).backend.id == "slow"


def test_where_others_wait_a_request_costs_the_time_of_those_who_come_after_it() -> None:
    lane, pace, prices = Lane("a", 0.0), Pace(), Prices()
    profile = Profile(in_flight=4)
    lane.refresh(Backend("a", slots=4, profile=profile), pace, prices, 0.0)
    one, one_fixed = lane.per_token_s, lane.fixed_s - lane.turn_s
    profile.in_flight = 6
    lane.refresh(Backend("a", slots=4, profile=profile), pace, prices, 0.0)
    three, three_fixed = lane.per_token_s, lane.fixed_s - 3.0 * lane.turn_s
    held_s = lane.turn_s - pace.uncached * lane.reading.slope / 4.0
    assert three - one > 2.0 * FOLLOWERS * lane.reading.slope
    assert three_fixed - one_fixed > 2.0 * FOLLOWERS * held_s
    pace.herd, lane.own = 4.0, 6
    lane.others_are(0)  # counted just now: nobody else
    lane.refresh(Backend("a", slots=4, profile=profile), pace, prices, 0.0)
    assert lane.per_token_s < three


def test_counts_of_its_own_are_enough() -> None:
    """Profiles that nobody fills."""
    router = ExpectedTtft.from_options({"seed": 3})
    fleet = [
        Backend(name, slots=2, profile=Profile(in_flight=None, peers_in_flight=None))  # type: ignore[arg-type]
        for name in "abc"
    ]
    for number in range(6):
        choice = router.choose(Request(f"r{number}", "m", 100), fleet, number / 1000)
        assert choice is not None
        router.observe(Started(f"r{number}", choice.backend.id, number / 1000))
    assert [router._lanes[name].own for name in "abc"] == [2, 2, 2]


def test_backends_without_slots_count_by_their_cap_and_reports_go_before_both() -> None:
    router = ExpectedTtft()
    fleet = [Backend("a", slots=None, max_connections=7)]
    router.choose(Request("r", "m"), fleet, 0.0)
    assert router._lanes["a"].slots == 7
    router.observe(HealthChanged("a", 0.1, HealthReport(True, slots=3)))
    router.choose(Request("r", "m"), fleet, 1.0)
    assert router._lanes["a"].slots == 3


def test_requests_of_other_gateways_count_as_they_do_when_polled() -> None:
    play = Play({"a": 4000.0, "b": 4000.0})
    for _ in range(10):
        play.serve()
    play.router.observe(HealthChanged("a", play.now_s, HealthReport(True, slots=4, busy_slots=4, deferred=6)))
    assert {play.ask().backend.id for _ in range(20)} == {"b"}
    assert play.lane("a").others == 10
    play.router.observe(HealthChanged("a", play.now_s, HealthReport(True, busy_slots=0)))
    assert play.lane("a").others == 0


def test_peers_of_the_profile_count_too() -> None:
    play = Play({"a": 4000.0, "b": 4000.0})
    for _ in range(10):
        play.serve()
    play.fleet[1].profile.peers_in_flight = 9
    play.now_s += 1.0
    assert {play.ask().backend.id for _ in range(20)} == {"a"}


def test_what_we_sent_since_they_were_counted_others_will_have_sent_too() -> None:
    pace = Pace()
    for _ in range(60):
        pace.shared(10, 30)
    assert pace.herd == pytest.approx(4.0, rel=0.01)
    lane = Lane("a", 0.0)
    lane.others_are(2)
    for number in range(3):
        lane.started(f"r{number}", Flight("a", 10.0, 10.0), 0.0)
    lane.refresh(Backend("a", slots=9), pace, Prices(), 0.0)
    assert not lane.full  # 3 of ours, 2 of theirs, and 0.4 times 9 they will have sent meanwhile
    lane.refresh(Backend("a", slots=8), pace, Prices(), 0.0)
    assert lane.full
    for _ in range(60):
        pace.shared(0, 0)
    assert pace.herd == pytest.approx(4.0, rel=0.01)  # an idle fleet says nothing of others
    assert Pace().herd == 1.0
    pace = Pace()
    pace.shared(0, 0)
    assert pace.herd == 1.0


def test_others_that_are_gone_are_soon_forgotten() -> None:
    pace = Pace()
    for _ in range(60):
        pace.shared(4, 12)
    for _ in range(9):  # three looks at a fleet of three
        pace.shared(4, 0)
    assert pace.herd == 1.0


def test_who_sends_nothing_learns_nothing_from_what_others_send() -> None:
    pace = Pace()
    for _ in range(60):
        pace.shared(0, 12)
    assert pace.herd == 1.0
    pace.shared(4, 0)
    assert pace.herd == 1.0
    for number in range(60):  # few requests, which no look finds
        pace.sent = number
        pace.shared(number % 20 == 0, 12)
    assert pace.herd > 10.0


def test_near_ties_are_settled_by_seeded_dice() -> None:
    def run(seed: int) -> list[str]:
        router = ExpectedTtft.from_options({"seed": seed})
        fleet = [Backend(name) for name in "abcd"]
        choices = [router.choose(Request(f"r{n}", "m", 100), fleet, 0.0) for n in range(40)]
        return [choice.backend.id for choice in choices if choice is not None]

    assert set(run(1)) == set("abcd")
    assert run(1) == run(1)
    assert run(1) != run(2)


def test_costs_are_worked_out_again_soon_after_somebody_left() -> None:
    lane, backend = Lane("a", 0.0), Backend("a", slots=9)
    flights = [Flight("a", 100.0, 100.0) for _ in range(2)]
    for number, flight in enumerate(flights):
        lane.refresh(backend, Pace(), Prices(), 0.0)
        lane.started(f"r{number}", flight, 0.0)
    lane.refresh(backend, Pace(), Prices(), 60.0)  # everything should have been read long ago
    assert lane.fixed_s > 1.0
    for number, flight in enumerate(flights):
        lane.first_token(f"r{number}", flight, 60.0, 60.0)
    lane.refresh(backend, Pace(), Prices(), 60.0)
    assert lane.until_s == 60.25
    lane.left("r0", flights[0], 60.0)
    assert lane.until_s == 60.0 + LEFT_TICK_S
    lane.left("r1", flights[1], 60.01)
    assert lane.until_s < 0.0


def test_the_next_prompt_is_read_from_when_the_one_before_was_done() -> None:
    lane, backend = Lane("a", 0.0), Backend("a", slots=9)
    flights = [Flight("a", 4000.0, 4000.0) for _ in range(2)]
    for number, flight in enumerate(flights):
        lane.refresh(backend, Pace(), Prices(), 0.0)
        lane.started(f"r{number}", flight, 0.0)
    lane.first_token("r0", flights[0], 4.0, 4.0)
    lane.refresh(backend, Pace(), Prices(), 5.0)
    tokens_read = 1.0 / lane.reading.slope
    assert lane._ahead == pytest.approx(4000.0 - tokens_read, rel=0.01)


# --- what is left out, and what weighs --------------------------------------------


def test_a_full_kv_cache_is_left_out_unless_all_are_full() -> None:
    play = Play({"a": 8000.0, "b": 100.0})
    for _ in range(10):
        play.serve()
    play.fleet[0].profile.kv_use = 0.95
    play.now_s += 1.0
    assert play.ask().backend.id == "b"
    play.fleet[1].profile.kv_use = 0.99
    play.now_s += 1.0
    assert {play.ask().backend.id for _ in range(20)} == {"a"}


def test_gpu_use_that_is_not_ours_weighs() -> None:
    play = Play({"a": 4200.0, "b": 4000.0})
    for _ in range(20):
        play.serve()
    play.fleet[0].profile.gpu_use = 0.9
    play.now_s += 1.0
    assert play.ask().backend.id == "b"


def test_cold_ones_cost_more() -> None:
    play = Play({"a": 4200.0, "b": 4000.0})
    for _ in range(20):
        play.serve()
    play.fleet[0].profile.warmth = 0.1
    play.now_s += 1.0
    assert play.ask().backend.id == "b"


# --- failures ---------------------------------------------------------------------


def test_one_that_fails_fast_gets_next_to_nothing() -> None:
    play = Play({"bad": 8000.0, "good": 1000.0})
    for number in range(1000):
        fails = number % 5 >= 2
        name = play.ask(300).backend.id
        if name == "bad" and fails:
            play.end(False, "status_500")
        else:
            play.end()
        play.now_s += 0.2
    assert play.chosen["bad"] <= 0.03 * 1000


def test_one_failure_alone_is_not_the_end() -> None:
    play = Play({"a": 8000.0, "b": 500.0})
    for _ in range(20):
        play.serve()
    play.serve(ok=False, reason="reset")
    assert [play.serve() for _ in range(5)] == ["a"] * 5
    for _ in range(20):
        play.serve()
    assert play.lane("a").doubt.count == 0.0


def test_what_is_nobodys_fault_raises_no_doubt() -> None:
    play = Play({"a": 8000.0})
    play.ask()
    for reason in ("busy", "loading", "client_gone", "dropped", "status_404"):
        play.serve(ok=False, reason=reason)
    play.serve(reason="client_gone")
    assert play.lane("a").doubt.count == 0.0


def test_a_restarted_one_is_back_in_seconds() -> None:
    play = Play({"best": 8000.0, "other": 500.0})
    for _ in range(20):
        play.serve()
    for _ in range(12):
        play.ask()
        play.router.observe(Started(f"r{play.count}", "best", play.now_s))
    for number in range(play.count - 11, play.count + 1):
        play.router.observe(Finished(f"r{number}", "best", play.now_s, False, "reset", 0.1))
    play.router.observe(HealthChanged("best", play.now_s, HealthReport(False, refused=True)))
    assert play.serve() == "other"
    play.router.observe(HealthChanged("best", play.now_s, HealthReport(True, slots=4)))
    begun_s = play.now_s
    names = [play.serve() for _ in range(12)]
    assert names[0] == "best"
    assert play.now_s - begun_s < 12.0
    assert names[-3:] == ["best"] * 3


def lose(play: Play, *reasons: str) -> None:
    """So many streams begin at "best", after turns enough to be known, and end in this way."""
    for _ in range(20):
        play.serve(1000, range(5))
    for _ in reasons:
        play.ask(among=play.fleet[:1])
        play.router.observe(Started(f"r{play.count}", "best", play.now_s))
        play.router.observe(FirstToken(f"r{play.count}", "best", play.now_s + 0.1, 0.1))
    play.now_s += 0.2
    for number, reason in enumerate(reasons, play.count - len(reasons) + 1):
        play.router.observe(Finished(f"r{number}", "best", play.now_s, False, reason, 0.2))


@pytest.mark.parametrize("reason", ["reset", "cut", "status_503", "error"])
def test_one_that_lost_all_its_streams_at_once_is_back_with_its_next_first_token(reason: str) -> None:
    """As a restart looks where nobody sends health reports, whatever the reason is called."""
    play = Play({"best": 8000.0, "other": 500.0})
    lose(play, *[reason] * 4)
    assert play.router._index.length(range(5), "best") == 0
    assert play.ask().backend.id == "other"
    for _ in range(4):  # trials every two seconds while it is away
        play.now_s += 2.0
        assert play.serve(ok=False, reason="status_503") == "best"
    play.now_s += 2.0
    assert play.ask().backend.id == "best"
    play.router.observe(Started(f"r{play.count}", "best", play.now_s))
    assert play.ask().backend.id == "other"
    play.router.observe(FirstToken(f"r{play.count - 1}", "best", play.now_s + 0.1, 0.1))
    play.now_s += 0.1
    assert play.ask().backend.id == "best"


def test_streams_that_stall_are_no_restart() -> None:
    play = Play({"best": 8000.0, "other": 500.0})
    lose(play, "timeout", "timeout", "timeout")
    assert play.router._index.length(range(5), "best") > 0
    play.now_s += 2.0
    assert play.serve() == "other"


def test_where_all_fail_somebody_is_asked_all_the_same() -> None:
    play = Play({"a": 8000.0, "b": 500.0})
    for _ in range(40):
        play.serve(ok=False, reason="connect")
    assert min(play.chosen.values()) >= 1
    assert play.lane("a").doubt.pause_s <= 2.0
    assert play.ask().score > 0.0


def test_trials_come_one_at_a_time() -> None:
    play = Play({"a": 8000.0, "b": 500.0})
    for _ in range(10):
        play.serve()
    for _ in range(3):
        play.serve(ok=False, reason="reset", among=play.fleet[:1])
    play.now_s += TRIAL_LATE_S
    assert play.ask().backend.id == "a"
    assert [play.ask().backend.id for _ in range(10)] == ["b"] * 10


def test_one_whose_first_answers_fail_is_asked_again_after_many_requests() -> None:
    """However attractive one is otherwise that nobody knows yet."""
    play = Play({"good": 1000.0, "bad": 1000.0}, {"good": 1.0, "bad": 10.0})
    names = []
    for _ in range(TRIAL_SENT + 20):
        names.append(play.ask(300).backend.id)
        play.end(names[-1] == "good", "done" if names[-1] == "good" else "status_503")
        play.now_s += 0.2
    assert names.count("bad") == 2
    assert names.index("bad", 1) >= TRIAL_SENT


def test_one_that_failed_is_asked_sooner_where_the_others_cannot_do_the_work() -> None:
    play = Play({"good": 1000.0, "bad": 1000.0})
    for _ in range(10):
        play.serve()
    for _ in range(2):
        play.serve(ok=False, reason="reset", among=play.fleet[1:])
    for number in range(40):
        play.router.observe(Started(f"x{number}", "good", play.now_s))
    assert play.ask(300).backend.id == "good"
    play.now_s += TRIAL_FIRST_S * GROWTH
    assert play.ask(300).backend.id == "bad"


# --- prefixes ---------------------------------------------------------------------


def test_a_conversation_stays_where_its_beginning_was_read() -> None:
    play = Play({"a": 4000.0, "b": 4000.0, "c": 4000.0})
    for _ in range(12):
        play.serve()
    homes = {}
    for talk in range(6):
        homes[talk] = play.serve(2000, range(100 * talk, 100 * talk + 15))
    for talk, home in homes.items():
        choice = play.ask(2100, range(100 * talk, 100 * talk + 16))
        assert choice.backend.id == home
        assert "94%" in choice.why


def test_a_long_queue_outweighs_a_cached_beginning() -> None:
    play = Play({"a": 4000.0, "b": 4000.0})
    for _ in range(12):
        play.serve()
    home = play.serve(400, range(3))
    assert play.ask(400, range(3)).backend.id == home
    for number in range(4):
        play.router.observe(Started(f"x{number}", home, play.now_s))
    assert play.ask(400, range(3)).backend.id != home


def test_backends_that_forget_are_believed_less() -> None:
    play = Play({"a": 4000.0, "b": 3900.0})
    for _ in range(12):
        play.serve()
    for _ in range(40):
        play.serve(2000, range(5), cached=0, among=play.fleet[1:])
    assert play.router._index.held["b"].belief[0] < 0.1
    assert play.ask(2000, range(5)).backend.id == "a"


def test_a_beginning_that_most_have_read_decides_nothing() -> None:
    play = Play(dict.fromkeys("abcdefgh", 4000.0))
    for each in play.fleet:
        for _ in range(2):
            play.serve(2000, [1, 2, 3], told=False, among=[each])
    play.serve(2000, [1, 2, 3, 4], told=False, among=play.fleet[:1])
    assert {play.ask(2000, [1, 2, 3]).backend.id for _ in range(60)} - {"a"}
    assert play.ask(2000, [1, 2, 3, 4]).backend.id == "a"


def test_the_crowd_counts_where_the_longer_beginning_is_doubted() -> None:
    play = Play(dict.fromkeys("abcdef", 4000.0))
    for each in play.fleet:
        play.serve(2000, [1, 2, 3], among=[each])
    play.serve(2000, [1, 2, 3, 4], among=play.fleet[:1])
    play.router._index.held["a"].belief[0] = 0.0
    assert play.ask(2000, [1, 2, 3, 4]).score > 0.0


def test_readers_that_are_no_candidates_now_are_passed_over() -> None:
    play = Play({"a": 4000.0, "b": 4000.0, "c": 4000.0})
    for _ in range(6):
        play.serve()
    for each in play.fleet:
        play.serve(1000, range(5), among=[each])
    assert play.ask(1000, range(5), among=play.fleet[1:2]).backend.id == "b"
    play.router._lanes.pop("c")
    assert play.ask(1000, range(5), among=play.fleet[:2]).backend.id in "ab"


def test_a_restart_empties_the_cache() -> None:
    play = Play({"a": 4000.0, "b": 4000.0})
    play.serve(1000, range(5), among=play.fleet[:1])
    assert play.router._index.length(range(5), "a") == 5
    play.router.observe(HealthChanged("a", play.now_s, HealthReport(True, loading=True)))
    play.router.observe(HealthChanged("a", play.now_s, HealthReport(True)))
    play.router.observe(HealthChanged("a", play.now_s, HealthReport(True)))
    assert play.router._index.length(range(5), "a") == 0


# --- slots ------------------------------------------------------------------------


def test_each_conversation_is_given_its_slot_again() -> None:
    play = Play({"a": 4000.0})
    talks = [range(100 * talk, 100 * talk + 6) for talk in range(3)]
    slots = {}
    for number, talk in enumerate(talks):
        choice = play.ask(900, talk)
        slots[number] = choice.slot
        play.count -= 1
        play.serve(900, talk)
    assert len(set(slots.values())) == 3
    for number, talk in enumerate(talks):
        assert play.ask(1000, [*talk, 99]).slot == slots[number]


def test_no_slot_is_asked_for_where_slots_are_unknown_or_shared() -> None:
    router = ExpectedTtft()
    assert router.choose(Request("r", "m"), [Backend("a")], 0.0).slot is None  # type: ignore[union-attr]
    play = Play({"a": 4000.0})
    assert play.ask().slot == 0
    play.router.observe(HealthChanged("a", 0.0, HealthReport(True, slots=4, busy_slots=2)))
    assert play.ask().slot is None
    play.router.observe(HealthChanged("a", 0.0, HealthReport(True, slots=4, busy_slots=0)))
    assert play.ask().slot is None  # who was there a moment ago will come again
    for _ in range(10):
        play.router.observe(HealthChanged("a", 0.0, HealthReport(True, slots=4, busy_slots=0)))
    assert play.ask().slot == 0
    for _ in range(5):
        play.router._pace.shared(1, 3)
    assert play.ask().slot is None


def test_no_slot_is_asked_for_while_one_of_ours_has_none() -> None:
    play = Play({"a": 4000.0})
    play.ask()
    play.router.observe(Started("by somebody else", "a", 0.0))
    assert play.ask().slot is None


def test_no_slot_is_chosen_where_none_will_be_asked_for() -> None:
    play = Play({"a": 4000.0})
    assert play.ask().slot == 0
    play.router.adapt(slot_choice=False, may_wait=False)
    assert play.ask().slot is None


def test_slots_may_change_while_requests_are_under_way() -> None:
    play = Play({"a": 4000.0})
    play.ask()
    play.router.observe(Started("r1", "a", 0.0))
    play.fleet[0] = Backend("a", slots=2)
    play.now_s = 1.0
    play.ask()
    play.router.observe(Finished("r1", "a", 1.0, True, "done", 1.0))
    play.ask()
    play.router._shadows.clear()
    play.router.observe(Started("r3", "a", 1.0))
    assert play.router._flights["r3"].slot is None
    play.ask()
    play.router.observe(Finished("r3", "a", 1.0, True, "done", 1.0))
    play.ask()
    play.router.observe(Started(f"r{play.count}", "a", 1.0))
    play.router._shadows.clear()
    play.router.observe(Finished(f"r{play.count}", "a", 1.0, True, "done", 1.0))
    assert play.lane("a").own == 0


# --- the bounded wait -------------------------------------------------------------


def waiting(*sizes: int, prefix: Sequence[int] = ()) -> list[Request]:
    return [Request(f"w{place}", "m", size, prefix=tuple(prefix)) for place, size in enumerate(sizes)]


def test_short_prompts_go_before_long_ones_until_these_have_waited_their_time() -> None:
    play = Play({"a": 1000.0})
    for _ in range(10):
        play.serve()
    assert IOrderingRouter.providedBy(play.router)
    backend = play.fleet[0]
    assert play.router.order(waiting(4000, 100), backend, play.now_s) == 1
    late = [*waiting(4000), Request("new", "m", 100)]
    assert play.router.order(late, backend, play.now_s + 2.0) == 1
    assert play.router.order([late[0], Request("newer", "m", 100)], backend, play.now_s + 15.0) == 0


def test_where_output_takes_the_server_longer_than_prompts_size_counts_less_for_the_order() -> None:
    ages = []
    for step_s in (0.001, 0.1):
        play = Play({"a": 1000.0})
        for _ in range(10):
            play.serve()
            play.lane("a").speed.stepping.add(1.0, step_s, 50.0)
        play.ask()
        line = waiting(2000)
        play.router.order([*line, *line], play.fleet[0], play.now_s)  # it waits from now on
        age_s = 0.0
        while play.router.order([*line, Request(f"n{age_s}", "m", 100)], play.fleet[0], play.now_s + age_s):
            age_s += 0.5
        ages.append(age_s)
    assert ages[1] < ages[0] / 2


def test_order_counts_only_what_is_not_cached() -> None:
    play = Play({"a": 1000.0})
    for _ in range(10):
        play.serve()
    play.serve(4000, range(10))
    line = [*waiting(1000), Request("cached", "m", 4000, prefix=tuple(range(10)))]
    assert play.router.order(line, play.fleet[0], play.now_s) == 1


def test_order_is_that_of_arrival_where_nothing_is_known_or_wanted() -> None:
    line = waiting(4000, 100)
    router = ExpectedTtft()
    assert router.order(line, Backend("never seen"), 0.0) == 0
    router.observe(Started("somebody else's", "never seen", 0.0))
    assert router.order(line, Backend("never seen"), 0.0) == 0
    play = Play({"a": 1000.0}, size_price=0)
    play.serve()
    assert play.router.order(line, play.fleet[0], 1.0) == 0
    play = Play({"a": 1000.0})
    play.serve()
    assert play.router.order(line[:1], play.fleet[0], 1.0) == 0


def test_a_patient_router_declines_a_slow_backend_while_a_fast_one_will_be_free_sooner() -> None:
    play = Play({"fast": 8000.0, "slow": 100.0}, patience=1.0)
    for _ in range(20):
        play.serve(100, among=play.fleet[:1])
    for _ in range(20):
        play.serve(100, among=play.fleet[1:])
    slow = play.fleet[1]
    play.now_s += 1.0
    for number in range(4):
        play.router.observe(Started(f"x{number}", "fast", play.now_s))
    ask = Request("waits", "m", 2000)
    assert play.router.choose(ask, [slow], play.now_s) is not None  # nobody has said that one may wait
    assert play.router.order([ask, Request("other", "m")], slow, play.now_s) == 1
    assert play.router.choose(ask, [slow], play.now_s) is None
    assert play.router.choose(ask, [slow], play.now_s + 1.0) is None
    play.router.observe(HealthChanged("fast", play.now_s, HealthReport(False, refused=True)))
    assert play.router.choose(ask, [slow], play.now_s + 2.0) is not None
    play.router.observe(Started("waits", "slow", play.now_s))
    assert list(play.router._wait._since_s) == ["other"]


def failing_and_full() -> tuple[Play, Request, list[Backend]]:
    """One fails and has room, the other is full; and nobody has told whether one may wait."""
    play = Play({"bad": 8000.0, "good": 100.0}, patience=0)
    for _ in range(10):
        play.serve(among=play.fleet[1:])
    for _ in range(2):
        play.serve(ok=False, reason="status_503", among=play.fleet[:1])
    for number in range(4):
        play.router.observe(Started(f"x{number}", "good", play.now_s))
    return play, Request("waits", "m", 2000), play.fleet[:1]


def test_who_may_wait_is_not_sent_to_one_that_fails_while_others_are_only_full() -> None:
    play, ask, bad = failing_and_full()
    play.router.adapt(slot_choice=False, may_wait=False)
    assert play.router.choose(ask, bad, play.now_s) is not None
    play.router.adapt(slot_choice=False, may_wait=True)
    play.now_s += 0.1
    assert play.router.choose(ask, bad, play.now_s) is None
    play.router.observe(Finished("x0", "good", play.now_s, True, "client_gone", 1.0))
    assert play.router.choose(ask, bad, play.now_s) is not None


def test_whether_one_may_wait_is_found_out_with_one_request_in_a_minute() -> None:
    play, ask, bad = failing_and_full()
    assert play.router.choose(ask, bad, play.now_s) is None
    other = Request("other", "m", 2000)
    assert play.router.choose(other, bad, play.now_s) is not None
    assert play.router.choose(ask, bad, play.now_s) is None  # it is asked again: so it has waited
    assert play.router.choose(other, bad, play.now_s) is None


def test_a_trial_that_is_due_takes_place_while_others_are_full() -> None:
    play, ask, bad = failing_and_full()
    play.router.adapt(slot_choice=False, may_wait=True)
    assert play.router.choose(ask, bad, play.now_s) is None
    play.now_s = play.lane("bad").doubt.trial_s
    assert play.router.choose(ask, bad, play.now_s) is not None
    assert play.router.choose(Request("next", "m", 2000), bad, play.now_s) is None


def test_one_that_tells_its_slots_is_waited_for_as_before() -> None:
    play, ask, bad = failing_and_full()
    play.router.adapt(slot_choice=False, may_wait=True)
    play.router.observe(HealthChanged("good", play.now_s, HealthReport(True, slots=3)))
    assert play.router.choose(ask, bad, play.now_s) is None


def test_lanes_that_nobody_has_looked_at_are_not_waited_for() -> None:
    play = Play({"fast": 8000.0, "slow": 100.0})
    play.serve(among=play.fleet[1:])
    play.router.order([Request("a", "m"), Request("b", "m")], play.fleet[0], play.now_s)
    play.router.observe(Started("x", "fast", play.now_s))
    assert play.router.choose(Request("c", "m", 100), play.fleet[1:], play.now_s) is not None
    play.ask()
    assert play.router.choose(Request("d", "m", 100), play.fleet[1:], play.now_s) is not None


# --- other gateways ---------------------------------------------------------------


def test_gateways_agree_on_a_home_for_a_conversation() -> None:
    """Each knows nothing of what the others sent, and learned in another order."""
    homes: dict[str, set[str]] = {}
    for seed in range(4):
        play = Play(dict.fromkeys("abcdef", 4000.0), seed=seed)
        for number in range(12 + seed):
            play.serve(among=[play.fleet[number % 6]])
        play.now_s += 300.0  # all have been idle for as long
        for _ in range(9):
            play.router._pace.shared(1, 3)
        for talk in range(12):
            request = Request(f"t{talk}", "m", 3000, session=f"s{talk}")
            choice = play.router.choose(request, play.fleet, play.now_s)
            assert choice is not None
            homes.setdefault(request.id, set()).add(choice.backend.id)
    assert all(len(each) == 1 for each in homes.values())
    assert len(set.union(*homes.values())) >= 4


def test_a_conversation_without_a_session_is_known_by_its_beginning() -> None:
    play = Play(dict.fromkeys("abcdef", 4000.0))
    for each in play.fleet * 2:
        play.serve(900, [1, 2], cached=800, among=[each])
    play.now_s += 300.0
    for _ in range(9):
        play.router._pace.shared(1, 3)
    turns = [[1, 2, *range(10 * talk, 10 * talk + 5)] for talk in range(1, 9)]
    homes = [{play.ask(5000, turn[:length]).backend.id for length in (5, 6, 7)} for turn in turns]
    assert all(len(each) == 1 for each in homes)
    assert len(set.union(*homes)) >= 3


# --- answers in one piece ---------------------------------------------------------


def answered(
    play: Play,
    tokens: int = 500,
    *,
    first_after: float | None = None,
    output: int | None = 50,
    told: bool = True,
    streaming: bool = False,
    prefix: Sequence[int] = (),
    cached: int = 0,
) -> str:
    """One request whose answer takes 10 ms a token after its prompt was read.

    :param first_after: share of its time after which a first token is seen, if any is.
    """
    play.count += 1
    request = Request(f"r{play.count}", "m", tokens, prefix=tuple(prefix), streaming=streaming)
    choice = play.router.choose(request, play.fleet, play.now_s)
    assert choice is not None
    name, begun_s, id = choice.backend.id, play.now_s, request.id
    play.chosen[name] += 1
    prompt_s = (tokens - cached) / play.rates[name]
    total_s = 0.01 + prompt_s + 0.01 * (output or 0)
    play.router.observe(Started(id, name, begun_s))
    play.now_s += total_s
    if first_after is not None:
        first_s = first_after * total_s
        play.router.observe(FirstToken(id, name, begun_s + first_s, first_s))
    figures = (tokens, cached, output, prompt_s if told else None)
    play.router.observe(Finished(id, name, play.now_s, True, "done", total_s, *figures))
    return name


@pytest.mark.parametrize("first_after", [None, 1.0])
@pytest.mark.parametrize("told", [True, False])
def test_answers_in_one_piece_teach_speed(first_after: float | None, told: bool) -> None:
    """Also where the gateway takes the whole answer, when it comes, for its first token."""
    play = Play({"fast": 4000.0, "slow": 400.0})
    for _ in range(60):
        answered(play, first_after=first_after, told=told)
    assert play.chosen["fast"] > 45
    lane = play.lane("fast")
    assert lane.whole
    assert lane.reading.slope < 0.5 * play.lane("slow").reading.slope
    assert lane.slowness(play.now_s) < 1.5
    if told:
        assert 1.0 / lane.reading.slope == pytest.approx(4000.0, rel=0.3)
        assert lane.stepping.base == pytest.approx(0.01, rel=0.3)


def test_one_that_will_not_show_a_first_token_is_not_overdue() -> None:
    play = Play({"a": 1000.0})
    for _ in range(10):
        answered(play)
    rested = play.ask(300).score
    play.router.observe(Started(f"r{play.count}", "a", play.now_s))
    play.now_s += 0.1
    reading = play.ask(300).score
    play.now_s += 5.0  # it may write for long
    writing = play.ask(300).score
    assert rested < writing < reading
    assert writing < 1.5 * rested


def test_a_first_token_before_the_end_shows_that_answers_come_piece_by_piece_again() -> None:
    play = Play({"a": 1000.0})
    for _ in range(3):
        answered(play)
    assert play.lane("a").whole
    answered(play, output=3, first_after=0.5)  # too short to tell
    answered(play, output=None, first_after=0.5)
    assert play.lane("a").whole
    answered(play, first_after=0.5)
    assert not play.lane("a").whole
    answered(play, first_after=0.5)
    assert not play.lane("a").whole


def test_streams_of_one_that_answers_others_in_one_piece_are_measured_as_ever() -> None:
    play = Play({"a": 1000.0})
    for _ in range(3):
        answered(play)
    assert play.lane("a").whole
    before_s = play.router._pace.ttft_s
    answered(play, 3000, streaming=True, first_after=0.9)
    assert play.router._pace.ttft_s > before_s
    assert play.lane("a").whole


def test_what_was_read_is_known_without_a_first_token() -> None:
    play = Play({"a": 1000.0, "b": 1000.0})
    for _ in range(20):
        answered(play)
    home = answered(play, 2000, prefix=range(16))
    for _ in range(5):
        assert answered(play, 2000, prefix=range(16), cached=1900) == home


def test_without_output_all_of_its_time_was_reading() -> None:
    play = Play({"fast": 4000.0, "slow": 400.0})
    for _ in range(60):
        answered(play, output=None, told=False)
    assert play.chosen["fast"] > 45
    assert 1.0 / play.lane("fast").reading.slope == pytest.approx(4000.0, rel=0.3)


# --- doubt ------------------------------------------------------------------------


def proven() -> Doubt:
    doubt = Doubt()
    for number in range(PROVEN):
        doubt.answered(float(number), float(number))
    return doubt


def test_two_failures_close_together_are_too_many_and_one_is_for_who_never_answered() -> None:
    doubt = proven()
    doubt.failed(10.0, 10.0, 0)
    assert not doubt.out
    doubt.failed(100.0, 100.0, 0)
    assert not doubt.out
    doubt.failed(101.0, 101.0, 0)
    assert doubt.out
    doubt = Doubt()
    doubt.failed(10.0, 10.0, 0)
    assert doubt.out


def used(answers: int, failures: int) -> Doubt:
    """One that has been in use for long, and failed so often, each time long ago by the next."""
    doubt = Doubt()
    for number in range(failures):
        for _ in range(answers // max(failures, 1)):
            doubt.answered(1000.0 * number, 1000.0 * number)
        doubt.failed(1000.0 * number, 1000.0 * number, 0)
    for _ in range(answers - failures * (answers // max(failures, 1))):
        doubt.answered(1e6, 1e6)
    return doubt


def test_what_fails_anyhow_is_seen_at_the_others_but_for_the_worst_one_who_may_be_ill_too() -> None:
    well, ill = proven(), used(100, 40)
    assert fails_anyhow(well, [well, ill]) == 0.0
    assert fails_anyhow(Doubt(), []) == 0.0
    fleet = [used(100, 4) for _ in range(5)]
    assert 0.01 < fails_anyhow(well, [well, ill, *fleet]) < 0.04
    assert fails_anyhow(well, fleet[:2]) < fails_anyhow(well, fleet)


def test_its_own_failures_of_before_count_but_not_those_of_the_present_doubt() -> None:
    doubt = used(100, 4)
    before = fails_anyhow(doubt, [])
    assert before > 0.0
    doubt.failed(2e6, 2e6, 0)
    doubt.failed(2e6, 2e6, 0)
    assert fails_anyhow(doubt, []) == pytest.approx(before, rel=0.5)
    fresh = proven()
    fresh.failed(2e6, 2e6, 0)
    fresh.failed(2e6, 2e6, 0)
    assert fails_anyhow(fresh, []) == 0.0


def test_where_requests_fail_anyhow_it_takes_more_failures_but_not_any_number() -> None:
    doubt, new, refused = proven(), Doubt(), proven()
    for failures in range(1, 6):
        doubt.failed(10.0, 10.0, 0, anyhow=0.5)
        assert doubt.out is (failures == 5)
    new.failed(10.0, 10.0, 0, anyhow=0.5)
    assert not new.out
    for _ in range(2):  # nobody there is no matter of chance
        refused.failed(10.0, 10.0, 0, refused=True, anyhow=0.5)
    assert refused.out
    assert refused.bad == 0.0


def test_one_that_is_out_comes_back_when_it_turns_out_that_all_fail_alike() -> None:
    doubt = Doubt()
    doubt.failed(10.0, 10.0, 0)
    assert doubt.out
    doubt.failed(20.0, 20.0, 0, anyhow=0.05)
    assert not doubt.out


def test_trials_say_nothing_of_those_in_use() -> None:
    doubt = Doubt()
    doubt.failed(0.0, 0.0, 0)
    was = doubt.bad, doubt.seen
    doubt.failed(10.0, 10.0, 0)
    doubt.answered(20.0, 20.0)
    assert (doubt.bad, doubt.seen) == was


def test_a_trial_is_due_after_some_time_and_requests_or_after_long() -> None:
    doubt = Doubt()
    doubt.failed(0.0, 0.0, 7)
    assert not doubt.is_due(TRIAL_FIRST_S - 0.1, 7 + TRIAL_SENT)
    assert not doubt.is_due(TRIAL_FIRST_S, 6 + TRIAL_SENT)
    assert doubt.is_due(TRIAL_FIRST_S, 7 + TRIAL_SENT)
    assert not doubt.is_due(TRIAL_LATE_S - 0.1, 8)
    assert doubt.is_due(TRIAL_LATE_S, 8)


def test_a_few_good_answers_in_a_row_bring_back_what_failed_often() -> None:
    doubt = Doubt()
    for now_s in (0.0, 1.0):
        doubt.failed(now_s, now_s, 0)
    doubt.answered(0.5, 1.5)  # older than the last failure
    assert doubt.now(1.5) > 1.9
    for _ in range(ROW - 1):
        doubt.answered(500.0, 500.0)
    assert doubt.out  # long ago, but too few
    assert doubt.count > 0.0
    assert doubt.is_due(500.0, 0)
    doubt.failed(600.0, 600.0, 0)
    for now_s in (700.0, 701.0, 702.0):
        assert doubt.out
        doubt.answered(now_s, now_s)
    assert not doubt.out
    assert doubt.now(702.0) <= BACK


def test_one_good_answer_is_enough_where_nobody_had_listened() -> None:
    doubt = Doubt()
    for now_s in (0.0, 0.0, 0.0, 0.5, 2.5, 4.5):
        doubt.failed(now_s, now_s, 0, refused=now_s > 0.0)
    assert doubt.trial_s == 6.5
    assert doubt.is_due(6.5, 0)
    doubt.answered(6.5, 7.0)
    assert not doubt.out


def lost(doubt: Doubt, now_s: float) -> bool:
    """Two requests are cut, and nothing else was there."""
    doubt.failed(now_s - 1.0, now_s, 0, cut=True, left=1)
    return doubt.failed(now_s - 1.0, now_s, 0, cut=True, left=0)


def test_one_that_is_gone_is_tried_by_time_alone_and_less_often_the_longer_it_lasts() -> None:
    doubt = proven()
    assert lost(doubt, 10.0)
    assert doubt.out
    assert not doubt.is_due(10.0 + GONE_FIRST_S - 0.1, 0)
    tried_s = [10.0]
    while len(tried_s) < 25:
        assert doubt.is_due(doubt.trial_s, 0)
        tried_s.append(doubt.trial_s)
        assert not doubt.failed(doubt.trial_s, doubt.trial_s, 0, cut=True, left=0)
    pauses = [later - sooner for sooner, later in pairwise(tried_s)]
    assert pauses[:4] == [GONE_FIRST_S, GONE_NEXT_S, GONE_NEXT_S, GONE_NEXT_S]
    assert all(later >= sooner for sooner, later in pairwise(pauses))
    assert pauses[13] == GONE_SHARE * (tried_s[12] - 10.0) > GONE_NEXT_S
    assert pauses[-1] == TRIAL_LAST_S
    doubt.answered(tried_s[-1] + 1.0, tried_s[-1] + 1.0)
    assert not doubt.out


def test_one_that_is_lost_again_soon_is_ill() -> None:
    doubt = proven()
    lost(doubt, 10.0)
    doubt.answered(20.0, 20.0)
    assert not doubt.out
    assert not lost(doubt, 30.0)
    assert doubt.out
    assert not doubt.is_due(30.0 + GONE_NEXT_S, 0)
    for _ in range(ROW):
        doubt.answered(200.0, 200.0)
    assert lost(doubt, 400.0)


def test_one_cut_alone_is_no_loss_of_all() -> None:
    doubt = proven()
    assert not doubt.failed(9.0, 10.0, 0, cut=True, left=3)
    assert not doubt.failed(19.0, 20.0, 0, left=0)
    assert doubt.out
    assert not doubt.is_due(20.0 + GONE_NEXT_S, 0)


def test_a_patient_router_takes_what_is_free_when_waiting_gains_nothing() -> None:
    play = Play({"fast": 8000.0, "slow": 6000.0}, patience=1.0)
    for _ in range(20):
        play.serve()
    play.router._lanes["unseen"] = Lane("unseen", 0.0)
    assert play.router.choose(Request("r", "m", 100), play.fleet[1:], play.now_s) is not None


def test_those_who_left_the_wait_are_forgotten() -> None:
    play = Play({"a": 1000.0})
    play.serve()
    play.router.order(waiting(1, 2, 3), play.fleet[0], 0.0)
    play.router.order([Request("x", "m"), Request("y", "m")], play.fleet[0], 100.0)
    assert list(play.router._wait._since_s) == ["x", "y"]


# --- bounds, and events that do not fit -------------------------------------------


def test_choices_that_never_start_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ASKED", 10)
    monkeypatch.setattr(bounded_wait, "MOST_KNOWN", 10)
    play = Play({"a": 1000.0})
    for _ in range(50):
        play.ask()
    assert len(play.router._asked) <= 10
    for number in range(50):
        play.router._wait.since_s(f"w{number}", 0.0)
    assert len(play.router._wait._since_s) <= 10


def test_starts_without_ends_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_FLIGHTS", 10)
    router = ExpectedTtft()
    for number in range(50):
        router.observe(Started(f"r{number}", "a", 0.0))
    assert len(router._flights) == router._lanes["a"].own == 10


def test_backends_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LANES", 10)
    router = ExpectedTtft()
    router.observe(Started("r", "stays", 0.0))
    for number in range(50):
        router.choose(Request("r", "m"), [Backend(f"b{number}", slots=2)], 0.0)
    assert len(router._lanes) <= 10
    assert "stays" in router._lanes


def test_a_second_start_ends_the_first() -> None:
    router = ExpectedTtft()
    router.observe(Started("r", "a", 0.0))
    router.observe(Started("r", "b", 1.0))
    assert [router._lanes[name].own for name in "ab"] == [0, 1]
    router.observe(FirstToken("r", "a", 1.0, 1.0))
    router.observe(FirstToken("r", "b", 1.5, 0.5))
    router.observe(FirstToken("r", "b", 1.6, 0.6))
    router.observe(Finished("r", "a", 2.0, True, "done", 1.0))
    router.observe(Finished("r", "b", 2.0, True, "done", 1.0, 100, 200, 10, 0.1))
    assert [router._lanes[name].own for name in "ab"] == [0, 0]


def test_reports_of_unknown_backends_are_passed_over() -> None:
    router = ExpectedTtft()
    router.observe(HealthChanged("nobody", 0.0, HealthReport(False, refused=True)))
    assert router._lanes == {}


@pytest.mark.parametrize(
    "options",
    [{"index_landmarks": 1}, {"output_price": -1}, {"stall_price": "x"}, {"patience": -1, "seed": 0.5}],
)
def test_wrong_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        builtins.expected_ttft.build(options)
    assert [fault.where for fault in caught.value.faults] == list(options)


# --- the line ---------------------------------------------------------------------


def test_a_line_follows_its_samples_and_forgets_old_ones() -> None:
    line = Line(100.0)
    for x in list(range(0, 200, 5)) * 3:
        line.add(float(x), 0.1 + 0.01 * x, 1.0)
    line.fit(1.0, 0.5)
    assert line.slope == pytest.approx(0.01, rel=0.1)
    for x in list(range(0, 200, 5)) * 20:
        line.add(float(x), 0.2 + 0.02 * x, 1.0)
    line.fit(1.0, 0.5)
    assert line.slope == pytest.approx(0.02, rel=0.1)
    assert line.base == pytest.approx(0.2, abs=0.1)


def test_one_sample_sets_the_level_of_a_guess_however_wrong() -> None:
    line = Line(100.0)
    line.add(50.0, 0.6, 0.2)
    line.fit(10.0, 1.0)
    assert line.base + 50.0 * line.slope == pytest.approx(0.6)


def test_samples_all_alike_do_not_tilt_a_line() -> None:
    line = Line(400.0)
    for _ in range(100):
        line.add(100.0, 1.0, 1.0)
    line.fit(0.03, 0.0003)
    assert line.base + 100.0 * line.slope == pytest.approx(1.0)
    assert line.base == pytest.approx(100.0 * line.slope)


def test_a_line_never_falls_below_nothing() -> None:
    line = Line(100.0)
    for x in range(50):
        line.add(float(x), 5.0 - 0.1 * x, 1.0)
    line.fit(0.1, 0.001)
    assert line.slope > 0.0
    assert line.base >= 0.0


def test_being_left_out_outweighs_any_cost() -> None:
    assert OUT_S > 1000.0
    assert len(PrefixIndex(10)) == 0


def test_a_copy_that_is_asked_shares_the_index_and_nothing_else() -> None:
    play = Play({"a": 1000.0, "b": 1000.0})
    copied = deepcopy(play.router)
    assert copied._index is play.router._index
    before = set(play.router._lanes)
    stranger = Backend("stranger", 1.0, 4)
    assert copied.choose(Request("x", "m", 10), [stranger], play.now_s) is not None
    assert set(play.router._lanes) == before
    assert "stranger" in copied._lanes


@pytest.mark.parametrize(("together", "least", "most"), [(True, 0.0, 0.3), (False, 0.9, 1.1)])
def test_how_much_of_the_reading_ahead_is_waited_for_is_learned(
    together: bool, least: float, most: float
) -> None:
    """Pairs of prompts of 500 tokens, read at once or one after the other."""
    play = Play({"a": 1000.0})
    for _ in range(20):
        play.serve()
    for _ in range(60):
        begun_s, ids = play.now_s, []
        for _ in range(2):
            play.ask()
            ids.append(f"r{play.count}")
            play.router.observe(Started(ids[-1], "a", begun_s))
        for place, id in enumerate(ids):
            play.now_s = begun_s + 0.01 + 0.5 * (1 if together else 1 + place)
            play.router.observe(FirstToken(id, "a", play.now_s, play.now_s - begun_s))
        for id in ids:
            play.router.observe(Finished(id, "a", play.now_s, True, "done", 1.0, 500, 0, 5, 0.5))
        play.now_s += 1.0
    assert least <= play.lane("a")._behind <= most
