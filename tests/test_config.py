"""Configuration: what is accepted, what it becomes, and how each fault reads."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace
from twisted.internet.endpoints import _parse, quoteStringArgument, serverFromString
from twisted.internet.testing import MemoryReactorClock

import llmgw.config
from llmgw.config import (
    Admission,
    BackendConfig,
    BackendTimeouts,
    BackendTls,
    BreakerConfig,
    Config,
    Hold,
    Limits,
    LoaderConfig,
    LogConfig,
    ModelConfig,
    PluginConfig,
    RetryConfig,
    Secret,
    StoreConfig,
    Timeouts,
    config_from_options,
    is_loopback_endpoint,
    load_config,
    parse_backend,
    parse_backend_option,
    parse_config,
    parse_store,
)
from llmgw.config.files import DISK
from llmgw.config.places import _endpoint, base_url
from llmgw.config.reader import Reader, Rule, keys_of
from llmgw.config.words import shown
from llmgw.errors import ConfigError
from llmgw.values import Policy

ONE = '[[backends]]\nid = "a"\nurl = "http://10.0.0.1:8080"\n'


class Files:
    """Files by absolute path: content and permission bits."""

    def __init__(self, **named: tuple[str, int]) -> None:
        self.held = {f"/c/{name.replace('__', '/').replace('_', '.')}": each for name, each in named.items()}
        self.refused: set[str] = set()

    def mode(self, path: str) -> int:
        if path not in self.held:
            raise FileNotFoundError(2, "No such file or directory")
        mode = self.held[path][1]
        return mode if stat.S_IFMT(mode) else stat.S_IFREG | mode

    def read(self, path: str) -> bytes:
        if path in self.refused:
            raise PermissionError(13, "Permission denied")
        if path not in self.held:
            raise FileNotFoundError(2, "No such file or directory")
        return self.held[path][0].encode()


def parse(text: str, files: Files | None = None) -> Config:
    return parse_config(text, source="", base_dir="/c", files=files or Files())


def faults(text: str, files: Files | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, files)
    return [str(fault) for fault in caught.value.faults]


# --- tables and types ----------------------------------------------------------


def test_what_is_absent_has_its_default() -> None:
    config = parse(ONE)
    assert config.listen == ("tcp:8000:interface=127.0.0.1:backlog=1024",)
    assert config.router == PluginConfig("expected-ttft")
    assert config.health == (PluginConfig("llamacpp"),)
    assert config.rate_limiter == PluginConfig("local")
    assert config.timeouts.response_head_s == 960
    assert config.limits.body_bytes == 64 * 1024 * 1024
    assert config.warnings == ()


def test_the_file_of_the_contract_is_accepted() -> None:
    config = parse(
        """
