"""The request side of strict HTTP/1.1: verdicts, cuts, limits, pipelining."""

from __future__ import annotations

from typing import NamedTuple

import httptools
import pytest
from corpus import (
    GET,
    HOST,
    MORE_REQUESTS,
    POST,
    REQUESTS,
    STRICTER,
    RequestCase,
    chunks,
    get,
    length,
    path,
    post,
)
from corpus_attacks import ATTACKS
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.core import request_reader
from llmgw.core.chunked import ChunkedDecoder
from llmgw.core.http import DEFAULT_LIMITS, HeadLimits, HttpFault, RequestHead, bad_request
from llmgw.core.lines import split_fields, tokenise
from llmgw.core.request_reader import RequestReader

ALL = REQUESTS + MORE_REQUESTS + ATTACKS


class Sink:
    """Keeps what a reader calls; content of one request joined."""

    def __init__(self) -> None:
        self.heads: list[RequestHead] = []
        self.bodies: list[bytes] = []
        self.pieces: list[bytes] = []
        self.whole = 0

    def head_received(self, head: RequestHead) -> None:
        self.heads.append(head)
        self.bodies.append(b"")

    def body_received(self, data: bytes) -> None:
        assert data
        self.bodies[-1] += data
        self.pieces.append(data)

    def request_received(self) -> None:
        self.whole += 1


class Seen(NamedTuple):
    """All that can be observed from outside."""

    heads: list[RequestHead]
    bodies: list[bytes]
    whole: int
    fault: tuple[int, str, str] | None
    state: str
    buffered: int


def read(pieces: list[bytes], limits: HeadLimits = DEFAULT_LIMITS) -> Seen:
    sink = Sink()
    reader = RequestReader(sink, limits)
    fault = None
    try:
        for piece in pieces:
            reader.feed(piece)
            while reader.state == "done":
                reader.resume()
    except HttpFault as error:
        fault = (error.status, error.code, error.message)
    return Seen(sink.heads, sink.bodies, sink.whole, fault, reader.state, reader.buffered)


def one_by_one(raw: bytes) -> list[bytes]:
    return [raw[n : n + 1] for n in range(len(raw))]


def cut_points(raw: bytes, most: int = 700) -> range:
    return range(1, len(raw), max(1, len(raw) // most))


def only_head(raw: bytes) -> RequestHead:
    seen = read([raw])
    assert seen.fault is None
    (head,) = seen.heads
    return head


def by_name(case: object) -> str:
    return case.name if isinstance(case, RequestCase) else str(case)


# --- verdicts -------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL, ids=by_name)
def test_verdict(case: RequestCase) -> None:
    seen = read([case.raw])
    assert (seen.fault[0] if seen.fault else 0) == case.status
    assert seen.whole == len(case.bodies)
    assert tuple(seen.bodies[: seen.whole]) == case.bodies
    if not case.status:
        assert seen.state == "idle"
        assert seen.buffered == 0


@pytest.mark.parametrize("case", ALL, ids=by_name)
def test_the_verdict_is_the_wanted_one(case: RequestCase) -> None:
    if case.want == "R":
        assert case.status
    elif case.want == "A":
        assert bool(case.status) == (case.name in STRICTER)


@pytest.mark.parametrize("case", ALL, ids=by_name)
def test_the_verdict_is_the_same_byte_by_byte(case: RequestCase) -> None:
    assert read(one_by_one(case.raw)) == read([case.raw])


@pytest.mark.parametrize("case", ALL, ids=by_name)
def test_the_verdict_is_the_same_for_every_cut_in_two(case: RequestCase) -> None:
    whole = read([case.raw])
    for at in cut_points(case.raw):
        assert read([case.raw[:at], case.raw[at:]]) == whole, at


@pytest.mark.parametrize("case", ALL, ids=by_name)
def test_the_verdict_is_the_same_line_by_line(case: RequestCase) -> None:
    assert read(case.raw.splitlines(keepends=True)) == read([case.raw])


def test_the_corpus_keeps_its_size() -> None:
    names = [case.name for case in ALL]
    assert len(set(names)) == len(names) >= 250
    assert (len(REQUESTS), sum(case.want == "R" for case in REQUESTS)) == (109, 80)


@given(data=st.data())
@settings(max_examples=300)
def test_any_cutting_gives_the_same_events(data: st.DataObject) -> None:
    stream = b"".join(
        case.raw for case in data.draw(st.lists(st.sampled_from(SHORT), min_size=1, max_size=4))
    )
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(pieces) == read([stream])


SHORT = [case for case in ALL if len(case.raw) < 400]


@given(data=st.data())
@settings(max_examples=300)
def test_damaged_bytes_give_the_same_events_for_any_cutting(data: st.DataObject) -> None:
    stream = bytearray(data.draw(st.sampled_from(SHORT)).raw)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(stream) - 1))
        stream[at : at + data.draw(st.integers(0, 1))] = data.draw(
            st.sampled_from(
                [b"\r", b"\n", b"\r\n", b"\0", b" ", b":", b",", b"\t", b"0", b"chunked", b"\xff"]
            )
        )
    raw = bytes(stream)
    seen = read([raw])
    assert read(one_by_one(raw)) == seen
    if seen.fault is not None:
        assert 400 <= seen.fault[0] <= 505


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_arbitrary_bytes_never_crash(raw: bytes) -> None:
    read([raw])
    read([chunks(raw)])


