"""Many clients, more models than fit, two instances, two gateways: one load for each model at a time."""

from __future__ import annotations

import functools
import random
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness import Answer, Gateway, chat_body, eventually, post
from real_etcd import Etcd
from redis_servers import RedisServer
from router_brain import RouterBrain, RouterServer

from .scenes import Crowd, closing, gateway_before, held, metrics, states, statuses

MODELS = ("a", "b", "c")


class Watched:
    """Loads of all servers, and that never two of one model were under way together.

    :ivar doubled: models that were.
    """

    def __init__(self, *brains: RouterBrain) -> None:
        self.brains = brains
        self.doubled: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(0.005):
            for model in self.brains[0].models:
                if sum(brain.state(model) == "loading" for brain in self.brains) > 1:
                    self.doubled.add(model)

    def stop(self, gateways: int = 1) -> None:
        """:param gateways: each counts the slots for itself."""
        self._end.set()
        self._thread.join()
        assert not self.doubled
        for brain in self.brains:
            assert not brain.evicted, "a server had to choose for itself"
            assert max(brain.most_busy.values()) <= brain.slots * gateways, "more than its slots"

    @property
    def loads(self) -> list[str]:
        return [model for brain in self.brains for model in brain.loads]


def two_servers(most: int = 1, load_s: float = 0.3) -> tuple[RouterServer, RouterServer]:
    first, second = (RouterServer(RouterBrain(*MODELS, most=most, load_s=load_s), serve_s=0.02) for _ in "12")
    return first, second


def is_ready(gateway: Gateway) -> bool:
    """It knows the models of all its backends, and has its store if it is to have one."""
    return (gateway.state["store"] or {"up": True})["up"] and knows_models(gateway)


def all_ready(*gateways: Gateway) -> None:
    """Wait until they are."""
    for gateway in gateways:
        eventually(functools.partial(is_ready, gateway))


def two_gateways(stack: ExitStack, folder: Path, *servers: RouterServer, **options: Any) -> list[Gateway]:
    """Both before the same servers and ready, until ``stack`` ends.

    :param options: of ``gateway_before``.
    """
    found = [
        stack.enter_context(gateway_before(folder / name, *servers, **options)) for name in ("one", "two")
    ]
    all_ready(*found)
    return found


def test_fifty_clients_three_cold_models_two_instances_of_one_model_each(tmp_path: Path) -> None:
    servers = two_servers()
    watched = Watched(*(server.brain for server in servers))
    with closing(*servers), gateway_before(tmp_path, *servers, min_stay_s=1.0) as gateway:
        eventually(lambda: states(gateway) and states(gateway, "b1"))
        crowd = Crowd()
        asked = [crowd.ask(gateway, MODELS[number % 3]) for number in range(50)]
        assert statuses(asked) == {200: 50}
        watched.stop()
        served = {model: sum(brain.served[model] for brain in watched.brains) for model in MODELS}
        assert served == {"a": 17, "b": 17, "c": 16}
        assert len(watched.loads) == 3, "once each"
        told = metrics(gateway)
        assert sum(value for name, value in told.items() if name.startswith("llmgw_held_total")) == 50


def test_whatever_clients_and_loads_do_nobody_waits_for_ever_and_nothing_is_left(tmp_path: Path) -> None:
    """Some leave, one model is slow, one broken, and an instance is killed in the middle of it."""
    dice = random.Random(7)
    servers = two_servers()
    for server in servers:
        server.brain.load_s = {"a": 0.3, "b": 1.2, "c": 0.2}
        server.brain.broken = {"c"}
    watched = Watched(*(server.brain for server in servers))
    hold = "min_s = 3.0\nmax_s = 6.0"
    with closing(*servers), gateway_before(tmp_path, *servers, min_stay_s=0.5, hold=hold) as gateway:
        eventually(lambda: states(gateway) and states(gateway, "b1"))

        def client(number: int) -> int:
            """:return: the status, 0 for one that left."""
            patience_s = dice.choice((0.1, 0.7, 30.0, 30.0, 30.0))
            with gateway.client(patience_s) as client:
                client.send(post(body=chat_body(MODELS[number % 3])))
                try:
                    return client.read_answer().status
                except TimeoutError:
                    assert patience_s < 30.0, "it waited for ever"
                    return 0

        with ThreadPoolExecutor(50) as pool:
            asked = [pool.submit(client, number) for number in range(50)]
            eventually(lambda: watched.loads)
            time.sleep(0.4)
            servers[1].close()
            for line in list(servers[1].open_lines):
                line.reset()
            found = [each.result(60) for each in asked]
        assert set(found) <= {0, 200, 502, 503}
        assert found.count(200) >= 10
        eventually(gateway.is_idle)
        assert gateway.state["holding"] == {}
        assert not watched.doubled
        watched._end.set()


