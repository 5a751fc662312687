"""Clients as customers have them, pointed at the live gateway."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from live_gateway import LiveGateway, wait_until


@pytest.fixture
def while_full(live_gateway: LiveGateway, http: httpx.Client) -> Callable[[Callable[[], Any]], Any]:
    """``(call)``: its result, begun while ``big`` is full; a slot is freed once it was refused."""

    def run(call: Callable[[], Any]) -> Any:
        def refused() -> float:
            return live_gateway.metric("llmgw_rejected_total", 'reason="overloaded"')

        before = refused()
        endless = {"model": "big", "prompt": "The", "ignore_eos": True, "stream": True}
        with ThreadPoolExecutor(1) as pool:
            with http.stream("POST", "/v1/completions", json=endless) as blocking:
                assert blocking.status_code == 200
                future = pool.submit(call)
                assert wait_until(lambda: refused() > before or future.done())
            return future.result(30)

    return run
