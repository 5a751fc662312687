"""Ten minutes of the fleet in samples of five seconds."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.task import Clock

from llmgw.admin.history import EVERY_S, MOST, History
from llmgw.admin.metrics import Metrics
from llmgw.values import Usage


class Past:
    """A history over real metrics."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.metrics = Metrics(list, dict)
        self.history = History(
            self.metrics.traffic, lambda: {"in_flight": 3, "waiting": 1}, self.clock.seconds, self.clock
        )

    def request(self, backend: str | None = "b0", status: int = 200, ttft_s: float | None = 0.2) -> None:
        used = Usage(prompt_tokens=9, output_tokens=5)
        self.metrics.request("/v1/chat/completions", "m", backend, status, 1.0, ttft_s, 0.001, used)

    def sample(self) -> dict[str, Any]:
        before = self.history.total
        self.clock.advance(EVERY_S)
        (found,) = self.history.since(before)
        return found


@pytest.fixture
def past() -> Any:
    past = Past()
    past.request()  # from before the start: nobody's affair
    past.history.start()
    yield past
    past.history.stop()
    assert not past.clock.getDelayedCalls()


def test_a_sample_tells_what_came_since_the_last_one(past: Past) -> None:
    past.request(ttft_s=0.1)
    past.request(ttft_s=0.3)
    past.request("b1", ttft_s=None, status=502)
    past.request(None, status=503, ttft_s=None)
    past.metrics.rejected("overloaded")
    assert past.sample() == {
        "at": 5.0,
        "every_s": 5.0,
        "requests": 4,
        "errors": 2,
        "rejected": {"overloaded": 1},
        "output_tokens": 20,
        "in_flight": 3,
        "waiting": 1,
        "backends": {"b0": {"requests": 2, "ttft_s": 0.2}, "b1": {"requests": 1}},
    }
    quiet = past.sample()
    assert (quiet["requests"], quiet["rejected"], quiet["backends"]) == (0, {}, {})


def test_ten_minutes_are_kept(past: Past) -> None:
    for _ in range(MOST + 5):
        past.sample()
    assert past.history.total == MOST + 5
    kept = past.history.since(0)
    assert len(kept) == MOST
    assert kept[-1]["at"] == (MOST + 5) * EVERY_S
    assert past.history.since(past.history.total) == []
    assert past.history.since(past.history.total - 2) == kept[-2:]


def test_a_sample_that_fails_is_logged_and_the_next_one_comes(past: Past, expected_failures: Any) -> None:
    load = past.history._load
    past.history._load = lambda: {}[0]
    past.clock.advance(EVERY_S)
    assert len(expected_failures(KeyError)) == 1
    past.history._load = load
    assert past.sample()["requests"] == 0


def test_traffic_sums_what_is_counted_by_labels() -> None:
    past = Past()
    past.request()
    past.request("b0", status=500, ttft_s=None)
    past.request("b1")
    past.request(None, status=404, ttft_s=None)
    past.metrics.retried("upstream_error")
    past.metrics.client_abort()
    traffic = past.metrics.traffic()
    assert (traffic.requests, traffic.errors, traffic.output_tokens) == (4, 1, 20)
    assert (traffic.retries, traffic.client_aborts) == (1, 1)
    first = traffic.backends["b0"]
    assert (first.requests, first.errors, first.ttft_count) == (2, 1, 1)
    assert set(traffic.backends) == {"b0", "b1"}