def test_two_gateways_that_share_a_store_load_once(tmp_path: Path, redis_server: RedisServer) -> None:
    servers = two_servers(most=2)
    watched = Watched(*(server.brain for server in servers))
    config = f'[store]\nurl = "{redis_server.url}"\n'
    with ExitStack() as stack:
        stack.enter_context(closing(*servers))
        gateways = two_gateways(stack, tmp_path, *servers, min_stay_s=1.0, config=config)
        crowd = Crowd()
        asked = [crowd.ask(gateways[number % 2], MODELS[number % 3]) for number in range(36)]
        assert statuses(asked) == {200: 36}
        watched.stop(gateways=2)
        assert sorted(watched.loads) == ["a", "b", "c"]
        eventually(lambda: not redis_server.ask("KEYS", "llmgw:load:lock:*"))


def test_a_failure_that_one_gateway_met_reaches_those_who_wait_at_the_other(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    server = RouterServer(RouterBrain("m", load_s=1.0, broken=["m"]))
    config = f'[store]\nurl = "{redis_server.url}"\n'
    with ExitStack() as stack:
        stack.enter_context(closing(server))
        gateways = two_gateways(stack, tmp_path, server, config=config)
        crowd = Crowd()
        asked = [crowd.ask(gateway, "m") for gateway in gateways for _ in range(3)]
        for each in asked:
            answer = each.result(30)
            assert answer.status == 503
            assert "exit code 1" in answer.json["error"]["message"]
        assert server.brain.loads == ["m"]


def sharing(what: str, request: pytest.FixtureRequest) -> str:
    """A configuration whose gateways share a store, or an etcd."""
    if what == "store":
        return f'[store]\nurl = "{request.getfixturevalue("redis_server").url}"\n'
    return f'[[discovery]]\nplugin = "etcd"\nendpoints = ["{request.getfixturevalue("etcd").url}"]\n'


@pytest.mark.parametrize("shared", ["store", "etcd"])
def test_what_one_gateway_lets_run_out_gets_nothing_new_from_the_other(
    tmp_path: Path, request: pytest.FixtureRequest, shared: str
) -> None:
    server = RouterServer(RouterBrain("m", "n", most=1, load_s=0.2))
    config = sharing(shared, request)
    with ExitStack() as stack:
        stack.enter_context(closing(server))
        first, second = two_gateways(stack, tmp_path, server, config=config, min_stay_s=0.5)
        crowd = Crowd()
        server.held.clear()
        working = crowd.ask(second, "m")
        eventually(lambda: server.brain.busy["m"])
        wanted = crowd.ask(first, "n")
        eventually(lambda: states(second)["m"] == "leaving")
        late = crowd.ask(second, "m")
        eventually(lambda: held(second))
        assert server.brain.busy["m"] == 1
        server.held.set()
        assert [each.result(30).status for each in (working, wanted, late)] == [200] * 3
        assert server.brain.loads == ["m", "n", "m"]


@pytest.mark.parametrize("shared", ["store", "etcd"])
def test_failures_at_each_instance_are_known_to_a_gateway_that_comes_later(
    tmp_path: Path, request: pytest.FixtureRequest, shared: str
) -> None:
    """It tries none of them again, until the operator says so."""
    servers = two_servers()
    for server in servers:
        server.brain.broken = {"c"}
    config = sharing(shared, request)
    with ExitStack() as stack:
        stack.enter_context(closing(*servers))
        first, second = two_gateways(stack, tmp_path, *servers, config=config, backoff_s=60.0)
        loads = [server.brain.loads for server in servers]
        for gateway in (first, second):
            answer = gateway.ask(post(body=chat_body("c")))
            assert answer.status == 503
            assert "exit code 1" in answer.json["error"]["message"]
            assert loads == [["c"], ["c"]]
        for server in servers:
            server.brain.broken, server.brain.load_s = set(), 30.0
        assert second.admin("/api/models/c/load", "POST")[0] == 202
        eventually(lambda: ["c", "c"] in loads)
        crowd = Crowd()

        def is_held() -> bool:
            """The other gateway refuses it no more."""
            asked.append(crowd.ask(first, "c"))
            return held(first, "c") > 0

        asked: list[Future[Answer]] = []
        eventually(is_held)
        for server in servers:
            server.brain.end_loads()
        assert statuses(asked)[200] > 0
        assert sorted(loads) == [["c"], ["c", "c"]]


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["store", "etcd"])
def test_the_lock_of_a_gateway_that_died_passes_on(
    tmp_path: Path, request: pytest.FixtureRequest, shared: str
) -> None:
    """It is killed while it lets a busy model run out, with both locks in its hands."""
    server = RouterServer(RouterBrain("m", "n", most=1, load_s=0.2))
    config = sharing(shared, request)

    def locks() -> int:
        if shared == "etcd":
            return len(request.getfixturevalue("etcd").keys("/llmgw-load/lock/"))
        return len(request.getfixturevalue("redis_server").ask("KEYS", "llmgw:load:lock:*"))

    with ExitStack() as stack:
        stack.enter_context(closing(server))
        first, second = two_gateways(stack, tmp_path, server, config=config, hold="min_s = 40.0")
        crowd = Crowd()
        server.held.clear()
        working = crowd.ask(second, "m")
        eventually(lambda: server.brain.busy["m"])
        doomed = crowd.ask(first, "n")
        eventually(lambda: locks() == 2)
        waiting = crowd.ask(second, "n")
        eventually(lambda: held(second, "n"))
        first.process.kill()
        server.held.set()
        assert working.result(20).status == 200
        assert waiting.result(40).status == 200
        assert server.brain.loads == ["m", "n"]
        with pytest.raises((AssertionError, OSError)):
            doomed.result(10)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stopped", "killed"])
