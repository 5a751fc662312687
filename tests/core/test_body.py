"""What is read of a JSON body, what is refused, and what a change leaves alone."""

from __future__ import annotations

import json
import re
import sys
import tracemalloc
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.core import body as body_module
from llmgw.core import json_members, json_shape
from llmgw.core.body import Ask, BodyLimits, estimate_tokens, read_json
from llmgw.core.json_members import find_members, read_members
from llmgw.core.json_shape import Shape, check_shape, few_openers, shape_steps
from llmgw.core.splicing import REMOVE, asking_usage, clamp_output, splice
from llmgw.errors import InvalidRequest, ModelNotFound


@pytest.fixture
def small_windows(monkeypatch):
    """Every seam between windows is met within a few bytes."""
    monkeypatch.setattr(json_shape, "_WINDOW", 7)
    monkeypatch.setattr(json_shape, "_GAP", 5)


def refused(body: bytes, **options: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_json(body, **options)  # type: ignore[arg-type]
    assert caught.value.status == 400
    assert len(caught.value.message) < 300
    return caught.value


# --- what is read -------------------------------------------------------------


def test_a_chat_request_is_read():
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":7,"n":2,'
        b'"stream_options":{"include_usage":true},"session_id":"s1"}'
    )
    assert read_json(body) == Ask(
        model="m",
        stream=True,
        max_tokens=7,
        max_tokens_key="max_tokens",
        output_limits=(("max_tokens", 7),),
        include_usage=True,
        n=2,
        prompt_bytes=len(body),
        session="s1",
    )


def test_only_the_model_need_be_there():
    assert read_json(b' {\n"model" : "m" }\r\n') == Ask("m", prompt_bytes=20)


@pytest.mark.parametrize("name", ["a/b:c@d", "two words", "模型", "😀", "M", "a\\u0062"])
def test_model_names_are_taken_exactly(name):
    assert read_json(json.dumps({"model": name}).encode()).model == name
    assert read_json(json.dumps({"model": name}, ensure_ascii=False).encode()).model == name


@pytest.mark.parametrize("layout", [(",", ":"), (", ", ": "), (" ,", " :"), (",\n\n", ":")])
@pytest.mark.parametrize("size", [1, 40_000])
def test_any_layout_is_read(layout, size):
    body = json.dumps({"x": "x" * size, "model": "m", "stream": True, "y": [1, {}]}, separators=layout)
    assert read_json(body.encode()).stream is True


def test_escapes_in_keys_and_values_are_decoded():
    assert read_json(rb'{"mod\u0065l":"\u006d","\u0073tream":true}') == Ask("m", stream=True, prompt_bytes=42)


@pytest.mark.parametrize(
    ("value", "stream"),
    [("true", True), ("false", False), ('"true"', False), ("1", False), ("null", False), ('"tru', None)],
)
def test_only_json_true_is_streaming(value, stream):
    body = b'{"model":"m","stream":%b}' % value.encode()
    if stream is None:
        refused(body)
    else:
        assert read_json(body).stream is stream


@pytest.mark.parametrize(
    ("members", "key", "value"),
    [
        ('"max_tokens":5', "max_tokens", 5),
        ('"max_tokens":5,"max_completion_tokens":9', "max_completion_tokens", 9),
        ('"max_output_tokens":5', "max_output_tokens", 5),
        ('"n_predict":5', "n_predict", 5),
        ('"max_tokens":null,"n_predict":6', "n_predict", 6),
        ('"max_tokens":null', None, None),
        ('"n_predict":-1', "n_predict", None),
        ('"max_tokens":8.0', "max_tokens", 8),
        ('"max_tokens":1e3', "max_tokens", 1000),
        ('"max_tokens":0', "max_tokens", 0),
    ],
)
def test_the_first_output_limit_present_counts(members, key, value):
    ask = read_json(b'{"model":"m",%b}' % members.encode())
    assert (ask.max_tokens_key, ask.max_tokens) == (key, value)


@pytest.mark.parametrize("value", ['"5"', "5.5", "true", "[]", "{}", "1e999", "-1e999"])
@pytest.mark.parametrize("name", ["max_tokens", "n_predict", "n"])
def test_a_count_that_is_no_integer_is_refused(name, value):
    assert refused(b'{"model":"m","%b":%b}' % (name.encode(), value.encode())).param == name


