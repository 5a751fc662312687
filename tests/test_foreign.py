"""Deferreds and answers of plugins that keep to no rule."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred, TimeoutError, fail, succeed
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from llmgw.foreign import at_most, set_aside
from llmgw.seldom import EVERY_S, Seldom


def outcome(waited: Deferred[Any]) -> Any:
    """What has become of it; ``None``: nothing yet."""
    found: list[Any] = []
    waited.addBoth(found.append)
    if not found:
        return None
    return found[0].type if isinstance(found[0], Failure) else found[0]


def test_what_is_set_aside_is_named_and_says_nothing_any_more() -> None:
    async def coroutine() -> None:
        pass

    def generator() -> Any:
        yield

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set_aside(fail(ZeroDivisionError())) == "a Deferred"
        assert "async def" in set_aside(coroutine())
        assert "yield" in set_aside(generator())
        assert set_aside(object()) == "object"
        gc.collect()  # the lost-error fixture sees what a Deferred would have said


def raising(waited: Deferred[Any]) -> None:
    raise ValueError("no cancelling here")


@pytest.mark.parametrize("canceller", [None, raising, lambda waited: waited.callback("taken back")])
def test_the_time_ends_whatever_the_canceller_does(canceller: Any) -> None:
    clock = Clock()
    waited: Deferred[Any] = Deferred(canceller)
    bounded = at_most(0.1, waited, clock)
    clock.advance(0.09)
    assert not bounded.called
    clock.advance(0.02)
    assert outcome(bounded) is TimeoutError
    if not waited.called:
        waited.callback("late")
    assert not clock.getDelayedCalls()


@pytest.mark.parametrize("canceller", [None, raising])
def test_so_does_being_cancelled(canceller: Any) -> None:
    clock = Clock()
    bounded = at_most(0.1, Deferred(canceller), clock)
    bounded.cancel()
    assert outcome(bounded) is CancelledError
    clock.advance(1.0)
    assert not clock.getDelayedCalls()


def test_who_cancels_itself_has_failed_and_nobody_else_was_cancelled() -> None:
    clock = Clock()
    assert outcome(at_most(0.1, fail(CancelledError()), clock)) is RuntimeError


def test_what_comes_in_time_is_passed_on() -> None:
    clock = Clock()
    assert outcome(at_most(0.1, succeed(3), clock)) == 3
    assert outcome(at_most(0.1, fail(KeyError("x")), clock)) is KeyError
    assert not clock.getDelayedCalls()


def test_each_kind_is_told_once_and_then_summed() -> None:
    now = [0.0]
    seldom = Seldom(lambda: now[0])
    assert [seldom.words("a") for _ in range(4)] == ["", None, None, None]
    assert seldom.words("b") == ""
    now[0] = EVERY_S
    assert seldom.words("a") == " (3 more since this was told last)"
    now[0] = 2 * EVERY_S
    assert (seldom.words("a"), seldom.words("b")) == ("", "")
