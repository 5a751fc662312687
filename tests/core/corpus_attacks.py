"""More requests that were sent to break servers: what later papers and advisories added.

:source: James Kettle, "HTTP desync attacks" (2019, 2021, 2025: TE.TE, CL.0, Expect);
    Ben Kallus and Prashant Anantharaman, chunk extensions that end in LF (2025);
    Narf Industries, "HTTP garden" (odd terminators, signs, digits); CWE-444.
"""

from __future__ import annotations

from corpus import (
    EMPTY,
    GET,
    HELLO,
    HOST,
    POST,
    SMUGGLED,
    RequestCase,
    chunks,
    coding,
    get,
    length,
    line,
    path,
    post,
)

ATTACKS = [
    # Transfer-Encoding, hidden from one of two readers.
    RequestCase("te-te-cow", "R", 400, coding(b"Transfer-Encoding: chunked\r\nTransfer-encoding: cow\r\n")),
    RequestCase("te-te-x-first", "R", 400, coding(b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n")),
    RequestCase("te-behind-lf", "R", 400, coding(b"X: y\nTransfer-Encoding: chunked\r\n")),
    RequestCase("te-behind-cr", "R", 400, coding(b"X: y\rTransfer-Encoding: chunked\r\n")),
    RequestCase("te-name-tab", "R", 400, coding(b"Transfer-Encoding\t: chunked\r\n")),
    RequestCase("te-name-nul", "R", 400, coding(b"Transfer\0-Encoding: chunked\r\n")),
    RequestCase("te-nul-behind", "R", 400, coding(b"Transfer-Encoding: chunked\0\r\n")),
    RequestCase("te-form-feed", "R", 400, coding(b"Transfer-Encoding: \x0cchunked\r\n")),
    RequestCase("te-semicolon", "R", 400, coding(b"Transfer-Encoding: chunked;\r\n")),
    RequestCase("te-unicode-k", "R", 400, coding(b"Transfer-Encoding: chun\xe2\x84\xaaed\r\n")),
    RequestCase("te-mixed-case", "A", 0, coding(b"tRANSFER-eNCODING: ChUnKeD\r\n"), HELLO),
    RequestCase(
        "te-nominated",
        "A",
        0,
        coding(b"Connection: transfer-encoding\r\nTransfer-Encoding: chunked\r\n"),
        HELLO,
    ),
    # Content-Length, read as another number or not at all.
    RequestCase(
        "cl-nominated", "A", 0, post(b"Connection: content-length\r\nContent-Length: 5\r\n", b"hello"), HELLO
    ),
    RequestCase(
        "cl-0-a-request-as-body",
        "A",
        0,
        length(b"%d" % (len(SMUGGLED) + 1), SMUGGLED + b"."),
        (SMUGGLED + b".",),
    ),
    RequestCase("cl-dup-case", "R", 400, post(b"CONTENT-length: 5\r\ncontent-LENGTH: 6\r\n", b"hello!")),
    RequestCase("cl-folded", "R", 400, post(b"Content-Length:\r\n 5\r\n", b"hello")),
    RequestCase("cl-float", "R", 400, length(b"5.0")),
    RequestCase("cl-exponent", "R", 400, length(b"5e0")),
    RequestCase("cl-semicolon", "R", 400, length(b"5;")),
    RequestCase("cl-form-feed", "R", 400, length(b"5\x0c")),
    RequestCase("cl-nul", "R", 400, length(b"5\0")),
    RequestCase("cl-nbsp", "R", 400, length(b"5\xa0")),
    RequestCase("cl-leading-comma", "R", 400, length(b",5")),
    RequestCase("cl-trailing-comma", "R", 400, length(b"5,")),
    RequestCase("cl-full-width-digit", "R", 400, length("\uff15".encode())),
    RequestCase("cl-underscore-name", "A", 0, post(b"Content_Length: 5\r\n"), EMPTY),
    # Chunks, ended where only one of two readers ends them.
    RequestCase("chunk-ext-lf-behind", "R", 400, chunks(b"2;\nxx\r\n5\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-lf-then-ext", "R", 400, chunks(b"5\n;x\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-ext-cr-behind", "R", 400, chunks(b"5;\rx\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-lf-cr", "R", 400, chunks(b"5\n\rhello\r\n0\r\n\r\n")),
    RequestCase("chunk-form-feed", "R", 400, chunks(b"5\x0c\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-nul", "R", 400, chunks(b"5\0\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-g", "R", 400, chunks(b"5g\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-h", "R", 400, chunks(b"5h\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-comma", "R", 400, chunks(b"5,5\r\nhello\r\n0\r\n\r\n")),
    RequestCase("chunk-minus-0", "R", 400, chunks(b"5\r\nhello\r\n-0\r\n\r\n")),
    RequestCase(
        "chunk-last-without-crlf", "R", 400, chunks(b"5\r\nhello\r\n0\r\nGET /smug HTTP/1.1\r\n\r\n")
    ),
    RequestCase("chunk-end-lf-only", "R", 400, chunks(b"5\r\nhello\r\n0\r\n\n" + SMUGGLED)),
    RequestCase("chunk-then-junk", "R", 405, chunks(b"5\r\nhello\r\n0\r\n\r\nX" + SMUGGLED), HELLO),
    RequestCase("trailer-host", "A", 0, chunks(b"5\r\nhello\r\n0\r\nHost: evil.example\r\n\r\n"), HELLO),
    RequestCase("trailer-space-colon", "R", 400, chunks(b"5\r\nhello\r\n0\r\nX : a\r\n\r\n")),
    # Expect, upgrades, closing: where the next request begins.
    RequestCase("expect-odd", "R", 417, post(b"Expect: y 100-continue\r\nContent-Length: 5\r\n", b"hello")),
    RequestCase(
        "expect-then-next",
        "A",
        0,
        post(b"Expect: 100-continue\r\nContent-Length: 5\r\n", b"hello") + get(),
        (b"hello", b""),
    ),
    RequestCase(
        "upgrade-with-body",
        "A",
        0,
        post(
            b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: %d\r\n" % len(SMUGGLED), SMUGGLED
        ),
        (SMUGGLED,),
    ),
    RequestCase(
        "10-keep-alive-two",
        "A",
        0,
        (b"GET /v1/models HTTP/1.0\r\nConnection: keep-alive\r\n\r\n") * 2,
        (b"", b""),
    ),
    # Hosts that name two places.
    RequestCase("host-second-spaced", "R", 400, get(b"host : evil.example\r\n")),
    RequestCase("host-two-ports", "R", 400, GET + b"Host: gw.example:80:81\r\n\r\n"),
    RequestCase("host-backslash", "R", 400, GET + b"Host: gw.example\\evil\r\n\r\n"),
    RequestCase("host-query", "R", 400, GET + b"Host: gw.example?x\r\n\r\n"),
    RequestCase("host-fragment", "R", 400, GET + b"Host: gw.example#@evil\r\n\r\n"),
    RequestCase("host-ctl", "R", 400, GET + b"Host: gw.example\x01\r\n\r\n"),
    RequestCase("host-tab", "R", 400, GET + b"Host: gw.example\tevil\r\n\r\n"),
    RequestCase("host-folded", "R", 400, GET + b"Host: gw.example\r\n evil\r\n\r\n"),
    # Request lines.
    RequestCase("line-form-feed", "R", 400, line(b"GET\x0c/v1/models\x0cHTTP/1.1")),
    RequestCase("line-vertical-tab", "R", 400, line(b"GET\x0b/v1/models\x0bHTTP/1.1")),
    RequestCase("line-method-nul", "R", 400, line(b"GET\0 /v1/models HTTP/1.1")),
    RequestCase("line-method-alone", "R", 400, line(b"GET")),
    RequestCase("line-method-endless", "R", 405, line(b"G" * 300 + b" /v1/models HTTP/1.1")),
    RequestCase("line-version-more", "R", 400, line(b"GET /v1/models HTTP/1.1x")),
    RequestCase("line-version-cr-cr", "R", 400, b"GET /v1/models HTTP/1.1\r\r\n" + HOST + b"\r\n"),
    RequestCase("line-four-words", "R", 400, line(b"GET /v1/models HTTP/1.1 HTTP/1.1")),
    RequestCase("line-post-lf", "R", 400, POST[:-2] + b"\n" + HOST + b"\r\n"),
    RequestCase("path-semicolon", "A", 0, path(b"/v1/models;a=b"), EMPTY),
    RequestCase("path-crlf-encoded", "E", 0, path(b"/v1/models%0d%0aX:y"), EMPTY),
    RequestCase("path-double-encoded", "A", 0, path(b"/v1/%252e%252e/slots"), EMPTY),
    RequestCase("path-overlong-utf8", "R", 400, path(b"/v1/\xc0\xae\xc0\xae/slots")),
    # Other protocols at the door.
    RequestCase("ssh", "R", 400, b"SSH-2.0-OpenSSH_9.6\r\n"),
    RequestCase("smtp", "R", 400, b"EHLO client.example\r\n"),
    RequestCase("redis", "R", 400, b"*1\r\n$4\r\nPING\r\n"),
    RequestCase("proxy-v1", "R", 400, b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n" + get()),
    RequestCase("proxy-v2", "R", 400, b"\r\n\r\n\x00\r\nQUIT\n" + b"\x21\x11\x00\x0c" + b"\0" * 12 + get()),
    RequestCase("rtsp", "R", 400, b"OPTIONS * RTSP/1.0\r\nCSeq: 1\r\n\r\n"),
    # Lines that are no fields.
    RequestCase("field-name-paren", "R", 400, get(b"X(A): b\r\n")),
    RequestCase("field-name-quote", "R", 400, get(b'"X": b\r\n')),
    RequestCase("field-cr-alone", "R", 400, get(b"\r\r\n")),
    RequestCase("field-name-high", "R", 400, get(b"\x80X: b\r\n")),
    RequestCase("field-value-esc", "R", 400, get(b"X: \x1b[31m\r\n")),
    RequestCase("field-tab-inside", "A", 0, get(b"X: a\tb\r\n"), EMPTY),
]
