"""Loader for llama-server in router mode, asked on a clock of the test's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from router_brain import RouterBrain
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from llmgw import testing
from llmgw.errors import ConfigError, LoadUndone, ModelLoading
from llmgw.loading.llamacpp_router import LlamaCppRouter, LlamaCppRouterFactory
from llmgw.testing.fakes import Answer, FakeHealthTarget


class Target(FakeHealthTarget):
    """A server in router mode.

    :ivar down: it refuses connections.
    """

    def __init__(self, clock: Clock, brain: RouterBrain) -> None:
        super().__init__(clock)
        self.brain = brain
        self.down = False
        self.body = b""

    def post(self, path: str, body: bytes, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        self.body = body
        return super().post(path, body, timeout_s)

    def _answered(self, path: str, answer: Answer, timeout_s: float) -> Deferred[tuple[int, bytes]]:
        if self.down:
            return super()._answered(path, ConnectionRefusedError(), timeout_s)
        if path != "/models/sse":
            method = "POST" if self.asked[-1][1].startswith("POST") else "GET"
            said = self.brain.answer(method, path, self.body)
            assert said is not None
            answer = (said[0], json.dumps(said[1]).encode())
        return super()._answered(path, answer, timeout_s)


class House:
    """A loader and its server."""

    def __init__(self, *models: str, **how: Any) -> None:
        self.clock = Clock()
        self.brain = RouterBrain(*(models or ("m", "n")), clock=self.clock.seconds, **how)
        self.target = Target(self.clock, self.brain)
        self.loader = LlamaCppRouter(self.target, self.clock)

    def wait(self, asking: Deferred[Any], within_s: float = 60.0) -> Any:
        results: list[Any] = []
        asking.addBoth(results.append)
        for _ in range(round(within_s / 0.05)):
            if results:
                break
            self.clock.advance(0.05)
        assert results, "no answer"
        if isinstance(results[0], Failure):
            results[0].raiseException()
        return results[0]

    def states(self) -> dict[str, str]:
        return dict(self.wait(self.loader.models()))


class _Contract(testing.ModelLoaderContract):
    factory = LlamaCppRouterFactory()
    model = "m"

    def make(self, clock: Clock) -> Any:
        brain = RouterBrain("m", clock=clock.seconds)
        return self.factory.build({}, Target(clock, brain), clock)


TestContract = _Contract


def test_states_are_told_in_the_gateways_words() -> None:
    house = House("m", "n", "broken", broken=["broken"], load_s=1.0)
    for model in ("n", "broken"):
        house.brain.load(model)
    house.clock.advance(2.0)
    house.brain.load("m")
    assert house.states() == {"m": "loading", "n": "loaded", "broken": "failed"}
    assert house.loader.capacity == 4
    assert house.loader.slots == {"n": 2}
    house.brain.unload("n")
    assert house.states()["n"] == "unloaded"
    assert house.loader.slots == {}


@pytest.mark.parametrize(
    ("value", "state"), [("sleeping", "loaded"), ("downloading", "loading"), ("odd", "unloaded")]
)
def test_further_states(value: str, state: str) -> None:
    clock = Clock()
    entry = {
        "id": "m",
        "aliases": ["alias", 7],
        "status": {"value": value, "args": ["-np", "3"]},
        "meta": {"size": 5},
    }
    listed = {"data": [entry, "odd", {"id": 5}, {"id": "plain"}]}
    target = FakeHealthTarget(clock, {"/models": (200, json.dumps(listed).encode())})
    loader = LlamaCppRouter(target, clock)
    found: list[Any] = []
    loader.models().addBoth(found.append)
    for _ in range(5):
        clock.advance(0.1)
    assert found == [{"m": state, "alias": state, "plain": "loaded"}]
    assert loader.sizes == {"m": 5}
    assert loader.slots == ({"m": 3, "alias": 3} if state == "loaded" else {})


def test_a_load_ends_when_the_model_is_ready() -> None:
    house = House(load_s=7.0)
    begun_s = house.clock.seconds()
    house.wait(house.loader.load("m"))
    assert 7.0 <= house.clock.seconds() - begun_s < 8.5
    assert house.brain.loads == ["m"]
    house.wait(house.loader.load("m"))
    assert house.brain.loads == ["m"], "what is loaded is not loaded again"


def test_a_load_that_somebody_else_began_is_joined() -> None:
    house = House(load_s=5.0)
    house.brain.load("m")
    house.wait(house.loader.load("m"))
    assert house.brain.loads == ["m"]


def test_a_broken_file_is_told_with_its_exit_code() -> None:
    house = House("broken", broken=["broken"])
    for _ in range(2):  # the second one, too, though a failure is listed from the start
        with pytest.raises(ModelLoading, match="exit code 1"):
            house.wait(house.loader.load("broken"))
    assert house.brain.loads == ["broken"] * 2


def test_a_mended_file_is_loaded_though_a_failure_is_still_listed() -> None:
    house = House("m", broken=["m"], load_s=3.0)
    with pytest.raises(ModelLoading):
        house.wait(house.loader.load("m"))
    house.brain.broken.clear()
    house.wait(house.loader.load("m"))
    assert house.states() == {"m": "loaded"}


def test_a_model_that_is_not_there_is_told() -> None:
    house = House()
    with pytest.raises(ModelLoading, match="no such model"):
        house.wait(house.loader.load("zzz"))


def test_a_load_that_is_ended_meanwhile_looks_like_one_of_a_bad_file() -> None:
    house = House(load_s=5.0)
    loading = house.loader.load("m")
    house.clock.pump([0.1] * 10)
    house.brain.unload("m")
    with pytest.raises(ModelLoading, match="exit code 1"):
        house.wait(loading)


def test_a_model_that_was_unloaded_before_anybody_saw_it_is_no_failure() -> None:
    house = House()
    house.brain.undone.add("m")
    with pytest.raises(LoadUndone, match="unloaded again"):
        house.wait(house.loader.load("m"))


def test_a_server_full_of_models_on_their_way_is_no_failure() -> None:
    house = House("m", "n", load_s=5.0, most=1)
    house.brain.load("n")
    with pytest.raises(LoadUndone, match="full of models that it loads"):
        house.wait(house.loader.load("m"))


def test_a_server_that_goes_away_during_a_load_is_a_failure() -> None:
    house = House(load_s=5.0)
    loading = house.loader.load("m")
    house.clock.pump([0.1] * 10)
    house.target.down = True
    with pytest.raises(ModelLoading, match="tells nothing"):
        house.wait(loading)


def test_one_missed_look_is_no_failure() -> None:
    house = House(load_s=5.0)
    loading = house.loader.load("m")
    house.clock.pump([0.1] * 10)
    house.target.down = True
    house.clock.pump([0.1] * 6)
    house.target.down = False
    house.wait(loading)


def test_an_unload_ends_when_the_model_is_gone() -> None:
    house = House()
    house.wait(house.loader.load("m"))
    house.wait(house.loader.unload("m"))
    assert house.brain.running() == []
    house.wait(house.loader.unload("m"))
    house.wait(house.loader.unload("zzz"))


def test_who_is_at_work_on_a_model_is_asked_of_its_slots() -> None:
    house = House()
    house.wait(house.loader.load("m"))
    house.brain.busy["m"] = 2
    assert house.wait(house.loader.busy("m")) == 2
    assert house.wait(house.loader.busy("n")) is None


def test_events_of_the_server_bring_a_look_at_once() -> None:
    house = House(load_s=0.1)
    told: list[float] = []
    event = b'data: {"model":"m","event":"status_change","data":{"status":"loaded"}}\n\n'
    house.target.answers["WATCH /models/sse"] = (200, b"")
    house.loader.start(lambda: told.append(house.clock.seconds()))
    loading = house.loader.load("m")
    house.clock.pump([0.0, 0.01, 0.01, 0.01, 0.01, 0.1])
    assert not loading.called
    house.loader._received(b": ping\n\n")
    assert told == []
    house.loader._received(event)
    house.clock.pump([0.0] * 4)
    assert loading.called
    assert told
    house.loader.stop()
    assert not house.target.waiting
    assert not house.clock.getDelayedCalls()


@pytest.mark.parametrize("answer", [(404, b"{}"), ConnectionRefusedError()])
def test_events_are_asked_for_again_later_where_they_are_not_there(answer: Answer) -> None:
    house = House()
    if isinstance(answer, tuple):
        house.target.answers["WATCH /models/sse"] = answer
    else:
        house.target.down = True
    house.loader.start(lambda: None)
    house.clock.advance(0.1)
    assert len(house.clock.getDelayedCalls()) == 1
    house.clock.advance(400.0)
    assert sum(what == "WATCH /models/sse" for _, what in house.target.asked) == 2
    house.loader.stop()
    house.clock.advance(0.1)
    assert not house.clock.getDelayedCalls()


def test_a_server_that_is_no_router_says_so() -> None:
    clock = Clock()
    target = FakeHealthTarget(clock, {"/models": (500, b'{"error":{"message":"out of order"}}')})
    failed: list[Failure] = []
    LlamaCppRouter(target, clock).models().addErrback(failed.append)
    clock.advance(0.1)
    with pytest.raises(ModelLoading, match="/models says: out of order"):
        failed[0].raiseException()


def test_options_are_checked_all_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        LlamaCppRouterFactory().build(
            {"timeout_s": 0, "events": "no", "odd": 1}, FakeHealthTarget(Clock()), Clock()
        )
    assert [fault.where for fault in refused.value.faults] == ["timeout_s", "events", "odd"]