@pytest.mark.parametrize(
    ("value", "wanted", "asking"),
    [
        ("{}", False, '{"include_usage":true}'),
        ('{"include_usage":true}', True, '{"include_usage":true}'),
        ('{"include_usage": false}', False, '{"include_usage":true}'),
        ('{"include_usage":1,"more":2}', False, '{"include_usage":true,"more":2}'),
        ('{"more":[1e999, 1.50]}', False, '{"more":[1e999, 1.50],"include_usage":true}'),
        ('{"continuous_usage_stats":true}', False, '{"include_usage":true}'),
        ("null", False, '{"include_usage":true}'),
        ("[]", False, '{"include_usage":true}'),
        ('"include_usage"', False, '{"include_usage":true}'),
    ],
)
def test_stream_options(value, wanted, asking):
    body = b'{"model":"m","stream_options":%b}' % value.encode()
    assert read_json(body).include_usage == wanted
    assert splice(body, asking_usage(body)) == body.replace(value.encode(), asking.encode())
    assert asking_usage(b'{"model":"m"}') == {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("value", "wanted"), [("true", True), ("false", False), ("null", False), ("1", False)]
)
def test_the_tokens_of_the_answer_are_asked_for_by_true_alone(value, wanted):
    assert read_json(b'{"model":"m","return_tokens":%b}' % value.encode()).return_tokens is wanted
    assert not read_json(b'{"model":"m"}').return_tokens


@pytest.mark.parametrize(
    ("members", "session"),
    [
        ('"session_id":"a","prompt_cache_key":"b"', "a"),
        ('"prompt_cache_key":"b"', "b"),
        ('"session_id":"","prompt_cache_key":"b"', "b"),
        ('"session_id":7', None),
        ('"session_id":"%s"' % ("x" * 256), "x" * 256),
        ('"session_id":"%s"' % ("x" * 257), None),
        ('"session_id":"%s"' % ("x" * 9000), None),
        ('"user":"u"', None),
    ],
)
def test_sessions(members, session):
    assert read_json(b'{"model":"m",%b}' % members.encode()).session == session


def test_without_a_required_model_it_may_be_missing_but_not_wrong():
    assert read_json(b"{}", require_model=False).model == ""
    assert read_json(b'{"model":null}', require_model=False).model == ""
    assert refused(b'{"model":7}', require_model=False).param == "model"


def test_images_are_no_prompt_text():
    text = "plain words, " * 5000
    image = "data:image/png;base64," + "iVBORw0KGgo+/" * 5000
    body = json.dumps(
        {
            "messages": [
                {
                    "content": [
                        {"type": "text", "text": text},
                        {"type": "image_url", "image_url": {"url": image}},
                        {"type": "input_audio", "input_audio": {"data": "UklGRg" * 20000}},
                    ]
                }
            ],
            "model": "m",
        }
    ).encode()
    ask = read_json(body)
    assert len(text) < ask.prompt_bytes < len(text) + 400
    assert estimate_tokens(ask) == -(-ask.prompt_bytes * 2 // 7)


def test_escaped_slashes_do_not_hide_an_image():
    body = rb'{"model":"m","x":"%b"}' % (rb"iVBO\/RwK" * 5000)
    assert read_json(body).prompt_bytes < 100


@pytest.mark.parametrize(("size", "tokens"), [(0, 1), (1, 1), (7, 2), (8, 3), (3500, 1000), (3501, 1001)])
def test_tokens_are_estimated_as_bytes_by_three_and_a_half(size, tokens):
    assert estimate_tokens(Ask("m", prompt_bytes=size)) == tokens


# --- what is refused ----------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "word", "param"),
    [
        (b"", "empty", "model"),
        (b"\xef\xbb\xbf{}", "byte order mark", None),
        (b"null", "object", None),
        (b"[1]", "object", None),
        (b'"x"', "object", None),
        (b"{}", "missing", "model"),
        (b'{"model":null}', "missing", "model"),
        (b'{"model":""}', "empty", "model"),
        (b'{"model":["m"]}', "string", "model"),
        (b'{"model":7}', "string", "model"),
        (b'{"model":[%b0]}' % (b"0," * 9999), "string", "model"),
        (b'{"model":"m"', "byte 12", None),
        (b'{"model":"m",}', "byte 13", None),
        (b'{"model":"m"}x', "trailing", None),
        (b"{'model':'m'}", "byte 1", None),
        (b'{"model":"m","x":NaN}', "byte 17", None),
        (b'{"model":"m","x":-Infinity}', "byte", None),
        (b'{"model":"m","x":01}', "byte", None),
        (b'{"model":"m","x":"a\nb"}', "byte", None),
        (b'{"model":"m","x":"\xff"}', "UTF-8 (byte 18)", None),
        (b'{"model":"m","x":"\xed\xa0\x80"}', "UTF-8", None),
        (rb'{"model":"\ud800"}', "surrogate", None),
        (rb'{"model":"m","x":["\udc00 and more text"]}', "surrogate", None),
        (rb'{"model":"m","x":"\ud800 and more text"}', "surrogate", None),
        (rb'{"model":"m","x":"\ud800\u0041"}', "surrogate", None),
        (b'{"model":"m","x":%b%b}' % (b"[" * 64, b"]" * 64), "deeper than 64", None),
        (b'{"model":"m","x":' + b"[" * 20_000, "deeper than 64", None),
        (b"[" * 500_000, "deeper than 64", None),
        (b'{"model":"m","x":%b}' % (b"1" * 65), "64 digits", None),
        (b'{"model":"m","x":-0.%b}' % (b"1" * 5000), "64 digits", None),
        (b'{"model":"m","x":[%b0]}' % (b"{}," * 60_000), "100000 structural", None),
        (b'{"model":"m","x":[%b0]}' % (b"0," * 100_000), "100000 structural", None),
        (b'{"model":"m","n":9}', "1 to 8", "n"),
        (b'{"model":"m","n":0}', "1 to 8", "n"),
        (b'{"model":"m","n":1,"n_cmpl":99}', "1 to 8", "n_cmpl"),
        (b'{"model":"m","messages":[%b{}]}' % (b"{}," * 2048), "2048", "messages"),
        (b'{"model":"m","messages":[%b1]}' % (b"1," * 2048), "2048", "messages"),
        (b'{"model":"m","tools":[ %b{}]}' % (b"{} ," * 256), "256", "tools"),
        (b'{"model":"m","stop":[%b"x"]}' % (b'"x",' * 16), "16", "stop"),
        (b'{"model":"m","stop_sequences":[%b"x"]}' % (b'"x",' * 16), "16", "stop_sequences"),
        (b'{"model":"m","%b":1}' % (b"k" * 257), "256 characters", None),
        (b"{%b}" % b",".join(b'"k%d":1' % i for i in range(1025)), "1024 members", None),
    ],
)
def test_refused(body, word, param):
    error = refused(body)
    assert word in error.message
    assert error.param == param


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","x":%b%b}' % (b"[" * 63, b"]" * 63),
        b'{"model":"m","x":%b}' % (b"1" * 64),
        b'{"model":"m","x":"%b"}' % (b"1" * 5000),
        b'{"model":"m","x":"%b"}' % (b"[{" * 5000),
        b'{"model":"m","x":"%b"}' % (rb"\"[{" * 5000),
        b'{"model":"m","x":"%b"}' % (rb"\\\"[{,1" * 60_000),
        b'{"model":"m","x":"%b\\\\"}' % (rb"[{," * 60_000),
        b'{"model":"m","x":[%b0]}' % (b"0," * 90_000),
        b'{"model":"m","x":1e999}',
        b'{"model":"m","messages":[%b{}]}' % (b"{}," * 2047),
        b'{"model":"m","messages":[%b{}]}' % (b'{"content":[{"text":"a"}]},' * 2047),
        b'{"model":"m","messages":[%b1]}' % (b"1," * 2047),
        b'{"model":"m","messages":"x"}',
        b'{"model":"m","tools":null,"stop":"x","stop_sequences":[]}',
        b'{"model":"m","tools":[%b{}]}' % (b"{}," * 255),
        b'{"model":"m","stop":[%b"x"]}' % (b'"x",' * 15),
        b'{"model":"m","n":8}',
        b'{"model":"m","n":null}',
        rb'{"model":"m","x":"\ud83d\ude00"}',
        b'{"model":"%b"}' % (rb"\ud83d\ude00" * 256),
    ],
)
def test_taken_up_to_the_limits(body):
    assert read_json(body).model