listen  = ["ssl:8443:privateKey=key.pem:certKey=cert.pem"]
admin   = ["tcp:9901:interface=127.0.0.1"]
auth    = ["keys:/etc/llmgw/keys.toml"]
workers = 1
[router]
plugin = "adaptive"
seed = 7
[[health]]
plugin = "llamacpp"
interval_s = 5.0
[rate_limiter]
plugin = "redis"
url = "redis://127.0.0.1:6379/0"
[[rate_limits]]
scope = "key"
requests_per_minute = 600
tokens_per_minute = 200000
concurrent = 32
[[discovery]]
plugin = "etcd"
endpoints = ["http://127.0.0.1:2379"]
prefix = "/llmgw/"
[[backends]]
id = "gpu-0"
url = "http://10.0.1.5:8080"
weight = 10.0
models = ["llama-3-8b"]
max_connections = 4
context_length = 8192
api_key_file = "gpu-0.key"
[[models]]
name = "gpt-4o-mini"
target = "llama-3-8b"
max_tokens = 2048
[timeouts]
[limits]
[hold]
[breaker]
[retry]
[log]
""",
        Files(**{"key_pem": ("k", 0o640), "cert_pem": ("c", 0o644), "gpu-0_key": (" sk-1\n", 0o600)}),
    )
    assert config.listen == ("ssl:8443:privateKey=/c/key.pem:certKey=/c/cert.pem:backlog=1024",)
    assert config.router == PluginConfig("adaptive", {"seed": 7})
    assert config.health == (PluginConfig("llamacpp", {"interval_s": 5.0}),)
    assert config.rate_limiter.options == {"url": "redis://127.0.0.1:6379/0"}
    assert config.rate_limits == (
        Policy("limit-1", requests_per_minute=600.0, tokens_per_minute=200000.0, concurrent=32),
    )
    backend = config.backends[0]
    assert (backend.weight, backend.models, backend.max_connections) == (10.0, ("llama-3-8b",), 4)
    assert backend.api_key == Secret("sk-1")
    assert "sk-1" not in repr(config)
    assert config.models == (ModelConfig("gpt-4o-mini", "llama-3-8b", 2048),)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("worker = 1", "worker: unknown key; did you mean workers?"),
        ("[timeouts]\nconect_s = 1", "timeouts.conect_s: unknown key; did you mean connect_s?"),
        ("zzz = 1", "zzz: unknown key"),
        ('"a b\\n" = 1', '"a b\\n": unknown key'),
        ("source = 'x'", "source: unknown key; did you mean store?"),
        ("workers = true", "workers: expected an integer, got a boolean"),
        ("workers = 1.0", "workers: expected an integer, got a float"),
        ("workers = 0", "workers: must be at least 1 and at most 1024, got 0"),
        ("workers = 2000-01-01", "workers: expected an integer, got a date or time"),
        ("listen = 'tcp:1'", "listen: expected an array, got a string"),
        ("listen = [1]", "listen[0]: expected a string, got an integer"),
        ("listen = []", "listen: must name at least one endpoint"),
        ("listen = ['']", "listen[0]: must not be empty"),
        ("timeouts = 3", "timeouts: expected a table, got an integer"),
        ("[[timeouts]]", "timeouts: expected a table, got an array"),
        ("[timeouts]\nconnect_s = '2'", "timeouts.connect_s: expected a number, got a string"),
        ("[timeouts]\nconnect_s = true", "timeouts.connect_s: expected a number, got a boolean"),
        ("[timeouts]\nheartbeat_s = true", "timeouts.heartbeat_s: expected a number, got a boolean"),
        ("[timeouts]\nconnect_s = 0", "timeouts.connect_s: must be above 0 and at most 604800, got 0"),
        ("[timeouts]\nconnect_s = nan", "timeouts.connect_s: must be above 0 and at most 604800, got nan"),
        ("[timeouts]\nconnect_s = inf", "timeouts.connect_s: must be above 0 and at most 604800, got inf"),
        (
            "[timeouts]\nheartbeat_s = 0",
            "timeouts.heartbeat_s: must be at least 1 and at most 3600 (false = off), got 0",
        ),
        (
            "[[backends]]\nid = 'a'\nurl = 'http://b'\nkind = 'loud'",
            'backends[0].kind: must be one of auto, llama-server, openai, ollama; got "loud"',
        ),
        (
            "[[backends]]\nid = 'a'\nurl = 'http://b'\nkind = {}",
            "backends[0].kind: must be one of auto, llama-server, openai, ollama; got a dict",
        ),
        ("[log]\naccess_sample = 2", "log.access_sample: must be at least 0 and at most 1, got 2"),
        ('[log]\naccess = "a\\u0000"', "log.access: a path cannot hold a NUL character"),
        ('auth = ["keys:\\u0000"]', "auth[0]: a path cannot hold a NUL character"),
        (
            '[[discovery]]\nplugin = "etcd"\nstate_file = "\\u0000"',
            "discovery[0].state_file: a path cannot hold a NUL character",
        ),
        (
            "[[rate_limits]]\nscope = 'all'\nconcurrent = 1",
            'rate_limits[0].scope: must be one of key, global; got "all"',
        ),
        (
            "[[rate_limits]]\nenforce = 1\nconcurrent = 1",
            "rate_limits[0].enforce: expected true or false, got an integer",
        ),
        (
            "[[rate_limits]]\nscope = 'key'",
            "rate_limits[0]: limits nothing: set requests_per_minute, tokens_per_minute or concurrent",
        ),
        ("rate_limits = [1]", "rate_limits[0]: expected a table, got an integer"),
        ("rate_limits = 1", "rate_limits: expected an array, got an integer"),
        ("[[health]]\ninterval_s = 5", "health[0].plugin: missing"),
        ("[router]\nplugin = ''", "router.plugin: must not be empty"),
        (
            "[limits]\nbody_bytes = 1",
            "limits.body_bytes: must be at least 256 and at most 1099511627776, got 1",
        ),
        ("[limits]\nbody_total_bytes = 256", "limits.body_bytes: must not be above body_total_bytes (256)"),
        ("[hold]\nmin_s = 50", "hold.min_s: must not be above max_s (45)"),
        ("[retry]\nbackoff_min_s = 1", "retry.backoff_min_s: must not be above backoff_max_s (0.25)"),
        (
            "[limits]\ntrusted_networks = ['10.0.0.0/33']",
            'limits.trusted_networks[0]: not an address or CIDR network: "10.0.0.0/33"',
        ),
        (
            "[limits]\ntrusted_networks = ['10.0.0.1/8']",
            'limits.trusted_networks[0]: "10.0.0.1/8" has host bits set; did you mean 10.0.0.0/8?',
        ),
        (
            "[cors]\norigins = ['app.example']",
            'cors.origins[0]: not an origin such as https://app.example: "app.example"',
        ),
        (
            "[cors]\norigins = ['https://a/b']",
            'cors.origins[0]: not an origin such as https://app.example: "https://a/b"',
        ),
        (
            "[cors]\norigins = ['https://[']",
            'cors.origins[0]: not an origin such as https://app.example: "https://["',
        ),
        ("auth = ['keys:']", "auth[0]: keys: needs the path of the key file"),
    ],
)
def test_a_fault_names_its_key_and_what_is_wrong(text: str, fault: str) -> None:
    assert faults(text) == [fault]


def test_all_faults_are_told_at_once_in_the_order_of_the_file() -> None:
    text = 'workers = 0\nlisten = ["tcp:x:interface=127.0.0.1"]\n[[backends]]\nurl = "ftp://x"\nwieght = 1\n'
    assert faults(text) == [
        "workers: must be at least 1 and at most 1024, got 0",
        'listen[0]: tcp: bad port "x"',
        'backends[0].url: not an http(s) URL: "ftp://x"',
        "backends[0].wieght: unknown key; did you mean weight?",
        "backends[0].id: missing",
    ]


def test_faults_stand_behind_the_name_of_the_file() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("workers = 0\nx = 1", source="/c/a.toml", base_dir="/c")
    assert str(caught.value).splitlines() == [
        "/c/a.toml: workers: must be at least 1 and at most 1024, got 0",
        "/c/a.toml: x: unknown key",
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a = = 1", "not TOML: Invalid value (at line 1, column 5)"),
        ("workers = 1\nworkers = 2\n", "Cannot overwrite a value (at line 2, column 12)"),
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("a = " + "[" * 100_000, "nested too deeply"),
        ("a = " + "9" * 5000, "not TOML"),
    ],
)
def test_what_is_no_toml_says_where(text: str, part: str) -> None:
    (fault,) = faults(text)
    assert part in fault


def test_integers_become_numbers_where_numbers_are_wanted() -> None:
    config = parse(
        "[timeouts]\nconnect_s = 3\nheartbeat_s = 15\n[[backends]]\nid='a'\nurl='http://a'\nweight = 2"
    )
    assert type(config.timeouts.connect_s) is float
    assert type(config.backends[0].weight) is float
    assert config.timeouts.heartbeat_s == 15


def test_false_is_how_the_heartbeat_is_off() -> None:
    assert parse("[timeouts]\nheartbeat_s = false").timeouts.heartbeat_s == 0


def test_a_router_table_without_a_name_gives_options_to_the_default_one() -> None:
    assert parse("[router]\nseed = 1").router == PluginConfig("expected-ttft", {"seed": 1})


def test_options_of_plugins_pass_through_unread() -> None:
    text = "[router]\nplugin = 'x'\noptions = {a = [1, 'b']}\nnot_keys = true\nrest = 0\n"
    assert parse(text).router == PluginConfig("x", {"options": {"a": [1, "b"]}, "not_keys": True, "rest": 0})


def test_an_empty_list_of_health_plugins_is_the_default_one() -> None:
    assert parse("health = []").health == (PluginConfig("llamacpp"),)


def test_rate_limits_are_named_by_position_and_names_are_unique() -> None:
    text = "[[rate_limits]]\nconcurrent = 1\n[[rate_limits]]\nconcurrent = 2\nscope = 'global'\n"
    assert [policy.name for policy in parse(text).rate_limits] == ["limit-1", "limit-2"]
    assert faults(text + "name = 'limit-1'\n") == [
        'rate_limits[1].name: name "limit-1" is already that of rate_limits[0]'
    ]


@pytest.mark.parametrize("name", ["keys.k7m2p9xa", "keys."])
def test_names_of_the_limits_of_keys_are_kept_for_them(name: str) -> None:
    assert faults(f"[[rate_limits]]\nconcurrent = 1\nname = '{name}'\n") == [
        f'rate_limits[0].name: names that begin with keys. are kept for the limits of keys; got "{name}"'
    ]
    for other in ("keys", "my.keys.x"):
        (policy,) = parse(f"[[rate_limits]]\nconcurrent = 1\nname = '{other}'\n").rate_limits
        assert policy.name == other


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("requests_per_minute = 0", "must be above 0 and at most 1000000000, got 0"),
        ("requests_per_minute = -1", "must be above 0 and at most 1000000000, got -1"),
        ("requests_per_minute = inf", "must be above 0 and at most 1000000000, got inf"),
        ("tokens_per_minute = 0.0", "must be above 0 and at most 1000000000000, got 0.0"),
        ("tokens_per_minute = -0.5", "must be above 0 and at most 1000000000000, got -0.5"),
        ("concurrent = 0", "must be at least 1 and at most 1000000, got 0"),
        ("concurrent = 1.5", "expected an integer, got a float"),
        ("burst_s = 0", "must be above 0 and at most 86400, got 0"),
        ("name = ''", 'must be letters, digits, . _ -; got ""'),
        ("name = 'a b'", 'must be letters, digits, . _ -; got "a b"'),
    ],
)
def test_a_limit_that_lets_nothing_pass_is_refused(line: str, fault: str) -> None:
    assert f"rate_limits[0].{line.partition(' ')[0]}: {fault}" in faults(f"[[rate_limits]]\n{line}\n")


@pytest.mark.parametrize("text", ["*", "https://app.example", "http://localhost:3000", "https://[::1]:8"])
def test_origins_are_taken_as_browsers_send_them(text: str) -> None:
    assert parse(f"[cors]\norigins = ['{text}']").cors.origins == (text,)


def test_networks_come_out_in_their_usual_spelling() -> None:
    config = parse("[limits]\ntrusted_networks = ['10.1.2.3', '2001:DB8::/32']")
    assert config.limits.trusted_networks == ("10.1.2.3/32", "2001:db8::/32")


# --- backends ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://b", "http://b"),
        ("http://b/", "http://b"),
        ("http://b/v1", "http://b"),
        ("http://b/v1/", "http://b"),
        ("http://b//", "http://b"),
        ("http://b/prefix/", "http://b/prefix"),
        ("http://b/prefix/v1", "http://b/prefix"),
        ("http://b/v1/x", "http://b/v1/x"),
        ("http://b/av1", "http://b/av1"),
        ("http://b/v1/v1", "http://b"),
        ("http://b/v1//v1", "http://b"),
        ("http://b//v1", "http://b"),
        ("HTTP://Gpu-0.Example:80/", "http://gpu-0.example"),
        ("https://b:443", "https://b"),
        ("https://b:80", "https://b:80"),
        ("http://b:08080", "http://b:8080"),
        ("http://[::1]:8080/", "http://[::1]:8080"),
        ("http://[2001:DB8:0::1]", "http://[2001:db8::1]"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://a_b.svc.cluster.local.", "http://a_b.svc.cluster.local."),
        ("http://x.1a", "http://x.1a"),
    ],
)
def test_urls_have_one_form(text: str, url: str) -> None:
    assert base_url(None, "", text) == url
    assert base_url(None, "", url) == url


@pytest.mark.parametrize(
    "text",
    [
        "", "b", "b:8080", "//b", "ftp://b", "http:", "http://", "http:///x", "http://:80", "http://b:", "http://b:0",
        "http://b:65536", "http://b:x", "http://b:-1", "http://b c", "http://b\n", "http://b\\c", "http://bä",
        "http://b?x=1", "http://b?", "http://b#", "http://b/#f", "http://b/a//c", "http://b/../c", "http://b/%2E./c",
        "http://127.1", "http://0x7f.1", "http://1", "http://256.1.1.1", "http://[::1", "http://[::g]",
        "http://[fe80::1%25eth0]", "http://[127.0.0.1]", "http://-b", "http://a..b", "http://" + "a" * 300,
        "http://u:hunter2@b", "http://hunter2@b", "ftp://u:hunter2@b", "http://u:hunter2@b ", "http://u:hunter2@b:x",
    ],
)  # fmt: skip
def test_what_is_no_base_url_is_refused_without_telling_passwords(text: str) -> None:
    with pytest.raises(ValueError, match=r"URL|host|port|path|query|password") as caught:
        base_url(None, "", text)
    assert "hunter2" not in str(caught.value)


@given(st.text(st.sampled_from("htps:/.@[]%0v1x?#-_A\\ é"), max_size=30))
def test_a_url_is_refused_or_settled(text: str) -> None:
    try:
        url = base_url(None, "", f"http://{text}")
    except ValueError:
        return
    assert base_url(None, "", url) == url
    assert not urlsplit(url).path.endswith(("/", "/v1"))


def test_ids_and_urls_are_unique_after_normalisation() -> None:
    text = "".join(
        f'[[backends]]\nid = "{name}"\nurl = "{url}"\n'
        for name, url in [("a", "http://b:80/v1"), ("b", "http://c"), ("a", "http://B/")]
    )
    assert faults(text) == [
        'backends[2].id: id "a" is already that of backends[0]',
        'backends[2].url: URL "http://b" is already that of backends[0]',
    ]


def test_a_bad_backend_does_not_shift_the_places_of_others() -> None:
    bad = '[[backends]]\nid = "x"\n'
    assert faults(ONE + bad + ONE) == [
        "backends[1].url: missing",
        'backends[2].id: id "a" is already that of backends[0]',
        'backends[2].url: URL "http://10.0.0.1:8080" is already that of backends[0]',
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("weight = 0", "backends[0].weight: must be above 0 and at most 1000000000, got 0"),
        ("weight = -1.5", "backends[0].weight: must be above 0 and at most 1000000000, got -1.5"),
        ("max_connections = 0", "backends[0].max_connections: must be at least 1 and at most 1000000, got 0"),
        ("models = []", "backends[0].models: must not be empty"),
        ("models = ['']", 'backends[0].models[0]: must be 1 to 256 printable characters; got ""'),
        ("kind = 'vllm'", 'backends[0].kind: must be one of auto, llama-server, openai, ollama; got "vllm"'),
        ("labels = {a = 1}", "backends[0].labels.a: expected a string, got an integer"),
        ("labels = 1", "backends[0].labels: expected a table, got an integer"),
        ("tls = {verify = false}", 'backends[0].tls: the URL is not https: "http://10.0.0.1:8080"'),
        ("tls = {verfy = false}", "backends[0].tls.verfy: unknown key; did you mean verify?"),
        ("timeouts = {first_token_s = 0}", "backends[0].timeouts.first_token_s: must be above 0"),
        ("api_key_file = 'no'", 'backends[0].api_key_file: cannot read "/c/no": No such file or directory'),
        ('api_key_file = "a\\u0000"', "backends[0].api_key_file: a path cannot hold a NUL character"),
        ("api_key_file = 'open'", 'backends[0].api_key_file: "/c/open" is open to other users (mode 0644)'),
        ("api_key_file = 'wide'", 'backends[0].api_key_file: "/c/wide" is writable by its group (mode 0660)'),
        ("api_key_file = 'empty'", 'backends[0].api_key_file: "/c/empty" is empty'),
        ("api_key_file = 'two'", 'backends[0].api_key_file: "/c/two" must hold one word of visible ASCII'),
        ("api_key_file = 'shut'", 'backends[0].api_key_file: cannot read "/c/shut": Permission denied'),
    ],
)  # fmt: skip
def test_faults_of_a_backend(line: str, fault: str) -> None:
    files = Files(
        open=("k", 0o644), wide=("k", 0o660),
        empty=(" \n", 0o600), two=("topsecret two", 0o600), shut=("k", 0o600),
    )  # fmt: skip
    files.refused.add("/c/shut")
    (found,) = faults(ONE + line.replace("'", '"'), files)
    assert found.startswith(fault)
    assert "topsecret" not in found


def test_tls_and_timeouts_of_a_backend() -> None:
    text = (
        ONE.replace("http:", "https:")
        + "tls = {ca_file = 'ca.pem'}\ntimeouts = {response_head_s = 5}\nraw = true\n"
    )
    backend = parse(text, Files(ca_pem=("x", 0o644))).backends[0]
    assert backend.tls == BackendTls(ca_file="/c/ca.pem")
    assert backend.timeouts == BackendTimeouts(response_head_s=5.0)
    assert backend.raw


def test_risky_but_allowed_settings_are_warned_of() -> None:
    text = (
        "workers = 2\nauth = ['anonymous']\nlisten = ['tcp:80']\n"
        "[timeouts]\nupstream_idle_s = 5\n[[rate_limits]]\nconcurrent = 1\n"
        + ONE.replace("http:", "https:") + "tls = {verify = false}\n"
        + ONE.replace('"a"', '"b"') + "api_key_file = 'k'\n"
        + ONE.replace('"a"', '"c"').replace("10.0.0.1", "127.0.0.1") + "api_key_file = 'k'\n"
    )  # fmt: skip
    assert [
        line.rpartition(": ")[0].partition(": ")[0] for line in parse(text, Files(k=("k", 0o600))).warnings
    ] == [
        "backends[0].tls.verify",
        "backends[1].api_key_file",
        "auth",
        "rate_limiter.plugin",
        "timeouts.upstream_idle_s",
    ]
    assert parse("workers = 1").warnings == ("no [[backends]] and no [[discovery]]: every model is unknown",)


def test_a_discovered_backend_may_not_name_files() -> None:
    assert parse_backend({"id": "a", "url": "http://a/v1"}) == BackendConfig("a", "http://a")
    with pytest.raises(ConfigError) as caught:
        parse_backend({"id": "a", "url": "http://a", "api_key_file": "/etc/shadow"}, where="etcd/a")
    assert str(caught.value) == "etcd/a.api_key_file: may not name a file here"
    with pytest.raises(ConfigError, match=r"tls: the URL is not https"):
        parse_backend({"id": "a", "url": "http://a", "tls": {"verify": False}})
    with pytest.raises(ConfigError, match=r"url: missing"):
        parse_backend({"id": "a"})


# --- secrets -------------------------------------------------------------------


def test_a_secret_does_not_print_itself() -> None:
    secret = Secret("hunter2")
    assert {repr(secret), str(secret), f"{secret}", f"{secret!r:>3}"} == {"***"}
    assert secret.reveal() == "hunter2"
    assert secret == Secret("hunter2")
    assert len({secret, Secret("hunter2"), Secret("other")}) == 2
    assert secret != "hunter2"


def test_a_configuration_with_secrets_is_compared_and_replaced_but_never_copied() -> None:
    config = parse('admin_token_file = "t"\n' + ONE, Files(t=("tok", 0o600)))
    assert replace(config, workers=2).admin_token is config.admin_token
    for token in ("tok", "other"):
        other = parse('workers = 2\nadmin_token_file = "t"\n' + ONE, Files(t=(token, 0o600)))
        assert (replace(config, workers=2) == other) is (token == "tok")
    for leak in (copy.deepcopy, pickle.dumps, msgspec.json.encode, msgspec.to_builtins):
        with pytest.raises(TypeError):
            leak(config)


def test_the_admin_token_is_read_and_opens_the_admin_listener() -> None:
    text = 'admin = ["tcp:9901"]\nadmin_token_file = "t"\n' + ONE
    config = parse(text, Files(t=("tok\n", 0o440)))
    assert config.admin_token == Secret("tok")
    assert faults(text) == ['admin_token_file: cannot read "/c/t": No such file or directory']


# --- aliases -------------------------------------------------------------------


def models(*pairs: tuple[str, str, int]) -> str:
    return "".join(
        f'[[models]]\nname = "{name}"\n'
        + f'target = "{target}"\n' * bool(target)
        + f"max_tokens = {cap}\n" * bool(cap)
        for name, target, cap in pairs
    )


def test_aliases_come_out_resolved_with_the_smallest_limit_on_the_way() -> None:
    config = parse(models(("a", "b", 0), ("b", "c", 100), ("c", "", 50), ("d", "real", 7), ("e", "e", 0)))
    assert config.models == (
        ModelConfig("a", "c", 50),
        ModelConfig("b", "c", 50),
        ModelConfig("c", "c", 50),
        ModelConfig("d", "real", 7),
        ModelConfig("e", "e"),
    )


def test_aliases_in_a_circle_are_refused_once() -> None:
    assert faults(models(("x", "a", 0), ("a", "b", 0), ("b", "a", 0))) == [
        "models[0].target: aliases run in a circle: x -> a -> b -> a"
    ]


def test_an_alias_may_not_hide_a_model_nor_be_given_twice() -> None:
    text = ONE + "models = ['m', 'n']\n" + models(("m", "", 9), ("n", "m", 0), ("m", "", 8))
    assert faults(text) == [
        'models[2].name: name "m" is already that of models[0]',
        'models[1].name: "n" is a model of backends[0]; an alias would hide it',
    ]


def test_a_bad_alias_is_told_once() -> None:
    assert faults("[[models]]\ntarget = 'a'\n" + models(("a", "", 1))) == ["models[0].name: missing"]
    assert faults("[[models]]\nname = 'a'\ntarget = ''\n") == ["models[0].target: must not be empty"]


# --- endpoints -----------------------------------------------------------------

PEMS = Files(
    key_pem=("k", 0o600), cert_pem=("c", 0o644), chain_pem=("c", 0o644),
    dh_pem=("d", 0o644), server_pem=("s", 0o600), tls=("", stat.S_IFDIR | 0o755),
    pipe=("", stat.S_IFIFO | 0o600),
)  # fmt: skip


@pytest.mark.parametrize(
    ("given_", "settled"),
    [
        ("tcp:80", "tcp:80"),
        ("tcp:80:interface=\\:\\:1", "tcp:80:interface=\\:\\:1"),
        ("ssl:443:privateKey=key.pem:certKey=cert.pem", "ssl:443:privateKey=/c/key.pem:certKey=/c/cert.pem"),
        ("ssl:443:key.pem:cert.pem", "ssl:443:/c/key.pem:/c/cert.pem"),
        ("ssl:port=443:privateKey=/c/key.pem", "ssl:port=443:privateKey=/c/key.pem"),
        ("ssl:443", "ssl:443:privateKey=/c/server.pem"),
        (
            "ssl:443:key.pem:extraCertChain=chain.pem:dhParameters=dh.pem:interface=::1".replace(
                "::1", "\\:\\:1"
            ),
            "ssl:443:/c/key.pem:extraCertChain=/c/chain.pem:dhParameters=/c/dh.pem:interface=\\:\\:1",
        ),
        ("haproxy:ssl:443:key.pem", "haproxy:ssl:443:/c/key.pem"),
        ("haproxy:unix:s", "haproxy:unix:/c/s"),
        ("llmtls:tcp:443:privateKey=key.pem", "llmtls:tcp:443:privateKey=/c/key.pem"),
        (
            "llmtls:tcp:443:certKey=cert.pem:privateKey=key.pem:clientCA=chain.pem",
            "llmtls:tcp:443:certKey=/c/cert.pem:privateKey=/c/key.pem:clientCA=/c/chain.pem",
        ),
        ("llmtls:haproxy:tcp:443:certs=tls", "llmtls:haproxy:tcp:443:certs=/c/tls"),
        (
            r"llmtls:haproxy\:tcp\:443\:interface=127.0.0.1:certs=tls:networks=10.0.0.0/8",
            "llmtls:haproxy:tcp:443:interface=127.0.0.1:certs=/c/tls:networks=10.0.0.0/8",
        ),
        ("llmtls:proxied:unix:s:certs=tls", "llmtls:proxied:unix:/c/s:certs=/c/tls"),
        ("llmtls:systemd:INET:name=gw:certs=tls", "llmtls:systemd:INET:name=gw:certs=/c/tls"),
        ("unix:run/gw.sock:mode=660", "unix:/c/run/gw.sock:mode=660"),
        ("unix:address=gw.sock", "unix:address=/c/gw.sock"),
        ("unix:/run/gw.sock", "unix:/run/gw.sock"),
        ("unix:a\\:b\\\\c", "unix:/c/a\\:b\\\\c"),
        ("unix:a\\=b", "unix:/c/a\\=b"),
        ("tls:tls:443", "tls:/c/tls:443"),
        ("systemd:INET:name=gw", "systemd:INET:name=gw"),
        ("onion:80:privateKey=key.pem", "onion:80:privateKey=key.pem"),
    ],
)
def test_paths_in_endpoint_strings_become_absolute(given_: str, settled: str) -> None:
    text = "auth = ['anonymous']\nlisten = ['" + given_ + "']\n"
    config = parse(text.replace("listen", "admin") + "admin_token_file = 'key.pem'\n", PEMS)
    assert config.admin == (settled,)


@pytest.mark.parametrize(
    ("description", "fault"),
    [
        (
            "ssl:443:privateKey=no.pem:certKey=cert.pem",
            'privateKey: cannot read "/c/no.pem": No such file or directory',
        ),
        (
            "ssl:443:privateKey=cert.pem",
            'privateKey: "/c/cert.pem" is open to other users (mode 0644): chmod 600 /c/cert.pem',
        ),
        ("ssl:443:key.pem:certKey=no.pem", 'certKey: cannot read "/c/no.pem": No such file or directory'),
        ("ssl:443:key.pem:certKey=", "certKey: is empty"),
        ("ssl:443:key.pem:certkey=x", 'ssl: unknown parameter "certkey"; did you mean certKey?'),
        (
            "ssl:443:key.pem:privateKey=key.pem",
            'ssl: doubled parameter "privateKey"',
        ),
        ("tls:no", 'path: cannot read "/c/no": No such file or directory'),
        ("tcp:80:127.0.0.1:50:9", 'tcp: unknown parameter "9"'),
        ("tcp:", 'tcp: bad port ""'),
        ("tcp", "tcp: port is missing"),
        ("tcp:65536", 'tcp: bad port "65536"'),
        ("tcp:http", 'tcp: bad port "http"'),
        ("unix", "unix: address is missing"),
        ("unix:", "address: is empty"),
        ("tcp:80\\", "ends in a lone backslash"),
        (":80", "names no endpoint type"),
        ("port=80", "names no endpoint type"),
        ("llmtls", "wraps no endpoint"),
        ("proxied:networks=10.0.0.0/8", "wraps no endpoint"),
        ("llmtls:ssl:1:key.pem", "llmtls: wraps an endpoint without TLS, such as tcp:8443, not ssl"),
        ("llmtls:tcp:1:certs=no", 'certs: cannot read "/c/no": No such file or directory'),
        ("llmtls:tcp:1:cert=tls", 'tcp: unknown parameter "cert"; did you mean certs?'),
        (
            "llmtls:tcp:1:privateKey=cert.pem",
            'privateKey: "/c/cert.pem" is open to other users (mode 0644): chmod 600 /c/cert.pem',
        ),
        ("tcp:1:networks=10.0.0.0/8", 'tcp: unknown parameter "networks"'),
        ("ssl:443:pipe", 'privateKey: cannot read "/c/pipe": it is no regular file'),
        ("ssl:443:key.pem:certKey=pipe", 'certKey: cannot read "/c/pipe": it is no regular file'),
        ("ssl:443:key.pem:certKey=tls", 'certKey: cannot read "/c/tls": it is no regular file'),
        ("llmtls:tcp:1:certs=pipe", 'certs: "/c/pipe" is no folder'),
        ("llmtls:tcp:1:certs=key.pem", 'certs: "/c/key.pem" is no folder'),
    ],
)
def test_faults_of_endpoint_strings(description: str, fault: str) -> None:
    assert faults(f"auth = ['anonymous']\nlisten = ['{description}']\n", PEMS) == [f"listen[0]: {fault}"]


def test_each_missing_file_of_one_endpoint_is_told() -> None:
    assert len(faults('auth = ["anonymous"]\nlisten = ["ssl:1:privateKey=a:certKey=b:dhParameters=c"]')) == 3


@given(
    kind=st.sampled_from(["tcp", "ssl", "tls", "unix", "x"]),
    rest=st.text(st.sampled_from("ab:=\\/. \n"), max_size=25),
)
def test_endpoint_strings_are_taken_apart_as_twisted_does(kind: str, rest: str) -> None:
    description = f"{kind}:{rest}"
    try:
        arguments, keywords = _parse(description)
    except RuntimeError:  # Twisted runs off the end of a lone backslash
        with pytest.raises(ValueError, match="lone backslash"):
            _endpoint(description)
        return
    endpoint = _endpoint(description)
    assert endpoint.kind == arguments[0] or not arguments
    assert {value for _, value in endpoint.places.values()} <= {*arguments, *keywords.values()}
    for name, value in keywords.items():
        assert endpoint.places[name][1] == value or name in endpoint.surplus


@given(name=st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1), named=st.booleans())
def test_a_settled_path_is_what_twisted_reads(name: str, named: bool) -> None:
    quoted = quoteStringArgument(name).replace("=", "\\=")
    reader = Reader("/c", None)
    rule = get_args(keys_of(Config)["listen"].hint)[0]
    settled = reader.value(rule, f"unix:{'address=' * named}{quoted}:mode=600", "listen[0]")
    arguments, keywords = _parse(settled)
    assert (keywords["address"] if named else arguments[1]) == f"/c/{name}"
    assert keywords["mode"] == "600"


@pytest.mark.parametrize(
    ("given_", "settled"),
    [
        ("tcp:80", "tcp:80:backlog=7"),
        ("tcp:80:127.0.0.1", "tcp:80:127.0.0.1:backlog=7"),
        ("tcp6:80", "tcp6:80:backlog=7"),
        ("ssl:443:key.pem", "ssl:443:/c/key.pem:backlog=7"),
        ("ssl:443", "ssl:443:privateKey=/c/server.pem:backlog=7"),
        ("tls:tls:443", "tls:/c/tls:443:backlog=7"),
        ("unix:s", "unix:/c/s:backlog=7"),
        ("haproxy:tcp:80", "haproxy:tcp:80:backlog=7"),
        ("llmtls:proxied:tcp:80:certs=tls", "llmtls:proxied:tcp:80:certs=/c/tls:backlog=7"),
        ("tcp:80:backlog=9", "tcp:80:backlog=9"),
        ("tcp:80:127.0.0.1:9", "tcp:80:127.0.0.1:9"),
        ("tcp6:80:9", "tcp6:80:9"),
        ("haproxy:tcp:80:backlog=9", "haproxy:tcp:80:backlog=9"),
        ("systemd:INET:name=gw", "systemd:INET:name=gw"),
        ("onion:80", "onion:80"),
    ],
)
def test_listeners_get_the_backlog_they_do_not_name(given_: str, settled: str) -> None:
    text = f"auth = ['anonymous']\nlisten = ['{given_}']\nadmin = ['unix:a']\n[limits]\nbacklog = 7\n"
    config = parse(text, PEMS)
    assert config.listen == (settled,)
    assert config.admin == ("unix:/c/a",)


@pytest.mark.parametrize("description", ["tcp:0", "haproxy:tcp:0", "tcp6:0", "unix:s", "tls:tls:0"])
def test_twisted_takes_the_backlog_we_write(description: str) -> None:
    (settled,) = parse(f"auth = ['anonymous']\nlisten = ['{description}']\n", PEMS).listen
    endpoint = serverFromString(MemoryReactorClock(), settled)
    while not hasattr(endpoint, "_backlog"):
        endpoint = getattr(endpoint, "_wrappedEndpoint", None) or endpoint.endpoint
    assert endpoint._backlog == 1024


@pytest.mark.parametrize(
    ("description", "local"),
    [
        ("tcp:80:interface=127.0.0.1", True),
        ("tcp:80:127.0.0.1", True),
        ("tcp:80:interface=127.9.9.9", True),
        ("tcp:80:interface=localhost", True),
        ("tcp:80:interface=\\:\\:1", True),
        ("tcp:80:interface=\\:\\:ffff\\:127.0.0.1", True),
        ("tcp6:80:interface=\\:\\:1", True),
        ("tcp6:80:50:\\:\\:1", True),
        ("ssl:443:k:c:TLS_METHOD:127.0.0.1", True),
        ("tls:d:443:interface=\\:\\:1", True),
        ("haproxy:tcp:80:interface=127.0.0.1", True),
        ("unix:/run/s", True),
        ("haproxy:unix:/run/s", True),
        ("llmtls:proxied:tcp:80:interface=127.0.0.1:certs=/c", True),
        (r"llmtls:tcp\:80\:interface=127.0.0.1:certs=/c", True),
        ("llmtls:unix:/run/s:certs=/c", True),
        ("tcp:80", False),
        ("tcp:80:interface=", False),
        ("tcp:80:interface=0.0.0.0", False),
        ("tcp:80:interface=10.0.0.1", False),
        ("tcp:80:interface=127.0.0.1.example", False),
        ("tcp6:80", False),
        ("tcp6:80:\\:\\:1", False),
        ("tls:d", False),
        ("haproxy:tcp:80", False),
        ("llmtls:proxied:tcp:80:certs=/c", False),
        ("llmtls:systemd:INET:index=0:certs=/c", False),
        ("systemd:INET:index=0", False),
        ("onion:80:interface=127.0.0.1", False),
        ("tcp:80:interface=127.0.0.1\\", False),
        ("", False),
    ],
)
def test_what_only_this_machine_can_reach(description: str, local: bool) -> None:
    assert is_loopback_endpoint(description) is local


def test_listeners_open_to_others_want_auth() -> None:
    text = 'listen = ["tcp:80:interface=127.0.0.1", "tcp:81", "systemd:INET:index=0"]\n' + ONE
    assert [fault.partition(";")[0] for fault in faults(text)] == [
        "listen[1]: reachable from outside without auth",
        "listen[2]: reachable from outside without auth",
    ]
    assert "interface=127.0.0.1" in faults(text)[0]
    assert parse('auth = ["anonymous"]\n' + text).auth == ("anonymous",)
    assert parse('auth = ["keys:k.toml"]\n' + text).auth == ("keys:/c/k.toml",)
    assert faults("auth = 1\n" + text) == ["auth: expected an array, got an integer"]


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ("tcp:80:interface=127.0.0.1", "tcp:80:interface=127.0.0.1", True),
        ("tcp:80:interface=127.0.0.1", "llmtls:tcp:80:interface=localhost:certs=/c", True),
        ("tcp:port=80", "tcp:80:interface=127.0.0.1", True),
        ("tcp:80:interface=10.0.0.1", "tcp:80:interface=0.0.0.0:backlog=5", True),
        ("tcp:80:interface=\\\\:\\\\:1", "tcp6:80", True),
        ("unix:/run/x", "unix:address=/run/x:mode=600", True),
        ("tcp:80:interface=127.0.0.1", "tcp:81:interface=127.0.0.1", False),
        ("tcp:80:interface=127.0.0.1", "tcp:80:interface=127.0.0.2", False),
        ("tcp:80:interface=127.0.0.1", "tcp6:80", False),
        ("tcp:0", "tcp:0", False),
        ("unix:/run/x", "unix:/run/y", False),
        ("systemd:INET:index=0", "systemd:INET:index=0", False),
        ("onion:80", "onion:80", False),
    ],
)
def test_two_listeners_cannot_take_one_address(one: str, other: str, clash: bool) -> None:
    def clashes(listeners: str) -> list[str]:
        return [each for each in faults(f"workers = 0\n{listeners}\n{ONE}") if "takes" in each]

    both = clashes(f'listen = ["{one}", "{other}"]')
    assert both == (["listen[1]: takes the address that listen[0] takes"] if clash else [])
    apart = clashes(f'listen = ["{other}"]\nadmin = ["{one}"]')
    assert apart == (["admin[0]: takes the address that listen[0] takes"] if clash else [])


def test_admin_listeners_open_to_others_want_a_token() -> None:
    assert faults('auth = ["anonymous"]\nadmin = ["tcp:9901"]\n' + ONE) == [
        "admin[0]: reachable from outside without a token; set admin_token_file, or interface=127.0.0.1"
    ]


@pytest.mark.parametrize(("given_", "path"), [("", ""), ("-", "-"), ("a.log", "/c/a.log"), ("/x", "/x")])
def test_the_access_log_is_a_path_or_standard_output_or_off(given_: str, path: str) -> None:
    assert parse(f"[log]\naccess = '{given_}'").log.access == path


# --- files and options -----------------------------------------------------------


def test_a_file_is_loaded_and_paths_count_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    key = tmp_path / "etc" / "b.key"
    key.write_text("sk\n")
    key.chmod(0o600)
    (tmp_path / "etc" / "gw.toml").write_text(ONE + "api_key_file = 'b.key'\n[log]\naccess = 'a.log'\n")
    monkeypatch.chdir(tmp_path)
    config = load_config("etc/gw.toml")
    assert config.source == str(tmp_path / "etc" / "gw.toml")
    assert config.base_dir == str(tmp_path / "etc")
    assert config.backends[0].api_key == Secret("sk")
    assert config.log.access == str(tmp_path / "etc" / "a.log")


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml: cannot read the file: No such file or directory"):
        load_config(str(tmp_path / "no.toml"))
    with pytest.raises(ConfigError, match="cannot read the file: Is a directory"):
        load_config(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot read the file: embedded null byte"):
        load_config("a\0")
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    with pytest.raises(ConfigError, match=r"not UTF-8 \(at byte 5\)"):
        load_config(str(tmp_path / "latin.toml"))
    with pytest.raises(OSError, match="No such file"):
        DISK.mode(str(tmp_path / "no"))


def test_options_alone_make_a_configuration() -> None:
    config = config_from_options(
        listen=["tcp:8000:interface=127.0.0.1", "unix:s"],
        backends=[
            "http://127.0.0.1:8080",
            "http://[::1]:8081/p/v1,weight=2.5,model=a,model=b,id=x,max_connections=3",
        ],
        working_dir="/w",
    )
    assert config.listen == ("tcp:8000:interface=127.0.0.1:backlog=1024", "unix:/w/s:backlog=1024")
    assert config.backends == (
        BackendConfig("127.0.0.1:8080", "http://127.0.0.1:8080"),
        BackendConfig("x", "http://[::1]:8081/p", weight=2.5, models=("a", "b"), max_connections=3),
    )
    assert (config.source, config.base_dir) == ("", "/w")


def test_options_take_the_place_of_keys_of_the_file() -> None:
    files = Files(gw_toml=('auth = ["keys:k"]\nworkers = 2\nlisten = ["bad"]\n' + ONE, 0o644))
    config = config_from_options(
        "gw.toml", listen=["tcp:0"], backends=["http://b"], workers=4, working_dir="/c", files=files
    )
    assert config.listen == ("tcp:0:backlog=1024",)
    assert config.workers == 4
    assert config.auth == ("keys:/c/k",)
    assert [backend.url for backend in config.backends] == ["http://b"]
    assert config.source == "/c/gw.toml"
    assert config_from_options(
        "gw.toml", listen=["tcp:0"], admin=["unix:a"], working_dir="/c", files=files
    ).backends


def test_faults_of_options_name_the_option() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_options(
            listen=["tcp:80", "tcp:x:interface=127.0.0.1"],
            admin=["tcp:9901"],
            auth=[],
            backends=["ftp://x", "http://b,weight=much", "http://c,wait=1", "http://d,7", "http://b/v1,id=y"],
            workers=0,
        )
    assert [str(fault).partition(";")[0] for fault in caught.value.faults] == [
        '--listen[1]: tcp: bad port "x"',
        '--backend[0].url: not an http(s) URL: "ftp://x"',
        "--backend[1].weight: expected a number, got a string",
        "--backend[2].wait: unknown key",
        '--backend[3]: expected key=value after the URL, got "7"',
        "--workers: must be at least 1 and at most 1024, got 0",
        '--backend[4].url: URL "http://b" is already that of --backend[1]',
        "--listen[0]: reachable from outside without auth",
        "--admin[0]: reachable from outside without a token",
    ]  # fmt: skip


def test_options_without_auth_may_not_open_a_listener() -> None:
    with pytest.raises(ConfigError, match=r"^--listen\[0\]: reachable from outside without auth"):
        config_from_options(listen=["tcp:80"], backends=["http://b"])


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("http://b", BackendConfig("b", "http://b")),
        ("http://b:81/x/v1", BackendConfig("b:81-x", "http://b:81/x")),
        ("http://[::1]:80 , weight = 3", BackendConfig("::1", "http://[::1]", weight=3.0)),
        ("http://b,model=a", BackendConfig("b", "http://b", models=("a",))),
    ],
)
def test_the_backend_option(text: str, backend: BackendConfig) -> None:
    assert parse_backend_option(text) == backend


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("ftp://b", 'url: not an http(s) URL: "ftp://b"'),
        ("", 'url: not an http(s) URL: ""'),
        ("http://b,x", 'expected key=value after the URL, got "x"'),
        ("http://b,weight=inf", "weight: must be above 0 and at most 1000000000, got inf"),
    ],
)
def test_faults_of_the_backend_option(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_backend_option(text)
    assert str(caught.value) == fault


# --- the shared store ------------------------------------------------------------


def test_there_is_no_store_by_default() -> None:
    assert not parse(ONE).store


def test_a_store_and_its_files() -> None:
    text = (
        ONE
        + """
