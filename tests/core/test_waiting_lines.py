"""Who waits, and who goes next; without a reactor and without a clock."""

from __future__ import annotations

from collections.abc import Sequence

from fleets import ALIVE, LOADING, fleet, report

from llmgw.core.fleet import BackendSpec, Fleet
from llmgw.core.waiting import MAX_DECLINES, MAX_ORDERED, Choose, Lines, Offer, Order, Waiter
from llmgw.values import Backend, Choice, Request


def waiter(name: str, model: str = "m", tokens: int = 10, exclude: frozenset[str] = frozenset()) -> Waiter:
    return Waiter(Request(name, model, tokens), exclude, 0.0)


def lines_of(*waiters: Waiter) -> Lines[Waiter]:
    lines: Lines[Waiter] = Lines()
    for each in waiters:
        lines.enter(each)
    return lines


def first(request: Request, candidates: Sequence[Backend], now_s: float) -> Choice | None:
    return Choice(candidates[0])


def serve(
    lines: Lines[Waiter],
    subject: Fleet,
    backend_id: str = "b0",
    choose: Choose = first,
    order: Order | None = None,
) -> list[str]:
    """One offer, to its end. :return: ids of those who went, with the backend's."""
    offer = Offer(lines, subject, backend_id, choose, order)
    gone = []
    while (found := offer.next(1.0)) is not None:
        each, choice = found
        lines.leave(each)
        subject.lease(choice.backend.id, each.request, 1.0)
        gone.append(f"{each.request.id}>{choice.backend.id}")
    return gone


def test_a_line_has_an_order_and_forgets_who_leaves() -> None:
    a, b, c = waiter("a"), waiter("b", "other"), waiter("c")
    lines = lines_of(a, b, c)
    assert (len(lines), lines.count("m"), lines.count("other"), lines.count("none")) == (3, 2, 1, 0)
    assert list(lines.oldest(["m", "other"])) == [a, b, c]
    assert list(lines.oldest(["m"])) == [a, c]
    assert list(lines.oldest(["none"])) == []
    assert lines.leave(b)
    assert not lines.leave(b)
    assert not lines.leave(waiter("m"))
    assert (lines.models, len(lines)) == (["m"], 2)


def test_the_oldest_goes_first_and_only_as_many_as_there_is_room() -> None:
    lines = lines_of(*[waiter(name) for name in "abc"])
    assert serve(lines, fleet(1, max_connections=2)) == ["a>b0", "b>b0"]
    assert [each.request.id for each in lines.oldest(["m"])] == ["c"]


def test_a_backend_that_is_gone_or_drained_has_nothing_to_offer() -> None:
    lines = lines_of(waiter("a"))
    subject = fleet(2)
    assert serve(lines, subject, "nobody") == []
    subject.drain("b0")
    assert serve(lines, subject) == []
    subject.lease("b1", Request("r", "m"), 0.0)
    subject.remove("b1", 0.0)
    assert serve(lines, subject, "b1") == []


def test_the_line_goes_over_all_models_of_a_backend() -> None:
    subject = fleet(1, models=("m", "n"), max_connections=3)
    lines = lines_of(waiter("a"), waiter("b", "n"), waiter("x", "elsewhere"), waiter("c"))
    assert serve(lines, subject) == ["a>b0", "b>b0", "c>b0"]


def test_who_does_not_fit_is_passed_by() -> None:
    subject = fleet(0)
    subject.put(BackendSpec("small", "http://s", models=("m",), context_length=100), 0.0)
    subject.put(BackendSpec("large", "http://l", models=("m",), context_length=1000, max_connections=1), 0.0)
    lines = lines_of(
        waiter("long", tokens=500), waiter("unsuited", exclude=frozenset(["small"])), waiter("short")
    )
    subject.lease("large", Request("r", "m"), 0.0)
    assert serve(lines, subject, "small") == ["short>small"]
    assert [each.request.id for each in lines.oldest(["m"])] == ["long", "unsuited"]


def test_one_too_long_for_all_goes_to_the_largest_window() -> None:
    """As in the fleet: an estimate is no reason to refuse it."""
    subject = fleet(1, context_length=100)
    assert serve(lines_of(waiter("long", tokens=500)), subject) == ["long>b0"]


