"""The limiter ``redis`` on a real Redis, and in real gateways that share one."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import greenlet
import pytest
from fake_time import WallClock
from harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Gateway,
    Line,
    Received,
    Scripted,
    answer_completion,
    backend_table,
    chat_body,
    chunk,
    event,
    eventually,
    gateway_with,
    post,
)
from pytest_twisted import blockon, ensureDeferred
from redis_servers import RedisServer
from twisted.internet import reactor
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.task import Clock, deferLater
from twisted.python.failure import Failure

from llmgw.ratelimit.plugin import RedisRateLimiterFactory
from llmgw.ratelimit.redis import RedisRateLimiter
from llmgw.testing.rate_limits import RateLimiterContract
from llmgw.values import Cost, Decision, Policy, Usage

LIMITER = """
[rate_limiter]
plugin = "redis"
url = "{url}"
[drain]
lame_duck_s = 0.0
"""


def waiting(test: Callable[[Any], None]) -> Callable[[Any], Deferred[None]]:
    """A plain test that may :func:`wait` while the reactor runs on."""

    @functools.wraps(test)
    def run(self: Any) -> Deferred[None]:
        done: Deferred[None] = Deferred()

        def tell(outcome: Any) -> None:
            # In a turn of its own: whoever hears of it switches away and never comes back here.
            reactor.callLater(0, done.callback, outcome)  # type: ignore[attr-defined]

        greenlet.greenlet(lambda: maybeDeferred(test, self).addBoth(tell)).switch()
        return done

    return run


def wait(result: Deferred[Any]) -> Any:
    """The result of a Deferred, in a test that is :func:`waiting`."""
    here = greenlet.getcurrent()
    outcome: list[Any] = []

    def fired(value: Any) -> None:
        outcome.append(value)
        if greenlet.getcurrent() is not here:
            here.switch()

    result.addBoth(fired)
    if not outcome:
        assert here.parent is not None
        here.parent.switch()
    if isinstance(outcome[0], Failure):
        outcome[0].raiseException()
    return outcome[0]


class TestContract(RateLimiterContract):
    """The contract of all limiters, each test on an empty server."""

    factory = RedisRateLimiterFactory()
    options: ClassVar[dict[str, Any]] = {}
    limiters: list[RedisRateLimiter]

    @pytest.fixture(autouse=True)
    def _on_a_server(self, redis_server: RedisServer) -> Iterator[None]:
        self.redis = redis_server
        self.limiters = []
        yield
        for limiter in self.limiters:
            blockon(limiter.stop())
            if limiter.store is not None:
                blockon(limiter.store.close())

    def build(self, options: Any, clock: Clock) -> Any:
        # op_s: other work on this machine must not look like a lost store.
        limiter = self.factory.build({"url": self.redis.url, "op_s": 5.0, **options}, reactor)
        self.limiters.append(limiter)
        return limiter

    def start(self, limiter: Any, clock: Clock) -> None:
        self.redis.ask("FLUSHALL")
        limiter.store.start()
        end_s = time.monotonic() + 10
        while not limiter.store.up:
            assert time.monotonic() < end_s
            wait(deferLater(reactor, 0.005))  # type: ignore[arg-type]

    def result(self, answer: Decision | Deferred[Decision], clock: Clock) -> Decision:
        return answer if isinstance(answer, Decision) else wait(answer)  # type: ignore[no-any-return]

    def pass_time(self, clock: Clock, seconds: float) -> None:
        wait(deferLater(reactor, seconds + 0.02))  # type: ignore[arg-type]


for _name, _test in vars(RateLimiterContract).items():
    if _name.startswith("test_"):
        setattr(TestContract, _name, waiting(_test))


@pytest.fixture
def backend() -> Iterator[Scripted]:
    one = Scripted()
    yield one
    one.close()


@pytest.fixture
def gateways(tmp_path: Path, backend: Scripted) -> Iterator[Callable[..., list[Gateway]]]:
    """Starts gateways of one configuration before one backend."""
    running: list[Gateway] = []

    def start(count: int, config: str, environment: dict[str, str] | None = None) -> list[Gateway]:
        for _ in range(count):
            folder = tmp_path / f"g{len(running)}"
            folder.mkdir()
            table = backend_table(backend, more='models = ["m"]\nmax_connections = 100')
            text = config + '[log]\naccess = ""\n' + table
            running.append(Gateway(folder, text, environment=environment))
        return running[-count:]

    yield start
    for gateway in running:
        gateway.stop()
        assert "Traceback" not in gateway.log, gateway.log


def metric(gateway: Gateway, name: str) -> float:
    text = gateway.admin("/metrics")[1].decode()
    return next(float(line.split(" ")[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def test_gateways_share_one_limit(redis_server: RedisServer, gateways: Callable[..., list[Gateway]]) -> None:
    limit = "[[rate_limits]]\nrequests_per_minute = 6\nburst_s = 100\n"
    pair = gateways(2, LIMITER.format(url=redis_server.url) + limit)
    for gateway in pair:
        eventually(lambda gateway=gateway: gateway.state["store"]["up"])
    begun = time.monotonic()
    answers = [pair[number % 2].ask(post()) for number in range(16)]
    allowed = sum(answer.status == 200 for answer in answers)
    assert 10 <= allowed <= 10 + (time.monotonic() - begun) * 0.1 + 1e-6
    last = answers[-1]
    assert last.status == 429
    assert last.json["error"]["code"] == "rate_limit_exceeded"
    assert 0 < int(last.get("retry-after") or 0) <= 13
    assert last.get("x-ratelimit-limit-requests") == "6"
    assert last.get("x-ratelimit-remaining-requests") == "0"
    names = redis_server.ask("KEYS", "llmgw:rl:{*")
    assert len(names) == 1
    assert b"anonymous" not in names[0]
    assert names[0].endswith(b":limit-1:requests")
    assert [metric(gateway, "llmgw_limiter_gateways") for gateway in pair] == [2, 2]
    assert metric(pair[0], "llmgw_limiter_degraded") == 0
    # A Redis that is gone is no reason not to be ready, and no reason to fail.
    redis_server.kill()
    for gateway in pair:
        eventually(lambda gateway=gateway: not gateway.state["store"]["up"])
        assert gateway.admin("/readyz")[0] == 200
        assert gateway.ask(post()).status == 429
        assert metric(gateway, "llmgw_limiter_degraded") == 1
    redis_server.start()
    for gateway in pair:
        eventually(lambda gateway=gateway: metric(gateway, "llmgw_limiter_degraded") == 0)
        assert gateway.ask(post()).status == 429  # they remember


def test_s_red_4_gateways_of_unlike_clocks_keep_one_limit(
    redis_server: RedisServer, gateways: Callable[..., list[Gateway]], tmp_path: Path
) -> None:
    clock = WallClock(tmp_path)
    clock.set("+3")
    limit = "[[rate_limits]]\nrequests_per_minute = 60\nburst_s = 10\n"
    config = LIMITER.format(url=redis_server.url) + limit
    pair = gateways(1, config) + gateways(1, config, clock.environment)
    for gateway in pair:
        eventually(lambda gateway=gateway: gateway.state["store"]["up"])
    assert 2 < pair[1].state["at"] - pair[0].state["at"] < 5
    begun = time.monotonic()
    allowed = 0
    while time.monotonic() - begun < 2.0:
        allowed += sum(gateway.ask(post()).status == 200 for gateway in pair)
    assert 10 <= allowed <= 10 + (time.monotonic() - begun) + 1


def test_places_are_shared_and_come_back_from_the_dead(
    redis_server: RedisServer, gateways: Callable[..., list[Gateway]], backend: Scripted
) -> None:
    limit = "[[rate_limits]]\nconcurrent = 2\n"
    first, second = gateways(2, LIMITER.format(url=redis_server.url) + limit)
    for gateway in (first, second):
        eventually(lambda gateway=gateway: gateway.state["store"]["up"])
    backend.play(lambda line, request: line.wait_closed(30.0))
    held = [first.client(), second.client()]
    for client in held:
        client.send(post(body=chat_body(stream=True)))
    eventually(lambda: len(backend.requests) == 2)
    for gateway in (first, second):
        assert gateway.ask(post()).status == 429
    # The first one dies with its request; after five seconds its place is free.
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    third: list[int] = []

    def passes() -> bool:
        backend.play(lambda line, request: line.close())
        third.append(second.ask(post()).status)
        return third[-1] != 429

    begun = time.monotonic()
    eventually(passes, 15.0)
    assert time.monotonic() - begun >= 3.5
    for client in held:
        client.close()


def test_operators_see_what_is_left_of_each_limit_over_all_gateways(
    redis_server: RedisServer, gateways: Callable[..., list[Gateway]]
) -> None:
    limit = '[[rate_limits]]\nname = "all"\nscope = "global"\nrequests_per_minute = 60\nburst_s = 60\n'
    pair = gateways(2, LIMITER.format(url=redis_server.url) + limit)
    for gateway in pair:
        eventually(lambda gateway=gateway: gateway.state["store"]["up"])
    assert [pair[number % 2].ask(post()).status for number in range(10)] == [200] * 10

    def left(gateway: Gateway) -> int:
        (told,) = gateway.state["limits_used"]
        assert (told["policy"], told["key"], told["shared"]) == ("all", None, True)
        assert told["requests"]["limit"] == 60
        return int(told["requests"]["left"])

    # What the other one holds in advance counts as used.
    for gateway in pair:
        eventually(lambda gateway=gateway: left(gateway) <= 52)


@pytest.mark.parametrize("plugin", ["local", "redis"])
def test_a_long_stream_is_counted_while_it_runs(
    redis_server: RedisServer, gateways: Callable[..., list[Gateway]], backend: Scripted, plugin: str
) -> None:
    """It names no ``max_tokens``, so a guess is reserved, and the limit need not wait for its end."""
    limit = '[[rate_limits]]\nname = "all"\nscope = "global"\ntokens_per_minute = 6000\n'
    config = LIMITER.format(url=redis_server.url) if plugin == "redis" else ""
    pair = gateways(2 if plugin == "redis" else 1, config + limit)
    for gateway in pair:
        eventually(lambda gateway=gateway: (gateway.state["store"] or {"up": True})["up"])
    go_on = threading.Event()

    def play(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, *(chunk(event("a")) for _ in range(2000)))
        go_on.wait(30)
        line.send(chunk(b"data: [DONE]\n\n"), LAST_CHUNK)

    def left(gateway: Gateway) -> int:
        told = gateway.state["limits_used"]
        return int(told[0]["tokens"]["left"]) if told else 6000

    backend.play(play)
    with pair[0].client(30.0) as client:
        client.send(post(body=chat_body(stream=True)))
        try:
            eventually(lambda: left(pair[0]) <= 4400)
            if plugin == "redis":
                backend.play(answer_completion)
                assert pair[1].ask(post()).status == 200  # so that it asks for the limit, too
                eventually(lambda: left(pair[1]) <= 4400)
        finally:
            go_on.set()
        assert client.read_answer().status == 200


def test_a_closed_limit_and_one_that_only_counts(
    redis_server: RedisServer, gateways: Callable[..., list[Gateway]]
) -> None:
    limits = (
        '[[rate_limits]]\nname = "strict"\nrequests_per_minute = 600\non_redis_loss = "closed"\n'
        '[[rate_limits]]\nname = "shadow"\nrequests_per_minute = 1\nenforce = false\n'
    )
    config = LIMITER.format(url=redis_server.url) + limits
    (gateway,) = gateways(1, config)
    eventually(lambda: gateway.state["store"]["up"])
    assert [gateway.ask(post()).status for _ in range(3)] == [200] * 3
    assert metric(gateway, "llmgw_limiter_shadow_refused") == 2
    # A server that is full is as good as none, until it is not.
    redis_server.ask("CONFIG", "SET", "maxmemory", "1")
    eventually(lambda: gateway.ask(post()).status == 429 and metric(gateway, "llmgw_limiter_degraded") == 1)
    assert "OOM" in gateway.log
    redis_server.ask("CONFIG", "SET", "maxmemory", "0")
    eventually(lambda: metric(gateway, "llmgw_limiter_degraded") == 0)
    assert gateway.ask(post()).status == 200
    redis_server.kill()
    eventually(lambda: not gateway.state["store"]["up"])
    eventually(lambda: gateway.ask(post()).status == 429)


def test_without_a_store_it_is_a_fault_of_the_configuration(tmp_path: Path, backend: Scripted) -> None:
    with (
        pytest.raises(AssertionError, match=r"rate_limiter\.url: missing"),
        gateway_with(tmp_path, backend, config='[rate_limiter]\nplugin = "redis"\n'),
    ):
        pass


def test_options_are_checked() -> None:
    from llmgw.errors import ConfigError

    with pytest.raises(ConfigError) as refused:
        RedisRateLimiterFactory().build({"on_redis_loss": "maybe", "url": "http://x", "op": 1}, Clock())
    assert [fault.where for fault in refused.value.faults] == ["on_redis_loss", "url", "op"]


@ensureDeferred
async def test_a_limiter_that_stops_gives_back_what_it_holds(redis_server: RedisServer) -> None:
    limiter = RedisRateLimiterFactory().build({"url": redis_server.url, "op_s": 5.0}, reactor)
    store = limiter.store
    assert store is not None
    store.start()
    policy = Policy("p", requests_per_minute=60, burst_s=100, concurrent=50)
    while not store.up:
        await deferLater(reactor, 0.005)  # type: ignore[arg-type]
    for _ in range(20):
        answer = limiter.admit("k", [policy], Cost())
        decision = answer if isinstance(answer, Decision) else await answer
        limiter.settle(decision.reservation, Usage())
        await deferLater(reactor, 0.01)  # type: ignore[arg-type]
    await limiter.stop()
    await store.close()
    [name] = redis_server.ask("KEYS", "llmgw:rl:{*}:p:requests")
    level = float(redis_server.ask("GET", name).split()[0])
    assert level == pytest.approx(80, abs=2)  # 20 were used, and a little has come since
    assert redis_server.ask("KEYS", "llmgw:rl:{*}:p:concurrent") == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "flush", "stop", "kill gateway"])
def test_real_gateways_under_load(
    redis_server: RedisServer, gateways: Callable[..., list[Gateway]], fault: str
) -> None:
    """Three of them, hammered by twelve clients: 100 requests a second pass, and the bucket of 100."""
    limit = "[[rate_limits]]\nrequests_per_minute = 6000\nburst_s = 1.0\n"
    limit += "[timeouts]\nkeepalive_requests = 1000000\n"
    three = gateways(3, LIMITER.format(url=redis_server.url) + limit)
    for gateway in three:
        eventually(lambda gateway=gateway: gateway.state["store"]["up"])
    seconds = 8.0
    begun = time.monotonic()

    def hammer(gateway: Gateway) -> list[tuple[float, float]]:
        """When each that passed was sent and answered."""
        passed = []
        try:
            with gateway.client() as client:
                while (sent := time.monotonic()) < begun + seconds:
                    client.send(post())
                    if client.read_answer().status == 200:
                        passed.append((sent - begun, time.monotonic() - begun))
        except (OSError, AssertionError):
            assert fault == "kill gateway"
        return passed

    with ThreadPoolExecutor(13) as pool:
        clients = [pool.submit(hammer, gateway) for gateway in three for _ in range(4)]
        time.sleep(3.0)
        if fault == "flush":
            redis_server.ask("FLUSHALL")
        elif fault == "stop":
            redis_server.signal(signal.SIGSTOP)
            time.sleep(2.0)
            redis_server.signal(signal.SIGCONT)
        elif fault == "kill gateway":
            three[0].process.kill()
        passed = sorted(each for client in clients for each in client.result())
    # A window that holds the whole of some requests is no longer than from the first one
    # sent to the last one answered.
    extra = {"none": 0.0, "flush": 100.0, "stop": 10.0, "kill gateway": 0.0}[fault]
    answered = sorted(each for _, each in passed)
    took = answered[-1] - passed[0][0]
    assert len(passed) <= 100 + 100 * took + 10 + extra
    assert len(passed) >= (0.8 if fault == "stop" else 0.9) * (100 + 100 * seconds)
