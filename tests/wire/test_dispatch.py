"""What the reactor's events run in: exceptions are logged, the reactor goes on."""

import pytest
from twisted.python import log

from llmgw.wire.dispatch import call_plainly, without_log_context


def test_the_result_and_the_arguments_pass():
    assert call_plainly(None, lambda a, *, b: a + b, 1, b=2) == 3


def test_an_exception_is_logged(expected_failures):
    assert call_plainly(None, lambda: 1 / 0) is None
    assert len(expected_failures(ZeroDivisionError)) == 1


def test_an_interrupt_is_not_swallowed():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_plainly(None, interrupt)


def test_it_takes_the_place_of_twisted_s_own(monkeypatch):
    monkeypatch.setattr(log, "callWithLogger", log.callWithLogger)
    without_log_context()
    assert log.callWithLogger is call_plainly
