"""The same on a scripted router and, where ``LLMGW_LLAMA_SERVER`` names a binary, on llama-server itself.

How to build one stands in ``docs/development.md``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from harness import Gateway, chat_body, eventually, free_port, post
from redis_servers import RedisServer
from router_brain import RouterBrain, RouterServer

from llmgw.demo.processes import Child

from .scenes import Crowd, gateway_before, metrics, states, statuses

MODELS = ("one", "two", "three")
BINARY = os.environ.get("LLMGW_LLAMA_SERVER", "")
PATIENT = "min_s = 45.0"
"""A busy machine may take its time for a load."""
KINDS = ["scripted", *(["llama-server"] if BINARY else [])]


class House:
    """A server in router mode, its models ``MODELS`` and one that is broken.

    :param most: models in memory at a time.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def crash(self, model: str) -> None:
        """Kill the process of a model that is there or on its way."""
        raise NotImplementedError

    def close(self) -> None:
        """Its end."""
        raise NotImplementedError


class ScriptedHouse(House):
    """Words and states of llama-server, without one."""

    def __init__(self, folder: Path, model: Path, most: int) -> None:
        brain = RouterBrain(*MODELS, "broken", most=most, load_s=0.3, broken=["broken"], autoload=False)
        self._server = RouterServer(brain, events=True)
        super().__init__(self._server.url)

    def crash(self, model: str) -> None:
        self._server.brain.crash(model)

    def close(self) -> None:
        self._server.close()


class RealHouse(House):
    """llama-server, with two slots for each model."""

    def __init__(self, folder: Path, model: Path, most: int) -> None:
        self._models = folder / "models"
        self._models.mkdir(parents=True)
        for name in MODELS:
            (self._models / f"{name}.gguf").symlink_to(model)
        (self._models / "broken.gguf").write_bytes(b"GGUF, but no model")
        port = free_port()
        argv = [BINARY, "--models-dir", str(self._models), "--models-max", str(most)]
        # One thread: two of them wait for each other at each step, and long for a core that is taken.
        argv += ["-c", "2048", "-np", "2", "-t", "1", "-tb", "1", "--no-models-autoload"]
        argv += ["--host", "127.0.0.1", "--port", str(port)]
        self._process = Child("llama-server", argv, folder / "llama-server.log", announces=False)
        super().__init__(f"http://127.0.0.1:{port}")
        try:
            eventually(self._listens, 30.0)
        except BaseException:
            self.close()
            raise

    def _listens(self) -> bool:
        assert self._process.returncode() is None, self._process.log_tail()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
        return False

    def crash(self, model: str) -> None:
        path = f"{self._models}/{model}.gguf".encode()

        def pid() -> int:
            for entry in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if path in entry.read_bytes().split(b"\0"):
                        return int(entry.parent.name)
            return 0

        os.kill(eventually(pid), signal.SIGKILL)

    def close(self) -> None:
        self._process.stop()


@contextlib.contextmanager
def served(kind: str, folder: Path, model: Path, most: int = 2, count: int = 1) -> Iterator[list[House]]:
    """So many servers of a kind."""
    make = ScriptedHouse if kind == "scripted" else RealHouse
    with contextlib.ExitStack() as stack:
        houses: list[House] = []
        for number in range(count):
            houses.append(make(folder / f"server{number}", model, most))
            stack.callback(houses[-1].close)
        yield houses


class Watched:
    """What servers say of their models, asked all the time.

    :ivar doubled: models that two of them were loading at a time.
    :ivar loads: loads that were seen, in order.
    """

    def __init__(self, houses: list[House]) -> None:
        self.doubled: set[str] = set()
        self.loads: list[str] = []
        self._clients = [httpx.Client(base_url=house.url, trust_env=False) for house in houses]
        self._loading: list[set[str]] = [set() for _ in houses]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(0.01):
            for number, client in enumerate(self._clients):
                with contextlib.suppress(httpx.TransportError):
                    listed = client.get("/models").json()["data"]
                    now = {each["id"] for each in listed if each["status"]["value"] == "loading"}
                    self.loads += sorted(now - self._loading[number])
                    self._loading[number] = now
            self.doubled |= {model for model in MODELS if sum(model in each for each in self._loading) > 1}

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
        for client in self._clients:
            client.close()
        assert not self.doubled


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def scene(
    kind: str, tmp_path_factory: pytest.TempPathFactory, tiny_models: Callable[..., Path]
) -> Iterator[tuple[Gateway, House]]:
    """A gateway that finds out by itself what is behind it: two models of three in memory."""
    folder = tmp_path_factory.mktemp("router")
    with (
        served(kind, folder, tiny_models()) as houses,
        gateway_before(folder / "gateway", *houses, backend="", backoff_s=0.5, hold=PATIENT) as made,
    ):
        eventually(lambda: set(states(made)) >= set(MODELS))
        yield made, houses[0]


@pytest.fixture
def gateway(scene: tuple[Gateway, House]) -> Gateway:
    return scene[0]


def loads(gateway: Gateway, outcome: str = "loaded") -> float:
    told = metrics(gateway)
    return sum(
        value
        for name, value in told.items()
        if name.startswith("llmgw_model_loads_total") and f'outcome="{outcome}"' in name
    )


