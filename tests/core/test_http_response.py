"""The response side of strict HTTP/1.1: verdicts, cuts, ends of connections, reuse."""

from __future__ import annotations

from typing import NamedTuple

import httptools
import pytest
from corpus import CHUNKED, HEAD, MORE_RESPONSES, RESPONSES, TWO, ResponseCase
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.core import response_reader
from llmgw.core.http import DEFAULT_LIMITS, HeadLimits, HttpFault, ResponseHead, keep_alive_timeout
from llmgw.core.lines import split_fields, tokenise
from llmgw.core.response_reader import ResponseReader

ALL = RESPONSES + MORE_RESPONSES
OK = HEAD + TWO + b"\r\nhi"


class Sink:
    """Keeps what a reader calls."""

    def __init__(self) -> None:
        self.heads: list[ResponseHead] = []
        self.body = b""
        self.pieces: list[bytes] = []
        self.whole = 0

    def head_received(self, head: ResponseHead) -> None:
        self.heads.append(head)

    def body_received(self, data: bytes) -> None:
        assert data
        self.body += data
        self.pieces.append(data)

    def response_received(self) -> None:
        self.whole += 1


class Seen(NamedTuple):
    """All that can be observed from outside; ``reusable`` as it was before the close."""

    heads: list[ResponseHead]
    body: bytes
    whole: int
    fault: tuple[int, str, str] | None
    reusable: bool


def begun(method: str = "POST", limits: HeadLimits = DEFAULT_LIMITS) -> tuple[Sink, ResponseReader]:
    sink = Sink()
    reader = ResponseReader(sink, limits)
    reader.begin(method)
    return sink, reader


def read(pieces: list[bytes], method: str = "POST", limits: HeadLimits = DEFAULT_LIMITS) -> Seen:
    sink, reader = begun(method, limits)
    fault = None
    reusable = False
    try:
        for piece in pieces:
            reader.feed(piece)
        reusable = reader.reusable
        reader.eof()
    except HttpFault as error:
        fault = (error.status, error.code, error.message)
    assert not reader.reusable
    return Seen(sink.heads, sink.body, sink.whole, fault, reusable)


def one_by_one(raw: bytes) -> list[bytes]:
    return [raw[n : n + 1] for n in range(len(raw))]


def by_name(case: object) -> str:
    return case.name if isinstance(case, ResponseCase) else str(case)


# --- verdicts -------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL, ids=by_name)
def test_verdict(case: ResponseCase) -> None:
    seen = read([case.raw], case.method)
    assert (seen.fault[1] if seen.fault else "") == case.code
    assert seen.fault is None or seen.fault[0] == 502
    assert seen.body == case.body
    assert seen.whole == (0 if case.code else 1)
    assert seen.reusable == case.reusable
    if not case.code:
        assert [head.status for head in seen.heads] == [case.status]


@pytest.mark.parametrize("case", ALL, ids=by_name)
def test_the_verdict_is_the_wanted_one(case: ResponseCase) -> None:
    if case.want == "R":
        # What follows a whole response cannot undo it; it spoils the connection.
        assert case.code or not case.reusable
        assert b"EVIL" not in read([case.raw], case.method).body
    elif case.want == "A":
        assert not case.code


@pytest.mark.parametrize("case", ALL, ids=by_name)
def test_the_verdict_is_the_same_byte_by_byte(case: ResponseCase) -> None:
    assert read(one_by_one(case.raw), case.method) == read([case.raw], case.method)


@pytest.mark.parametrize("case", ALL, ids=by_name)
def test_the_verdict_is_the_same_for_every_cut_in_two(case: ResponseCase) -> None:
    whole = read([case.raw], case.method)
    for at in range(1, len(case.raw), max(1, len(case.raw) // 700)):
        assert read([case.raw[:at], case.raw[at:]], case.method) == whole, at


def test_the_corpus_keeps_its_size() -> None:
    names = [case.name for case in ALL]
    assert len(set(names)) == len(names) >= 75
    assert (len(RESPONSES), sum(case.want == "R" for case in RESPONSES)) == (31, 23)


SHORT = [case for case in ALL if 0 < len(case.raw) < 400]


@given(data=st.data())
@settings(max_examples=300)
def test_any_cutting_gives_the_same_events(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(SHORT))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(case.raw)), max_size=8)))
    pieces = [case.raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(case.raw)], strict=True)]
    assert read(pieces, case.method) == read([case.raw], case.method)


