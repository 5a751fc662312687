"""Plugins that misbehave as their options say, to be installed for a gateway process.

``does``: ``raise``, ``exit`` (SystemExit), ``base`` (asyncio's CancelledError),
``nonsense`` (a return value of another type), ``block`` (0.2 s of sleep), ``never``
(a Deferred that never fires), ``never-cancelled`` (the same, and cancelling it raises),
``fail`` (a Deferred that fails), ``fail-base``, ``cancelled`` (a Deferred that was),
``coroutine``, ``twice`` (calls back twice where it is given a callback).
Anything else behaves. ``after`` calls have gone well before it begins. ``settle`` is
what a limiter does when it settles, if that is something else.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.plugin import IPlugin
from zope.interface import implementer

from llmgw.interfaces import (
    CONTRACT,
    IHealthSource,
    IHealthSourceFactory,
    IHealthTarget,
    IModelLoader,
    IModelLoaderFactory,
    IRateLimiter,
    IRateLimiterFactory,
    IRequestFilter,
    IRequestFilterFactory,
    IRouter,
    IRouterFactory,
)
from llmgw.values import (
    Backend,
    Caller,
    Choice,
    Cost,
    Decision,
    HealthReport,
    LimitState,
    Policy,
    Request,
    Submission,
)


def installed(folder: Path) -> dict[str, str]:
    """Install them for a gateway. :return: the gateway's environment."""
    plugins = folder / "installed" / "twisted" / "plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    names = "router, filter, limiter, health, loader"
    (plugins / "llmgw_strange.py").write_text(f"from strange_plugins import {names}\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder / "installed"), str(Path(__file__).parent)])}


WRONG_CHOICES: Mapping[str, Any] = {
    "score-text": {"score": "0.5"},
    "score-none": {"score": None},
    "score-huge": {"score": 10**400},
    "why-long": {"why": "x" * 5_000_000},
    "why-surrogate": {"why": "a\ud800"},
    "why-lines": {"why": "a\r\nset-cookie: b"},
    "slot-huge": {"slot": 10**400},
    "why-object": {"why": object()},
    "slot-text": {"slot": "1"},
    "slot-below-0": {"slot": -1},
}
WRONG_DECISIONS: Mapping[str, Any] = {
    "refuse-nan": {"allowed": False, "retry_after_s": float("nan")},
    "refuse-huge": {"allowed": False, "retry_after_s": 10**400},
    "refuse-true": {"allowed": False, "retry_after_s": True},
    "refuse-none": {"allowed": False, "retry_after_s": None},
    "allowed-text": {"allowed": "no"},
    "allowed-figures": {"allowed": True, "requests": 5},
    "allowed-states": {"allowed": True, "tokens": LimitState(10, "x", 1.0)},  # type: ignore[arg-type]
    "refuse-object": {"allowed": False, "retry_after_s": 1.0, "policy": object()},
}


def _refuse_to_be_cancelled(waited: Any) -> None:
    raise ValueError("no cancelling here")


async def _nothing() -> None:
    pass


class Odd:
    """Not even its ``repr`` works."""

    def __repr__(self) -> str:
        raise ValueError("no words")


class Strange:
    """Misbehaves."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._does = options.get("does", "behave")
        self._left = options.get("after", 0)
        self._settles = options.get("settle", "")

    def misbehave(self, well: Callable[[], Any]) -> Any:
        """``well()``, or what was asked for."""
        if self._left > 0:
            self._left -= 1
            return well()
        does = self._does
        if does == "raise":
            raise KeyError("strange")
        if does == "exit":
            raise SystemExit(3)
        if does == "base":
            raise asyncio.CancelledError  # no Exception
        if does == "cancelled":
            return fail(CancelledError())
        if does == "fail-base":
            return fail(asyncio.CancelledError())
        if does == "nonsense":
            return Odd()
        if does == "block":
            time.sleep(0.2)
        if does == "never":
            return Deferred()
        if does == "never-cancelled":
            return Deferred(_refuse_to_be_cancelled)
        if does == "coroutine":
            return _nothing()
        if does == "fail":
            return fail(ZeroDivisionError("strange"))
        return well()


@implementer(IRouter)
class StrangeRouter(Strange):
    def choose(self, request: Request, candidates: Sequence[Backend], now_s: float) -> Any:
        wrong = WRONG_CHOICES.get(self._does)
        if wrong is not None:
            return Choice(candidates[0], **wrong)
        return self.misbehave(lambda: Choice(candidates[0]))

    def observe(self, event: Any) -> Any:
        return self.misbehave(lambda: None)


@implementer(IRequestFilter)
class StrangeFilter(Strange):
    def check(self, submission: Submission, caller: Caller) -> None:
        return self.misbehave(lambda: None)  # type: ignore[no-any-return]


@implementer(IRateLimiter)
class StrangeLimiter(Strange):
    def admit(self, subject: str, policies: Sequence[Policy], cost: Cost) -> Any:
        wrong = WRONG_DECISIONS.get(self._does)
        if wrong is not None:
            return Decision(**wrong)
        return self.misbehave(lambda: Decision(True, reservation=object()))

    def settle(self, reservation: Any, used: Any) -> Any:
        return (
            Strange({"does": self._settles}).misbehave(lambda: None)
            if self._settles
            else self.misbehave(lambda: None)
        )

    def gauges(self) -> Any:
        if self._does == "gauges-odd":
            return {"odd name\n": ("Odd.", 1), "llmgw_strange": ("Of two\nlines.", 2)}
        if self._does == "gauges-text":
            return {"no number": ("Odd.", "x")}
        return {} if self._does == "fail" else self.misbehave(dict)

    def stop(self) -> Any:
        return self.misbehave(lambda: None)


@implementer(IHealthSource)
class StrangeHealth(Strange):
    def start(self, target: IHealthTarget, report: Callable[[HealthReport], None]) -> None:
        well = HealthReport(alive=True, models=("m",), slots=4, kind="llama-server")
        if self._does == "twice":
            report(well)
            report(well)
        else:
            report(self.misbehave(lambda: well))

    def stop(self) -> Any:
        return self.misbehave(lambda: None)


TOLD_MODELS: Mapping[str, Any] = {
    "list": ["m"],
    "states": {"m": "ready?"},
    "names": {"m": "unloaded", 3: "loaded"},
    "none": None,
    "too-soon": {"m": "unloaded"},
}


@implementer(IModelLoader)
class StrangeLoader(Strange):
    def models(self) -> Any:
        return TOLD_MODELS[self._does]

    def load(self, model: str) -> Any:
        return succeed(None)

    unload = load


def _factory(interface: Any, kind: type) -> Any:
    @implementer(IPlugin, interface)
    class Factory:
        name = "strange"
        description = "misbehaves"
        contract = CONTRACT

        def build(self, options: Mapping[str, Any], *args: Any) -> Any:
            return kind(options)

    class FactoryWithReactor(Factory):
        def build(self, options: Mapping[str, Any], reactor: Any) -> Any:
            return kind(options)

    class FactoryAlone(Factory):
        def build(self, options: Mapping[str, Any]) -> Any:
            return kind(options)

    class FactoryForTarget(Factory):
        def build(self, options: Mapping[str, Any], target: Any, reactor: Any) -> Any:
            return kind(options)

    if kind is StrangeLoader:
        return FactoryForTarget()
    return (FactoryAlone if kind in (StrangeRouter, StrangeFilter) else FactoryWithReactor)()


router = _factory(IRouterFactory, StrangeRouter)
filter = _factory(IRequestFilterFactory, StrangeFilter)
limiter = _factory(IRateLimiterFactory, StrangeLimiter)
health = _factory(IHealthSourceFactory, StrangeHealth)
loader = _factory(IModelLoaderFactory, StrangeLoader)
