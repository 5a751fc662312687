"""Duplicate keys inside the members of a body, in one go and in steps."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core import duplicate_keys
from llmgw.core.duplicate_keys import check_duplicates, check_pairs, duplicate_steps, is_usual
from llmgw.core.json_shape import BodyLimits
from llmgw.errors import InvalidRequest

CONTENT = 'A long text {with} "marks" and \\ and é. ' * 2000
MESSAGES = [{"role": "user", "content": CONTENT} for _ in range(50)]


def steps(body: bytes, uncounted: BodyLimits | None = None) -> int:
    """How many there were."""
    return sum(1 for _ in duplicate_steps(body, uncounted))


@pytest.mark.parametrize("layout", [(",", ":"), (", ", ": "), (" ,\n", " : ")])
def test_large_bodies_are_taken_in_steps(layout: tuple[str, str]) -> None:
    body = json.dumps(
        {"model": "m", "messages": MESSAGES, "input": [1] * 500_000}, separators=layout
    ).encode()
    assert steps(body) >= 5


def test_text_alone_is_not_looked_at() -> None:
    assert steps(json.dumps({"prompt": CONTENT * 40, "model": "m"}).encode()) == 2


@pytest.mark.parametrize("name", ["role", "k" * 200])
@pytest.mark.parametrize("many", [1, 50])
def test_a_doubled_key_is_found_wherever_it_stands(name: str, many: int) -> None:
    good = json.dumps([*MESSAGES[:many], {name: 1, "x": CONTENT * 20}]).encode()
    bad = good.replace(b'"x":', b'"%b": 2, "x":' % name.encode())
    body = b'{"model": "m", "messages": %b, "y": "' + b"z" * (1 << 20) + b'"}'
    steps(body % good)
    with pytest.raises(InvalidRequest, match="stands twice") as caught:
        steps(body % bad)
    assert caught.value.param == name[:64]


texts = st.recursive(
    st.sampled_from(["1", '"a"', "null", '"{"', '"\\u0061\\""', "[]", "1e999"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]")
        | st.lists(st.tuples(st.sampled_from(['"a"', '"\\u0061"', '"b"', '""']), inner), max_size=3).map(
            lambda pairs: "{" + ",".join(":".join(pair) for pair in pairs) + "}"
        )
    ),
    max_leaves=10,
)


words = st.sampled_from(
    ['"a"', '"b"', '""', '"\\""', '"\\\\"', '"\\n"', '"\\u0022"', '"\\u0061"', '"\\ud800"', '"é"', '"{:,"']
)
messages = st.lists(
    st.lists(
        st.tuples(words, words | st.sampled_from(["1", "null", "[]", '["a"]', '{"a":"b"}'])), max_size=3
    ),
    max_size=3,
)


@given(messages, st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :")]))
def test_usual_text_has_no_key_twice(pairs: list[list[tuple[str, str]]], layout: tuple[str, str]) -> None:
    comma, colon = layout
    objects = ["{" + comma.join(map(colon.join, members)) + "}" for members in pairs]
    value = f"[{comma.join(objects)}]".encode()
    if is_usual(value):
        check_pairs(value)


@pytest.mark.parametrize("layout", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("content", ["hello", 'say "hello"', "a\nb\\c"])
def test_a_key_that_stands_twice_is_not_usual(layout: tuple[str, str], content: str) -> None:
    comma, colon = layout
    good = json.dumps([{"role": "user", "content": content}] * 3, separators=layout).encode()
    assert is_usual(good) or (colon == ": " and '"' in content)
    assert not is_usual(good[:-2] + f'{comma}"role"{colon}"user"}}]'.encode())


@given(texts, st.integers(1, 30))
def test_steps_say_what_one_look_says(inside: str, piece: int) -> None:
    body = f'{{"k":{inside},"l":"{"x" * 30}"}}'.encode()

    def verdict(look: object) -> bool:
        try:
            look(body)  # type: ignore[operator]
        except InvalidRequest:
            return False
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicate_keys, "_PIECE_BYTES", piece)
        in_steps = verdict(steps)
    assert in_steps == verdict(check_duplicates)


def test_a_list_of_millions_with_an_object_in_it_is_not_taken_apart() -> None:
    """That took seconds; long are the lists that hold numbers alone, and those are passed over."""
    with pytest.raises(InvalidRequest, match="structural"):
        steps(b'{"x":[{"a":1},%b1]}' % (b"1," * 1_000_000), BodyLimits())
    assert steps(b'{"x":[%b1],"y":{"z":[]}}' % (b"1," * 1_000_000), BodyLimits()) > 0


def test_a_long_list_of_texts_may_speak_of_objects() -> None:
    """Texts to be embedded, one of which is code: there is no object in it."""
    body = b'{"x":[%b%b]}'
    code = b'"text",' * 200_000 + rb'"{\"a\": 1, \"a\": [2]}"'
    assert steps(body % (code, b"")) > 0
    assert steps(body % (code, b""), BodyLimits()) > 0
    with pytest.raises(InvalidRequest, match="structural"):
        steps(body % (code, b',{"a":1}'), BodyLimits())


def test_lists_inside_each_other_are_counted_once() -> None:
    """The innermost of sixty was looked through sixty times."""
    text = b'"%b"' % (rb"\"{" * 700_000)
    body = b'{"x":%b%b,{}%b}' % (b"[" * 60, text, b"]" * 60)
    assert steps(body, BodyLimits()) < steps(body) + 5


def test_the_last_of_very_many_keys_is_named_as_quickly_as_the_first() -> None:
    """To compare each with each would take minutes."""
    keys = [f'"{n}": 0' for n in range(90_000)]
    with pytest.raises(InvalidRequest, match="'89999' stands twice"):
        check_duplicates(("{" + ", ".join([*keys, keys[-1]]) + "}").encode())
