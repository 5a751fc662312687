"""What is fuzzed: one function for each reader of foreign bytes.

A target takes any bytes and returns; whatever it raises is a find. It raises itself
where two ways of reading the same bytes differ. ``fuzz_run.py`` runs one under atheris,
``test_fuzz.py`` all of them.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "core"))

from llmgw.access import key_file
from llmgw.config import parse_config
from llmgw.core.assemble import Assembler
from llmgw.core.body import estimate_tokens, read_json
from llmgw.core.caps import check_caps, clamp_options
from llmgw.core.http import HttpFault
from llmgw.core.meter import Meter
from llmgw.core.multipart import read_multipart, splice_multipart
from llmgw.core.prompt import prefix_of
from llmgw.core.proxy_header import ProxyFault, ProxyReader
from llmgw.core.request_reader import RequestReader
from llmgw.core.response_reader import ResponseReader
from llmgw.core.splicing import REMOVE, clamp_output, splice
from llmgw.core.sse import UsageStripper
from llmgw.discovery.etcd_protocol import EtcdError, Mirror, error_of
from llmgw.errors import ConfigError, InvalidRequest
from llmgw.health.model_list import read_model_list
from llmgw.values import Caps

TARGETS: dict[str, Callable[[bytes], None]] = {}
SEEDS: dict[str, list[bytes]] = {}
EVERYTHING = Caps(1, 1, 1, 0, 0, 0, False, 1)


def target(*seeds: bytes) -> Callable[[Callable[[bytes], None]], Callable[[bytes], None]]:
    """Offer a target, with what its fuzzing begins from."""

    def offer(function: Callable[[bytes], None]) -> Callable[[bytes], None]:
        TARGETS[function.__name__] = function
        SEEDS[function.__name__] = list(seeds)
        return function

    return offer


class _Sink:
    """Writes down what a reader tells; content of one message joined."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def head_received(self, head: Any) -> None:
        self.told.append((getattr(head, "status", 0), sorted(head.headers)))

    def body_received(self, data: bytes) -> None:
        if self.told and isinstance(self.told[-1], bytes):
            data = self.told.pop() + data
        self.told.append(data)

    def request_received(self) -> None:
        self.told.append("end")

    response_received = request_received


def _cut(data: bytes) -> tuple[bytes, bytes]:
    """At a place that the first byte names."""
    if not data:
        return b"", b""
    at = 1 + data[0] * len(data) // 256
    return data[:at], data[at:]


def _read_requests(*pieces: bytes) -> list[Any]:
    sink = _Sink()
    reader = RequestReader(sink)
    try:
        for piece in pieces:
            reader.feed(piece)
            while reader.state == "done":
                reader.resume()
    except HttpFault as fault:
        sink.told.append((fault.status, fault.code))
    return sink.told


@target(
    b"\x10POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi",
    b"\xa0POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2;x=1\r\nhi\r\n0\r\nA: b\r\n\r\n",
    b"\x40GET /v1/models?a=b HTTP/1.0\r\nConnection: keep-alive, close\r\n\r\nGET / HTTP/1.1\r\n",
)
def requests(data: bytes) -> None:
    message = data[1:]
    first, second = _cut(data)
    whole, cut = _read_requests(message), _read_requests(first[1:], second)
    assert whole == cut, (whole, cut)


@target(
    b"\x10HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    b"\x90HTTP/1.1 100 A\r\n\r\nHTTP/1.1 200 B\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    b"\x33HTTP/1.0 204 No Content\r\nKeep-Alive: timeout=5\r\nConnection: keep-alive\r\n\r\n",
)
def responses(data: bytes) -> None:
    def read(*pieces: bytes) -> list[Any]:
        sink = _Sink()
        reader = ResponseReader(sink)
        reader.begin("POST")
        try:
            for piece in pieces:
                reader.feed(piece)
            reader.eof()
        except HttpFault as fault:
            sink.told.append((fault.status, fault.code))
        return sink.told

    first, second = _cut(data)
    whole, cut = read(data[1:]), read(first[1:], second)
    assert whole == cut, (whole, cut)


_TYPES = (b"text/event-stream", b"application/x-ndjson", b"application/json", b"audio/wav", None)
_DIALECTS = ("chat", "completion", "native", "responses", "messages", "embedding", "other")


@target(
    b'\x00\x00data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n',
    b'\x00\x04event: message_start\ndata: {"type":"message_start","message":{"usage":{}}}\n\n',
    b'\x01\x06{"message":{"content":"a"},"done":true,"eval_count":3,"eval_duration":5}\n',
    b'\x02\x00{"usage":{"prompt_tokens":3,"completion_tokens":1},"timings":{"prompt_n":3}}',
)
def meter(data: bytes) -> None:
    kind, dialect = _TYPES[data[0] % 5] if data else None, _DIALECTS[data[1] % 7] if data[1:] else "other"
    body = data[2:]

    def watch(*pieces: bytes) -> tuple[Any, ...]:
        subject = Meter(dialect)
        subject.begin(200, kind, 0.0)
        for piece in pieces:
            if piece:
                subject.feed(piece, 1.0)
        subject.end(2.0)
        subject.estimated_usage(3)
        return subject.usage, subject.finished, subject.closed, subject.error, subject.events

    first, second = _cut(body)
    whole, cut = watch(body), watch(first, second)
    assert whole == cut, (whole, cut)


