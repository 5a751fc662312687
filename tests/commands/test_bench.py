"""``llmgw bench`` against a simulated server, alone and behind gateways of its own."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from certificates import issue
from click.testing import CliRunner
from harness import Gateway, Scripted, backend_table, free_port

from llmgw.bench.callers import Sample
from llmgw.bench.gateways import Backend, config_text
from llmgw.bench.load import LOADS, marked
from llmgw.commands.bench import bench, figures
from llmgw.commands.keys import keys
from llmgw.demo.processes import Child


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [
        *(sys.executable, "-m", "llmgw.demo.simulated", "--prefill", "100000", "--decode", "20000"),
        *("--alias", "tiny", "--port", "0", "--parallel", "4", "--ctx", "16384"),
    ]
    child = Child("server", command, tmp_path_factory.mktemp("bench") / "server.log")
    yield child.wait_listening()
    child.stop()


def test_a_server_is_measured_by_its_url(server: str) -> None:
    result = CliRunner().invoke(bench, [server, "--requests", "5", "--repetitions", "2", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [(row["load"], row["requests"], row["errors"]) for row in told["rows"]] == [
        ("mixed", 10, {}),
        ("chat", 10, {}),
    ]
    assert all(0 < row["ttft_s"]["mean"] <= row["e2e_s"]["mean"] for row in told["rows"])


def test_servers_are_measured_side_by_side(server: str) -> None:
    urls = (server, server.replace("127.0.0.1", "localhost"))
    result = CliRunner().invoke(
        bench, [*urls, "--requests", "3", "--repetitions", "1", "--load", "chat", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["target"], row["requests"], row["errors"]) for row in rows] == [(url, 3, {}) for url in urls]


def test_a_certificate_of_ones_own_and_a_key_are_asked_for(tmp_path: Path) -> None:
    files = issue(tmp_path)
    port = free_port()
    tls = f"llmtls:tcp:{port}:interface=127.0.0.1:privateKey={files.key}:certKey={files.certificate}"
    backend = Scripted()
    made = CliRunner().invoke(keys, ["new", "--file", str(tmp_path / "keys.toml"), "ada"])
    (tmp_path / "key.txt").write_text(made.stdout)
    config = f'listen = ["{tls}"]\nauth = ["keys:{tmp_path / "keys.toml"}"]\n'
    gateway = Gateway(tmp_path, config + backend_table(backend, "one", 'models = ["m"]'))
    try:
        url = f"https://localhost:{port}"
        refused = CliRunner().invoke(bench, [url])
        assert (refused.exit_code, "--ca-file FILE" in refused.output) == (1, True)
        trusted = [url, "--ca-file", str(files.authority), "--requests", "2", "--repetitions", "1"]
        refused = CliRunner().invoke(bench, trusted)
        assert (refused.exit_code, "--key-file FILE" in refused.output) == (1, True)
        result = CliRunner().invoke(bench, [*trusted, "--key-file", str(tmp_path / "key.txt"), "--json"])
        assert result.exit_code == 0, result.output
        assert [row["errors"] for row in json.loads(result.stdout)["rows"]] == [{}, {}]
    finally:
        gateway.stop()
        backend.close()


def test_routers_are_compared_by_gateways_before_the_same_servers(server: str) -> None:
    routers = ("--router", "expected-ttft:tail_price=0.1", "--router", "round-robin")
    urls = (f"{server},weight=3", server.replace("127.0.0.1", "localhost"))
    options = ("--requests", "4", "--repetitions", "1", "--load", "chat", "--json")
    result = CliRunner().invoke(bench, ["--compare-routers", *urls, *routers, *options])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [row["target"] for row in told["rows"]] == ["expected-ttft:tail_price=0.1", "round-robin"]
    assert all(row["requests"] == 4 and not row["errors"] for row in told["rows"])
    assert told["answered_by"]["round-robin"] == {"backend-1": 2, "backend-2": 2}
    assert sum(told["answered_by"]["expected-ttft:tail_price=0.1"].values()) == 4


def test_gateways_do_not_take_each_others_requests_for_those_of_a_gateway_beside_them() -> None:
    config = tomllib.loads(config_text("round-robin", [Backend("one", "http://127.0.0.1:1")], 2, 3))
    assert config["health"] == [{"plugin": "llamacpp", "busy": False}]


def test_the_table_names_every_target_and_what_went_wrong(server: str) -> None:
    options = ("--model", "no-such-model", "--requests", "2", "--repetitions", "1", "--load", "mixed")
    result = CliRunner().invoke(bench, [server, *options])
    assert result.exit_code == 0, result.output
    assert server[:20] in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a URL or more, or --compare-routers"),
        (("--compare-routers", "http://a,weight=x"), "is not URL[,weight=NUMBER]"),
        (("http://127.0.0.1:9",), "http://127.0.0.1:9 does not answer: Connection refused"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code != 0
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_router_that_is_not_there_shows_the_gateways_words(server: str) -> None:
    result = CliRunner().invoke(bench, ["--compare-routers", server, "--router", "no-such-router"])
    assert result.exit_code == 1
    assert "no-such-router" in result.output


@pytest.mark.parametrize("load", LOADS)
def test_nobody_finds_in_a_cache_what_another_has_asked(load: str) -> None:
    plain = LOADS[load](Random(7), 23)
    one, other = marked(plain, "0 one"), marked(plain, "0 other")
    assert all(turns[0].words.startswith("0 one ") for turns in one)
    assert not {turns[0].words[:7] for turns in one} & {turns[0].words[:7] for turns in other}
    assert [[turn.tokens for turn in turns] for turns in one] == [
        [turn.tokens for turn in turns] for turns in plain
    ]
    assert [turns[1:] for turns in one] == [turns[1:] for turns in plain]


@pytest.mark.parametrize("load", LOADS)
def test_loads_are_repeatable_and_of_the_size_that_was_asked_for(load: str) -> None:
    made = [LOADS[load](Random(7), 23) for _ in range(2)]
    assert made[0] == made[1]
    assert sum(len(conversation) for conversation in made[0]) == 23


def test_figures_leave_out_what_failed() -> None:
    told = figures([Sample(0.1, 0.2), Sample(None, 9.0, "status 503"), Sample(0.3, 0.4)])
    assert told["ttft_s"]["mean"] == pytest.approx(0.2)
    assert told["e2e_s"]["p99"] == 0.4
    assert told["errors"] == {"status 503": 1}
    assert figures([])["ttft_s"] == {"mean": 0.0, "p50": 0.0, "p95": 0.0, "p99": 0.0}
