"""CPU of one request inside the process: no sockets, no kernel.

    python benchmarks/request_path.py [--profile] [--events] [--router NAME] [REQUESTS]

A gateway with keys, local limits, metrics and access log on is driven through
in-memory transports: the client's bytes go in, the backend answers at once, the
answer's bytes come out. What is left is our own Python, so a change's effect on
it can be seen without a load generator. Prints microseconds per request.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from twisted.internet import reactor
from twisted.internet.address import IPv4Address
from twisted.internet.testing import StringTransport

from llmgw.config import parse_config
from llmgw.service import GatewayService
from llmgw.tap import tune_collector
from llmgw.wire.accepting import ClientFactory
from llmgw.wire.upstream import UpstreamConnection

LLMGW = os.path.join(os.path.dirname(sys.executable), "llmgw")
SECRET = "benchmark-secret-0123456789"
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
[[backends]]
id = "b"
url = "http://127.0.0.1:1"
models = ["m"]
max_connections = 100
[[rate_limits]]
requests_per_minute = 1e9
tokens_per_minute = 1e12
concurrent = 1000
[timeouts]
keepalive_requests = 1000000000
keepalive_age_s = 86400
[log]
access = "{log}"
[router]
plugin = "{router}"
"""


class Wire(StringTransport):
    """A transport whose peer answers each write through ``answer``."""

    answer: Any = None

    def write(self, data: bytes) -> None:
        if self.answer is not None:
            self.answer(data)

    def setTcpNoDelay(self, on: bool) -> None:
        """Nothing."""


def build(folder: str, router: str) -> GatewayService:
    """A gateway that is not started: nothing listens, nothing is watched."""
    keys = os.path.join(folder, "keys.toml")
    secret = os.path.join(folder, "secret")
    with open(secret, "w") as file:
        file.write(SECRET)
    os.chmod(secret, 0o600)
    subprocess.run(
        [LLMGW, "keys", "new", "--file", keys, "--secret-file", secret, "b"], check=True, capture_output=True
    )
    text = CONFIG.format(keys=keys, log=os.path.join(folder, "access.log"), router=router)
    service = GatewayService(parse_config(text, source="", base_dir=folder), reactor)
    assert service.gateway.access_log is not None
    service.gateway.access_log._open()
    return service


def main() -> None:
    tune_collector()
    parser = argparse.ArgumentParser()
    parser.add_argument("requests", nargs="?", type=int, default=5000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--events", action="store_true", help="count events of one stream in place of requests"
    )
    parser.add_argument("--router", default="expected-ttft")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        service = build(folder, options.router)
        pool = service.gateway.upstreams["b"].pool
        backend = UpstreamConnection(pool)
        queue: list[bytes] = []
        wire = Wire()
        wire.answer = queue.append
        backend.makeConnection(wire)
        backend.deadline_s = float("inf")
        pool.idle.append(backend)
        client = ClientFactory(service.site).buildProtocol(IPv4Address("TCP", "127.0.0.1", 1))
        assert client is not None
        out: list[bytes] = []
        client_wire = Wire()
        client_wire.answer = out.append
        client.makeConnection(client_wire)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 900}]}).encode()
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n"
            b"Content-Type: application/json\r\n"
            b"Accept: application/json\r\nUser-Agent: benchmark\r\nAuthorization: Bearer %b\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (SECRET.encode(), len(body), body)
        )

        def once() -> None:
            client.dataReceived(request)
            queue.clear()
            backend.dataReceived(RESPONSE)

        if options.events:
            client.dataReceived(request)
            backend.dataReceived(STREAM_HEAD)
            once = lambda: backend.dataReceived(EVENT)  # noqa: E731
        for _ in range(200):
            once()
        assert options.events or b" 200 OK" in out[-1], out[-1]
        if options.profile:
            import cProfile

            profile = cProfile.Profile()
            profile.enable()
        best = float("inf")
        for _ in range(5):
            begun = time.process_time()
            for _ in range(options.requests // 5):
                once()
            best = min(best, (time.process_time() - begun) / (options.requests // 5))
        if options.profile:
            profile.disable()
            profile.create_stats()
            profile.print_stats("tottime")
        print(f"{best * 1e6:.1f} us of CPU per {'event' if options.events else 'request'}")


if __name__ == "__main__":
    main()
