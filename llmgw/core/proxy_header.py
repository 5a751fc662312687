"""The PROXY protocol: the origin of a connection, in its first bytes.

A load balancer that forwards bytes writes one header, version 1 (a line of text) or 2 (binary),
before anything else. :class:`ProxyReader` takes bytes in any pieces and never looks beyond the
header.

:source: "The PROXY protocol, versions 1 & 2" (HAProxy, doc/proxy-protocol.txt).
"""

from __future__ import annotations

import ipaddress
import re
import struct
from typing import NamedTuple

V1_START = b"PROXY "
V1_LONGEST = 107
"""With its CRLF (section 2.1)."""
V2_START = b"\r\n\r\n\x00\r\nQUIT\n"
V2_FIXED = 16
V2_LONGEST = 4096
"""Addresses and all additions; the protocol would allow 64 KiB."""

_PORT = r"(0|[1-9][0-9]{0,4})"
_V1_LINE = re.compile(rf"PROXY (TCP4|TCP6) ([0-9A-Fa-f.:]+) ([0-9A-Fa-f.:]+) {_PORT} {_PORT}".encode())
_ADDRESSES = {0x1: 4, 0x2: 16}
_UNIX_BYTES = 216


class ProxyFault(Exception):
    """These bytes are not a PROXY header; nothing after them may be read."""


class Place(NamedTuple):
    """One end of a connection."""

    host: str
    port: int


class ProxyHeader(NamedTuple):
    """What was told.

    :param source: the client; ``None``: the balancer speaks for itself (LOCAL), or does
        not say (UNKNOWN, Unix sockets).
    :param destination: where the client has connected to.
    """

    source: Place | None
    destination: Place | None


UNTOLD = ProxyHeader(None, None)


class ProxyReader:
    """Reads one header.

    :ivar rest: what came behind it, once there is a header.
    """

    def __init__(self) -> None:
        self.rest = b""
        self._seen = b""

    def feed(self, data: bytes) -> ProxyHeader | None:
        """The header, when it is complete; ``None`` while it may still become one.

        :raise ProxyFault: it cannot become one any more.
        """
        self._seen += data
        seen = self._seen
        if seen.startswith(V1_START):
            return self._version_1(seen)
        if seen.startswith(V2_START):
            return self._version_2(seen)
        if V1_START.startswith(seen) or V2_START.startswith(seen):
            return None
        raise ProxyFault("the connection does not begin with a PROXY header")

    def _version_1(self, seen: bytes) -> ProxyHeader | None:
        end = seen.find(b"\r\n", 0, V1_LONGEST)
        if end < 0:
            if len(seen) >= V1_LONGEST:
                raise ProxyFault(f"a PROXY line is longer than {V1_LONGEST} bytes")
            return None
        self.rest = seen[end + 2 :]
        line = seen[:end]
        if line == b"PROXY UNKNOWN" or line.startswith(b"PROXY UNKNOWN "):
            return UNTOLD
        parts = _V1_LINE.fullmatch(line)
        if parts is None:
            raise ProxyFault("not a PROXY line of version 1")
        kind = ipaddress.IPv4Address if parts[1] == b"TCP4" else ipaddress.IPv6Address
        try:
            source, destination = (kind(parts[index].decode()) for index in (2, 3))
        except ValueError:
            raise ProxyFault("an address in a PROXY line is not one") from None
        ports = int(parts[4]), int(parts[5])
        if max(ports) > 65535:
            raise ProxyFault("a port in a PROXY line is above 65535")
        return ProxyHeader(Place(str(source), ports[0]), Place(str(destination), ports[1]))

    def _version_2(self, seen: bytes) -> ProxyHeader | None:
        if len(seen) < V2_FIXED:
            return None
        version_command, kind, length = struct.unpack_from("!BBH", seen, len(V2_START))
        if version_command not in (0x20, 0x21):
            raise ProxyFault("a PROXY header of an unknown version or command")
        if length > V2_LONGEST:
            raise ProxyFault(f"a PROXY header is longer than {V2_LONGEST} bytes")
        end = V2_FIXED + length
        if len(seen) < end:
            return None
        self.rest = seen[end:]
        if version_command == 0x20:
            # LOCAL: the addresses have to be skipped (section 2.2).
            return UNTOLD
        return _addresses(kind, seen[V2_FIXED:end])


def _addresses(kind: int, body: bytes) -> ProxyHeader:
    family, transport = kind >> 4, kind & 0xF
    if kind == 0:
        return UNTOLD
    if transport != 1 or family not in (1, 2, 3):
        raise ProxyFault("a PROXY header of something that is no stream over IP or a Unix socket")
    size = _ADDRESSES.get(family)
    taken = _UNIX_BYTES if size is None else 2 * size + 4
    if len(body) < taken:
        raise ProxyFault("a PROXY header is too short for its addresses")
    _skip_additions(body[taken:])
    if size is None:
        return UNTOLD
    ports = struct.unpack_from("!HH", body, 2 * size)
    source, destination = (
        Place(str(ipaddress.ip_address(body[start : start + size])), port)
        for start, port in zip((0, size), ports, strict=True)
    )
    return ProxyHeader(source, destination)


def _skip_additions(additions: bytes) -> None:
    """Type-length-value records (section 2.2.1): nothing in them is needed, but they must fill their room."""
    at = 0
    while at < len(additions):
        if len(additions) - at < 3:
            raise ProxyFault("an addition to a PROXY header is cut short")
        at += 3 + int.from_bytes(additions[at + 1 : at + 3], "big")
    if at > len(additions):
        raise ProxyFault("an addition to a PROXY header is cut short")
