"""Answers given by the gateway itself: the models that a caller may use."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from llmgw.core.member import CHECK_S
from llmgw.core.retry import retry_after
from llmgw.errors import ModelNotFound, NoBackend
from llmgw.gateway.routes import MODEL_PREFIX
from llmgw.gateway.suited import has_dialect

if TYPE_CHECKING:
    from llmgw.gateway.gateway import Gateway
    from llmgw.gateway.routes import Route
    from llmgw.values import Caller

_encode = msgspec.json.Encoder().encode


def answer(route: Route, path: str, caller: Caller, gateway: Gateway) -> bytes:
    """The body of the answer on a local route.

    :raise ModelNotFound: the one model asked for is not there, or not the caller's.
    :raise NoBackend: no backend has reported its models yet, and none is known to be alive. An
        empty list would say that there are no models.
    """
    names = visible_models(caller, gateway)
    if not names and _nobody_told(gateway):
        raise NoBackend(
            "No backend has told yet what it serves.", retry_after_s=retry_after(CHECK_S, gateway.dice)
        )
    if route.local == "tags":
        names = [name for name in names if has_dialect(gateway, route, gateway.target_of(name))]
        return _encode({"models": [{"name": name, "model": name} for name in names]})
    if route.local == "model":
        wanted = unquote(path[len(MODEL_PREFIX) :])
        if wanted not in names:
            raise ModelNotFound(f"no such model: {wanted[:256]!r}", param="model")
        return _encode(_described(wanted))
    return _encode({"object": "list", "data": [_described(name) for name in names]})


def visible_models(caller: Caller, gateway: Gateway) -> list[str]:
    """The models of all backends and their aliases that ``caller`` may use: sorted names, each once."""
    served = gateway.fleet.models()
    names = set(served)
    for name, rule in gateway.aliases.items():
        if rule.target in served or name in served:
            names.add(name)
    if caller.models is not None:
        allowed = caller.models
        names = {
            name
            for name in names
            if name in allowed or (name in gateway.aliases and gateway.aliases[name].target in allowed)
        }
    return sorted(names)


def _nobody_told(gateway: Gateway) -> bool:
    fleet = gateway.fleet
    if fleet.models() or not gateway.upstreams:
        return False
    # A backend that has not reported its models takes requests for any name.
    return fleet.serves("") and not any(
        member.health is not None and member.health.alive for member in fleet.takers("")
    )


def _described(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "llmgw"}
