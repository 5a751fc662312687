"""Backends from plain values, for router tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from llmgw.values import Backend, Choice, Profile, Request

ASK = Request(id="r", model="m", prompt_tokens=10)


def backend(name: str, weight: float = 1.0, **profile: Any) -> Backend:
    return Backend(name, weight=weight, profile=Profile(**profile))


def pick(router: Any, candidates: Sequence[Backend], now_s: float = 0.0) -> str:
    """The id that ``router`` chooses."""
    answer = router.choose(ASK, candidates, now_s)
    return answer.backend.id if isinstance(answer, Choice) else answer.id


def picks(router: Any, candidates: Sequence[Backend], times: int) -> Counter[str]:
    return Counter(pick(router, candidates) for _ in range(times))


def serve(router: Any, candidates: Sequence[Backend], times: int) -> Counter[str]:
    """As :func:`picks`, with every request staying in flight."""
    counts: Counter[str] = Counter()
    for _ in range(times):
        name = pick(router, candidates)
        counts[name] += 1
        next(each for each in candidates if each.id == name).profile.in_flight += 1
    return counts
