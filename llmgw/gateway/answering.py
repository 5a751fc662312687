"""How a client is answered: the headers every answer carries, errors, broken-off streams."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llmgw.errors import GatewayError, UpstreamError
from llmgw.gateway import answers
from llmgw.gateway.backend_http import passed_lines, without_limits
from llmgw.gateway.routes import ANTHROPIC, OLLAMA, errors_of
from llmgw.wire.incoming import header_lines

if TYPE_CHECKING:
    from llmgw.core.http import ResponseHead
    from llmgw.core.meter import Meter
    from llmgw.gateway.account import Account
    from llmgw.gateway.gateway import Gateway
    from llmgw.gateway.routes import Route
    from llmgw.values import Caller, Decision
    from llmgw.wire.incoming import Headers, Incoming

_ALLOWED_HEADERS = b"authorization, content-type, x-api-key"
_EXPOSED_HEADERS = b", ".join(
    [
        b"x-request-id, retry-after, retry-after-ms, x-should-retry, x-llmgw-backend, x-llmgw-decision",
        b"ratelimit, ratelimit-policy",
        *(
            b"x-ratelimit-%b-requests, x-ratelimit-%b-tokens" % (name, name)
            for name in (b"limit", b"remaining", b"reset")
        ),
    ]
)
_STREAM_LINES = b"content-type: text/event-stream\r\ncache-control: no-cache\r\n"
_PINGS = {ANTHROPIC: b'event: ping\ndata: {"type": "ping"}\n\n'}
"""Keep-alive events of Anthropic streams; all others get a comment."""
_unprintable = re.compile(rb"[^\x20-\x7e]")
"""In a router's reason such a byte could end the header line and begin another."""


class Answering:
    """The answering side of one exchange. The exchange ends the answers that are started here.

    :ivar route: set once the path is known; errors are in its dialect.
    :ivar caller: set once it is known.
    :ivar decision: the limiter's, for the rate limit headers.
    :ivar broken: the answer has begun and cannot be completed.
    :ivar opened: a stream was begun before any backend was asked (:meth:`sign_of_life`).
    """

    __slots__ = (
        "account",
        "broken",
        "caller",
        "decision",
        "gateway",
        "incoming",
        "opened",
        "route",
    )

    def __init__(self, gateway: Gateway, incoming: Incoming, account: Account) -> None:
        self.gateway = gateway
        self.incoming = incoming
        self.account = account
        self.route: Route | None = None
        self.caller: Caller | None = None
        self.decision: Decision | None = None
        self.broken = False
        self.opened = False

    def sign_of_life(self) -> None:
        """Begin or continue a stream without content, for a client that has asked for it while it
        waits. The status is sent with that; whatever goes wrong later is sent as an event."""
        incoming = self.incoming
        if not incoming.started:
            self.opened = True
            incoming.start(200, _STREAM_LINES + self._our_lines(), None)
        if self.route is not None:
            incoming.send(_PINGS.get(self.route.errors, b": loading\n\n"))

    def begin(self, status: int, head: ResponseHead, length: int | None, *, streamed: bool) -> None:
        """Start passing on a backend's response."""
        if self.opened:
            self.opened = False
            return
        lines = passed_lines(head, streamed=streamed, limits=self.decision is None)
        self.incoming.start(status, lines + self._our_lines(), 0 if status in (204, 304) else length)
        self.decision = None  # it has been sent, and a stream may last

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Give a whole answer; it is sent when the exchange ends."""
        if self.opened:
            self.break_off(answers.error_from_answer(status, body), None)
            return
        if self.decision is not None:
            headers = without_limits(headers)
        self.incoming.start(status, header_lines(headers) + self._our_lines(), len(body))
        if body:
            self.incoming.hold(body)

    def answer_json(self, status: int, headers: Headers, body: bytes) -> None:
        """Give a whole answer of JSON."""
        self.answer(status, [answers.JSON, *headers], body)

    def refuse(self, error: GatewayError) -> None:
        """Send ``error`` to the client: by a status if none was sent yet, else within the stream."""
        self.account.outcome = error.code
        self.gateway.metrics.rejected(error.code)
        if self.incoming.started:
            self.break_off(error, self.account.meter)
            return
        dialect = self.route.errors if self.route is not None else errors_of(self.incoming.head.path)
        self.answer(error.status, answers.error_headers(error), answers.error_body(error, dialect))

    def give_up(self) -> None:
        """Answer after a bug, ours or a plugin's. The limiter's decision is not sent: it may be the cause."""
        self.decision = None
        self.refuse(GatewayError("the gateway failed; see its log"))

    def break_off(self, error: GatewayError, meter: Meter | None) -> None:
        """An answer that has begun cannot be completed: send the error as an event, and cut the answer."""
        self.account.outcome = "cut" if isinstance(error, UpstreamError) else error.code
        self.broken = True
        if self.opened and self.route is not None:
            self.opened = False
            self.incoming.send(
                answers.error_event(error, self.route.errors, self.route.dialect, inside_event=False)
            )
            return
        if meter is None or self.route is None:
            return
        if meter.kind == "sse" or (meter.kind == "ndjson" and self.route.errors == OLLAMA):
            self.incoming.send(
                answers.error_event(
                    error,
                    self.route.errors,
                    self.route.dialect,
                    inside_event=meter.cut_in_event,
                    number=meter.events,
                )
            )

    def counts_tokens(self) -> bool:
        """Whether some limit of this caller is in tokens."""
        policies = self.caller.policies if self.caller is not None else ()
        return self.gateway.counts_tokens or any(policy.tokens_per_minute for policy in policies)

    def _our_lines(self) -> bytes:
        """The header lines that every answer carries."""
        account, caller = self.account, self.caller
        lines = b"x-request-id: %b\r\n" % account.request_id.encode("ascii")
        if self.decision is not None:
            lines += answers.limit_lines(self.decision)
        if self.gateway.origins:
            lines += header_lines(self._cors(self.gateway.origins))
        if caller is not None and account.backend is not None:
            shows = self.gateway.shows
            if caller.show_backend or shows.show_backend:
                lines += b"x-llmgw-backend: %b\r\n" % account.backend.encode("ascii", "replace")
            if caller.show_decision or shows.show_decision:
                why = f"{account.backend}; {account.why or ''}"
                lines += b"x-llmgw-decision: %b\r\n" % _unprintable.sub(b"?", why.encode("ascii", "replace"))
        return lines

    def _cors(self, origins: frozenset[str]) -> Headers:
        """The headers that let a page of an allowed origin read the answer (WHATWG Fetch, CORS protocol)."""
        requested = self.incoming.head.headers
        origin = requested.get(b"origin", b"").decode("latin-1")
        if origin not in origins and "*" not in origins:
            return [(b"vary", b"origin")]
        headers = [(b"access-control-allow-origin", origin.encode("latin-1") or b"*"), (b"vary", b"origin")]
        if self.incoming.head.method == "OPTIONS":
            headers += [
                (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
                (
                    b"access-control-allow-headers",
                    requested.get(b"access-control-request-headers", _ALLOWED_HEADERS),
                ),
                (b"access-control-max-age", b"600"),
            ]
        else:
            headers.append((b"access-control-expose-headers", _EXPOSED_HEADERS))
        return headers
