"""A router for tests, ``smallest-first``: by ``max_tokens``; slots and prefixes as its options say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twisted.plugin import IPlugin
from zope.interface import implementer

from llmgw.interfaces import CONTRACT, IOrderingRouter, IRouterFactory
from llmgw.values import Backend, Choice, Event, Request


def installed(folder: Path) -> dict[str, str]:
    """Install it for a gateway. :return: the gateway's environment."""
    plugins = folder / "installed" / "twisted" / "plugins"
    plugins.mkdir(parents=True)
    (plugins / "llmgw_of_tests.py").write_text("from ordering_router import factory\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder / "installed"), str(Path(__file__).parent)])}


@implementer(IOrderingRouter)
class SmallestFirst:
    """:param slot: the slot to choose; :param fails: ``order`` names nobody."""

    observes = False

    def __init__(self, slot: int | None, prefix: bool, fails: bool) -> None:
        self.wants_prefix = prefix
        self._slot = slot
        self._fails = fails

    def choose(self, request: Request, candidates: Sequence[Backend], now_s: float) -> Choice:
        why = ",".join(f"{block:x}" for block in request.prefix[:3])
        return Choice(candidates[0], slot=self._slot, why=f"prefix {why} session {request.session}")

    def order(self, waiting: Sequence[Request], backend: Backend, now_s: float) -> int:
        if self._fails:
            return len(waiting)
        return min(range(len(waiting)), key=lambda place: waiting[place].max_tokens or 0)

    def observe(self, event: Event) -> None:
        raise AssertionError("not asked for")


@implementer(IPlugin, IRouterFactory)
class Factory:
    name = "smallest-first"
    description = "a router of the tests"
    contract = CONTRACT

    def build(self, options: Mapping[str, Any]) -> SmallestFirst:
        return SmallestFirst(options.get("slot"), options.get("prefix", False), options.get("fails", False))


factory = Factory()
