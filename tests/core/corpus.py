"""Raw HTTP/1.1 messages, good and bad, and what has to become of them.

The names of the first two tables are those of a corpus that was run against
Twisted, httptools, h11, nginx and HAProxy; the texts are written anew from the
names. ``want`` is its verdict: ``A`` must be taken, ``R`` must be refused, ``E``
either. ``status`` is our verdict: 0 for taken, else what is answered.
"""

from __future__ import annotations

from typing import NamedTuple


class RequestCase(NamedTuple):
    """One connection's bytes.

    :param status: 0 when all is taken, else the status of the fault that ends it.
    :param bodies: contents of the whole requests that come out before that.
    """

    name: str
    want: str
    status: int
    raw: bytes
    bodies: tuple[bytes, ...] = ()


class ResponseCase(NamedTuple):
    """One answer of a backend, then its close.

    :param code: code of the fault, ``""`` for none.
    :param reusable: before the close.
    """

    name: str
    want: str
    code: str
    raw: bytes
    body: bytes = b""
    reusable: bool = False
    status: int = 200
    method: str = "POST"


HOST = b"Host: gw.example\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\n"
GET = b"GET /v1/models HTTP/1.1\r\n"
SMUGGLED = b"GET /smug HTTP/1.1\r\nHost: gw.example\r\n\r\n"


def get(fields: bytes = b"", line: bytes = GET) -> bytes:
    return line + HOST + fields + b"\r\n"


def post(fields: bytes, content: bytes = b"") -> bytes:
    return POST + HOST + fields + b"\r\n" + content


def length(value: bytes, content: bytes = b"hello") -> bytes:
    return post(b"Content-Length: " + value + b"\r\n", content)


def coding(fields: bytes, content: bytes = b"5\r\nhello\r\n0\r\n\r\n") -> bytes:
    return post(fields, content)


def chunks(content: bytes) -> bytes:
    return post(b"Transfer-Encoding: chunked\r\n", content)


def line(text: bytes) -> bytes:
    return text + b"\r\n" + HOST + b"\r\n"


def path(text: bytes) -> bytes:
    return line(b"GET " + text + b" HTTP/1.1")


HELLO = (b"hello",)
EMPTY = (b"",)