@given(data=st.data())
@settings(max_examples=300)
def test_damaged_bytes_give_the_same_events_for_any_cutting(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(SHORT))
    stream = bytearray(case.raw)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(stream) - 1))
        stream[at : at + data.draw(st.integers(0, 1))] = data.draw(
            st.sampled_from([b"\r", b"\n", b"\r\n", b"\0", b" ", b":", b",", b"\t", b"0", b"1", b"\xff"])
        )
    raw = bytes(stream)
    seen = read([raw], case.method)
    assert read(one_by_one(raw), case.method) == seen
    assert seen.fault is None or seen.fault[0] == 502


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_arbitrary_bytes_never_crash(raw: bytes) -> None:
    read([raw])
    read([HEAD + raw])
    read([HEAD + CHUNKED + raw])


# --- heads ----------------------------------------------------------------------


def test_a_head_keeps_its_fields_in_order() -> None:
    seen = read([b"HTTP/1.1 429 Too Many\r\nRetry-After: 30\r\nX-A:\t b \r\nx-a: c\r\n" + TWO + b"\r\nhi"])
    (head,) = seen.heads
    assert (head.status, head.reason, head.content_length, head.chunked) == (429, b"Too Many", 2, False)
    assert head.headers == [
        (b"retry-after", b"30"),
        (b"x-a", b"b"),
        (b"x-a", b"c"),
        (b"content-length", b"2"),
    ]
    assert head.get(b"x-a") == b"b"
    assert head.get(b"x-b") is None


def test_headers_nominated_by_connection_are_dropped() -> None:
    (head,) = read([HEAD + b"X-Secret: 1\r\nConnection: x-secret, keep-alive\r\n" + TWO + b"\r\nhi"]).heads
    assert head.get(b"x-secret") is None
    assert head.get(b"connection") == b"x-secret, keep-alive"
    assert head.keep_alive


def test_an_answer_to_head_tells_its_length_but_has_no_content() -> None:
    seen = read([HEAD + b"Content-Length: 99\r\n\r\n"], "HEAD")
    assert seen.heads[0].content_length == 99
    assert (seen.body, seen.whole, seen.reusable) == (b"", 1, True)


def test_a_get_after_head_on_one_connection() -> None:
    sink, reader = begun("HEAD")
    reader.feed(HEAD + CHUNKED)
    assert sink.whole == 1
    reader.begin("GET")
    reader.feed(OK)
    assert (len(sink.heads), sink.whole, sink.body) == (2, 2, b"hi")
    assert reader.reusable


def test_a_backend_head_over_the_limit_names_the_cause() -> None:
    fault = read([HEAD + b"X-A: " + b"a" * 40_000 + b"\r\n\r\n"]).fault
    assert fault == (502, "upstream_framing", "response header section too long")


def test_the_head_limit_can_be_raised() -> None:
    raw = HEAD + b"X-A: " + b"a" * 40_000 + b"\r\n" + TWO + b"\r\nhi"
    assert read([raw], limits=HeadLimits(headers=65_536)).fault is None


def test_the_head_limit_counts_the_status_line_and_each_interim_head_alone() -> None:
    line = b"X-A: " + b"a" * 20_000 + b"\r\n"
    interim = b"HTTP/1.1 103 Early Hints\r\n" + line + b"\r\n"
    assert read([interim * 3 + HEAD + line + TWO + b"\r\nhi"]).fault is None
    assert read([b"HTTP/1.1 200 " + b"a" * 20_000 + b"\r\n" + line + b"\r\n"]).fault is not None


@pytest.mark.parametrize("start", [b"HTTP/2", b"ICY", b"\x15\x03\x01", b"\n", b"<p>", b"HTTP/1.1 200 OK\n"])
def test_what_is_not_http_1_is_refused_at_once(start: bytes) -> None:
    _sink, reader = begun()
    with pytest.raises(HttpFault) as caught:
        reader.feed(start)
    assert caught.value.code == "upstream_framing"


# --- content --------------------------------------------------------------------


