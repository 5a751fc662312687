"""Which backends have the route and the model of a request, before any is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmgw.errors import InvalidRequest
from llmgw.gateway.routes import OLLAMA, Route

if TYPE_CHECKING:
    from llmgw.gateway.gateway import Gateway

NONE: frozenset[str] = frozenset()


def has_dialect(gateway: Gateway, route: Route, model: str) -> bool:
    """Whether a backend that serves ``model`` speaks the route's dialect."""
    if route.errors != OLLAMA:
        return True
    ids = gateway.fleet.models().get(model, tuple(gateway.upstreams))
    return bool(set(ids) - unsuited(gateway, route))


def unsuited(gateway: Gateway, route: Route) -> frozenset[str]:
    """The ids of backends that do not have the route: only Ollama has Ollama's own."""
    if route.errors != OLLAMA:
        return NONE
    return frozenset(
        id for id, upstream in gateway.upstreams.items() if gateway.kind_of(upstream) not in ("ollama", None)
    )


def only_model(gateway: Gateway) -> str:
    """The model of a request that names none.

    :raise InvalidRequest: there is not exactly one.
    """
    models = gateway.fleet.models()
    if len(models) == 1:
        return next(iter(models))
    raise InvalidRequest("the request must name a model", param="model")