def test_flat_lists_are_exempt_on_routes_that_say_so():
    body = b'{"model":"m","input":[%b0]}' % (b"12345," * 200_000)
    assert read_json(body, exempt=True).model == "m"
    assert "structural" in refused(body).message


def test_brackets_are_counted_even_there():
    assert "structural" in refused(b'{"model":"m","input":[%b0]}' % (b"[]," * 100_001), exempt=True).message


def test_a_long_number_among_short_ones_is_seen():
    body = b'{"model":"m","input":[%b%b]}' % (b"12345," * 5000, b"1" * 65)
    assert "digits" in refused(body, exempt=True).message


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"model":"a","model":"b"}', "model"),
        (b'{"model":"a","model":"a"}', "model"),
        (rb'{"model":"a","mod\u0065l":"b"}', "model"),
        (rb'{"mod\u0065l":"a","model":"b"}', "model"),
        (b'{"model":"a","stream":true,"stream":false}', "stream"),
        (b'{"model":"a","x":1,"y":2,"x":1}', "x"),
        (b'{"model":"a","x":12,"x":1}', None),
        (b'{"model":"a","x":1.5,"x":1,"y":3}', None),
        (b'{"model":"a","x":[1],"x":[1],"y":3}', "x"),
        (b'{"model":"a","x":"[, \\"y\\":3","x":"z","y":3}', "x"),
        (b'{"":1,"":2,"model":"a"}', ""),
        (b'{"model": "a", "x": 1, "x": 1}', "x"),
        # The doubled member is just as long as Python's spaces would be.
        (b'{"model":"a","":0,"":0,"y":2}', ""),
        (b'{"model":"%b","":0,"":0,"y":2}' % (b"a" * 20_000), ""),
        ('{"model":"a","é":1,"é":2}'.encode(), "é"),
        (b'{"model":"a","%b":1,"%b":2}' % (b"k" * 250, b"k" * 250), "k" * 64),
        (b'{"model":"a","stream_options":{"include_usage":true,"include_usage":false}}', "include_usage"),
        (b'{"model":"a","messages":[{"role":"user","role":"system"}]}', "role"),
        (rb'{"model":"a","messages":[{"role":"user","r\u006fle":"system"}]}', "role"),
        (b'{"model":"a","messages":[{"content":[{"text":"x"},{"a":1, "text":"y","text":"z"}]}]}', "text"),
        (b'{"model":"a","messages":[{"a":{"":1,"":1}}],"x":1}', ""),
        (
            b'{"model":"a","options":{"num_predict":1,"n":123456789012345678901234567890,"num_predict":2}}',
            "num_predict",
        ),
        (b'{"model":"a","tools":[[[{"x":1e999,"x":0}]]]}', "x"),
        (b'{"model":"a","%b":{"%b":1,"%b":2}}' % (b"y" * 9, b"k" * 300, b"k" * 300), "k" * 64),
    ],
)
def test_doubled_keys_are_refused(body, key):
    error = refused(body)
    assert "stands twice" in error.message
    assert error.param == key
    if "in an object" not in error.message:
        with pytest.raises(InvalidRequest, match="stands twice"):
            splice(body, {"z": 1})


