"""Requests that are held while their model is loaded (``[hold]``).

A held request waits in the queue of its model (:mod:`llmgw.gateway.waiting`) and is given
a slot in its turn, so the end of a load does not cause a stampede. The number of held
requests, their time, and the bytes of their bodies are bounded; beyond these bounds a client
is told when to come back. If a client leaves, its request is forgotten; the load goes on.

Meanwhile the client is sent nothing, unless it has asked for signs of life by
``x-llmgw-interim`` or by its key: ``102`` stands for 102 Processing (RFC 2518 section 10.1),
at most five times; ``sse`` begins the stream that the client has asked for with the first
sign of life, and whatever goes wrong then comes as an event.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from llmgw.core.hold import MAX_SIGNALS, Bounds, signal_every_s
from llmgw.core.retry import retry_after
from llmgw.errors import GatewayError, ModelLoading
from llmgw.gateway.client_options import interim_kinds
from llmgw.gateway.routes import OLLAMA

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmgw.gateway.exchange import Exchange
    from llmgw.gateway.gateway import Gateway
    from llmgw.loads import Loads
    from llmgw.values import Choice, Request

NOT_LOADED_S = 30.0
"""Seconds after which to come back for a model that the request may not cause to be loaded."""


class Holding:
    """All held requests.

    :ivar loads: loads models; ``None`` if this gateway does not, though backends may be loading.
    :ivar outcomes: number of held requests by what became of them.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.loads: Loads | None = None
        self._gateway = gateway
        self._since_s: dict[str, dict[int, float]] = {}
        self._bytes = 0
        self._total = 0
        self._numbers = 0

    def __len__(self) -> int:
        """The number of held requests."""
        return self._total

    @property
    def held_bytes(self) -> int:
        """The bytes of their bodies."""
        return self._bytes

    def models(self) -> list[str]:
        """The models for which requests are held."""
        return list(self._since_s)

    def count(self, model: str) -> int:
        """The number of requests held for ``model``."""
        return len(self._since_s.get(model, ()))

    def oldest_s(self, model: str) -> float:
        """Monotonic time since which a request is held for ``model``; ``inf`` if none is."""
        since_s = self._since_s.get(model)
        return next(iter(since_s.values())) if since_s else inf

    def fail(self, model: str, error: GatewayError) -> None:
        """``model`` cannot be loaded: fail all requests held for it."""
        self._gateway.waiting.fail(model, error)

    def refusal(self, request: Request, exclude: frozenset[str]) -> ModelLoading | None:
        """The refusal of a request that has tried ``exclude``, if it may be held instead: no backend
        can be asked now, but one is loading the model, or could. Else ``None``."""
        try:
            self._gateway.fleet.candidates(request, self._gateway.clock(), exclude=exclude)
        except ModelLoading as error:
            return error
        except GatewayError:
            pass
        return None

    async def hold(
        self,
        exchange: Exchange,
        request: Request,
        exclude: frozenset[str],
        until_s: float,
        refusal: ModelLoading,
    ) -> Choice:
        """Wait until the model is loaded and it is this request's turn; return the backend to ask.

        The lease must be taken in the same turn of the reactor. Cancelling forgets the request.

        :param exclude: ids of backends that it cannot use.
        :param until_s: monotonic time of the request's own deadline.
        :param refusal: the error by which it would be refused now.
        :raise GatewayError: the model cannot be loaded, or not in time.
        """
        gateway, model = self._gateway, request.model
        settings, loads, now_s = gateway.config.hold, self.loads, gateway.clock()
        if loads is not None and loads.can_load(model):
            self._request_load(exchange, loads, model)
            expected_s = loads.expected_s(model)
        else:
            expected_s = refusal.retry_after_s or 1.0
        bounds = Bounds(settings.min_s, settings.max_s, settings.factor)
        if exchange.hold_until_s is None:
            exchange.hold_until_s = min(until_s, now_s + bounds.wait_s(expected_s))
        wait_s = exchange.hold_until_s - now_s
        size = exchange.incoming.body_size
        if (
            wait_s <= 0
            or self._total >= settings.max_requests
            or self.count(model) >= (settings.max_per_model or settings.max_requests)
            or self._bytes + size > settings.body_bytes
        ):
            gateway.metrics.held(model, "refused", None)
            raise self._come_back(model, expected_s)
        self._numbers += 1
        number = self._numbers
        self._since_s.setdefault(model, {})[number] = now_s
        self._total += 1
        self._bytes += size
        signals = _signals_of(exchange, wait_s)
        outcome = "left"
        try:
            choice = await gateway.waiting.hold(request, exclude, wait_s, lambda: self._time_over(model))
            outcome = "released"
            return choice
        except _TimeOver:
            outcome = "timeout"
            raise
        except GatewayError:
            outcome = "failed"
            raise
        finally:
            if signals is not None:
                signals.stop()
            since_s = self._since_s[model]
            del since_s[number]
            if not since_s:
                del self._since_s[model]
            self._total -= 1
            self._bytes -= size
            held_s = gateway.clock() - now_s
            exchange.account.waited_s += held_s
            gateway.metrics.held(model, outcome, held_s)

    def _request_load(self, exchange: Exchange, loads: Loads, model: str) -> None:
        caller = exchange.answering.caller
        rule = self._gateway.aliases.get(exchange.account.model or "") or self._gateway.aliases.get(model)
        if (caller is not None and caller.loaded_only) or (rule is not None and rule.loaded_only):
            if not loads.is_under_way(model):
                error = ModelLoading(
                    f"{model!r} is not loaded, and this request may not have it loaded",
                    retry_after_s=retry_after(NOT_LOADED_S, self._gateway.dice),
                )
                error.should_retry = False
                raise error
            return
        loads.want(model)

    def _time_over(self, model: str) -> GatewayError:
        loads = self.loads
        expected_s = loads.expected_s(model) if loads is not None and loads.can_load(model) else 1.0
        return self._come_back(model, expected_s, _TimeOver)

    def _come_back(
        self, model: str, expected_s: float, kind: type[ModelLoading] = ModelLoading
    ) -> ModelLoading:
        if self.loads is not None:
            self.loads.keep(model)
        return kind(
            f"{model!r} is being loaded",
            retry_after_s=retry_after(max(1.0, expected_s), self._gateway.dice),
        )


