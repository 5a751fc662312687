"""One gateway's part of a bucket that is shared."""

from __future__ import annotations

from math import exp

import pytest

from llmgw.core.bucket_share import CHECK_S, IDLE_S, LOW, MEMORY_S, MIXED_IN, PAUSE_S, BucketAsk, BucketShare

RATE, BURST = 10.0, 100.0


def holding(held: float = 0.0, level: float = BURST, at_s: float = 0.0) -> BucketShare:
    """One that was asked for and has heard from the store at ``at_s``."""
    one = BucketShare(RATE, BURST, at_s - 10.0)
    one.ask(at_s - 10.0, 0, None, waiting=1.0)
    one.answered(at_s - 10.0, 0.0, level, 0.0, "e")
    one.last_use_s = at_s
    one.ask(at_s, 0, "e", waiting=held or 1.0)
    one.answered(at_s, held, level, 0.0, "e")
    one.dry_until_s = -1.0
    return one


def test_a_fresh_one_holds_nothing_and_asks() -> None:
    one = BucketShare(RATE, BURST, 5.0)
    assert one.held == 0
    assert one.refusal_s(1.0, False, 5.0) == 0
    assert one.left(9.0) == BURST
    assert one.ask(5.0, 2, None) is None
    assert one.at_rest(5.0)
    assert one.whole == 100


def test_the_first_call_takes_what_requests_wait_for_and_nothing_in_advance() -> None:
    one = BucketShare(RATE, BURST, 0.0)
    one.used = 3.0
    ask = one.ask(0.0, 0, None, waiting=3.0, head=1.0)
    assert ask == BucketAsk(RATE, BURST, 0.0, 3.0, 1.0, False, 0.0, BURST, False)
    one.answered(0.001, 3.0, 97.0, 0.6, "e")
    assert (one.held, one.level, one.epoch, one.asked) == (3.0, 97.0, "e", None)


@pytest.mark.parametrize(
    ("gateways", "used", "want"),
    [
        (1, 4.0, 6.0),  # 1.5 times the use
        (1, 0.4, 1.0),  # never less than one
        (2, 40.0, 5.0),  # a tenth of the bucket, for both of them together
        (10, 40.0, 1.0),
        (11, 40.0, None),  # less than one for each: nothing in advance
        (0, 40.0, None),  # nobody knows how many there are
    ],
)
def test_what_is_taken_in_advance(gateways: int, used: float, want: float | None) -> None:
    one = holding()
    one.used = used
    ask = one.ask(0.1, gateways, "e")
    assert (ask and ask.want) == want


def test_the_average_keeps_it_through_a_quiet_period() -> None:
    one = holding()
    for period in range(1, 20):
        one.used = 4.0
        if one.ask(period / 10, 1, "e") is not None:
            one.answered(period / 10, 0.0, 50.0, 1.0, "e")
            one.held = 0.0
    ask = one.ask(2.0, 1, "e")
    assert ask is not None
    assert 3.0 <= ask.want <= 6.0


def test_what_is_held_is_told_to_nobody_while_it_is_enough() -> None:
    one = holding(held=8.0)
    one.used = 4.0
    assert one.ask(0.1, 1, "e") is None
    assert one.low == pytest.approx(6 * LOW)
    one.held = 1.0
    one.used = 4.0
    ask = one.ask(0.2, 1, "e")
    assert ask is not None
    assert (ask.want, ask.delta) == (5.0, 0.0)


def test_what_is_too_much_goes_back_at_once_and_the_rest_when_nobody_asks() -> None:
    one = holding(held=30.0)
    one.used = 1.0
    ask = one.ask(0.1, 1, "e")
    assert ask is not None
    assert (ask.delta, one.held) == (20.0, 10.0)
    one.answered(0.1, 0.0, 90.0, 0.0, "e")
    assert one.ask(0.1 + IDLE_S - 0.01, 1, "e") is None
    assert not one.at_rest(0.1 + IDLE_S - 0.01)
    ask = one.ask(0.1 + IDLE_S, 1, "e")
    assert ask is not None
    assert (ask.delta, one.held) == (10.0, 0.0)
    assert not one.at_rest(0.1 + IDLE_S)
    one.answered(0.1 + IDLE_S, 0.0, 99.0, 0.0, "e")
    assert one.at_rest(0.1 + IDLE_S)
    assert not one.says_nothing(0.1 + IDLE_S)
    assert one.says_nothing(10.0)


