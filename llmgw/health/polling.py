"""The schedule of all polling sources: check, report, wait, with jitter.

One check at a time, and none within two seconds of the last while the backend works: each
question delays the moment at which a llama-server notices closed requests. A backend that does
not work has no requests, so it is checked every second; and one that has just come up is
checked again as soon as possible, since it takes two good checks to be believed (``rise``).
Requests may learn before a check does that something has changed (:meth:`PollingSource.look_soon`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from twisted.internet import error
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.logger import Logger

from llmgw.errors import OUR_FAULTS, ConfigError, ConfigFault
from llmgw.plain_text import plain
from llmgw.values import HealthReport

if TYPE_CHECKING:
    from twisted.internet.interfaces import IDelayedCall, IReactorTime

    from llmgw.interfaces import IHealthTarget

LEAST_INTERVAL_S = 2.0
DOWN_INTERVAL_S = 1.0
JITTER = 0.2
DETAIL_CHARACTERS = 200


class PollingSource:
    """Base of the built-in sources: subclasses write :meth:`look`.

    :param interval_s: between two checks, spread by ±20 %, at least 2 s.
    :param timeout_s: for each question of a check.
    :param dice: for the spread.
    """

    log = Logger()

    def __init__(
        self, reactor: IReactorTime, interval_s: float, timeout_s: float, dice: random.Random | None = None
    ) -> None:
        self.interval_s = interval_s
        self.timeout_s = timeout_s
        self._reactor = reactor
        self._dice = dice or random.Random()
        self._up = True
        self._blind = False
        self._looked_s = float("-inf")
        self._next: IDelayedCall | None = None
        self._looking: Deferred[None] | None = None
        self._target: IHealthTarget | None = None
        self._report: Callable[[HealthReport], None] | None = None

    def start(self, target: IHealthTarget, report: Callable[[HealthReport], None]) -> None:
        """See :meth:`llmgw.interfaces.IHealthSource.start`."""
        self._target = target
        self._report = report
        self._begin()

    def stop(self) -> None:
        """See :meth:`llmgw.interfaces.IHealthSource.stop`."""
        self._target = self._report = None
        if self._next is not None:
            self._next.cancel()
            self._next = None
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()

    def look_soon(self) -> None:
        """The backend may have changed: look as soon as two seconds have passed since the last look."""
        if self._next is not None:
            soon_s = max(0.0, self._looked_s + LEAST_INTERVAL_S - self._reactor.seconds())
            if self._reactor.seconds() + soon_s < self._next.getTime():
                self._next.reset(soon_s)

    async def look(self) -> HealthReport:
        """One check. What it raises is turned into a report."""
        raise NotImplementedError

    async def ask(self, path: str) -> tuple[int, bytes]:
        """One question of a check: status and body.

        :raise CancelledError: the source was stopped meanwhile. Tested here, too, as a check may
            have mistaken the first cancelling for a failed question.
        """
        if self._target is None:
            raise CancelledError
        return await self._target.get(path, self.timeout_s)

    def _begin(self) -> None:
        self._next = None
        looking = Deferred.fromCoroutine(self._look_once())
        if not looking.called:
            self._looking = looking

    async def _look_once(self) -> None:
        try:
            report: HealthReport | None = await self.look()
        except Exception as fault:
            report = None if is_our_fault(fault) else unanswered(fault)
            why = str(fault)
        self._looking = None
        if self._report is None:
            return  # stopped
        self._looked_s = self._reactor.seconds()
        # Scheduled before the report, which may cause the gateway to stop us.
        self._next = self._reactor.callLater(self._wait_s(report), self._begin)
        if report is None:
            self._could_not_look(why)
            return
        self._blind = False
        try:
            self._report(report)
        except Exception:
            self.log.failure("taking in a health report")

    def _could_not_look(self, why: str) -> None:
        """Log it once; the backend stays as it was."""
        if not self._blind and self._target is not None:
            self._blind = True
            self.log.warn(
                "backend {backend}: cannot be looked at, for a lack of this machine's own: {why}",
                backend=self._target.id,
                why=one_line(why),
            )

    def _wait_s(self, report: HealthReport | None) -> float:
        if report is None:
            return LEAST_INTERVAL_S
        was_up, self._up = self._up, report.alive and not report.loading
        if not self._up:
            return DOWN_INTERVAL_S
        if not was_up:
            return LEAST_INTERVAL_S
        return max(LEAST_INTERVAL_S, self.interval_s * self._dice.uniform(1 - JITTER, 1 + JITTER))


def is_our_fault(fault: Exception) -> bool:
    """Whether this machine has no descriptor or local port left, so that nothing was asked."""
    return isinstance(fault, OSError) and fault.errno in OUR_FAULTS


def unanswered(fault: Exception) -> HealthReport:
    """The report of a check that got no answer."""
    if isinstance(fault, TimeoutError | error.TimeoutError):
        return HealthReport(alive=False, detail="no answer in time")
    if isinstance(fault, error.ConnectionRefusedError):
        return HealthReport(alive=False, refused=True, detail="nobody listens there (connection refused)")
    detail = one_line(str(fault)) or type(fault).__name__
    return HealthReport(alive=False, refused=isinstance(fault, error.ConnectError), detail=detail)


def one_line(text: str) -> str:
    """``text`` for a report's ``detail``: short, and without line ends or control characters."""
    return plain(" ".join(text.split()), DETAIL_CHARACTERS)


def timing(options: Mapping[str, Any], allowed: tuple[str, ...] = ()) -> tuple[float, float]:
    """``interval_s`` and ``timeout_s`` of an options table, checked.

    :param allowed: other keys of the table.
    :raise ConfigError: every fault of it.
    """
    known = ("interval_s", "timeout_s", *allowed)
    faults = [ConfigFault(key, "unknown key") for key in options if key not in known]
    found = {"interval_s": 5.0, "timeout_s": 2.0}
    for key, least in (("interval_s", LEAST_INTERVAL_S), ("timeout_s", 0.05)):
        value = options.get(key, found[key])
        if isinstance(value, bool) or not isinstance(value, int | float):
            faults.append(ConfigFault(key, f"must be a number of seconds, not {value!r}"))
        elif not least <= value <= 3600:
            faults.append(ConfigFault(key, f"must be from {least:g} to 3600, not {value!r}"))
        else:
            found[key] = float(value)
    if faults:
        raise ConfigError(faults)
    return found["interval_s"], found["timeout_s"]