class _TimeOver(ModelLoading):
    """Held for the longest time allowed."""


class _Signals:
    """Sends signs of life to a client until stopped.

    :param send: sends one.
    :param most: the largest number; ``None`` for any number.
    """

    def __init__(self, gateway: Gateway, send: Callable[[], None], every_s: float, most: int | None) -> None:
        self._reactor = gateway.reactor
        self._send = send
        self._every_s = every_s
        self._left = inf if most is None else most
        self._timer = self._reactor.callLater(every_s, self._due)

    def _due(self) -> None:
        self._send()
        self._left -= 1
        if self._left > 0:
            self._timer = self._reactor.callLater(self._every_s, self._due)

    def stop(self) -> None:
        """No more."""
        if self._timer.active():
            self._timer.cancel()


def _signals_of(exchange: Exchange, wait_s: float) -> _Signals | None:
    """The signs of life that the client has asked for; ``None`` if it has not."""
    gateway, incoming, answering = exchange.gateway, exchange.incoming, exchange.answering
    wanted = interim_kinds(incoming.head.headers)
    every_s = signal_every_s(wait_s, gateway.config.hold.interim_s)
    route = answering.route
    if b"sse" in wanted and exchange.account.streaming and route is not None and route.errors != OLLAMA:
        return _Signals(gateway, answering.sign_of_life, every_s, None)
    caller = answering.caller
    if incoming.started or not (b"102" in wanted or (caller is not None and caller.interim)):
        return None
    return _Signals(gateway, lambda: incoming.interim(102), every_s, MAX_SIGNALS)