def test_a_key_that_stands_in_two_objects_is_not_doubled():
    assert read_json(b'{"model":"a","metadata":{"model":"b"},"x":"\\"model\\":1"}').model == "a"


def test_exhausted_recursion_is_a_refusal():
    body = b'{"model":"m","x":%b%b}' % (b"[" * 60, b"]" * 60)
    outcomes = set()

    def descend() -> None:
        try:
            descend()
        except RecursionError:
            pass
        # On the way up there is little room at first, then enough.
        try:
            find_members(body)
        except RecursionError:  # from our own call, before the parser's
            return
        except InvalidRequest as error:
            outcomes.add(error.message)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        descend()
    finally:
        sys.setrecursionlimit(limit)
    # From Python 3.12 on a parser in C does not count what Python's own calls use.
    assert outcomes == ({"the body is nested too deeply"} if sys.version_info < (3, 12) else set())


def test_a_parser_without_room_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(body: bytes) -> None:
        raise RecursionError

    monkeypatch.setattr(json_members, "_MEMBERS", SimpleNamespace(decode=no_room))
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        find_members(b'{"model":"m"}')


# --- against a plain parser ---------------------------------------------------


class Doubles(dict):
    """Is written as an object whose keys may be doubled."""

    def __init__(self, pairs: list[tuple[str, None]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs

    def items(self):
        return self.pairs


class Pairs(list):
    """An object as the plain parser met it, doubled keys and all."""


def reference(body: bytes, limits: BodyLimits) -> str | None:
    """The model, or ``None`` when the body must be refused: by building everything."""

    def refuse(_: str) -> None:
        raise ValueError

    def depth(value: object) -> int:
        if isinstance(value, Pairs):
            return 1 + max((depth(v) for _, v in value), default=0)
        if isinstance(value, list):
            return 1 + max(map(depth, value), default=0)
        return 0

    def doubled(value: object) -> bool:
        if isinstance(value, Pairs):
            keys = sorted(key for key, _ in value)
            return any(a == b for a, b in pairwise(keys)) or any(doubled(v) for _, v in value)
        return isinstance(value, list) and any(map(doubled, value))

    def sound(value: object) -> None:
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, list | tuple):
            for item in value:
                sound(item)

    try:
        text = body.decode()
        pairs = json.loads(text, parse_constant=refuse, object_pairs_hook=Pairs)
        sound(pairs)
    except (ValueError, RecursionError):
        return None
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    if (
        not isinstance(pairs, Pairs)
        or depth(pairs) > limits.depth
        or len(re.findall(r"[{[,]", outside)) > limits.structural
        or re.search(rf"\d{{{limits.number_digits + 1}}}", outside)
        or doubled(pairs)
    ):
        return None
    model = dict(pairs).get("model")
    if model is None:
        return ""
    return model if isinstance(model, str) and model else None


def verdict(body: bytes, limits: BodyLimits) -> str | None:
    try:
        return read_json(body, limits, require_model=False).model
    except InvalidRequest:
        return None


TIGHT = BodyLimits(depth=4, structural=12, number_digits=5)
FRAGMENTS = [
    *'{}[],:"\\ 1',
    *('\\"', "\\\\", "\\n", "\\u0065", "\\ud800", "\\udc00", "\\ud83d\\ude00", "é", "\n", "\x00"),
    *('"model":"m"', '"mod\\u0065l":"m"', '"model"', '"x":1', '"y":[', '"":{}', '"a,b[":"{"', ',"x":12'),
    *("12345", "123456", "-1.5e3", "1e9", "true", "null", "NaN", "long text without quotes "),
]
soup = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map(lambda parts: "".join(parts).encode())
doubles = st.lists(st.tuples(st.sampled_from(["a", "b", '"']), st.none()), max_size=3).map(Doubles)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9999999, 9999999) | st.text(max_size=12) | st.floats(),
    lambda inner: (
        st.lists(inner | doubles, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner | doubles, max_size=3)
    ),
    max_leaves=12,
)
names = st.sampled_from(["model", "stream", "x", "y", "a\\", '"', "é", ""])


