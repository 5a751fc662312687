"""``llmgw register`` as a process, before a real etcd and a server under the test's control."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness import Gateway, Scripted, eventually, json_response, post
from real_etcd import Etcd, Relay

from llmgw.commands.main import main

PROPS = json_response({"total_slots": 3, "default_generation_settings": {"n_ctx": 2048}})
MODELS = json_response({"data": [{"id": "m"}, {"id": "n"}]})


def llama_server() -> Scripted:
    """Answers as a llama-server with three slots and two models."""
    return Scripted(probes={"/props": PROPS, "/v1/models": MODELS})


@pytest.fixture
def server() -> Iterator[Scripted]:
    found = llama_server()
    yield found
    found.close()


class Register:
    """The command at work.

    :ivar events: what it told.
    """

    def __init__(self, *arguments: str) -> None:
        self.events: list[dict[str, Any]] = []
        program = [sys.executable, "-c", "from llmgw.commands.main import main; main()"]
        command = [*program, "register", "--json", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]

    def until(self, name: str, count: int = 1) -> dict[str, Any]:
        """The event, when it has come so often."""
        eventually(lambda: self.names().count(name) >= count, 20)
        return [event for event in self.events if event["event"] == name][count - 1]

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(20)
        self._reader.join(5)
        assert self.process.stderr is not None
        errors = self.process.stderr.read()
        assert "Traceback" not in errors, errors
        return status


@pytest.fixture
def register() -> Iterator[Callable[..., Register]]:
    made: list[Register] = []

    def start(*arguments: str) -> Register:
        made.append(Register("--interval-s", "2", *arguments))
        return made[-1]

    yield start
    for each in made:
        with contextlib.suppress(OSError):
            each.process.kill()
        each.process.wait()


def test_a_server_is_registered_with_what_it_tells_and_taken_away_at_the_end(
    etcd: Etcd, server: Scripted, register: Any, tmp_path: Path
) -> None:
    gateway = Gateway(
        tmp_path,
        '[log]\naccess = "access.log"\n'
        '[[backends]]\nid = "file"\nurl = "http://127.0.0.1:1"\nmodels = ["other"]\n'
        f'[[discovery]]\nplugin = "etcd"\nendpoints = ["{etcd.url}"]\nhold_down_s = 0.2\n',
    )
    try:
        it = register(
            *("--id", "gpu-0", "--url", server.url + "/v1/", "--prefix", "/llmgw"),
            *("--etcd", f"127.0.0.1:{etcd.port},{etcd.url}"),
            *("--weight", "2", "--label", "zone=x", "--label", "rack=1"),
        )
        told = it.until("registered")
        document = {
            "url": server.url,
            "id": "gpu-0",
            "models": ["m", "n"],
            "weight": 2.0,
            "context_length": 2048,
            "slots": 3,
            "labels": {"zone": "x", "rack": "1"},
        }
        assert (told["key"], told["document"]) == ("/llmgw/gpu-0", document)
        assert etcd.keys() == {"/llmgw/gpu-0": document}
        assert int(etcd.call("/v3/lease/timetolive", ID=told["lease"])["grantedTTL"]) == 15
        eventually(lambda: gateway.ask(post()).status == 200)
        [found] = [each for each in gateway.state["backends"] if each["id"] == "gpu-0"]
        assert (found["cap"], found["context_length"], found["models"]) == (3, 2048, ["m", "n"])
        assert it.end() == 0
        assert it.names()[-2:] == ["deregistered", "ended"]
        assert etcd.keys() == {}
        eventually(lambda: [each["id"] for each in gateway.state["backends"]] == ["file"])
    finally:
        gateway.stop()


def test_it_leaves_while_the_server_is_unwell_and_comes_back_with_it(
    etcd: Etcd, server: Scripted, register: Any
) -> None:
    it = register("--id", "a", "--url", server.url, "--etcd", etcd.url, "--fall", "2", "--rise", "1")
    it.until("registered")
    server.probes["/health"] = json_response({"error": {"message": "Loading model"}}, 503)
    it.until("deregistered")
    assert etcd.keys() == {}
    server.probes["/health"] = json_response({"status": "ok"})
    server.probes["/v1/models"] = json_response({"data": [{"id": "other"}]})
    it.until("registered", 2)
    assert etcd.keys()["/llmgw/a"]["models"] == ["other"]
    assert it.names() == ["healthy", "registered", "unhealthy", "deregistered", "healthy", "registered"]
    assert it.end(signal.SIGINT) == 0


def test_it_waits_for_a_server_and_an_etcd_that_are_not_there_yet(
    etcd: Etcd, server: Scripted, register: Any
) -> None:
    etcd.kill()
    it = register("--id", "a", "--url", server.url, "--etcd", etcd.url, "--ttl-s", "3")
    it.until("etcd_lost")
    etcd.start()
    it.until("registered")
    it.until("etcd_back")
    assert set(etcd.keys()) == {"/llmgw/a"}
    # A crash that loses everything, the lease too.
    etcd.wipe()
    it.until("registered", 2)
    assert set(etcd.keys()) == {"/llmgw/a"}
    # Somebody deletes the key.
    etcd.delete("/llmgw/a")
    eventually(lambda: set(etcd.keys()) == {"/llmgw/a"})
    # And at the end nobody is there to be told.
    etcd.kill()
    assert it.end() == 3
    assert it.names()[-1] == "ended"


def test_a_lease_that_ended_in_a_pause_is_replaced(etcd: Etcd, server: Scripted, register: Any) -> None:
    relay = Relay(etcd.port)
    it = register("--id", "a", "--url", server.url, "--etcd", relay.url, "--ttl-s", "2")
    first = it.until("registered")
    relay.cut()
    eventually(lambda: etcd.keys() == {}, 15)
    relay.mend()
    second = it.until("registered", 2)
    assert first["lease"] != second["lease"]
    assert "lease_lost" in it.names()
    assert set(etcd.keys()) == {"/llmgw/a"}
    assert it.end() == 0
    relay.cut()


def test_s_reg_1_a_late_leave_does_not_take_the_newer_registration_away(
    etcd: Etcd, server: Scripted, register: Any
) -> None:
    options = ("--id", "a", "--etcd", etcd.url, "--ttl-s", "3")
    old = register("--url", server.url, *options)
    old.until("registered")
    old.process.send_signal(signal.SIGSTOP)  # it hangs, and its lease runs
    new = register("--url", server.url + "/", *options)
    lease = new.until("registered")["lease"]
    assert set(etcd.keys()) == {"/llmgw/a"}
    old.process.send_signal(signal.SIGCONT)
    assert old.end() == 0
    assert set(etcd.keys()) == {"/llmgw/a"}
    assert str(etcd.call("/v3/lease/timetolive", ID=lease)["ID"]) == lease
    assert new.end() == 0
    assert etcd.keys() == {}


def test_an_id_that_another_server_has_is_not_taken_from_it(
    etcd: Etcd, server: Scripted, register: Any
) -> None:
    etcd.put("/llmgw/a", {"url": "http://10.0.0.9"}, etcd.lease(2))
    it = register("--id", "a", "--url", server.url, "--etcd", etcd.url, "--ttl-s", "2")
    assert "registered already, for http://10.0.0.9" in it.until("taken")["why"]
    assert etcd.keys()["/llmgw/a"]["url"] == "http://10.0.0.9"
    it.until("registered")
    assert etcd.keys()["/llmgw/a"]["url"] == server.url
    assert it.end() == 0


def test_it_logs_in_and_logs_in_again(
    etcd_server: Callable[..., Etcd], server: Scripted, register: Any, tmp_path: Path
) -> None:
    etcd = etcd_server("--auth-token-ttl", "1")
    etcd.enable_users()
    password = tmp_path / "password"
    password.write_text("writer-word")
    password.chmod(0o600)
    it = register(
        *("--id", "a", "--url", server.url, "--etcd", etcd.url, "--ttl-s", "6"),
        *("--username", "writer", "--password-file", str(password)),
    )
    lease = it.until("registered")["lease"]

    # Its token is over by the time of the next calls.
    def is_kept() -> bool:
        """It was given more time, which takes a new token."""
        etcd.log_in("root", "root-word")
        left = int(etcd.call("/v3/lease/timetolive", ID=lease)["TTL"])
        lowest.append(min(left, *lowest))
        return left > lowest[-1]

    lowest = [6]
    eventually(is_kept)
    assert it.end() == 0
    etcd.log_in("root", "root-word")
    assert etcd.keys() == {}
    assert "etcd_lost" not in it.names()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--id", "a b"], "id"),
        (["--url", "ftp://x"], "url"),
        (["--etcd", "ftp://x"], "endpoints"),
        (["--etcd", "127.0.0.1:1,"], "endpoints[2]"),
        (["--label", "x"], "NAME=VALUE"),
        (["--weight", "0"], "weight"),
        (["--max-connections", "0"], "max_connections"),
        (["--health", "no-such"], "no-such"),
        (["--password-file", "/no/such"], "password_file"),
        (["--username", "x"], "password_file"),
        (["--api-key-file", "/no/such"], "/no/such"),
        (["--probe-url", "7"], "URL"),
        (["--ttl-s", "0"], "ttl-s"),
        (["--prefix", ""], "prefix"),
    ],
)
def test_wrong_options_are_told_with_status_2(arguments: list[str], named: str) -> None:
    good = ["--id", "a", "--url", "http://127.0.0.1:1", "--etcd", "http://127.0.0.1:2"]
    outcome = CliRunner().invoke(main, ["register", *good, *arguments])
    assert outcome.exit_code == 2, outcome.output
    assert named in outcome.output
