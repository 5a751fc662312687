"""Where discovered backends may be."""

from __future__ import annotations

import pytest

from llmgw.core.allowed import DEFAULT, AllowList, settled


@pytest.mark.parametrize(
    ("host", "may"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("10.1.2.3", True),
        ("172.16.0.1", True),
        ("172.32.0.1", False),
        ("192.168.7.7", True),
        ("100.64.0.9", True),
        ("fd00::5", True),
        ("169.254.169.254", False),
        ("fe80::1", False),
        ("fd00:ec2::254", False),
        ("100.100.100.200", False),
        ("::ffff:169.254.169.254", False),
        ("::ffff:10.0.0.1", False),
        ("8.8.8.8", False),
        ("2001:db8::1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("metadata.google.internal", False),
        ("gpu-1", False),
        ("localhost.example", False),
    ],
)
def test_by_default_only_this_machine_and_private_networks(host: str, may: bool) -> None:
    assert AllowList(DEFAULT).permits(host) is may


@pytest.mark.parametrize(
    ("place", "host", "may"),
    [
        ("8.8.8.8", "8.8.8.8", True),
        ("8.8.8.8", "8.8.4.4", False),
        ("0.0.0.0/0", "8.8.8.8", True),
        ("0.0.0.0/0", "2001:db8::1", False),
        ("0.0.0.0/0", "169.254.169.254", False),
        ("169.254.169.254", "169.254.169.254", True),
        ("::/0", "::ffff:8.8.8.8", False),
        ("gpu-1", "gpu-1", True),
        ("GPU-1.", "gpu-1", True),
        ("gpu-1", "gpu-1.", True),
        ("gpu-1", "gpu-10", False),
        ("*.svc.cluster.local", "a.b.svc.cluster.local", True),
        ("*.svc.cluster.local", "svc.cluster.local", False),
        ("*.svc.cluster.local", "evilsvc.cluster.local", False),
        ("*", "anything", True),
        ("*", "8.8.8.8", True),
    ],
)
def test_what_the_operator_allows(place: str, host: str, may: bool) -> None:
    assert AllowList([place]).permits(host) is may


def test_nothing_allowed_is_nothing() -> None:
    assert not AllowList([]).permits("127.0.0.1")


@pytest.mark.parametrize(
    "place", ["", "10.0.0.1/8", "10.0.0", "300.1.1.1", "a b", "*.*", "http://x", "-x", "a*b"]
)
def test_what_is_none_of_these_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        settled(place)