@st.composite
def objects(draw):
    """JSON text whose keys may be doubled or escaped, in any layout."""
    members = draw(st.lists(st.tuples(names, values), max_size=4))
    space = draw(st.sampled_from(["", " ", "\n\t"]))
    out = []
    for name, value in members:
        ascii_only = draw(st.booleans())
        key = json.dumps(name, ensure_ascii=ascii_only)
        if draw(st.booleans()):
            key = key.replace("o", "\\u006f").replace("x", "\\u0078")
        layout = draw(st.sampled_from([None, (",", ":"), (" , ", " : ")]))
        out.append(key + space + ":" + json.dumps(value, separators=layout, ensure_ascii=ascii_only))
    return (space + "{" + space + (space + "," + space).join(out) + "}" + space).encode(
        "utf-8", "surrogatepass"
    )


@settings(max_examples=400)
@given(body=soup, wrapped=st.booleans())
def test_soup_is_judged_as_a_plain_parser_would(body, wrapped):
    body = b'{"k":[%b]}' % body if wrapped else body
    if not body:
        return
    assert verdict(body, TIGHT) == reference(body, TIGHT)


@settings(max_examples=400)
@given(body=objects(), window=st.sampled_from([3, 7, 16384]))
def test_objects_are_judged_as_a_plain_parser_would(body, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "_WINDOW", window)
        patch.setattr(json_shape, "_GAP", 4)
        for limits in (TIGHT, BodyLimits()):
            assert verdict(body, limits) == reference(body, limits)


@settings(max_examples=300)
@given(body=soup, window=st.integers(2, 9))
def test_seams_between_windows_change_nothing(body, window):
    body = b'{"k":"%b"}' % body
    if not body:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "_WINDOW", window)
        patch.setattr(json_shape, "_GAP", 3)
        assert verdict(body, TIGHT) == reference(body, TIGHT)


@settings(max_examples=200)
@given(data=st.binary(max_size=60))
def test_no_bytes_break_it(data):
    assert verdict(data, BodyLimits()) == (reference(data, BodyLimits()) if data else None)
    verdict(b'{"model":"m","x":"' + data, BodyLimits())


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("run", range(12))
def test_runs_of_backslashes_end_strings_or_do_not(run):
    text = b"b" * 9 + b"\\" * run
    body = b'{"k":"%b","x":[[[[1]]]]}' % text
    assert verdict(body, TIGHT) == reference(body, TIGHT) is None
    body = b'{"k":"%b[[[[[[","x":1}' % text
    assert verdict(body, TIGHT) == reference(body, TIGHT)


def test_few_and_many_escapes_are_read_alike():
    for filler in (b"word word word " * 40, rb"\n\"\\"):
        for end, closes in ((rb"\\", True), (rb"\"", False)):
            body = b'{"model":"m","x":"%b%b","y":%b}' % (filler * 50, end, b"[" * 64 + b"]" * 64)
            refused(body)
            shape = check_shape(body.replace(b"[", b""), BodyLimits())
            assert shape.opened == 1, closes


# --- short cuts ---------------------------------------------------------------


def outcome(body, limits, *, require_model=True, exempt=False):
    try:
        return read_json(body, limits, require_model=require_model, exempt=exempt)
    except (InvalidRequest, ModelNotFound) as error:
        return error.message, error.param


def same_without_short_cuts(body, limits, **options):
    """Twice, as the second time what stands around the messages is known."""
    quick = [outcome(body, limits, **options) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "few_openers", lambda body, limits: None)
        assert quick == [outcome(body, limits, **options)] * 2


SETS_OF_LIMITS = [
    BodyLimits(),
    TIGHT,
    BodyLimits(depth=5, stop=5, tools=3, messages=3),
    BodyLimits(number_digits=70, members=4, n=2, model_chars=5),
]
oddities = st.sampled_from(
    [
        *("8.0", "1e3", "-1", "-0", "9007199254740993.0", "1" * 64, "1" * 65, "01", "null", "true", "tru"),
        *(
            '{"include_usage":true,"include_usage":false}',
            '{"include_usage": true }',
            '"\\u006d"',
            '"\\ud800"',
        ),
        *("[[[[[[1]]]]]]", '["[[[[[["]', "[{},1,1,1,1,1]", "[]", "[{}]x", "[1],[2]", '"}],"', '"]"', '"{"'),
    ]
)
wishes = {
    "model": st.sampled_from(["m", "mödel", "", None, 7]),
    "stream": st.booleans() | st.none(),
    "max_tokens": st.integers(-1, 9) | st.none() | st.sampled_from([8.0, 2.5]),
    "n_predict": st.integers(-1, 9),
    "n": st.sampled_from([1, 2, 9, None, 1.0, "1"]),
    "stop": st.text(max_size=4) | st.lists(st.sampled_from(["x", "[", "}]", {}]), max_size=9),
    "tools": st.lists(st.just({"function": {"messages": [{}]}}), max_size=5),
    "stream_options": st.sampled_from([{"include_usage": True}, {"messages": [{}]}, {}, None, []]),
    "session_id": st.text(max_size=4) | st.integers(),
    "return_tokens": st.booleans(),
    "metadata": st.just({"messages": [{"a": 1}]}),
    'x"messages': st.just([{"b": 1}]),
    "%b": values,
}
messages = st.lists(
    st.fixed_dictionaries(
        {
            "content": st.text(max_size=9)
            | st.sampled_from(["[1]", '}],"tools":[{}', '"messages":[', "{{"])
            | values
        }
    ),
    max_size=6,
)


