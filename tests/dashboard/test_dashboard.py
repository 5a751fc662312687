"""The dashboard in a real browser."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from busy_fleet import MODEL, SERVERS, Fleet, fleet_at
from harness import eventually

TOKEN = "dashboard-test-token"


def row(page: Any, id: str) -> Any:
    """A node's row."""
    return page.locator(f"[id='node-{id}']")


def decisions(page: Any) -> Any:
    return page.locator("#decisions tbody tr")


# --- what is shown ------------------------------------------------------------


def test_every_node_is_there_and_the_dead_one_stands_out(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    page = open_page(fleet.url)
    assert page.locator("#fleet tbody .name").all_inner_texts() == [*SERVERS, "gpu-2"]
    page.wait_for_selector("tbody[data-tone=bad] >> text=down")
    assert "gpu-2 is down" in page.locator("#findings li").first.inner_text()
    assert page.locator("#fleet-note").inner_text() == "4 of 5 take requests"
    assert row(page, "gpu-0").locator(".pip").count() == 4
    page.locator("#findings a").first.click()
    assert page.evaluate("location.hash") == "#node-gpu-2"


def test_a_request_is_seen_without_a_reload(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    page = open_page(fleet.url)
    before = page.evaluate("performance.timeOrigin")
    seen = decisions(page).count()
    fleet.ask("ada", model="gpt-4o-mini", stream=True, max_tokens=150)
    eventually(lambda: decisions(page).count() > seen)
    # The key's name comes with the next state; until then its id is shown.
    eventually(lambda: "ada" in decisions(page).first.inner_text())
    text = decisions(page).first.inner_text()
    assert "gpt-4o-mini" in text
    assert re.search("(?:best|least) of", text)
    assert "done" in text
    fleet.ask("nobody")
    page.wait_for_selector("#decisions tbody tr[data-tone=warn] >> text=401 invalid api key")
    page.wait_for_selector("#refused >> text=invalid api key")
    page.wait_for_selector("#limits >> text=ada")
    assert page.evaluate("performance.timeOrigin") == before


def test_names_of_keys_are_shown_for_requests_from_before_the_page(
    fleet: Fleet, open_page: Callable[..., Any]
) -> None:
    fleet.ask("ada")
    page = open_page(fleet.url)
    page.wait_for_selector("#decisions tbody tr >> text=done")
    eventually(lambda: "ada" in decisions(page).first.locator(".caller").inner_text())


def test_slots_and_limits_move_while_callers_are_at_work(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    page = open_page(fleet.url)
    with fleet.busy(callers=6, tokens=400):
        page.wait_for_selector(".pip.on")
        page.wait_for_selector("#limits .limit >> text=at once")
        eventually(lambda: float(page.locator("#figures b").first.inner_text().replace("–", "0")) > 0)
        page.wait_for_selector("#fleet .spark polyline, #fleet .spark circle")
        assert "×" in page.locator("#fleet .times").all_inner_texts()[0]


def test_a_request_opens_with_all_that_is_known(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    fleet.ask("grace", model="gpt-4o-mini")
    page = open_page(fleet.url)
    decisions(page).first.locator("button").click()
    fields = page.locator("#detail-fields")
    for words in ("grace", "Model served", MODEL, "Why there", "In the gateway's hands", "Output tokens"):
        assert words in fields.inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#detail").is_visible()
    decisions(page).first.locator("button").click()
    page.click("#detail-explain")
    page.wait_for_selector("#explained .verdict >> text=would take gpt-4o-mini")


def test_decisions_are_filtered_and_held(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    fleet.ask("ada", model="no-such-model")
    fleet.ask("grace")
    page = open_page(fleet.url)
    page.click("[data-show=trouble]")
    assert page.locator("#decisions tbody tr[data-tone=good]").count() == 0
    assert "model not found" in page.locator("#decisions").inner_text()
    page.click("[data-show=all]")
    page.fill("#seek", "grace")
    assert set(page.locator("#decisions td.caller").all_inner_texts()) == {"grace"}
    page.fill("#seek", "nothing has this")
    assert page.locator("#decisions-none").is_visible()
    page.fill("#seek", "")
    page.click("#pause")
    before = decisions(page).first.inner_text()
    fleet.ask("ada", model="another-that-is-not")
    page.wait_for_timeout(1200)
    assert decisions(page).first.inner_text() == before
    page.click("#pause")
    page.wait_for_selector("#decisions >> text=another-that-is-not")


def test_what_others_send_never_becomes_markup(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    name = "<img src=x onerror=alert(1)>"
    fleet.ask("ada", model=name)
    page = open_page(fleet.url)
    page.wait_for_selector(f"#decisions td >> text={name}")
    assert page.locator("#decisions img").count() == 0


# --- explain ------------------------------------------------------------------


def test_explain_shows_candidates_choice_and_who_was_left_out(
    fleet: Fleet, open_page: Callable[..., Any]
) -> None:
    page = open_page(fleet.url)
    page.select_option("#model", "gpt-4o-mini")
    assert json.loads(page.input_value("#body"))["model"] == "gpt-4o-mini"
    page.click("#explain >> text=Explain")
    page.wait_for_selector("#explained .verdict")
    told = page.locator("#explained")
    assert "would take gpt-4o-mini (as llama-3-8b)" in told.inner_text()
    assert told.locator("tbody th").count() == len(SERVERS)
    assert told.locator("[data-chosen]").count() == 1
    assert "gpu-2 down" in told.locator("ul").inner_text()


def test_explain_says_which_score_wins(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    page = open_page(fleet.url)

    def heading() -> bool:
        page.click("#explain >> text=Explain")
        page.wait_for_selector("#explained .verdict")
        return "Score, least wins" in page.locator("#explained thead").inner_text()

    with fleet.busy(callers=2, tokens=50):  # until the servers are told apart
        eventually(heading)


@pytest.mark.parametrize(
    ("body", "words"),
    [("{", "400"), ('{"model": "none"}', "no such model: 'none'")],
    ids=["broken", "unknown"],
)
def test_explain_says_what_the_request_would_be_told(
    fleet: Fleet, open_page: Callable[..., Any], body: str, words: str
) -> None:
    page = open_page(fleet.url, faults=False)  # the browser logs each 4xx as an error
    page.fill("#body", body)
    page.click("#explain >> text=Explain")
    page.wait_for_selector("#explained .fault")
    assert words in page.locator("#explained").inner_text()


# --- levers -------------------------------------------------------------------


def test_a_node_is_drained_and_taken_back(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    page = open_page(fleet.url)
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    page.get_by_role("button", name="Details of laptop").click()
    page.click("text=Drain laptop")
    page.wait_for_selector("[id='node-laptop'] >> text=draining")
    assert asked == ["Send no new requests to laptop? Those at work run on."]
    page.click("text=Send requests to laptop again")
    page.wait_for_selector("[id='node-laptop'] >> text=ready")


def test_reload_tells_its_outcome(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    page = open_page(fleet.url)
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#reload")
    page.wait_for_selector("#toast >> text=Reloaded.")


# --- keyboard, narrow, dark, accessible ---------------------------------------


def test_all_of_it_by_keyboard(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    fleet.ask("ada")
    page = open_page(fleet.url)
    press, focused = page.keyboard.press, lambda: page.evaluate("document.activeElement.id")
    press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    press("Enter")
    assert page.evaluate("location.hash") == "#fleet-title"
    press("f")
    assert focused() == "fleet-title"
    press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Details of gpu-0"
    press("Enter")
    assert page.locator("[id='details-gpu-0']").is_visible()
    press("e")
    assert focused() == "body"
    press("f")  # in a field letters are letters
    assert page.input_value("#body").count("f") >= 1
    page.fill("#body", '{"model": "llama-3-8b", "messages": []}')
    press("Control+Enter")
    page.wait_for_selector("#explained .verdict")
    page.evaluate("document.activeElement.blur()")
    press("/")
    assert focused() == "seek"
    page.evaluate("document.activeElement.blur()")
    press("p")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    press("d")
    press("Tab")
    press("Enter")
    assert page.locator("#detail").is_visible()
    press("Escape")


@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1920])
def test_nothing_is_cut_off_on_any_width(fleet: Fleet, open_page: Callable[..., Any], width: int) -> None:
    fleet.ask("ada", model="gpt-4o-mini")
    page = open_page(fleet.url, viewport={"width": width, "height": 800})
    page.click("#explain >> text=Explain")
    page.wait_for_selector("#explained .verdict")
    page.locator(".opener").first.click()
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width, f"{wide} px on a screen of {width}"
    assert row(page, "gpu-0").locator(".slots").is_visible()


BEYOND = """() => [...document.querySelectorAll('#figures > div')].filter((box) => {
  const value = box.querySelector('b');
  value.textContent = value.textContent.includes('s') ? '888 ms' : '88.8k';
  const end = box.getBoundingClientRect().right - parseFloat(getComputedStyle(box).paddingRight);
  return [...box.querySelectorAll('b, small')].some((each) => each.getBoundingClientRect().right > end + 1);
}).map((box) => box.textContent)"""
"""Figures that reach beyond their box when they are as long as they can be."""


@pytest.mark.parametrize("width", [320, 768, 1160, 1280])
def test_figures_stay_in_their_boxes(fleet: Fleet, open_page: Callable[..., Any], width: int) -> None:
    fleet.ask("ada", model="gpt-4o-mini")
    page = open_page(fleet.url, viewport={"width": width, "height": 800})
    eventually(lambda: " ms" in page.locator("#figures").inner_text(), 30)
    assert page.evaluate(BEYOND) == []


CONTRAST = """() => {
  const rgb = (text) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map((part) => part / 255);
  };
  const light = ([r, g, b]) => {
    const line = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * line(r) + 0.7152 * line(g) + 0.0722 * line(b);
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [1, 1, 1, 1];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest(".hidden, .skip, option, noscript")) continue;
    const [one, other] = [light(rgb(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) poor.push(`${element.tagName}.${element.className} ${element.textContent} ${ratio}`);
  }
  return poor;
}"""
"""Text with less contrast than WCAG 2.2, criterion 1.4.3 wants."""

NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, a, [role=img]")]
  .filter((each) => each.checkVisibility())
  .filter((each) => !(each.getAttribute("aria-label") || each.getAttribute("aria-labelledby")
    || each.labels?.length || each.textContent.trim()))
  .map((each) => each.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_controls_have_names(
    fleet: Fleet, open_page: Callable[..., Any], scheme: str
) -> None:
    fleet.ask("ada", model="no-such-model")
    page = open_page(fleet.url, color_scheme=scheme)
    page.click("#explain >> text=Explain")
    page.wait_for_selector("#explained .verdict")
    page.locator(".opener").first.click()
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(NAMELESS) == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 23, 26)") is (scheme == "dark")


def test_the_theme_can_be_chosen_and_is_remembered(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    page = open_page(fleet.url, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    page.click("#theme")
    assert page.locator("#theme").inner_text() == "Theme: dark"
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark


def test_nothing_moves_for_those_who_want_it_so(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    page = open_page(fleet.url, reduced_motion="reduce")
    assert page.evaluate("document.getAnimations().length") == 0


def test_what_is_inline_or_foreign_is_not_run(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    page = open_page(fleet.url, faults=False)
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.ran = true";
          document.body.append(script);
          document.body.insertAdjacentHTML("beforeend", "<p style='color: red'></p>");
        }"""
    )
    eventually(lambda: page.evaluate("window.violations.length") >= 2)
    assert page.evaluate("window.ran") is None
    assert page.evaluate("fetch('http://127.0.0.1:1/').then(() => 'went', () => 'blocked')") == "blocked"


# --- stale, and live again ----------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet of one's own, with a token."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    with fleet_at(tmp_path, more="admin_token_file = 'token'\n", only=("gpu-0",), token=TOKEN) as running:
        yield running


def sign_in(page: Any, token: str = TOKEN) -> None:
    page.fill("#token", token)
    page.click("text=Sign in")


def test_old_figures_are_called_stale(fleet: Fleet, open_page: Callable[..., Any]) -> None:
    page = open_page(wait=False)
    page.clock.install()
    page.goto(fleet.url)
    page.wait_for_selector("[data-link=live]")
    fleet.gateway.process.send_signal(signal.SIGSTOP)
    try:
        page.clock.fast_forward(14_000)
        page.wait_for_selector("[data-link=stale]")
        assert "stale: nothing heard for" in page.locator("#link-text").inner_text()
        assert page.title() == "(stale) llmgw"
        assert float(page.evaluate("getComputedStyle(document.querySelector('main')).opacity")) < 1
    finally:
        fleet.gateway.process.send_signal(signal.SIGCONT)
    page.wait_for_selector("[data-link=live]")
    assert page.title() == "llmgw"


def test_the_token_is_asked_for_once_and_the_page_outlives_a_restart(
    small: Fleet, open_page: Callable[..., Any]
) -> None:
    page = open_page(small.url, faults=False, wait=False)  # a 401 is an error to the browser's console
    sign_in(page, "not-it")
    page.wait_for_selector("#fault >> text=That is not the token.")
    sign_in(page, "two words")
    page.wait_for_selector("#fault >> text=one word")
    sign_in(page)
    page.wait_for_selector("[data-link=live]")
    page.wait_for_selector("tbody[data-tone=good] >> text=gpu-0")
    assert page.evaluate("document.cookie") == ""
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert cookie["expires"] - time.time() < 12 * 3600 + 5
    assert TOKEN not in cookie["value"]

    small.gateway.stop()
    page.wait_for_selector("[data-link=stale]")
    small.start_gateway()
    page.wait_for_selector("[data-link=live]")  # the same cookie, since the token is the same

    page.click("#leave")
    page.wait_for_selector("#token")
    assert page.context.cookies() == []
    assert page.evaluate("window.violations") == []


def test_a_session_that_ends_leads_to_the_form(small: Fleet, open_page: Callable[..., Any]) -> None:
    page = open_page(small.url, faults=False, wait=False)
    sign_in(page)
    page.wait_for_selector("[data-link=live]")
    page.context.clear_cookies()
    small.gateway.stop()
    page.wait_for_selector("[data-link=stale]")
    small.start_gateway()
    page.wait_for_selector("#token")
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(NAMELESS) == []
