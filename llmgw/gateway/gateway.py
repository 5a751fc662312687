"""What all requests of this process share; assembled by ``service``."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from llmgw.core.overload import Level
from llmgw.errors import PLUGIN_FAULTS, GatewayError
from llmgw.finite import is_finite_number
from llmgw.foreign import set_aside, unwanted
from llmgw.gateway import answers
from llmgw.gateway.exchange import Exchange
from llmgw.gateway.holding import Holding
from llmgw.gateway.recent import Recent
from llmgw.gateway.request_ids import new_request_id
from llmgw.gateway.top_ups import TopUps
from llmgw.gateway.waiting import WaitingRoom
from llmgw.seldom import Seldom
from llmgw.values import Backend, Caps, Choice, Usage
from llmgw.wire.coroutines import Task

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from twisted.python.failure import Failure

    from llmgw.config import BackendConfig, Config, ModelConfig
    from llmgw.core.body import BodyLimits
    from llmgw.core.fleet import Fleet
    from llmgw.core.http import HttpFault
    from llmgw.core.retry import RetryBudget
    from llmgw.gateway.access_log import AccessLog
    from llmgw.gateway.backend_http import Outbound
    from llmgw.gateway.caller import Callers
    from llmgw.gateway.filtering import Filters
    from llmgw.gateway.first_word import FirstWord
    from llmgw.gateway.metrics import IMetrics
    from llmgw.tracing import Tracer
    from llmgw.values import Event, Policy, Request
    from llmgw.wire.incoming import Headers, Incoming
    from llmgw.wire.pool import Pool
    from llmgw.wire.sweep import Sweep


class Upstream(Struct):
    """How one backend is reached."""

    config: BackendConfig
    outbound: Outbound
    pool: Pool


class Gateway:
    """The parts that exchanges use. ``service`` swaps them on reload; requests that are
    being served keep what they hold.

    :ivar upstreams: by backend id.
    :ivar aliases: model rules by the name that clients use.
    :ivar caps: what requests for a model may ask for, by the name that clients use.
    :ivar per_key: number of requests being served, by key id.
    :ivar in_flight: number of requests being served.
    :ivar overload: the level of overload; set by :mod:`llmgw.pressure`.
    :ivar waiting: the requests that wait for a slot.
    :ivar holding: the requests that wait for their model.
    :ivar top_ups: the requests that are charged more while they run.
    :ivar first_word: set while a source of backends has not reported yet what it has.
    :ivar recent: the latest requests that are over.
    :ivar scores: by backend id, what the router said when it last chose it.
    :ivar router_faults: number of choices made without the router, because it failed.
    :ivar limiter_degraded: number of requests let through because the limiter failed.
    """

    log = Logger()

    def __init__(
        self,
        *,
        config: Config,
        fleet: Fleet,
        router: Any,
        limiter: Any,
        callers: Callers,
        budget: RetryBudget,
        metrics: IMetrics,
        access_log: AccessLog | None,
        tracer: Tracer | None = None,
        filters: Filters,
        body_limits: BodyLimits,
        sweep: Sweep,
        reactor: Any,
        dice: random.Random,
    ) -> None:
        self.reactor = reactor
        self.first_word: FirstWord | None = None
        self.fleet = fleet
        self.limiter = limiter
        self.callers = callers
        self.budget = budget
        self.metrics = metrics
        self.access_log = access_log
        self.tracer = tracer
        self.filters = filters
        self.body_limits = body_limits
        self.sweep = sweep
        self.clock = sweep.clock
        self.wall_clock = time.time
        self.dice = dice
        self.upstreams: dict[str, Upstream] = {}
        self.per_key: Counter[str] = Counter()
        self.in_flight = 0
        self.overload = Level.CALM
        self.scores: dict[str, float] = {}
        self.router_faults = 0
        self.limiter_degraded = 0
        self.limiter_faults = 0
        self._seldom = Seldom(self.clock)
        self._tasks: set[Task] = set()
        self._forget_task = self._tasks.discard
        self.waiting = WaitingRoom(self)
        self.recent = Recent()
        self.holding = Holding(self)
        self.top_ups = TopUps(self)
        self.configure(config)
        self.use_router(router)

    def configure(self, config: Config) -> None:
        """Take over the plain settings of ``config``; parts that need building are swapped by ``service``."""
        self.config = config
        self.policies: tuple[Policy, ...] = config.rate_limits
        self.counts_tokens = any(policy.tokens_per_minute for policy in config.rate_limits)
        self.aliases: Mapping[str, ModelConfig] = {model.name: model for model in config.models}
        rules = {model.name: Caps.tightest([model.caps]) for model in config.models}
        self.caps = {name: caps for name, caps in rules.items() if caps is not None}
        self.origins = frozenset(config.cors.origins)
        self.shows = config.answers
        self.exemplars = config.metrics.exemplars

    def use_router(self, router: Any) -> None:
        """Let ``router`` choose from now on. Events are made only for a router that observes
        them, prefixes only for one that wants them."""
        self.router = router
        self.fleet.observe = self.tell_router if self._trait(router, "observes", True) else None
        admission = self.config.admission
        self._prefixes = self._trait(router, "wants_prefix", False)
        self._prefixes_alone = admission.slot_choice or admission.max_wait_s > 0
        adapt = getattr(router, "adapt", None)
        if adapt is not None:
            try:
                answer = adapt(slot_choice=admission.slot_choice, may_wait=admission.max_wait_s > 0)
            except PLUGIN_FAULTS:
                self._complain("router")
            else:
                self._not_nothing("router", "adapt", answer)

    def _trait(self, router: Any, name: str, otherwise: bool) -> bool:
        try:
            return bool(getattr(router, name, otherwise))
        except PLUGIN_FAULTS:
            self._complain("router")
            return otherwise

    # --- called by the site ---

    def serve(self, incoming: Incoming) -> None:
        """Start the exchange of one request. Never raises."""
        task = Task(Exchange(self, incoming).run(), self._forget_task)
        if not task.start():
            incoming.task = task
            self._tasks.add(task)

    def fault_answer(self, fault: HttpFault, peer: str) -> tuple[Headers, bytes]:
        """Count and log malformed bytes. :return: headers and body of the answer to them."""
        self.metrics.rejected(fault.code)
        self.metrics.no_request(fault.status)
        error = GatewayError(fault.message, code=fault.code, status=fault.status)
        error.type = "invalid_request_error" if fault.status < 500 else "server_error"
        if fault.status == 405:
            error.headers.append(("allow", "GET, HEAD, POST, OPTIONS"))
        request_id = new_request_id()
        error.headers.append(("x-request-id", request_id))
        if self.access_log is not None:
            self.access_log.write_fault(self.wall_clock(), request_id, peer, fault.status, fault.code)
        return answers.error_headers(error), answers.error_body(error, "openai")

    # --- used by exchanges ---

    def choose(self, request: Request, candidates: Sequence[Backend], now_s: float) -> Choice | None:
        """Ask the router. If it fails, or names anything but a candidate, the choice is by least
        connections, and the fault is logged. ``None``: it declines all of them."""
        shown, candidates = candidates, candidates[:]  # whatever it does to what it is shown
        try:
            answer = self.router.choose(request, shown, now_s)
        except PLUGIN_FAULTS:
            return self._without_router(candidates)
        if answer is None:
            return None
        choice = answer if isinstance(answer, Choice) else Choice(answer)
        chosen = choice.backend
        for candidate in candidates:
            if candidate is chosen:
                break
        else:
            stranger = repr(chosen.id) if isinstance(chosen, Backend) else set_aside(chosen)
            return self._without_router(candidates, f"chose {stranger}, which is no candidate")
        fault = fault_of(choice)
        if fault is not None:
            return self._without_router(candidates, f"chose {chosen.id} with {fault}")
        self.scores[chosen.id] = choice.score
        return choice

    def _without_router(self, candidates: Sequence[Backend], detail: str | None = None) -> Choice:
        """Choose by least connections. :param detail: what the router did, unless it raised."""
        self._complain("router", detail)
        self.router_faults += 1
        least = min(candidates, key=lambda backend: backend.profile.in_flight)
        return Choice(least, why="least connections: the router failed")

    def order(self, waiting: Sequence[Request], backend: Backend, now_s: float) -> int:
        """Ask a router that has an ``order`` which waiting request goes next. If it fails, or
        names none of them, the oldest goes, as in :meth:`choose`. :return: an index."""
        try:
            place = self.router.order(waiting, backend, now_s)
        except PLUGIN_FAULTS:
            self._complain("router")
        else:
            if isinstance(place, int) and 0 <= place < len(waiting):
                return place
            named = place if type(place) is int else set_aside(place)
            self._complain("router", f"ordered {named} of {len(waiting)} first")
        self.router_faults += 1
        return 0

    def target_of(self, name: str) -> str:
        """The model that backends are asked for when a client asks for ``name``."""
        rule = self.aliases.get(name)
        return name if rule is None else rule.target or name

    def wants_prefix(self, model: str) -> bool:
        """Whether prefixes of prompts for ``model`` are computed: the router wants them, and there
        is something to choose: a backend, a slot, or who goes first."""
        return self._prefixes and (self._prefixes_alone or len(self.fleet.takers(model)) > 1)

    def kind_of(self, upstream: Upstream) -> str | None:
        """The kind of server: from its configuration, else as found by its health source."""
        kind = upstream.config.kind
        if kind != "auto":
            return kind
        member = self.fleet.members.get(upstream.config.id)
        return member.kind if member is not None else None

    def tell_router(self, event: Event) -> None:
        """Pass an event to the router; what it raises is logged."""
        try:
            answer = self.router.observe(event)
        except PLUGIN_FAULTS:
            self._complain("router")
        else:
            if answer is not None:
                self._not_nothing("router", "observe", answer)

    def limiter_gauges(self) -> Mapping[str, tuple[str, float]]:
        """The limiter's gauges: help text and value by name; empty if it fails."""
        try:
            told: Any = getattr(self.limiter, "gauges", dict)()
            if not isinstance(told, Mapping):
                self.limiter_fault(f"returned from gauges {set_aside(told)}, which is no mapping")
                return {}
            gauges = {name: (" ".join(text.split()), float(value)) for name, (text, value) in told.items()}
            odd = [name for name in gauges if not _GAUGE.fullmatch(name)]
        except PLUGIN_FAULTS:
            self.limiter_fault()
            return {}
        if odd:
            self.limiter_fault(f"has gauges of no lawful name, such as {odd[0]!r}")
        return {name: gauge for name, gauge in gauges.items() if name not in odd}

    def settle(self, reservation: Any, used: Usage | None) -> None:
        """Settle a reservation with the limiter; what it raises is logged."""
        try:
            answer = self.limiter.settle(reservation, used)
        except PLUGIN_FAULTS:
            self.limiter_fault()
        else:
            if answer is not None:
                self.limiter_will("settle", answer)

    def warn_of_answer(self, backend_id: str, what: str) -> None:
        """A backend's answer is none as it should be; each kind is told once a minute at most.

        :param what: one of few.
        """
        more = self._seldom.words((backend_id, what))
        if more is not None:
            self.log.warn(
                "backend {backend}: an answer of it {what}{more}", backend=backend_id, what=what, more=more
            )

    def warn_of_lack(self, detail: str) -> None:
        """No connection to any backend could be opened, for want of a descriptor or a local port."""
        more = self._seldom.words("lack")
        if more is not None:
            self.log.error(
                "a request failed for a lack of this machine's own, and of no backend: {detail}{more}",
                detail=detail,
                more=more,
            )

    def cancel_all(self) -> None:
        """Cancel every exchange."""
        for task in list(self._tasks):
            task.cancel()

    def limiter_failed(self, detail: str | None = None) -> None:
        """The rate limiter raised, or did not return a decision: the request passes, and is counted."""
        self.limiter_degraded += 1
        self._complain("rate limiter", detail)

    def limiter_fault(self, detail: str | None = None) -> None:
        """The rate limiter has made another mistake."""
        self.limiter_faults += 1
        self._complain("rate limiter", detail)

    def limiter_will(self, method: str, answer: Any) -> None:
        """The rate limiter does by and by what it was to do at once: as well, unless that fails."""
        if not isinstance(answer, Deferred):
            self.limiter_fault(unwanted(method, answer))
            return

        def failed(failure: Failure) -> None:
            self.limiter_faults += 1
            self._complain("rate limiter", failure=failure)

        answer.addErrback(failed)

    def _not_nothing(self, what: str, method: str, answer: Any) -> None:
        """Tell of what came from where nothing is expected."""
        if answer is not None:
            self._complain(what, unwanted(method, answer))

    def _complain(self, what: str, detail: str | None = None, failure: Failure | None = None) -> None:
        """Tell of a plugin's fault, of each kind once a minute.

        :param detail: begins with a word for the kind; ``None``: it has raised, just now or as ``failure``.
        """
        who = f"the {what} plugin"
        if detail is None:
            self._seldom.tell_raised(self.log, who, failure=failure)
        else:
            self._seldom.tell(self.log, who, detail)


WHY_CHARACTERS = 500
"""A router's reason goes into logs, headers and a list that is kept."""
MOST_SLOTS = 1 << 20
"""No server has so many."""

_GAUGE = re.compile("[a-zA-Z_:][a-zA-Z0-9_:]*")


def fault_of(choice: Choice) -> str | None:
    """What is wrong with a router's answer, apart from the backend."""
    score, why, slot = choice.score, choice.why, choice.slot
    if not isinstance(score, float) and not is_finite_number(score):
        return f"a score of type {type(score).__name__} that is no number"
    if not isinstance(why, str):
        return f"a why of type {type(why).__name__}"
    if len(why) > WHY_CHARACTERS or not why.isprintable():
        return f"a why that is no line of {WHY_CHARACTERS} characters"
    if slot is not None and (not isinstance(slot, int) or not 0 <= slot < MOST_SLOTS):
        return "a slot that cannot be"
    return None