@st.composite
def requests(draw):
    """Chat requests, most of them good, in any order and layout."""
    members = [
        (name, draw(wishes[name])) for name in draw(st.lists(st.sampled_from(list(wishes)), max_size=5))
    ]
    members.insert(draw(st.integers(0, len(members))), ("messages", draw(messages)))
    if draw(st.booleans()):
        members = list(dict(members).items())
    layout = draw(st.sampled_from([(",", ":"), (", ", ": "), (", ", ": "), (",\n", ": "), (" ,", " :")]))
    ascii_only = draw(st.booleans())
    out = []
    for name, value in members:
        key = json.dumps(name, ensure_ascii=ascii_only)
        if draw(st.integers(0, 15)) == 0:
            key = key.replace("s", "\\u0073")
        text = json.dumps(value, separators=layout, ensure_ascii=ascii_only)
        out.append(key + layout[1] + (draw(oddities) if draw(st.integers(0, 9)) == 0 else text))
    return ("{" + layout[0].join(out) + "}").encode("utf-8", "surrogatepass")


@settings(max_examples=400)
@given(
    body=requests(), which=st.sampled_from(SETS_OF_LIMITS), require_model=st.booleans(), exempt=st.booleans()
)
def test_short_cuts_change_no_verdict(body, which, require_model, exempt):
    same_without_short_cuts(body, which, require_model=require_model, exempt=exempt)


around = ['"messages":[', '"messages": [', '"messages":', "}]", '[{"a":1}]', '"stop":["x"]', '"stream":true']
pieces = st.lists(st.sampled_from([*FRAGMENTS, *around]), max_size=14).map(
    lambda parts: "".join(parts).encode()
)


@settings(max_examples=300)
@given(body=pieces, wrapped=st.booleans())
def test_short_cuts_change_no_verdict_on_soup(body, wrapped):
    same_without_short_cuts(b'{"model":"m",%b}' % body if wrapped else body, BodyLimits())


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"a":1}]}',
        b'{"model": "m", "messages": [{"a": 1}], "stop": ["x"]}',
        b'{"messages":[{"a":1}],"tools":[{"a":1}],"model":"m"}',
        b'{"messages":[{"a":1}x],"model":"m"}',
        b'{"messages":x[{"a":1}],"model":"m"}',
        b'{"messages":1[{"a":1}],"model":"m"}',
        b'{"messages":"[{}]","model":"m"}',
        b'{"messages":[{"a":1}]',
        b'{"messages":[[{"a":1}]],"model":"m"}',
        b'{"messages":[1,{"a":1}],"model":"m","model":"n"}',
        b'{"model":"m","x":"\\"messages\\":[{}]","y":[{}]}',
        b'{"model":"m","x\\"messages":[{"a":1}]}',
        rb'{"model":"m","mess\u0061ges":[1],"x":{"messages":[{"a":1}]}}',
        b'{"model":"m","messages":[%b{}]}' % (b"1," * 2048),
        b'{"model":"m","messages":[%b{}]}' % (b"1," * 2047),
        b'{"model":"m","messages":[{"content":"%b"}]}' % (b"x" * 20_000),
        b'{"model":"m","messages":[{"a":1}],"x":"%b"}' % (b"x" * 600),
        # Lists that begin with an object are judged by the objects of the whole body,
        b'{"model":"m","stop":[{},%b1]}' % (b"1," * 20),
        b'{"model":"m","stop":[{},%b1],"messages":[%b{}]}' % (b"1," * 20, b"{}," * 20),
        b'{"model":"m","stop":[{},%b1],"x":[%b{}]}' % (b"1," * 20, b"{}," * 20),
        # of which brackets in strings are none.
        b'{"model":"m","stop":[{},%b1],"x":"%b"}' % (b"1," * 20, b"[{" * 10),
        b'{"model":"m","stop":[{},%b1],"messages":[{"content":"%b"}]}' % (b"1," * 20, b"[{" * 10),
    ],
)
def test_short_cuts_change_no_verdict_at_their_edges(body):
    for limits in SETS_OF_LIMITS:
        same_without_short_cuts(body, limits)


def test_limits_are_remembered_with_what_they_allowed():
    body = b'{"model":"long-name","messages":[{}]}'
    assert read_json(body).model == "long-name"
    with pytest.raises(ModelNotFound):
        read_json(body, BodyLimits(model_chars=4))