@pytest.mark.parametrize("shared", ["store", "etcd"])
def test_what_they_share_goes_away_in_the_middle_of_loads(
    tmp_path: Path, request: pytest.FixtureRequest, shared: str, what: str
) -> None:
    """Each then decides by itself; all who wait get their answer."""
    servers = two_servers(most=2, load_s=0.5)
    config = sharing(shared, request)
    with ExitStack() as stack:
        stack.enter_context(closing(*servers))
        gateways = two_gateways(stack, tmp_path, *servers, min_stay_s=1.0, config=config)
        crowd = Crowd()
        asked = [crowd.ask(gateways[number % 2], MODELS[number % 3]) for number in range(36)]
        eventually(lambda: any(server.brain.loads for server in servers))
        if shared == "etcd":
            etcd = request.getfixturevalue("etcd")
            etcd.pause(True) if what == "stopped" else etcd.kill()
        else:
            redis = request.getfixturevalue("redis_server")
            redis.signal(signal.SIGSTOP if what == "stopped" else signal.SIGKILL)
        try:
            assert statuses(asked) == {200: 36}
        finally:
            if shared == "etcd" and what == "stopped":
                etcd.pause(False)
            elif what == "stopped":
                redis.signal(signal.SIGCONT)


def test_two_gateways_that_share_an_etcd_load_once(tmp_path: Path, etcd: Etcd) -> None:
    servers = two_servers(most=2)
    for server in servers:
        server.brain.broken = {"c"}
    watched = Watched(*(server.brain for server in servers))
    config = f'[[discovery]]\nplugin = "etcd"\nendpoints = ["{etcd.url}"]\n'
    with ExitStack() as stack:
        stack.enter_context(closing(*servers))
        gateways = two_gateways(stack, tmp_path, *servers, config=config, min_stay_s=1.0, backoff_s=30.0)
        for gateway in gateways:
            eventually(functools.partial(knows_models, gateway))
        crowd = Crowd()
        asked = [crowd.ask(gateways[number % 2], MODELS[number % 3]) for number in range(36)]
        assert statuses(asked) == {200: 24, 503: 12}
        watched.stop(gateways=2)
        assert sorted(watched.loads) == ["a", "b", "c", "c"], "the broken one once at each instance"
        eventually(lambda: not etcd.keys("/llmgw-load/lock/"))
        assert etcd.keys("/llmgw-load/failed/")


def knows_models(gateway: Gateway) -> bool:
    """It knows the models of all its backends."""
    return all(each["models"] for each in gateway.state["loading"]["backends"])


def test_without_its_store_a_gateway_loads_by_itself(tmp_path: Path, redis_server: RedisServer) -> None:
    server = RouterServer(RouterBrain("m", load_s=0.2))
    config = f'[store]\nurl = "{redis_server.url}"\n'
    with closing(server), gateway_before(tmp_path / "one", server, config=config) as gateway:
        all_ready(gateway)
        redis_server.kill()
        eventually(lambda: not gateway.state["store"]["up"])
        answer: Answer = gateway.ask(post(body=chat_body("m")))
        assert answer.status == 200


@pytest.mark.slow
def test_workers_load_once(tmp_path: Path) -> None:
    servers = two_servers(most=2)
    watched = Watched(*(server.brain for server in servers))
    with (
        closing(*servers),
        gateway_before(tmp_path / "one", *servers, min_stay_s=1.0, config="workers = 2\n") as gateway,
    ):
        all_ready(gateway)
        crowd = Crowd()
        asked = [crowd.ask(gateway, MODELS[number % 3]) for number in range(36)]
        assert statuses(asked) == {200: 36}
        watched.stop(gateways=2)
        assert sorted(watched.loads) == ["a", "b", "c"]
        assert gateway.admin("/api/models/a/unload", "POST")[0] == 202
        eventually(lambda: "loaded" not in {states(gateway)["a"], states(gateway, "b1")["a"]})