REQUESTS = [
    RequestCase("base-get", "A", 0, get(), EMPTY),
    RequestCase("base-cl", "A", 0, length(b"5"), HELLO),
    RequestCase("base-chunked", "A", 0, chunks(b"5\r\nhello\r\n0\r\n\r\n"), HELLO),
    RequestCase("dup-cl-same", "E", 400, post(b"Content-Length: 5\r\nContent-Length: 5\r\n", b"hello")),
    RequestCase("dup-cl-diff", "R", 400, post(b"Content-Length: 5\r\nContent-Length: 6\r\n", b"hello")),
    RequestCase("cl-list-same", "E", 400, length(b"5, 5")),
    RequestCase("cl-plus", "R", 400, length(b"+5")),
    RequestCase("cl-neg", "R", 400, length(b"-5")),
    RequestCase("cl-underscore", "R", 400, length(b"0_5")),
    RequestCase("cl-hex", "R", 400, length(b"0x5")),
    RequestCase("cl-empty", "R", 400, length(b"")),
    RequestCase("cl-leading0", "E", 0, length(b"005"), HELLO),
    RequestCase("cl-huge-2^64", "R", 400, length(b"18446744073709551616")),
    RequestCase("cl-10k-digits", "R", 431, length(b"9" * 10_000)),
    RequestCase("cl-superscript", "R", 400, length("5\u00b2".encode("latin-1"))),
    RequestCase("cl-space-before-colon", "R", 400, post(b"Content-Length : 5\r\n", b"hello")),
    RequestCase(
        "cl-te",
        "R",
        400,
        post(b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\nG" + SMUGGLED),
    ),
    RequestCase(
        "te-cl",
        "R",
        400,
        post(b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n", b"5\r\nhello\r\n0\r\n\r\n"),
    ),
    RequestCase("te-xchunked", "R", 501, coding(b"Transfer-Encoding: xchunked\r\n")),
    RequestCase("te-chunked-upper", "A", 0, coding(b"Transfer-Encoding: CHUNKED\r\n"), HELLO),
    RequestCase("te-dup", "R", 400, coding(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n")),
    RequestCase("te-chunked-identity", "R", 400, coding(b"Transfer-Encoding: chunked, identity\r\n")),
    RequestCase("te-gzip-chunked", "E", 400, coding(b"Transfer-Encoding: gzip, chunked\r\n")),
    RequestCase(
        "te-identity", "R", 400, post(b"Transfer-Encoding: identity\r\nContent-Length: 5\r\n", b"hello")
    ),
    RequestCase("te-identity-nocl", "R", 400, post(b"Transfer-Encoding: identity\r\n", SMUGGLED)),
    RequestCase(
        "te-identity+chunked",
        "R",
        400,
        coding(b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n"),
    ),
    RequestCase("te-tab", "A", 0, coding(b"Transfer-Encoding:\tchunked\r\n"), HELLO),
    RequestCase("te-vtab", "R", 400, coding(b"Transfer-Encoding: \x0bchunked\r\n")),
    RequestCase("te-space-before-colon", "R", 400, coding(b"Transfer-Encoding : chunked\r\n")),
    RequestCase("te-leading-space-line", "R", 400, coding(b" Transfer-Encoding: chunked\r\n")),
    RequestCase("te-obsfold", "R", 400, coding(b"Transfer-Encoding:\r\n chunked\r\n")),
    RequestCase("te-quoted", "R", 400, coding(b'Transfer-Encoding: "chunked"\r\n')),
    RequestCase("te-param", "R", 400, coding(b"Transfer-Encoding: chunked;q=1\r\n")),
    RequestCase(
        "te-http10",
        "R",
        400,
        b"POST /v1 HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ),
    RequestCase(
        "te-http10-cl",
        "R",
        400,
        b"POST /v1 HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
    ),
    RequestCase("chunk-space-before-size", "R", 400, chunks(b" 5\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-space-after-size", "R", 400, chunks(b"5 \r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-0x", "R", 400, chunks(b"0x5\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-neg", "R", 400, chunks(b"-5\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-plus", "R", 400, chunks(b"+5\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-underscore", "R", 400, chunks(b"0_5\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-2^64+3", "R", 400, chunks(b"10000000000000003\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-17zeros", "E", 400, chunks(b"0" * 17 + b"5\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-ext", "A", 0, chunks(b'5;a=1;b="2"\r\nhello\r\n0;c\r\n\r\n'), HELLO),
    RequestCase("chunk-ext-lf", "R", 400, chunks(b"5;x\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-ext-cr", "R", 400, chunks(b"5;x\ry\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-ext-8k", "R", 400, chunks(b"5;" + b"x" * 8192 + b"\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-bare-lf-size", "R", 400, chunks(b"5\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-bare-lf-data", "R", 400, chunks(b"5\r\nhello\n0\r\n\r\n")),
    RequestCase("chunk-term-lf", "R", 400, chunks(b"5\r\nhello\r\n0\n\n")),
    RequestCase("chunk-extra-data", "R", 400, chunks(b"5\r\nhelloX\r\n0\r\n\r\n")),
    RequestCase("chunk-XX-crlf", "R", 400, chunks(b"5\r\nhelloXX0\r\n\r\n")),
    RequestCase("chunk-trailer-cl", "E", 0, chunks(b"5\r\nhello\r\n0\r\nContent-Length: 9\r\n\r\n"), HELLO),
    RequestCase("chunk-trailer-bad", "R", 400, chunks(b"5\r\nhello\r\n0\r\nnot a field\r\n\r\n")),
    RequestCase("chunk-trailer-nul", "R", 400, chunks(b"5\r\nhello\r\n0\r\nX: a\0b\r\n\r\n")),
    RequestCase("chunk-trailer-lf", "R", 400, chunks(b"5\r\nhello\r\n0\r\nX: a\n\r\n")),
    RequestCase("bare-lf-all", "E", 400, b"GET /v1/models HTTP/1.1\nHost: gw.example\n\n"),
    RequestCase("bare-lf-header", "R", 400, get(b"X-A: b\nX-C: d\r\n")),
    RequestCase("bare-cr-header", "R", 400, get(b"X-A: b\rX-C: d\r\n")),
    RequestCase("nul-header-value", "R", 400, get(b"X-A: b\0c\r\n")),
    RequestCase("nul-header-name", "R", 400, get(b"X\0A: b\r\n")),
    RequestCase("nul-path", "R", 400, path(b"/v1/\0")),
    RequestCase("ctl-header-value-x01", "R", 400, get(b"X-A: b\x01c\r\n")),
    RequestCase("del-header-value", "R", 400, get(b"X-A: b\x7fc\r\n")),
    RequestCase("obs-text-value", "A", 0, get(b"X-A: caf\xe9\r\n"), EMPTY),
    RequestCase("obs-fold", "R", 400, get(b"X-A: b\r\n Content-Length: 40\r\n")),
    RequestCase("header-no-colon", "R", 400, get(b"X-A b\r\n")),
    RequestCase("header-empty-name", "R", 400, get(b": b\r\n")),
    RequestCase("header-name-underscore-te", "E", 0, post(b"Transfer_Encoding: chunked\r\n"), EMPTY),
    RequestCase("header-name-utf8", "R", 400, get(b"X-\xc3\xa9: b\r\n")),
    RequestCase("leading-crlf", "A", 0, b"\r\n" + get(), EMPTY),
    RequestCase("leading-5crlf", "E", 400, b"\r\n" * 5 + get()),
    RequestCase("leading-space", "R", 400, b" " + get()),
    RequestCase("two-spaces-reqline", "R", 400, line(b"GET  /v1/models HTTP/1.1")),
    RequestCase("tab-reqline", "R", 400, line(b"GET\t/v1/models HTTP/1.1")),
    RequestCase("trailing-space-reqline", "R", 400, line(b"GET /v1/models HTTP/1.1 ")),
    RequestCase("http09", "R", 400, b"GET /v1/models\r\n"),
    RequestCase("http20-version", "R", 505, line(b"GET /v1/models HTTP/2.0")),
    RequestCase("http12-version", "E", 505, line(b"GET /v1/models HTTP/1.2")),
    RequestCase("lower-version", "R", 400, line(b"GET /v1/models http/1.1")),
    RequestCase("version-11.1", "R", 400, line(b"GET /v1/models HTTP/11.1")),
    RequestCase("method-lower", "E", 405, line(b"get /v1/models HTTP/1.1")),
    RequestCase("method-unknown", "E", 405, line(b"BREW /v1/models HTTP/1.1")),
    RequestCase("method-bad", "R", 400, line(b"G(T /v1/models HTTP/1.1")),
    RequestCase("path-0xff", "R", 400, path(b"/v1/\xff")),
    RequestCase("path-0xa0", "R", 400, path(b"/v1/\xa0")),
    RequestCase("path-fragment", "R", 400, path(b"/v1/models#x")),
    RequestCase("path-no-slash", "R", 400, path(b"v1/models")),
    RequestCase("absolute-form", "A", 0, path(b"http://gw.example/v1/models?a=1"), EMPTY),
    RequestCase("absolute-userinfo", "R", 400, path(b"http://me@gw.example/v1/models")),
    RequestCase("asterisk-get", "R", 405, path(b"*")),
    RequestCase("connect", "R", 405, line(b"CONNECT gw.example:443 HTTP/1.1")),
    RequestCase("host-missing", "R", 400, GET + b"X-A: b\r\n\r\n"),
    RequestCase("host-dup", "R", 400, get(HOST)),
    RequestCase("host-bad", "R", 400, GET + b"Host: gw.example/evil\r\n\r\n"),
    RequestCase("host-empty", "E", 400, GET + b"Host:\r\n\r\n"),
    RequestCase("get-with-body", "A", 400, get(b"Content-Length: 5\r\n") + b"hello"),
    RequestCase("connection-hdr-strip", "A", 0, get(b"Connection: X-Secret\r\nX-Secret: 1\r\n"), EMPTY),
    RequestCase("connection-close-list", "A", 0, get(b"Connection: keep-alive,close\r\n"), EMPTY),
    RequestCase("expect-unknown", "E", 417, post(b"Expect: magic\r\nContent-Length: 5\r\n", b"hello")),
    RequestCase(
        "expect-100-te-cl",
        "A",
        0,
        post(b"Expect: 100-continue\r\nTE: trailers\r\nContent-Length: 5\r\n", b"hello"),
        HELLO,
    ),
    RequestCase(
        "upgrade-h2c",
        "A",
        0,
        get(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"),
        EMPTY,
    ),
    RequestCase("h2-preface", "R", 505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    RequestCase("501-headers", "R", 431, get(b"".join(b"X-%d: a\r\n" % n for n in range(500)))),
    RequestCase("hdr-17k-line", "R", 431, get(b"Cookie: " + b"c" * 17_000 + b"\r\n")),
    RequestCase(
        "hdr-total-20k", "R", 431, get(b"".join(b"X-%03d: %b\r\n" % (n, b"a" * 93) for n in range(200)))
    ),
    RequestCase("uri-17k", "R", 414, path(b"/" + b"u" * 17_000)),
    RequestCase("pipelined-2", "A", 0, length(b"5") + get(), (b"hello", b"")),
    RequestCase("bad-hdr-then-more", "R", 400, get(b"X A: b\r\n") + SMUGGLED),
]

STRICTER = {"get-with-body"}
"""``A`` cases that our profile refuses all the same."""

MORE_REQUESTS = [
    RequestCase("tls-client-hello", "R", 400, b"\x16\x03\x01\x02\x00\x01\x00"),
    RequestCase("lf-first", "R", 400, b"\n" + get()),
    RequestCase("cr-first", "R", 400, b"\r" + get()),
    RequestCase("leading-4crlf", "A", 0, b"\r\n" * 4 + get(), EMPTY),
    RequestCase("crlf-between", "A", 0, length(b"5") + b"\r\n" + get(), (b"hello", b"")),
    RequestCase("cl-minus-zero", "R", 400, length(b"-0")),
    RequestCase("cl-two-numbers", "R", 400, length(b"5 5")),
    RequestCase("cl-16-digits", "R", 400, length(b"0000000000000005")),
    RequestCase("cl-15-digits", "A", 0, length(b"000000000000005"), HELLO),
    RequestCase("cl-arabic-digit", "R", 400, length("\u0665".encode())),
    RequestCase("cl-outer-white-space", "A", 0, length(b" \t5\t "), HELLO),
    RequestCase("cl-zero", "A", 0, length(b"0", b"") + get(), (b"", b"")),
    RequestCase("get-cl-zero", "A", 0, get(b"Content-Length: 0\r\n"), EMPTY),
    RequestCase("head-with-body", "R", 400, get(b"Content-Length: 1\r\n", b"HEAD /v1/models HTTP/1.1\r\n")),
    RequestCase("get-chunked", "R", 400, get(b"Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n"),
    RequestCase("post-without-length", "A", 0, post(b""), EMPTY),
    RequestCase(
        "delete-with-body",
        "A",
        0,
        line(b"DELETE /v1/x HTTP/1.1")[:-2] + b"Content-Length: 2\r\n\r\nhi",
        (b"hi",),
    ),
    RequestCase("options", "A", 0, line(b"OPTIONS /v1/chat/completions HTTP/1.1"), EMPTY),
    RequestCase("head", "A", 0, line(b"HEAD /v1/models HTTP/1.1"), EMPTY),
    RequestCase("trace", "R", 405, line(b"TRACE /v1/models HTTP/1.1")),
    RequestCase("put", "R", 405, line(b"PUT /v1/models HTTP/1.1")),
    RequestCase("options-asterisk", "R", 405, line(b"OPTIONS * HTTP/1.1")),
    # Legal white space, but llhttp alone objects; that is enough.
    RequestCase("te-trailing-tab", "E", 400, coding(b"Transfer-Encoding: chunked\t\r\n")),
    RequestCase("te-gzip", "R", 501, coding(b"Transfer-Encoding: gzip\r\n")),
    RequestCase("te-gzip-cl", "R", 400, post(b"Transfer-Encoding: gzip\r\nContent-Length: 5\r\n", b"hello")),
    RequestCase("te-empty", "R", 400, coding(b"Transfer-Encoding:\r\n")),
    RequestCase("te-chunked-chunked", "R", 400, coding(b"Transfer-Encoding: chunked, chunked\r\n")),
    RequestCase("te-comma", "R", 400, coding(b"Transfer-Encoding: ,chunked\r\n")),
    RequestCase("te-cr-inside", "R", 400, coding(b"X-Abc: \rxTransfer-Encoding: chunked\r\n")),
    RequestCase("te-nbsp", "R", 400, coding(b"Transfer-Encoding: \xa0chunked\r\n")),
    RequestCase("chunk-empty-size", "R", 400, chunks(b"\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-20-digits", "R", 400, chunks(b"f" * 20 + b"\r\nhello")),
    RequestCase("chunk-15-digits", "A", 0, chunks(b"0" * 14 + b"5\r\nhello\r\n000\r\n\r\n"), HELLO),
    RequestCase(
        "chunk-hex-cases",
        "A",
        0,
        chunks(b"a\r\n0123456789\r\nA\r\n0123456789\r\n0\r\n\r\n"),
        (b"0123456789" * 2,),
    ),
    RequestCase("chunk-ext-space", "R", 400, chunks(b"5 ;x\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-ext-nul", "R", 400, chunks(b"5;\0\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-cr-in-size", "R", 400, chunks(b"5\rX\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-cr-cr", "R", 400, chunks(b"5\r\nhello\r\r\n0\r\n\r\n")),
    RequestCase("chunk-data-short", "R", 400, chunks(b"6\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-ext-just-fits", "A", 0, chunks(b"5;" + b"x" * 254 + b"\r\nhello\r\n0\r\n\r\n"), HELLO),
    RequestCase("chunk-ext-one-over", "R", 400, chunks(b"5;" + b"x" * 255 + b"\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-ext-sum", "R", 400, chunks((b"1;" + b"x" * 250 + b"\r\na\r\n") * 17 + b"0\r\n\r\n")),
    RequestCase(
        "chunk-ext-sum-fits",
        "A",
        0,
        chunks((b"1;" + b"x" * 250 + b"\r\na\r\n") * 16 + b"0\r\n\r\n"),
        (b"a" * 16,),
    ),
    RequestCase("trailer-good", "A", 0, chunks(b"0\r\nX-Sum: 1\r\nX-B:\r\n\r\n") + get(), (b"", b"")),
    RequestCase("trailer-folded", "R", 400, chunks(b"0\r\nX: a\r\n b\r\n\r\n")),
    RequestCase("trailer-too-long", "R", 400, chunks(b"0\r\nX: " + b"a" * 2048 + b"\r\n\r\n")),
    RequestCase(
        "trailers-too-many-bytes", "R", 400, chunks(b"0\r\n" + b"X-Pad: aaaaaaaaaaaaaaaa\r\n" * 90 + b"\r\n")
    ),
    RequestCase("trailers-too-many", "R", 400, chunks(b"0\r\n" + b"X:\r\n" * 101 + b"\r\n")),
    RequestCase("trailers-100", "A", 0, chunks(b"0\r\n" + b"X:\r\n" * 100 + b"\r\n"), EMPTY),
    RequestCase(
        "trailer-te-never-merged", "A", 0, chunks(b"0\r\nTransfer-Encoding: x\r\n\r\n") + get(), (b"", b"")
    ),
    RequestCase(
        "chunked-then-pipelined", "A", 0, chunks(b"5\r\nhello\r\n0\r\n\r\n") + get(), (b"hello", b"")
    ),
    RequestCase("good-then-bad", "R", 400, length(b"5") + b"NOT HTTP\r\n\r\n", HELLO),
    RequestCase("path-dotdot", "R", 400, path(b"/v1/chat/../../slots")),
    RequestCase("path-dotdot-end", "R", 400, path(b"/v1/..")),
    RequestCase("path-dotdot-encoded", "R", 400, path(b"/v1/%2e%2e/metrics")),
    RequestCase("path-dotdot-half-encoded", "R", 400, path(b"/v1/.%2E/metrics")),
    RequestCase("path-encoded-slash", "R", 400, path(b"/v1%2fmodels")),
    RequestCase("path-encoded-backslash", "R", 400, path(b"/v1%5Cmodels")),
    RequestCase("path-encoded-nul", "R", 400, path(b"/v1/%00")),
    RequestCase("path-backslash", "R", 400, path(b"/v1\\models")),
    RequestCase("path-broken-escape", "R", 400, path(b"/v1/%zz")),
    RequestCase("path-cut-escape", "R", 400, path(b"/v1/%2")),
    RequestCase("path-escape", "A", 0, path(b"/v1/models/a%20b"), EMPTY),
    RequestCase("path-dots-in-name", "A", 0, path(b"/v1/models/a..b"), EMPTY),
    RequestCase("path-double-slash", "A", 0, path(b"//v1/models"), EMPTY),
    RequestCase("path-four-dots", "A", 0, path(b"/v1/....//admin"), EMPTY),
    RequestCase("query-anything", "A", 0, path(b"/v1?a=%2f..%00\\&b=//../&c"), EMPTY),
    RequestCase("query-fragment", "R", 400, path(b"/v1?a#b")),
    RequestCase("absolute-other-host", "R", 400, path(b"http://elsewhere.example/v1/models")),
    RequestCase("absolute-other-port", "R", 400, path(b"http://gw.example:81/v1/models")),
    RequestCase("absolute-case", "A", 0, path(b"HTTPS://GW.example/v1/models"), EMPTY),
    RequestCase("absolute-no-path", "A", 0, path(b"http://gw.example"), EMPTY),
    RequestCase("absolute-dotdot", "R", 400, path(b"http://gw.example/a/../b")),
    RequestCase("absolute-ftp", "R", 400, path(b"ftp://gw.example/")),
    RequestCase("absolute-no-host", "R", 400, path(b"http:///v1")),
    RequestCase("absolute-fragment", "R", 400, path(b"http://gw.example#x")),
    RequestCase("absolute-10-no-host", "R", 400, b"GET http://gw.example/ HTTP/1.0\r\n\r\n"),
    RequestCase("host-10-missing", "A", 0, b"GET / HTTP/1.0\r\n\r\n", EMPTY),
    RequestCase("host-10-dup", "R", 400, b"GET / HTTP/1.0\r\n" + HOST * 2 + b"\r\n"),
    RequestCase("host-port", "A", 0, GET + b"Host: 127.0.0.1:8443\r\n\r\n", EMPTY),
    RequestCase("host-ipv6", "A", 0, GET + b"Host: [::1]:8443\r\n\r\n", EMPTY),
    RequestCase("host-ipv6-bad", "R", 400, GET + b"Host: [::1:::]\r\n\r\n"),
    RequestCase("host-ipv6-bare", "R", 400, GET + b"Host: ::1\r\n\r\n"),
    RequestCase("host-space", "R", 400, GET + b"Host: a b\r\n\r\n"),
    RequestCase("host-comma", "R", 400, GET + b"Host: a.example, b.example\r\n\r\n"),
    RequestCase("host-at", "R", 400, GET + b"Host: me@gw.example\r\n\r\n"),
    RequestCase("host-long-port", "R", 400, GET + b"Host: a:123456\r\n\r\n"),
    RequestCase("host-255", "A", 0, GET + b"Host: " + b"h" * 255 + b"\r\n\r\n", EMPTY),
    RequestCase("host-256", "R", 400, GET + b"Host: " + b"h" * 256 + b"\r\n\r\n"),
    RequestCase(
        "authorization-dup", "R", 400, get(b"Authorization: Bearer a\r\nauthorization: Bearer b\r\n")
    ),
    RequestCase("x-api-key-dup", "R", 400, get(b"X-Api-Key: a\r\nx-api-key: b\r\n")),
    RequestCase("content-type-dup", "R", 400, get(b"Content-Type: a/b\r\nContent-Type: a/b\r\n")),
    RequestCase("accept-dup", "A", 0, get(b"Accept: a/b\r\nAccept: c/d\r\n"), EMPTY),
    RequestCase("value-empty", "A", 0, get(b"X-A:\r\nX-B: \t \r\n"), EMPTY),
    RequestCase(
        "expect-upper", "A", 0, post(b"Expect: 100-CONTINUE\r\nContent-Length: 5\r\n", b"hello"), HELLO
    ),
    RequestCase("expect-twice", "R", 417, get(b"Expect: 100-continue\r\nExpect: 100-continue\r\n")),
    RequestCase("expect-empty", "R", 417, get(b"Expect:\r\n")),
    RequestCase("connection-not-token", "R", 400, get(b"Connection: keep alive\r\n")),
    RequestCase("connection-empty-members", "A", 0, get(b"Connection: , ,close,\r\n"), EMPTY),
    RequestCase(
        "upgrade-websocket", "A", 0, get(b"Connection: Upgrade\r\nUpgrade: websocket\r\n") + get(), (b"", b"")
    ),
    RequestCase("uri-just-fits", "A", 0, path(b"/" + b"u" * 4082), EMPTY),
    RequestCase("uri-one-over", "R", 414, path(b"/" + b"u" * 4083)),
    RequestCase("uri-endless", "R", 414, b"GET /" + b"u" * 4092),
    RequestCase("header-just-fits", "A", 0, get(b"X: " + b"a" * 8189 + b"\r\n"), EMPTY),
    RequestCase("header-one-over", "R", 431, get(b"X: " + b"a" * 8190 + b"\r\n")),
    RequestCase("header-endless", "R", 431, GET + b"X: " + b"a" * 8190),
    RequestCase("headers-100", "A", 0, get(b"X-A: b\r\n" * 99), EMPTY),
    RequestCase("headers-101", "R", 431, get(b"X-A: b\r\n" * 100)),
    RequestCase("headers-total", "R", 431, get((b"X-A: " + b"b" * 8000 + b"\r\n") * 5)),
    RequestCase("headers-total-fits", "A", 0, get((b"X-A: " + b"b" * 8000 + b"\r\n") * 4), EMPTY),
    RequestCase("long-and-then-nul", "R", 431, get(b"X: " + b"a" * 8190 + b"\0\r\n")),
    RequestCase("nul-and-then-long", "R", 400, get(b"X: \0" + b"a" * 8190 + b"\r\n")),
    RequestCase("bad-line-and-then-many", "R", 400, get(b"X A\r\n" + b"X-A: b\r\n" * 101)),
    RequestCase("many-and-then-bad-line", "R", 431, get(b"X-A: b\r\n" * 101 + b"X A\r\n")),
]


HEAD = b"HTTP/1.1 200 OK\r\n"
TWO = b"Content-Length: 2\r\n"
FRAMING = "upstream_framing"
CUT = "upstream_truncated"

RESPONSES = [
    ResponseCase("ok", "A", "", HEAD + TWO + b"\r\nhi", b"hi", True),
    ResponseCase(
        "ok-chunked", "A", "", HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", b"hi", True
    ),
    ResponseCase(
        "cl-te", "R", FRAMING, HEAD + TWO + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    ),
    ResponseCase("dup-cl-diff", "R", FRAMING, HEAD + TWO + b"Content-Length: 3\r\n\r\nhi"),
    ResponseCase("dup-cl-same", "E", FRAMING, HEAD + TWO + TWO + b"\r\nhi"),
    ResponseCase("cl-list", "E", FRAMING, HEAD + b"Content-Length: 2, 2\r\n\r\nhi"),
    ResponseCase("cl-plus", "R", FRAMING, HEAD + b"Content-Length: +2\r\n\r\nhi"),
    ResponseCase("cl-neg", "R", FRAMING, HEAD + b"Content-Length: -2\r\n\r\nhi"),
    ResponseCase("cl-short-close", "R", CUT, HEAD + b"Content-Length: 20\r\n\r\nhi", b"hi"),
    ResponseCase(
        "chunk-short-close", "R", CUT, HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n", b"hi"
    ),
    ResponseCase(
        "te-xchunked", "R", FRAMING, HEAD + b"Transfer-Encoding: xchunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    ),
    ResponseCase(
        "te-identity-chunked",
        "R",
        FRAMING,
        HEAD + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    ),
    ResponseCase(
        "extra-after", "R", "", HEAD + TWO + b"\r\nhi" + HEAD + b"Content-Length: 4\r\n\r\nEVIL", b"hi", False
    ),
    ResponseCase("nul-header", "R", FRAMING, HEAD + b"X-A: b\0c\r\n" + TWO + b"\r\nhi"),
    ResponseCase("bare-cr", "R", FRAMING, HEAD + b"X-A: b\rc\r\n" + TWO + b"\r\nhi"),
    ResponseCase("obs-fold", "R", FRAMING, HEAD + b"X-A: b\r\n c\r\n" + TWO + b"\r\nhi"),
    ResponseCase("bare-lf", "R", FRAMING, b"HTTP/1.1 200 OK\nContent-Length: 2\n\nhi"),
    ResponseCase("space-colon", "R", FRAMING, HEAD + b"Content-Length : 2\r\n\r\nhi"),
    ResponseCase("bad-status", "R", FRAMING, b"HTTP/1.1 2000 OK\r\n" + TWO + b"\r\nhi"),
    ResponseCase("status-alpha", "R", FRAMING, b"HTTP/1.1 2x0 OK\r\n" + TWO + b"\r\nhi"),
    ResponseCase("http2-ver", "R", FRAMING, b"HTTP/2.0 200 OK\r\n" + TWO + b"\r\nhi"),
    ResponseCase("no-reason", "A", "", b"HTTP/1.1 200\r\n" + TWO + b"\r\nhi", b"hi", True),
    ResponseCase("junk", "R", FRAMING, b"This is not HTTP at all\r\n\r\n"),
    ResponseCase("204-body", "R", FRAMING, b"HTTP/1.1 204 No Content\r\n" + TWO + b"\r\nhi"),
    ResponseCase("100x50", "E", FRAMING, b"HTTP/1.1 100 Continue\r\n\r\n" * 50 + HEAD + TWO + b"\r\nhi"),
    ResponseCase(
        "101",
        "R",
        FRAMING,
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    ),
    ResponseCase("huge-header", "R", FRAMING, HEAD + b"X-A: " + b"a" * 40_960 + b"\r\n" + TWO + b"\r\nhi"),
    ResponseCase(
        "10k-headers",
        "R",
        FRAMING,
        HEAD + b"".join(b"X-%d: a\r\n" % n for n in range(10_000)) + TWO + b"\r\nhi",
    ),
    ResponseCase(
        "chunk-ext-lf", "R", FRAMING, HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;x\nhi\r\n0\r\n\r\n"
    ),
    ResponseCase(
        "trailer-cl",
        "E",
        "",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nContent-Length: 2\r\n\r\n",
        b"hi",
        True,
    ),
    ResponseCase("no-framing-close", "A", "", HEAD + b"\r\nhi", b"hi"),
]

CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"

MORE_RESPONSES = [
    ResponseCase("empty-reason", "A", "", b"HTTP/1.1 200 \r\n" + TWO + b"\r\nhi", b"hi", True),
    ResponseCase("obs-text-reason", "A", "", b"HTTP/1.1 200 \xe9t\xe9\r\n" + TWO + b"\r\nhi", b"hi", True),
    ResponseCase("http10", "A", "", b"HTTP/1.0 200 OK\r\n" + TWO + b"\r\nhi", b"hi", False),
    ResponseCase(
        "http10-keep-alive",
        "A",
        "",
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n" + TWO + b"\r\nhi",
        b"hi",
        True,
    ),
    ResponseCase("http10-chunked", "R", FRAMING, b"HTTP/1.0 200 OK\r\n" + CHUNKED + b"0\r\n\r\n"),
    ResponseCase("http12", "R", FRAMING, b"HTTP/1.2 200 OK\r\n" + TWO + b"\r\nhi"),
    ResponseCase("http09", "R", FRAMING, b"hello"),
    ResponseCase("status-099", "R", FRAMING, b"HTTP/1.1 099 X\r\n\r\n"),
    ResponseCase("status-600", "R", FRAMING, b"HTTP/1.1 600 X\r\n\r\n"),
    ResponseCase("status-two-spaces", "R", FRAMING, b"HTTP/1.1  200 OK\r\n\r\n"),
    ResponseCase("leading-crlf", "R", FRAMING, b"\r\n" + HEAD + TWO + b"\r\nhi"),
    ResponseCase("close", "A", "", HEAD + b"Connection: close\r\n" + TWO + b"\r\nhi", b"hi", False),
    ResponseCase(
        "close-in-list",
        "A",
        "",
        HEAD + b"Connection: x\r\nConnection: Keep-Alive,Close\r\n" + TWO + b"\r\nhi",
        b"hi",
        False,
    ),
    ResponseCase(
        "connection-not-token", "A", "", HEAD + b"Connection: keep alive\r\n" + TWO + b"\r\nhi", b"hi", False
    ),
    ResponseCase("length-0", "A", "", HEAD + b"Content-Length: 0\r\n\r\n", b"", True),
    ResponseCase("204", "A", "", b"HTTP/1.1 204 No Content\r\n\r\n", b"", True, 204),
    ResponseCase(
        "204-length-0", "A", "", b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", b"", True, 204
    ),
    ResponseCase("204-chunked", "R", FRAMING, b"HTTP/1.1 204 No Content\r\n" + CHUNKED + b"0\r\n\r\n"),
    ResponseCase("204-excess", "R", "", b"HTTP/1.1 204 No Content\r\n\r\nhi", b"", False, 204),
    ResponseCase(
        "304-length", "A", "", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", b"", True, 304
    ),
    ResponseCase("head-chunked", "A", "", HEAD + CHUNKED, b"", True, 200, "HEAD"),
    ResponseCase("head-length", "A", "", HEAD + b"Content-Length: 99\r\n\r\n", b"", True, 200, "HEAD"),
    ResponseCase("head-no-framing", "A", "", HEAD + b"\r\n", b"", True, 200, "HEAD"),
    ResponseCase("head-with-body", "R", "", HEAD + TWO + b"\r\nhi", b"", False, 200, "HEAD"),
    ResponseCase(
        "interim",
        "A",
        "",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
        + b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        + HEAD
        + TWO
        + b"\r\nhi",
        b"hi",
        True,
    ),
    ResponseCase(
        "interim-10", "A", "", b"HTTP/1.1 102 Processing\r\n\r\n" * 10 + HEAD + TWO + b"\r\nhi", b"hi", True
    ),
    ResponseCase(
        "interim-11", "R", FRAMING, b"HTTP/1.1 102 Processing\r\n\r\n" * 11 + HEAD + TWO + b"\r\nhi"
    ),
    ResponseCase(
        "interim-length", "R", FRAMING, b"HTTP/1.1 100 Continue\r\n" + TWO + b"\r\nhi" + HEAD + b"\r\n"
    ),
    ResponseCase("interim-then-close", "R", CUT, b"HTTP/1.1 100 Continue\r\n\r\n"),
    ResponseCase("nothing", "R", CUT, b""),
    ResponseCase("status-line-cut", "R", CUT, b"HTTP/1.1 20"),
    ResponseCase("head-cut", "R", CUT, HEAD + TWO),
    ResponseCase("chunk-cut", "R", CUT, HEAD + CHUNKED + b"5\r\nhi", b"hi"),
    ResponseCase("last-chunk-cut", "R", CUT, HEAD + CHUNKED + b"2\r\nhi\r\n0\r\n", b"hi"),
    ResponseCase("chunk-XX", "R", FRAMING, HEAD + CHUNKED + b"5\r\nhelloXX0\r\n\r\n", b"hello"),
    ResponseCase("chunk-excess", "R", "", HEAD + CHUNKED + b"2\r\nhi\r\n0\r\n\r\nEVIL", b"hi", False),
    ResponseCase("trailer", "A", "", HEAD + CHUNKED + b"2\r\nhi\r\n0\r\nX-T: 1\r\n\r\n", b"hi", True),
    ResponseCase("trailer-bad", "R", FRAMING, HEAD + CHUNKED + b"2\r\nhi\r\n0\r\nX T\r\n\r\n", b"hi"),
    ResponseCase("te-twice", "R", FRAMING, HEAD + b"Transfer-Encoding: chunked\r\n" + CHUNKED + b"0\r\n\r\n"),
    ResponseCase(
        "upgrade-offered",
        "A",
        "",
        HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + TWO + b"\r\nhi",
        b"hi",
        True,
    ),
    ResponseCase(
        "header-20k-fits", "A", "", HEAD + b"X-A: " + b"a" * 20_000 + b"\r\n" + TWO + b"\r\nhi", b"hi", True
    ),
    ResponseCase("headers-101", "R", FRAMING, HEAD + b"X-A: b\r\n" * 101 + b"\r\n"),
    ResponseCase("status-line-endless", "R", FRAMING, b"HTTP/1.1 200 " + b"a" * 33_000),
    ResponseCase("big-chunk-size", "R", FRAMING, HEAD + CHUNKED + b"1" * 16 + b"\r\n"),
]