@pytest.mark.parametrize(
    "name", [b"x" * 257, b"x" * 9999, "模".encode() * 257, b"\\u6a21" * 257, b"\\ud83d\\ude00" * 257]
)
def test_a_name_longer_than_any_is_one_that_nobody_serves(name):
    """As S-MOD-2 wants it: 404, and of the name only so much that it can be known again."""
    with pytest.raises(ModelNotFound) as caught:
        read_json(b'{"model":"%b"}' % name)
    assert caught.value.param == "model"
    assert 256 < len(caught.value.message) < 600
    assert "257" not in caught.value.message


def test_members_are_counted_where_commas_are_not():
    """A million of keys in one object took a second to look through."""
    wide = b'{"model":"m","x":{%b}}'
    body = wide % b",".join(b'"k%d":1' % number for number in range(100_000))
    for exempt in (True, False):
        with pytest.raises(InvalidRequest, match="structural"):
            read_json(body, exempt=exempt)
    in_strings = wide % (b'"k":"%b","l":[%b1]' % (b'a: b, c: \\"d\\": ' * 20_000, b"1," * 200_000))
    assert read_json(in_strings, exempt=True).model == "m"


@pytest.mark.parametrize("name", ["stop", "messages", "prompt", "tools"])
def test_a_list_of_millions_is_refused_without_being_built(name):
    """Where commas are not counted, as lists of tokens are long."""
    body = b'{"model":"m","%b":[%b"x"]}' % (name.encode(), b'"",' * 3_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="has more than") as refused:
            read_json(body, exempt=True)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.param == name
    assert most < 4 * len(body)


def test_a_list_of_prompts_is_bounded_and_one_of_tokens_is_not():
    limits = BodyLimits(messages=3)
    for prompt in (["a"] * 4, [[1, 2]] * 4, ["a", [1], "b", "c"]):
        with pytest.raises(InvalidRequest, match="more than 3 prompts"):
            read_json(json.dumps({"model": "m", "prompt": prompt}).encode(), limits)
    for prompt in (["a"] * 3, [1] * 9, ["a", 5, "b", "c"], "a long prompt", [], {"a": "b, c, d"}):
        read_json(json.dumps({"model": "m", "prompt": prompt}).encode(), limits)


def test_bounds_too_large_to_be_counted_hold_too():
    limits = BodyLimits(messages=5000)
    read_json(json.dumps({"model": "m", "messages": [1] * 5000}).encode(), limits)
    with pytest.raises(InvalidRequest, match="more than 5000"):
        read_json(json.dumps({"model": "m", "messages": [1] * 5001}).encode(), limits)


@pytest.mark.parametrize("count", [3, 24, 25, 200])
@pytest.mark.parametrize("layout", [(",", ":"), (", ", ": "), (" ,", " :")])
def test_any_number_of_keys_is_taken_and_a_doubled_one_seen(count, layout):
    members = [f'"k{i}%"{layout[1]}{i}' for i in range(count)]
    body = "{" + layout[0].join(members) + "}"
    assert list(read_members(body.encode())) == [f"k{i}%" for i in range(count)]
    doubled = "{" + layout[0].join([*members, members[1]]) + "}"
    with pytest.raises(InvalidRequest, match="stands twice"):
        read_members(doubled.encode())
    long = body[:-1] + layout[0] + f'"{"k" * 257}"{layout[1]}1}}'
    with pytest.raises(InvalidRequest, match="256 characters"):
        read_members(long.encode())


def test_few_openers_are_counted_with_those_in_strings_or_not_at_all():
    assert few_openers(b'{"a":[{},"[[[{"]}', BodyLimits()) == 7
    assert few_openers(b'{"a":"%b"}' % (b"[" * 64), BodyLimits()) is None
    assert few_openers(b'{"a":"%b"}' % (b"1" * 65), BodyLimits()) is None
    assert few_openers(b'{"a":"%b"}' % (b"x" * 20_000), BodyLimits()) is None
    assert few_openers(b'{"a":"%b"}' % (b"x y " * 5_000), BodyLimits()) == 1
    assert few_openers(b'{"a":"%b"}' % (b"x y " * 25_000), BodyLimits()) is None


