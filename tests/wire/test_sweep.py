"""Deadlines: who is told, and that one fault of ours leaves the others' alone."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.task import Clock

from llmgw.wire.sweep import BATCH, NEVER, Sweep


class Member:
    """Notes when it was told."""

    def __init__(self, deadline_s: float, then: Callable[[], None] = lambda: None) -> None:
        self.deadline_s = deadline_s
        self.then = then
        self.told_s: list[float] = []

    def expired(self, now_s: float) -> None:
        self.told_s.append(now_s)
        self.deadline_s = NEVER
        self.then()


def started(clock: Clock) -> Sweep:
    sweep = Sweep(clock, clock.seconds, every_s=0.25)
    sweep.start()
    return sweep


def test_a_member_is_told_at_the_next_look() -> None:
    clock = Clock()
    sweep = started(clock)
    soon, late, never = Member(0.3), Member(0.9), Member(NEVER)
    for member in (soon, late, never):
        sweep.add(member)
    clock.pump([0.25] * 3)
    assert (soon.told_s, late.told_s, never.told_s) == ([0.5], [], [])
    sweep.stop()
    assert len(sweep) == 0


def test_a_member_whose_deadline_another_one_moved_is_not_told() -> None:
    clock = Clock()
    sweep = started(clock)
    pair = [Member(0.1), Member(0.1)]
    for one, other in (pair, reversed(pair)):
        one.then = lambda other=other: setattr(other, "deadline_s", NEVER)  # type: ignore[misc]
        sweep.add(one)
    clock.advance(0.25)
    assert sorted(len(member.told_s) for member in pair) == [0, 1]
    sweep.stop()


def test_a_member_that_raises_is_dropped_and_the_others_go_on(
    expected_failures: Callable[..., list[object]],
) -> None:
    clock = Clock()
    sweep = started(clock)

    def fail() -> None:
        raise ZeroDivisionError

    bad, good = Member(0.1, fail), Member(0.4)
    sweep.add(bad)
    sweep.add(good)
    clock.pump([0.25] * 2)
    assert (len(bad.told_s), len(good.told_s), len(sweep)) == (1, 1, 1)
    assert len(expected_failures(ZeroDivisionError)) == 1
    sweep.stop()


def test_deadlines_that_pass_together_are_told_in_pieces() -> None:
    clock = Clock()
    sweep = started(clock)
    told: list[int] = []
    told_before_a_turn: list[int] = []

    def note() -> None:
        told_before_a_turn.append(len(told))

    crowd = [Member(0.1) for _ in range(2 * BATCH + 1)]

    def leave() -> None:
        told.append(0)
        clock.callLater(0, note)

    for member in crowd:
        member.then = leave
        sweep.add(member)
    clock.pump([0.25, 0.25])
    assert sorted(set(told_before_a_turn)) == [BATCH, 2 * BATCH, len(crowd)]
    assert [len(member.told_s) for member in crowd] == [1] * len(crowd)
    sweep.stop()


def test_a_member_that_has_gone_or_moved_in_between_is_not_told() -> None:
    clock = Clock()
    sweep = started(clock)
    crowd = [Member(0.1) for _ in range(BATCH + 2)]
    told = 0

    def leave() -> None:
        nonlocal told
        told += 1
        if told == BATCH:
            gone, moved = (member for member in crowd if not member.told_s)
            sweep.discard(gone)
            moved.deadline_s = 0.4

    for member in crowd:
        member.then = leave
        sweep.add(member)
    clock.advance(0.25)
    assert told == BATCH
    clock.advance(0.25)
    assert sorted(tuple(member.told_s) for member in crowd)[:1] == [()]
    assert [member.told_s for member in crowd].count([0.5]) == 1
    sweep.stop()


def test_nobody_is_told_after_the_end() -> None:
    clock = Clock()
    sweep = started(clock)
    crowd = [Member(0.1) for _ in range(BATCH + 1)]
    for member in crowd:
        sweep.add(member)
        member.then = sweep.stop
    clock.advance(0.25)
    assert clock.getDelayedCalls() == []
    assert sum(len(member.told_s) for member in crowd) == 1
