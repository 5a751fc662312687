"""What a failed connect is called, and that a cancelled one is nobody's failure."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from twisted.internet import error
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from llmgw.core.http import HeadLimits
from llmgw.wire.pool import Pool
from llmgw.wire.sink import UpstreamFault
from llmgw.wire.sweep import Sweep


class Endpoint:
    """Connects when the test says so; cancelled, it answers as ``HostnameEndpoint`` does."""

    def __init__(self) -> None:
        self.connecting: Deferred[Any] = Deferred(
            lambda waiting: waiting.errback(error.ConnectingCancelledError("b0:8080"))  # type: ignore[arg-type]
        )

    def connect(self, _: object) -> Deferred[Any]:
        return self.connecting


def connect(endpoint: Endpoint) -> Deferred[Any]:
    clock = Clock()
    pool = Pool(
        lambda: endpoint,  # type: ignore[arg-type, return-value]
        reactor=clock,
        tls=False,
        sweep=Sweep(clock, clock.seconds),
        outbox=None,  # type: ignore[arg-type]
        head_limits=HeadLimits(),
        connect_s=2.0,
        idle_s=4.0,
        close_grace_s=5.0,
    )
    return pool.connect()


def outcome(connecting: Deferred[Any]) -> BaseException:
    seen: list[Failure] = []
    connecting.addErrback(seen.append)
    return seen[0].value


def test_a_cancelled_connect_is_no_fault_of_the_backend() -> None:
    connecting = connect(Endpoint())
    connecting.cancel()
    assert isinstance(outcome(connecting), CancelledError)


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (error.ConnectionRefusedError(), "refused"),
        (error.NoRouteError(), "refused"),
        (error.TimeoutError(), "timeout_connect"),
        (error.DNSLookupError(), "dns"),
        (error.ConnectError(osError=errno.EMFILE), "local"),
        (error.ConnectError(osError=errno.EADDRNOTAVAIL), "local"),
        (error.ConnectError(), "connect"),
        (ValueError("odd"), "connect"),
    ],
)
def test_a_failed_connect_has_a_reason(raised: Exception, reason: str) -> None:
    endpoint = Endpoint()
    connecting = connect(endpoint)
    endpoint.connecting.errback(raised)
    fault = outcome(connecting)
    assert isinstance(fault, UpstreamFault)
    assert fault.reason == reason
