"""The log tells of a backend when its health changes, and not at each look."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import (
    Line,
    Received,
    Scripted,
    answer_completion,
    chat_body,
    eventually,
    gateway_with,
    json_response,
    post,
)

QUICK = '[[health]]\nplugin = "llamacpp"\ninterval_s = 2.0\n'


def test_changes_are_told_once_each(tmp_path: Path) -> None:
    backend = Scripted(probes={"/props": json_response({"error": {}}, 401)})
    with gateway_with(tmp_path, backend, config=QUICK) as gateway:

        def told() -> list[str]:
            return [
                line.partition("backend b0: ")[2]
                for line in gateway.log.splitlines()
                if "backend b0: " in line
            ]

        refuses = "answers, but 401 from /props: it wants another api_key_file"
        eventually(lambda: told() == [refuses])
        backend.probes["/health"] = json_response({"error": {"message": "Loading model"}}, 503)
        eventually(lambda: told() == [refuses, "is loading its model"])
        backend.probes["/health"] = json_response({"status": "ok"})
        backend.probes["/props"] = json_response({"total_slots": 2})
        eventually(lambda: told() == [refuses, "is loading its model", "is well"])
        backend.close()
        gone = "fails its health checks: nobody listens there (connection refused)"
        eventually(lambda: told()[3:] == [gone])


def test_what_a_request_hears_of_loading_is_looked_at_at_once(tmp_path: Path) -> None:
    loading = json_response({"error": {"message": "Loading model"}}, 503)

    def answer(line: Line, request: Received) -> None:
        if backend.probes["/health"] is loading:
            line.send(loading)
        else:
            answer_completion(line, request)

    backend = Scripted(answer)
    config = '[[health]]\nplugin = "llamacpp"\ninterval_s = 60.0\n'
    with gateway_with(tmp_path, backend, config=config) as gateway, ThreadPoolExecutor() as pool:
        eventually(lambda: "backend b0: is well" in gateway.log)
        time.sleep(2.0)  # the shortest time between two looks at a backend that works
        backend.probes["/health"] = loading
        asked = pool.submit(gateway.ask, post("/v1/chat/completions", chat_body()))
        eventually(lambda: "backend b0: is loading its model" in gateway.log, within_s=1.5)
        backend.probes["/health"] = json_response({"status": "ok"})
        assert asked.result(timeout=2.0).status == 200


def test_a_pool_of_which_nobody_answers_is_used_all_the_same_and_that_is_counted(tmp_path: Path) -> None:
    deaf = [Scripted(probes={"/health": b""}) for _ in range(2)]
    config = '[[health]]\nplugin = "llamacpp"\ninterval_s = 2.0\ntimeout_s = 0.05\n[breaker]\nfall = 1\n'
    with gateway_with(tmp_path, *deaf, config=config) as gateway:
        eventually(lambda: {each["standing"] for each in gateway.state["backends"]} == {"ejected"})
        assert "llmgw_panic_choices 0\n" in gateway.admin("/metrics")[1].decode()
        assert gateway.ask(post("/v1/chat/completions", chat_body())).status == 200
        assert "llmgw_panic_choices 1\n" in gateway.admin("/metrics")[1].decode()
