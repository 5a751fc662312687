"""One gateway's part of a limit on requests under way that is shared."""

from __future__ import annotations

import pytest

from llmgw.core.concurrency_share import PAUSE_S, RENEW_S, ConcurrencyAsk, ConcurrencyShare


def places(limit: int = 20, running: int = 0, held: int = 0) -> ConcurrencyShare:
    """Some that have heard from the store at 0."""
    some = ConcurrencyShare(limit)
    some.running = running
    some.ask(0.0, 0, None, waiting=held)
    some.answered(0.0, held, "e")
    some.full_until_s = -1.0
    return some


def test_a_request_that_waits_is_asked_for() -> None:
    some = ConcurrencyShare(4)
    assert some.ask(0.0, 0, None) is None
    assert some.ask(0.0, 0, None, waiting=2) == ConcurrencyAsk(4, 0, 2)
    some.answered(0.1, 1, "e")
    assert some.held == 1
    assert some.full_until_s == pytest.approx(0.1 + PAUSE_S)


def test_places_in_advance_follow_the_arrivals() -> None:
    some = places(limit=40, running=3, held=3)
    some.started = 2
    assert some.ask(0.1, 1, "e") == ConcurrencyAsk(40, 3, 6)
    some.answered(0.1, 6, "e")
    some.started = 50
    assert some.ask(0.2, 2, "e") == ConcurrencyAsk(40, 3, 5)  # a tenth, for both of them
    some.answered(0.2, 5, "e")
    some.started = 9
    assert some.ask(0.3, 50, "e") == ConcurrencyAsk(40, 3, 3)  # too many of us for any


def test_what_is_free_goes_back_and_is_no_more_ours_whatever_happens() -> None:
    some = places(running=1, held=5)
    assert some.ask(0.1, 1, "e") == ConcurrencyAsk(20, 1, 1)
    assert some.held == 1
    some.failed()
    assert some.asked is None
    assert some.ask(0.1, 1, "e") is None


def test_a_full_limit_is_not_asked_again_and_again() -> None:
    some = places(running=3, held=3)
    some.started = 5
    some.full_until_s = 1.0
    assert some.ask(0.1, 1, "e") is None
    some.started = 5
    assert some.ask(0.1, 1, "e", waiting=1) is not None


def test_it_is_told_again_before_it_is_forgotten() -> None:
    some = places(running=2, held=2)
    assert some.ask(RENEW_S / 2, 1, "e") is None
    assert some.ask(RENEW_S, 1, "e") == ConcurrencyAsk(20, 2, 2)
    some.answered(RENEW_S, 2, "e")
    assert some.ask(RENEW_S + 0.1, 1, "e") is None
    # A store that has lost its memory hears it at once.
    assert some.ask(RENEW_S + 0.1, 1, "other") == ConcurrencyAsk(20, 2, 2)


def test_another_limit_after_a_reload() -> None:
    some = places(limit=20, running=3, held=5)
    some.resize(2)
    assert some.held == 2
    assert some.ask(0.1, 1, "e") == ConcurrencyAsk(2, 3, 3)


def test_alone() -> None:
    assert places(limit=20, held=3).alone(4) == 5
    assert places(limit=20, held=7).alone(4) == 7
    assert ConcurrencyShare(2).alone(4) == 1
    assert ConcurrencyShare(20).alone(0) == 20


def test_at_rest() -> None:
    some = places(running=1, held=1)
    assert not some.at_rest()
    some.running = 0
    assert not some.at_rest()
    some.ask(0.1, 1, "e")
    assert not some.at_rest()
    some.answered(0.1, 0, "e")
    assert some.at_rest()