def test_what_requests_wait_for_is_not_given_back() -> None:
    one = holding(held=3.0)
    ask = one.ask(0.1, 50, "e", waiting=5.0, head=4.0)
    assert ask is not None
    assert (ask.delta, ask.need, ask.head) == (0.0, 2.0, 1.0)
    one.failed(sent=False)
    assert one.ask(0.1, 50, "e", waiting=2.0, head=2.0) is not None  # the third is too much
    assert one.held == 2.0


def test_debts_are_paid_with_the_next_call() -> None:
    one = holding()
    one.held = -7.0
    ask = one.ask(0.1, 1, "e", taking=False)
    assert ask is not None
    assert (ask.delta, ask.want, one.held) == (-7.0, 0.0, 0.0)
    one.held -= 2.0  # meanwhile
    one.answered(0.1, 0.0, 50.0, 0.0, "e")
    assert one.held == -2.0


def test_doubts_are_settled_against_the_caller() -> None:
    one = holding()
    one.held = -7.0
    one.ask(0.1, 1, "e")
    one.failed(sent=True)  # perhaps it was paid: pay it again
    assert one.held == -7.0
    one.ask(0.1, 1, "e")
    one.failed(sent=False)
    assert one.held == -7.0

    one = holding(held=30.0)
    one.ask(0.1, 1, "e")
    one.failed(sent=True)  # perhaps it was given back: it is gone
    assert one.held == 10.0
    one = holding(held=30.0)
    one.ask(0.1, 1, "e")
    one.failed(sent=False)
    assert one.held == 30.0


def test_an_answer_is_believed_for_a_while() -> None:
    one = holding(level=-5.0)
    assert one.refusal_s(1.0, False, 0.1) == pytest.approx(0.5)
    assert one.refusal_s(1.0, False, 0.7) == 0  # it should be there by now
    assert one.refusal_s(50.0, False, 0.7) == pytest.approx(4.8)
    assert one.refusal_s(50.0, False, CHECK_S) == 0  # others may have given back
    # More than the whole bucket waits for nothing but the debt.
    assert one.refusal_s(100.0, True, 0.1) == pytest.approx(0.4, abs=1e-3)
    assert one.refusal_s(100.0, True, 0.6) == 0


def test_a_dry_bucket_that_fills_quickly_is_asked_now_and_then() -> None:
    quick = BucketShare(1000.0, 1000.0, 0.0)
    quick.ask(0.0, 1, None, waiting=5.0, head=5.0)
    quick.answered(0.0, 0.0, 3.0, 1.0, "e")
    assert quick.refusal_s(1.0, False, 0.01) == pytest.approx(PAUSE_S - 0.01)
    assert quick.refusal_s(1.0, False, PAUSE_S) == 0
    # One that fills slowly tells by itself when it is time.
    slow = BucketShare(RATE, BURST, 0.0)
    slow.ask(0.0, 1, None, waiting=5.0, head=5.0)
    slow.answered(0.0, 0.0, 3.0, 1.0, "e")
    assert slow.refusal_s(1.0, False, 0.01) == 0


def test_nothing_is_taken_in_advance_from_a_dry_bucket() -> None:
    one = holding(level=0.0)
    one.used = 5.0
    assert one.ask(0.06, 1, "e") is None
    assert one.low == 0.0
    one.used = 5.0
    ask = one.ask(0.15, 1, "e")
    assert ask is not None
    assert one.low > 0
    one.answered(0.15, 0.0, 0.0, 1.0, "e")
    assert one.low == 0.0


def test_a_lost_memory_is_told_what_we_remember() -> None:
    one = holding(level=40.0)
    ask = one.ask(1.0, 1, "other")
    assert ask is not None
    assert (ask.hint, ask.stale) == (50.0, True)
    one.answered(1.0, 0.0, 50.0, 0.0, "other")
    one.last_use_s = -IDLE_S
    assert one.ask(1.1, 1, "other") is None


