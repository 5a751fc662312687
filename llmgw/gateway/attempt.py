"""One attempt at one backend: send the request, judge the response, and relay it.

An :class:`Attempt` ends in one of two ways: the client has been answered, or nothing was
sent yet and another backend may be tried (:class:`Failed`). Either way the lease has been
told what the attempt says about the backend.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from twisted.internet.defer import CancelledError

from llmgw.core.assemble import Assembler
from llmgw.core.meter import Meter
from llmgw.core.sse import UsageStripper
from llmgw.errors import GatewayError, UpstreamError
from llmgw.gateway.backend_http import (
    Deadlines,
    error_of,
    is_encoded,
    passed_headers,
    read_body,
    send_request,
)
from llmgw.gateway.failed import Failed
from llmgw.gateway.verdicts import COLLECTED, judge, refused, unfit, verdict
from llmgw.values import Choice, Request
from llmgw.wire.relay import AssemblingSink, Relay
from llmgw.wire.sink import UpstreamFault

if TYPE_CHECKING:
    from llmgw.core.fleet import Lease
    from llmgw.core.http import ResponseHead
    from llmgw.gateway.answering import Answering
    from llmgw.gateway.gateway import Gateway, Upstream
    from llmgw.gateway.outgoing import Outgoing
    from llmgw.wire.upstream import UpstreamConnection

UNSENT = frozenset({"refused", "connect", "dns", "tls", "timeout_connect"})
"""Faults before a connection was established: no backend has seen the request."""
STREAM_HEADERS = (b"content-type", b"cache-control")
"""Headers of a stream that are wrong for the answer assembled from it."""


class Attempt:
    """One request at one backend.

    :param until_s: monotonic time by which the whole request must be over.
    """

    __slots__ = (
        "account",
        "answering",
        "choice",
        "gateway",
        "incoming",
        "lease",
        "llama_server",
        "outgoing",
        "relay",
        "request",
        "until_s",
        "upstream",
    )

    relay: Relay
    """Set once the answer is being relayed; ``outgoing`` has been deleted then."""

    def __init__(
        self,
        gateway: Gateway,
        answering: Answering,
        outgoing: Outgoing,
        request: Request,
        *,
        lease: Lease,
        choice: Choice,
        upstream: Upstream,
        until_s: float,
    ) -> None:
        self.gateway = gateway
        self.answering = answering
        self.account = answering.account
        self.incoming = answering.incoming
        self.outgoing = outgoing
        self.request = request
        self.lease = lease
        self.choice = choice
        self.upstream = upstream
        self.until_s = until_s
        self.llama_server = gateway.kind_of(upstream) == "llama-server"

    async def run(self) -> Failed | Attempt | None:
        """Ask the backend. Cancelling closes its connection.

        :return: ``None`` if the client has been answered; itself if the answer is being relayed,
            see :meth:`relayed`.
        """
        gateway, account, lease = self.gateway, self.account, self.lease
        assembles = self._assembles()
        assembled = assembles and not self.outgoing.ask.unstreamed
        strip = self._asks_usage()
        if account.sent_s is None:
            account.sent_s = gateway.clock()
        try:
            connection, head = await send_request(
                self.upstream.pool, partial(self._written, assembled, strip), self._deadlines()
            )
            if head.status in COLLECTED:
                return judge(self, head, await read_body(connection))
            if head.status == 400 and self.llama_server:
                return refused(self, head, await read_body(connection))
            if self.answering.opened and not _is_stream(head):
                return unfit(self, head, await read_body(connection))
        except UpstreamFault as fault:
            ok, reason = verdict(self, fault)
            lease.finish(gateway.clock(), ok, reason, refused=reason == "refused")
            return Failed(self._error(fault), unsent=reason in UNSENT)
        except CancelledError:
            lease.finish(gateway.clock(), ok=True, reason="client_gone")
            raise
        most = self.outgoing.response_bytes
        if most is not None and (head.content_length or 0) > most:
            connection.abort()
            lease.finish(gateway.clock(), ok=True, reason="response_limit")
            return Failed(error_of(UpstreamFault("response_limit"), self.request.model))
        ask = self.outgoing.ask
        meter = Meter(self.outgoing.route.dialect, prompts=ask.prompts, n=ask.n)
        encoded = is_encoded(head)
        if encoded:
            gateway.warn_of_answer(
                self.choice.backend.id, "is compressed, though none was asked for: its tokens are not counted"
            )
        readable = assembled or not encoded
        meter.begin(head.status, head.get(b"content-type") if readable else None, gateway.clock())
        account.meter = meter
        if assembles and head.status == 200 and meter.kind == "sse":
            return await self._assemble(connection, head, meter)
        self._begin_relay(connection, head, meter, strip=strip)
        # No other backend will be asked from here on: a long answer need not keep its prompt in memory.
        self.outgoing.forget()
        del self.outgoing
        self.incoming.forget_body()
        return self

    def _written(self, assembled: bool, usage: bool) -> tuple[bytes, bytes]:
        """The request as this backend gets it, see :meth:`Outbound.request`."""
        outgoing, account = self.outgoing, self.account
        return self.upstream.outbound.request(
            outgoing.route.upstream,
            self.incoming.head,
            outgoing.content_type,
            account.request_id,
            outgoing.body_for(assembled=assembled, usage=usage, slot=self._slot()),
            None if account.trace is None else account.trace.header(),
        )

    # --- what comes back ---

    def _begin_relay(
        self, connection: UpstreamConnection, head: ResponseHead, meter: Meter, *, strip: bool
    ) -> None:
        """Start forwarding the response as it comes."""
        gateway, account, answering = self.gateway, self.account, self.answering
        status = head.status
        streamed = meter.kind == "sse"
        answering.begin(
            status,
            head,
            None if strip else head.content_length,
            streamed=streamed or meter.kind == "ndjson",
        )
        self.relay = Relay(
            self.incoming,
            connection,
            meter,
            self.lease,
            gaps=gateway.metrics.gaps(account.target, account.backend or ""),
            until_s=self.until_s,
            strip=UsageStripper() if strip and streamed else None,
            heartbeat_s=gateway.config.timeouts.heartbeat_s if streamed else 0.0,
            limit_bytes=self.outgoing.response_bytes,
            sweep=gateway.sweep,
        )
        connection.deliver(self.relay)

    async def relayed(self) -> None:
        """Wait until all of the answer has been forwarded, and record how it ended.
        Cancelling closes the backend's connection."""
        account, relay = self.account, self.relay
        meter = relay.meter
        status = meter.status
        try:
            fault = await relay.done
        except CancelledError:
            if not (self.incoming.gone and meter.closed):
                self._finish_lease(meter, ok=True, reason="client_gone")
                raise
            # It left with the last event, before the end of the body, as OpenAI's Python client does.
            fault = None
        if fault is None:
            self._finish_lease(meter, ok=True, reason="done" if status < 400 else f"status_{status}")
            if status >= 400:
                account.outcome = f"status_{status}"
            elif meter.incomplete:
                account.outcome = "incomplete"
            return
        ok, reason = verdict(self, fault)
        self._finish_lease(meter, ok=ok, reason=reason)
        self.answering.break_off(self._error(fault), meter)

    async def _assemble(
        self, connection: UpstreamConnection, head: ResponseHead, meter: Meter
    ) -> Failed | None:
        """Assemble a stream into the single answer that the client asked for."""
        gateway, account = self.gateway, self.account
        assembler = Assembler(self.outgoing.route.dialect, return_tokens=self.outgoing.ask.return_tokens)
        sink = AssemblingSink(
            connection,
            meter,
            self.lease,
            assembler,
            gaps=gateway.metrics.gaps(account.target, account.backend or ""),
            until_s=self.until_s,
        )
        connection.deliver(sink)
        try:
            fault = await sink.done
        except CancelledError:
            self._finish_lease(meter, ok=True, reason="client_gone")
            raise
        if fault is not None:
            ok, reason = verdict(self, fault)
            self._finish_lease(meter, ok=ok, reason=reason)
            return Failed(self._error(fault))
        assembler.end()
        headers = [pair for pair in passed_headers(head) if pair[0] not in STREAM_HEADERS]
        if assembler.error is not None:
            status, body = assembler.error
            self._finish_lease(meter, ok=True, reason=f"status_{status}")
            account.outcome = f"status_{status}"
            self.answering.answer_json(status, headers, body)
        elif assembler.fault or not assembler.complete:
            self._finish_lease(meter, ok=False, reason="cut")
            why = assembler.fault or "it ended early"
            return Failed(
                UpstreamError(f"the answer of a backend of {self.request.model!r} is broken: {why}")
            )
        else:
            self._finish_lease(meter, ok=True, reason="done")
            body = assembler.result()
            most = self.outgoing.response_bytes
            if most is not None and len(body) > most:
                return Failed(error_of(UpstreamFault("response_limit"), self.request.model))
            self.answering.answer_json(200, headers, body)
        return None

    def _error(self, fault: UpstreamFault) -> GatewayError:
        """The error for the client; what only the operator can mend is also logged."""
        if fault.reason == "framing":
            self.gateway.warn_of_answer(self.choice.backend.id, f"is malformed: {fault.detail}")
        elif fault.reason == "local":
            self.gateway.warn_of_lack(fault.detail)
        return error_of(fault, self.request.model)

    # --- how the backend is asked ---

    def _assembles(self) -> bool:
        """Whether the backend is asked for a stream that is assembled for the client, who did not
        ask for one. A llama-server notices at once that its client has left only while it
        streams."""
        outgoing = self.outgoing
        return (
            self.llama_server
            and outgoing.route.assembled
            and not outgoing.ask.stream
            and not self.upstream.config.raw
        )

    def _slot(self) -> int | None:
        """The slot that the router chose, if the backend can be asked for it. The server waits for
        that slot even if another is free, so otherwise none is asked for."""
        slot = self.choice.slot
        if slot is None or not self.llama_server or not self.gateway.config.admission.slot_choice:
            return None
        return slot if self.outgoing.takes_slot() else None

    def _asks_usage(self) -> bool:
        """Whether to ask for usage: token limits need it, and this backend sends it only on request."""
        ask = self.outgoing.ask
        return (
            not self.llama_server
            and ask.stream
            and not ask.include_usage
            and self.outgoing.route.dialect in ("chat", "completion")
            and self.answering.counts_tokens()
        )

    def _deadlines(self) -> Deadlines:
        timeouts = self.gateway.config.timeouts
        own = self.upstream.config.timeouts
        return Deadlines(
            head_s=own.response_head_s or timeouts.response_head_s,
            first_token_s=own.first_token_s or timeouts.first_token_s,
            idle_s=timeouts.stream_idle_s,
            until_s=self.until_s,
        )

    def _finish_lease(self, meter: Meter, *, ok: bool, reason: str) -> None:
        account = self.account
        usage = account.usage = meter.usage
        self.lease.finish(
            self.gateway.clock(),
            ok,
            reason,
            usage=usage,
            prompt_s=meter.prompt_s,
            token_rate=meter.token_rate,
        )


def _is_stream(head: ResponseHead) -> bool:
    return head.status == 200 and b"text/event-stream" in (head.get(b"content-type") or b"").lower()
