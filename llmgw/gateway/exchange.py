"""One request's way through the gateway, from top to bottom.

route → caller → body → rules → rate limit → attempt (choose, lease, send, relay)
→ account. Each stage either goes on or raises the error that the client gets.
Whatever happens, :meth:`Exchange.run` returns what was taken, settles the
account, and ends the answer, in this order: a client that has seen the end of
its answer finds its slot and its limits free again.

The stages have returned when the relaying of an answer begins, so a stream does
not keep their frames in memory for the minutes that it may last.

Cancelling the exchange (the client left, or the gateway stops) closes the
backend's connection wherever the request is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater

from llmgw.core.overload import CALM_S, Level
from llmgw.core.retry import backoff_s, retry_after
from llmgw.errors import (
    PLUGIN_FAULTS,
    GatewayError,
    ModelLoading,
    ModelNotFound,
    NoBackend,
    Overloaded,
    RateLimited,
)
from llmgw.gateway import local
from llmgw.gateway.account import Account
from llmgw.gateway.answering import Answering
from llmgw.gateway.attempt import Attempt
from llmgw.gateway.backend_http import passed_headers
from llmgw.gateway.charging import charge_limits
from llmgw.gateway.client_options import timeout_s
from llmgw.gateway.failed import Failed
from llmgw.gateway.reading import read_request
from llmgw.gateway.request_ids import request_id
from llmgw.gateway.routes import find
from llmgw.gateway.rules import apply_rules
from llmgw.gateway.suited import unsuited
from llmgw.values import Caller, Choice, Request

if TYPE_CHECKING:
    from llmgw.core.lease import Lease
    from llmgw.gateway.gateway import Gateway
    from llmgw.gateway.outgoing import Outgoing
    from llmgw.wire.incoming import Incoming


class Exchange:
    """One request being served.

    :ivar hold_until_s: monotonic time until which it may be held for its model; set when it
        is first held.
    """

    __slots__ = (
        "_key",
        "_lease",
        "_retrying",
        "account",
        "answering",
        "gateway",
        "hold_until_s",
        "incoming",
        "request_id",
    )

    def __init__(self, gateway: Gateway, incoming: Incoming) -> None:
        self.gateway = gateway
        self.incoming = incoming
        self.request_id = request_id(incoming.head.headers.get(b"x-request-id"))
        self.account = Account(gateway, incoming, self.request_id)
        self.answering = Answering(gateway, incoming, self.account)
        self.hold_until_s: float | None = None
        self._key: str | None = None
        self._lease: Lease | None = None
        self._retrying = False

    async def run(self) -> None:
        """Carry the request to its end. Never raises."""
        incoming, answering = self.incoming, self.answering
        try:
            try:
                relaying = await self._serve()
                if relaying is not None:
                    await relaying.relayed()
            except GatewayError as error:
                if isinstance(error, Overloaded) and error.retry_after_s is None:
                    error.retry_after_s = self._soon(1.0)
                answering.refuse(error)
            except CancelledError:
                if incoming.gone:
                    self.account.outcome = "client_gone"
                else:
                    answering.refuse(Overloaded("the gateway is stopping", retry_after_s=self._soon(1.0)))
        except GeneratorExit:
            raise  # nobody waits any more: the process ends
        except PLUGIN_FAULTS:
            # Also where an error could not be sent: a plugin may have put anything into it.
            self.gateway.log.failure("request {id} failed", id=self.request_id)
            answering.give_up()
        self._leave()
        self.account.close()
        if answering.broken:
            incoming.abort()
        else:
            incoming.finish()

    # --- the stages ---

    async def _serve(self) -> Attempt | None:
        """:return: the attempt whose answer is being relayed, if one is."""
        gateway, incoming, answering = self.gateway, self.incoming, self.answering
        head = incoming.head
        answering.route = route = find(head.method, head.path)
        self.account.route = route.path
        if head.method == "OPTIONS":
            answering.answer(204, [(b"allow", ", ".join((*route.methods, "OPTIONS")).encode("ascii"))], b"")
            return None
        if route.local == "health":
            answering.answer_json(200, [], b'{"status":"ok"}')
            return None
        identified = gateway.callers.identify(head.headers, incoming.peer, gateway.clock())
        # The type is compared first: isinstance() with Deferred, which has an ABC as its base, is slow.
        if type(identified) is not Caller and isinstance(identified, Deferred):
            identified = await identified
        answering.caller = caller = identified
        self.account.key = caller.id
        if route.local:
            answering.answer_json(200, [], local.answer(route, head.path, caller, gateway))
            return None
        if gateway.overload:
            self._shed(caller)
        self._enter(caller)
        outgoing = await read_request(gateway, incoming, route, self.account)
        try:
            request = apply_rules(gateway, outgoing, caller, self.account)
        except ModelNotFound:
            if gateway.first_word is None:
                raise
            request = await gateway.first_word.tried_again(
                lambda: apply_rules(gateway, outgoing, caller, self.account)
            )
        await charge_limits(gateway, answering, self.account, caller, request)
        return await self._forward(outgoing, request)

    def _shed(self, caller: Caller) -> None:
        """Refuse the request if its caller is to be shed at the current level of overload."""
        level = self.gateway.overload
        if caller.criticality == "critical":
            return
        if level >= Level.REFUSING or caller.criticality == "sheddable":
            raise Overloaded("the gateway is overloaded", retry_after_s=self._soon(CALM_S))

    def _enter(self, caller: Caller) -> None:
        """Count the request in, if the gateway and its key have room."""
        gateway = self.gateway
        limits = gateway.config.limits
        if gateway.in_flight >= limits.in_flight:
            raise Overloaded("the gateway serves as many requests as it may", retry_after_s=self._soon(1.0))
        if gateway.per_key[caller.id] >= limits.in_flight_per_key and caller.id != "anonymous":
            raise RateLimited("too many requests of this key are in flight", retry_after_s=self._soon(1.0))
        gateway.in_flight += 1
        gateway.per_key[caller.id] += 1
        self._key = caller.id

    def _leave(self) -> None:
        """Give back what was taken: the backend, the retry budget, the place in the gateway."""
        self._release()
        key, self._key = self._key, None
        if key is not None:
            self.gateway.in_flight -= 1
            per_key = self.gateway.per_key
            per_key[key] -= 1
            if per_key[key] <= 0:
                del per_key[key]

    def _release(self) -> None:
        """Give back what the current attempt holds."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.drop()
        if self._retrying:
            self._retrying = False
            self.gateway.budget.done()

    async def _forward(self, outgoing: Outgoing, request: Request) -> Attempt | None:
        """Find a backend and ask it; if that fails, try others. :return: as :meth:`_serve`."""
        gateway = self.gateway
        until_s = self._until_s()
        tried = unsuited(gateway, outgoing.route)
        now_s = gateway.clock()
        gateway.budget.request(now_s)
        waiting = gateway.waiting
        try:
            # A new request must not overtake those that wait for the model.
            lined_up = waiting.occupied and waiting.has_line(request.model)
            choice = None if lined_up else self._choose(request, tried, now_s)
        except Overloaded:
            if not waiting.has_room(request.model):
                raise
            choice = None
        except ModelLoading as error:
            choice = await gateway.holding.hold(self, request, tried, until_s, error)
            now_s = gateway.clock()
        if choice is None:
            try:
                choice = await waiting.place(request, tried, until_s)
            except ModelLoading as error:
                choice = await gateway.holding.hold(self, request, tried, until_s, error)
            finally:
                begun_s, now_s = now_s, gateway.clock()
                self.account.waited_s = now_s - begun_s
        outcome = await self._attempt(choice, outgoing, request, now_s, until_s)
        if isinstance(outcome, Failed):
            return await self._try_others(outcome, choice, outgoing, request, tried, until_s)
        return outcome

    async def _try_others(
        self,
        outcome: Failed | Attempt | None,
        choice: Choice,
        outgoing: Outgoing,
        request: Request,
        tried: frozenset[str],
        until_s: float,
    ) -> Attempt | None:
        """After a failed attempt: try backends until one answers, within the retry budget.

        :param choice: the backend that failed.
        :param tried: the ids of those that are not asked.
        :return: as :meth:`_serve`.
        """
        gateway = self.gateway
        retry = gateway.config.retry
        while isinstance(outcome, Failed):
            self._release()
            now_s = gateway.clock()
            if not isinstance(outcome.error, ModelLoading):
                tried = tried | {choice.backend.id}
            loading = gateway.holding.refusal(request, tried)
            if loading is not None and self._may_go_on(outcome, until_s):
                choice = await gateway.holding.hold(self, request, tried, until_s, loading)
                outcome = await self._attempt(choice, outgoing, request, gateway.clock(), until_s)
                continue
            if not self._may_retry(outcome, request, tried, now_s, until_s):
                self._give_up(outcome)
                return None
            gateway.metrics.retried(outcome.error.code)
            self._retrying = not outcome.unsent
            pause_s = backoff_s(self.account.attempts, gateway.dice, retry.backoff_min_s, retry.backoff_max_s)
            await deferLater(gateway.reactor, pause_s)
            now_s = gateway.clock()
            try:
                choice = self._choose(request, tried, now_s, outcome.exact_tokens)
            except GatewayError:
                self._give_up(outcome)
                return None
            outcome = await self._attempt(choice, outgoing, request, now_s, until_s)
        return outcome

    def _choose(
        self, request: Request, tried: frozenset[str], now_s: float, exact_tokens: int | None = None
    ) -> Choice:
        """The backend to ask next. Its lease must be taken in the same turn of the reactor."""
        gateway = self.gateway
        candidates = gateway.fleet.candidates(request, now_s, exclude=tried, exact_tokens=exact_tokens)
        choice = gateway.choose(request, candidates, now_s)
        if choice is None:
            raise Overloaded(
                f"no backend of {request.model!r} can take the request now", retry_after_s=self._soon(1.0)
            )
        return choice

    async def _attempt(
        self, choice: Choice, outgoing: Outgoing, request: Request, now_s: float, until_s: float
    ) -> Failed | Attempt | None:
        """Lease the backend and ask it. :return: as :meth:`Attempt.run`."""
        gateway, account = self.gateway, self.account
        account.attempts += 1
        account.backend = choice.backend.id
        account.why = choice.why or None
        upstream = gateway.upstreams.get(choice.backend.id)
        if upstream is None:
            return Failed(NoBackend("the backend was removed", retry_after_s=self._soon(1.0)))
        self._lease = lease = gateway.fleet.lease(choice.backend.id, request, now_s)
        attempt = Attempt(
            gateway,
            self.answering,
            outgoing,
            request,
            lease=lease,
            choice=choice,
            upstream=upstream,
            until_s=until_s,
        )
        hop = None if account.trace is None else account.trace.hop(choice.backend.id, now_s)
        outcome = await attempt.run()
        if isinstance(outcome, Failed):
            account.fails(choice.backend.id, lease.reason)
            if hop is not None:
                hop.end(gateway.clock(), outcome.error.code)
        return outcome

    def _may_retry(
        self, failed: Failed, request: Request, tried: frozenset[str], now_s: float, until_s: float
    ) -> bool:
        """Whether another backend is asked: :meth:`_may_go_on`, there is one, and the retry budget
        allows it. A request that no backend has seen is not counted: a backend that is gone must
        not cost an answer while there is another."""
        gateway, error = self.gateway, failed.error
        if not self._may_go_on(failed, until_s):
            return False
        try:
            gateway.fleet.candidates(request, now_s, exclude=tried, exact_tokens=failed.exact_tokens)
        except GatewayError:
            return False
        if not failed.unsent and not gateway.budget.take(now_s):
            error.should_retry = False
            return False
        return True

    def _may_go_on(self, failed: Failed, until_s: float) -> bool:
        """The client still waits, was sent nothing of an answer, and has attempts left."""
        incoming, error = self.incoming, failed.error
        if not error.may_retry or incoming.gone or self.gateway.clock() >= until_s:
            return False
        if incoming.started and not self.answering.opened:
            return False
        return self.account.attempts <= (1 if error.status == 504 else self.gateway.config.retry.attempts)

    def _give_up(self, failed: Failed) -> None:
        """Answer with the last failure: the backend's own answer if it sent one."""
        if failed.answer is None:
            raise failed.error
        head, body = failed.answer
        headers = passed_headers(head)
        if failed.error.should_retry is False:
            headers.append((b"x-should-retry", b"false"))
        self.account.outcome = f"status_{head.status}"
        self.gateway.metrics.rejected(failed.error.code)
        self.answering.answer(head.status, headers, body)

    # --- small decisions ---

    def _until_s(self) -> float:
        """When the request must be over. A client may lower the limit, not raise it."""
        total_s = self.gateway.config.timeouts.total_s
        wanted_s = timeout_s(self.incoming.head.headers)
        if wanted_s is not None and wanted_s < total_s:
            total_s = wanted_s
        return self.incoming.arrived_s + total_s

    def _soon(self, seconds: float) -> float:
        return retry_after(seconds, self.gateway.dice)
