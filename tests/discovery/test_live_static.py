"""A real gateway whose backends come and go with a file, under streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Gateway,
    Line,
    Received,
    Scripted,
    backend_table,
    chat_body,
    chunk,
    event,
    eventually,
    post,
)

CONFIG = """
[log]
access = "access.log"
[[discovery]]
plugin = "static"
file = "found.toml"
interval_s = 0.1
hold_down_s = 0.5
"""


@pytest.fixture
def backends() -> Iterator[list[Scripted]]:
    found = [Scripted() for _ in range(3)]
    yield found
    for each in found:
        each.close()


def write(folder: Path, *tables: str) -> None:
    (folder / "new.toml").write_text("\n".join(tables) or "backends = []")
    (folder / "new.toml").replace(folder / "found.toml")


def ids(gateway: Gateway) -> set[str]:
    return {each["id"] for each in gateway.state["backends"] if not each["removed"]}


def test_where_no_backend_is_known_no_model_is_said_not_to_exist(
    tmp_path: Path, backends: list[Scripted]
) -> None:
    write(tmp_path, backend_table(backends[0], "a"))
    gateway = Gateway(tmp_path, CONFIG)
    try:
        write(tmp_path)
        eventually(lambda: not ids(gateway))
        answer = gateway.ask(post(body=chat_body("anything")))
        assert (answer.status, answer.json["error"]["code"]) == (503, "no_backend")
        assert answer.get("retry-after")
    finally:
        gateway.stop()


def test_backends_come_and_go_and_a_stream_on_one_that_goes_runs_on(
    tmp_path: Path, backends: list[Scripted]
) -> None:
    first, second, third = backends
    go_on = threading.Event()

    def slowly(line: Line, request: Received) -> None:
        line.send(SSE_HEAD, chunk(event("one")))
        go_on.wait(20)
        line.send(chunk(event("two")), chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    first.play(slowly)
    write(tmp_path, backend_table(first, "a"))
    gateway = Gateway(tmp_path, CONFIG)
    try:
        assert ids(gateway) == {"a"}
        with gateway.client() as client:
            client.send(post(body=chat_body(stream=True)))
            client.read_until(b"one")
            write(tmp_path, backend_table(second, "b"), '[[backends]]\nid = "bad"\n')
            eventually(lambda: ids(gateway) == {"b"})
            state = gateway.state
            assert state["discovery"][0]["refused"] == [{"key": "bad", "why": "url: missing"}]
            [a] = [each for each in state["backends"] if each["id"] == "a"]
            assert (a["removed"], a["in_flight"], a["source"]) == (True, 1, "")
            assert gateway.ask(post()).status == 200
            assert len(second.requests) == 1
            go_on.set()
            client.read_until(b"[DONE]\n\n")
        eventually(lambda: [each["id"] for each in gateway.state["backends"]] == ["b"])
        write(tmp_path, backend_table(second, "b"), backend_table(third, "c"))
        eventually(lambda: ids(gateway) == {"b", "c"})
        (tmp_path / "found.toml").unlink()
        eventually(lambda: gateway.state["discovery"][0]["error"])
        assert ids(gateway) == {"b", "c"}
        assert set(gateway.state["contact_age_s"]) == {"static"}
        text = gateway.admin("/metrics")[1].decode()
        assert 'llmgw_discovery_up{discovery="static"} 0' in text
        assert 'llmgw_discovery_backends{discovery="static"} 2' in text
        assert 'llmgw_backend_source{backend="c",source="static"} 1' in text
        # A reload in which nothing of it changed leaves it alone.
        assert gateway.admin("/api/reload", "POST")[0] == 200
        assert ids(gateway) == {"b", "c"}
        assert gateway.stop() == 0
    finally:
        go_on.set()
        gateway.stop()
    assert "Traceback" not in gateway.log
    assert "discovery static: bad ignored: url: missing" in gateway.log


@pytest.mark.parametrize("text", ['file = "x"\nno_such = 1', "", 'file = "x"\ninterval_s = 0'])
def test_wrong_options_keep_it_from_starting(tmp_path: Path, text: str) -> None:
    from llmgw.assembly import check_discoveries
    from llmgw.config import parse_config
    from llmgw.errors import ConfigError

    config = parse_config(f'[[discovery]]\nplugin = "static"\n{text}\n', source="", base_dir="/x")
    reactor: Any = None
    with pytest.raises(ConfigError, match=r"discovery\[0\]\."):
        check_discoveries(config, reactor)
