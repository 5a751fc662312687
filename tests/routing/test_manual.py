"""``docs/routers.md`` tells the truth: its example runs, its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmgw import builtins
from llmgw.routing import adaptive, expected_ttft

MANUAL = (Path(__file__).parents[2] / "docs" / "routers.md").read_text(encoding="utf-8")


def test_the_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", MANUAL, re.DOTALL)
    exec(compile(code, "docs/routers.md", "exec"), {})
    (said,) = re.findall(r"print\(.*#\s(.*)", code)
    assert capsys.readouterr().out.strip() == said


def test_every_router_is_described() -> None:
    names = [each.name for each in vars(builtins).values() if isinstance(each, builtins.RouterFactory)]
    assert names
    assert all(f"| `{name}` |" in MANUAL for name in names)


def test_every_option_stands_there_with_its_default() -> None:
    for name, number in [*adaptive.OPTIONS.items(), *expected_ttft.OPTIONS.items()]:
        default = "none" if number.default is None else f"{number.default:.12g}"
        assert f"| `{name}` | {default} |" in MANUAL
