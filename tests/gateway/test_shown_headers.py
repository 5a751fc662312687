"""The headers that tell a caller who answered and why: for all, by the configuration."""

from __future__ import annotations

from pathlib import Path

from harness import Scripted, chat_body, gateway_with, post


def test_all_answers_tell_their_way_when_the_configuration_says_so(tmp_path: Path) -> None:
    backend = Scripted()
    config = '[router]\nplugin = "adaptive"\n'
    config += "[answers]\nshow_backend = true\nshow_decision = true\n"
    with gateway_with(tmp_path, backend, config=config) as gateway:
        for body in (chat_body(), chat_body(stream=True)):
            answer = gateway.ask(post(body=body))
            assert answer.get("x-llmgw-backend") == "b0"
            decision = answer.get("x-llmgw-decision")
            assert decision is not None
            assert decision.startswith("b0; score ")
        refused = gateway.ask(post(body=chat_body("none")))
        assert refused.get("x-llmgw-decision") is None
        gateway.config_path.write_text(gateway.config_path.read_text().replace("= true", "= false"))
        assert gateway.admin("/api/reload", "POST")[0] == 200
        assert gateway.ask(post()).get("x-llmgw-decision") is None
    backend.close()
