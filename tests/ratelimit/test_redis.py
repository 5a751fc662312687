"""The limiter ``redis`` on a model of its script, under a clock of the test's own."""

from __future__ import annotations

from typing import Any, ClassVar

from lease_model import Model, ModelStore
from twisted.internet.task import Clock

from llmgw.ratelimit.redis import RedisRateLimiterFactory
from llmgw.testing.rate_limits import RateLimiterContract


class TestContract(RateLimiterContract):
    """The contract of all limiters."""

    factory = RedisRateLimiterFactory()
    options: ClassVar[dict[str, Any]] = {}

    def build(self, options: Any, clock: Clock) -> Any:
        limiter = super().build(options, clock)
        limiter.use_store(ModelStore(Model(clock.seconds), clock))
        return limiter

    def pass_time(self, clock: Clock, seconds: float) -> None:
        clock.pump([0.005] * int(seconds / 0.005) + [seconds % 0.005])
