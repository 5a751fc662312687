"""The way around for a read that is one whole chunk: the same content, never a byte more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.response_reader import ResponseReader

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Sink:
    def __init__(self):
        self.body = b""
        self.ends = 0

    def head_received(self, head):
        self.head = head

    def body_received(self, data):
        self.body += data

    def response_received(self):
        self.ends += 1


def streaming():
    sink = Sink()
    reader = ResponseReader(sink)
    reader.begin("POST")
    reader.feed(HEAD)
    return reader, sink


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def alone(reader, data):
    """The content of a read that is one whole chunk."""
    start = reader.alone_at(data) if reader.alone_at is not None else 0
    return data[start:-2] if start else None


def test_one_whole_chunk_is_taken():
    reader, sink = streaming()
    assert alone(reader, chunk(b"data: 1\n\n")) == b"data: 1\n\n"
    assert sink.body == b""
    reader.feed(b"0\r\n\r\n")
    assert sink.ends == 1
    assert reader.reusable


@pytest.mark.parametrize(
    "read",
    [
        b"",
        b"5\r\nhel",
        b"5\r\nhello",
        b"5\r\nhello\r",
        b"5\r\nhello\n\n",
        b"05\r\nhello\r\n",
        b"5;x\r\nhello\r\n",
        b"0\r\n\r\n",
        chunk(b"a") + chunk(b"b"),
        chunk(b"x" * 5000),
    ],
)
def test_any_other_read_is_left_as_it_is(read):
    reader, sink = streaming()
    assert alone(reader, read) is None
    assert sink.body == b""
    reader.feed(chunk(b"next"))
    assert sink.body == b"next"


def test_nothing_is_taken_in_the_middle_of_a_chunk():
    reader, sink = streaming()
    reader.feed(b"a\r\n")
    assert alone(reader, chunk(b"hello")) is None
    reader.feed(chunk(b"hello") + b"\r\n")
    assert sink.body == chunk(b"hello")


def test_nothing_is_taken_after_the_end_in_trailers_or_when_given_up():
    reader, _ = streaming()
    reader.feed(b"0\r\n\r\n")
    assert alone(reader, chunk(b"evil")) is None

    reader, _ = streaming()
    reader.feed(b"0\r\nX: 1\r\n")
    assert alone(reader, chunk(b"evil")) is None

    reader, _ = streaming()
    reader.close()
    assert alone(reader, chunk(b"evil")) is None


def test_a_body_that_is_not_chunked_has_none():
    reader = ResponseReader(Sink())
    reader.begin("POST")
    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
    assert alone(reader, chunk(b"hello")) is None


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=6), st.integers(0, 40))
def test_both_ways_give_the_same_content(pieces, cut):
    whole = b"".join(chunk(piece) for piece in pieces)
    reads = (
        [whole[:cut], *(chunk(piece) for piece in pieces), b"0\r\n\r\n"]
        if cut == 0
        else [
            whole[:cut],
            whole[cut:],
            b"0\r\n\r\n",
        ]
    )
    reader, sink = streaming()
    got = b""
    for read in reads:
        if not read:
            continue
        content = alone(reader, read)
        if content is None:
            before = len(sink.body)
            reader.feed(read)
            got += sink.body[before:]
        else:
            got += content
    assert got == b"".join(pieces)
    assert sink.ends == 1