# --- what a head says -----------------------------------------------------------


def test_a_head_keeps_path_and_query_as_sent() -> None:
    head = only_head(path(b"/v1/models/a%20b?a=b%20c&a=2&e=&m=%2F??"))
    assert (head.method, head.path, head.query) == ("GET", "/v1/models/a%20b", "a=b%20c&a=2&e=&m=%2F??")
    assert (head.version, head.content_length, head.chunked) == (11, None, False)


@pytest.mark.parametrize("name", [b"org%2Fmodel", b"org%2fmodel%3Aq4", b"org/model"])
def test_a_models_name_may_hold_a_slash(name: bytes) -> None:
    assert only_head(path(b"/v1/models/" + name)).path == "/v1/models/" + name.decode()


@pytest.mark.parametrize("name", [b"..%2Fa", b"a%2f..%2Fb", b"a%2F%2e%2E", b"a%5Cb", b"a%00", b"a%2"])
def test_but_no_way_out_of_the_names(name: bytes) -> None:
    fault = read([path(b"/v1/models/" + name)]).fault
    assert fault is not None
    assert fault[0] == 400


def test_absolute_form_leaves_its_path_and_query() -> None:
    head = only_head(path(b"http://gw.example/v1/models?a=http://x/"))
    assert (head.path, head.query) == ("/v1/models", "a=http://x/")
    assert (only_head(path(b"http://gw.example?a")).path, only_head(path(b"http://gw.example?a")).query) == (
        "/",
        "a",
    )


def test_header_names_are_lowered_and_values_trimmed() -> None:
    head = only_head(get(b"X-A: \t b c \t \r\nX-B:d\r\nX-E:\r\n"))
    assert head.headers == {b"host": b"gw.example", b"x-a": b"b c", b"x-b": b"d", b"x-e": b""}


def test_repeated_list_headers_are_joined() -> None:
    assert only_head(get(b"Accept: a/b\r\nX: 1\r\nACCEPT: c/d\r\n")).headers[b"accept"] == b"a/b, c/d"


def test_names_with_underscore_are_dropped() -> None:
    head = only_head(post(b"Content_Length: 5\r\nX_API-Key: k\r\nX-Ok: 1\r\n"))
    assert head.content_length is None
    assert sorted(head.headers) == [b"host", b"x-ok"]


def test_headers_nominated_by_connection_are_dropped() -> None:
    head = only_head(
        get(b"Connection: X-Secret, close\r\nX-Secret: 1\r\nX-Other: 2\r\nConnection: X-other\r\n")
    )
    assert b"x-one" not in head.headers
    assert b"x-two" not in head.headers
    assert not head.keep_alive


