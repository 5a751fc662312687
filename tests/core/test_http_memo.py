"""Heads that are remembered: the same verdict as without a memo, for every head, length and cut."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from corpus import (
    GET,
    HEAD,
    HOST,
    MORE_REQUESTS,
    MORE_RESPONSES,
    POST,
    REQUESTS,
    RESPONSES,
    RequestCase,
    ResponseCase,
    get,
    length,
    post,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.core.chunked import ChunkedDecoder
from llmgw.core.http import (
    DEFAULT_LIMITS,
    HeadLimits,
    HttpFault,
    RequestHead,
    ResponseHead,
    bad_response,
)
from llmgw.core.lines import MAX_BYTES, NO_CUT, HeadMemo, cut_head, most_bytes, whole_section
from llmgw.core.request_reader import RequestMemo, RequestReader
from llmgw.core.response_reader import ResponseMemo, ResponseReader

ALL_REQUESTS = REQUESTS + MORE_REQUESTS
ALL_RESPONSES = RESPONSES + MORE_RESPONSES


class Sink:
    """Keeps what a reader of either side calls."""

    def __init__(self) -> None:
        self.heads: list[RequestHead | ResponseHead] = []
        self.pieces: list[bytes] = []
        self.whole = 0

    def head_received(self, head: RequestHead | ResponseHead) -> None:
        self.heads.append(head)

    def body_received(self, data: bytes) -> None:
        assert data
        self.pieces.append(data)

    def request_received(self) -> None:
        self.whole += 1

    response_received = request_received


class Seen(NamedTuple):
    heads: list[RequestHead | ResponseHead]
    body: bytes
    whole: int
    fault: tuple[int, str, str] | None
    state: object


def requests(pieces: list[bytes], memo: RequestMemo | None, limits: HeadLimits = DEFAULT_LIMITS) -> Seen:
    sink = Sink()
    reader = RequestReader(sink, limits, memo)
    fault = None
    try:
        for piece in pieces:
            reader.feed(piece)
            while reader.state == "done":
                reader.resume()
    except HttpFault as error:
        fault = (error.status, error.code, error.message)
    return Seen(sink.heads, b"".join(sink.pieces), sink.whole, fault, (reader.state, reader.buffered))


def response(
    pieces: list[bytes],
    memo: ResponseMemo | None,
    method: str = "POST",
    limits: HeadLimits = DEFAULT_LIMITS,
) -> Seen:
    sink = Sink()
    reader = ResponseReader(sink, limits, memo)
    reader.begin(method)
    fault, reusable = None, False
    try:
        for piece in pieces:
            reader.feed(piece)
        reusable = reader.reusable
        reader.eof()
    except HttpFault as error:
        fault = (error.status, error.code, error.message)
    return Seen(sink.heads, b"".join(sink.pieces), sink.whole, fault, reusable)


def by_name(case: object) -> str:
    return case.name if isinstance(case, RequestCase | ResponseCase) else str(case)


def split(raw: bytes, cuts: set[int]) -> list[bytes]:
    places = sorted(cut for cut in cuts if cut < len(raw))
    return [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True)]


def answer(length_digits: bytes, content: bytes = b"", fields: bytes = b"") -> bytes:
    return HEAD + fields + b"Content-Length: " + length_digits + b"\r\n\r\n" + content


# --- memo on = memo off ---------------------------------------------------------


@pytest.mark.parametrize("case", ALL_REQUESTS, ids=by_name)
def test_a_request_seen_before_gets_the_same_verdict(case: RequestCase) -> None:
    memo = RequestMemo()
    for _ in range(4):
        assert requests([case.raw], memo) == requests([case.raw], None)


@pytest.mark.parametrize("case", ALL_RESPONSES, ids=by_name)
def test_a_response_seen_before_gets_the_same_verdict(case: ResponseCase) -> None:
    memo = ResponseMemo()
    for _ in range(4):
        assert response([case.raw], memo, case.method) == response([case.raw], None, case.method)


def test_all_verdicts_stand_with_one_memo_for_the_whole_corpus() -> None:
    asked, answered = RequestMemo(), ResponseMemo()
    for _ in range(3):
        for case in ALL_REQUESTS:
            assert requests([case.raw], asked) == requests([case.raw], None), case.name
        for one in ALL_RESPONSES:
            assert response([one.raw], answered, one.method) == response([one.raw], None, one.method), (
                one.name
            )


# Made so that heads with one cut, or nearly one, come often: few names, few values, the
# length in several spellings and places, and what looks like it where it is not.
_LENGTHS = st.one_of(
    st.sampled_from(
        [
            b"",
            b"0",
            b"00",
            b"1",
            b"5",
            b"05",
            b"5 ",
            b" 5",
            b"5\t",
            b"+5",
            b"-5",
            b"5,5",
            b"5_0",
            b"0x5",
        ]
    ),
    st.sampled_from([b"9" * 15, b"0" * 14 + b"5", b"9" * 16, b"0" * 16 + b"5", b"\xb2", b"5\r\n 5"]),
    st.integers(0, 40).map(lambda n: b"%d" % n),
)
_LENGTH_NAMES = st.sampled_from(
    [
        b"Content-Length: ",
        b"Content-Length: ",
        b"content-length: ",
        b"CONTENT-LENGTH: ",
        b"Content-Length:",
    ]
)
_FIELDS = st.one_of(
    st.builds(lambda name, digits: name + digits, _LENGTH_NAMES, _LENGTHS),
    st.builds(lambda name, digits: b"X-A: " + name + digits, _LENGTH_NAMES, _LENGTHS),
    st.builds(lambda name, digits: b"X-" + name + digits, _LENGTH_NAMES, _LENGTHS),
    st.sampled_from(
        [
            b"X-A: b",
            b"X-A: ",
            b"X-A: b ",
            b"x_a: b",
            b"Content_Length: 5",
            b"Accept: a",
            b"Accept: b",
            b"Expect: 100-continue",
            b"Connection: close",
            b"Connection: content-length",
            b"Connection: x-a, keep-alive",
            b"Transfer-Encoding: chunked",
            b"Upgrade: websocket",
            b"Set-Cookie: a",
            b" folded",
            b"X-A\x0b: 1",
        ]
    ),
)
_LINES = st.lists(_FIELDS, max_size=4).map(lambda fields: b"".join(field + b"\r\n" for field in fields))
_REQUEST_LINES = st.sampled_from(
    [
        POST,
        POST,
        GET,
        b"POST /v1 HTTP/1.0\r\n",
        b"HEAD / HTTP/1.1\r\n",
        b"\r\n" + POST,
        b"PUT / HTTP/1.1\r\n",
    ]
)
_STATUS_LINES = st.sampled_from(
    [
        HEAD,
        HEAD,
        b"HTTP/1.0 200 OK\r\n",
        b"HTTP/1.1 204 N\r\n",
        b"HTTP/1.1 304\r\n",
        b"HTTP/1.1 103 E\r\n",
    ]
)
_CONTENT = st.sampled_from([b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"x" * 45])


def variations(raw: bytes, digits: bytes) -> list[bytes]:
    """The same bytes with other digits in the place of these, wherever they stand."""
    return [raw, raw.replace(digits, b"7"), raw.replace(digits, b"12"), raw.replace(digits, b"")]


@given(
    st.lists(st.tuples(_REQUEST_LINES, _LINES, _LINES, _CONTENT), min_size=1, max_size=4),
    st.sampled_from([b"5", b"1", b"0", b"9"]),
    st.sets(st.integers(1, 120), max_size=3),
    st.sampled_from(
        [
            DEFAULT_LIMITS,
            HeadLimits(header_line=90, count=3),
            HeadLimits(headers=100, request_line=20),
        ]
    ),
)
@settings(max_examples=400)
def test_random_requests_read_the_same_with_and_without_memo(
    parts: list[tuple[bytes, bytes, bytes, bytes]],
    digits: bytes,
    cuts: set[int],
    limits: HeadLimits,
) -> None:
    memo = RequestMemo(limits)
    for _ in range(3):
        for line, before, after, content in parts:
            for raw in variations(line + before + HOST + after + b"\r\n" + content, digits):
                plain = requests([raw], None, limits)
                assert requests([raw], memo, limits) == plain
                assert requests(split(raw, cuts), memo, limits) == plain


@given(
    st.lists(st.tuples(_STATUS_LINES, _LINES, _CONTENT), min_size=1, max_size=4),
    st.sampled_from([b"5", b"1", b"0", b"9"]),
    st.sampled_from(["POST", "HEAD"]),
    st.sets(st.integers(1, 120), max_size=3),
    st.sampled_from([DEFAULT_LIMITS, HeadLimits(headers=90), HeadLimits(count=2)]),
)
@settings(max_examples=400)
def test_random_responses_read_the_same_with_and_without_memo(
    parts: list[tuple[bytes, bytes, bytes]],
    digits: bytes,
    method: str,
    cuts: set[int],
    limits: HeadLimits,
) -> None:
    memo = ResponseMemo(limits)
    for _ in range(3):
        for line, fields, content in parts:
            for raw in variations(line + fields + b"\r\n" + content, digits):
                plain = response([raw], None, method, limits)
                assert response([raw], memo, method, limits) == plain
                assert response(split(raw, cuts), memo, method, limits) == plain


@given(st.lists(st.integers(0, 60), min_size=3, max_size=12), st.booleans())
@settings(max_examples=100)
def test_one_connection_with_changing_lengths(sizes: list[int], chunked_between: bool) -> None:
    stream = []
    for size in sizes:
        stream.append(length(b"%d" % size, b"x" * size))
        if chunked_between:
            stream.append(post(b"Transfer-Encoding: chunked\r\n", b"2\r\nhi\r\n0\r\n\r\n"))
    memo = RequestMemo()
    plain = requests(stream, None)
    assert plain.fault is None
    assert requests(stream, memo) == plain
    assert requests([b"".join(stream)], memo) == plain
    assert [head.content_length for head in requests(stream, memo).heads if not head.chunked] == sizes


# --- the cut --------------------------------------------------------------------


def test_heads_with_one_cut_differ_in_the_digits_alone() -> None:
    before, after = POST + HOST + b"Content-Length: ", b"\r\nX-A: b\r\n\r\n"
    for digits in (b"1", b"17", b"00017", b"9" * 15):
        raw = before + digits + after
        found = cut_head(raw + b"rest", MAX_BYTES, NO_CUT)
        assert found == ((before, after), len(raw), digits, int(digits))
        assert cut_head(raw + b"rest", MAX_BYTES, (before, after)) == found


@pytest.mark.parametrize("digits", [b"0", b"000"])
def test_a_zero_is_not_cut(digits: bytes) -> None:
    raw = length(digits, b"")
    assert cut_head(raw, MAX_BYTES, NO_CUT) == ((raw, b""), len(raw), b"", 0)
    last = (POST + HOST + b"Content-Length: ", b"\r\n\r\n")
    assert cut_head(raw, MAX_BYTES, last) == ((raw, b""), len(raw), b"", 0)


@pytest.mark.parametrize(
    "digits", [b"", b" ", b" 5", b"5 ", b"+5", b"5_0", b"5,5", b"\xb2", b"1" * 16, b"5\n"]
)
def test_a_length_that_is_not_plain_is_not_looked_up(digits: bytes) -> None:
    raw = length(digits, b"")
    last = (POST + HOST + b"Content-Length: ", b"\r\n\r\n")
    assert cut_head(raw, MAX_BYTES, NO_CUT) is None
    assert cut_head(raw, MAX_BYTES, last) is None


@given(
    st.lists(st.tuples(_REQUEST_LINES, _LINES), min_size=2, max_size=5),
    st.sampled_from([60, 100, MAX_BYTES]),
)
@settings(max_examples=300)
def test_the_cut_does_not_depend_on_the_head_before(parts: list[tuple[bytes, bytes]], most: int) -> None:
    last = NO_CUT
    for line, fields in parts:
        for raw in variations(line + HOST + fields + b"\r\nrest", b"5"):
            found = cut_head(raw, most, NO_CUT)
            assert cut_head(raw, most, last) == found
            if found is not None:
                last, end, digits, value = found
                before, after = last
                assert before + digits + after == raw[:end]
                assert end <= most
                assert bool(digits) == bool(after) == bool(value)


def test_longer_digits_do_not_lift_a_limit() -> None:
    short = post(b"Content-Length: 5\r\n", b"hello")
    limits = HeadLimits(headers=len(short) - 5 - len(POST) - 2)
    memo = RequestMemo(limits)
    for _ in range(3):
        assert requests([short], memo, limits).fault is None
        long = post(b"Content-Length: 0000005\r\n", b"hello")
        assert requests([long], memo, limits) == requests([long], None, limits)
        assert requests([long], memo, limits).fault is not None


def test_a_size_limit_holds_for_what_is_looked_up() -> None:
    assert most_bytes(DEFAULT_LIMITS) == MAX_BYTES
    assert most_bytes(HeadLimits(header_line=40)) == 40
    assert most_bytes(HeadLimits(headers=50)) == 50
    raw = get()
    assert cut_head(raw, len(raw), NO_CUT) is not None
    assert cut_head(raw, len(raw) - 1, NO_CUT) is None


def test_a_section_of_too_many_lines_is_left_to_the_reading_by_line() -> None:
    raw = get(b"A: b\r\n")
    assert whole_section(raw, len(GET), len(raw), 2)
    assert not whole_section(raw, len(GET), len(raw), 1)
    assert not whole_section(b"GET\r\nA b\r\n\r\n", 5, 12, 9)


# --- what is kept ---------------------------------------------------------------


def test_a_head_is_kept_when_it_comes_a_second_time() -> None:
    memo: HeadMemo[str] = HeadMemo(most_heads=4)
    memo.keep((b"a", b""), "a")
    assert memo.find((b"a", b"")) is None
    memo.keep((b"a", b""), "a")
    assert memo.find((b"a", b"")) == "a"


def test_a_full_memo_is_emptied_and_fills_again() -> None:
    memo: HeadMemo[int] = HeadMemo(most_heads=4)
    for n in range(200):
        for _ in range(2):
            memo.keep((b"%d" % n, b""), n)
        assert memo.find((b"%d" % n, b"")) == n
        assert sum(memo.find((b"%d" % m, b"")) is not None for m in range(200)) <= 4


def test_heads_that_come_once_push_nothing_out() -> None:
    memo: HeadMemo[int] = HeadMemo(most_heads=4)
    for _ in range(2):
        memo.keep((b"often", b""), -1)
    for n in range(1000):
        memo.keep((b"%d" % n, b""), n)
    assert memo.find((b"often", b"")) == -1


def test_a_head_that_faults_is_not_kept() -> None:
    memo = RequestMemo()
    raw = post(b"Content-Length: 5\r\nExpect: x\r\n", b"hello")
    for _ in range(4):
        assert requests([raw], memo).fault is not None
    found = cut_head(raw, MAX_BYTES, NO_CUT)
    assert found is not None
    assert memo.find(found[0]) is None


@pytest.mark.parametrize("fields", [b"Content-Length: 5\r\nConnection: content-length\r\n"])
def test_a_head_whose_length_is_nominated_away_is_not_kept(fields: bytes) -> None:
    asked, answered = RequestMemo(), ResponseMemo()
    for _ in range(4):
        assert b"content-length" not in requests([post(fields, b"hello")], asked).heads[0].headers
        (head,) = response([HEAD + fields + b"\r\nhello"], answered).heads
        assert isinstance(head, ResponseHead)
        assert (head.get(b"content-length"), head.content_length) == (None, 5)


def test_a_memo_serves_readers_of_its_own_limits() -> None:
    limits = HeadLimits(count=3)
    RequestReader(Sink(), limits, RequestMemo(HeadLimits(count=3)))
    ResponseReader(Sink(), limits, ResponseMemo(HeadLimits(count=3)))
    with pytest.raises(ValueError, match="limits"):
        RequestReader(Sink(), limits, RequestMemo())
    with pytest.raises(ValueError, match="limits"):
        ResponseReader(Sink(), limits, ResponseMemo())


# --- what is shared -------------------------------------------------------------


@pytest.mark.parametrize("name", [b"Content-Length", b"content-length"])
def test_the_cache_of_a_request_head_is_common_and_its_length_is_not(name: bytes) -> None:
    memo = RequestMemo()

    def ask(size: int) -> RequestHead:
        raw = post(b"%b: %d\r\nX-A: b\r\n" % (name, size), b"x" * size)
        (head,) = requests([raw], memo).heads
        assert isinstance(head, RequestHead)
        return head

    heads = [ask(size) for size in (3, 4, 5, 6)]
    heads[1].cache["who"] = "me"
    assert [head.cache for head in heads] == [{}, {"who": "me"}, {"who": "me"}, {"who": "me"}]
    assert [head.content_length for head in heads] == [3, 4, 5, 6]
    assert heads[1].headers is heads[3].headers
    assert list(heads[0].headers) == list(heads[3].headers)


def test_the_cache_of_a_response_head_is_common_and_its_length_is_not() -> None:
    memo = ResponseMemo()

    def ask(size: int) -> ResponseHead:
        raw = answer(b"%d" % size, b"x" * size, b"X-A: b\r\n")
        (head,) = response([raw], memo).heads
        assert isinstance(head, ResponseHead)
        return head

    heads = [ask(size) for size in (3, 4, 5, 6)]
    heads[1].cache["passed"] = 1
    assert [head.cache for head in heads] == [{}, {"passed": 1}, {"passed": 1}, {"passed": 1}]
    assert [head.content_length for head in heads] == [3, 4, 5, 6]
    assert [head.get(b"content-length") for head in heads] == [b"3", b"4", b"5", b"6"]


def test_a_head_without_length_is_shared_whole() -> None:
    memo = ResponseMemo()
    raw = HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    heads = [response([raw], memo).heads[0] for _ in range(4)]
    assert heads[1] is heads[2] is heads[3]
    with pytest.raises(AttributeError):
        heads[1].keep_alive = False  # type: ignore[misc]


def test_heads_of_other_bytes_share_nothing() -> None:
    memo = RequestMemo()
    first, second = get(b"Authorization: Bearer a\r\n"), get(b"Authorization: Bearer b\r\n")
    for _ in range(3):
        requests([first], memo).heads[0].cache["who"] = "a"
        assert requests([second], memo).heads[0].cache == {}


# --- a read that is one chunk ----------------------------------------------------


@pytest.mark.parametrize("size", [1, 15, 16, 255, 256, 2047, 2048, 4095, 4096])
@pytest.mark.parametrize("limits", [DEFAULT_LIMITS, HeadLimits(chunk_line=2)])
def test_a_read_of_one_chunk_is_decoded_as_it_is_byte_by_byte(size: int, limits: HeadLimits) -> None:
    content = b"%d" % size * size
    content = content[:size]

    def decode(pieces: list[bytes]) -> tuple[bytes, str | None]:
        out: list[bytes] = []
        decoder = ChunkedDecoder(out.append, limits, bad_response)
        try:
            for piece in pieces:
                assert decoder.feed(piece) == -1
        except HttpFault as fault:
            return b"".join(out), fault.message
        return b"".join(out), None

    good = b"%x\r\n%b\r\n" % (size, content)
    for raw in (
        good,
        good[:-1] + b"X",
        b"%x\r\n%bX\r\n" % (size, content),
        b"%X\r\n%b\r\n" % (size, content),
    ):
        assert decode([raw]) == decode([raw[n : n + 1] for n in range(len(raw))])
    assert decode([good, good])[0] in (content * 2, b"")


def test_a_trailer_that_looks_like_a_chunk_is_no_content() -> None:
    out: list[bytes] = []
    decoder = ChunkedDecoder(out.append, DEFAULT_LIMITS, bad_response)
    assert decoder.feed(b"0\r\nX: y\r\n") == -1
    with pytest.raises(HttpFault):
        decoder.feed(b"1\r\na\r\n")
    assert out == []
