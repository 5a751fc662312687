"""One simulated gateway: the real fleet, a router, and what happens between them.

What a request goes through is that of ``llmgw.gateway``: candidates, choice,
lease, attempt, a retry elsewhere within the budget, and if the operator wants
it a bounded wait. Bytes, callers and limits are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from llmgw.core.fleet import BackendSpec, Fleet
from llmgw.core.retry import RetryBudget, backoff_s
from llmgw.errors import GatewayError, Overloaded
from llmgw.simulation.exchange import MODEL, Exchange, Record
from llmgw.simulation.node import Node, Work
from llmgw.values import Backend, Choice, Usage

if TYPE_CHECKING:
    from llmgw.core.member import Member
    from llmgw.simulation.run import Settings
    from llmgw.simulation.site import Site
    from llmgw.simulation.workload import Job

NO_CAP = 1_000_000

MAX_DECLINES = 8
"""After so many who wait would rather wait on, nobody else is asked until the next change."""


class Gateway:
    """:param over: called with each finished job and its record.
    :ivar faults: how often the router raised; the first one's words are in ``fault``.
    """

    def __init__(
        self,
        site: Site,
        router: Any,
        settings: Settings,
        dice: Random,
        over: Callable[[Job, Record], object],
    ) -> None:
        self.fleet = Fleet(settings.breaker, dice)
        self.router = router
        self.faults = 0
        self.fault = ""
        self._site = site
        self._clock = site.clock
        self._settings = settings
        self._dice = dice
        self._over = over
        self._budget = RetryBudget()
        self._waiting: list[Exchange] = []
        self._silent: dict[Exchange, None] = {}  # asked and without a first token, oldest first
        self._order = getattr(router, "order", None)
        if getattr(router, "observes", True):
            self.fleet.observe = self._observe

    # --- the fleet ----------------------------------------------------------------

    def join(self, node: Node, weight: float | None = None) -> None:
        """Know ``node`` from now on, and look at it at once."""
        spec, settings = node.spec, self._settings
        cap: int | None = None
        if settings.cap == "none":
            cap = NO_CAP
        elif settings.cap == "slots":
            cap = spec.slots + settings.overcommit
        elif isinstance(settings.cap, int):
            cap = settings.cap
        self.fleet.put(
            BackendSpec(
                spec.id,
                f"http://{spec.id}",
                spec.weight if weight is None else weight,
                (MODEL,),
                cap,
                spec.context_length,
            ),
            self._clock.now_s,
        )
        self.look(spec.id)

    def look(self, node_id: str) -> None:
        """One health check; a good moment to look for requests that got no answer at all."""
        now_s = self._clock.now_s
        self.fleet.report(node_id, self._site.report(node_id), now_s)
        limit_s = now_s - self._settings.first_token_s
        for exchange in list(self._silent):
            if exchange.sent_s > limit_s:
                break
            self._abandon(exchange)
            self._fail(exchange, "timeout")
        self._serve_waiting(node_id)

    # --- requests -----------------------------------------------------------------

    def request(self, job: Job) -> None:
        """A client asks. Whoever waits already was offered all that is free, and declined."""
        now_s = self._clock.now_s
        exchange = Exchange(job, now_s)
        self._budget.request(now_s)
        if self._settings.patience_s > 0.0:
            self._clock.at(now_s + self._settings.patience_s, self._leave, exchange)
        try:
            chosen = self._choose(exchange)
        except GatewayError as error:
            if isinstance(error, Overloaded) and self._may_wait():
                self._wait(exchange)
            else:
                self._end(exchange, error.code)
            return
        self._send(exchange, chosen)

    def _choose(self, exchange: Exchange) -> Choice:
        now_s = self._clock.now_s
        candidates = self.fleet.candidates(exchange.request, now_s, exclude=frozenset(exchange.asked))
        chosen: Choice | Backend | None
        try:
            chosen = self.router.choose(exchange.request, candidates, now_s)
        except Exception as error:
            self._failed("choose", error)
            chosen = min(candidates, key=lambda each: each.profile.in_flight)
        if chosen is None:
            raise Overloaded("the router wants none of them now", retry_after_s=1.0)
        return chosen if isinstance(chosen, Choice) else Choice(chosen)

    def _send(self, exchange: Exchange, choice: Choice) -> None:
        now_s = self._clock.now_s
        backend = choice.backend
        job = exchange.job
        exchange.asked = (*exchange.asked, backend.id)
        exchange.sent_s = now_s
        self._silent[exchange] = None
        exchange.lease = self.fleet.lease(backend.id, exchange.request, now_s)
        exchange.work = work = Work(
            job.pieces,
            job.prompt_tokens,
            job.output_tokens,
            job.answer,
            choice.slot if self._settings.slot_choice else None,
            lambda work: self._site.back(backend.id, self._first, exchange, work),
            lambda work: self._site.back(backend.id, self._done, exchange, work),
            lambda work, reason: self._site.back(backend.id, self._broken, exchange, work, reason),
        )
        self._site.send(backend.id, work)

    def _first(self, exchange: Exchange, work: Work) -> None:
        if work is not exchange.work or exchange.ended:
            return
        now_s = self._clock.now_s
        exchange.first_s = now_s
        self._silent.pop(exchange, None)
        assert exchange.lease is not None
        exchange.lease.first_token(now_s)

    def _done(self, exchange: Exchange, work: Work) -> None:
        if work is not exchange.work or exchange.ended:
            return
        now_s = self._clock.now_s
        assert exchange.lease is not None
        seconds = now_s - (exchange.first_s or now_s)
        exchange.lease.finish(
            now_s,
            ok=True,
            reason="done",
            usage=Usage(work.prompt_tokens, work.cached, work.output_tokens),
            prompt_s=work.prompt_s,
            token_rate=(work.output_tokens - 1) / seconds if seconds > 0.0 else None,
        )
        self._end(exchange, "done")
        self._serve_waiting(exchange.asked[-1])

    def _broken(self, exchange: Exchange, work: Work, reason: str) -> None:
        if work is exchange.work and not exchange.ended:
            self._fail(exchange, reason)

    def _fail(self, exchange: Exchange, reason: str) -> None:
        """The attempt failed; before the first token somebody else may be asked."""
        now_s, node_id = self._clock.now_s, exchange.asked[-1]
        lease = exchange.lease
        assert lease is not None
        exchange.work = None
        self._silent.pop(exchange, None)
        lease.finish(now_s, ok=reason == "loading", reason=reason, refused=reason == "refused")
        self._return_budget(exchange)
        if exchange.first_s is None and self._may_retry(exchange, reason):
            pause_s = backoff_s(len(exchange.asked), self._dice)
            self._clock.at(now_s + pause_s, self._again, exchange, reason)
        else:
            self._end(exchange, reason)
        self._serve_waiting(node_id)

    def _leave(self, exchange: Exchange) -> None:
        """The client has waited long enough for its first token."""
        if exchange.ended or exchange.first_s is not None:
            return
        if exchange in self._waiting:
            self._waiting.remove(exchange)
        if exchange.work is not None:
            assert exchange.lease is not None
            self._abandon(exchange)
            exchange.lease.finish(self._clock.now_s, ok=True, reason="client_gone")
            exchange.work = None
        self._end(exchange, "client_gone")
        if exchange.asked:
            self._serve_waiting(exchange.asked[-1])

    def _abandon(self, exchange: Exchange) -> None:
        """Close the connection, so that the server stops."""
        if exchange.work is not None:
            self._site.abandon(exchange.asked[-1], exchange.work)

    def _may_retry(self, exchange: Exchange, reason: str) -> bool:
        now_s = self._clock.now_s
        # A time-out is tried once more at most: whoever waited so long may do so twice.
        if len(exchange.asked) > (1 if reason == "timeout" else self._settings.retries):
            return False
        try:
            self.fleet.candidates(exchange.request, now_s, exclude=frozenset(exchange.asked))
        except GatewayError:
            return False
        if reason == "refused":  # nobody has seen the request
            return True
        exchange.budgeted = self._budget.take(now_s)
        return exchange.budgeted

    def _return_budget(self, exchange: Exchange) -> None:
        if exchange.budgeted:
            self._budget.done()
            exchange.budgeted = False

    def _again(self, exchange: Exchange, reason: str) -> None:
        if exchange.ended:
            return
        try:
            chosen = self._choose(exchange)
        except GatewayError:
            self._end(exchange, reason)
        else:
            self._send(exchange, chosen)

    def _end(self, exchange: Exchange, outcome: str) -> None:
        exchange.ended = True
        self._silent.pop(exchange, None)
        self._return_budget(exchange)
        now_s, job, work = self._clock.now_s, exchange.job, exchange.work
        done = outcome == "done"
        arrived_s, first_s = exchange.arrived_s, exchange.first_s
        self._over(
            job,
            Record(
                job.id,
                arrived_s,
                None if first_s is None or not done else first_s - arrived_s,
                now_s - arrived_s,
                exchange.asked,
                job.prompt_tokens,
                work.cached if work is not None and done else 0,
                job.output_tokens if done else 0,
                outcome,
                exchange.waited_s,
            ),
        )

    # --- the bounded wait ---------------------------------------------------------

    def _may_wait(self) -> bool:
        settings = self._settings
        if settings.max_wait_s <= 0.0:
            return False
        most = settings.max_waiting
        if most is None:
            most = 2 * sum(member.cap for member in self.fleet.members.values() if member.cap < NO_CAP)
        return len(self._waiting) < most

    def _wait(self, exchange: Exchange) -> None:
        self._waiting.append(exchange)
        self._clock.at(self._clock.now_s + self._settings.max_wait_s, self._give_up, exchange)

    def _give_up(self, exchange: Exchange) -> None:
        if not exchange.ended and exchange in self._waiting:
            self._waiting.remove(exchange)
            exchange.waited_s = self._clock.now_s - exchange.arrived_s
            self._end(exchange, "overloaded")

    def _serve_waiting(self, node_id: str) -> None:
        """Something changed at ``node_id``: let those who wait have what is free.

        Binding is late: who is next is the router's ``order`` (oldest first without
        one), and where is its ``choose`` among all that are free, so that it may
        decline a slow backend by ``None``. Then the next one is asked, a few times.
        """
        waiting = self._waiting
        declined: list[Exchange] = []
        while len(waiting) > len(declined) and len(declined) < MAX_DECLINES:
            member = self.fleet.members.get(node_id)
            if member is None or member.view.in_flight >= member.cap:
                return
            exchange = self._next(member, declined)
            if exchange is None:
                return
            try:
                chosen = self._choose(exchange)
            except Overloaded:
                declined.append(exchange)
                continue
            except GatewayError:
                return
            waiting.remove(exchange)
            exchange.waited_s = self._clock.now_s - exchange.arrived_s
            self._send(exchange, chosen)

    def _next(self, member: Member, declined: list[Exchange]) -> Exchange | None:
        fit = [
            exchange
            for exchange in self._waiting
            if exchange not in declined and exchange.request.prompt_tokens <= member.window
        ]
        if not fit:
            return None
        if self._order is None or len(fit) == 1:
            return fit[0]
        try:
            index: int = self._order([each.request for each in fit], member.backend, self._clock.now_s)
            return fit[index]
        except Exception as error:
            self._failed("order", error)
            return fit[0]

    # --- the router's faults ------------------------------------------------------

    def _observe(self, event: Any) -> None:
        try:
            self.router.observe(event)
        except Exception as error:
            self._failed("observe", error)

    def _failed(self, where: str, error: Exception) -> None:
        self.faults += 1
        if not self.fault:
            self.fault = f"{where}: {type(error).__name__}: {error}"
