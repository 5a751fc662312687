"""Who tries keys is slowed down."""

from __future__ import annotations

import pytest

from llmgw.access.flood import FailureFlood, network_of


def test_ten_failures_a_minute_pass_and_the_next_must_wait() -> None:
    flood = FailureFlood()
    assert [flood.failed("192.0.2.1", 0.0) for _ in range(10)] == [0.0] * 10
    assert flood.failed("192.0.2.1", 0.0) == pytest.approx(6.0)
    assert flood.failed("192.0.2.1", 2.0) == pytest.approx(4.0)
    assert flood.failed("192.0.2.1", 6.0) == 0.0
    assert flood.failed("192.0.2.1", 6.0) > 0.0


def test_a_minute_of_silence_forgives() -> None:
    flood = FailureFlood()
    for _ in range(30):
        flood.failed("192.0.2.1", 0.0)
    assert [flood.failed("192.0.2.1", 60.0) for _ in range(11)].count(0.0) == 10


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("fe80::1%eth0", "fe80::2", True),
        ("/run/llmgw.sock", "/run/other.sock", False),
        ("", "", True),
        ("not an address", "not an address", True),
    ],
)
def test_one_ipv4_address_or_one_ipv6_64_counts_as_one(first: str, second: str, same: bool) -> None:
    flood = FailureFlood(per_minute=1)
    assert flood.failed(first, 0.0) == 0.0
    assert (flood.failed(second, 0.0) > 0.0) is same
    assert (network_of(first) == network_of(second)) is same


def test_memory_is_bounded_and_the_longest_silent_one_goes_first() -> None:
    flood = FailureFlood(per_minute=1, remembered=3)
    for peer in ("a", "b", "c", "a", "d"):
        flood.failed(peer, 0.0)
    assert len(flood) == 3
    assert flood.failed("a", 0.0) > 0.0
    assert flood.failed("b", 0.0) == 0.0


def test_a_clock_that_jumps_back_locks_nobody_out_for_longer() -> None:
    flood = FailureFlood(per_minute=1)
    flood.failed("a", 86_400.0)
    assert flood.failed("a", 0.0) <= 60.0
    assert flood.failed("a", 61.0) == 0.0