@pytest.mark.parametrize("framing", [b"Content-Length: 8\r\n\r\n", b"\r\n", CHUNKED + b"8\r\n"])
def test_a_read_that_is_all_content_is_passed_as_the_same_object(framing: bytes) -> None:
    sink, reader = begun()
    reader.feed(HEAD + framing)
    first, last = b"four", b"more"
    reader.feed(first)
    reader.feed(last)
    assert sink.pieces[0] is first
    assert sink.pieces[1] is last


@pytest.mark.parametrize("framing", [b"Content-Length: 8\r\n\r\n", b"\r\n", CHUNKED + b"8\r\n"])
def test_an_empty_read_changes_nothing(framing: bytes) -> None:
    sink, reader = begun()
    for piece in (b"", HEAD + framing, b"", b"four", b""):
        reader.feed(piece)
    assert (sink.body, sink.whole) == (b"four", 0)


def test_each_event_is_passed_as_its_chunk_arrives() -> None:
    sink, reader = begun()
    reader.feed(HEAD + CHUNKED)
    for event in (b"data: a\n\n", b"data: [DONE]\n\n"):
        reader.feed(b"%x\r\n%b\r\n" % (len(event), event))
        assert sink.pieces[-1] == event
    assert not reader.reusable
    reader.feed(b"0\r\n\r\n")
    assert (sink.whole, reader.reusable) == (1, True)


# --- ends -----------------------------------------------------------------------


def test_all_promised_bytes_and_then_a_reset_is_a_whole_response() -> None:
    sink, reader = begun()
    reader.feed(HEAD + b"Content-Length: 20\r\n\r\n" + b"x" * 20)
    assert sink.whole == 1
    reader.eof()
    assert (sink.whole, reader.reusable) == (1, False)


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (b"", "head"),
        (b"HTTP/1.1 200 OK\r\nX", "head"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "head"),
        (HEAD + TWO + b"\r\n", "body"),
        (HEAD + CHUNKED + b"5\r\nhello\r\n", "body"),
    ],
)
def test_a_close_before_the_end_is_a_cut(raw: bytes, where: str) -> None:
    fault = read([raw]).fault
    assert fault == (502, "upstream_truncated", f"the backend closed within the {where} of its response")


def test_started_tells_a_stale_connection_from_a_broken_answer() -> None:
    _sink, reader = begun()
    assert not reader.started
    reader.feed(b"H")
    assert reader.started
    _sink, reader = begun()
    reader.feed(OK)
    reader.begin("POST")
    assert not reader.started
    with pytest.raises(HttpFault):
        reader.eof()
    assert not reader.started


def test_close_delimited_content_ends_at_the_close() -> None:
    sink, reader = begun()
    reader.feed(HEAD + b"\r\nhi")
    assert sink.whole == 0
    reader.eof()
    assert (sink.body, sink.whole, reader.reusable) == (b"hi", 1, False)
    reader.eof()
    assert sink.whole == 1


def test_a_close_while_idle_is_no_fault() -> None:
    reader = ResponseReader(Sink())
    reader.eof()
    with pytest.raises(RuntimeError):
        reader.begin("GET")


# --- reuse ----------------------------------------------------------------------


def test_a_fresh_reader_can_begin_once() -> None:
    _sink, reader = begun()
    with pytest.raises(RuntimeError):
        reader.begin("POST")


def test_bytes_before_any_request_spoil_the_connection() -> None:
    sink = Sink()
    reader = ResponseReader(sink)
    reader.feed(b"")
    reader.feed(OK)
    assert sink.heads == []
    with pytest.raises(RuntimeError):
        reader.begin("POST")


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    "whole", [OK, HEAD + CHUNKED + b"2\r\nhi\r\n0\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n"]
)
def test_bytes_behind_a_response_spoil_the_connection(whole: bytes, together: bool) -> None:
    sink, reader = begun()
    for piece in [whole + OK] if together else [whole, OK]:
        reader.feed(piece)
    assert (len(sink.heads), sink.whole, reader.reusable) == (1, 1, False)
    with pytest.raises(RuntimeError):
        reader.begin("POST")


class EagerSink(Sink):
    """Sends the next request as soon as a response is whole, if the connection allows."""

    reader: ResponseReader
    refused = False

    def response_received(self) -> None:
        try:
            self.reader.begin("POST")
        except RuntimeError:
            self.refused = True


