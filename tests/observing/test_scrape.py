"""What a real scrape holds: every name of the contract, of the docs, of the rules and the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from authority import Authority
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
    free_port,
    gateway_with,
    json_response,
    post,
)
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "etc/prometheus/llmgw.rules.yml"
DASHBOARD = ROOT / "etc/grafana/llmgw.json"
CONTRACT = {
    "llmgw_requests_total": {"route", "model", "backend", "status"},
    "llmgw_ttft_seconds": {"model", "backend"},
    "llmgw_inter_token_seconds": {"model", "backend"},
    "llmgw_request_seconds": {"route"},
    "llmgw_overhead_seconds": set(),
    "llmgw_in_flight": {"backend"},
    "llmgw_backend_score": {"backend"},
    "llmgw_backend_ttft_seconds": {"backend"},
    "llmgw_breaker_state": {"backend"},
    "llmgw_tokens_total": {"model", "kind"},
    "llmgw_rejected_total": {"reason"},
    "llmgw_hold_seconds": set(),
    "llmgw_retries_total": {"reason"},
    "llmgw_limiter_degraded": set(),
    "llmgw_client_aborts_total": set(),
    "llmgw_reactor_lag_seconds": set(),
}
"""Every name that users were promised, and its labels."""
TARGET = {"job", "instance"}
"""Labels that Prometheus itself adds."""


GAUGES = b"llamacpp:requests_deferred 0\nllamacpp:kv_cache_usage_ratio 0.5\n"
LLAMA = {
    "/props": json_response({"total_slots": 2, "default_generation_settings": {"n_ctx": 4096}}),
    "/slots": json_response([{"id": 0, "is_processing": False}, {"id": 1, "is_processing": False}]),
    "/metrics": json_response(GAUGES),
    "/v1/models": json_response({"data": [{"id": "m"}]}),
}
"""A backend that tells all that a llama-server tells."""


class Scrape:
    """One scrape.

    :ivar types: metric to type, as the ``TYPE`` lines say.
    :ivar labels: metric to the names of its labels; none are known of one without samples.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
        self.labels: dict[str, set[str]] = {}
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                assert sample.value == sample.value, sample
                self.labels.setdefault(sample.name, set()).update(sample.labels)
                self.values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    def has(self, name: str) -> bool:
        """Whether ``name`` is that of a sample, be it of a metric that has none yet."""
        histogram = re.fullmatch(r"(.+)_(?:bucket|sum|count)", name)
        if histogram and self.types.get(histogram[1]) == "histogram":
            return True
        return self.types.get(name) in ("counter", "gauge")

    def labels_of(self, name: str) -> set[str] | None:
        """``None``: no sample tells."""
        return self.labels.get(name, self.labels.get(f"{name}_count"))

    def rows(self, name: str) -> list[dict[str, str]]:
        """The labels of each sample."""
        return [dict(labels) for sample, labels in self.values if sample == name]


def stumbling(line: Line, request: Received) -> None:
    """A backend that breaks each connection before a byte."""
    line.reset()


def slowly(line: Line, request: Received) -> None:
    line.send(SSE_HEAD)
    line.send(*(chunk(event(word)) for word in ["one", "two", "three"]), gap_s=0.02)
    line.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scrape]:
    """Of a gateway with all that metrics tell of, after a request of each kind, and of one with workers."""
    folder = tmp_path_factory.mktemp("scrape")
    authority = Authority()
    authority.issue("localhost").write(folder)
    good, bad = Scripted(probes=LLAMA), Scripted(stumbling)
    port, tls_port = free_port(), free_port()
    far = f'[[backends]]\nid = "far"\nmodels = ["far"]\nurl = "http://127.0.0.1:{free_port()}"\n'
    (folder / "more.toml").write_text(far)
    text = f'listen = ["tcp:{port}:interface=127.0.0.1",'
    text += f' "llmtls:tcp:{tls_port}:interface=127.0.0.1:privateKey=server.key:certKey=server.crt"]\n'
    text += '[[rate_limits]]\nname = "few"\nscope = "global"\nrequests_per_minute = 6\nburst_s = 60\n'
    text += f'[store]\nurl = "redis://127.0.0.1:{free_port()}/0"\n'
    text += '[[discovery]]\nplugin = "static"\nfile = "more.toml"\n[drain]\nlame_duck_s = 0.0\n'
    text += backend_table(good, "good") + backend_table(bad, "bad")
    gateway = Gateway(folder, text, port=port)
    crew_folder = tmp_path_factory.mktemp("crew")
    crew = Gateway(crew_folder, "workers = 2\n[drain]\nlame_duck_s = 0.0\n" + backend_table(good, "good"))
    try:
        good.play(slowly)
        stream = post(body=chat_body(stream=True))
        eventually(lambda: retried(gateway, stream), 20)
        with gateway.client() as client:  # leaves in the middle
            client.send(stream)
            client.read_head()
        good.play(answer_completion)
        assert gateway.ask(post(body=chat_body("nobody-has-this"))).status == 404
        eventually(lambda: gateway.ask(post()).status == 429)
        eventually(gateway.is_idle)
        eventually(lambda: "llmgw_workers_serving 2\n" in crew.admin("/metrics")[1].decode(), 20)
        whole = gateway.admin("/metrics")[1].decode()
        added = crew.admin("/metrics")[1].decode()
        workers = [block for block in blocks(added) if "# TYPE llmgw_worker" in block]
        yield Scrape(whole + "\n".join(workers) + "\n")
    finally:
        gateway.stop()
        crew.stop()
        good.close()
        bad.close()


