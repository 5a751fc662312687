"""The pictures of the pages. ``LLMGW_SCREENSHOTS=docs/images`` renews them, and takes two minutes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from busy_fleet import Fleet, fleet_at

TRAFFIC_S = 125.0 if os.environ.get("LLMGW_SCREENSHOTS") else 1.0


@pytest.fixture
def watched(tmp_path: Path) -> Any:
    """A fleet with a dead node, and one that is at its end."""
    with fleet_at(tmp_path, away=True, more="[admission]\nmax_wait_s = 1.0\n") as running:
        yield running


def errors(fleet: Fleet, over: threading.Event) -> None:
    """A caller who does things wrong now and then."""
    while not over.wait(6.0):
        fleet.ask("ada", model="llama-4")


@pytest.mark.slow
def test_pictures(watched: Fleet, open_page: Callable[..., Any], pictures: Path) -> None:
    sizes = {
        "dashboard-light": ({"width": 1360, "height": 960}, "light"),
        "dashboard-dark": ({"width": 1360, "height": 960}, "dark"),
        "dashboard-narrow": ({"width": 390, "height": 844}, "light"),
    }
    over = threading.Event()
    wrong = threading.Thread(target=errors, args=(watched, over), daemon=True)
    wrong.start()
    with watched.busy(callers=6):
        time.sleep(TRAFFIC_S)
        for name, (size, scheme) in sizes.items():
            page = open_page(watched.url, viewport=size, color_scheme=scheme, device_scale_factor=1)
            page.wait_for_selector("#decisions tbody tr")
            if name == "dashboard-light":
                page.click("#explain >> text=Explain")
                page.wait_for_selector("#explained .verdict")
            page.wait_for_timeout(600)
            page.screenshot(path=pictures / f"{name}.png")
            if name == "dashboard-dark":
                page.locator("#explain").scroll_into_view_if_needed()
                page.click("#explain >> text=Explain")
                page.wait_for_selector("#explained .verdict")
                card = page.locator(".side .card").first
                card.screenshot(path=pictures / "dashboard-explain.png")
    over.set()
    wrong.join(30)
    for name in (*sizes, "dashboard-explain"):
        assert (pictures / f"{name}.png").stat().st_size > 10_000
