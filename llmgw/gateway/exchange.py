"""One request's way through the gateway, from top to bottom.

route → who → body → rules → rate limit → attempt (choose, lease, ask) → relay
→ account. Each stage either goes on or raises the error that the client gets;
whatever happens, :meth:`Exchange.run` returns what was taken, settles the
account, and ends the answer, in this order, so that a client that has seen the
end of its answer finds its slot and its limits free again.

Cancelling the exchange (the client left, or the gateway stops) closes the
backend's connection wherever the request is.
"""

from __future__ import annotations

import itertools
import os
import re
from typing import TYPE_CHECKING

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.task import deferLater

from llmgw.core.assemble import Assembler
from llmgw.core.body import estimate_tokens, read_json
from llmgw.core.meter import Meter
from llmgw.core.multipart import read_multipart
from llmgw.core.retry import backoff_s, retry_after
from llmgw.core.sse import UsageStripper
from llmgw.errors import (
    GatewayError,
    InvalidRequest,
    ModelLoading,
    ModelNotAllowed,
    ModelNotFound,
    NoBackend,
    Overloaded,
    RateLimited,
    UnsupportedEncoding,
    UpstreamError,
)
from llmgw.gateway import answers, local
from llmgw.gateway.account import Account
from llmgw.gateway.attempt import (
    Deadlines,
    ask,
    collect,
    error_of,
    is_json_error,
    is_loading,
    passed_headers,
)
from llmgw.gateway.outgoing import Outgoing
from llmgw.gateway.routes import OLLAMA, OPENAI, Route, find
from llmgw.values import Caller, Choice, Cost, Decision, Request
from llmgw.wire.relay import Assembly, Relay
from llmgw.wire.upstream import UpstreamFault

if TYPE_CHECKING:
    from llmgw.core.fleet import Lease
    from llmgw.core.http import ResponseHead
    from llmgw.gateway.gateway import Gateway, Upstream
    from llmgw.wire.incoming import Headers, Incoming
    from llmgw.wire.upstream import UpstreamConnection

OUTPUT_GUESS = 512
"""Output tokens reserved for a request that sets no limit of its own."""
LIMITER_WAIT_S = 0.1
TIMEOUT_HEADER = b"x-llmgw-timeout"
COLLECTED = frozenset({429, 500, 502, 503, 504})
"""A backend's answers that are read whole before it is decided who gets them."""
ELSEWHERE = frozenset({429, 502, 503, 504})

_well_formed_id = re.compile(rb"[A-Za-z0-9._:-]{1,128}").fullmatch
_id_prefix = os.urandom(6).hex()
_id_counter = itertools.count(1)


class Failed:
    """An attempt that gave the client nothing yet.

    :ivar error: what the client gets if nothing better comes.
    :ivar answer: the backend's own answer, passed on in place of ``error``.
    """

    def __init__(self, error: GatewayError, answer: tuple[ResponseHead, bytes] | None = None) -> None:
        self.error = error
        self.answer = answer


