"""Events are found whatever the cuts, and the stripper takes out one kind only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core.sse import EVENT_LIMIT, Event, EventSplitter, UsageStripper


def split(*parts: bytes, limit: int = EVENT_LIMIT, flush: bool = True) -> list[Event]:
    splitter = EventSplitter(limit)
    events = [event for part in parts for event in splitter.feed(part)]
    return events + splitter.flush() if flush else events


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b'data: {"a":1}\n\n', [(None, b'{"a":1}')]),
        (b"data:x\n\n", [(None, b"x")]),
        (b"data:  x\n\n", [(None, b" x")]),
        (b"data: a\ndata: b\n\n", [(None, b"a\nb")]),
        (b"data\n\n", [(None, b"")]),
        (b"data: a\n\ndata: b\n\n", [(None, b"a"), (None, b"b")]),
        (b"event: e\ndata: x\nid: 7\nretry: 9\n\n", [(b"e", b"x")]),
        (b"data: x\nevent: e\n\ndata: y\n\n", [(b"e", b"x"), (None, b"y")]),
        (b"event:\ndata: x\n\n", [(None, b"x")]),
        (b"event: e\n\n", []),
        (b": PROCESSING\n\n: PROCESSING\n\ndata: a\n\n", [(None, b"a")]),
        (b":\n\n", []),
        (b"\n\n\ndata: a\n\n\n\n", [(None, b"a")]),
        (b"data: a\r\n\r\ndata:b\r\n\r\n", [(None, b"a"), (None, b"b")]),
        (b"data: a\r\rdata:b\r\r", [(None, b"a"), (None, b"b")]),
        (b"data: a\n\r\ndata: b\r\n\n", [(None, b"a"), (None, b"b")]),
        (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", [(None, b"a")]),
        (b"\xef\xbb\xbfdata: a\r\n\r\n", [(None, b"a")]),
        (b'data: a\n\ndata: {"err":1}', [(None, b"a"), (None, b'{"err":1}')]),
        (b"data: a\n\ndata: b\n", [(None, b"a"), (None, b"b")]),
        (b"data: a\n\n: bye", [(None, b"a")]),
    ],
)
def test_events_follow_the_standard(stream: bytes, events: list[Event]) -> None:
    assert split(stream) == events
    assert split(*(stream[i : i + 1] for i in range(len(stream)))) == events


@given(
    st.lists(
        st.sampled_from(
            [
                b"data: ",
                b"data:",
                b"event: e",
                b"x",
                b"\n",
                b"\n\n",
                b"\r",
                b"\r\n",
                b":",
                b"\xef\xbb\xbf",
                b"y" * 30,
            ]
        ),
        max_size=40,
    ).map(b"".join),
    st.data(),
)
def test_any_chunking_gives_the_same_events(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parts = [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    whole, cut = EventSplitter(40), EventSplitter(40)
    expected = whole.feed(stream) + whole.flush()
    assert [event for part in parts for event in cut.feed(part)] + cut.flush() == expected
    assert cut.oversize == whole.oversize


@pytest.mark.parametrize("before", [b"\n", b"\n\n", b"\r", b"\r\n\r\n", b": x\n"])
def test_a_byte_order_mark_behind_the_first_byte_is_none(before: bytes) -> None:
    stream = before + b"\xef\xbb\xbfdata: a\n\ndata: b\n\n"
    for cut in range(len(stream) + 1):
        splitter = EventSplitter()
        assert splitter.feed(stream[:cut]) + splitter.feed(stream[cut:]) == [(None, b"b")]


def test_an_event_is_told_at_once_when_cr_ends_it() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\r") == []
    assert splitter.feed(b"\n\r") == [(None, b"a")]
    assert splitter.feed(b"\ndata:b\r\n\r\n") == [(None, b"b")]


def test_position_is_known_between_and_inside_events() -> None:
    splitter = EventSplitter()
    assert (splitter.in_event, splitter.at_line_start, splitter.idle) == (False, True, False)
    splitter.feed(b"data: a")
    assert (splitter.in_event, splitter.at_line_start, splitter.idle) == (True, False, False)
    splitter.feed(b"\n")
    assert (splitter.in_event, splitter.at_line_start, splitter.idle) == (True, True, False)
    splitter.feed(b"\n")
    assert (splitter.in_event, splitter.at_line_start, splitter.idle) == (False, True, True)
    splitter.feed(b"data: a\r")
    assert (splitter.in_event, splitter.at_line_start) == (True, False)
    splitter.feed(b"\n\r\n")
    assert (splitter.in_event, splitter.at_line_start, splitter.idle) == (False, True, True)
    splitter.feed(b"")
    assert not splitter.in_event


def test_a_comment_without_a_blank_line_is_still_open() -> None:
    splitter = EventSplitter()
    splitter.feed(b": ping\n")
    assert splitter.in_event
    assert splitter.at_line_start


def test_a_cr_then_a_blank_feed_still_swallows_the_lf() -> None:
    assert split(b"data: a\r", b"", b"\n\r", b"\n", b"data: b\n\n") == [(None, b"a"), (None, b"b")]


@pytest.mark.parametrize("size", [3, 10, 1 << 20])
def test_an_event_too_long_is_dropped_and_the_next_is_seen(size: int) -> None:
    stream = b"data: " + b"x" * 60 + b"\n\ndata: ok\n\n"
    splitter = EventSplitter(50)
    events = [e for i in range(0, len(stream), size) for e in splitter.feed(stream[i : i + size])]
    assert events == [(None, b"ok")]
    assert splitter.oversize == 1
    assert not splitter.in_event


def test_the_limit_itself_is_allowed() -> None:
    event = b"data: " + b"x" * 44
    assert split(event + b"\n", b"\n", limit=50) == [(None, b"x" * 44)]
    assert split(event + b"\n", b":\n\n", limit=50) == []


def test_memory_is_bounded_on_an_endless_line() -> None:
    splitter = EventSplitter()
    splitter.feed(b"data: a\n\ndata: ")
    for _ in range(48):
        assert splitter.feed(b"A" * 65536) == []
    assert len(splitter._pending) <= EVENT_LIMIT + 65536
    assert splitter.in_event
    assert splitter.oversize == 1
    assert splitter.flush() == []
    assert splitter.feed(b"data: b\n\n") == [(None, b"b")]


USAGE = b'data: {"choices":[],"object":"chat.completion.chunk","usage":{"prompt_tokens":1}}\n\n'
CONTENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


def strip(*parts: bytes) -> bytes:
    stripper = UsageStripper()
    return b"".join([stripper.feed(part) for part in parts] + [stripper.end()])


@pytest.mark.parametrize(
    "kept",
    [
        CONTENT,
        b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"usage":null}\n\n',
        b'data: {"choices":[],"usage":null}\n\n',
        b'data: {"choices":null,"usage":{"prompt_tokens":1}}\n\n',
        b'data: {"usage":{"prompt_tokens":1}}\n\n',
        b'data: {"choices":[{"text":"","finish_reason":"stop"}],"usage":{"prompt_tokens":1}}\n\n',
        b'data: {"choices":[],"prompt_filter_results":[]}\n\n',
        b'data: "usage" and more\n\n',
        b': "usage"\n\n',
        b'data: {"usage":' + b"[" * 100_000 + b"\n\n",
        b"data: [DONE]\n\n",
        b": ping\n\n",
        b"id: 7\r\nevent: e\r\ndata: x\r\n\r\n",
        b"data: cut in the mi",
    ],
)
def test_everything_but_the_usage_event_stays_byte_for_byte(kept: bytes) -> None:
    assert strip(kept) == kept
    assert strip(CONTENT + USAGE + kept) == CONTENT + kept
    small = len(kept) < 1000
    assert strip(*(kept[i : i + 1] for i in range(len(kept))) if small else [kept]) == kept


@pytest.mark.parametrize(
    "usage",
    [
        USAGE,
        USAGE.replace(b'"choices":[]', b'"choices": [ ]').replace(b"data: ", b"data:"),
        USAGE.replace(b"\n\n", b"\r\n\r\n"),
        USAGE.replace(b"\n\n", b"\r\r"),
        b"event: x\n" + USAGE,
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 7, 64, 1000])
def test_the_usage_event_goes_however_it_is_cut(usage: bytes, size: int) -> None:
    stream = CONTENT + usage + b"data: [DONE]\n\n"
    assert (
        strip(*(stream[i : i + size] for i in range(0, len(stream), size))) == CONTENT + b"data: [DONE]\n\n"
    )


def test_a_split_crlf_goes_with_its_event() -> None:
    usage = USAGE.replace(b"\n\n", b"\r\n\r\n")
    assert (
        strip(CONTENT + usage[:-1], usage[-1:] + b"data: [DONE]\r\n\r\n") == CONTENT + b"data: [DONE]\r\n\r\n"
    )
    assert strip(CONTENT + usage[:-1], b"", usage[-1:] + CONTENT) == CONTENT + CONTENT
    assert strip(USAGE.replace(b"\n\n", b"\r\r"), CONTENT) == CONTENT
    assert strip(USAGE.replace(b"\n\n", b"\r\r"), b"data: x", b"\n\n") == b"data: x\n\n"


def test_comments_inside_the_usage_event_stay() -> None:
    assert strip(b": ping\n" + USAGE + CONTENT) == b": ping\n" + CONTENT


def test_each_choices_usage_event_goes() -> None:
    assert (
        strip(CONTENT + USAGE + CONTENT + USAGE + b"data: [DONE]\n\n")
        == CONTENT + CONTENT + b"data: [DONE]\n\n"
    )


def test_a_last_usage_event_without_a_blank_line_goes() -> None:
    assert strip(CONTENT + USAGE[:-2]) == CONTENT
    assert strip(CONTENT + b": ping\n" + USAGE[:-2]) == CONTENT + b": ping\n"


def test_whole_events_pass_at_once_and_parts_wait() -> None:
    stripper = UsageStripper()
    assert stripper.feed(CONTENT) == CONTENT
    assert stripper.feed(CONTENT + b"data: x") == CONTENT
    assert stripper.feed(b"\n\n") == b"data: x\n\n"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_a_long_event_is_not_held(end: bytes) -> None:
    line = b"data: " + b"A" * (3 << 20)
    stripper = UsageStripper()
    held, out = 0, b""
    stream = line + end + CONTENT + USAGE + CONTENT
    fed = 0
    for i in range(0, len(stream), 50_000):
        part = stream[i : i + 50_000]
        fed += len(part)
        out += stripper.feed(part)
        held = max(held, fed - len(out))
    assert out + stripper.end() == line + end + CONTENT + CONTENT
    assert held < 200_000


def test_a_long_event_cut_off_is_passed_on() -> None:
    line = b"data: " + b"A" * 100_000
    assert strip(line) == line
    assert strip(line, b"x") == line + b"x"


def test_a_line_end_cut_in_two_before_a_stripped_event_stays_whole() -> None:
    assert strip(b"\r\n\r", b"\n" + USAGE) == b"\r\n\r\n"
    assert strip(b"\r\n\r", b"\n", CONTENT) == b"\r\n\r\n" + CONTENT
    assert strip(b"\r\n\r", b"", USAGE) == b"\r\n\r"


@given(
    st.lists(
        st.sampled_from(
            [CONTENT, USAGE, USAGE[:-2], b"\r\n\r\n", b"\r\r", b"\r", b"\n", b": c\n", b"data: x"]
        ),
        max_size=12,
    ).map(b"".join),
    st.data(),
)
def test_the_stripper_does_not_care_how_the_stream_is_cut(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parts = [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert strip(*parts) == strip(stream)
