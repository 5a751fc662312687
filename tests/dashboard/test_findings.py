"""What the dashboard says first, from states that are hard to bring about; the page's own module is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from llmgw.admin import assets

NODE = {
    "id": "a",
    "models": ["m"],
    "available": True,
    "standing": "ready",
    "breaker": "closed",
    "warmth": 1.0,
    "in_flight": 0,
    "cap": 4,
    "failure_streak": 0,
    "detail": "",
    "ttft_s": 0.2,
    "deferred": 0,
    "removed": False,
    "draining": False,
    "loading": False,
}


def node(id: str = "a", **fields: Any) -> dict[str, Any]:
    return {**NODE, "id": id, **fields}


def served(route: Any, files: Mapping[str, bytes]) -> None:
    """The page's own modules, without a gateway."""
    name = route.request.url.rpartition("/")[2]
    route.fulfill(body=files.get(name, b""), content_type="text/javascript" if name else "text/html")


@pytest.fixture(scope="module")
def said(chromium: Any) -> Callable[..., list[str]]:
    """Sentences about nodes, with samples as the last minute's."""
    files = assets.load()
    page = chromium.new_page()
    page.route("**/*", lambda route: served(route, files))
    page.goto("http://localhost/")

    def say(*nodes: dict[str, Any], samples: tuple[dict[str, Any], ...] = (), **state: Any) -> list[str]:
        found: list[str] = page.evaluate(
            """async ([state, samples]) => {
              const { findings } = await import("/assets/findings.js");
              const { Past } = await import("/assets/past.js");
              const past = new Past();
              past.add(samples);
              return findings(state, past).map(({ tone, words }) => `${tone}: ${words}`);
            }""",
            [{"backends": nodes, "draining": False, "waiting": 0, **state}, samples],
        )
        return found

    return say


def test_a_fleet_that_is_well(said: Callable[..., list[str]]) -> None:
    assert said(node(), node("b")) == ["good: Nothing stands out. All 2 nodes take requests."]
    assert said(node()) == ["good: Nothing stands out. The one node takes requests."]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"standing": "down", "available": False, "detail": "refused.."}, "bad: a is down: refused."),
        (
            {"standing": "ejected", "breaker": "open", "available": False, "failure_streak": 5},
            "bad: a is taken out, 5 failures in a row.",
        ),
        ({"loading": True, "available": False, "standing": "loading"}, "warn: a is loading its model."),
        ({"ttft_s": 1.3}, "warn: a is slow: 1.30 s to the first token, 7 times as long as the others."),
        (
            {"detail": "ok, but 401 from /props: it wants another api_key_file"},
            "warn: a answers, but 401 from /props: it wants another api_key_file.",
        ),
        (
            {"deferred": 2},
            "warn: a has 2 requests queued inside it: somebody else uses it, or its cap is above its slots.",
        ),
    ],
)
def test_a_node_that_is_not(said: Callable[..., list[str]], fields: dict[str, Any], words: str) -> None:
    assert said(node(**fields), node("b")) == [words]


@pytest.mark.parametrize(
    "fields",
    [
        {"ttft_s": 0.5},  # not three times as long
        {"ttft_s": 1.3, "models": ["another"]},  # nobody to compare it with
        {"draining": True, "available": False},  # somebody wants it so
        {"in_flight": 4},
        {"warmth": 0.3},
    ],
)
def test_a_node_that_only_seems_so(said: Callable[..., list[str]], fields: dict[str, Any]) -> None:
    (words,) = said(node(**fields), node("b"))
    assert words.startswith("good: ")


def test_refusals_of_the_last_minute_ours_before_theirs(said: Callable[..., list[str]]) -> None:
    def sample(at: float, **fields: Any) -> dict[str, Any]:
        return {"at": at, "every_s": 5, "requests": 9, "errors": 0, "rejected": {}, "backends": {}, **fields}

    old = sample(0.0, errors=5, rejected={"overloaded": 9})
    new = sample(100.0, errors=1, rejected={"overloaded": 2, "invalid_api_key": 3})
    assert said(node(), samples=(old, new)) == [
        "bad: 1 answer with a 5xx in the last minute.",
        "warn: Refused in the last minute: 2 overloaded.",
        "idle: Callers' own errors in the last minute: 3 invalid api key.",
    ]