def test_where_a_model_cannot_be_asked_for_another_one_can() -> None:
    subject = fleet(3, max_connections=1)
    subject.put(BackendSpec("b0", "http://10.0.0.0:8080", models=("m", "n")), 0.0)
    for _ in range(5):  # its breaker opens for m
        subject.lease("b0", Request("r", "m"), 0.0).finish(0.0, False, "reset")
    for busy in ("b1", "b2"):
        subject.lease(busy, Request("r", "m"), 0.0)
    lines = lines_of(*[waiter(f"m{n}") for n in range(20)], waiter("n", "n"))
    assert serve(lines, subject) == ["n>b0"]


def test_a_backend_that_loads_has_nothing_to_offer() -> None:
    subject = fleet(1)
    report(subject, "b0", LOADING)
    lines = lines_of(waiter("a"))
    assert serve(lines, subject) == []
    report(subject, "b0", ALIVE, 0.5)
    assert serve(lines, subject) == ["a>b0"]


def test_where_one_goes_is_the_routers_choice_among_all_that_are_free() -> None:
    subject = fleet(2, max_connections=1)
    lines = lines_of(waiter("a"), waiter("b"))
    assert serve(lines, subject, "b0", lambda r, c, t: Choice(c[-1])) == ["a>b1", "b>b0"]


def test_who_is_declined_is_passed_by_and_asked_once_in_an_offer() -> None:
    asked: list[str] = []

    def choose(request: Request, candidates: Sequence[Backend], now_s: float) -> Choice | None:
        asked.append(request.id)
        return None if request.id == "a" else Choice(candidates[0])

    lines = lines_of(waiter("a"), waiter("b"), waiter("c"))
    assert serve(lines, fleet(1), choose=choose) == ["b>b0", "c>b0"]
    assert asked == ["a", "b", "c"]


def test_not_everybody_is_asked_when_all_decline() -> None:
    asked: list[str] = []

    def choose(request: Request, candidates: Sequence[Backend], now_s: float) -> None:
        asked.append(request.id)

    assert serve(lines_of(*[waiter(str(n)) for n in range(50)]), fleet(1), choose=choose) == []
    assert len(asked) == MAX_DECLINES


def test_the_router_says_who_goes_next() -> None:
    shown: list[list[str]] = []

    def shortest(waiting: Sequence[Request], backend: Backend, now_s: float) -> int:
        assert backend.id == "b0"
        shown.append([each.id for each in waiting])
        return min(range(len(waiting)), key=lambda place: waiting[place].prompt_tokens)

    lines = lines_of(waiter("a", tokens=3), waiter("b", tokens=1), waiter("c", tokens=2))
    assert serve(lines, fleet(1), order=shortest) == ["b>b0", "c>b0", "a>b0"]
    assert shown == [["a", "b", "c"], ["a", "c"]]  # one alone needs no order


def test_a_router_is_shown_the_oldest_of_a_long_line() -> None:
    sizes: list[int] = []

    def last(waiting: Sequence[Request], backend: Backend, now_s: float) -> int:
        sizes.append(len(waiting))
        return len(waiting) - 1

    lines = lines_of(*[waiter(str(n)) for n in range(MAX_ORDERED + 9)])
    assert serve(lines, fleet(1, max_connections=1), order=last) == [f"{MAX_ORDERED - 1}>b0"]
    assert sizes == [MAX_ORDERED]


# --- what the fleet tells ---------------------------------------------------------


def test_the_fleet_tells_what_may_have_come_free() -> None:
    subject = fleet(2)
    told: list[str] = []
    subject.freed = told.append
    lease = subject.lease("b0", Request("r", "m"), 0.0)
    assert told == []
    lease.finish(1.0, True, "done")
    lease.finish(1.0, True, "done")
    report(subject, "b1", ALIVE, 1.0)
    subject.drain("b1")
    subject.undrain("b1")
    subject.put(BackendSpec("b2", "http://c", models=("m",)), 1.0)
    subject.remove("b2", 1.0)
    assert told == ["b0", "b1", "b1", "b1", "b2", "b2"]
    lease = subject.lease("b0", Request("r", "m"), 1.0)
    assert subject.members["b0"].view.in_flight == 1
    lease.drop()
    assert told[-1] == "b0"


def test_takers_are_those_that_are_not_drained() -> None:
    subject = fleet(2)
    subject.drain("b0")
    assert [each.spec.id for each in subject.takers("m")] == ["b1"]
    assert subject.takers("none") == ()
    assert not subject.fits(subject.members["b1"], Request("r", "none"))