@target(
    b'data: {"choices":[{"index":0,"delta":{"content":"a","tool_calls":[{"index":0}]}}]}\n\ndata: [DONE]\n\n',
    b'data: {"index":0,"content":"a","tokens":[1],"stop":true}\n\n',
)
def assembled(data: bytes) -> None:
    for dialect in ("chat", "completion", "native"):
        subject = Assembler(dialect)
        for piece in _cut(data):
            subject.feed(piece)
        subject.end()
        if subject.error is None and subject.fault is None and subject.complete:
            subject.result()


@target(b'data: {"choices":[],"usage":{"total_tokens":1}}\r\n\r\ndata: {"choices":[{}]}\n\n')
def stripped(data: bytes) -> None:
    def strip(*pieces: bytes) -> bytes:
        subject = UsageStripper()
        return b"".join([subject.feed(piece) for piece in pieces]) + subject.end()

    whole, cut = strip(data), strip(*_cut(data))
    assert whole == cut, (whole, cut)


@target(
    b'{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":5,"n":1,"stop":["a"]}',
    b'{"mod\\u0065l":"m","stream":true,"stream_options":{"include_usage":true},"options":{"stop":"a"}}',
    b'{"model":"m","input":[1,2,3],"grammar":"x","response_format":{"type":"json_schema"}}',
)
def bodies(data: bytes) -> None:
    try:
        ask = read_json(data, require_model=False)
    except InvalidRequest:
        return
    changes = {**clamp_output(ask, 3), "model": "other", "stop": REMOVE}
    again = read_json(splice(data, changes))
    assert again.model == "other"
    assert again.max_tokens is None or again.max_tokens <= 3, again
    prefix_of(data, "m")
    clamp_options(data, 3)
    try:
        check_caps(EVERYTHING, ask, estimate_tokens(ask), data)
    except InvalidRequest:
        pass


@target(
    b"multipart/form-data; boundary=x\n--x\r\n"
    b'content-disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n',
    b'multipart/form-data; boundary="x y"\n--x y\r\nContent-Disposition: form-data; name=file\r\n\r\n',
)
def forms(data: bytes) -> None:
    content_type, _, body = data.partition(b"\n")
    text = content_type.decode("latin-1")
    try:
        ask = read_multipart(body, text)
    except InvalidRequest:
        return
    assert read_multipart(splice_multipart(body, text, "other"), text).model == "other", ask


class _AnyFile:
    def read(self, path: str) -> bytes:
        return b"a-word\n"

    def mode(self, path: str) -> int:
        return stat.S_IFREG | 0o600


@target(
    b'listen = ["tcp:1:interface=127.0.0.1"]\n[limits]\nn = 3\n[[backends]]\nid = "a"\nurl = "http://b:1/v1/"\n',
    (Path(__file__).parents[1] / "etc" / "llmgw.example.toml").read_bytes(),
)
def configuration(data: bytes) -> None:
    try:
        parse_config(data.decode("utf-8", "replace"), source="x", base_dir="/etc", files=_AnyFile())
    except ConfigError as error:
        str(error)


@target(
    b'[keys.a]\nname = "a"\nhash = "sha256:'
    + b"0" * 64
    + b'"\nmodels = ["m"]\nexpires = 2027-01-31T12:00:00Z\n'
)
def keys(data: bytes) -> None:
    try:
        file = key_file.parse(data.decode("utf-8", "replace"))
    except ConfigError:
        return
    assert key_file.parse(key_file.dump(file)) == file
    for key in file.keys.values():
        key.caller()


@target(b'{"data":[{"id":"m","meta":{"n_ctx_train":5}}]}', b'{"models":[{"name":"m"}],"data":[]}')
def model_lists(data: bytes) -> None:
    read_model_list(data)


@target(
    b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\nGET /",
    b"\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c\x0a\x00\x00\x01\x0a\x00\x00\x02\x00\x01\x00\x02GET /",
)
def proxy_headers(data: bytes) -> None:
    def read(*pieces: bytes) -> Any:
        reader = ProxyReader()
        for place, piece in enumerate(pieces):
            try:
                header = reader.feed(piece)
            except ProxyFault:
                return "fault"
            if header is not None:
                return header, reader.rest + b"".join(pieces[place + 1 :])
        return None

    whole, cut = read(data), read(*_cut(data))
    assert whole == cut, (whole, cut)


@target(
    b'{"header":{"revision":"5"},"kvs":[{"key":"L2EvYg==","value":"e30=","mod_revision":"3"}]}\n'
    b'{"result":{"header":{"revision":"6"},"events":[{"kv":{"key":"L2EvYg=="},"type":"DELETE"}]}}',
    b'{"result":{"created":true,"header":{}}}\n{"result":{"canceled":true,"compact_revision":"9"}}',
)
def etcd_stream(data: bytes) -> None:
    import msgspec

    mirror = Mirror(b"/a/")
    for number, line in enumerate(data.split(b"\n")):
        try:
            message = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError):
            continue
        if not isinstance(message, dict):
            error_of(message)
            continue
        try:
            if number == 0:
                mirror.load(message)
            else:
                mirror.take(message)
        except EtcdError:
            pass
