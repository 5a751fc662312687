"""Where a store is, as URLs tell it."""

from __future__ import annotations

import pytest

from llmgw.store.address import Address, parse_address, parse_sentinel


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("redis://127.0.0.1", Address("127.0.0.1")),
        ("redis://127.0.0.1:7000/0", Address("127.0.0.1", 7000)),
        ("rediss://me@store.example/3", Address("store.example", tls=True, user="me", db=3)),
        ("redis://[::1]:7000", Address("::1", 7000)),
        ("unix:///run/redis.sock", Address(path="/run/redis.sock")),
        ("unix:///run/redis.sock?db=2", Address(path="/run/redis.sock", db=2)),
    ],
)
def test_urls(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("127.0.0.1:6379", "must begin with"),
        ("http://127.0.0.1", "must begin with"),
        ("redis://", "names no host"),
        ("redis:///1", "names no host"),
        ("redis://:hush@h", "must not hold a password"),
        ("redis://me:hush@h", "must not hold a password"),
        ("redis://h:0", "bad port"),
        ("redis://h:70000", "bad host or port"),
        ("redis://h/x", "database"),
        ("redis://h?db=1", "no query"),
        ("redis://h#1", "no fragment"),
        ("unix://run/redis.sock", "three slashes"),
        ("unix:///run/redis.sock?user=me", "db=N"),
        ("redis://h h", "not a URL"),
        ("", "not a URL"),
    ],
)
def test_what_is_no_such_url(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        parse_address(text)
    assert "hush" not in str(refused.value)


def test_sentinel_may_tell_the_host() -> None:
    assert parse_address("rediss:///2", hostless=True) == Address(tls=True, db=2)


@pytest.mark.parametrize(
    ("text", "place"), [("s1:7000", ("s1", 7000)), ("10.0.0.1", ("10.0.0.1", 26379)), ("[::1]:1", ("::1", 1))]
)
def test_sentinels(text: str, place: tuple[str, int]) -> None:
    assert parse_sentinel(text) == place


@pytest.mark.parametrize("text", ["", ":1", "s1:x", "s1:0", "u@s1:1", "s1:1/2", "redis://s1", "s 1:1"])
def test_what_is_no_sentinel(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_sentinel(text)
