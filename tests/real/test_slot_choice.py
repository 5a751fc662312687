"""A real llama.cpp server answers in the slot that the router chose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import Gateway, post
from ordering_router import installed

from llmgw.demo.processes import Child

pytestmark = pytest.mark.real


@pytest.mark.parametrize("slot", [0, 1])
def test_the_chosen_slot_is_the_one_at_work(tmp_path: Path, llama_servers: Any, slot: int) -> None:
    """``raw``, so that the server's own word of its slot comes through."""
    server: Child = llama_servers()
    config = (
        f'[admission]\nslot_choice = true\n[router]\nplugin = "smallest-first"\nslot = {slot}\n'
        f'[[backends]]\nid = "b"\nurl = "{server.url}"\nkind = "llama-server"\nraw = true\n'
    )
    gateway = Gateway(tmp_path, config, environment=installed(tmp_path))
    try:
        for path, fields in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "verbose": True}),
            ("/v1/completions", {"prompt": "Hello", "verbose": True}),
            ("/completion", {"prompt": "Hello"}),
        ):
            body = json.dumps({"model": "tiny", "max_tokens": 1, "n_predict": 1, **fields}).encode()
            answer = gateway.ask(post(path, body))
            assert answer.status == 200, answer.body
            assert answer.json.get("__verbose", answer.json)["id_slot"] == slot, path
    finally:
        gateway.stop()
