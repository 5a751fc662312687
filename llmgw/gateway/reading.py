"""Reads a request's body, and from it what the gateway needs to decide anything."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

from twisted.internet.task import deferLater

from llmgw.core.body import read_json
from llmgw.core.duplicate_keys import duplicate_steps
from llmgw.core.json_shape import Shape, shape_steps
from llmgw.core.multipart import read_multipart
from llmgw.errors import UnsupportedEncoding
from llmgw.gateway import client_options
from llmgw.gateway.outgoing import Outgoing
from llmgw.wire.coroutines import Future

if TYPE_CHECKING:
    from llmgw.gateway.account import Account
    from llmgw.gateway.gateway import Gateway
    from llmgw.gateway.routes import Route
    from llmgw.wire.incoming import Incoming

T = TypeVar("T")

LARGE_BYTES = 2 << 20
"""Reading a larger body is spread over several turns of the event loop."""


async def read_request(gateway: Gateway, incoming: Incoming, route: Route, account: Account) -> Outgoing:
    """Wait for the body, and parse what it asks for.

    Cancelling only ends the wait.

    :raise GatewayError: it is too large, compressed, or not what the route takes; or one
        of the client's options is malformed.
    """
    headers = incoming.head.headers
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise UnsupportedEncoding("request bodies must not be compressed")
    client_options.check(headers)
    body = incoming.body()
    if isinstance(body, Future):
        if incoming.head.expect_continue:
            incoming.proceed()
        body = await body
    account.read_s = gateway.clock()
    if route.body == "multipart":
        content_type = headers.get(b"content-type", b"")
        return Outgoing(route, body, content_type, read_multipart(body, content_type.decode("latin-1")))
    limits = gateway.body_limits
    shape: Shape | None = None
    if len(body) > LARGE_BYTES:
        shape = await _in_turns(gateway, shape_steps(body, limits, exempt=route.exempt))
    parsed = read_json(body, limits, exempt=route.exempt, require_model=route.needs_model, shape=shape)
    if shape is not None:
        await deferLater(gateway.reactor, 0)
        await _in_turns(gateway, duplicate_steps(body, limits if route.exempt else None))
    return Outgoing(route, body, b"application/json", parsed)


async def _in_turns(gateway: Gateway, steps: Generator[None, None, T]) -> T:
    """Run ``steps`` one per turn of the event loop, so that streams go on in between."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
        await deferLater(gateway.reactor, 0)