@pytest.mark.parametrize(
    "whole", [OK, HEAD + CHUNKED + b"2\r\nhi\r\n0\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n"]
)
def test_an_injected_response_never_answers_the_next_request(whole: bytes) -> None:
    sink = EagerSink()
    sink.reader = ResponseReader(sink)
    sink.reader.begin("POST")
    sink.reader.feed(whole + OK)
    assert sink.refused
    assert len(sink.heads) == 1


def test_the_next_request_may_begin_from_the_end_of_the_last() -> None:
    sink = EagerSink()
    sink.reader = ResponseReader(sink)
    sink.reader.begin("POST")
    sink.reader.feed(OK)
    sink.reader.feed(HEAD + CHUNKED + b"0\r\n\r\n")
    assert (len(sink.heads), sink.refused) == (2, False)


def test_a_hundred_responses_on_one_connection() -> None:
    _sink, reader = begun("HEAD")
    for _ in range(100):
        reader.feed(HEAD + TWO + b"\r\n")
        assert reader.reusable
        reader.begin("HEAD")


# --- dead readers ---------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in ALL if case.code == "upstream_framing"], ids=by_name)
def test_nothing_is_passed_on_after_a_fault(case: ResponseCase) -> None:
    sink, reader = begun(case.method)
    with pytest.raises(HttpFault):
        reader.feed(case.raw)
    before = (len(sink.heads), sink.body, sink.whole)
    reader.feed(b"0\r\n\r\n" + OK)
    reader.eof()
    assert (len(sink.heads), sink.body, sink.whole) == before
    with pytest.raises(RuntimeError):
        reader.begin("POST")


class ClosingSink(Sink):
    """Gives the connection up at its n-th call."""

    reader: ResponseReader

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.log: list[str] = []

    def called(self, what: str) -> None:
        self.log.append(what)
        self.calls -= 1
        if not self.calls:
            self.reader.close()

    def head_received(self, head: ResponseHead) -> None:
        self.called("head")

    def body_received(self, data: bytes) -> None:
        self.called("body")

    def response_received(self) -> None:
        self.called("end")


@pytest.mark.parametrize(
    "raw",
    [
        OK,
        OK + b"excess",
        HEAD + CHUNKED + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        HEAD + b"\r\nhi",
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ],
)
def test_a_closed_reader_calls_nobody_from_that_moment(raw: bytes) -> None:
    def run(calls: int) -> list[str]:
        sink = ClosingSink(calls)
        sink.reader = ResponseReader(sink)
        sink.reader.begin("POST")
        sink.reader.feed(raw)
        sink.reader.eof()
        assert not sink.reader.reusable
        return sink.log

    full = run(0)
    assert full[-1] == "end"
    for calls in range(1, len(full) + 1):
        assert run(calls) == full[:calls]


class FailingSink(Sink):
    def body_received(self, data: bytes) -> None:
        raise ValueError("our own bug")


def test_what_a_sink_raises_comes_out_and_kills_the_reader() -> None:
    sink = FailingSink()
    reader = ResponseReader(sink)
    reader.begin("POST")
    with pytest.raises(ValueError, match="our own bug"):
        reader.feed(HEAD + CHUNKED + b"2\r\nhi\r\n")
    reader.feed(b"0\r\n\r\n")
    assert (sink.whole, reader.reusable) == (0, False)


# --- two parsers agree ----------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in ALL if not case.code], ids=by_name)
def test_llhttp_reads_the_same_fields(case: ResponseCase) -> None:
    head = case.raw[: case.raw.index(b"\r\n\r\n") + 4]
    section = head.index(b"\n") + 1
    fields, objection = tokenise(head, section, httptools.HttpResponseParser)
    assert objection is None
    assert fields == split_fields(head[section:-2])


def test_a_head_that_llhttp_alone_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def objecting(head: bytes, section: int, parser: object) -> tuple[list[tuple[bytes, bytes]], str]:
        return split_fields(head[section:-2]), "no"

    monkeypatch.setattr(response_reader, "tokenise", objecting)
    fault = read([OK]).fault
    assert fault == (502, "upstream_framing", "the response head of the backend is not well formed")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"timeout=5, max=100", 5.0),
        (b"max=1, timeout=60", 60.0),
        (b"max=100", None),
        (b"", None),
        (None, None),
    ],
)
def test_how_long_an_idle_connection_is_kept_is_told_by_keep_alive(value, seconds) -> None:
    assert keep_alive_timeout(value) == seconds
