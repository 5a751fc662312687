"""Real servers that die, a gateway that is told to reload or to end: what clients see of it."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from live_gateway import LiveGateway, wait_until

from llmgw.demo.processes import Child

pytestmark = pytest.mark.real

TEXT = "/v1/completions"
ENDLESS = {"model": "tiny", "prompt": "The", "ignore_eos": True, "stream": True}
SHORT = {"model": "tiny", "prompt": "The", "max_tokens": 2}


class Pair:
    """Two servers of one model, and a gateway of their own; any of them may be killed."""

    def __init__(self, llama_servers: Callable[..., Child], directory: Path) -> None:
        flags = ("--parallel", "2", "--ctx", "16384")
        self.servers = {
            name: llama_servers("chat", *flags, shared=False, layers=4, ff=1024) for name in ("a", "b")
        }
        self.gateway = LiveGateway(directory, {name: server.url for name, server in self.servers.items()})
        self.gateway.wait_ready()

    def kill(self, name: str) -> None:
        self.servers[name].stop(signal.SIGKILL)


@pytest.fixture
def pair(llama_servers: Callable[..., Child], tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(llama_servers, tmp_path)
    try:
        yield pair
    finally:
        pair.gateway.stop()
        for server in pair.servers.values():
            server.stop()
    pair.gateway.check_logs()


def test_a_server_that_dies_ends_its_stream_with_an_error_and_gets_no_more(pair: Pair) -> None:
    openai = pytest.importorskip("openai")
    gateway = pair.gateway
    transport = openai.DefaultHttpxClient(verify=gateway.tls, trust_env=False)
    with openai.OpenAI(
        base_url=gateway.v1, api_key=gateway.keys["all"], http_client=transport, max_retries=0
    ) as client:
        raw = client.completions.with_raw_response.create(
            model="tiny", prompt="The", stream=True, extra_body={"ignore_eos": True}
        )
        stream = raw.parse()
        seen = iter(stream)
        next(seen)
        victim = raw.headers["x-llmgw-backend"]
        pair.kill(victim)
        with pytest.raises(openai.APIError) as caught:
            for _ in seen:
                pass
        assert caught.value.code == "upstream_error"
        left = {"a": "b", "b": "a"}[victim]
        for _ in range(8):
            answer = client.completions.with_raw_response.create(model="tiny", prompt="The", max_tokens=1)
            assert answer.headers["x-llmgw-backend"] == left
    line = gateway.access_line(raw.headers["x-request-id"])
    assert (line["status"], line["outcome"], line["backend"]) == (200, "cut", victim)
    assert wait_until(lambda: not gateway.backend(victim)["available"], 10)
    assert gateway.is_idle()


def test_a_call_without_stream_is_made_again_elsewhere(pair: Pair) -> None:
    gateway = pair.gateway
    answers: list[httpx.Response] = []

    def ask() -> None:
        with gateway.client() as http:
            answers.append(http.post(TEXT, json={**ENDLESS, "stream": False, "max_tokens": 700}))

    asking = threading.Thread(target=ask)
    asking.start()
    busy: list[str] = []

    def one_is_busy() -> bool:
        busy[:] = filter(gateway.busy_slots, pair.servers)
        return len(busy) == 1

    assert wait_until(one_is_busy, every_s=0.05)
    (victim,) = busy
    pair.kill(victim)
    asking.join(20)
    (answer,) = answers
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-llmgw-backend"] != victim
    assert answer.json()["usage"]["completion_tokens"] == 700
    line = gateway.access_line(answer.headers["x-request-id"])
    assert (line["attempts"], line["outcome"]) == (2, "done")
    assert gateway.metric("llmgw_retries_total") == 1


def test_a_client_that_leaves_while_its_server_is_being_connected_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as deaf, ExitStack() as others:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(2):  # what is over the backlog gets no answer, not even a refusal
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(deaf.getsockname())
        gateway = LiveGateway(tmp_path, {"narrow": f"http://127.0.0.1:{deaf.getsockname()[1]}"})
        try:
            gateway.wait_ready()
            connection = gateway.send(SHORT, TEXT)
            assert wait_until(lambda: gateway.backend("narrow")["in_flight"] == 1, 3)
            connection.close()
            assert wait_until(gateway.is_idle, 1), gateway.state()
            assert wait_until(lambda: bool(gateway.access_lines()), 3)
            (line,) = gateway.access_lines()
            assert (line["outcome"], line["attempts"]) == ("client_gone", 1)
        finally:
            gateway.stop()
        gateway.check_logs()


def test_with_no_server_left_clients_are_told_when_to_come_back(pair: Pair) -> None:
    gateway = pair.gateway
    for name in pair.servers:
        pair.kill(name)
    with gateway.client() as http:
        answers = [http.post(TEXT, json=SHORT) for _ in range(4)]
        assert {answer.status_code for answer in answers} <= {502, 503}
        assert wait_until(lambda: http.post(TEXT, json=SHORT).status_code == 503, 10, every_s=0.2)
        last = http.post(TEXT, json=SHORT)
        assert last.json()["error"]["code"] == "no_backend"
        assert 1 <= int(last.headers["retry-after"]) <= 60
        assert http.get("/v1/models").status_code == 200
    assert gateway.is_idle()


def test_a_stream_outlives_a_reload(pair: Pair) -> None:
    gateway = pair.gateway
    config = gateway.directory / "llmgw.toml"
    with (
        gateway.client() as http,
        http.stream("POST", TEXT, json={**ENDLESS, "max_tokens": 700}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        config.write_text(config.read_text().replace('name = "capped"', 'name = "renamed"'))
        assert httpx.post(f"{gateway.admin_url}/api/reload", trust_env=False).status_code == 200
        with gateway.client() as other:
            names = [model["id"] for model in other.get("/v1/models").json()["data"]]
            assert other.post(TEXT, json={**SHORT, "model": "renamed"}).status_code == 200
            assert other.post(TEXT, json={**SHORT, "model": "capped"}).status_code == 404
            config.write_text("nonsense = 1\n")
            refused = httpx.post(f"{gateway.admin_url}/api/reload", trust_env=False)
            assert refused.status_code >= 400
            assert "nonsense" in refused.text
            assert other.post(TEXT, json=SHORT).status_code == 200
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert names == ["gpt-4o-mini", "renamed", "tiny"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_at_the_end_streams_are_finished_and_late_ones_told(pair: Pair, number: int) -> None:
    gateway = pair.gateway
    with (
        gateway.client() as http,
        http.stream("POST", TEXT, json={**ENDLESS, "max_tokens": 300}) as short,
        http.stream("POST", TEXT, json=ENDLESS) as endless,
    ):
        started_s = time.monotonic()
        gateway.process.send(number)
        text = short.read().decode()
        assert text.endswith("data: [DONE]\n\n")
        lines: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError):  # cut, so that nobody takes it for whole
            lines.extend(line for line in endless.iter_lines() if line)
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "overloaded"
        assert wait_until(lambda: gateway.process.returncode() is not None, 10)
        assert gateway.process.returncode() == 0
        assert time.monotonic() - started_s < (9 if number == signal.SIGINT else 5)
    for name in pair.servers:
        assert wait_until(lambda name=name: gateway.busy_slots(name) == 0, 5, every_s=1.0)