def test_alone_it_spends_what_it_holds_and_then_its_part_of_the_rate() -> None:
    one = holding(held=2.0, level=0.0)
    one.ask(0.0, 2, "e", waiting=4.0)
    one.answered(0.0, 0.0, 0.0, 1.6, "e")  # ours was 2/5 a second of these 1.6
    assert one.alone_s(1.0, 0.0, 2) == 0
    one.take_alone(1.0, 0.0, 2)
    one.take_alone(1.0, 0.0, 2)
    assert one.held == 0
    part = MIXED_IN / 2 + (1 - MIXED_IN) * 0.25
    assert one.alone_s(1.0, 0.0, 2) == pytest.approx(1 / (RATE * part), rel=1e-3)
    assert one.alone_s(1.0, 1.0, 2) == 0
    one.take_alone(1.0, 1.0, 2)
    assert one.held == -1
    # It keeps no more than its part of a tenth of the bucket.
    taken = 0
    while one.alone_s(1.0, 99.0, 2) == 0:
        one.take_alone(1.0, 99.0, 2)
        taken += 1
    assert taken == int(BURST * 0.1 * part)
    # What comes back may be spent again.
    one.give_back(1.0)
    assert one.alone_s(1.0, 99.0, 2) == 0
    # The next answer begins anew.
    one.ask(99.0, 2, "e")
    one.answered(99.0, 0.0, 0.0, 1.0, "e")
    assert one.alone_s(1.0, 99.0, 2) > 0
    one.give_back(1.0)
    assert one.alone_s(1.0, 99.0, 2) == 0


def test_parts_are_even_until_they_mean_something() -> None:
    one = BucketShare(RATE, BURST, 0.0)
    for second, part in ((0.0, 0.25), (0.5, 0.25 + 0.4 * 0.75), (1.0, 0.25 + 0.8 * 0.75)):
        one.ask(second, 4, "e", waiting=6.0)
        one.answered(second, 6.0, 0.0, 1.2, "e")  # all that was ever taken was ours
        one.held = 0.0
        assert one.alone_s(1.0, second, 4) == pytest.approx(1 / (RATE * part), rel=1e-3)
    # A store that has lost its memory counts anew, and so do we.
    one.ask(1.5, 4, "other", waiting=6.0)
    one.answered(1.5, 0.0, 0.0, 1.0, "other")
    assert one.alone_s(1.0, 1.5, 4) == pytest.approx(1 / (RATE * 0.25), rel=1e-3)


def test_who_asked_long_ago_has_lost_of_its_part() -> None:
    one = holding(held=5.0)
    one.ask(0.0, 2, "e", waiting=6.0)
    one.answered(0.0, 0.0, 0.0, 1.0, "e")  # all of it was ours
    one.held = 0.0
    part = MIXED_IN / 2 + (1 - MIXED_IN) * exp(-10.0 / MEMORY_S)
    most = max(1.0, BURST * 0.1 * part)
    one.alone_s(most, 10.0, 2)
    one.take_alone(most, 10.0, 2)
    assert one.alone_s(1.0, 10.0, 2) == pytest.approx(1 / (RATE * part), rel=1e-3)


def test_alone_from_the_begin() -> None:
    # Nobody was ever heard of: the whole bucket is ours.
    one = BucketShare(RATE, BURST, 0.0)
    assert one.alone_s(BURST, 0.0, 0) == 0
    # A limit that is new while the store is away: our part of a tenth.
    one = BucketShare(RATE, BURST, 0.0)
    assert one.alone_s(2.5, 0.0, 4) == 0
    assert one.alone_s(2.6, 0.0, 4) == 0  # more than it can hold, and nothing is owed
    one.take_alone(2.6, 0.0, 4)
    assert one.alone_s(2.6, 0.0, 4) == pytest.approx(0.1 / 2.5, rel=1e-3)


def test_other_figures_after_a_reload() -> None:
    one = holding(held=30.0, level=90.0)
    one.resize(1.0, 10.5)
    assert (one.level, one.whole, one.burst) == (10.5, 10, 10.5)
    ask = one.ask(0.1, 1, "e")
    assert ask is not None
    assert (ask.rate_per_s, ask.burst, ask.delta) == (1.0, 10.5, 29.0)
