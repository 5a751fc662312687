from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.access import key_file
from llmgw.config import load_config
from llmgw.demo import layout, tiny_gguf
from llmgw.demo.certificate import ensure_certificate

URLS = {"fast": "http://127.0.0.1:1001", "mid": "http://127.0.0.1:1002", "slow": "http://127.0.0.1:1003"}


def test_the_configuration_is_accepted(tmp_path: Path) -> None:
    ensure_certificate(tmp_path)
    layout.ensure_key(tmp_path)
    path = tmp_path / "llmgw.toml"
    path.write_text(layout.config_text(URLS, 8443, 9901))
    config = load_config(str(path))
    assert {backend.id: backend.url for backend in config.backends} == URLS
    weights = [backend.weight for backend in config.backends]
    assert weights == sorted(weights, reverse=True)
    assert config.listen[0].startswith("llmtls:tcp:8443:")
    assert ":interface=127.0.0.1" in config.listen[0]
    assert config.admin == ("tcp:9901:interface=127.0.0.1",)
    assert config.auth == (f"keys:{tmp_path}/keys.toml",)
    assert config.warnings == ()


def test_the_key_is_used_again_and_only_its_hash_is_in_the_key_file(tmp_path: Path) -> None:
    secret = layout.ensure_key(tmp_path)
    assert layout.ensure_key(tmp_path) == secret
    assert secret not in (tmp_path / "keys.toml").read_text()
    for name in ("keys.toml", "key.txt"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    (key,) = key_file.load(str(tmp_path / "keys.toml"))[0].keys.values()
    assert key.show_backend


@pytest.mark.parametrize("name", ["keys.toml", "key.txt"])
@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_key_that_is_not_known_is_replaced(tmp_path: Path, name: str, content: str | None) -> None:
    secret = layout.ensure_key(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    replaced = layout.ensure_key(tmp_path)
    assert replaced != secret
    assert layout.ensure_key(tmp_path) == replaced


def test_the_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def write_model(path: Path, *_: object, **__: object) -> None:
        made.append(path)
        path.touch()

    monkeypatch.setattr(tiny_gguf, "write_model", write_model)
    assert layout.ensure_model(tmp_path) == layout.ensure_model(tmp_path) == made[0]
    assert len(made) == 1
