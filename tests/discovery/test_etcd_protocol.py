"""What etcd's messages mean, and that no message can do harm."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_etcd import b64

from llmgw.core.json_lines import JsonLines, NotJsonLinesError
from llmgw.discovery.etcd_protocol import EtcdError, Heard, Item, Mirror, error_of, range_end


def header(revision: int, cluster: str = "7") -> dict[str, Any]:
    return {"cluster_id": cluster, "member_id": "1", "revision": str(revision), "raft_term": "2"}


def kv(key: str, value: str = "v", created: int = 2) -> dict[str, Any]:
    return {"key": b64(key), "value": b64(value), "create_revision": str(created), "version": "1"}


def gone(key: str) -> dict[str, Any]:
    return {"type": "DELETE", "kv": {"key": b64(key)}}


def result(**fields: Any) -> dict[str, Any]:
    return {"result": fields}


@pytest.fixture
def mirror() -> Mirror:
    found = Mirror(b"/l/")
    found.load({"header": header(10), "kvs": [kv("/l/a", "1", 3), kv("/l/b", "2", 4)], "count": "2"})
    return found


@pytest.mark.parametrize(
    ("prefix", "end"), [(b"/l/", b"/l0"), (b"a", b"b"), (b"a\xff", b"b"), (b"\xff", b"\0"), (b"", b"\0")]
)
def test_the_end_of_a_prefix(prefix: bytes, end: bytes) -> None:
    assert range_end(prefix) == end


def test_a_range_is_everything(mirror: Mirror) -> None:
    assert mirror.items == {b"/l/a": Item(b"1", 3), b"/l/b": Item(b"2", 4)}
    assert mirror.watch_request() == {
        "create_request": {
            "key": b64("/l/"),
            "range_end": b64("/l0"),
            "start_revision": "11",
            "progress_notify": True,
        }
    }
    mirror.load({"header": header(12)})
    assert (mirror.items, mirror.revision) == ({}, 12)


@pytest.mark.parametrize(
    ("message", "heard", "keys", "revision"),
    [
        (result(header=header(10), created=True), Heard.CREATED, "ab", 10),
        (result(header=header(30), created=True), Heard.CREATED, "ab", 10),
        (result(header=header(11), events=[{"kv": kv("/l/c")}]), Heard.CHANGED, "abc", 11),
        (result(header=header(11), events=[{"type": "PUT", "kv": kv("/l/c")}]), Heard.CHANGED, "abc", 11),
        (
            result(header=header(12), events=[gone("/l/a"), {"kv": kv("/l/d")}]),
            Heard.CHANGED,
            "bd",
            12,
        ),
        (
            result(header=header(11), events=[gone("/l/x")]),
            Heard.CHANGED,
            "ab",
            11,
        ),
        (result(header=header(15)), Heard.PROGRESS, "ab", 15),
        (result(header=header(4)), Heard.PROGRESS, "ab", 10),
        (result(header=header(15), watch_id="-1"), Heard.PROGRESS, "ab", 15),
        (result(header=header(12), canceled=True, compact_revision="12"), Heard.COMPACTED, "ab", None),
        (result(header=header(9), created=True), Heard.ANOTHER, "ab", None),
        (result(header=header(50, "8"), created=True), Heard.ANOTHER, "ab", None),
    ],
)
def test_each_message_of_a_watch(
    mirror: Mirror, message: dict[str, Any], heard: Heard, keys: str, revision: int | None
) -> None:
    assert mirror.take(message) is heard
    assert "".join(sorted(key.decode()[-1] for key in mirror.items)) == keys
    assert mirror.revision == revision


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (
            {"error": {"grpc_code": 14, "http_code": 503, "message": "transport is closing"}},
            "transport is closing",
        ),
        ({"error": "no"}, "no"),
        (
            result(header=header(1), created=True, canceled=True, cancel_reason="permission denied"),
            "permission",
        ),
        (result(header=header(1), canceled=True), "no reason told"),
        ({}, "without result"),
        ({"result": 7}, "without result"),
        (result(created=True), "without header"),
        (result(header=7), "without header"),
        (result(header={"revision": "x"}), "not a number"),
        (result(header={"revision": [1]}), "not a number"),
        (result(header=header(11), events={"a": 1}), "no list"),
        (result(header=header(11), events=[7]), "no object"),
        (result(header=header(11), events=[{"type": "DELETE"}]), "no object"),
        (result(header=header(11), events=[{"kv": kv("/l/c")}, {"kv": {"key": "***"}}]), "base64"),
        (result(header=header(11), events=[{"kv": {"key": 7}}]), "base64"),
    ],
)
def test_what_is_no_good_is_told_and_changes_nothing(mirror: Mirror, message: Any, why: str) -> None:
    before = dict(mirror.items)
    with pytest.raises(EtcdError, match=why):
        mirror.take(message)
    assert (mirror.items, mirror.revision) == (before, 10)


@pytest.mark.parametrize(
    "answer", [{}, {"header": {}, "kvs": 7}, {"header": header(1), "kvs": [7]}, {"header": 1}]
)
def test_a_range_that_is_none_changes_nothing(mirror: Mirror, answer: Any) -> None:
    before = dict(mirror.items)
    with pytest.raises(EtcdError):
        mirror.load(answer)
    assert (mirror.items, mirror.revision) == (before, 10)


@pytest.mark.parametrize(
    ("answer", "message", "code"),
    [
        ({"error": "etcdserver: x", "message": "etcdserver: x", "code": 11}, "etcdserver: x", 11),
        ({"error": {"grpc_code": 16, "message": "bad"}}, "bad", 16),
        ({"code": 5}, "no reason told", 5),
        ([], "no object", 0),
        (None, "no object", 0),
    ],
)
def test_errors_have_reason_and_code(answer: Any, message: str, code: int) -> None:
    error = error_of(answer)
    assert message in str(error)
    assert error.code == code


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["3", b64("/l/q")])
NAMES = st.sampled_from(
    ["header", "revision", "events", "kv", "key", "value", "type", "created", "canceled", "compact_revision"]
)
JUNK = st.recursive(
    LEAVES, lambda deep: st.lists(deep, max_size=3) | st.dictionaries(NAMES, deep, max_size=4)
)


@given(st.dictionaries(st.sampled_from(["result", "error"]), JUNK, max_size=2), st.integers(1, 40))
def test_no_message_does_harm(message: Any, size: int) -> None:
    mirror = Mirror(b"/l/")
    mirror.load({"header": header(10), "kvs": [kv("/l/a")]})
    raw = json.dumps(message).encode() + b"\n"
    lines = JsonLines()
    try:
        for start in range(0, len(raw), size):
            for each in lines.feed(raw[start : start + size]):
                mirror.take(each)
    except (EtcdError, NotJsonLinesError):
        pass
    assert mirror.revision is None or mirror.revision >= 10
