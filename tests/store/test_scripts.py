"""The scripts that a Redis is sent (case S-RED-5)."""

from __future__ import annotations

import re
from pathlib import Path

import llmgw

ROOT = Path(llmgw.__file__).parent
KEYLESS = {"TIME"}


def test_s_red_5_scripts_touch_no_key_that_is_not_declared() -> None:
    calls = []
    for path in (*ROOT.rglob("*.py"), *ROOT.rglob("*.lua")):
        text = path.read_text()
        for command, key in re.findall(r"redis\.p?call\('(\w+)'(?:, ([^,)]+))?", text):
            calls.append(command)
            if command not in KEYLESS:
                # `key` is the parameter of functions that are called with one of KEYS.
                assert re.fullmatch(r"KEYS\[\d\]", key) or (path.suffix == ".lua" and key == "key"), (
                    path,
                    key,
                )
    assert len(calls) > 20
    leases = (ROOT / "ratelimit/leases.lua").read_text()
    assert re.findall(r"\(entry\[1\] == 0 and bucket or places\)\((.*), entry\)", leases) == ["KEYS[i + 2]"]
