"""Requests for models that nobody has in memory: who loads, who is held, and what everybody is told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Gateway, Line, Received, Scripted, chat_body, eventually, json_response, post
from router_brain import RouterBrain, RouterServer, Said

from llmgw.access import credentials, key_file
from llmgw.demo.certificate import write_private

from .scenes import Crowd, closing, gateway_before, held, metrics, states, statuses

# --- before one server with room for all of its models ---------------------------


SHARED = (*"abcdefgh", "broken", "org/n", "undone")


class Scene:
    """A gateway that tests share, each with models of its own.

    :ivar secret: of a key that never causes a load.
    """

    def __init__(self, gateway: Gateway, server: RouterServer, secret: str) -> None:
        self.gateway = gateway
        self.server = server
        self.brain = server.brain
        self.secret = secret


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("shared")
    id = credentials.new_id()
    secret = credentials.new_key(id)
    hashed = f"sha256:{credentials.digest(secret, None).hex()}"
    key = key_file.Key(id=id, name="calm", hash=hashed, loaded_only=True)
    write_private(folder / "keys.toml", key_file.dump(key_file.KeyFile({id: key})).encode())
    server = RouterServer(RouterBrain(*SHARED, most=0, load_s=0.6, broken=["broken"]), serve_s=0.01)
    config = 'auth = ["keys:keys.toml", "anonymous"]\n'
    config += '[[models]]\nname = "calm"\ntarget = "f"\nloaded_only = true\n'
    with closing(server), gateway_before(folder, server, config=config, backoff_s=30.0) as gateway:
        eventually(lambda: states(gateway))
        yield Scene(gateway, server, secret)


def test_a_request_for_a_cold_model_is_held_until_it_is_there(scene: Scene) -> None:
    gateway = scene.gateway
    assert gateway.ask(post(body=chat_body("a"))).status == 200
    assert scene.brain.loads.count("a") == 1
    assert states(gateway)["a"] == "loaded"
    told = eventually(lambda: loaded_metrics(gateway, "a"))
    assert told['llmgw_held_total{model="a",outcome="released"}'] == 1
    assert told["llmgw_hold_seconds_count"] >= 1
    assert told['llmgw_model_load_seconds_count{backend="b0",model="a"}'] == 1
    assert told['llmgw_model_loaded{backend="b0",model="a"}'] == 1
    assert told['llmgw_model_loaded{backend="b0",model="h"}'] == 0
    models = json.loads(gateway.ask(b"GET /v1/models HTTP/1.1\r\nhost: gw\r\n\r\n", "GET").body)
    assert {each["id"] for each in models["data"]} >= set(SHARED), "what is not loaded is there all the same"


def loaded_metrics(gateway: Gateway, model: str) -> dict[str, float] | None:
    """``/metrics`` once the load of ``model`` is counted."""
    told = metrics(gateway)
    return (
        told if f'llmgw_model_loads_total{{backend="b0",model="{model}",outcome="loaded"}}' in told else None
    )


def test_s_swp_2_one_load_serves_all_who_wait(scene: Scene) -> None:
    """One load per model at a time, though everybody comes at once."""
    crowd, brain = Crowd(), scene.brain
    asked = [crowd.ask(scene.gateway, model) for _ in range(12) for model in ("b", "c")]
    assert statuses(asked) == {200: 24}
    assert [brain.loads.count(model) for model in ("b", "c")] == [1, 1]
    assert (brain.served["b"], brain.served["c"]) == (12, 12)
    assert max(brain.most_busy.values()) <= brain.slots, "released by slot"


def test_s_swp_2_a_failed_load_releases_all_with_its_reason(scene: Scene) -> None:
    crowd, gateway = Crowd(), scene.gateway
    asked = [crowd.ask(gateway, "broken") for _ in range(5)]
    for each in asked:
        answer = each.result(20)
        assert answer.status == 503
        assert answer.json["error"]["code"] == "model_loading"
        assert "exit code 1" in answer.json["error"]["message"]
        assert 20 <= int(answer.get("retry-after") or 0) <= 40
    again = gateway.ask(post(body=chat_body("broken")))
    assert (again.status, again.json["error"]["code"]) == (503, "model_loading")
    assert "exit code 1" in again.json["error"]["message"]
    assert scene.brain.loads.count("broken") == 1, "the failure is remembered"
    assert states(gateway)["broken"] == "failed"
    assert metrics(gateway)['llmgw_model_loads_total{backend="b0",model="broken",outcome="failed"}'] == 1


def test_s_swp_3_every_refusal_has_a_body_and_a_line_in_the_log(scene: Scene) -> None:
    gateway = scene.gateway
    for number, (model, status) in enumerate((("broken", 503), ("nobody-has-this", 404), ("", 400)) * 2):
        body = chat_body(model) if model else b""
        answer = gateway.ask(post(body=body, headers=f"x-request-id: swap-{number}\r\n"))
        assert (answer.status, answer.get("content-type")) == (status, "application/json; charset=utf-8")
        assert answer.json["error"]["message"]
        line = eventually(lambda number=number: logged(gateway, f"swap-{number}"))
        assert (line["status"], line["outcome"]) == (status, answer.json["error"]["code"])


def logged(gateway: Gateway, id: str) -> dict[str, Any] | None:
    """The access line of a request."""
    lines = map(json.loads, (gateway.folder / "access.log").read_text().splitlines())
    return next((line for line in lines if line["id"] == id), None)


def test_a_client_that_leaves_is_forgotten_and_the_load_goes_on(scene: Scene) -> None:
    gateway = scene.gateway
    clients = [gateway.client() for _ in range(3)]
    for client in clients:
        client.send(post(body=chat_body("d")))
    eventually(lambda: held(gateway, "d") == 3)
    eventually(lambda: "d" in scene.brain.loads)
    for client in clients:
        client.close()
    eventually(lambda: held(gateway, "d") == 0)
    eventually(lambda: states(gateway)["d"] == "loaded")
    assert scene.brain.loads.count("d") == 1
    assert scene.brain.served["d"] == 0
    assert metrics(gateway)['llmgw_held_total{model="d",outcome="left"}'] == 3


def test_a_load_that_somebody_undoes_is_done_again(scene: Scene) -> None:
    """Another gateway, or a person at the server itself: nothing says that the model is broken."""
    scene.brain.undone.add("undone")
    asked = Crowd().ask(scene.gateway, "undone")
    assert asked.result(20).status == 200
    assert scene.brain.loads.count("undone") == 2


@pytest.mark.parametrize(("rule", "model"), [("key", "e"), ("model", "f")])
def test_loaded_only_never_causes_a_load(scene: Scene, rule: str, model: str) -> None:
    gateway = scene.gateway
    headers = f"authorization: Bearer {scene.secret}\r\n" if rule == "key" else ""
    name = model if rule == "key" else "calm"
    refused = gateway.ask(post(body=chat_body(name), headers=headers))
    assert (refused.status, refused.json["error"]["code"]) == (503, "model_loading")
    assert refused.get("x-should-retry") == "false"
    assert model not in scene.brain.loads
    crowd = Crowd()
    other = crowd.ask(gateway, model)
    eventually(lambda: model in scene.brain.loads)
    answer = crowd.ask(gateway, name, headers).result(20)
    assert answer.status == 200, "but a load under way is waited for"
    assert other.result(20).status == 200


def test_the_operator_loads_and_unloads(scene: Scene) -> None:
    gateway, brain = scene.gateway, scene.brain
    status, body = gateway.admin("/api/models/org/n/load", "POST")
    assert status == 202
    assert json.loads(body)["status"] == "loading"
    eventually(lambda: states(gateway)["org/n"] == "loaded")
    assert json.loads(gateway.admin("/api/models/org/n/load", "POST")[1])["status"] == "loaded"
    status, body = gateway.admin("/api/models/org/n/unload", "POST")
    assert (status, json.loads(body)["unloading"]) == (202, ["b0"])
    eventually(lambda: states(gateway)["org/n"] == "unloaded")
    assert (brain.loads.count("org/n"), brain.unloads.count("org/n")) == (1, 1)
    assert gateway.admin("/api/models/nobody/load", "POST")[0] == 404
    assert gateway.admin("/api/models/a/load", "GET")[0] == 405


# --- before servers of their own ---------------------------------------------------


def test_router_mode_is_found_without_a_word_in_the_configuration(tmp_path: Path) -> None:
    server = RouterServer(RouterBrain("m", load_s=0.2))
    with closing(server), gateway_before(tmp_path, server, backend="") as gateway:
        assert eventually(lambda: states(gateway)) == {"m": "unloaded"}
        assert gateway.ask(post(body=chat_body("m"))).status == 200
        assert server.brain.loads == ["m"]


def test_none_leaves_the_server_to_itself(tmp_path: Path) -> None:
    server = RouterServer(RouterBrain("m", load_s=0.2))
    with closing(server), gateway_before(tmp_path, server, backend='loader = "none"') as gateway:
        assert gateway.ask(post(body=chat_body("m"))).status == 200
        assert states(gateway) == {}
        assert "POST /models/load" not in server.asked


class Unlucky(RouterBrain):
    """One of several, of which the first that is to load anything cannot.

    Which one that is may be settled by a busy machine: who has not told its models in
    two seconds is left out for the time being.
    """

    def __init__(self, asked: list[RouterBrain]) -> None:
        super().__init__("m")
        self.asked = asked

    def load(self, model: str) -> Said:
        if not self.asked:
            self.broken.add(model)
        self.asked.append(self)
        return super().load(model)


def test_a_failed_load_is_tried_on_another_instance(tmp_path: Path) -> None:
    asked: list[RouterBrain] = []
    one, other = RouterServer(Unlucky(asked)), RouterServer(Unlucky(asked))
    with closing(one, other), gateway_before(tmp_path, one, other) as gateway:
        eventually(lambda: states(gateway) and states(gateway, "b1"))
        assert Crowd().ask(gateway, "m").result(60).status == 200
        assert len(asked) == 2
        assert (one.brain.loads, other.brain.loads) == (["m"], ["m"])


class Late(RouterServer):
    """It lists its models late, which is no reason to take it for gone."""

    late_s = 0.0

    def _play(self, line: Line, request: Received) -> None:
        if request.target == "/models":
            time.sleep(self.late_s)
        super()._play(line, request)


@pytest.mark.parametrize(("late_s", "status"), [(2.5, 200), (60.0, 503)])
def test_where_one_has_failed_another_that_answers_late_is_waited_for(
    tmp_path: Path, late_s: float, status: int
) -> None:
    bad, late = RouterServer(RouterBrain("m", broken=["m"])), Late(RouterBrain("m"))
    with closing(bad, late), gateway_before(tmp_path, bad, late) as gateway:
        eventually(lambda: states(gateway) and states(gateway, "b1"))
        late.late_s = late_s
        asked = Crowd().ask(gateway, "m")
        eventually(lambda: "not again for" in gateway.log)
        if status == 200:
            late.late_s = 0.0
        answer = asked.result(60)
        assert answer.status == status
        assert late.brain.loads == (["m"] if status == 200 else [])
        late.late_s = 0.0


def test_an_idle_model_goes_for_another_and_a_busy_one_runs_out_first(tmp_path: Path) -> None:
    brain = RouterBrain("m", "n", most=1, load_s=0.2)
    server = RouterServer(brain)
    with closing(server), gateway_before(tmp_path, server) as gateway:
        eventually(lambda: states(gateway))
        crowd = Crowd()
        assert crowd.ask(gateway, "m").result(20).status == 200
        assert crowd.ask(gateway, "n").result(20).status == 200
        assert brain.unloads == ["m"]
        server.held.clear()
        working = crowd.ask(gateway, "n")
        eventually(lambda: brain.busy["n"])
        waiting = crowd.ask(gateway, "m")
        eventually(lambda: states(gateway)["n"] == "leaving")
        late = crowd.ask(gateway, "n")
        eventually(lambda: held(gateway, "n"))
        assert brain.unloads == ["m"], "nobody is cut"
        server.held.set()
        assert [each.result(20).status for each in (working, waiting, late)] == [200, 200, 200]
        assert brain.loads == ["m", "n", "m", "n"]
        assert brain.evicted == [], "the server never had to choose for itself"
        assert metrics(gateway)['llmgw_model_unloads_total{backend="b0",model="n",reason="evicted"}'] >= 1


def test_s_swp_1_a_busy_model_that_does_not_run_out_is_not_cut(tmp_path: Path) -> None:
    """Hold the new ones, drain the running ones, and all within bounds."""
    brain = RouterBrain("m", "n", most=1, load_s=0.1)
    server = RouterServer(brain)
    hold = "min_s = 1.0\nmax_s = 1.0"
    with closing(server), gateway_before(tmp_path, server, hold=hold, min_stay_s=0.5) as gateway:
        eventually(lambda: states(gateway))
        crowd = Crowd()
        server.held.clear()
        working = crowd.ask(gateway, "m")
        eventually(lambda: brain.busy["m"])
        refused = crowd.ask(gateway, "n").result(20)
        assert (refused.status, refused.json["error"]["code"]) == (503, "model_loading")
        assert refused.get("retry-after")
        eventually(lambda: states(gateway)["m"] == "loaded")
        server.held.set()
        assert working.result(20).status == 200
        assert brain.unloads == []


def test_a_fresh_model_is_not_evicted_within_its_minimum_stay(tmp_path: Path) -> None:
    brain = RouterBrain("m", "n", most=1, load_s=0.1)
    server = RouterServer(brain)
    with closing(server), gateway_before(tmp_path, server, min_stay_s=1.5) as gateway:
        eventually(lambda: states(gateway))
        assert gateway.ask(post(body=chat_body("m"))).status == 200
        loaded_s = time.monotonic()
        assert gateway.ask(post(body=chat_body("n"))).status == 200
        assert time.monotonic() - loaded_s > 1.0


def test_pinned_models_stay(tmp_path: Path) -> None:
    brain = RouterBrain("m", "n", most=1, load_s=0.1)
    server = RouterServer(brain)
    config = '[[models]]\nname = "m"\npin = true\npreload = true\n'
    with closing(server), gateway_before(tmp_path, server, config=config) as gateway:
        eventually(lambda: states(gateway).get("m") == "loaded")
        refused = gateway.ask(post(body=chat_body("n")))
        assert (refused.status, refused.json["error"]["code"]) == (503, "model_loading")
        assert "no instance can make room" in refused.json["error"]["message"]
        assert brain.loads == ["m"]


def test_holding_is_bounded_in_number_and_bytes(tmp_path: Path) -> None:
    server = RouterServer(RouterBrain("m", "n", load_s=1.5))
    hold = "max_requests = 4\nmax_per_model = 2\nbody_bytes = 100000"
    with closing(server), gateway_before(tmp_path, server, hold=hold) as gateway:
        eventually(lambda: states(gateway))
        crowd = Crowd()
        waiting = [crowd.ask(gateway, "m") for _ in range(2)]
        eventually(lambda: held(gateway) == 2)
        third = gateway.ask(post(body=chat_body("m")))
        assert (third.status, third.json["error"]["code"]) == (503, "model_loading")
        assert third.get("retry-after"), "with the time to come back"
        assert third.get("retry-after-ms")
        large = gateway.ask(post(body=chat_body("n", user="x" * 120_000)))
        assert (large.status, large.json["error"]["code"]) == (503, "model_loading")
        assert statuses(waiting) == {200: 2}
        assert metrics(gateway)['llmgw_held_total{model="m",outcome="refused"}'] == 1


def test_nobody_is_held_where_that_is_switched_off_but_the_load_begins(tmp_path: Path) -> None:
    server = RouterServer(RouterBrain("m", load_s=0.3))
    with closing(server), gateway_before(tmp_path, server, hold="max_requests = 0") as gateway:
        eventually(lambda: states(gateway))
        assert gateway.ask(post(body=chat_body("m"))).status == 503
        eventually(lambda: gateway.ask(post(body=chat_body("m"))).status == 200)


def test_a_load_that_takes_too_long_is_told_with_the_time_it_will_take(tmp_path: Path) -> None:
    server = RouterServer(RouterBrain("m", load_s=5.0))
    with closing(server), gateway_before(tmp_path, server, hold="min_s = 0.5\nmax_s = 0.5") as gateway:
        eventually(lambda: states(gateway))
        answer = gateway.ask(post(body=chat_body("m")))
        assert (answer.status, answer.json["error"]["code"]) == (503, "model_loading")
        assert 10 <= int(answer.get("retry-after") or 0) <= 19, "15 s are expected before a load was seen"
        assert metrics(gateway)['llmgw_held_total{model="m",outcome="timeout"}'] == 1


def test_a_load_without_end_is_given_up(tmp_path: Path) -> None:
    server = RouterServer(RouterBrain("m", load_s=3600.0))
    with closing(server), gateway_before(tmp_path, server, loading="give_up_s = 0.5") as gateway:
        eventually(lambda: states(gateway))
        answer = gateway.ask(post(body=chat_body("m")))
        assert answer.status == 503
        assert "not ready after 0.5 s" in answer.json["error"]["message"]


def test_a_model_that_nobody_asks_for_is_unloaded(tmp_path: Path) -> None:
    brain = RouterBrain("m", "n", "kept", load_s=0.1)
    server = RouterServer(brain)
    config = '[[models]]\nname = "n"\nidle_unload_s = false\n[[models]]\nname = "kept"\npin = true\n'
    with (
        closing(server),
        gateway_before(tmp_path, server, config=config, loading="idle_unload_s = 1.0") as gateway,
    ):
        eventually(lambda: states(gateway))
        for model in ("m", "n", "kept"):
            assert gateway.ask(post(body=chat_body(model))).status == 200
        eventually(lambda: brain.unloads == ["m"])
        eventually(lambda: states(gateway) == {"m": "unloaded", "n": "loaded", "kept": "loaded"})
        assert metrics(gateway)['llmgw_model_unloads_total{backend="b0",model="m",reason="idle"}'] == 1


def test_what_was_loaded_at_the_start_stays_unloaded_by_the_operators_word(tmp_path: Path) -> None:
    brain = RouterBrain("m", load_s=0.1)
    server = RouterServer(brain)
    config = '[[models]]\nname = "m"\npreload = true\n'
    with closing(server), gateway_before(tmp_path, server, config=config) as gateway:
        eventually(lambda: states(gateway).get("m") == "loaded")
        gateway.admin("/api/models/m/unload", "POST")
        eventually(lambda: states(gateway)["m"] == "unloaded")
        time.sleep(1.5)  # a tick and a half
        assert brain.loads == ["m"]
        assert gateway.ask(post(body=chat_body("m"))).status == 200


def test_a_server_that_lost_its_models_has_them_loaded_again(tmp_path: Path) -> None:
    brain = RouterBrain("m", load_s=0.2)
    server = RouterServer(brain, events=True)
    with closing(server), gateway_before(tmp_path, server) as gateway:
        eventually(lambda: states(gateway))
        assert gateway.ask(post(body=chat_body("m"))).status == 200
        brain.restart()
        eventually(lambda: states(gateway)["m"] == "unloaded")
        assert gateway.ask(post(body=chat_body("m"))).status == 200
        assert brain.loads == ["m", "m"]


def test_a_killed_instance_is_replaced_by_another(tmp_path: Path) -> None:
    first, second = RouterServer(RouterBrain("m")), RouterServer(RouterBrain("m"))
    with closing(first, second), gateway_before(tmp_path, first, second) as gateway:
        eventually(lambda: states(gateway) and states(gateway, "b1"))
        assert gateway.ask(post(body=chat_body("m"))).status == 200
        assert (first.brain.loads, second.brain.loads) == (["m"], [])
        first.close()
        for line in list(first.open_lines):
            line.reset()
        assert gateway.ask(post(body=chat_body("m"))).status == 200
        assert second.brain.loads == ["m"]


def test_an_instance_that_is_killed_while_it_loads_is_replaced_by_another(tmp_path: Path) -> None:
    first, second = RouterServer(RouterBrain("m", load_s=3600.0)), RouterServer(RouterBrain("m", load_s=0.2))
    with closing(first, second), gateway_before(tmp_path, first, second) as gateway:
        eventually(lambda: states(gateway) and states(gateway, "b1"))
        crowd = Crowd()
        asked = [crowd.ask(gateway, "m") for _ in range(3)]
        eventually(lambda: first.brain.loads)
        first.close()
        assert statuses(asked) == {200: 3}
        assert second.brain.loads == ["m"]


def test_a_plain_server_that_loads_is_waited_for(tmp_path: Path) -> None:
    loading = json_response(
        {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}, 503
    )
    server = Scripted(probes={"/health": loading})
    config = '[[health]]\nplugin = "llamacpp"\ninterval_s = 2.0\n'
    backend = 'models = ["m"]'
    with closing(server), gateway_before(tmp_path, server, config=config, backend=backend) as gateway:
        eventually(lambda: gateway.state["backends"][0]["loading"])
        asked = Crowd().ask(gateway, "m")
        eventually(lambda: held(gateway) == 1)
        server.probes["/health"] = json_response({"status": "ok"})
        assert asked.result(20).status == 200