def retried(gateway: Gateway, request: bytes) -> bool:
    """Ask until the router has chosen the backend that stumbles."""
    gateway.ask(request)
    return "llmgw_retries_total{" in gateway.admin("/metrics")[1].decode()


def blocks(text: str) -> list[str]:
    """Families, each as its own text."""
    return [f"# HELP {each}".rstrip("\n") for each in text.split("# HELP ")[1:]]


# --- the contract -------------------------------------------------------------


@pytest.mark.parametrize("name", CONTRACT)
def test_what_was_promised_is_there_with_its_labels(scrape: Scrape, name: str) -> None:
    assert name in scrape.types
    assert (scrape.types[name] == "counter") is name.endswith("_total")
    labels = scrape.labels_of(name)
    assert labels is not None, f"{name} has no sample"
    assert labels - {"le"} == CONTRACT[name]


def test_requests_are_counted_where_they_went(scrape: Scrape) -> None:
    rows = scrape.rows("llmgw_requests_total")
    assert {row["model"] for row in rows} == {"m", "other"}, "unknown models are `other`"
    assert {row["status"] for row in rows} >= {"200", "404", "429"}
    assert {row["backend"] for row in rows} >= {"good", ""}
    reasons = {row["reason"] for row in scrape.rows("llmgw_rejected_total")}
    assert {"model_not_found", "rate_limit_exceeded"} <= reasons
    assert {row["kind"] for row in scrape.rows("llmgw_tokens_total")} == {"prompt", "cached", "output"}


def test_histograms_are_whole(scrape: Scrape) -> None:
    for name, kind in scrape.types.items():
        if kind != "histogram":
            continue
        for (sample, labels), count in scrape.values.items():
            if sample == f"{name}_count":
                last = scrape.values[f"{name}_bucket", tuple(sorted((*labels, ("le", "+Inf"))))]
                assert last == count, name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")
def test_promtool_finds_the_scrape_in_order(scrape: Scrape) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=scrape.text, text=True, capture_output=True)
    # Advice about names and units is not an error; ours are fixed.
    assert done.returncode in (0, 3), done.stderr
    assert "error" not in done.stderr.lower(), done.stderr


# --- the docs -----------------------------------------------------------------


def documented() -> set[str]:
    text = (ROOT / "docs/metrics.md").read_text()
    return set(re.findall(r"`(llmgw_\w+)", text))


def test_every_metric_is_in_the_docs(scrape: Scrape) -> None:
    ours = {name for name in scrape.types if name.startswith("llmgw_")}
    assert ours - documented() == set()


def test_every_metric_of_the_docs_is_there(scrape: Scrape) -> None:
    missing = documented() - set(scrape.types)
    # Those of the limiter `redis` need one.
    assert {name for name in missing if not name.startswith("llmgw_limiter_")} == set()


# --- rules and dashboard ------------------------------------------------------

NAME = re.compile(r"(?<![\w:$\"])(?:llmgw[_:]|process_|up\b)[\w:]*")


def rules() -> list[dict[str, Any]]:
    """The rules, read without a YAML parser: names, expressions, folded lines joined."""
    found: list[dict[str, Any]] = []
    folded = re.compile(r">-\n((?:\s{10,}.*\n)+)")
    text = folded.sub(lambda lines: " ".join(lines[1].split()) + "\n", RULES.read_text())
    for line in text.splitlines():
        kind, _, value = line.strip().removeprefix("- ").partition(": ")
        if kind in ("alert", "record"):
            found.append({kind: value})
        elif kind == "expr":
            found[-1]["expr"] = value
    return found