@pytest.mark.parametrize(
    ("version", "fields", "kept"),
    [
        (b"1", b"", True),
        (b"1", b"Connection: keep-alive\r\n", True),
        (b"1", b"Connection: close\r\n", False),
        (b"1", b"Connection: Keep-Alive,CLOSE\r\n", False),
        (b"1", b"Connection: keep-alive\r\nConnection: close\r\n", False),
        (b"1", b"Connection: closed\r\n", True),
        (b"1", b"Connection:\r\n", True),
        (b"0", b"", False),
        (b"0", b"Connection: Keep-Alive\r\n", True),
        (b"0", b"Connection: x, keep-alive\r\n", True),
        (b"0", b"Connection: keep-alive, close\r\n", False),
    ],
)
def test_keep_alive_follows_version_and_connection_list(version: bytes, fields: bytes, kept: bool) -> None:
    head = only_head(b"GET / HTTP/1.%b\r\n" % version + HOST + fields + b"\r\n")
    assert head.keep_alive is kept
    assert head.version == 10 + int(version)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (post(b"Expect: 100-continue\r\nContent-Length: 5\r\n"), True),
        (post(b"Expect: 100-Continue\r\nTransfer-Encoding: chunked\r\n"), True),
        (post(b"Expect: 100-continue\r\nContent-Length: 0\r\n"), False),
        (post(b"Content-Length: 5\r\n"), False),
        (b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n", False),
    ],
)
def test_expect_continue_only_where_there_is_content_to_wait_for(raw: bytes, expected: bool) -> None:
    assert only_head(raw).expect_continue is expected


def test_the_head_comes_before_any_content() -> None:
    sink = Sink()
    reader = RequestReader(sink)
    reader.feed(post(b"Expect: 100-continue\r\nContent-Length: 1200\r\n"))
    assert (len(sink.heads), sink.bodies, sink.whole, reader.state) == (1, [b""], 0, "body")
    assert sink.heads[0].content_length == 1200


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (GET + b"X A: 1\r\n", "invalid_request"),
        (b"GET / HTTP/3.0\r\n", "http_version"),
        (b"PUT / HTTP/1.1\r\n", "method_not_allowed"),
        (post(b"Transfer-Encoding: br\r\n"), "unknown_transfer_coding"),
        (post(b"Expect: x\r\n"), "expectation_failed"),
        (b"GET /" + b"a" * 5000, "uri_too_long"),
        (GET + b"A: " + b"a" * 9000, "headers_too_large"),
    ],
)
def test_faults_have_codes_and_hold_nothing_of_the_peer(raw: bytes, code: str) -> None:
    fault = read([raw]).fault
    assert fault is not None
    assert fault[1] == code
    assert "aaa" not in fault[2]


# --- refusing early -------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "bad"),
    [
        (b"", b"\n"),
        (b"", b"\x16"),
        (b"GET /v1", b"\n"),
        (b"GET /v1", b"\xff"),
        (b"GET /v1 HTTP/1.1\r", b"X"),
        (b"GET /v1#x HTTP/1.1\r", b"\n"),
        (b"GET /v1 HTTP/1.1\r\nHost: a", b"\n"),
        (b"GET /v1 HTTP/1.1\r\nHost: a\r", b"\r"),
        (b"GET /v1 HTTP/1.1\r\nHost: a\r\n folded\r", b"\n"),
        (b"GET /v1 HTTP/1.1\r\nHo", b"\0"),
        (b"\r\n\r\n\r\n\r\n\r", b"\n"),
        (chunks(b"5"), b"\n"),
        (chunks(b"5\r\nhello"), b"X"),
        (chunks(b"5\r\nhello\r"), b"X"),
        (chunks(b""), b"g"),
        (chunks(b"0\r\nX: "), b"\n"),
    ],
)
def test_garbage_is_refused_at_its_first_byte(start: bytes, bad: bytes) -> None:
    assert read([start]).fault is None
    fault = read([start, bad]).fault
    assert fault is not None
    assert fault[0] == 400


def test_an_endless_request_line_is_refused_at_the_limit() -> None:
    assert read([b"GET /" + b"a" * 4091]).fault is None
    assert read([b"GET /" + b"a" * 4092]).fault == (414, "uri_too_long", "request line too long")


