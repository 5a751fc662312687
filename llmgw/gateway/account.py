"""What became of one request: settles the limits, counts, and writes the access line.

An :class:`Account` is opened with the request and closed exactly once, on every
way out. It never holds a prompt, an answer, or a key; of a caller it knows the
key's id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from llmgw.values import Usage

if TYPE_CHECKING:
    from llmgw.core.meter import Meter
    from llmgw.gateway.gateway import Gateway
    from llmgw.wire.incoming import Incoming

CLIENT_GONE = 499
"""Logged when the client left before its answer had begun (nginx's convention)."""


class AccessLine(Struct, omit_defaults=True):
    """One line of the access log, in this order. Times are seconds.

    :param at: wall time of the request's head, Unix seconds.
    :param key: the key's id, ``anonymous``, or absent when refused before.
    :param model: the name the client used; ``target`` the one the backend was asked for.
    :param why: the router's reason.
    :param attempts: how many backends were asked.
    :param ttft_s: from the request's arrival to the first token's at our socket.
    :param outcome: ``done``, ``client_gone``, ``cut``, or the error's code.
    """

    at: float
    id: str
    peer: str
    method: str
    route: str
    status: int
    outcome: str
    duration_s: float
    key: str | None = None
    model: str | None = None
    target: str | None = None
    streaming: bool = False
    backend: str | None = None
    why: str | None = None
    attempts: int = 0
    overhead_s: float | None = None
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    bytes: int = 0
    agent: str | None = None


class Account:
    """Collects while the exchange runs; :meth:`close` settles.

    :ivar charged: the limiter's reservation, to be settled.
    :ivar sent_s: monotonic time at which the first attempt left for a backend.
    :ivar read_s: monotonic time at which the request was complete.
    """

    __slots__ = (
        "_closed",
        "_gateway",
        "_incoming",
        "agent",
        "attempts",
        "backend",
        "charged",
        "first_content_s",
        "key",
        "meter",
        "model",
        "outcome",
        "prompt_estimate",
        "read_s",
        "request_id",
        "route",
        "sent_s",
        "status",
        "streaming",
        "target",
        "why",
    )

    def __init__(self, gateway: Gateway, incoming: Incoming, request_id: str) -> None:
        self._gateway = gateway
        self._incoming = incoming
        self._closed = False
        self.request_id = request_id
        self.route = "other"
        self.key: str | None = None
        self.model: str | None = None
        self.target: str | None = None
        self.streaming = False
        self.backend: str | None = None
        self.why: str | None = None
        self.attempts = 0
        self.prompt_estimate = 0
        self.charged: Any = None
        self.meter: Meter | None = None
        self.read_s: float | None = None
        self.sent_s: float | None = None
        self.first_content_s: float | None = None
        self.outcome = "done"
        self.status = 0

    def used(self) -> Usage | None:
        """Tokens to charge; ``None`` when no backend was reached.

        A stream that told no usage, or was left, is charged the estimate of its
        prompt and the events that came (``behaviour.md`` section 6).
        """
        if self.meter is None:
            return None
        return self.meter.usage or self.meter.estimated_usage(self.prompt_estimate)

    def close(self) -> None:
        """Settle, count, and write. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        gateway = self._gateway
        incoming = self._incoming
        now_s = gateway.clock()
        used = self.used()
        if self.charged is not None:
            gateway.settle(self.charged, used)
        status = self.status or incoming.status or CLIENT_GONE
        first_s = self.first_content_s
        arrived_s = incoming.arrived_s
        ttft_s = None if first_s is None else first_s - arrived_s
        overhead_s = None if self.sent_s is None or self.read_s is None else self.sent_s - self.read_s
        gateway.metrics.request(
            route=self.route,
            model=self.target,
            backend=self.backend,
            status=status,
            duration_s=now_s - arrived_s,
            ttft_s=ttft_s,
            overhead_s=overhead_s,
        )
        if used is not None:
            gateway.metrics.tokens(self.target, used)
        if self.outcome == "client_gone":
            gateway.metrics.client_abort()
        log = gateway.access_log
        if log is None:
            return
        agent = incoming.head.headers.get(b"user-agent")
        log.write(
            AccessLine(
                at=gateway.wall_clock() - (now_s - arrived_s),
                id=self.request_id,
                peer=incoming.peer,
                method=incoming.head.method,
                route=self.route,
                status=status,
                outcome=self.outcome,
                duration_s=round(now_s - arrived_s, 6),
                key=self.key,
                model=self.model[:256] if self.model else None,
                target=self.target if self.target != self.model else None,
                streaming=self.streaming,
                backend=self.backend,
                why=self.why,
                attempts=self.attempts,
                overhead_s=None if overhead_s is None else round(overhead_s, 6),
                ttft_s=None if ttft_s is None else round(ttft_s, 6),
                prompt_tokens=used.prompt_tokens if used else None,
                cached_tokens=used.cached_tokens if used else None,
                output_tokens=used.output_tokens if used else None,
                bytes=incoming.sent_bytes,
                agent=agent[:128].decode("latin-1") if agent else None,
            )
        )
