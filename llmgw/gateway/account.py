"""The record of one request: settles its limits, counts it, and writes its access line.

An :class:`Account` is opened with the request and closed exactly once, whatever happens. It
never holds a prompt, an answer, or a key; of the caller it knows the id of the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmgw.values import Usage

if TYPE_CHECKING:
    from llmgw.core.meter import Meter
    from llmgw.gateway.gateway import Gateway
    from llmgw.wire.incoming import Incoming

CLIENT_GONE = 499
"""Logged if the client left before its answer had begun (nginx's convention)."""


class Account:
    """Collects while the exchange runs; :meth:`close` settles.

    :ivar failed: the attempts that gave the client nothing: for each its backend and the reason.
    :ivar usage: tokens as reported by the backend.
    :ivar charged: the limiter's reservation, to be settled; ``None`` once it is.
    :ivar sent_s: monotonic time at which the first attempt left for a backend.
    :ivar read_s: monotonic time at which the request's body was complete.
    :ivar waited_s: seconds for which it waited for a slot, or was held for its model.
    :ivar trace: its place in a distributed trace, if one is recorded.
    """

    __slots__ = (
        "_closed",
        "_gateway",
        "_incoming",
        "agent",
        "attempts",
        "backend",
        "charged",
        "failed",
        "key",
        "meter",
        "model",
        "outcome",
        "prompt_estimate",
        "read_s",
        "request_id",
        "route",
        "sent_s",
        "streaming",
        "target",
        "trace",
        "usage",
        "waited_s",
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
        self.failed = ""
        self.prompt_estimate = 0
        self.charged: Any = None
        self.meter: Meter | None = None
        self.usage: Usage | None = None
        self.read_s: float | None = None
        self.sent_s: float | None = None
        self.waited_s = 0.0
        self.outcome = "done"
        tracer = gateway.tracer
        self.trace = None if tracer is None else tracer.begin(incoming.head.headers.get(b"traceparent"))

    def fails(self, backend_id: str, reason: str) -> None:
        """An attempt gave the client nothing."""
        self.failed += f"{', ' if self.failed else ''}{backend_id}: {reason}"

    def used(self) -> Usage | None:
        """Tokens to charge; ``None`` if no backend was reached.

        A stream without usage, or one that the client left, is charged the estimate of its
        prompt and the events that came (``docs/rate-limits.md``).
        """
        if self.usage is not None or self.meter is None:
            return self.usage
        return self.meter.estimated_usage(self.prompt_estimate)

    def close(self) -> None:
        """Settle the limits, count the request, and write its line. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        gateway = self._gateway
        incoming = self._incoming
        now_s = gateway.clock()
        used = self.used()
        if self.charged is not None:
            gateway.settle(self.charged, used)
            self.charged = None
        status = incoming.status or CLIENT_GONE
        first_s = None if self.meter is None else self.meter.first_content_s
        arrived_s = incoming.arrived_s
        ttft_s = None if first_s is None else first_s - arrived_s
        overhead_s = None
        if self.sent_s is not None and self.read_s is not None:
            overhead_s = self.sent_s - self.read_s - self.waited_s
        gateway.metrics.request(
            self.route, self.target, self.backend, status, now_s - arrived_s, ttft_s, overhead_s, used
        )
        if gateway.exemplars and ttft_s is not None:
            label = ("request_id", self.request_id)
            if self.trace is not None:
                label = ("trace_id", f"{self.trace.trace_id:032x}")
            gateway.metrics.exemplify(self.target, self.backend, ttft_s, label, gateway.wall_clock())
        if self.outcome == "client_gone":
            gateway.metrics.client_abort()
        line = (
            gateway.wall_clock() - (now_s - arrived_s),
            self.request_id,
            incoming.peer,
            incoming.head.method,
            self.route,
            status,
            self.outcome,
            now_s - arrived_s,
            self.key,
            self.model,
            self.target,
            self.streaming,
            self.backend,
            self.why,
            self.attempts,
            self.failed,
            self.waited_s,
            overhead_s,
            ttft_s,
            used,
            incoming.sent_bytes,
            incoming.head.headers.get(b"user-agent"),
            incoming.certificate,
        )
        if self.model is not None or status >= 400:
            gateway.recent.add(line)
        if self.trace is not None and gateway.tracer is not None:
            gateway.tracer.end(self.trace, line, arrived_s)
        log = gateway.access_log
        if log is None:
            return
        share = gateway.config.log.access_sample
        if share < 1 and status < 400 and gateway.dice.random() >= share:
            return
        log.write(line)
