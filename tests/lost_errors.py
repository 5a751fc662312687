"""What every test lives under: no error is lost, no timer is left behind.

pytest-twisted notices neither (trial does), so an autouse fixture does. A test
that provokes logged failures on purpose takes them out::

    def test_it_logs(expected_failures):
        ...
        assert len(expected_failures(ZeroDivisionError)) == 1
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
from twisted.logger import ILogObserver, LogEvent, globalLogPublisher
from twisted.python.failure import Failure
from zope.interface import implementer


@implementer(ILogObserver)
class _LostErrors:
    """Failures that went to the log, in order."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []

    def __call__(self, event: LogEvent) -> None:
        # Legacy `log.err`, which Twisted itself still uses, has the second key.
        failure = event.get("log_failure") or event.get("failure")
        if failure is not None:
            self.failures.append(failure)

    def take(self, *types: type[BaseException]) -> list[Failure]:
        """Failures of ``types`` (any, without types) so far; they are expected now."""
        gc.collect()  # unhandled failures of Deferreds are told at collection
        taken = [failure for failure in self.failures if not types or failure.check(*types)]
        self.failures = [failure for failure in self.failures if failure not in taken]
        return taken


@pytest.fixture(scope="session", autouse=True)
def _quick_collections() -> None:
    """Take what was imported out of the collector's sight, so that one collection per test costs little."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _lost_errors() -> Iterator[_LostErrors]:
    from twisted.internet import reactor

    before = {id(call) for call in reactor.getDelayedCalls()}  # type: ignore[attr-defined]
    lost = _LostErrors()
    globalLogPublisher.addObserver(lost)
    try:
        yield lost
        left = lost.take()
    finally:
        globalLogPublisher.removeObserver(lost)
    calls = [call for call in reactor.getDelayedCalls() if id(call) not in before]  # type: ignore[attr-defined]
    for call in calls:
        call.cancel()  # the next test must not suffer
    if left:
        pytest.fail("failures were logged:\n" + "\n".join(failure.getTraceback() for failure in left))
    if calls:
        pytest.fail(f"calls were left in the reactor: {calls}")


@pytest.fixture
def expected_failures(_lost_errors: _LostErrors) -> Callable[..., list[Failure]]:
    """Take logged failures out, as trial's ``flushLoggedErrors``; returns them."""
    return _lost_errors.take