def test_an_endless_header_is_refused_at_the_limit() -> None:
    assert read([GET + b"X: " + b"a" * 8189]).fault is None
    assert read([GET + b"X: " + b"a" * 8190]).fault == (431, "headers_too_large", "header line too long")


def test_endless_headers_are_refused_at_the_limit() -> None:
    lines = (b"X: " + b"a" * 8187 + b"\r\n") * 4
    assert len(lines) == 32768
    assert read([GET + lines]).fault is None
    assert read([GET + lines + b"X"]).fault == (431, "headers_too_large", "header section too long")


def test_limits_can_be_set() -> None:
    limits = HeadLimits(
        request_line=60, header_line=40, headers=80, count=4, chunk_line=8, chunk_extensions=9, trailers=10
    )
    assert read([length(b"5")], limits).fault is None
    assert read([path(b"/" + b"a" * 50)], limits).fault[0] == 414
    assert read([get(b"X: " + b"a" * 40 + b"\r\n")], limits).fault[0] == 431
    assert read([get((b"X: " + b"a" * 30 + b"\r\n") * 2)], limits).fault[0] == 431
    assert read([get(b"X: a\r\n" * 4)], limits).fault[0] == 431
    assert read([chunks(b"5;aaaaaaa\r\nhello")], limits).fault[0] == 400
    assert read([chunks(b"1;aaaa\r\nh\r\n1;aaaa\r\ni\r\n")], limits).fault[0] == 400
    assert read([chunks(b"0\r\nX: aaaaaaaa\r\n\r\n")], limits).fault[0] == 400
    assert read([chunks(b"000000005\r\nhello")], limits).fault[0] == 400


def test_trailers_without_end_take_bounded_memory() -> None:
    sink = Sink()
    reader = RequestReader(sink)
    reader.feed(chunks(b"0\r\n"))
    held = 0
    with pytest.raises(HttpFault) as caught:
        while held < 10_000_000:
            reader.feed(b"X-Trailer: aaaaaaaaaa\r\n")
            held += 23
    assert caught.value.status == 400
    assert held < 4096


def test_a_chunk_extension_without_end_takes_bounded_memory() -> None:
    reader = RequestReader(Sink())
    reader.feed(chunks(b"5;"))
    with pytest.raises(HttpFault) as caught:
        for _ in range(300):
            reader.feed(b"a")
    assert caught.value.status == 400


# --- content --------------------------------------------------------------------


def test_a_read_that_is_all_content_is_passed_as_the_same_object() -> None:
    sink = Sink()
    reader = RequestReader(sink)
    reader.feed(post(b"Content-Length: 8\r\n"))
    first, last = b"four", b"more"
    reader.feed(first)
    reader.feed(last)
    assert sink.pieces[0] is first
    assert sink.pieces[1] is last
    assert sink.whole == 1


def test_a_read_inside_a_chunk_is_passed_as_the_same_object() -> None:
    sink = Sink()
    reader = RequestReader(sink)
    reader.feed(chunks(b"8\r\n"))
    first, last = b"four", b"more"
    reader.feed(first)
    reader.feed(last)
    assert sink.pieces[0] is first
    assert sink.pieces[1] is last
    assert sink.whole == 0
    reader.feed(b"\r\n0\r\n\r\n")
    assert sink.whole == 1


def test_a_whole_chunk_is_passed_before_the_next_begins() -> None:
    sink = Sink()
    RequestReader(sink).feed(chunks(b"5\r\nhello\r\n5\r\nworld\r\n"))
    assert sink.pieces == [b"hello", b"world"]
    assert sink.whole == 0


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
@settings(max_examples=200)
def test_chunks_come_out_as_they_went_in(contents: list[bytes], data: st.DataObject) -> None:
    raw = chunks(b"".join(b"%x;e\r\n%b\r\n" % (len(content), content) for content in contents) + b"0\r\n\r\n")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=12)))
    seen = read([raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)])
    assert (seen.bodies, seen.whole, seen.fault) == ([b"".join(contents)], 1, None)


