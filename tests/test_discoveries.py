"""From what discoveries tell to what is served, with a clock and no network."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from llmgw import plugins
from llmgw.config import parse_config
from llmgw.discoveries import Discoveries
from llmgw.errors import ConfigError


class Served:
    """Stands for ``Backends``: remembers what was to be served."""

    def __init__(self) -> None:
        self.configs: list[Any] = []

    def apply(self, config: Any) -> None:
        self.configs.append(config)

    @property
    def ids(self) -> list[str]:
        return [backend.id for backend in self.configs[-1].backends]

    def __getitem__(self, id: str) -> Any:
        return next(backend for backend in self.configs[-1].backends if backend.id == id)


class Told:
    """A discovery that tells what the test says."""

    connected = True
    error = ""
    contact_s = 0.0

    def __init__(self, options: Any) -> None:
        self.options = options
        self.running = False
        self.update: Any = None
        self.ending: Any = None

    def start(self, update: Any) -> None:
        if self.options.get("broken"):
            raise OSError("no luck")
        self.running, self.update = True, update

    def stop(self) -> Any:
        self.running = False
        return self.ending


class Stage:
    """Discoveries of a configuration, which the test speaks for."""

    def __init__(self, text: str) -> None:
        self.clock = Clock()
        self.served = Served()
        self.made: list[Told] = []
        self.gateway = SimpleNamespace(first_word=None, dice=Random(1))
        self.discoveries = Discoveries(self.served, self.gateway, self.clock)  # type: ignore[arg-type]
        self.configure(text)

    def configure(self, text: str) -> None:
        self.discoveries.apply(parse_config(text, source="", base_dir="/"))

    def build(self, kind: str, name: str, options: Any, *args: Any, **kwargs: Any) -> Any:
        if kind != "discovery":
            return plugins.find(kind, name)
        self.made.append(Told(dict(options)))
        return self.made[-1]

    def tell(self, *entries: Any, by: int = 0, then_s: float = 0.1) -> None:
        """One set by a discovery; then so much time."""
        self.made[by].update(list(entries))
        self.clock.advance(then_s)

    @property
    def state(self) -> dict[str, Any]:
        return self.discoveries.state()[0]


ONE = '[[discovery]]\nplugin = "told"\n'


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    stages: list[Stage] = []

    def make(text: str = ONE) -> Stage:
        found = Stage(text)
        monkeypatch.setattr("llmgw.discovered.plugins.build", found.build)
        stages.append(found)
        found.discoveries.start()
        return found

    yield make
    for each in stages:
        each.discoveries.stop()
        each.clock.advance(10)
        assert not each.clock.getDelayedCalls()


def entry(id: str, host: str = "", **more: Any) -> dict[str, Any]:
    return {"id": id, "url": f"http://10.0.0.{host or ord(id[0])}:8080", **more}


def test_what_is_found_joins_what_is_configured(stage: Any) -> None:
    it = stage(ONE + '[[backends]]\nid = "file"\nurl = "http://10.9.9.9"\n')
    assert it.served.ids == ["file"]
    it.tell(entry("a", weight=3.0, models=["m"], labels={"zone": "x"}), entry("b"))
    assert it.served.ids == ["file", "a", "b"]
    assert (it.served["a"].weight, it.served["a"].models, it.served["a"].labels) == (
        3.0,
        ("m",),
        {"zone": "x"},
    )
    assert [it.discoveries.source_of(id) for id in ("file", "a", "nobody")] == ["config", "told", ""]
    it.tell(entry("a", weight=4.0), entry("b"))
    assert it.served["a"].weight == 4.0


@pytest.mark.parametrize("odd", ["x", None, float("nan"), object()])
def test_a_plugins_time_of_contact_that_is_no_time_is_not_shown(stage: Any, odd: Any) -> None:
    it = stage()
    it.made[0].contact_s = odd
    assert it.discoveries.contact_ages_s() == {}
    it.made[0].contact_s = 0
    assert list(it.discoveries.contact_ages_s().values()) == [0.0]


def test_a_gateway_may_begin_with_a_discovery_alone(stage: Any) -> None:
    it = stage()
    assert it.served.ids == []
    it.tell(entry("a"))
    assert it.served.ids == ["a"]
    assert it.state["backends"] == 1


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"id": "x"}, "url"),
        ({"url": "http://10.0.0.1"}, "id"),
        (entry("x", wieght=2), "did you mean weight"),
        (entry("x", weight=0), "weight"),
        (entry("x", weight="2"), "weight"),
        (entry("bad id"), "id"),
        ({"id": "x", "url": "ftp://10.0.0.1"}, "url"),
        ({"id": "x", "url": "http://169.254.169.254"}, "allow"),
        ({"id": "x", "url": "http://example.com"}, "allow"),
        ({"id": "x", "url": "http://user:pass@10.0.0.1"}, "password"),
        ({"id": "x", "url": "http://127.0.0.1:8000"}, "own listener"),
        ({"id": "x", "url": "http://localhost:9901/x"}, "own listener"),
        (entry("x", api_key_file="/etc/shadow"), "file"),
        (entry("x", tls={"ca_file": "/etc/shadow"}), "file"),
        (entry("x", health="no-such"), "no-such"),
        ({"id": "x", "url": "https://_x_.ok.example"}, ""),
        (entry("a", "77"), "already that of another entry"),
        (entry("x", str(ord("a"))), "already that of a"),
    ],
)
def test_one_that_is_wrong_is_told_with_its_key_and_the_others_live_on(
    stage: Any, bad: dict[str, Any], why: str
) -> None:
    allow = 'allow = ["10.0.0.0/8", "127.0.0.1", "localhost", "*.ok.example"]\n'
    it = stage('admin = ["tcp:9901:interface=127.0.0.1"]\n' + ONE + allow)
    it.tell(entry("a"), entry("b"))
    it.tell(entry("a"), {"key": "/llmgw/bad", **bad}, entry("b"))
    assert it.served.ids == ["a", "b"]
    told = it.state["refused"] or it.state["clashes"]
    assert len(told) == 1
    assert why in told[0]["why"]
    assert it.state["backends"] >= 2


@pytest.mark.parametrize(
    "bad", [{"fault": "no JSON"}, entry("a", weight=-1), {"id": "a", "url": "http://8.8.8.8"}, {"id": "b c"}]
)
def test_one_that_turns_bad_keeps_its_last_good_form_while_it_is_there(stage: Any, bad: Any) -> None:
    it = stage()
    it.tell({"key": "k", **entry("a", weight=3.0)}, entry("b"))
    it.tell({"key": "k", **bad}, entry("b"), then_s=100)
    assert it.served["a"].weight == 3.0
    assert it.state["refused"][0]["key"] == "k"
    assert it.state["refused"][0]["why"].endswith("last good form stays")
    it.tell({"key": "k", **bad}, entry("a", "7"), entry("b"))
    assert it.served["a"].weight == 3.0
    it.tell({"key": "k", **entry("a", weight=4.0)}, entry("b"))
    assert it.served["a"].weight == 4.0
    assert it.state["refused"] == []
    it.tell({"key": "k", **bad}, entry("b"))
    it.tell(entry("b"), then_s=6)
    assert it.served.ids == ["b"]


def test_nothing_that_a_source_says_ends_the_gateway(stage: Any, expected_failures: Any) -> None:
    it = stage()
    it.tell(entry("a"))
    for nonsense in (None, 7, [7], [None]):
        it.made[0].update(nonsense)
        it.clock.advance(1)
    assert it.served.ids == ["a"]
    expected_failures()


def test_the_file_wins_and_the_loser_is_told(stage: Any) -> None:
    it = stage(ONE + '[[backends]]\nid = "a"\nurl = "http://10.9.9.9"\n')
    it.tell(entry("a"), entry("b"), {"id": "c", "url": "HTTP://10.9.9.9:80/v1/"})
    assert it.served.ids == ["a", "b"]
    assert it.served["a"].url == "http://10.9.9.9"
    assert [each["key"] for each in it.state["clashes"]] == ["a", "c"]


def test_the_first_of_two_discoveries_wins(stage: Any) -> None:
    it = stage(ONE + '[[discovery]]\nplugin = "told"\nother = 1\n')
    it.tell(entry("a", "1"), by=1)
    assert it.discoveries.source_of("a") == "told-2"
    it.tell(entry("a", "2"))
    assert it.served["a"].url == "http://10.0.0.2:8080"
    assert it.discoveries.source_of("a") == "told"
    it.tell(then_s=6)
    assert it.served["a"].url == "http://10.0.0.1:8080"


def test_s_reg_1_one_server_under_several_spellings_is_one_backend(stage: Any) -> None:
    it = stage('[[discovery]]\nplugin = "told"\nallow = ["b"]\n')
    it.tell(
        {"id": "one", "url": "http://b:80"},
        {"id": "two", "url": "http://b/"},
        {"id": "three", "url": "http://B"},
        {"id": "one", "url": "http://b:81"},
    )
    assert it.served.ids == ["one"]
    assert it.served["one"].url == "http://b"


def test_one_that_vanishes_is_kept_and_then_goes(stage: Any) -> None:
    it = stage()
    it.tell(entry("a"), entry("b"), entry("c"))
    it.tell(entry("a"), entry("b"), then_s=4.8)
    assert it.served.ids == ["a", "b", "c"]
    assert it.state["held"] == ["c"]
    it.clock.advance(0.3)
    assert it.served.ids == ["a", "b"]


def test_flapping_does_not_flap_what_is_served(stage: Any) -> None:
    it = stage()
    it.tell(entry("a"), entry("b"), entry("c"))
    seen = len(it.served.configs)
    for _ in range(6):
        it.tell(entry("a"), entry("b"), then_s=4)
        it.tell(entry("a"), entry("b"), entry("c"), then_s=1)
    assert all({"a", "b", "c"} == {each.id for each in c.backends} for c in it.served.configs[seen:])
    it.tell(entry("a"), entry("b"), then_s=50)
    assert "c" in it.served.ids  # by now it is kept for a minute
    it.clock.advance(11)
    assert "c" not in it.served.ids


def test_an_empty_set_is_not_believed_for_a_minute(stage: Any) -> None:
    it = stage()
    it.tell(entry("a"), entry("b"), entry("c"))
    it.tell(then_s=59)
    assert it.served.ids == ["a", "b", "c"]
    it.clock.advance(2)
    assert it.served.ids == []


def test_a_new_one_takes_the_place_of_one_that_is_merely_held(stage: Any) -> None:
    it = stage()
    it.tell(entry("a", "1"), entry("b"), entry("c"))
    it.tell(entry("new", "1"), entry("b"), entry("c"))
    assert sorted(it.served.ids) == ["b", "c", "new"]
    assert it.state["held"] == []


def test_a_reload_keeps_a_discovery_whose_table_is_as_it_was(stage: Any) -> None:
    it = stage()
    it.tell(entry("a"), entry("b"))
    it.configure(ONE + '[[backends]]\nid = "b"\nurl = "http://10.9.9.9"\n')
    assert len(it.made) == 1
    assert it.made[0].running
    assert it.served.ids == ["b", "a"]
    assert it.served["b"].url == "http://10.9.9.9"
    it.configure(ONE)
    assert it.served["b"].url != "http://10.9.9.9"


def test_a_changed_table_keeps_the_set_until_it_tells_another(stage: Any) -> None:
    it = stage()
    it.tell(entry("a"), entry("b"))
    it.configure('[[discovery]]\nplugin = "told"\nprefix = "new"\n')
    assert [each.running for each in it.made] == [False, True]
    assert it.served.ids == ["a", "b"]
    it.tell(entry("a"), entry("c"), by=1)
    assert it.served.ids == ["a", "c", "b"]
    it.clock.advance(6)
    assert it.served.ids == ["a", "c"]
    it.made[0].update([entry("z")])  # a stopped one that goes on talking
    it.clock.advance(1)
    assert it.served.ids == ["a", "c"]


def test_a_changed_table_takes_over_by_its_own_rules_and_only_its_own(stage: Any) -> None:
    it = stage(ONE + ONE + "second = 1\n")
    it.tell(entry("a"), {"id": "l", "url": "http://127.0.0.1:7"})
    it.tell(entry("b"), by=1)
    it.configure(ONE + 'allow = ["10.0.0.0/8"]\n' + ONE + "second = 2\n")
    assert it.served.ids == ["a", "b"]
    assert [it.discoveries.source_of(id) for id in "ab"] == ["told", "told-2"]


def test_a_table_that_is_taken_away_takes_its_backends_along(stage: Any) -> None:
    it = stage()
    it.tell(entry("a"))
    it.configure('[[backends]]\nid = "f"\nurl = "http://10.9.9.9"\n')
    assert it.served.ids == ["f"]
    assert not it.made[0].running


def test_the_ways_in_are_narrowed_at_a_reload_too(stage: Any) -> None:
    it = stage()
    it.tell({"id": "a", "url": "http://127.0.0.1:9901"}, entry("b"), entry("c"))
    assert "a" in it.served.ids
    it.configure('admin = ["tcp:9901:interface=127.0.0.1"]\n' + ONE)
    it.clock.advance(6)
    assert it.served.ids == ["b", "c"]


def test_defaults_fill_what_an_entry_leaves_out(stage: Any, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret-word")
    key.chmod(0o600)
    it = stage(
        f'{ONE}[discovery.defaults]\nweight = 7.0\nmodels = ["m"]\napi_key_file = "{key}"\n'
        '[discovery.defaults.labels]\npool = "x"\nzone = "y"\n[discovery.defaults.tls]\nverify = false\n'
    )
    it.tell(entry("a", labels={"zone": "z"}), {"id": "b", "url": "https://10.0.0.1", "weight": 1.0})
    a, b = it.served["a"], it.served["b"]
    assert (a.weight, a.models, dict(a.labels)) == (7.0, ("m",), {"pool": "x", "zone": "z"})
    assert a.api_key.reveal() == "secret-word"
    assert a.tls.verify
    assert (b.weight, b.tls.verify) == (1.0, False)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('allow = ["10.0.0.1/8"]', "discovery[0].allow[0]"),
        ("hold_down_s = -1", "discovery[0].hold_down_s"),
        ("defaults = 7", "discovery[0].defaults"),
        ('defaults = {id = "a", url = "http://b"}', "discovery[0].defaults.id"),
        ("defaults = {wieght = 1}", "discovery[0].defaults.wieght"),
        ("defaults = {weight = 0}", "discovery[0].defaults.weight"),
    ],
)
def test_faults_of_the_table_have_their_place(text: str, where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(ONE + text, source="", base_dir="/")
    assert refused.value.faults[0].where == where


def test_the_set_outlives_a_restart_with_a_state_file(stage: Any, tmp_path: Path) -> None:
    text = f'{ONE}state_file = "{tmp_path}/found.json"\n'
    first = stage(text)
    assert first.served.ids == []
    first.tell(entry("a"), entry("b"), entry("c", weight=2.0))
    second = stage(text)
    second.clock.advance(1)
    assert second.served.ids == ["a", "b", "c"]
    assert second.served["c"].weight == 2.0
    assert (second.state["from_state_file"], second.state["told"]) == (True, False)
    second.tell(entry("a"), entry("b"), entry("d"), then_s=6)
    assert second.served.ids == ["a", "b", "d"]
    assert not second.state["from_state_file"]
    assert (tmp_path / "found.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"plugin": "other", "entries": []}', b"\xff"])
def test_a_state_file_that_is_no_use_is_no_harm(stage: Any, tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "found.json").write_bytes(raw)
    it = stage(f'{ONE}state_file = "{tmp_path}/found.json"\n')
    it.tell(entry("a"))
    assert it.served.ids == ["a"]
    assert len(json.loads((tmp_path / "found.json").read_bytes())["entries"]) == 1


def test_a_state_file_that_cannot_be_written_is_told_and_no_harm(stage: Any, tmp_path: Path) -> None:
    it = stage(f'{ONE}state_file = "{tmp_path}/none/found.json"\n')
    it.tell(entry("a"))
    assert it.served.ids == ["a"]


def test_a_discovery_that_does_not_start_leaves_the_others(stage: Any, expected_failures: Any) -> None:
    it = stage(ONE + "broken = true\n" + ONE)
    assert len(expected_failures(OSError)) == 1
    it.tell(entry("a"), by=1)
    assert it.served.ids == ["a"]
    assert it.state["error"] == "did not start: no luck"
    assert not it.state["connected"]


def test_a_discovery_that_does_not_stop_keeps_nobody(stage: Any) -> None:
    it = stage()
    it.made[0].ending = Deferred()
    done: list[Any] = []
    it.discoveries.stop().addCallback(done.append)
    it.clock.advance(3)
    assert done


def test_many_changes_at_a_time_are_one(stage: Any) -> None:
    it = stage()
    seen = len(it.served.configs)
    for count in range(1, 50):
        it.made[0].update([entry("a", str(n)) | {"id": f"b{n}"} for n in range(count)])
    it.clock.advance(1)
    assert len(it.served.configs) - seen <= 2
    assert len(it.served.ids) == 49


def test_a_fault_in_serving_is_logged_and_the_next_change_is_served(
    stage: Any, expected_failures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = stage()
    good = it.served.apply

    def bad(config: Any) -> None:
        raise ZeroDivisionError

    it.served.apply = bad
    it.tell(entry("a"))
    assert len(expected_failures(ZeroDivisionError)) == 1
    it.served.apply = good
    it.tell(entry("a"), entry("b"))
    assert it.served.ids == ["a", "b"]


def test_a_source_is_awaited_until_it_has_told_or_is_known_from_before(stage: Any, tmp_path: Path) -> None:
    text = f'{ONE}state_file = "{tmp_path}/found.json"\n'
    it = stage(text + ONE)
    word = it.gateway.first_word
    it.tell(entry("a"))
    assert it.gateway.first_word is word is not None
    it.tell(by=1)
    assert it.gateway.first_word is None
    it.configure(ONE + "more = 1\n" + ONE + "more = 2\n")
    assert it.gateway.first_word is not None
    it.tell(by=2)
    it.tell(by=3)
    assert it.gateway.first_word is None
    again = stage(text)
    again.clock.advance(1)
    assert again.gateway.first_word is None


def test_nobody_waits_for_one_that_did_not_start(stage: Any, expected_failures: Any) -> None:
    it = stage(ONE + "broken = true\n")
    expected_failures()
    assert it.gateway.first_word is None
