"""What a caller may ask of a model, and the request as routers and limits see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmgw.core.body import estimate_tokens
from llmgw.core.member import CHECK_S
from llmgw.core.retry import retry_after
from llmgw.errors import ModelNotAllowed, ModelNotFound, NoBackend
from llmgw.gateway.suited import has_dialect, only_model
from llmgw.values import Caller, Caps, Request

if TYPE_CHECKING:
    from llmgw.gateway.account import Account
    from llmgw.gateway.gateway import Gateway
    from llmgw.gateway.outgoing import Outgoing


def apply_rules(gateway: Gateway, outgoing: Outgoing, caller: Caller, account: Account) -> Request:
    """Apply aliases, the key's scope, caps and filters; record the model in ``account``.

    :raise ModelNotFound: nobody serves the model, or nobody in the route's dialect.
    :raise NoBackend: there is no backend at all, so the model may exist.
    :raise GatewayError: a cap or a filter refuses the request.
    """
    parsed = outgoing.ask
    name = parsed.model or only_model(gateway)
    target = gateway.target_of(name)
    account.model = name
    account.streaming = parsed.stream
    if caller.models is not None and name not in caller.models and target not in caller.models:
        raise ModelNotAllowed(f"this key may not use the model {name[:256]!r}", param="model")
    if not gateway.fleet.serves(target):
        if not gateway.upstreams:
            raise NoBackend("There is no backend now.", retry_after_s=retry_after(CHECK_S, gateway.dice))
        raise ModelNotFound(f"no such model: {name[:256]!r}", param="model")
    if not has_dialect(gateway, outgoing.route, target):
        cure = "it can be asked for by /v1/chat/completions"
        raise ModelNotFound(f"no Ollama serves {name[:256]!r}; {cure}", param="model")
    account.target = target
    outgoing.target = target
    max_tokens = parsed.max_tokens
    prompt_tokens = account.prompt_estimate = estimate_tokens(parsed)
    if caller.caps is not None or name in gateway.caps:
        caps = Caps.tightest(each for each in (caller.caps, gateway.caps.get(name)) if each is not None)
        if caps is not None:
            max_tokens = outgoing.cap(caps, prompt_tokens)
    id = account.request_id
    if gateway.filters:
        gateway.filters.check(outgoing.submission(id, prompt_tokens, max_tokens), caller)
    return Request(
        id=id,
        model=target,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        prefix=outgoing.prefix() if gateway.wants_prefix(target) else (),
        session=parsed.session,
        key=caller.id,
        streaming=parsed.stream,
    )
