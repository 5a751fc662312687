"""The log tells of a backend when its health changes, and not at each look."""

from __future__ import annotations

from pathlib import Path

from harness import Scripted, eventually, gateway_with, json_response

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
