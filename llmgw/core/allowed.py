"""Which hosts discovered backends may have: a guard against server-side request forgery.

Anybody who can write to the source of a discovery chooses URLs that the gateway then calls from
inside the network. So a discovered host must be in a network or have a name that the operator
allows.

By default these are all private networks and this machine. Excluded on purpose: link-local
addresses and others where clouds serve credentials, public ones, and every name but
``localhost``, since a name can be made to resolve to any address at any time.

:source: OWASP SSRF prevention cheat sheet; RFC 1918, 4193, 6598.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

DEFAULT = (
    "127.0.0.0/8",
    "::1/128",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "fc00::/7",
    "localhost",
)
"""This machine, private networks, and the shared space that overlay networks use."""

METADATA = frozenset({"169.254.169.254", "fd00:ec2::254", "100.100.100.200"})
"""Where clouds answer any caller with credentials: allowed only one by one."""

_NAME = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9_])?")


class AllowList:
    """Hosts that may be called.

    :param places: networks, addresses, names, ``*.example.net`` for all names below
        one, or ``*`` for everything.
    :raise ValueError: one of them is none of these.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._everything = False
        self._networks: list[IPv4Network | IPv6Network] = []
        self._names: set[str] = set()
        self._suffixes: list[str] = []
        for place in places:
            self._add(settled(place))

    def permits(self, host: str) -> bool:
        """:param host: of a settled URL, without brackets."""
        if self._everything:
            return True
        try:
            address = ip_address(host)
        except ValueError:
            name = host.rstrip(".")
            return name in self._names or any(name.endswith(suffix) for suffix in self._suffixes)
        if _hides_another(address):
            return False
        # Of an address that hands out credentials nobody means the network around it.
        return any(
            address in network and (network.num_addresses == 1 or host not in METADATA)
            for network in self._networks
        )

    def _add(self, place: str) -> None:
        if place == "*":
            self._everything = True
        elif place.startswith("*."):
            self._suffixes.append(place[1:])
        elif _is_network(place):
            self._networks.append(ip_network(place))
        else:
            self._names.add(place)


def settled(place: str) -> str:
    """The one form of an entry of such a list.

    :raise ValueError: it is none.
    """
    text = place.strip().lower().rstrip(".")
    if text == "*":
        return text
    if _is_network(text):
        return str(ip_network(text))
    if re.fullmatch(r"[0-9a-f.:]*/.*|[0-9.]+", text) or not _NAME.fullmatch(text):
        raise ValueError(
            f"{place!r} is neither a network (10.0.0.0/8), a name, *.a-domain, nor * for everything"
        )
    return text


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


def _hides_another(address: IPv4Address | IPv6Address) -> bool:
    """An IPv4 address in IPv6 form: allowed networks are meant as they are written."""
    return isinstance(address, IPv6Address) and address.ipv4_mapped is not None
