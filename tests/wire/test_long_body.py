"""A long body leaves in order, a slice at a time, and is let go of."""

from __future__ import annotations

from twisted.internet.testing import StringTransport

from llmgw.wire.long_body import SLICE_BYTES, LongBody


def test_slices_follow_the_transport_s_pace() -> None:
    transport = StringTransport()
    body = bytes(range(256)) * (SLICE_BYTES // 256 * 2) + b"end"
    long_body = LongBody(transport, body)
    long_body.start()
    assert not transport.streaming
    sizes = []
    while transport.producer is not None:
        assert not long_body.done
        transport.producer.resumeProducing()
        sizes.append(len(transport.value()))
    assert transport.value() == body
    assert sizes == [SLICE_BYTES, 2 * SLICE_BYTES, len(body)]
    assert long_body.done


def test_a_lost_connection_lets_go_of_the_body() -> None:
    transport = StringTransport()
    long_body = LongBody(transport, b"x" * 1000)
    long_body.start()
    long_body.stopProducing()
    assert long_body.done
    assert transport.value() == b""
