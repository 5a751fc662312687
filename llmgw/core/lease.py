"""One request's hold on one backend, and what its end says about the backend.

A lease counts as in flight while it lives, measures the time to first token, and at its
end informs the profile, the breaker and whoever observes the fleet. This is the only place
that decides what the end of a request says about a backend.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from msgspec import Struct

from llmgw.core.breaker import CLOSED, OPEN, SLOW_START, State
from llmgw.values import Backend, Finished, FirstToken, Request, Usage

if TYPE_CHECKING:
    from llmgw.core.fleet import Fleet
    from llmgw.core.member import Member

NO_VERDICT = frozenset({"client_gone", "dropped", "deadline", "busy", "loading", "4xx"})
"""Reasons that say nothing about the backend; those that begin with ``status_4`` are others."""


class BreakerChange(Struct, frozen=True):
    """A breaker has ejected a backend for a model, or lets it back in.

    :param model: empty where the backend's models are not known.
    :param reason: that of the last failure; empty if the backend is back.
    :param streak: failures of the backend in a row.
    :param again_s: seconds until it is tried again.
    """

    backend_id: str
    model: str
    reason: str = ""
    streak: int = 0
    again_s: float = 0.0


class Lease:
    """One request's hold on one backend. Whoever takes it must call :meth:`drop` in the end,
    whatever happened, so that no count can leak.

    :ivar moved_s: monotonic time at which its stream last moved; the relay sets it directly.
    :ivar reason: how it ended; empty before.
    """

    __slots__ = (
        "_breaker",
        "_fleet",
        "_member",
        "_ticket",
        "moved_s",
        "reason",
        "request",
        "started_s",
        "ttft_s",
    )

    def __init__(self, fleet: Fleet, member: Member, request: Request, now_s: float) -> None:
        self.request = request
        self.started_s = now_s
        self.moved_s = -inf
        self.ttft_s: float | None = None
        self._fleet = fleet
        self._member = member
        self.reason = ""
        self._breaker = breaker = member.breaker(request.model)
        self._ticket = breaker.started(now_s)
        member.leases.add(self)
        member.profile.started(now_s)

    @property
    def backend(self) -> Backend:
        """The backend it holds."""
        return self._member.backend

    def first_token(self, now_s: float) -> None:
        """The first content-bearing event arrived. Later calls do nothing."""
        if self.reason or self.ttft_s is not None:
            return
        self.moved_s = now_s
        self.ttft_s = ttft_s = now_s - self.started_s
        member, breaker = self._member, self._breaker
        member.profile.first_token(ttft_s, now_s)
        before = breaker.state
        if before is not CLOSED:
            breaker.first_token(now_s, self._ticket)
            self._tell(before, now_s)
        observe = self._fleet.observe
        if observe is not None:
            observe(FirstToken(self.request.id, member.spec.id, now_s, ttft_s))

    def finish(
        self,
        now_s: float,
        ok: bool,
        reason: str,
        *,
        usage: Usage | None = None,
        prompt_s: float | None = None,
        token_rate: float | None = None,
        refused: bool = False,
        busy_until_s: float | None = None,
    ) -> None:
        """The attempt is over. Later calls do nothing.

        ``ok`` with reason ``done`` is a success of the backend. Not ``ok`` is its failure,
        unless the reason is one of :data:`NO_VERDICT` or a 4xx status. Anything else says
        nothing about it.

        :param refused: the connection was refused.
        :param busy_until_s: monotonic time, from its ``Retry-After``: a pause, not a failure.
        """
        if self.reason:
            return
        self.reason = reason
        member, breaker, duration_s = self._member, self._breaker, now_s - self.started_s
        profile, before = member.profile, breaker.state
        member.leases.discard(self)
        profile.ended(now_s)
        if usage is not None or token_rate is not None:
            profile.measured(now_s, usage, prompt_s, token_rate)
        if busy_until_s is not None:
            breaker.neutral(self._ticket)
            member.busy(busy_until_s, now_s)
        elif ok and reason == "done":
            member.succeeded(duration_s, now_s)
            breaker.success(now_s, self._ticket)
        elif ok or reason in NO_VERDICT or reason.startswith("status_4"):
            breaker.neutral(self._ticket)
            if reason == "loading" and member.said_loading(now_s) and self._fleet.doubted is not None:
                self._fleet.doubted(member.spec.id)
        else:
            member.failed(reason, refused, now_s)
            alone, may_open = self._fleet.room(member, self.request.model)
            breaker.failure(now_s, self._ticket, refused=refused, alone=alone, may_open=may_open)
        if breaker.state is not CLOSED:
            member.quiet = False
            self._tell(before, now_s)
        if member.removed:
            self._fleet.returned(member)
        observe = self._fleet.observe
        if observe is not None:
            observe(
                Finished(
                    self.request.id,
                    member.spec.id,
                    now_s,
                    ok,
                    reason,
                    duration_s,
                    None if usage is None else usage.prompt_tokens,
                    None if usage is None else usage.cached_tokens,
                    None if usage is None else usage.output_tokens,
                    prompt_s,
                )
            )
        freed = self._fleet.freed
        if freed is not None:
            freed(member.spec.id)

    def _tell(self, before: State, now_s: float) -> None:
        """Report it if the breaker has ejected the backend, or let it back in."""
        changed, breaker, member = self._fleet.breaker_changed, self._breaker, self._member
        if changed is None or breaker.state is before:
            return
        key = member.key(self.request.model)
        if breaker.state is OPEN:
            again_s, streak = breaker.opens_again_s(now_s), member.view.failure_streak
            changed(BreakerChange(member.spec.id, key, member.fault, streak, again_s))
        elif breaker.state is SLOW_START:
            changed(BreakerChange(member.spec.id, key))

    def drop(self) -> None:
        """End it without a verdict, unless it has been finished. Later calls do nothing."""
        if not self.reason:
            self.finish(max(self._fleet.heard_s, self.moved_s, self.started_s), True, "dropped")
