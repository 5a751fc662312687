"""``llmgw simulate`` and ``llmgw replay``: what an operator types and sees."""

import json
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from click.testing import CliRunner

from llmgw.commands.main import main

QUICK = ("--requests", "60")
NODE = '[[nodes]]\nid = "a"\nslots = 4\nprefill_rate = 1000\ntoken_rate = 50\n'
STATE = {"backends": [{"id": "b", "slots": 4, "prefill_rate": 900.0, "token_rate": 40.0, "weight": 2.0}]}


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def told(*arguments):
    result = run("simulate", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@contextmanager
def admin(body, status=200):
    """An admin listener that always says the same; gives its URL and the tokens it was shown."""
    shown = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            shown.append((self.path, self.headers["Authorization"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", shown
        finally:
            server.shutdown()
            thread.join()


def test_without_any_option_all_routers_meet_the_articles_setting():
    result = run("simulate", *QUICK)
    assert result.exit_code == 0, result.output
    for name in ("adaptive", "weighted-least-connections", "round-robin", "power-of-two"):
        assert f"\n{name} " in result.stdout
    assert "TTFT mean" in result.stdout
    assert "name article, requests 60, load 0.03, fleet article, seed 1" in result.stdout


def test_json_has_figures_settings_and_fleet():
    figures = told(*QUICK, "--router", "adaptive", "--gateways", "2", "--cap", "none", "--load", "0.5")
    (row,) = figures["routers"]
    assert row["router"] == "adaptive"
    assert row["requests"] == 60
    assert set(row["ttft_s"]) == {"mean", "p50", "p95", "p99"}
    assert set(row["share"]) == {"a100", "4090", "xeon"}
    assert figures["settings"]["gateways"] == 2
    assert figures["workload"] == {"name": "article", "requests": 60, "load": 0.5}
    assert [node["id"] for node in figures["fleet"]] == ["a100", "4090", "xeon"]


def test_a_seed_repeats_everything():
    def figures(seed):
        rows = told(*QUICK, "--workload", "chat", "--router", "power-of-two", "--seed", seed)["routers"]
        return [{key: value for key, value in row.items() if key != "simulated_in_s"} for row in rows]

    assert figures(3) == figures(3) != figures(4)


def test_a_router_may_have_options_and_stand_there_twice():
    rows = told(*QUICK, "--router", "adaptive:alpha=0,baseline_ms=20", "--router", "adaptive")["routers"]
    assert [row["router"] for row in rows] == ["adaptive:alpha=0,baseline_ms=20", "adaptive"]


@pytest.mark.parametrize("kind", ["article", "mixed", "chat", "bursts"])
def test_workloads(kind):
    assert told(*QUICK, "--workload", kind, "--router", "least-connections")["workload"]["name"] == kind


def test_faults_and_waiting():
    figures = told(
        *QUICK, "--fault", "restart at=5", "--fault", "slow", "--max-wait", "5", "--slot-choice", "--router",
        "adaptive", "--load", "0.8",
    )  # fmt: skip
    assert figures["settings"]["max_wait_s"] == 5.0


def test_errors_are_told_below_the_table(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(NODE.replace("slots = 4", "slots = 1"))
    result = run("simulate", *QUICK, "--fleet", path, "--load", "3", "--router", "adaptive")
    assert "adaptive: " in result.stdout
    assert "overloaded" in result.stdout


def test_a_fleet_from_a_file(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(NODE)
    assert [node["id"] for node in told(*QUICK, "--fleet", path)["fleet"]] == ["a"]


def test_a_fleet_from_a_running_gateway(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    with admin(json.dumps(STATE).encode()) as (url, shown):
        figures = told(*QUICK, "--fleet-from", url, "--token-file", token)
    assert [node["id"] for node in figures["fleet"]] == ["b"]
    assert shown == [("/api/state", "Bearer secret")]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{}", 401, "wants its token: --token-file"),
        (b"{}", 500, "answered 500"),
        (b"<html>", 200, "did not answer with JSON"),
        (b"[]", 200, "did not answer with a JSON object"),
        (b"{}", 200, "backends: there are none"),
    ],
)
def test_a_gateway_that_does_not_tell_is_one_line(body, status, words):
    with admin(body, status) as (url, _):
        result = run("simulate", *QUICK, "--fleet-from", url)
    assert result.exit_code == 1
    assert words in result.stderr


def test_nobody_at_the_url_is_one_line():
    with admin(b"") as (url, _):
        pass
    result = run("simulate", *QUICK, "--fleet-from", url)
    assert result.exit_code == 1
    assert "nobody listens there" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--router", "nobody"), "no router named 'nobody' is installed"),
        (("--router", "adaptive:alpha=7"), "--router adaptive:alpha=7.alpha: must be 1 or less"),
        (("--router", "adaptive:alpha"), "'alpha' is not KEY=VALUE"),
        (("--fault", "flood"), "no such fault"),
        (("--fault", "restart node=b200"), "no such node"),
        (("--fleet", "/no/such/file"), "No such file"),
        (("--fleet-from", "ftp://x"), "must be an http:// or https:// URL"),
        (("--trace", "/no/such/file"), "No such file"),
        (("--cap", "0"), "must be slots, none or a number above 0"),
        (("--plot", "x.gif"), "must end in .png or .svg"),
        (("--plot", "/no/such/dir/x.png"), "No such file"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, words):
    result = run(
        "simulate", *QUICK, *(() if "--router" in arguments else ("--router", "adaptive")), *arguments
    )
    assert result.exit_code in (1, 2)
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.svg"
    result = run("simulate", *QUICK, "--router", "adaptive", "--plot", path)
    assert result.exit_code == 0, result.output
    assert "</svg>" in path.read_text()
    assert f"Picture: {path}" in result.stderr


def test_without_the_extra_the_cure_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("simulate", *QUICK, "--router", "adaptive", "--plot", tmp_path / "x.svg")
    assert result.exit_code == 1
    assert "pip install 'llmgw[plot]'" in result.stderr
    assert result.stdout == ""  # told before the minutes that it takes


def test_a_trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.68,374,44\n" * 20)
    figures = told("--trace", path, "--requests", "15", "--skip", "2", "--router", "adaptive")
    assert figures["routers"][0]["requests"] == 15


def test_replay_runs_the_requests_of_an_access_log(tmp_path):
    path = tmp_path / "access.log"
    line = {"at": 100.0, "id": "x", "status": 200, "outcome": "done", "prompt_tokens": 17, "output_tokens": 4}
    refused = {"at": 100.0, "id": "y", "status": 503, "outcome": "overloaded"}
    path.write_text("".join(json.dumps(each) + "\n" for each in (line, refused, line | {"at": 104.0})))
    result = run("replay", path, "--router", "adaptive", "--speed", "2", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["workload"] == {"name": str(path), "requests": 2, "speed": 2.0, "skip": 0}
    assert figures["routers"][0]["errors"] == {}


def test_replay_tells_what_really_happened_beside_what_would_have(tmp_path):
    path = tmp_path / "access.log"
    usual = {
        "id": "x",
        "status": 200,
        "outcome": "done",
        "prompt_tokens": 20,
        "output_tokens": 4,
        "duration_s": 1.0,
    }
    lines = [
        {"at": 100.0, "backend": "a", "ttft_s": 0.1, "attempts": 1, "cached_tokens": 10, **usual},
        {"at": 101.0, "backend": "a", "ttft_s": 0.3, "attempts": 2, **usual},
        {"at": 102.0, "status": 503, "outcome": "overloaded"},
        {"at": 103.0, "backend": "b", "attempts": 1, **usual, "outcome": "cut"},
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    logged = json.loads(run("replay", path, "--router", "adaptive", "--json").stdout)["logged"]
    assert logged["requests"] == 3
    assert logged["ttft_s"]["mean"] == pytest.approx(0.2)
    assert logged["share"] == {"a": pytest.approx(2 / 3), "b": pytest.approx(1 / 3)}
    assert (logged["errors"], logged["retries"], logged["cache_hit"]) == ({"cut": 1}, 1, 0.25)
    assert logged["spikes"] == 1
    shown = run("replay", path, "--router", "adaptive")
    assert "(as logged)" in shown.stdout
    assert "a 67%, b 33%" in shown.stdout
    assert shown.stderr.startswith("(as logged) is another fleet (a, b) than article: ")
    fleet = tmp_path / "fleet.toml"
    table = '[[nodes]]\nid = "{}"\nslots = 2\nprefill_rate = 900.0\ntoken_rate = 40.0\n'
    fleet.write_text(table.format("a") + table.format("b"))
    shown = run("replay", path, "--router", "adaptive", "--fleet", fleet)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "logged" not in json.loads(
        run("replay", path, "--router", "adaptive", "--speed", "2", "--json").stdout
    )
    assert (
        json.loads(run("replay", path, "--skip", "1", "--requests", "1", "--json").stdout)["logged"][
            "retries"
        ]
        == 1
    )


def test_a_log_without_answers_is_one_line(tmp_path):
    path = tmp_path / "access.log"
    path.write_text('{"at":1.0,"id":"y","status":503}\n')
    result = run("replay", path)
    assert result.exit_code == 1
    assert "no request of it can be used" in result.stderr