def test_a_stopped_decoder_delivers_nothing_more() -> None:
    pieces: list[bytes] = []

    def deliver(piece: bytes) -> None:
        pieces.append(piece)
        decoder.stop()

    decoder = ChunkedDecoder(deliver, DEFAULT_LIMITS, bad_request)
    assert decoder.feed(b"1\r\na\r\n1\r\nb\r\n0\r\n\r\nrest") == 4
    assert pieces == [b"a"]


# --- states and pipelining ------------------------------------------------------


def test_states_of_a_request() -> None:
    reader = RequestReader(Sink())
    assert reader.state == "idle"
    reader.feed(b"")
    reader.feed(b"\r\n")
    assert reader.state == "idle"
    reader.feed(b"P")
    assert (reader.state, reader.buffered) == ("head", 1)
    reader.feed(length(b"5", b"he")[1:])
    assert (reader.state, reader.buffered) == ("body", 0)
    reader.feed(b"llo")
    assert reader.state == "done"
    reader.resume()
    assert reader.state == "idle"


HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"PROXY TCP4 203.0.113.7 10.0.0.1 1234 80\r\nGET / HTTP/1.1\r\n", "unexpected_proxy_header"),
        (b"PROXY UNKNOWN\r\n", "unexpected_proxy_header"),
        (SIGNATURE + b"\x21\x11\x00\x0c", "unexpected_proxy_header"),
        (SIGNATURE[:5], "unexpected_proxy_header"),
        (HELLO, "unexpected_tls"),
        (HELLO + b"\r\n", "unexpected_tls"),
        (b"\x16\x03\x01" + b"\x20" * 5000, "unexpected_tls"),
        (b"\x00\r\nQUIT\n", "invalid_request"),
        (b"\x00", "invalid_request"),
        (b"PROXY\r\n", "invalid_request"),
        (b"GARBAGE\r\n", "invalid_request"),
    ],
)
def test_who_took_this_listener_for_another_is_told_so(sent: bytes, code: str) -> None:
    for size in (1, len(sent)):
        reader = RequestReader(Sink())
        with pytest.raises(HttpFault) as caught:
            for start in range(0, len(sent), size):
                reader.feed(sent[start : start + size])
        assert (caught.value.status, caught.value.code) == (400, code)


def test_empty_lines_that_come_in_halves_leave_the_reader_idle() -> None:
    reader = RequestReader(Sink())
    for piece in (b"\r", b"\n", b"\r", b"\n"):
        reader.feed(piece)
    assert reader.state == "idle"


def test_nothing_is_parsed_before_the_answer() -> None:
    sink = Sink()
    reader = RequestReader(sink)
    reader.feed(length(b"5") + b"GARBAGE\n")
    reader.feed(b"more")
    assert (sink.whole, reader.state, reader.buffered) == (1, "done", 12)
    with pytest.raises(HttpFault) as caught:
        reader.resume()
    assert caught.value.status == 400


def test_pipelined_requests_come_one_per_resume() -> None:
    sink = Sink()
    reader = RequestReader(sink)
    reader.feed(length(b"5") + get() + chunks(b"2\r\nhi\r\n0\r\n\r\n") + b"GET /")
    for expected in ([b"hello"], [b"hello", b""], [b"hello", b"", b"hi"]):
        assert sink.bodies == expected
        assert reader.state == "done"
        reader.resume()
    assert (reader.state, reader.buffered) == ("head", 5)


class AnsweringSink(Sink):
    """Answers inside the callback, as the gateway does for ``/health``."""

    reader: RequestReader

    def request_received(self) -> None:
        super().request_received()
        self.reader.resume()


def test_a_thousand_requests_answered_at_once_do_not_nest() -> None:
    sink = AnsweringSink()
    sink.reader = RequestReader(sink)
    sink.reader.feed(get() * 3000)
    assert sink.whole == 3000
    assert sink.reader.state == "idle"


class FeedingSink(Sink):
    """Feeds more from inside a callback, as a transport that resumes reading at once may."""

    reader: RequestReader
    more = b""

    def body_received(self, data: bytes) -> None:
        super().body_received(data)
        more, self.more = self.more, b""
        self.reader.feed(more)


