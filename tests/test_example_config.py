"""The example file is the manual: it must name every key, with its true default."""

from __future__ import annotations

import re
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from llmgw.config import (
    Admission,
    Answers,
    BackendConfig,
    BackendTimeouts,
    BackendTls,
    BreakerConfig,
    Config,
    Cors,
    DrainConfig,
    Hold,
    Limits,
    LoadingConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    OverloadConfig,
    PeersConfig,
    RetryConfig,
    StoreConfig,
    Timeouts,
    TracingConfig,
    load_config,
    parse_config,
)
from llmgw.config.reader import keys_of
from llmgw.values import Policy

EXAMPLE = Path(__file__).resolve().parents[1] / "etc" / "llmgw.example.toml"
SHOWN = EXAMPLE.read_text(encoding="utf-8")
# A setting that is commented out has no space after its mark; prose has one.
FULL = re.sub(r"(?m)^#(?=[a-z_]+ = |\[)", "", SHOWN)

TABLES: list[tuple[type[Struct], tuple[str, ...]]] = [
    (Config, ()),
    (Policy, ("rate_limits",)),
    (StoreConfig, ("store",)),
    (PeersConfig, ("peers",)),
    (BackendConfig, ("backends",)),
    (BackendTls, ("backends", "tls")),
    (BackendTimeouts, ("backends", "timeouts")),
    (ModelConfig, ("models",)),
    (Admission, ("admission",)),
    (Timeouts, ("timeouts",)),
    (Limits, ("limits",)),
    (Hold, ("hold",)),
    (LoadingConfig, ("loading",)),
    (BreakerConfig, ("breaker",)),
    (RetryConfig, ("retry",)),
    (OverloadConfig, ("overload",)),
    (DrainConfig, ("drain",)),
    (LogConfig, ("log",)),
    (TracingConfig, ("tracing",)),
    (MetricsConfig, ("metrics",)),
    (Answers, ("answers",)),
    (Cors, ("cors",)),
]


class AnyFile:
    """Every file is there, private, and holds one word; what is called ``certs`` is a folder."""

    def read(self, path: str) -> bytes:
        return b"a-word\n"

    def mode(self, path: str) -> int:
        return (stat.S_IFDIR if path.endswith("certs") else stat.S_IFREG) | 0o600


def table_at(table: Any, path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        table = table[name]
        table = table[0] if isinstance(table, list) else table
    assert isinstance(table, dict)
    return table


def test_the_example_as_it_stands_is_the_defaults_and_one_backend() -> None:
    config = load_config(str(EXAMPLE))
    assert config.backends == (BackendConfig(id="local", url="http://127.0.0.1:8080"),)
    assert config.warnings == ()
    (listen,) = Config().listen
    assert config.listen == (f"{listen}:backlog={Limits().backlog}",)
    assert replace(config, listen=(listen,), backends=(), source="", base_dir="") == Config()


@pytest.mark.parametrize(("struct", "path"), TABLES, ids=lambda item: getattr(item, "__name__", ""))
def test_the_example_names_every_key_and_no_other(struct: type[Struct], path: tuple[str, ...]) -> None:
    assert set(table_at(tomllib.loads(FULL), path)) == set(keys_of(struct))


@pytest.mark.parametrize(("struct", "path"), TABLES, ids=lambda item: getattr(item, "__name__", ""))
def test_only_keys_without_a_value_by_default_are_commented_out(
    struct: type[Struct], path: tuple[str, ...]
) -> None:
    if path and path[0] in ("rate_limits", "models"):
        return  # the whole table is commented out
    shown = table_at(tomllib.loads(SHOWN), path)
    for name, key in keys_of(struct).items():
        if name not in shown:
            assert key.default in (None, ()), name


def test_every_table_of_the_schema_is_looked_at() -> None:
    inner = {
        name
        for name, key in keys_of(Config).items()
        if isinstance(key.default, Struct) and not hasattr(key.default, "plugin")
    }
    assert inner == {path[0] for _, path in TABLES if path} - {"rate_limits", "backends", "models"}


def test_the_example_with_everything_switched_on_loads() -> None:
    text = FULL.replace("http://127.0.0.1:8080", "https://127.0.0.1:8080")  # ca_file wants https
    text = text.replace("redis://", "rediss://")  # and here it wants rediss
    config = parse_config(text, source="example", base_dir="/etc/llmgw", files=AnyFile())
    assert config.admin == ("tcp:9901:interface=127.0.0.1",)
    assert config.auth == ("keys:/etc/llmgw/keys.toml",)
    assert config.discovery[0].options == {"endpoints": ["http://127.0.0.1:2379"], "prefix": "/llmgw/"}
    assert config.backends[0].api_key is not None
    assert config.rate_limits == (
        Policy(
            "limit-1", requests_per_minute=600, tokens_per_minute=200000, concurrent=32, on_redis_loss="local"
        ),
    )
    assert [(model.name, model.target, model.max_tokens) for model in config.models] == [
        ("gpt-4o-mini", "llama-3-8b", 2048)
    ]
    assert [(each.plugin, each.options, each.on_error) for each in config.filters] == [
        ("deny-pattern", {"words": ["forbidden"]}, "refuse")
    ]


def test_every_key_has_prose_above_it() -> None:
    lines = SHOWN.splitlines()
    for index, line in enumerate(lines):
        if re.match(r"#?[a-z_]+ = ", line):
            block = index
            while block and lines[block - 1].strip():
                block -= 1
            assert any(each.startswith("# ") for each in lines[block:index]), line
