"""The fixtures of tests/lost_errors.py, tried on small test files."""

from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("lost_errors.py").read_text()

LOGGED = """
from twisted.logger import Logger
from twisted.python import log

def test_new():
    try:
        1 / 0
    except ZeroDivisionError:
        Logger().failure("on purpose")

def test_legacy():
    log.err(ValueError("on purpose"))
"""

UNHANDLED = """
from twisted.internet.defer import fail

def test_forgotten():
    fail(KeyError("nobody looked"))
"""

TIMER = """
def test_leaves_a_timer():
    from twisted.internet import reactor
    reactor.callLater(100, print)

def test_next():
    from twisted.internet import reactor
    assert not reactor.getDelayedCalls()
"""

EXPECTED = """
from twisted.internet.defer import fail
from twisted.python import log

def test_expected(expected_failures):
    fail(KeyError("nobody looked"))
    log.err(ValueError("on purpose"))
    assert len(expected_failures(KeyError)) == 1
    assert len(expected_failures()) == 1

def test_another_is_not(expected_failures):
    log.err(ValueError("on purpose"))
    assert not expected_failures(KeyError)
"""

TWISTED = """
import pytest_twisted
from twisted.internet.task import deferLater

@pytest_twisted.ensureDeferred
async def test_waits():
    from twisted.internet import reactor
    assert await deferLater(reactor, 0.001, lambda: 5) == 5

@pytest_twisted.ensureDeferred
async def test_fails():
    from twisted.internet import reactor
    assert await deferLater(reactor, 0.001, lambda: 5) == 6
"""


@pytest.mark.parametrize(
    ("source", "outcomes", "lines"),
    [
        (LOGGED, {"passed": 2, "errors": 2}, ["*ZeroDivisionError*", "*ValueError: on purpose*"]),
        (UNHANDLED, {"passed": 1, "errors": 1}, ["*KeyError*nobody looked*"]),
        (TIMER, {"passed": 2, "errors": 1}, ["*calls were left in the reactor*"]),
        (EXPECTED, {"passed": 2, "errors": 1}, ["*ValueError: on purpose*"]),
        (TWISTED, {"passed": 1, "failed": 1}, ["*assert 5 == 6*"]),
    ],
    ids=["logged", "unhandled", "timer", "expected", "pytest-twisted"],
)
def test_what_a_test_leaves_behind_is_told(
    pytester: pytest.Pytester, source: str, outcomes: dict[str, int], lines: list[str]
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(source)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines(lines)
