"""What is read of a form, what is refused as unclear, and what a change leaves alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.core.body import Ask
from llmgw.core.multipart import read_multipart, splice_multipart
from llmgw.errors import InvalidRequest, ModelNotFound

TYPE = "multipart/form-data; boundary=b1"
FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav'
MODEL = b'Content-Disposition: form-data; name="model"'


def form(*parts: tuple[bytes, bytes], boundary: bytes = b"b1") -> bytes:
    body = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, content) for head, content in parts)
    return body + b"--%b--\r\n" % boundary


def field(name: str, value: bytes) -> tuple[bytes, bytes]:
    return b'Content-Disposition: form-data; name="%b"' % name.encode(), value


GOOD = form((FILE, b"RIFF\x00\xff\r\n--b\r\n--"), (MODEL, b"m"))


def refused(body: bytes, content_type: str = TYPE, **options: bool) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_multipart(body, content_type, **options)
    assert caught.value.status == 400
    assert len(caught.value.message) < 200
    return caught.value


def test_the_model_is_read_after_the_file():
    assert read_multipart(GOOD, TYPE) == Ask("m")


def test_the_model_is_read_before_the_file():
    assert read_multipart(form((MODEL, b"m"), (FILE, b"x" * 100_000)), TYPE).model == "m"


@pytest.mark.parametrize("value", [b"true", b"True", b"1", b"", b"false", b"true "])
def test_only_true_is_streaming(value):
    assert read_multipart(form((MODEL, b"m"), field("stream", value)), TYPE).stream is (value == b"true")


def test_only_the_prompt_field_is_prompt_text():
    body = form((FILE, b"x" * 900), (MODEL, b"m"), field("prompt", b"hello"), field("language", b"en"))
    assert read_multipart(body, TYPE).prompt_bytes == 5


def test_a_model_need_not_be_there_where_none_is_required():
    assert read_multipart(form((FILE, b"x")), TYPE, require_model=False).model == ""


@pytest.mark.parametrize(
    "head",
    [
        b"content-disposition:form-data;name=model",
        b'CONTENT-DISPOSITION: Form-Data ; NAME="model" ; ',
        b'Content-Type: text/plain\r\nContent-Disposition: form-data; name="model"\r\nX-A: ',
        b'Content-Disposition: form-data; name="model"\r\nContent-Transfer-Encoding: 8BIT',
    ],
)
def test_headers_in_any_dress(head):
    assert read_multipart(form((head, b"m")), TYPE).model == "m"


@pytest.mark.parametrize("name", ["模型", "a/b:c@d e", "x" * 256, "%6d"])
def test_model_names_are_taken_exactly(name):
    assert read_multipart(form((MODEL, name.encode())), TYPE).model == name


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=b1", b"b1"),
        ('Multipart/Form-Data;charset=utf-8;BOUNDARY="b 1"', b"b 1"),
        (r'multipart/form-data; boundary="b\1"', b"b1"),
        ("multipart/form-data; boundary=----WebKitFormBoundaryAbc", b"----WebKitFormBoundaryAbc"),
        ("multipart/form-data; boundary=" + "b" * 70, b"b" * 70),
        ('multipart/form-data; boundary="-"', b"-"),
    ],
)
def test_boundaries(content_type, boundary):
    assert read_multipart(form((MODEL, b"m"), boundary=boundary), content_type).model == "m"


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data-x; boundary=b1",
        "multipart/mixed; boundary=b1",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        'multipart/form-data; boundary="b1',
        'multipart/form-data; boundary="b1 "',
        "multipart/form-data; boundary=b1; boundary=b1",
        "multipart/form-data; boundary=" + "b" * 71,
        "multipart/form-data; boundary=b1, x",
        'multipart/form-data; boundary="b\u20ac"',
        'multipart/form-data; boundary="b[1]"',
    ],
)
def test_content_types_without_a_valid_boundary_are_refused(content_type):
    assert "content-type" in refused(GOOD, content_type).message


def test_preamble_epilogue_and_padding_are_allowed():
    body = b"preamble\r\n" + GOOD.replace(b"--b1\r\n", b"--b1 \t\r\n") + b"epilogue\r\n"
    assert read_multipart(body, TYPE).model == "m"
    assert read_multipart(b"\r\n" + GOOD, TYPE).model == "m"


def test_the_last_line_break_may_be_missing():
    assert read_multipart(GOOD.removesuffix(b"\r\n"), TYPE).model == "m"


@pytest.mark.parametrize("name", [b"x" * 257, "é".encode() * 50_000, "模".encode() * 50_000])
def test_a_name_longer_than_any_is_one_that_nobody_serves(name):
    with pytest.raises(ModelNotFound) as caught:
        read_multipart(form((MODEL, name)), TYPE)
    assert caught.value.param == "model"
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("body", "word", "param"),
    [
        (b"", "boundary", None),
        (b"--b2\r\n", "boundary", None),
        (form((FILE, b"x")), "missing", "model"),
        (form((MODEL, b"")), "empty", "model"),
        (form((MODEL, b"\xff")), "UTF-8", "model"),
        (form((MODEL, b"m"), field("stream", b"\xff")), "UTF-8", "stream"),
        (form((MODEL, b"m"), (MODEL, b"m")), "twice", "model"),
        (form((MODEL, b"m"), field("stream", b""), field("stream", b"")), "twice", "stream"),
        (form((MODEL + b'; filename="x"', b"m")), "file", "model"),
        (form((MODEL + b"; filename*=UTF-8''x", b"m")), "file", "model"),
        (form((MODEL + b"; name=other", b"m")), "name", None),
        (form((MODEL + b"; name*=UTF-8''x", b"m")), "name", None),
        (form((MODEL + b'; x="open', b"m")), "name", None),
        (form((b"Content-Disposition: form-data", b"m")), "name", None),
        (form((b"Content-Disposition: form-dataX; name=model", b"m")), "disposition", None),
        (form((b"Content-Disposition: attachment; name=model", b"m")), "disposition", None),
        (form((b"Content-Type: text/plain", b"m")), "disposition", None),
        (form((MODEL + b"\r\n" + MODEL, b"m")), "two", None),
        (form((MODEL, b"m"), field(r"mo\del", b"x")), "escapes", None),
        (form((MODEL, b"m"), field("%6Dodel", b"x")), "escapes", None),
        (form((MODEL + b"\r\nContent-Transfer-Encoding: base64", b"bQ==")), "transfer", None),
        (form((MODEL + b"\r\n folded: x", b"m")), "header", None),
        (form((MODEL + b"\r\nbare\nfeed: x", b"m")), "header", None),
        (form((MODEL + b"\r\nno colon", b"m")), "header", None),
        (form((MODEL + b"\r\nX: " + b"x" * 5000, b"m")), "header", None),
        (form((MODEL, b"m"), *[(FILE, b"")] * 64), "64 parts", None),
        (GOOD.removesuffix(b"--b1--\r\n"), "closing", None),
        (GOOD[:40], "header", None),
        (b"x" + GOOD, "inside a line", None),
        (b"x\n" + GOOD, "inside a line", None),
        (GOOD + GOOD, "after the end", None),
        (form((FILE, b"x--b1y"), (MODEL, b"m")), "inside a line", None),
        (form((FILE, b"x\n--b1\n"), (MODEL, b"m")), "inside a line", None),
        (form((FILE, b"x\r\n--b1y"), (MODEL, b"m")), "other text", None),
        (form((FILE, b"x\r\n--b1\n"), (MODEL, b"m")), "other text", None),
        (b"--b1\r\n" + MODEL + b"\r\n\r\n--b1--", "inside a line", None),
        (b"--b1-", "other text", None),
        (b"--b1--", "missing", "model"),
    ],
)
def test_refused(body, word, param):
    error = refused(body)
    assert word in error.message
    assert error.param == param


def test_as_many_parts_as_allowed():
    assert read_multipart(form((MODEL, b"m"), *[(FILE, b"")] * 63), TYPE).model == "m"


def test_splice_changes_the_model_and_nothing_else():
    file = (FILE, b"RIFF\x00\xff\r\n--b\r\n--")
    assert form(file, (MODEL, b"m")) == GOOD
    assert splice_multipart(GOOD, TYPE, "模型") == form(file, (MODEL, "模型".encode()))


def test_splicing_a_form_without_model_is_refused():
    with pytest.raises(InvalidRequest, match="missing"):
        splice_multipart(form((FILE, b"x")), TYPE, "m")


@pytest.mark.parametrize("model", ["a\r\nb", "a\nb", "a\rb"])
def test_a_new_model_cannot_forge_a_boundary(model):
    with pytest.raises(ValueError, match="line break"):
        splice_multipart(GOOD, TYPE, model)


contents = st.lists(
    st.sampled_from([b"\r\n", b"\n", b"\r", b"-", b"--", b"b", b"--b", b"b1", b"\0", b"\xff", b'"']),
    max_size=9,
).map(b"".join)


@settings(max_examples=200)
@given(files=st.lists(contents, max_size=3), place=st.integers(0, 3), preamble=contents, epilogue=contents)
def test_any_content_is_leapt_over_or_refused(files, place, preamble, epilogue):
    parts = [(FILE, content) for content in files]
    parts.insert(place, (MODEL, b"m"))
    body = preamble + b"\r\n" + form(*parts) + epilogue
    unclear = any(b"--b1" in text for text in (*files, preamble, epilogue))
    if unclear:
        refused(body)
    else:
        assert read_multipart(body, TYPE).model == "m"
        spliced = splice_multipart(body, TYPE, "other")
        assert spliced == body.replace(MODEL + b"\r\n\r\nm\r\n", MODEL + b"\r\n\r\nother\r\n")


@settings(max_examples=200)
@given(data=st.binary(max_size=40), cut=st.integers(0, len(GOOD)))
def test_no_bytes_break_it(data, cut):
    for body in (data, GOOD[:cut] + data, GOOD[:cut] + data + GOOD[cut:]):
        try:
            assert read_multipart(body, TYPE).model
        except InvalidRequest:
            pass


@settings(max_examples=200)
@given(text=st.text(max_size=30))
def test_no_content_type_breaks_it(text):
    for content_type in (text, "multipart/form-data;" + text, "multipart/form-data; boundary=" + text):
        try:
            read_multipart(GOOD, content_type)
        except InvalidRequest:
            pass
