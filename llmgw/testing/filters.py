"""The contract of request filters, as tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from twisted.internet.task import Clock

from llmgw.errors import GatewayError
from llmgw.interfaces import IRequestFilter, IRequestFilterFactory
from llmgw.testing.shared import FactoryContract, class_name, contract
from llmgw.values import Caller, Submission

CHAT = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "Good morning"}], "stream": True}
).encode()
FORM = "multipart/form-data; boundary=x"
_STRANGE = (
    b"{}",
    b'{"model":null,"messages":null}',
    b'{"messages":[[[[[["deep"]]]]]],"prompt":{"a":1},"input":[1,2,3]}',
    b'{"messages":[{"role":5,"content":[{"type":"image_url","image_url":{"url":"data:,x"}},7,null]}]}',
    '{"messages":[{"content":"\\ud83d\\ude00 \\u0000 \U0001f600 é"}],"":"",'.encode()
    + b'"n":-1e308,"x":true,"y":18446744073709551616}',
    b'{"prompt":"' + b"a " * 50_000 + b'"}',
    b"[" * 60 + b"]" * 60,
)


def submission(body: bytes = CHAT, **fields: Any) -> Submission:
    """A :class:`llmgw.values.Submission` of a small chat, changed by ``fields``."""
    return Submission(
        **{
            "id": "req-1",
            "route": "/v1/chat/completions",
            "model": "m",
            "target": "m",
            "body": body,
            "prompt_tokens": len(body) // 4,
            "streaming": True,
            **fields,
        }
    )


class RequestFilterContract(FactoryContract):
    """What every filter must keep, whatever it refuses.

    :cvar harmless: a body that the filter built with ``options`` lets through.
    """

    interface = IRequestFilterFactory
    product = IRequestFilter
    harmless = CHAT

    def build(self, options: Mapping[str, Any], clock: Clock) -> Any:
        """Filters get no clock."""
        return self.factory.build(options)

    def test_it_lets_harmless_requests_through(self) -> None:
        """Nothing is returned, time after time."""
        product = self.factory.build(self.options)
        for _ in range(3):
            answer = product.check(submission(self.harmless), Caller("anonymous"))
            assert answer is None, f"check returned {answer!r}"

    def test_every_body_ends_in_a_verdict(self) -> None:
        """Whatever the body is: it passes, or a ``GatewayError`` with a 4xx status is raised."""
        for body in _STRANGE:
            self._verdict(submission(body))

    def test_bodies_that_are_no_json_are_no_trouble(self) -> None:
        """Forms come as they are."""
        for body in (b"--x\r\n\r\n\xff\xfe\r\n--x--\r\n", b"", b"\x00" * 1000):
            self._verdict(submission(body, content_type=FORM, route="/v1/audio/transcriptions"))

    def test_any_caller_and_any_route(self) -> None:
        """Keys with and without scopes, paths of every API."""
        for caller in (Caller("anonymous"), Caller("k7m2p9xa", models=frozenset({"m"}))):
            for route in ("/v1/completions", "/v1/embeddings", "/v1/messages", "/completion", "/api/chat"):
                self._verdict(submission(route=route), caller)

    def test_the_verdict_does_not_depend_on_what_came_before(self) -> None:
        """A refused request leaves no trace in the next one's."""
        product = self.factory.build(self.options)
        first = [self._verdict(submission(body), product=product) for body in _STRANGE]
        again = [self._verdict(submission(body), product=product) for body in _STRANGE]
        assert first == again, "the same bodies got other verdicts the second time"

    def _verdict(self, sent: Submission, caller: Caller | None = None, product: Any = None) -> str:
        product = self.factory.build(self.options) if product is None else product
        answer, refusal = None, None
        try:
            answer = product.check(sent, caller or Caller("anonymous"))
        except GatewayError as error:
            refusal = error
        assert answer is None, f"check returned {answer!r}"
        if refusal is None:
            return ""
        assert 400 <= refusal.status < 500, f"a refusal with status {refusal.status}"
        assert refusal.message, "a refusal without a message"
        return f"{refusal.status} {refusal.code}"


def request_filter_contract(
    factory: Any, options: Mapping[str, Any] | None = None
) -> type[RequestFilterContract]:
    """Tests for ``factory``; ``options`` is its table of the config."""
    return contract(
        RequestFilterContract,
        class_name(factory, RequestFilterContract),
        factory=factory,
        options=options or {},
    )
