"""Traces for OpenTelemetry: one span a request, one for each attempt at a backend.

An exchange only notes ids and times (:mod:`llmgw.core.trace`). When it is over,
spans are made of them and its access line, and handed to the SDK's batch
processor, which sends them from a thread of its own: nothing here waits, and a
collector that is away costs the spans that do not fit its queue.

:source: OpenTelemetry semantic conventions for HTTP and for generative AI clients
    (``gen_ai.*``); W3C Trace Context.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import socket
from typing import TYPE_CHECKING, Any

from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from llmgw import __version__
from llmgw.core.trace import SAMPLED, Trace, begin
from llmgw.errors import ConfigError, ConfigFault
from llmgw.gateway.access_log import AccessLine
from llmgw.gateway.routes import ROUTES

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

    from llmgw.config import TracingConfig

OPERATIONS = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completion": "text_completion",
    "native": "text_completion",
    "embedding": "embeddings",
}
"""``gen_ai.operation.name`` by the route's dialect."""
QUEUE = 4096
"""Spans that wait to be sent; the next ones are dropped (``max_queue_size`` of the SDK)."""
FLUSH_MS = 2000
COMPLAIN_S = 60.0


class Tracer:
    """Makes spans and has them sent.

    :param config: with an endpoint.
    :raise ConfigError: the SDK is not installed.
    """

    def __init__(self, config: TracingConfig, reactor: Any, exporter: Any = None) -> None:
        if importlib.util.find_spec("opentelemetry.sdk") is None:
            why = "needs OpenTelemetry's SDK: pip install 'llmgw[otel]'"
            raise ConfigError([ConfigFault("tracing.endpoint", why)])
        self._config = config
        self._reactor = reactor
        self._exporter = exporter
        self._processor: Any = None
        # Ids must differ between gateways, whatever seed the rest of this one runs on.
        self._dice = random.Random(int.from_bytes(os.urandom(16), "big"))

    def start(self) -> None:
        """Make the sender and its thread; only after the process has forked."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        exporter = self._exporter or OTLPSpanExporter(endpoint=self._config.endpoint, timeout=5)
        _Complaints(self._reactor).listen("opentelemetry")
        self._scope = InstrumentationScope("llmgw", __version__)
        self._resource = Resource.create(
            {
                "service.name": self._config.service_name,
                "service.version": __version__,
                "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
            }
        )
        self._processor = BatchSpanProcessor(exporter, max_queue_size=QUEUE)

    def close(self) -> Deferred[Any] | None:
        """Send what waits, for two seconds at most. Fires when that is over."""
        processor, self._processor = self._processor, None
        if processor is None:
            return None

        def finish() -> None:
            processor.force_flush(FLUSH_MS)
            processor.shutdown()

        return deferToThreadPool(self._reactor, self._reactor.getThreadPool(), finish)

    def begin(self, traceparent: bytes | None) -> Trace | None:
        """The trace of a request that has come with this header; ``None``: not recorded."""
        return begin(traceparent, self._config.sample, self._dice)

    def end(self, trace: Trace, line: tuple[Any, ...], arrived_s: float) -> None:
        """The request is over.

        :param line: its access line, as :meth:`AccessLine.of` takes it.
        :param arrived_s: monotonic time that ``line.at`` is the wall time of.
        """
        if self._processor is None:
            return
        said = AccessLine.of(*line)
        # Not said.at, which is rounded for the log.
        zero_s = line[0] - arrived_s
        begun_ns, ended_ns = _ns(line[0]), _ns(line[0] + line[7])
        attributes = _attributes(said)
        events = []
        if said.ttft_s is not None:
            events.append(("gen_ai.first_token", _ns(line[0] + said.ttft_s)))
        error = attributes.get("error.type")
        operation = attributes.get("gen_ai.operation.name", said.method)
        name = f"{operation} {said.target or said.model or said.route}"
        for hop in trace.hops:
            hop_ended_ns = ended_ns if hop.ended_s is None else _ns(zero_s + hop.ended_s)
            hop_error = hop.error if hop.ended_s is not None else error
            about = {"llmgw.backend": hop.backend, **({"error.type": hop_error} if hop_error else {})}
            self._hand_over(
                f"ask {hop.backend}",
                trace,
                (hop.span_id, trace.span_id),
                "CLIENT",
                (_ns(zero_s + hop.begun_s), hop_ended_ns),
                about,
                error=hop_error,
            )
        own = (trace.span_id, trace.parent_id)
        self._hand_over(name, trace, own, "SERVER", (begun_ns, ended_ns), attributes, events, error)

    def _hand_over(
        self,
        name: str,
        trace: Trace,
        ids: tuple[int, int | None],
        kind: str,
        times_ns: tuple[int, int],
        attributes: dict[str, Any],
        events: list[tuple[str, int]] | tuple[()] = (),
        error: str | None = None,
    ) -> None:
        """:param ids: of the span, and of its parent."""
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span_id: int, *, remote: bool) -> SpanContext:
            return SpanContext(trace.trace_id, span_id, remote, TraceFlags(SAMPLED))

        span_id, parent_id = ids
        span = ReadableSpan(
            name,
            context(span_id, remote=False),
            None if parent_id is None else context(parent_id, remote=parent_id == trace.parent_id),
            self._resource,
            attributes,
            [Event(what, timestamp=at_ns) for what, at_ns in events],
            kind=SpanKind[kind],
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
            start_time=times_ns[0],
            end_time=times_ns[1],
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _attributes(said: AccessLine) -> dict[str, Any]:
    """An access line in OpenTelemetry's words; never a prompt, an answer or a key."""
    route = ROUTES.get(said.route)
    error = None if said.status < 400 and said.outcome == "done" else said.outcome
    wanted = {
        "http.request.method": said.method,
        "http.route": said.route,
        "http.response.status_code": said.status,
        "client.address": said.peer,
        "gen_ai.operation.name": OPERATIONS.get(route.dialect) if route is not None else None,
        "gen_ai.request.model": said.model,
        "gen_ai.response.model": said.target or said.model,
        "gen_ai.usage.input_tokens": said.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": said.cached_tokens,
        "gen_ai.usage.output_tokens": said.output_tokens,
        "error.type": error,
        "llmgw.request_id": said.id,
        "llmgw.key": said.key,
        "llmgw.backend": said.backend,
        "llmgw.decision": said.why,
        "llmgw.attempts": said.attempts,
        "llmgw.waited_s": said.waited_s,
        "llmgw.overhead_s": said.overhead_s,
        "llmgw.time_to_first_token_s": said.ttft_s,
        "llmgw.streaming": said.streaming,
    }
    return {name: value for name, value in wanted.items() if value is not None}


class _Complaints(logging.Handler):
    """What the SDK logs, from its thread, into our log: one line a minute."""

    log = Logger()

    def __init__(self, reactor: Any) -> None:
        super().__init__(logging.WARNING)
        self._reactor = reactor
        self._told_s = float("-inf")

    def listen(self, name: str) -> None:
        """Take the lines of the logger ``name`` and those below it."""
        logger = logging.getLogger(name)
        logger.handlers = [each for each in logger.handlers if not isinstance(each, _Complaints)] + [self]
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._reactor.callFromThread(self._tell, record.getMessage().splitlines()[0][:300])

    def _tell(self, message: str) -> None:
        now_s = self._reactor.seconds()
        if now_s - self._told_s >= COMPLAIN_S:
            self._told_s = now_s
            self.log.warn("traces: {message}", message=message)