def test_the_whole_gateway(said: Callable[..., list[str]]) -> None:
    assert said() == ["warn: There are no nodes: add [[backends]] to the configuration and reload."]
    down = node(standing="down", available=False)
    assert said(down)[0] == "bad: No node takes requests."
    assert said(node(), draining=True)[0].startswith("bad: This gateway is draining")
    full = node(in_flight=4)
    assert said(full, waiting=3) == ["warn: Every slot is taken.", "warn: 3 requests wait for a slot."]


def test_what_is_wrong_with_the_gateway_itself(said: Callable[..., list[str]]) -> None:
    calm = {
        "overload": {"level": "calm"},
        "store": None,
        "discovery": [{"name": "etcd", "connected": True}],
        "workers": [{"number": 1, "state": "serving"}],
    }
    assert said(node(), **calm) == ["good: Nothing stands out. The one node takes requests."]
    told = said(
        node(),
        overload={"level": "shedding"},
        store={"up": False, "why": "connection refused."},
        discovery=[{"name": "etcd", "connected": False, "error": None}],
        workers=[{"number": 2, "state": "given up"}],
    )
    assert [words.split("(")[0].split(":")[1].strip() for words in told] == [
        "The gateway sheds load to stay alive",
        "The shared store is out of reach",
        "The discovery etcd has lost touch. The backends it told of are kept.",
        "Worker 2 is given up after too many ends; the log says how. A reload starts it again.",
    ]


def test_gateways_and_workers_in_words(chromium: Any) -> None:
    page = chromium.new_page()
    files = assets.load()
    page.route("**/*", lambda route: served(route, files))
    page.goto("http://localhost/")

    def shown(state: dict[str, Any]) -> str | None:
        text: str | None = page.evaluate(
            """async (state) => {
              const { showPeers } = await import("/assets/side.js");
              const [card, box] = [document.createElement("section"), document.createElement("div")];
              document.body.append(card, box);
              showPeers(card, box, state);
              return card.hidden ? null : box.innerText;
            }""",
            state,
        )
        return text

    assert shown({}) is None
    assert shown({"workers": None, "peers": None, "store": None}) is None
    text = shown(
        {
            "workers": [
                {
                    "number": 1,
                    "pid": 7,
                    "state": "serving",
                    "why": "",
                    "in_flight": 1,
                    "uptime_s": 61,
                    "restarts": 0,
                },
                {"number": 2, "pid": None, "state": "given up", "why": "", "in_flight": 0, "restarts": 3},
            ],
            "peers": {"others": 2, "heard_s_ago": 0.4, "shares": {"gpu-0": 3}},
            "store": {"up": False, "place": "127.0.0.1:6379", "why": "refused"},
        }
    )
    assert text is not None
    for words in (
        "worker 1: serving",
        "pid 7, 1 request in flight, up 1 min",
        "worker 2: given up",
        "pid none, 0 requests in flight, 3 restarts",
        "others that keep to the caps too",
        "heard 0 s ago; our part: gpu-0 3",
        "store: out of reach",
        "127.0.0.1:6379, refused",
    ):
        assert words in text


def test_what_is_loaded_and_who_is_held_for_it(said: Callable[..., list[str]]) -> None:
    loading = {"under_way": {"big": {"backend": "a", "for_s": 4.0, "expected_s": 16.0}}}
    assert said(node(), loading=loading, holding={"big": 3}) == [
        "warn: big is being loaded on a, about 12.0 s left; 3 requests are held for it."
    ]
    loading["under_way"] = {"new": {"backend": None, "for_s": None, "expected_s": None}}
    assert said(node(), loading=loading, holding={}) == ["warn: new is being loaded."]
