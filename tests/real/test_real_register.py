"""``llmgw register`` before a real llama-server and a real etcd."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Gateway, chat_body, eventually, post
from real_etcd import Etcd

from llmgw.demo.processes import Child

pytestmark = pytest.mark.real


def test_a_real_server_registers_and_answers_through_a_gateway(
    etcd: Etcd, llama_servers: Callable[..., Child], tmp_path: Path
) -> None:
    url = llama_servers().url
    program = [sys.executable, "-c", "from llmgw.commands.main import main; main()"]
    with (tmp_path / "register.log").open("wb") as log:
        sidecar = subprocess.Popen(
            [*program, "register", "--id", "tiny-0", "--url", url, "--etcd", etcd.url], stdout=log, stderr=log
        )
    gateway = None
    try:
        eventually(etcd.keys, 20)
        assert etcd.keys() == {
            "/llmgw/tiny-0": {
                "id": "tiny-0",
                "url": url,
                "models": ["tiny"],
                "slots": 2,
                "context_length": 2048,
            }
        }
        gateway = Gateway(
            tmp_path,
            f'[log]\naccess = "access.log"\n[[discovery]]\nplugin = "etcd"\nendpoints = ["{etcd.url}"]\n',
        )
        answer = gateway.ask(post(body=chat_body("tiny", max_tokens=2)))
        assert answer.status == 200, answer
        sidecar.terminate()
        assert sidecar.wait(20) == 0
        assert etcd.keys() == {}
        # It is believed late: nothing fails in between.
        assert gateway.ask(post(body=chat_body("tiny", max_tokens=2))).status == 200
    finally:
        sidecar.kill()
        sidecar.wait()
        if gateway is not None:
            gateway.stop()
