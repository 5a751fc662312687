"""A gateway driven through in-memory transports: no sockets, no kernel, nothing else.

The client's bytes go in, the backend answers at once, the answer's bytes come
out. What is left is the gateway's own work, with keys, local limits, metrics and
access log on; ``request_path.py``, ``curves.py`` and ``regression.py`` time it.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from twisted.internet import reactor
from twisted.internet.address import IPv4Address
from twisted.internet.testing import StringTransport

from llmgw.access import credentials, key_file
from llmgw.config import parse_config
from llmgw.service import GatewayService
from llmgw.wire.accepting import ClientFactory
from llmgw.wire.upstream import UpstreamConnection

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there. " * 6},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 16, "total_tokens": 26},
    }
).encode()
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(ANSWER),
    ANSWER,
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_DATA = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % (b"x" * 60)
)
EVENT = b"%x\r\n%b\r\n" % (len(_DATA), _DATA)
CONFIG = """
auth = ["keys:{keys}"]
{backends}
[router]
plugin = "{router}"
[[rate_limits]]
requests_per_minute = 1e9
tokens_per_minute = 1e12
concurrent = 100000
[limits]
in_flight = 100000
in_flight_per_key = 100000
[timeouts]
keepalive_requests = 1000000000
keepalive_age_s = 86400
[log]
access = "{log}"
"""
BACKEND = """
[[backends]]
id = "b{number}"
url = "http://127.0.0.1:{port}"
models = ["m"]
max_connections = 100000
"""


def _words(size: int) -> str:
    """Text of that size, as people write it: without blanks it would pass for an image."""
    words = "Which of the old rivers ran here before the mill was built? "
    return (words * (size // len(words) + 1))[:size]


class Wire(StringTransport):
    """A transport whose peer answers each write through ``answer``."""

    answer: Any = None

    def write(self, data: bytes) -> None:
        if self.answer is not None:
            self.answer(data)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """A peer that takes all that it is given, at once."""
        super().registerProducer(producer, streaming)
        while not streaming and self.producer is not None:
            producer.resumeProducing()

    def setTcpNoDelay(self, on: bool) -> None:
        """Nothing."""


class Rig:
    """One gateway, one client's connection, and an idle connection to each backend.

    :param folder: for the key file and the access log.
    :param backends: how many serve the model.
    :param keys: how many the key file holds; the client has the last.
    :param prompt_bytes: of the one message of a request.
    """

    def __init__(
        self,
        folder: str,
        *,
        backends: int = 1,
        keys: int = 1,
        prompt_bytes: int = 900,
        router: str = "expected-ttft",
        stream: bool = False,
    ) -> None:
        self.secret = self._make_keys(os.path.join(folder, "keys.toml"), keys)
        self.service = self._build(folder, backends, router)
        self._asked: UpstreamConnection | None = None
        for upstream in self.service.gateway.upstreams.values():
            self._connect(upstream.pool)
        self.out: list[bytes] = []
        self._client: Any = ClientFactory(self.service.site).buildProtocol(IPv4Address("TCP", "127.0.0.1", 1))
        wire = Wire()
        wire.answer = self._answered
        self._client.makeConnection(wire)
        asked = {"model": "m", "messages": [{"role": "user", "content": _words(prompt_bytes)}]}
        body = json.dumps(asked | ({"stream": True} if stream else {})).encode()
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n"
            b"Content-Type: application/json\r\n"
            b"Accept: application/json\r\nUser-Agent: benchmark\r\nAuthorization: Bearer %b\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (self.secret.encode(), len(body), body)
        )

    def ask(self) -> None:
        """One request and its answer."""
        self._client.dataReceived(self.request)
        self._backend().dataReceived(RESPONSE)
        self._end_turn()

    def begin_stream(self) -> None:
        """One request, and the head of a stream in answer."""
        self._client.dataReceived(self.request)
        self._backend().dataReceived(STREAM_HEAD)
        self._end_turn()

    def event(self) -> None:
        """One more event of the stream."""
        self._backend().dataReceived(EVENT)

    def check(self) -> None:
        """:raise AssertionError: the last answer was not a good one."""
        self.out.clear()
        self.ask()
        assert b" 200 OK" in self.out[-1], self.out[-1]

    @staticmethod
    def _end_turn() -> None:
        """What the event loop does when the events of a turn have been handled."""
        reactor.runUntilCurrent()  # type: ignore[attr-defined]

    def _backend(self) -> UpstreamConnection:
        assert self._asked is not None, self.out[-1:]
        return self._asked

    def _answered(self, data: bytes) -> None:
        self.out[:] = (data,)

    def _connect(self, pool: Any) -> None:
        connection = UpstreamConnection(pool)
        wire = Wire()

        def asked(data: bytes) -> None:
            self._asked = connection

        wire.answer = asked
        connection.makeConnection(wire)
        connection.deadline_s = float("inf")
        pool.idle.append(connection)

    @staticmethod
    def _make_keys(path: str, count: int) -> str:
        held: dict[str, key_file.Key] = {}
        secret = ""
        while len(held) < count:
            key_id = credentials.new_id()
            secret = credentials.new_key(key_id)
            hashed = f"sha256:{credentials.digest(secret).hex()}"
            held[key_id] = key_file.Key(id=key_id, name=f"k{len(held)}", hash=hashed)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(key_file.dump(key_file.KeyFile(held)))
        return secret

    @staticmethod
    def _build(folder: str, backends: int, router: str) -> GatewayService:
        """A gateway that is not started: nothing listens, nothing is watched."""
        tables = "".join(BACKEND.format(number=number, port=number + 1) for number in range(backends))
        text = CONFIG.format(
            keys=os.path.join(folder, "keys.toml"),
            backends=tables,
            router=router,
            log=os.path.join(folder, "access.log"),
        )
        service = GatewayService(parse_config(text, source="", base_dir=folder), reactor)
        assert service.gateway.access_log is not None
        service.gateway.access_log._open()
        return service


def least_us(work: Any, times: int, rounds: int = 5) -> float:
    """Microseconds of CPU of one ``work()``: the least of ``rounds`` means, each of a share of ``times``."""
    best = float("inf")
    each = max(1, times // rounds)
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(each):
            work()
        best = min(best, (time.process_time() - begun) / each)
    return best * 1e6