def unload_all(gateway: Gateway) -> None:
    for model in MODELS:
        gateway.admin(f"/api/models/{model}/unload", "POST")
    eventually(lambda: all(states(gateway)[model] == "unloaded" for model in MODELS))


def test_one_load_for_all_who_ask(gateway: Gateway) -> None:
    unload_all(gateway)
    before = loads(gateway)
    crowd = Crowd()
    asked = [crowd.ask(gateway, MODELS[number % 2], max_tokens=8) for number in range(12)]
    assert statuses(asked) == {200: 12}
    eventually(lambda: loads(gateway) == before + 2)


def test_more_models_than_fit(gateway: Gateway) -> None:
    unload_all(gateway)
    crowd = Crowd()
    asked = [crowd.ask(gateway, MODELS[number % 3], max_tokens=8) for number in range(18)]
    assert statuses(asked) == {200: 18}
    assert sum(state == "loaded" for state in states(gateway).values()) <= 2


def test_a_broken_file_is_told(gateway: Gateway) -> None:
    before = loads(gateway, "failed")
    answer = gateway.ask(post(body=chat_body("broken")))
    assert (answer.status, answer.json["error"]["code"]) == (503, "model_loading")
    assert "exit code" in answer.json["error"]["message"]
    eventually(lambda: loads(gateway, "failed") == before + 1)
    assert states(gateway)["broken"] == "failed"


def test_streams_are_held_too(gateway: Gateway) -> None:
    unload_all(gateway)
    answer = gateway.ask(post(body=chat_body("three", stream=True, max_tokens=8)))
    assert answer.status == 200
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_the_operator_loads_and_unloads(gateway: Gateway) -> None:
    unload_all(gateway)
    assert json.loads(gateway.admin("/api/models/one/load", "POST")[1])["status"] == "loading"
    eventually(lambda: states(gateway)["one"] == "loaded")
    unload_all(gateway)


def test_slots_are_known(gateway: Gateway) -> None:
    """Two of each, so of eight requests two are at work at a time."""
    crowd = Crowd()
    asked = [crowd.ask(gateway, "one", max_tokens=8) for _ in range(8)]
    answers = [each.result(30) for each in asked]
    assert {each.status for each in answers} <= {200, 503}, answers
    assert sum(each.status == 200 for each in answers) >= 2, answers


def test_a_model_whose_process_was_killed_is_loaded_again(scene: tuple[Gateway, House]) -> None:
    gateway, house = scene
    unload_all(gateway)
    assert gateway.ask(post(body=chat_body("one", max_tokens=8))).status == 200
    house.crash("one")
    assert gateway.ask(post(body=chat_body("one", max_tokens=8))).status == 200
    assert states(gateway)["one"] == "loaded"


def test_fifty_clients_three_cold_models_two_instances_of_one_model_each(
    kind: str, tmp_path: Path, tiny_models: Callable[..., Path]
) -> None:
    """A third of them leave during the hold, and a load is killed in the middle."""
    dice = random.Random(3)
    patience_s = [dice.choice((0.1, 60.0, 60.0)) for _ in range(50)]
    with (
        served(kind, tmp_path, tiny_models(), most=1, count=2) as houses,
        gateway_before(
            tmp_path / "gateway", *houses, backend="", min_stay_s=1.0, backoff_s=0.5, hold=PATIENT
        ) as gateway,
    ):
        for backend_id in ("b0", "b1"):
            eventually(lambda id=backend_id: set(states(gateway, id)) >= set(MODELS))
        watched = Watched(houses)

        def client(number: int) -> int:
            """:return: the status, 0 for one that left."""
            with gateway.client(patience_s[number]) as client:
                client.send(post(body=chat_body(MODELS[number % 3], max_tokens=4)))
                try:
                    return client.read_answer().status
                except TimeoutError:
                    return 0

        with ThreadPoolExecutor(50) as pool:
            asked = [pool.submit(client, number) for number in range(50)]
            model = eventually(lambda: watched.loads[:1])[0]
            for number, backend_id in enumerate(("b0", "b1")):
                if states(gateway, backend_id)[model] == "loading":
                    houses[number].crash(model)
            found = [each.result(60) for each in asked]
        assert set(found) <= {0, 200}
        assert all(status == 200 for status, patience in zip(found, patience_s, strict=True) if patience > 1)
        watched.stop()
        assert set(watched.loads) == set(MODELS)


def test_two_gateways_load_once(
    kind: str, tmp_path: Path, tiny_models: Callable[..., Path], redis_server: RedisServer
) -> None:
    config = f'[store]\nurl = "{redis_server.url}"\n'
    with contextlib.ExitStack() as stack:
        houses = stack.enter_context(served(kind, tmp_path, tiny_models(), count=2))
        gateways = [
            stack.enter_context(
                gateway_before(
                    tmp_path / name, *houses, backend="", min_stay_s=1.0, config=config, hold=PATIENT
                )
            )
            for name in ("one", "two")
        ]
        for gateway in gateways:
            for id in ("b0", "b1"):
                eventually(lambda id=id, gateway=gateway: set(states(gateway, id)) >= set(MODELS))
        watched = Watched(houses)
        crowd = Crowd()
        asked = [crowd.ask(gateways[number % 2], MODELS[number % 3], max_tokens=4) for number in range(24)]
        assert statuses(asked) == {200: 24}
        watched.stop()
        assert sorted(watched.loads) == sorted(MODELS)
