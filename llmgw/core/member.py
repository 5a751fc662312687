"""One member of the fleet: its settings, its reports, and its standing.

Four sources determine whether a member may be asked:

- **The operator**: settings, and draining.
- **Health reports**, judged by fall and rise. Three refused connections in a row are a fact:
  the member is down. Three timeouts are only an opinion (a busy server answers late): it is
  ignored where it would do harm, and does not count while streams of that member still move.
- **The member itself**: it is loading its model, or is busy until a time it has named.
- **Its requests**, through one breaker per model.

:meth:`Member.standing` combines them. ``quiet`` is a short cut for the common case that none
of them has anything against the member.
"""

from __future__ import annotations

import sys
from math import inf
from random import Random
from typing import TYPE_CHECKING

from llmgw.core.breaker import CLOSED, HALF_OPEN, OPEN, Breaker, BreakerRules, ramp
from llmgw.core.hold import LOAD_S
from llmgw.core.profile import LiveProfile
from llmgw.core.spec import BackendSpec
from llmgw.core.standing import Down, Standing
from llmgw.values import Backend, HealthReport

if TYPE_CHECKING:
    from llmgw.core.lease import Lease
    from llmgw.core.stock import Stock

DEFAULT_CAP = 64
"""The cap for a backend without one by configuration or report."""

NO_LIMIT = sys.maxsize
"""The window of a member with an unknown context length."""

BUSY_CAP_S = 60.0
"""The longest pause that a member's ``Retry-After`` can ask for."""

BUSY_BIAS_S = 5.0
"""After such a pause the member warms up for this long."""

MOVING_S = 15.0
"""A stream that has moved within this time (three health checks) proves that the member is alive."""

HEARSAY_S = 5.0
"""How long the answer "still loading" to a request is believed without a report."""

CHECK_S = 5.0
"""When a client should ask again for what only a health check can bring back."""


