"""Small fleets for tests, and words to ask them with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from llmgw.core.breaker import BreakerRules
from llmgw.core.fleet import BackendSpec, Fleet
from llmgw.errors import (
    GatewayError,
)
from llmgw.values import HealthReport, Request

ALIVE = HealthReport(alive=True)
REFUSED = HealthReport(alive=False, refused=True)
TIMEOUT = HealthReport(alive=False)
LOADING = HealthReport(alive=True, loading=True)


def request(model: str = "m", prompt_tokens: int = 10) -> Request:
    return Request(id="r", model=model, prompt_tokens=prompt_tokens)


def fleet(count: int = 3, **spec: Any) -> Fleet:
    """Backends ``b0`` … that serve ``m``, put at time 0."""
    subject = Fleet(BreakerRules(jitter=0.0), random.Random(1))
    spec = {"models": ("m",), **spec}
    for number in range(count):
        subject.put(BackendSpec(f"b{number}", f"http://10.0.0.{number}:8080", **spec), 0.0)
    return subject


def ids(subject: Fleet, now_s: float = 0.0, ask: Request | None = None, **how: Any) -> list[str]:
    return sorted(each.id for each in subject.candidates(ask or request(), now_s, **how))


def refusal(subject: Fleet, now_s: float = 0.0, ask: Request | None = None, **how: Any) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        subject.candidates(ask or request(), now_s, **how)
    assert "10.0.0" not in str(caught.value)
    return caught.value


def fail(subject: Fleet, backend_id: str, now_s: float = 0.0, times: int = 5, **how: Any) -> None:
    for _ in range(times):
        subject.lease(backend_id, request(), now_s).finish(now_s, False, "reset", **how)


def report(
    subject: Fleet, backend_id: str, what: HealthReport | Sequence[HealthReport], now_s: float = 0.0
) -> None:
    for each in [what] if isinstance(what, HealthReport) else what:
        subject.report(backend_id, each, now_s)
