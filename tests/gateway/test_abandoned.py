"""A request whose coroutine is closed while it waits, as at the end of the process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from llmgw.gateway.exchange import Exchange
from llmgw.wire.coroutines import Future


class Waiting(Exchange):
    """Waits for what never comes."""

    __slots__ = ()

    async def _serve(self) -> Any:
        await Future[None](lambda: None)


def test_it_is_no_fault_of_anybody() -> None:
    exchange = Waiting.__new__(Waiting)
    # Whatever is used of these fails the test.
    exchange.gateway = exchange.incoming = exchange.answering = SimpleNamespace()  # type: ignore[assignment]
    coroutine = exchange.run()
    coroutine.send(None)
    coroutine.close()
