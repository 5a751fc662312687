"""A real Chromium; a page of it that forbids faults; a gateway with callers.

Debian's ``chromium`` is used, since the browsers of playwright are downloads.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from busy_fleet import Fleet, fleet_at

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
QUIET += ["--disable-component-update", "--disable-sync", "--no-proxy-server"]
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One for all tests of a module; they leave it as it was."""
    with fleet_at(tmp_path_factory.mktemp("fleet"), away=True) as running:
        yield running
        assert "Traceback" not in running.gateway.log, running.gateway.log


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser."""
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages, each in a profile of its own; at the end none has had a fault.

    ``faults=False`` for pages that are to meet some. Options are those of playwright's contexts.
    """
    contexts: list[Any] = []
    told: list[str] = []
    pages: list[Any] = []

    def open_(url: str = "about:blank", *, faults: bool = True, wait: bool = True, **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(15_000)
        contexts.append(context)
        page = context.new_page()
        page.add_init_script(WATCH)
        if faults:
            pages.append(page)
            page.on("console", lambda said: said.type == "error" and told.append(said.text))
            page.on("pageerror", lambda error: told.append(str(error)))
        if url != "about:blank":
            page.goto(url)
            if wait:
                page.wait_for_selector("[data-link=live]")
                page.wait_for_selector("tbody[data-tone]")
        return page

    yield open_
    violations = [each for page in pages for each in page.evaluate("window.violations")]
    for context in contexts:
        context.close()
    assert not told, told
    assert not violations, violations


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where screenshots go: ``LLMGW_SCREENSHOTS=docs/images`` renews those of the pages."""
    folder = Path(os.environ.get("LLMGW_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
