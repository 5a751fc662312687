"""What an operator is told of requests that failed at a backend."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import (
    Gateway,
    Line,
    Received,
    Scripted,
    backend_table,
    chat_body,
    eventually,
    gateway_with,
    json_response,
    post,
)

TURNS = '[router]\nplugin = "round-robin"\n[breaker]\nopen_s = 0.5\nsuccesses = 1\n[retry]\nfloor = 30\n'


def reset(line: Line, request: Received) -> None:
    line.reset()


def explained(gateway: Gateway, body: bytes) -> dict[str, Any]:
    """``POST /api/explain``."""
    head = f"POST /api/explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with gateway.admin_client() as client:
        client.send(head.encode() + body)
        told: dict[str, Any] = json.loads(client.read_answer().body)
        return told


def told_lines(gateway: Gateway, backend: str) -> list[str]:
    return re.findall(rf"backend {backend}: (.*)", gateway.log)


def test_a_backend_whose_requests_fail_is_told_with_the_reason_and_so_is_its_return(tmp_path: Path) -> None:
    bad, good = Scripted(reset), Scripted()
    with gateway_with(tmp_path, bad, good, config=TURNS) as gateway:
        for _ in range(12):
            assert gateway.ask(post()).status == 200
        warned = (
            "taken out for 'm', as its requests fail (5 in a row, the last one: reset); tried again in 1 s"
        )
        assert told_lines(gateway, "b0") == ["is well", warned]
        state = gateway.state["backends"][0]
        assert (state["standing"], state["detail"]) == ("ejected", "its requests failed, the last one: reset")
        told = explained(gateway, chat_body())
        assert told["left_out"] == [{"backend": "b0", "why": f"ejected: {state['detail']}"}]
        # Trials that fail are no news.
        before = bad.accepted

        def tried(more: int) -> bool:
            gateway.ask(post())
            return len(bad.requests) >= more

        eventually(lambda: tried(7))
        assert before < bad.accepted
        assert len(told_lines(gateway, "b0")) == 2
        bad.play(good.script)
        eventually(lambda: tried(1))
        eventually(lambda: len(told_lines(gateway, "b0")) == 3)
        assert told_lines(gateway, "b0")[2] == "its trials for 'm' went well; it is warmed up"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (reset, "reset"),
        (lambda line, request: line.send(b"SSH-2.0-OpenSSH\r\n"), "framing"),
        (lambda line, request: line.send(json_response({"error": {}}, 503)), "status_503"),
        (lambda line, request: line.send(json_response({}, 503, "Retry-After: 1\r\n")), "busy"),
    ],
)
def test_the_access_line_names_who_failed_and_why(tmp_path: Path, script: Any, reason: str) -> None:
    one, two = Scripted(script), Scripted(script)
    with gateway_with(tmp_path, one, two) as gateway:
        assert gateway.ask(post()).status >= 500
        [line] = eventually(lambda: gateway.access)
        assert line["attempts"] == 2
        assert line["failed"] in (f"b0: {reason}, b1: {reason}", f"b1: {reason}, b0: {reason}")
        assert list(line).index("failed") == list(line).index("attempts") + 1


def test_an_answer_from_the_first_backend_has_no_failures(tmp_path: Path) -> None:
    backend = Scripted()
    with gateway_with(tmp_path, backend) as gateway:
        assert gateway.ask(post()).status == 200
        [line] = eventually(lambda: gateway.access)
        assert "failed" not in line


def test_explain_says_that_a_window_is_too_small(tmp_path: Path) -> None:
    small, large = Scripted(), Scripted()
    tables = backend_table(small, "small", 'models = ["m"]\ncontext_length = 64')
    tables += backend_table(large, "large", 'models = ["m"]\ncontext_length = 4096')
    gateway = Gateway(tmp_path, tables)
    try:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 300}]}).encode()
        told = explained(gateway, body)
        assert told["left_out"] == [{"backend": "small", "why": "its window of 64 tokens is too small"}]
    finally:
        gateway.stop()
        small.close()
        large.close()