[store]
url = "rediss://gw@store.example/1"
password_file = "redis.password"
ca_file = "ca.pem"
"""
    )
    store = parse(text, Files(redis_password=("hush", 0o600), ca_pem=("x", 0o644))).store
    assert store
    assert store.password is not None
    assert store.password.reveal() == "hush"
    assert store.ca_file == "/c/ca.pem"


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ('url = "http://h"', "store.url: must begin with redis://, rediss:// or unix://"),
        ('url = "redis://:x@h"', "store.url: must not hold a password; use password_file"),
        ('url = "redis:///1"', "store.url: names no host"),
        ('url = "redis://gw@h"', "store.password_file: missing: the URL names the user gw"),
        ("op_s = 1.0", "store.url: missing: the other keys have nothing to belong to"),
        ('sentinels = ["h:1"]', "store.master: missing: Sentinel needs `sentinels` and `master`"),
        (
            'url = "redis://h"\nmaster = "mm"',
            "store.sentinels: missing: Sentinel needs `sentinels` and `master`",
        ),
        ('sentinels = ["redis://h"]\nmaster = "mm"', "store.sentinels[0]: must be host:port of a Sentinel"),
        (
            'url = "unix:///s"\nsentinels = ["h:1"]\nmaster = "mm"',
            "store.url: a Unix socket and Sentinel do not go together",
        ),
        ('url = "redis://h"\nca_file = "ca.pem"', 'store.ca_file: the URL is not rediss: "redis://h"'),
    ],
)
def test_faults_of_a_store(table: str, fault: str) -> None:
    assert faults(f"{ONE}\n[store]\n{table}\n", Files(ca_pem=("x", 0o644))) == [fault]


@pytest.mark.parametrize(
    ("url", "warned"),
    [("redis://10.0.0.1", True), ("redis://localhost", False), ("rediss://10.0.0.1", False)],
)
def test_a_password_in_clear_text_is_told(url: str, warned: bool) -> None:
    text = f'{ONE}\n[store]\nurl = "{url}"\npassword_file = "p"\n'
    warnings = parse(text, Files(p=("x", 0o600))).warnings
    assert any(line.startswith("store.password_file: ") for line in warnings) is warned


def test_a_plugins_files_count_from_the_folder_of_the_configuration() -> None:
    text = f"""{ONE}
