"""The trace of a request: who decides whether it is recorded, which ids go where."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.trace import Trace, begin

TRACE, SPAN = b"0af7651916cd43dd8448eb211c80319c", b"b7ad6b7169203331"
SAMPLED = b"00-%b-%b-01" % (TRACE, SPAN)


def dice() -> random.Random:
    return random.Random(7)


def test_the_callers_trace_goes_on() -> None:
    trace = begin(SAMPLED, 0.0, dice())
    assert trace is not None
    assert (trace.trace_id, trace.parent_id) == (int(TRACE, 16), int(SPAN, 16))
    hop = trace.hop("b", 1.0)
    assert trace.header() == b"00-%b-%016x-01" % (TRACE, hop.span_id)
    assert len({trace.span_id, trace.parent_id, hop.span_id}) == 3


def test_a_caller_that_does_not_record_is_obeyed() -> None:
    assert begin(SAMPLED[:-1] + b"0", 1.0, dice()) is None


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        SAMPLED.upper(),
        SAMPLED + b"-more",
        SAMPLED[:-1],
        b"ff" + SAMPLED[2:],
        b"00-%b-%b-01" % (b"0" * 32, SPAN),
        b"00-%b-%b-01" % (TRACE, b"0" * 16),
    ],
)
def test_without_a_good_header_the_share_decides_and_a_new_trace_begins(header: bytes | None) -> None:
    assert begin(header, 0.0, dice()) is None
    trace = begin(header, 1.0, dice())
    assert trace is not None
    assert trace.parent_id is None
    assert trace.trace_id != int(TRACE, 16)
    half = random.Random(3)
    assert 400 < sum(begin(header, 0.5, half) is not None for _ in range(1000)) < 600


def test_a_later_version_may_say_more() -> None:
    trace = begin(b"cc" + SAMPLED[2:] + b"-what-the-future-brings", 0.0, dice())
    assert trace is not None
    assert trace.parent_id == int(SPAN, 16)


@given(st.binary(max_size=80))
def test_no_bytes_make_it_raise(header: bytes) -> None:
    begin(header, 0.5, dice())


def test_a_hop_ends_with_its_error_or_without() -> None:
    trace = Trace(1, None, dice())
    first, second = trace.hop("a", 1.0), trace.hop("b", 2.0)
    first.end(1.5, "upstream_error")
    second.end(3.0, None)
    assert [(hop.backend, hop.ended_s, hop.error) for hop in trace.hops] == [
        ("a", 1.5, "upstream_error"),
        ("b", 3.0, None),
    ]
