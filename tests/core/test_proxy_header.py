"""The PROXY protocol's header, in whatever pieces, and nothing that only looks like one."""

from __future__ import annotations

import ipaddress
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.proxy_header import V2_START, Place, ProxyFault, ProxyHeader, ProxyReader

REQUEST = b"GET / HTTP/1.1\r\n"
UNTOLD = ProxyHeader(None, None)


def v2(body: bytes = b"", *, command: int = 0x21, kind: int = 0x11, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return V2_START + bytes([command, kind]) + size.to_bytes(2, "big") + body


def ip_body(source: str, destination: str, ports: tuple[int, int] = (5000, 443)) -> bytes:
    packed = ipaddress.ip_address(source).packed + ipaddress.ip_address(destination).packed
    return packed + struct.pack("!HH", *ports)


def tlv(kind: int, value: bytes) -> bytes:
    return bytes([kind]) + len(value).to_bytes(2, "big") + value


V4 = ProxyHeader(Place("192.0.2.1", 5000), Place("198.51.100.1", 443))
V6 = ProxyHeader(Place("2001:db8::1", 5000), Place("2001:db8::2", 443))
GOOD = [
    (b"PROXY TCP4 192.0.2.1 198.51.100.1 5000 443\r\n", V4),
    (b"PROXY TCP6 2001:db8::1 2001:DB8::2 5000 443\r\n", V6),
    (b"PROXY TCP4 1.2.3.4 5.6.7.8 0 65535\r\n", ProxyHeader(Place("1.2.3.4", 0), Place("5.6.7.8", 65535))),
    (b"PROXY UNKNOWN\r\n", UNTOLD),
    (b"PROXY UNKNOWN ffff::1 ffff::2 65535 65535\r\n", UNTOLD),
    (b"PROXY UNKNOWN whatever the sender likes\r\n", UNTOLD),
    (v2(ip_body("192.0.2.1", "198.51.100.1")), V4),
    (v2(ip_body("2001:db8::1", "2001:db8::2"), kind=0x21), V6),
    (v2(ip_body("192.0.2.1", "198.51.100.1") + tlv(0x03, b"crc!") + tlv(0x20, b"x" * 300) + tlv(4, b"")), V4),
    (v2(b"/a".ljust(108, b"\0") + b"/b".ljust(108, b"\0"), kind=0x31), UNTOLD),
    (v2(kind=0x00), UNTOLD),
    (v2(b"ignored", kind=0x00), UNTOLD),
    (v2(command=0x20, kind=0x00), UNTOLD),
    (v2(ip_body("10.0.0.1", "10.0.0.2"), command=0x20), UNTOLD),
    (v2(b"junk", command=0x20, kind=0x77), UNTOLD),
]


@pytest.mark.parametrize(("header", "told"), GOOD)
def test_a_header_is_read_and_nothing_behind_it(header: bytes, told: ProxyHeader) -> None:
    whole = ProxyReader()
    assert whole.feed(header + REQUEST) == told
    assert whole.rest == REQUEST
    slow = ProxyReader()
    for byte in header[:-1]:
        assert slow.feed(bytes([byte])) is None
    assert slow.feed(header[-1:]) == told
    assert slow.rest == b""


@pytest.mark.parametrize(
    "bad",
    [
        REQUEST,
        b"\x16\x03\x01",
        b"proxy TCP4",
        b"PROXY\tTCP4",
        b"PROXYTCP4",
        b"PROXY TCP4\r\n",
        b"PROXY \r\n",
        b"PROXY TCP5 1.2.3.4 5.6.7.8 1 2\r\n",
        b"PROXY UNKNOWNX\r\n",
        b"PROXY TCP4  1.2.3.4 5.6.7.8 1 2\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2 \r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2 3\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 01 2\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 +1 2\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 65536\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 222222\r\n",
        b"PROXY TCP4 1.2.3 5.6.7.8 1 2\r\n",
        b"PROXY TCP4 01.2.3.4 5.6.7.8 1 2\r\n",
        b"PROXY TCP4 1.2.3.256 5.6.7.8 1 2\r\n",
        b"PROXY TCP4 ::1 ::1 1 2\r\n",
        b"PROXY TCP6 1.2.3.4 5.6.7.8 1 2\r\n",
        b"PROXY TCP6 fe80::1%eth0 ::1 1 2\r\n",
        b"PROXY TCP6 :::1 ::1 1 2\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\n" + b"x" * 107,
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\n\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\x00\r\n",
        b"PROXY UNKNOWN " + b"x" * 92 + b"\r\n",
        b"PROXY UNKNOWN " + b"x" * 200,
        V2_START[:-1] + b"\r",
        v2(command=0x11),
        v2(command=0x22),
        v2(command=0x31),
        v2(length=4097),
        v2(b"\0" * 11),
        v2(b"\0" * 35, kind=0x21),
        v2(b"\0" * 215, kind=0x31),
        v2(ip_body("1.2.3.4", "5.6.7.8"), kind=0x12),
        v2(ip_body("1.2.3.4", "5.6.7.8"), kind=0x10),
        v2(ip_body("1.2.3.4", "5.6.7.8"), kind=0x41),
        v2(ip_body("1.2.3.4", "5.6.7.8"), kind=0x01),
        v2(ip_body("1.2.3.4", "5.6.7.8") + b"\x04\x00"),
        v2(ip_body("1.2.3.4", "5.6.7.8") + tlv(4, b"abc")[:-1]),
    ],
)
def test_anything_else_is_refused_in_whatever_pieces(bad: bytes) -> None:
    with pytest.raises(ProxyFault):
        ProxyReader().feed(bad)
    slow = ProxyReader()

    def drip() -> None:
        for byte in bad:
            assert slow.feed(bytes([byte])) is None

    with pytest.raises(ProxyFault):
        drip()


def test_the_longest_line_of_version_1() -> None:
    longest = b"PROXY UNKNOWN " + b"x" * 91 + b"\r\n"
    assert len(longest) == 107
    assert ProxyReader().feed(longest) == UNTOLD


addresses = st.one_of(
    st.tuples(st.just(4), st.ip_addresses(v=4), st.ip_addresses(v=4)),
    st.tuples(st.just(6), st.ip_addresses(v=6), st.ip_addresses(v=6)),
)
ports = st.integers(0, 65535)


@given(addresses, ports, ports, st.binary(max_size=40), st.lists(st.integers(0, 60)), st.booleans())
def test_any_header_in_any_pieces(pair, source_port, port, rest, cuts, text) -> None:
    version, source, destination = pair
    if text:
        header = f"PROXY TCP{version} {source} {destination} {source_port} {port}\r\n".encode()
    else:
        body = ip_body(str(source), str(destination), (source_port, port))
        header = v2(body, kind=0x11 if version == 4 else 0x21)
    stream = header + rest
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader, told, behind = ProxyReader(), None, b""
    for begin, end in pairwise(edges):
        if told is None:
            told = reader.feed(stream[begin:end])
            behind = reader.rest
        else:
            behind += stream[begin:end]
    assert told == ProxyHeader(Place(str(source), source_port), Place(str(destination), port))
    assert behind == rest


@given(st.binary(max_size=300))
def test_noise_is_refused_or_waited_for_and_nothing_else(noise: bytes) -> None:
    try:
        assert ProxyReader().feed(noise) in (None, UNTOLD)
    except ProxyFault:
        pass


@given(st.sampled_from([header for header, _ in GOOD]), st.data())
def test_a_header_with_one_byte_changed_never_breaks_the_reader(header: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(header) - 1))
    changed = header[:at] + bytes([data.draw(st.integers(0, 255))]) + header[at + 1 :]
    try:
        ProxyReader().feed(changed)
    except ProxyFault:
        pass
