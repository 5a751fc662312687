"""``example-plain``: asks one path, and takes any answer below 400 for good health."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure
from zope.interface import implementer

from llmgw.errors import ConfigError, ConfigFault
from llmgw.interfaces import IHealthSource, IHealthSourceFactory, IHealthTarget
from llmgw.values import HealthReport

TIMEOUT_S = 2.0


@implementer(IHealthSource)
class PlainSource:
    """Looks, reports, waits, and looks again.

    The next look is arranged when the answer is there, so questions never pile up.
    """

    def __init__(self, path: str, interval_s: float, reactor: IReactorTime) -> None:
        self._path = path
        self._interval_s = interval_s
        self._reactor = reactor
        self._asking: Deferred[None] | None = None
        self._next: IDelayedCall | None = None
        self._stopped = False

    def start(self, target: IHealthTarget, report: Callable[[HealthReport], None]) -> None:
        """Look now, and then every ``interval_s``."""
        self._target = target
        self._report = report
        self._look()

    def stop(self) -> None:
        """Cancel whatever is under way; may be called from within a report."""
        self._stopped = True
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._asking is not None:
            self._asking.cancel()

    def _look(self) -> None:
        self._next = None
        asking = self._target.get(self._path, TIMEOUT_S)
        # Kept before the callbacks run: an answer may be there already.
        self._asking = asking.addCallbacks(self._answered, self._failed)

    def _answered(self, answer: tuple[int, bytes]) -> None:
        status, _ = answer
        if status < 400:
            self._tell(HealthReport(alive=True))
        else:
            # It answered, so it is not dead; 503 is what a loading server says.
            self._tell(HealthReport(alive=True, loading=status == 503, detail=f"status {status}"))

    def _failed(self, failure: Failure) -> None:
        if failure.check(CancelledError):
            return  # we were stopped
        refused = failure.check(ConnectError) is not None
        self._tell(HealthReport(alive=False, refused=refused, detail=type(failure.value).__name__))

    def _tell(self, report: HealthReport) -> None:
        self._asking = None
        self._report(report)
        if not self._stopped:
            self._next = self._reactor.callLater(self._interval_s, self._look)


@implementer(IHealthSourceFactory)
class PlainSourceFactory:
    """What the dropin holds an instance of."""

    name = "example-plain"
    description = "asks one path; any answer below 400 is good health"
    contract = 1

    def build(self, options: Mapping[str, Any], reactor: IReactorTime) -> PlainSource:
        """Options: ``path`` (default ``/health``) and ``interval_s`` (default 5, at least 2)."""
        faults = [ConfigFault(key, "unknown option") for key in options if key not in ("path", "interval_s")]
        path = options.get("path", "/health")
        if not isinstance(path, str) or not path.startswith("/"):
            faults.append(ConfigFault("path", f"does not begin with a slash: {path!r}"))
        interval_s = options.get("interval_s", 5.0)
        if isinstance(interval_s, bool) or not isinstance(interval_s, (int, float)) or not interval_s >= 2:
            faults.append(ConfigFault("interval_s", f"not a number of seconds from 2 up: {interval_s!r}"))
        if faults:
            raise ConfigError(faults)
        return PlainSource(path, float(interval_s), reactor)


plain = PlainSourceFactory()
