"""Slows down attempts to guess keys.

Consulted only after a key was refused, so a valid key is never delayed by what others do from
its address (an office, a NAT).

Known limit: an attacker with more networks than ``remembered`` pushes out older failures of
their own. Against 256 random bits that gains nothing.

:source: ``docs/keys.md``; RFC 6177 section 2 for /64 as one subscriber's least network.
"""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address, ip_address

from llmgw.core.bucket import Bucket


class FailureFlood:
    """Counts failures per network: one IPv4 address or one IPv6 /64.

    :param per_minute: failures allowed at once, and per minute.
    :param remembered: networks kept; the one without failures for longest is dropped first.
    """

    def __init__(self, per_minute: float = 10.0, remembered: int = 10_000) -> None:
        self._per_minute = per_minute
        self._remembered = remembered
        self._networks: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        """Networks held in memory."""
        return len(self._networks)

    def failed(self, peer: str, now_s: float) -> float:
        """Count a refused key.

        :param peer: the caller's address without a port.
        :param now_s: monotonic seconds.
        :return: 0 for a plain 401; else answer 429, and these are the seconds to wait.
        """
        network = network_of(peer)
        bucket = self._networks.get(network)
        if bucket is None:
            if len(self._networks) >= self._remembered:
                self._networks.popitem(last=False)
            bucket = self._networks[network] = Bucket(self._per_minute / 60.0, self._per_minute, now_s)
        else:
            self._networks.move_to_end(network)
        wait_s = bucket.deficit_s(1.0, now_s)
        if wait_s == 0.0:
            bucket.take(1.0, now_s)
        return wait_s


def network_of(peer: str) -> str:
    """The part of an address that one party is likely to own.

    Anything but an IP address (the peer of a Unix socket) is returned as it is.
    """
    try:
        address = ip_address(peer)
    except ValueError:
        return peer
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"