class Exchange:
    """One request at work."""

    def __init__(self, gateway: Gateway, incoming: Incoming) -> None:
        self.gateway = gateway
        self.incoming = incoming
        given = incoming.head.headers.get(b"x-request-id")
        if given is not None and _well_formed_id(given):
            self.request_id = given.decode("ascii")
        else:
            self.request_id = f"{_id_prefix}{next(_id_counter):010x}"
        self.account = Account(gateway, incoming, self.request_id)
        self.route: Route | None = None
        self.caller: Caller | None = None
        self.decision: Decision | None = None
        self._entered = False
        self._cut = False
        self._sse = False

    async def run(self) -> None:
        """Carry the request to its end. Never raises."""
        incoming = self.incoming
        account = self.account
        try:
            await self._serve()
        except GatewayError as error:
            self._refuse(error)
        except CancelledError:
            self._cancelled()
        except Exception:
            self.gateway.log.failure("request {id} failed", id=self.request_id)
            self._refuse(GatewayError("the gateway failed; see its log"))
        self._leave()
        account.close()
        if self._cut:
            incoming.abort()
        else:
            incoming.finish()

    # --- the stages ---

    async def _serve(self) -> None:
        gateway, incoming, account = self.gateway, self.incoming, self.account
        head = incoming.head
        self.route = route = find(head.method, head.path)
        account.route = route.path
        if head.method == "OPTIONS":
            self._answer(204, [(b"allow", ", ".join((*route.methods, "OPTIONS")).encode("ascii"))], b"")
            return
        if route.local == "health":
            self._answer(200, [answers.JSON], b'{"status":"ok"}')
            return
        identified = gateway.callers.identify(head.headers, incoming.peer, gateway.clock())
        self.caller = caller = await identified if isinstance(identified, Deferred) else identified
        account.key = caller.id
        if route.local:
            self._answer(200, [answers.JSON], local.answer(route, head.path, caller, gateway))
            return
        self._enter(caller)
        outgoing = await self._read(route)
        request = self._apply_rules(outgoing, caller)
        await self._admit(caller, request)
        await self._forward(outgoing, request)

    def _enter(self, caller: Caller) -> None:
        """Count the request in, if there is room."""
        gateway = self.gateway
        limits = gateway.config.limits
        if gateway.in_flight >= limits.in_flight:
            raise Overloaded("the gateway serves as many requests as it may", retry_after_s=self._soon(1.0))
        if gateway.per_key[caller.id] >= limits.in_flight_per_key and caller.id != "anonymous":
            raise RateLimited("too many requests of this key are in flight", retry_after_s=self._soon(1.0))
        gateway.in_flight += 1
        gateway.per_key[caller.id] += 1
        self._entered = True

    async def _read(self, route: Route) -> Outgoing:
        """The body, and what the gateway needs to know of it."""
        incoming = self.incoming
        headers = incoming.head.headers
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise UnsupportedEncoding("request bodies must not be compressed")
        body = incoming.body()
        if isinstance(body, Deferred):
            if incoming.head.expect_continue:
                incoming.proceed()
            body = await body
        gateway, account = self.gateway, self.account
        account.read_s = gateway.clock()
        if route.body == "multipart":
            content_type = headers.get(b"content-type", b"").decode("latin-1")
            parsed = read_multipart(body, content_type)
        else:
            content_type = "application/json"
            parsed = read_json(
                body, gateway.body_limits, exempt=route.exempt, require_model=route.needs_model
            )
        return Outgoing(route, body, content_type.encode("latin-1"), parsed)

    def _apply_rules(self, outgoing: Outgoing, caller: Caller) -> Request:
        """Aliases, the key's scope, the model's limits."""
        gateway, account = self.gateway, self.account
        parsed = outgoing.ask
        name = parsed.model or self._only_model()
        rule = gateway.aliases.get(name)
        target = name if rule is None else rule.target or name
        account.model = name
        account.streaming = parsed.stream
        if caller.models is not None and name not in caller.models and target not in caller.models:
            raise ModelNotAllowed(f"this key may not use the model {name[:256]!r}", param="model")
        if not gateway.fleet.serves(target):
            raise ModelNotFound(f"no such model: {name[:256]!r}", param="model")
        account.target = target
        outgoing.target = target
        max_tokens = parsed.max_tokens
        if rule is not None and rule.max_tokens is not None:
            if max_tokens is None or max_tokens < 0 or max_tokens > rule.max_tokens:
                max_tokens = outgoing.clamp(rule.max_tokens)
        account.prompt_estimate = estimate_tokens(parsed)
        return Request(
            id=self.request_id,
            model=target,
            prompt_tokens=account.prompt_estimate,
            max_tokens=max_tokens,
            session=parsed.session,
            key=caller.id,
            streaming=parsed.stream,
        )

    async def _admit(self, caller: Caller, request: Request) -> None:
        """Charge the limits."""
        gateway = self.gateway
        policies = gateway.policies + caller.policies
        if not policies:
            return
        output = OUTPUT_GUESS if request.max_tokens is None else max(0, request.max_tokens)
        decision = gateway.limiter.admit(caller.id, policies, Cost(1, request.prompt_tokens + output))
        if isinstance(decision, Deferred):
            try:
                decision = await decision.addTimeout(LIMITER_WAIT_S, gateway.reactor)
            except TimeoutError:
                gateway.limiter_degraded += 1
                return
        self.decision = decision
        if not decision.allowed:
            error = RateLimited(
                f"rate limit {decision.policy!r} reached: {decision.unit}",
                retry_after_s=retry_after(decision.retry_after_s, gateway.dice),
            )
            raise error
        self.account.charged = decision.reservation

    async def _forward(self, outgoing: Outgoing, request: Request) -> None:
        """Try backends until one answers, within the budget."""
        gateway, account = self.gateway, self.account
        fleet = gateway.fleet
        until_s = self._until_s()
        tried = self._unsuited(outgoing.route)
        failed: Failed | None = None
        now_s = gateway.clock()
        gateway.budget.request(now_s)
        while True:
            try:
                candidates = fleet.candidates(request, now_s, exclude=tried)
                choice = gateway.choose(request, candidates, now_s)
                if choice is None:
                    raise Overloaded(
                        f"no backend of {request.model!r} can take the request now",
                        retry_after_s=self._soon(1.0),
                    )
            except GatewayError:
                if failed is not None:
                    self._give_up(failed)
                    return
                raise
            account.attempts += 1
            account.backend = choice.backend.id
            account.why = choice.why or None
            retrying = failed is not None
            try:
                with fleet.lease(choice.backend.id, request, now_s) as lease:
                    failed = await self._attempt(lease, choice, outgoing, request, until_s)
            finally:
                if retrying:
                    gateway.budget.done()
            if failed is None:
                return
            now_s = gateway.clock()
            tried = tried | {choice.backend.id}
            if not self._may_retry(failed, now_s, until_s):
                self._give_up(failed)
                return
            gateway.metrics.retried(failed.error.code)
            await deferLater(gateway.reactor, backoff_s(account.attempts, gateway.dice))
            now_s = gateway.clock()

    async def _attempt(
        self, lease: Lease, choice: Choice, outgoing: Outgoing, request: Request, until_s: float
    ) -> Failed | None:
        """Ask one backend. :return: ``None`` when the client was answered."""
        gateway, account = self.gateway, self.account
        upstream = gateway.upstreams.get(choice.backend.id)
        if upstream is None:
            return Failed(NoBackend("the backend was removed", retry_after_s=1.0))
        timeouts = gateway.config.timeouts
        own = upstream.config.timeouts
        assembled = self._assembles(outgoing, upstream, choice)
        strip = not assembled and self._wants_usage(outgoing, upstream)
        payload = upstream.outbound.request(
            outgoing.route.upstream,
            self.incoming.head.query,
            self.incoming.head.headers,
            outgoing.content_type,
            self.request_id,
            outgoing.body_for(assembled=assembled, usage=strip, slot=choice.slot),
        )
        deadlines = Deadlines(
            head_s=own.response_head_s or timeouts.response_head_s,
            first_token_s=own.first_token_s or timeouts.first_token_s,
            idle_s=timeouts.stream_idle_s,
            until_s=until_s,
        )
        if account.sent_s is None:
            account.sent_s = gateway.clock()
        try:
            connection, head = await ask(upstream.pool, payload, deadlines)
            if head.status in COLLECTED:
                body = await collect(connection)
        except UpstreamFault as fault:
            local_fault = fault.reason == "local"
            lease.finish(
                gateway.clock(),
                ok=local_fault,
                reason="dropped" if local_fault else fault.reason,
                refused=fault.reason == "refused",
            )
            return Failed(error_of(fault, request.model))
        except CancelledError:
            lease.finish(gateway.clock(), ok=True, reason="client_gone")
            raise
        if head.status in COLLECTED:
            return self._judge(lease, head, body, request)
        meter = Meter(outgoing.route.dialect)
        meter.begin(head.status, head.get(b"content-type"), gateway.clock())
        account.meter = meter
        if assembled and head.status == 200 and meter.kind == "sse":
            return await self._assemble(lease, connection, head, meter, outgoing, request, until_s)
        await self._relay(lease, connection, head, meter, until_s, strip=strip)
        return None

    # --- answering ---

    async def _relay(
        self,
        lease: Lease,
        connection: UpstreamConnection,
        head: ResponseHead,
        meter: Meter,
        until_s: float,
        *,
        strip: bool,
    ) -> None:
        """Pass the response on as it comes."""
        gateway, incoming, account = self.gateway, self.incoming, self.account
        self._sse = meter.kind == "sse"
        status = head.status
        length = None if strip else head.content_length
        if status in (204, 304):
            length = 0
        incoming.start(status, self._response_headers(head), length)
        relay = Relay(
            incoming,
            connection,
            meter,
            lease,
            gaps=gateway.metrics.gaps(account.target, account.backend or ""),
            until_s=until_s,
            strip=UsageStripper() if strip and self._sse else None,
            heartbeat_s=gateway.config.timeouts.heartbeat_s if self._sse else 0.0,
            sweep=gateway.sweep,
        )
        connection.deliver(relay)
        try:
            fault = await relay.done
        except CancelledError:
            self._finish_lease(lease, meter, ok=True, reason="client_gone")
            raise
        account.first_content_s = meter.first_content_s
        if fault is None:
            self._finish_lease(lease, meter, ok=True, reason="done" if status < 400 else f"status_{status}")
            if meter.incomplete:
                account.outcome = "incomplete"
            elif status >= 400:
                account.outcome = f"status_{status}"
            return
        self._finish_lease(lease, meter, ok=False, reason=fault.reason)
        self._break_off(error_of(fault, account.target or ""), meter)

    async def _assemble(
        self,
        lease: Lease,
        connection: UpstreamConnection,
        head: ResponseHead,
        meter: Meter,
        outgoing: Outgoing,
        request: Request,
        until_s: float,
    ) -> Failed | None:
        """Gather a stream into the one answer that the client asked for."""
        gateway, account = self.gateway, self.account
        assembly = Assembly(
            connection,
            meter,
            lease,
            Assembler(outgoing.route.dialect),
            gaps=gateway.metrics.gaps(account.target, account.backend or ""),
            until_s=until_s,
        )
        connection.deliver(assembly)
        try:
            fault = await assembly.done
        except CancelledError:
            self._finish_lease(lease, meter, ok=True, reason="client_gone")
            raise
        account.first_content_s = meter.first_content_s
        assembler = assembly.assembler
        if fault is not None:
            self._finish_lease(lease, meter, ok=False, reason=fault.reason)
            return Failed(error_of(fault, request.model))
        headers = self._response_headers(head, stream=False)
        if assembler.error is not None:
            status, body = assembler.error
            self._finish_lease(lease, meter, ok=True, reason=f"status_{status}")
            account.outcome = f"status_{status}"
            self._answer(status, headers, body)
        elif meter.incomplete:
            self._finish_lease(lease, meter, ok=False, reason="cut")
            return Failed(UpstreamError(f"the backend of {request.model!r} ended its answer early"))
        else:
            self._finish_lease(lease, meter, ok=True, reason="done")
            self._answer(200, headers, assembler.result())
        return None

    def _judge(self, lease: Lease, head: ResponseHead, body: bytes, request: Request) -> Failed:
        """What a backend's 429 or 5xx means: for the lease, and for the client."""
        gateway = self.gateway
        now_s = gateway.clock()
        status = head.status
        answer = (head, body)
        name = request.model
        wait_s = _seconds(head.get(b"retry-after"))
        if status in (429, 503) and wait_s is not None:
            lease.finish(now_s, ok=True, reason="busy", busy_until_s=now_s + min(wait_s, 60.0))
            return Failed(Overloaded(f"the backend of {name!r} is busy", retry_after_s=wait_s), answer)
        if status == 503 and is_loading(body):
            lease.finish(now_s, ok=True, reason="loading")
            return Failed(ModelLoading(f"{name!r} is being loaded", retry_after_s=self._soon(2.0)))
        no_verdict = status == 429 or (status == 500 and is_json_error(body))
        lease.finish(now_s, ok=no_verdict, reason=f"status_{status}")
        error = UpstreamError(f"the backend of {name!r} answered {status}")
        error.may_retry = status in ELSEWHERE
        return Failed(error, answer)

    def _may_retry(self, failed: Failed, now_s: float, until_s: float) -> bool:
        """Whether another backend may be asked: nothing was sent, and the budget allows it."""
        gateway, account = self.gateway, self.account
        error = failed.error
        if self.incoming.started or self.incoming.gone or now_s >= until_s:
            return False
        if not error.may_retry and not isinstance(error, Overloaded | ModelLoading | NoBackend):
            return False
        attempts = 1 if error.status == 504 else gateway.config.retry.attempts
        if account.attempts > attempts:
            return False
        if not gateway.budget.take(now_s):
            error.should_retry = False
            return False
        return True

    def _give_up(self, failed: Failed) -> None:
        """The last failure is the answer: the backend's own words if it had any."""
        if failed.answer is None:
            raise failed.error
        head, body = failed.answer
        headers = self._response_headers(head)
        if failed.error.should_retry is False:
            headers.append((b"x-should-retry", b"false"))
        self.account.outcome = f"status_{head.status}"
        self.gateway.metrics.rejected(failed.error.code)
        self._answer(head.status, headers, body)

    def _answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer of ours; it leaves when the account is closed."""
        incoming = self.incoming
        incoming.start(status, self._own_headers(headers), len(body))
        if body:
            incoming.hold(body)

    def _refuse(self, error: GatewayError) -> None:
        """Tell the client of ``error``, by a status if there still can be one."""
        incoming, account = self.incoming, self.account
        account.outcome = error.code
        self.gateway.metrics.rejected(error.code)
        if incoming.started:
            self._break_off(error, account.meter)
            return
        dialect = self.route.errors if self.route is not None else _dialect_of(incoming.head.path)
        self._answer(error.status, answers.error_headers(error), answers.error_body(error, dialect))

    def _break_off(self, error: GatewayError, meter: Meter | None) -> None:
        """An answer that had begun can't be completed: say so, and end it visibly."""
        self.account.outcome = "cut" if isinstance(error, UpstreamError) else error.code
        self._cut = True
        if self._sse and meter is not None and self.route is not None:
            inside = meter.cut_in_event
            self.incoming.send(
                answers.error_event(error, self.route.errors, self.route.dialect, inside_event=inside)
            )

    def _cancelled(self) -> None:
        """The client left, or the gateway ends while the request is at work."""
        if self.incoming.gone:
            self.account.outcome = "client_gone"
            return
        self._refuse(Overloaded("the gateway is stopping", retry_after_s=self._soon(1.0)))

    def _leave(self) -> None:
        """Give back what :meth:`_enter` took."""
        if self._entered:
            self._entered = False
            gateway = self.gateway
            gateway.in_flight -= 1
            key = self.caller.id if self.caller is not None else ""
            gateway.per_key[key] -= 1
            if gateway.per_key[key] <= 0:
                del gateway.per_key[key]

    # --- headers ---

    def _own_headers(self, headers: Headers) -> Headers:
        """``headers`` and what every answer carries."""
        headers = [*headers, (b"x-request-id", self.request_id.encode("ascii"))]
        origins = self.gateway.origins
        if origins:
            headers += self._cors(origins)
        if self.decision is not None:
            headers += answers.limit_headers(self.decision)
        caller = self.caller
        if caller is not None and self.account.backend is not None:
            if caller.show_backend:
                headers.append((b"x-llmgw-backend", self.account.backend.encode("ascii")))
            if caller.show_decision:
                why = f"{self.account.backend}; {self.account.why or ''}"
                headers.append((b"x-llmgw-decision", why.encode("ascii", "replace")))
        return headers

    def _response_headers(self, head: ResponseHead, *, stream: bool | None = None) -> Headers:
        """A backend's headers as the client gets them."""
        headers = passed_headers(head)
        if stream is False:
            headers = [pair for pair in headers if pair[0] not in (b"content-type", b"cache-control")]
            headers.append(answers.JSON)
        elif self._sse:
            # nginx in front would collect the stream otherwise.
            headers.append((b"x-accel-buffering", b"no"))
            if head.get(b"cache-control") is None:
                headers.append((b"cache-control", b"no-cache"))
        return headers if stream is False else self._own_headers(headers)

    def _cors(self, origins: frozenset[str]) -> Headers:
        """What lets a page of an allowed origin read the answer (WHATWG Fetch, CORS protocol)."""
        requested = self.incoming.head.headers
        origin = requested.get(b"origin", b"").decode("latin-1")
        if origin not in origins and "*" not in origins:
            return [(b"vary", b"origin")]
        headers = [(b"access-control-allow-origin", origin.encode("latin-1") or b"*"), (b"vary", b"origin")]
        if self.incoming.head.method == "OPTIONS":
            wanted = requested.get(b"access-control-request-headers", b"authorization, content-type, x-api-key")
            headers += [
                (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
                (b"access-control-allow-headers", wanted),
                (b"access-control-max-age", b"600"),
            ]
        else:
            headers.append((b"access-control-expose-headers", b"x-request-id, retry-after, retry-after-ms"))
        return headers

    # --- small decisions ---

    def _assembles(self, outgoing: Outgoing, upstream: Upstream, choice: Choice) -> bool:
        """A call that is not streamed goes to a llama-server as a stream: only so does
        the server notice at once that its client has left."""
        return (
            outgoing.route.assembled
            and not outgoing.ask.stream
            and not upstream.config.raw
            and self._kind(upstream, choice.backend.id) == "llama-server"
        )

    def _wants_usage(self, outgoing: Outgoing, upstream: Upstream) -> bool:
        """Token limits need the real usage, and this backend tells it only when asked."""
        parsed = outgoing.ask
        caller = self.caller
        counted = self.gateway.counts_tokens or (
            caller is not None and any(policy.tokens_per_minute for policy in caller.policies)
        )
        return (
            counted
            and parsed.stream
            and not parsed.has_stream_options
            and outgoing.route.dialect in ("chat", "completion")
            and self._kind(upstream, upstream.config.id) != "llama-server"
        )

    def _kind(self, upstream: Upstream, backend_id: str) -> str | None:
        if upstream.config.kind != "auto":
            return upstream.config.kind
        member = self.gateway.fleet.members.get(backend_id)
        return member.kind if member is not None else None

    def _unsuited(self, route: Route) -> frozenset[str]:
        """Backends that do not have the route: Ollama's own is only Ollama's."""
        if route.errors != OLLAMA:
            return frozenset()
        upstreams = self.gateway.upstreams
        return frozenset(id for id, u in upstreams.items() if self._kind(u, id) not in ("ollama", None))

    def _only_model(self) -> str:
        """The model that a request without one must mean."""
        models = self.gateway.fleet.models(self.gateway.clock())
        if len(models) == 1:
            return next(iter(models))
        raise InvalidRequest("the request must name a model", param="model")

    def _until_s(self) -> float:
        """When the request must be over; a client may lower the limit, never raise it."""
        total_s = self.gateway.config.timeouts.total_s
        wanted_s = _seconds(self.incoming.head.headers.get(TIMEOUT_HEADER))
        if wanted_s is not None and 0 < wanted_s < total_s:
            total_s = wanted_s
        return self.incoming.arrived_s + total_s

    def _soon(self, seconds: float) -> float:
        return retry_after(seconds, self.gateway.dice)

    def _finish_lease(self, lease: Lease, meter: Meter, *, ok: bool, reason: str) -> None:
        lease.finish(
            self.gateway.clock(),
            ok=ok,
            reason=reason,
            usage=meter.usage,
            prompt_s=meter.prompt_s,
            token_rate=meter.token_rate,
        )


def _seconds(value: bytes | None) -> float | None:
    """A header in seconds; a date or nonsense is ``None``."""
    if value is None or not re.fullmatch(rb"\d{1,9}(?:\.\d{1,6})?", value.strip()):
        return None
    return float(value)


def _dialect_of(path: str) -> str:
    """Errors on an unknown path below ``/v1/messages`` are still read by an Anthropic client."""
    return "anthropic" if path.startswith("/v1/messages") else OPENAI
