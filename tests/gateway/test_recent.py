"""The ring of recent requests, and that a real gateway fills it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import Scripted, chat_body, eventually, gateway_with, post

from llmgw.gateway.access_log import AccessLine
from llmgw.gateway.recent import Recent
from llmgw.values import Usage


def line(number: int) -> tuple[Any, ...]:
    """What an account hands over."""
    values = {
        **{name: None for name in AccessLine.__struct_fields__ if not name.endswith("_tokens")},
        "at": float(number),
        "id": f"r{number}",
        "status": 200,
        "duration_s": 0.5,
        "waited_s": 0.0,
        "key": f"k{number % 2}",
    }
    figures = list(values.values())
    place = AccessLine.__struct_fields__.index("prompt_tokens")
    figures.insert(place, Usage(prompt_tokens=7, output_tokens=3))
    return tuple(figures)


def test_the_newest_are_kept_and_told_as_access_lines() -> None:
    ring = Recent(3)
    assert (ring.total, ring.since(0)) == (0, [])
    for number in range(5):
        ring.add(line(number))
    assert ring.total == 5
    assert [each.id for each in ring.since(0)] == ["r2", "r3", "r4"]
    assert [each.id for each in ring.since(4)] == ["r4"]
    assert ring.since(5) == []
    assert [each.id for each in ring.since(0, most=1)] == ["r4"]
    told = ring.since(4)[0]
    assert (told.key, told.prompt_tokens, told.output_tokens) == ("k0", 7, 3)
    assert ring.keys() == {"k0", "k1"}


def test_a_gateway_tells_who_was_chosen_and_who_was_refused(tmp_path: Path) -> None:
    backend = Scripted()
    with gateway_with(tmp_path, backend, config="[log]\naccess = ''\naccess_sample = 0.0\n") as gateway:
        assert gateway.ask(post()).status == 200
        assert gateway.ask(post(body=chat_body("unknown"))).status == 404
        assert gateway.ask(b"GET /v1/models HTTP/1.1\r\nhost: g\r\n\r\n", "GET").status == 200

        def told() -> Any:
            found = json.loads(gateway.admin("/api/decisions")[1])
            return found["total"] >= 2 and found

        found = eventually(told)
        assert found["total"] == 2
        first, second = found["items"]
        assert (first["backend"], first["model"], first["outcome"]) == ("b0", "m", "done")
        assert first["why"]
        assert (second["model"], second["outcome"], "backend" in second) == (
            "unknown",
            "model_not_found",
            False,
        )
        state = gateway.state
        assert (state["requests"], state["rejected"]) == (3, {"model_not_found": 1})
        assert [each["requests"] for each in state["backends"]] == [1]
        assert "items" in json.loads(gateway.admin("/api/history")[1])
    backend.close()