[rate_limiter]
plugin = "redis"
password_file = "redis.password"
ca_file = "/etc/ca.pem"
other = "as it is"
"""
    assert parse(text).rate_limiter.options == {
        "password_file": "/c/redis.password",
        "ca_file": "/etc/ca.pem",
        "other": "as it is",
    }


def test_a_store_in_a_plugins_table() -> None:
    assert parse_store({"url": "redis://h"}, files=Files()) == StoreConfig("redis://h")
    with pytest.raises(ConfigError, match="url: names no host"):
        parse_store({"url": "redis:///"}, files=Files())
    with pytest.raises(ConfigError, match="op: unknown key"):
        parse_store({"op": 1}, files=Files())


# --- the schema itself ---------------------------------------------------------


def schema(cls: type[Struct]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, key in keys_of(cls).items():
        found.append((f"{cls.__name__}.{name}", key.hint))
        arms = [key.hint, *get_args(key.hint)]
        found += [
            each for arm in arms if isinstance(arm, type) and issubclass(arm, Struct) for each in schema(arm)
        ]
    return found


def test_every_number_has_an_upper_bound() -> None:
    """Else ``inf``, or an integer that no float can hold, would pass."""
    for name, hint in schema(Config):
        if hint is float or hint is int:
            pytest.fail(f"{name} has no bounds")
        if get_origin(hint) is Annotated and get_args(hint)[0] in (int, float):
            assert any(isinstance(rule, Rule) and rule.most is not None for rule in get_args(hint)[1:]), name


@pytest.mark.parametrize("cls", [BreakerConfig, RetryConfig, Limits, Timeouts, Hold, Admission, LogConfig])
def test_defaults_keep_their_own_rules(cls: type[Struct]) -> None:
    reader = Reader("/", None)
    for name, key in keys_of(cls).items():
        default = False if name == "heartbeat_s" else key.default
        if default not in (None, ()):
            reader.value(key.hint, default, name)
    assert reader.faults == []


def test_shown_values_are_short_and_on_one_line() -> None:
    assert shown("a\nb\u2028\x1b") == '"a\\nb\\u2028\\u001b"'
    assert len(shown("x" * 500)) <= 80


toml_values = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.datetimes(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=6) | st.sampled_from(sorted(keys_of(BackendConfig))), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(keys_of(Config))), toml_values, min_size=1, max_size=5))
def test_any_table_is_read_or_refused_and_never_crashes(table: dict[str, Any]) -> None:
    reader = Reader("/c", Files())
    values = reader.fields(Config, table, "", Config())
    assert values or reader.faults


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_and_never_crashes(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse(text)


def test_importing_it_loads_no_twisted() -> None:
    code = "import sys, llmgw.config; sys.exit(any(name.split('.')[0] == 'twisted' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_each_room_knows_only_those_before_it() -> None:
    folder = Path(llmgw.config.__file__).parent
    order = [
        "words",
        "files",
        "reader",
        "places",
        "bounds",
        "fleet_tables",
        "schema",
        "whole",
        "load",
        "__init__",
    ]
    assert {path.stem for path in folder.glob("*.py")} == set(order)
    for index, room in enumerate(order):
        known = set(
            re.findall(r"(?m)^\s*from llmgw\.config\.(\w+) import", (folder / f"{room}.py").read_text())
        )
        assert known <= set(order[:index]), room


def test_paths_among_a_plugins_options_count_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "llmgw.toml"
    path.write_text(
        '[router]\nplugin = "x"\na_file = "a"\n'
        '[[discovery]]\nplugin = "static"\nfile = "b"\nstate_file = "c"\n'
    )
    config = config_from_options(str(path), working_dir="/elsewhere")
    assert config.router.options["a_file"] == f"{tmp_path}/a"
    assert config.discovery[0].options["file"] == f"{tmp_path}/b"
    assert config.discovery[0].state_file == f"{tmp_path}/c"


# --- loaders ----------------------------------------------------------------------


def test_a_loader_is_a_name_or_a_table() -> None:
    text = '[[backends]]\nid = "a"\nurl = "http://127.0.0.1:1"\nloader = "ollama"\n'
    text += '[[backends]]\nid = "b"\nurl = "http://127.0.0.1:2"\n[backends.loader]\nplugin = "x"\ny = 1\n'
    first, second = parse(text).backends
    assert first.loader == LoaderConfig("ollama")
    assert second.loader == LoaderConfig("x", {"y": 1})


def test_a_discovery_may_not_start_programs() -> None:
    table = {"id": "a", "url": "http://127.0.0.1:1"}
    assert parse_backend({**table, "loader": "llamacpp-router"}).loader == LoaderConfig("llamacpp-router")
    for loader in ("command", {"plugin": "command", "command": ["sh"]}, {"plugin": "ollama", "x": 1}):
        with pytest.raises(ConfigError, match="loader: must be one of llamacpp-router, ollama, none"):
            parse_backend({**table, "loader": loader})


def test_workers_do_not_start_servers() -> None:
    text = 'workers = 2\n[[backends]]\nid = "a"\nurl = "http://127.0.0.1:1"\nloader = "command"\n'
    with pytest.raises(ConfigError, match=r"backends\[0\]\.loader: command: each worker"):
        parse(text)


def test_an_alias_inherits_that_it_causes_no_load() -> None:
    text = '[[models]]\nname = "m"\nloaded_only = true\n[[models]]\nname = "alias"\ntarget = "m"\n'
    assert [model.loaded_only for model in parse(text).models] == [True, True]