@pytest.mark.parametrize(
    ("first", "more", "bodies"),
    [
        (length(b"5", b"he"), b"llo" + get(), [b"hello", b""]),
        (length(b"5", b"hello"), get(), [b"hello", b""]),
        (length(b"5", b"hello") + get()[:9], get()[9:], [b"hello", b""]),
        (chunks(b"2\r\nhe\r\n3"), b"\r\nllo\r\n0\r\n\r\n" + get(), [b"hello", b""]),
    ],
)
def test_bytes_fed_from_inside_a_callback_come_after(first: bytes, more: bytes, bodies: list[bytes]) -> None:
    sink = FeedingSink()
    sink.more = more
    sink.reader = RequestReader(sink)
    sink.reader.feed(first)
    while sink.reader.state == "done":
        sink.reader.resume()
    assert sink.bodies == bodies


def test_resume_without_a_request_is_a_bug_of_the_caller() -> None:
    with pytest.raises(RuntimeError):
        RequestReader(Sink()).resume()


# --- dead readers ---------------------------------------------------------------


@pytest.mark.parametrize("tail", [get(), b"\r\n\r\n" + get(), b"0\r\n\r\n" + get()])
@pytest.mark.parametrize("case", [case for case in ALL if case.status], ids=by_name)
def test_nothing_is_parsed_after_a_fault(case: RequestCase, tail: bytes) -> None:
    sink = Sink()
    reader = RequestReader(sink)
    with pytest.raises(HttpFault):
        reader.feed(case.raw)
        reader.resume()
    before = (len(sink.heads), list(sink.bodies), sink.whole)
    reader.feed(tail)
    reader.resume()
    assert (len(sink.heads), sink.bodies, sink.whole) == before
    assert reader.buffered == 0


class ClosingSink(Sink):
    """Gives the connection up at its n-th call."""

    reader: RequestReader

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.log: list[str] = []

    def called(self, what: str) -> None:
        self.log.append(what)
        self.calls -= 1
        if not self.calls:
            self.reader.close()

    def head_received(self, head: RequestHead) -> None:
        self.called("head")

    def body_received(self, data: bytes) -> None:
        self.called("body")

    def request_received(self) -> None:
        self.called("end")
        self.reader.resume()


@pytest.mark.parametrize(
    "raw", [length(b"5"), length(b"5") + b"GET", chunks(b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n") + b"GET", get()]
)
def test_a_closed_reader_calls_nobody_from_that_moment(raw: bytes) -> None:
    full = ClosingSink(0)
    full.reader = RequestReader(full)
    full.reader.feed(raw)
    for calls in range(1, len(full.log) + 1):
        sink = ClosingSink(calls)
        sink.reader = RequestReader(sink)
        sink.reader.feed(raw)
        sink.reader.feed(get())
        assert sink.log == full.log[:calls]


class FailingSink(Sink):
    def body_received(self, data: bytes) -> None:
        raise HttpFault(413, "body_too_large", "too large")


@pytest.mark.parametrize("raw", [length(b"5"), chunks(b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n")])
def test_what_a_sink_raises_comes_out_and_kills_the_reader(raw: bytes) -> None:
    sink = FailingSink()
    reader = RequestReader(sink)
    with pytest.raises(HttpFault) as caught:
        reader.feed(raw)
    assert caught.value.status == 413
    reader.feed(get())
    assert len(sink.heads) == 1


# --- two parsers agree ----------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in ALL if not case.status], ids=by_name)
def test_llhttp_reads_the_same_fields(case: RequestCase) -> None:
    raw = case.raw.lstrip(b"\r\n")
    head = raw[: raw.index(b"\r\n\r\n") + 4]
    section = head.index(b"\n") + 1
    fields, objection = tokenise(head, section, httptools.HttpRequestParser)
    assert objection is None
    assert fields == split_fields(head[section:-2])


def test_a_head_that_llhttp_alone_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def objecting(head: bytes, section: int, parser: object) -> tuple[list[tuple[bytes, bytes]], str]:
        return split_fields(head[section:-2]), "no"

    monkeypatch.setattr(request_reader, "tokenise", objecting)
    assert read([get()]).fault == (400, "invalid_request", "the request head is not well formed")
    assert read([POST + b"\r\n"]).fault == (400, "invalid_request", "no Host header")