class Member:
    """A backend's whole state in this process. Written by :class:`~llmgw.core.fleet.Fleet` alone.

    :ivar backend: what routers get; replaced when settings or reports change it, always with
        the same profile.
    :ivar health: the last report.
    :ivar leases: requests under way.
    :ivar draining: gets no new requests, by the operator's decision.
    :ivar removed: gets no new requests, and is forgotten after its last lease.
    :ivar kind: ``"llama-server"`` or ``"ollama"`` once a report was certain.
    :ivar window: context length in tokens, :data:`NO_LIMIT` if it is not known.
    :ivar cap: most requests in flight, from all gateways.
    :ivar room: most requests in flight from this gateway: the cap, or its share of it.
    :ivar view: ``profile.view``.
    :ivar models: names of the models it serves; ``None`` while not known.
    :ivar quiet: nothing is wrong with it, and nothing is warming up.
    :ivar fault: the reason of the last request that it failed; empty if there was none.
    """

    __slots__ = (
        "_context",
        "_dice",
        "_falls",
        "_load_s",
        "_loading_since_s",
        "_models",
        "_named",
        "_refused",
        "_rises",
        "_rules",
        "_share",
        "_slots",
        "_warm_from_s",
        "backend",
        "breakers",
        "busy_until_s",
        "cap",
        "down",
        "draining",
        "fault",
        "health",
        "kind",
        "leases",
        "loading_until_s",
        "models",
        "profile",
        "quiet",
        "removed",
        "role",
        "room",
        "spec",
        "stock",
        "view",
        "window",
    )

    def __init__(self, spec: BackendSpec, rules: BreakerRules, dice: Random) -> None:
        self.spec = spec
        self.profile = LiveProfile()
        self.view = self.profile.view
        self.breakers: dict[str, Breaker] = {}
        self.leases: set[Lease] = set()
        self.health: HealthReport | None = None
        self.kind: str | None = None
        self.down: Down | None = None
        self.draining = False
        self.removed = False
        self.quiet = True
        self.fault = ""
        self.busy_until_s = -inf
        self.loading_until_s = -inf
        self._rules = rules
        self._dice = dice
        self._falls = 0
        self._rises = 0
        self._refused = False  # the last request met a refused connection
        self._loading_since_s: float | None = None
        self._load_s = LOAD_S
        self._warm_from_s = -inf
        self._models: tuple[str, ...] | None = None
        self._slots: int | None = None
        self._share: int | None = None
        self._context: int | None = None
        self.role: str | None = None
        self.stock: Stock | None = None
        self.models: tuple[str, ...] | None
        self.configure(spec)

    # --- what is known ------------------------------------------------------------

    def configure(self, spec: BackendSpec) -> None:
        """Take over settings, and keep what was learnt."""
        self.spec = spec
        slots = self._slots
        context = self._context if spec.context_length is None else spec.context_length
        self.window = NO_LIMIT if context is None else context
        self.cap = spec.max_connections or slots or DEFAULT_CAP
        self.share(self._share)
        self.backend = Backend(
            id=spec.id,
            weight=spec.weight,
            slots=slots,
            max_connections=self.cap,
            context_length=context,
            labels=spec.labels,
            profile=self.view,
        )
        self.models = models = self._known_models()
        self._named = models is not None
        if models is not None:
            self.breakers = {name: kept for name, kept in self.breakers.items() if name in models}

    def busy_with(self, model: str) -> int:
        """The number of this gateway's requests for ``model`` in flight there."""
        return sum(lease.request.model == model for lease in self.leases)

    def has_slot(self, model: str) -> bool:
        """Whether the slots of the model, if their number is known, leave room for one more request."""
        slots = None if self.stock is None else self.stock.slots.get(model)
        return slots is None or self.busy_with(model) < slots

    def is_cold(self, model: str) -> bool:
        """Whether it could load ``model``, and has not."""
        return self.stock is not None and model in self.stock.cold

    def share(self, most: int | None) -> None:
        """Set this gateway's share of the cap; ``None``: all of it."""
        self._share = most
        self.room = self.cap if most is None else min(most, self.cap)

    def key(self, model: str) -> str:
        """The key of ``model`` in ``breakers``.

        While the member's models are not known, all names share the key ``""``: names come from
        callers, and must not fill the memory.
        """
        return model if self._named else ""

    def breaker(self, model: str) -> Breaker:
        """The breaker for ``model``, created at first use."""
        key = self.key(model)
        breaker = self.breakers.get(key)
        if breaker is None:
            breaker = self.breakers[key] = Breaker(self._rules, self._dice)
        return breaker

    def is_ejected(self, model: str) -> bool:
        """Whether it is passively ejected for ``model``; half-open counts as ejected."""
        breaker = self.breakers.get(self.key(model))
        return self.down is Down.TIMEOUT or (breaker is not None and breaker.state in (OPEN, HALF_OPEN))

    def standing(self, model: str, now_s: float, alone: bool = False) -> Standing:
        """Judge whether it may be asked, and update ``available`` and ``warmth`` of its profile.

        :param alone: it is the only member of its pool; opinions are then ignored.
        """
        standing = self._judge(model, now_s, alone)
        if standing is Standing.READY:
            self.admit(model, now_s)
        else:
            self.view.available = False
        return standing

    def admit(self, model: str, now_s: float) -> None:
        """Show it to routers as available, with its warmth for ``model``."""
        rules, view = self._rules, self.view
        warmth = min(
            ramp(now_s - self._warm_from_s, rules.slow_start_s, rules.slow_start_floor),
            ramp(now_s - self.busy_until_s, BUSY_BIAS_S, rules.slow_start_floor),
        )
        breaker = self.breakers.get(self.key(model))
        if breaker is not None:
            warmth = min(warmth, breaker.warmth(now_s))
        view.available = True
        view.warmth = warmth
        self.quiet = (
            warmth >= 1.0
            and self.down is None
            and now_s >= self.loading_until_s
            and all(each.current(now_s) is CLOSED for each in self.breakers.values())
        )

    def back_in_s(self, model: str, now_s: float) -> float:
        """Estimated seconds until an ejected member is tried again."""
        if self.down is Down.TIMEOUT:
            return CHECK_S
        return self.breaker(model).opens_again_s(now_s)

    def free_in_s(self) -> float:
        """Estimated seconds until one of its requests in flight ends."""
        return (self.profile.duration_s or 1.0) / max(1, self.view.in_flight)

    def loaded_in_s(self, now_s: float) -> float:
        """Estimated seconds until its model is loaded, going by the last load seen."""
        since_s = now_s if self._loading_since_s is None else self._loading_since_s
        return max(1.0, self._load_s - (now_s - since_s))

    # --- what happens -------------------------------------------------------------

    def cool(self, now_s: float) -> None:
        """It is cold: begin slow start."""
        self._warm_from_s = now_s
        self.quiet = False

    def busy(self, until_s: float, now_s: float) -> None:
        """It has asked for a pause, of which a minute is granted at most."""
        self.busy_until_s = max(self.busy_until_s, min(until_s, now_s + BUSY_CAP_S))
        self.quiet = False

    def said_loading(self, now_s: float) -> bool:
        """A request was told that the model is still loading. :return: it is news."""
        news = now_s >= self.loading_until_s
        if self._loading_since_s is None:
            self._loading_since_s = now_s
        self.loading_until_s = max(self.loading_until_s, now_s + HEARSAY_S)
        self.quiet = False
        return news

    def succeeded(self, duration_s: float, now_s: float) -> None:
        """A request was answered in full."""
        self.profile.succeeded(duration_s, now_s)
        self._refused = False

    def failed(self, reason: str, refused: bool, now_s: float) -> None:
        """A request failed, and this backend is to blame."""
        self.profile.failed(now_s)
        self.fault = reason
        self._refused = refused

    def stocked(self, stock: Stock | None, now_s: float) -> bool:
        """Take in which models it has in memory. :return: whether anything has changed."""
        old, self.stock = self.stock, stock
        if stock is not None:
            stock.follow(old, now_s)
        if old is stock or (stock is not None and stock.says(old)):
            return False
        self.configure(self.spec)
        return True

    def revived(self, now_s: float) -> None:
        """It has just been started, and has answered."""
        self._falls = self._rises = 0
        self._refused = False
        self._loading_since_s = None
        self.loading_until_s = -inf
        if self.down is not None:
            self.down = None
            self.cool(now_s)

    def report(self, report: HealthReport, now_s: float) -> bool:
        """Take in a health report.

        :return: whether its models or its window have changed, which indexes depend on.
        """
        self.health = report
        self.profile.reported(report, now_s)
        known = (self._models, self._slots, self._context)
        if report.alive and self.down is not None and not self._rises:
            # It may be another server now. Its models are kept until it reports others.
            self.kind = self.role = self._slots = self._context = None
        if report.alive:
            self._checked_well(report.loading, now_s)
        else:
            self._checked_ill(report.refused, now_s)
        before = (self.models, self.window)
        told = (
            self._models if report.models is None else report.models,
            self._slots if report.slots is None else report.slots,
            self._context if report.context_length is None else report.context_length,
        )
        self.kind = report.kind or self.kind
        self.role = report.role if report.kind else self.role
        if told != known:
            self._models, self._slots, self._context = told
            self.configure(self.spec)
        return before != (self.models, self.window)

    # --- inside -------------------------------------------------------------------

    def _known_models(self) -> tuple[str, ...] | None:
        """The configured models, or else those it has reported or could load."""
        if self.spec.models is not None:
            return self.spec.models
        if self.stock is None:
            return self._models
        return tuple(dict.fromkeys((*(self._models or ()), *self.stock.names)))

    def _judge(self, model: str, now_s: float, alone: bool) -> Standing:
        if self.down is Down.REFUSED:
            return Standing.DOWN
        if now_s < self.loading_until_s:
            return Standing.LOADING
        if now_s < self.busy_until_s:
            return Standing.BUSY
        if self.down is Down.TIMEOUT and not alone:
            return Standing.EJECTED
        breaker = self.breakers.get(self.key(model))
        if breaker is not None and not breaker.allows(now_s, alone):
            return Standing.EJECTED
        return Standing.READY

    def _checked_well(self, loading: bool, now_s: float) -> None:
        self._falls = 0
        self._refused = False
        if self.down is not None:
            self._rises += 1
            if self._rises >= self._rules.rise:
                self.down = None
                self._rises = 0
                self.cool(now_s)
        if loading:
            self._loading_since_s = now_s if self._loading_since_s is None else self._loading_since_s
            self.loading_until_s = inf
            self.quiet = False
            return
        if self._loading_since_s is not None:
            self._load_s = now_s - self._loading_since_s
            self._loading_since_s = None
            self.loading_until_s = -inf
            self.cool(now_s)
        for breaker in self.breakers.values():
            breaker.probed(now_s)

    def _checked_ill(self, refused: bool, now_s: float) -> None:
        self._rises = 0
        if not refused and any(lease.moved_s > now_s - MOVING_S for lease in self.leases):
            self._falls = 0
            return
        self._falls += 1
        if self._falls >= (1 if refused and self._refused else self._rules.fall):
            self.down = Down.REFUSED if refused else self.down or Down.TIMEOUT
            self.view.available = False
            self.quiet = False