def expressions() -> list[tuple[str, str]]:
    """Every expression that we ship, with its place."""
    found = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        found += [(panel["title"], target["expr"]) for target in panel.get("targets", ())]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            expression = re.sub(r"^label_values\((.*), \w+\)$", r"\1", variable["definition"])
            found.append((variable["name"], expression))
    return found


def wrong_with(scrape: Scrape, expression: str, recorded: set[str]) -> list[str]:
    """Names and labels in a PromQL expression that no scrape has."""
    bare = re.sub(r"\{[^}]*\}|\"[^\"]*\"", "", expression)
    names = set(NAME.findall(bare)) - {"up"}
    wrong = [f"no metric {name}" for name in names - recorded if not scrape.has(name)]
    for name, matchers in re.findall(r"([a-z_]+)\{([^}]*)\}", expression):
        asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) - TARGET
        labels = scrape.labels_of(name)
        if labels is not None and not asked <= labels:
            wrong.append(f"{name} has {labels}, not {asked}")
    words = ",".join(re.findall(r"(?:by|on|ignoring) \(([^)]*)\)", bare))
    grouped = {word.strip() for word in words.split(",")} - {""}
    known = set().union(*(scrape.labels_of(name) or set() for name in names)) | TARGET | {"le"}
    if not names & recorded and not grouped <= known:
        wrong.append(f"no label {grouped - known}")
    return wrong


def test_what_is_asked_of_prometheus_exists(scrape: Scrape) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = expressions()
    assert len(asked) > 70
    wrong = {place: faults for place, expr in asked if (faults := wrong_with(scrape, expr, recorded))}
    assert wrong == {}


def test_every_alert_says_what_to_do() -> None:
    text = RULES.read_text()
    alerts = text.count("- alert: ")
    assert alerts == text.count("summary: ") == text.count("description: ") == text.count("severity: ") - 2
    assert alerts >= 20


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")
@pytest.mark.parametrize("what", [["check", "rules", RULES.name], ["test", "rules", "llmgw.rules.test.yml"]])
def test_promtool_finds_the_rules_in_order(what: list[str]) -> None:
    done = subprocess.run(["promtool", *what], cwd=RULES.parent, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """The real one, scraping ``target`` twice a second, with our rules."""

    def __init__(self, folder: Path, target: str) -> None:
        job = {"job_name": "llmgw", "static_configs": [{"targets": [target]}]}
        every = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        config = {"global": every, "rule_files": [str(RULES)], "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
        self.url = f"http://127.0.0.1:{free_port()}"
        self._process = subprocess.Popen(
            [
                *("prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"),
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=(folder / "prometheus.log").open("wb"),
        )

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}") as answer:
            return json.load(answer)["data"]

    def ask(self, expression: str) -> list[float]:
        """The values of all that it finds; an expression that it does not take raises."""
        found = self.get("query", query=expression)["result"]
        return [float(each["value"][1]) for each in found]

    def knows(self, expression: str) -> bool:
        try:
            return bool(self.ask(expression))
        except urllib.error.URLError:
            return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus: apt-get install prometheus")
def test_prometheus_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    backend = Scripted(slowly, probes=LLAMA)
    with gateway_with(tmp_path, backend) as gateway:
        prometheus = Prometheus(tmp_path, f"127.0.0.1:{gateway.admin_port}")

        def has_counted() -> bool:
            gateway.ask(post(body=chat_body(stream=True)))
            return prometheus.knows("rate(llmgw_inter_token_seconds_count[20s]) > 0")

        try:
            eventually(has_counted, 30)
            silent = set()
            for place, expression in expressions():
                filled = re.sub(r"\$(?:job|instance|model|backend)\b", ".*", expression)
                if not prometheus.ask(filled.replace("$__rate_interval", "20s")):
                    silent.add(place)
            # No figure in large type says "No data" for a fleet at which nothing is wrong.
            large = {
                each["title"]
                for each in json.loads(DASHBOARD.read_text())["panels"]
                if each["type"] == "stat"
            }
            assert len(large) >= 6
            assert not silent & (large | {"job", "instance", "model", "backend"})

            def healths() -> set[str]:
                groups = prometheus.get("rules")["groups"]
                return {rule["health"] for group in groups for rule in group["rules"]} - {"unknown"}

            assert eventually(healths, 20) == {"ok"}
        finally:
            prometheus.stop()
    backend.close()


def test_the_dashboard_has_no_two_panels_in_one_place() -> None:
    board = json.loads(DASHBOARD.read_text())
    taken: dict[tuple[int, int], str] = {}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
