"""Which backends have what a request asks for, before any is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmgw.errors import InvalidRequest
from llmgw.gateway.routes import OLLAMA, Route

if TYPE_CHECKING:
    from llmgw.gateway.gateway import Gateway

NONE: frozenset[str] = frozenset()


def has_dialect(gateway: Gateway, route: Route, model: str) -> bool:
    """Somebody who serves ``model`` speaks the route's dialect."""
    if route.errors != OLLAMA:
        return True
    ids = gateway.fleet.models(gateway.clock()).get(model, tuple(gateway.upstreams))
    return bool(set(ids) - unsuited(gateway, route))


def unsuited(gateway: Gateway, route: Route) -> frozenset[str]:
    """Backends that do not have the route: Ollama's own is only Ollama's."""
    if route.errors != OLLAMA:
        return NONE
    return frozenset(
        id for id, upstream in gateway.upstreams.items() if gateway.kind_of(upstream) not in ("ollama", None)
    )


def only_model(gateway: Gateway) -> str:
    """The model that a request without one must mean.

    :raise InvalidRequest: there is not exactly one.
    """
    models = gateway.fleet.models(gateway.clock())
    if len(models) == 1:
        return next(iter(models))
    raise InvalidRequest("the request must name a model", param="model")