@pytest.mark.parametrize("before", range(0, 20_000, 1_234))
def test_what_looks_like_base64_is_never_passed_over(before):
    body = b'{"a":"%b","b":"%b"}' % (b"x " * (before // 2), b"x" * 16_384)
    assert few_openers(body, BodyLimits()) is None


# --- changes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "changes", "after"),
    [
        (b'{"model":"a"}', {}, b'{"model":"a"}'),
        (b'{"model":"a"}', {"model": "b"}, b'{"model":"b"}'),
        (b' { "model" : "a" , "x":1e1 } \n', {"model": "b"}, b' { "model" : "b" , "x":1e1 } \n'),
        (rb'{"mod\u0065l":"a"}', {"model": "b"}, rb'{"mod\u0065l":"b"}'),
        (b'{"a":{"model":1},"model":"a"}', {"model": "b"}, b'{"a":{"model":1},"model":"b"}'),
        (b'{"a":1}', {"b": {"c": [True, None]}}, b'{"a":1,"b":{"c":[true,null]}}'),
        (b"{}", {"b": 2}, b'{"b":2}'),
        (b" { } ", {"b": 2, "c": 3}, b' {"b":2,"c":3 } '),
        (b'{"a":1, "b":2 }', {"b": REMOVE}, b'{"a":1 }'),
        (b'{ "a":1, "b":2, "c":3}', {"a": REMOVE}, b'{ "b":2, "c":3}'),
        (b'{"a":1, "b":2, "c":3}', {"b": REMOVE}, b'{"a":1, "c":3}'),
        (b'{"a":1, "b":2, "c":3}', {"a": REMOVE, "b": REMOVE}, b'{"c":3}'),
        (b'{"a":1,"b":2}', {"a": REMOVE, "b": REMOVE}, b"{}"),
        (b'{"a":1}', {"a": REMOVE, "b": 5}, b'{"b":5}'),
        (b'{"a":1}', {"z": REMOVE}, b'{"a":1}'),
        (b'{"a":1,"b":2}', {"a": REMOVE, "b": 3}, b'{"b":3}'),
        (b'{"a":1}', {'q"': "é"}, '{"a":1,"q\\"":"é"}'.encode()),
    ],
)
def test_splice(body, changes, after):
    assert splice(body, changes) == after


@settings(max_examples=300)
@given(body=objects(), changes=st.dictionaries(names, values | st.just(REMOVE), max_size=3))
def test_a_change_leaves_every_other_member_as_it_stood(body, changes):
    try:
        before = find_members(body)
    except InvalidRequest:
        return
    changes = json_safe(changes)
    spliced = splice(body, changes)
    after = find_members(spliced)
    kept = [key for key in before if changes.get(key) is not REMOVE]
    added = [key for key in changes if key not in before and changes[key] is not REMOVE]
    assert list(after) == kept + added
    for key, (_, start, end) in after.items():
        if key in changes:
            assert json.loads(spliced[start:end]) == changes[key]
        else:
            assert spliced[start:end] == body[before[key][1] : before[key][2]]
    if not changes or changes.keys().isdisjoint(before.keys() | added):
        assert spliced == body


def json_safe(changes):
    """NaN is not JSON, lone surrogates are not UTF-8."""

    def safe(value):
        return json.loads(re.sub(r"NaN|-?Infinity|\\ud[89a-f]..", "0", json.dumps(value)))

    return {key: value if value is REMOVE else safe(value) for key, value in changes.items()}


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a":1,"a":2}'])
def test_splicing_what_is_no_object_is_refused(body):
    with pytest.raises(InvalidRequest):
        splice(body, {"model": "b"})


def test_spans_and_values_agree():
    body = b'{ "a" : [1, 2], "b":"x" }'
    values = read_members(body)
    assert {key: body[start:end] for key, (_, start, end) in find_members(body).items()} == {
        key: bytes(value) for key, value in values.items()
    }


@pytest.mark.parametrize(
    ("content", "in_steps"),
    [(b"x" * 5_000_000, False), (b'\\n\\"y' * 600_000, True), (b"\\\\" * 1_000_000, False)],
    ids=["text", "escapes", "backslashes"],
)
def test_a_large_body_is_judged_in_steps(content, in_steps):
    """Where there is much to look at; strings without quotes are leapt over."""
    body = b'{"messages":[{"a":"%b"}],"model":"m"}' % content
    steps, count = shape_steps(body, BodyLimits()), 0
    with pytest.raises(StopIteration) as ended:
        while True:
            next(steps)
            count += 1
    shape = ended.value.value
    assert shape == check_shape(body, BodyLimits())
    assert read_json(body, shape=shape) == read_json(body)
    assert (count > 0) == in_steps


def test_shape_counts_openers_outside_strings():
    assert check_shape(b'{"a":[{},"[[[{"]}', BodyLimits()) == Shape(opened=3, opaque_bytes=0)


@pytest.mark.parametrize(
    ("members", "changes"),
    [
        ("", {"max_tokens": 100}),
        ('"max_tokens":50', {}),
        ('"max_tokens":100', {}),
        ('"max_tokens":101', {"max_tokens": 100}),
        ('"max_tokens":null', {"max_tokens": 100}),
        ('"n_predict":-1', {"n_predict": 100}),
        ('"max_tokens":0', {"max_tokens": 100}),
        ('"max_tokens":5,"n_predict":-1', {"n_predict": 100}),
        ('"max_completion_tokens":1e9,"max_tokens":300', {"max_completion_tokens": 100, "max_tokens": 100}),
    ],
)
def test_every_output_limit_is_clamped(members, changes):
    body = b'{"model":"m"%b}' % (b"," + members.encode() if members else b"")
    assert clamp_output(read_json(body), 100) == changes


def test_an_absent_output_limit_is_set_by_the_routes_own_key():
    assert clamp_output(Ask("m"), 9, "n_predict") == {"n_predict": 9}
