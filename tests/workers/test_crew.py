"""Workers that end, do not become ready, or hang: with processes that only pretend."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from llmgw.errors import GatewayError
from llmgw.listening import Sockets
from llmgw.workers.child import SILENT_S, Child
from llmgw.workers.crew import READY_WITHIN_S, Crew, Place
from llmgw.workers.messages import Failed, Setup, Status

SETUP = Setup(path=None, listen=[], admin=[], backends=[], auth=[], workers=2, working_dir="/")
READY = Status(ready=True, why="", draining=False, in_flight=0, connections=0)


class Pretended(Child):
    """A process that is not there."""

    pids = iter(range(100, 10_000))

    def begin(self) -> None:
        self.pid = next(self.pids)
        self.asked: list[str] = []

    def drain(self, *, interrupted: bool = False, relieved: bool = False) -> None:
        self.leaving = True
        self.asked.append("drain relieved" if relieved else "drain")

    def hurry(self) -> None:
        self.asked.append("hurry")

    def kill(self) -> None:
        self.asked.append("kill")

    def tell(self, message: Any) -> None:
        self._heard(message)

    def gone(self) -> None:
        self._ended(self)


class PretendedCrew(Crew):
    """:ivar made: every process so far."""

    made: list[Pretended]

    def _spawn(self, place: Place) -> Child:
        child = Pretended(self._reactor, place.number, self._told, self._ended)
        child.begin()
        self.made.append(child)
        return child


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def crew(clock: Clock) -> PretendedCrew:
    made = PretendedCrew(clock, SETUP, 2, Sockets(clock))
    made.made = []
    made.start()
    for child in list(made.made):
        child.tell(READY)
    return made


def restart(crew: Crew) -> Deferred[list[int]]:
    return Deferred.fromCoroutine(crew.restart())


def states(crew: Crew) -> list[str]:
    return [place.state for place in crew.places]


def test_a_place_whose_workers_end_again_and_again_is_given_up(crew: PretendedCrew, clock: Clock) -> None:
    for wait_s in (0.1, 0.4, 1.6, 5.0, 5.0):
        count = len(crew.made)
        crew.places[0].current.gone()  # type: ignore[union-attr]
        assert states(crew)[0] == "waiting to start"
        clock.advance(wait_s * 0.9)
        assert len(crew.made) == count
        clock.advance(wait_s * 0.2)
        assert len(crew.made) == count + 1
    crew.places[0].current.gone()  # type: ignore[union-attr]
    clock.advance(600)
    assert (states(crew)[0], crew.down) == ("given up", 1)
    assert [child.number for child in crew.serving] == [2]
    # A rolling restart tries again.
    done = restart(crew)
    crew.made[-1].tell(READY)
    clock.advance(0.1)
    crew.made[-1].tell(READY)
    clock.advance(0.1)
    assert len(done.result) == 2
    assert (states(crew), crew.down) == (["serving", "serving"], 0)


def test_a_restart_replaces_one_after_another(crew: PretendedCrew, clock: Clock) -> None:
    one, two = crew.made
    done = restart(crew)
    clock.advance(1)
    assert (one.asked, len(crew.made), len(crew.serving)) == ([], 3, 2)
    again = restart(crew)
    assert again.result.value.status == 409
    again.addErrback(lambda _: None)
    crew.made[2].tell(READY)
    clock.advance(0.1)
    assert (one.asked, two.asked) == (["drain relieved"], [])
    crew.made[3].tell(READY)
    clock.advance(0.1)
    assert two.asked == ["drain relieved"]
    assert done.result == [crew.made[2].pid, crew.made[3].pid]
    assert crew.places[0].leaving == {one}
    one.gone()
    two.gone()
    assert [child.pid for child in crew] == done.result


@pytest.mark.parametrize("how", ["ends", "is never ready"])
def test_one_that_does_not_become_ready_leaves_the_old_one_in_its_place(
    crew: PretendedCrew, clock: Clock, how: str
) -> None:
    one, two = crew.made
    done = restart(crew)
    new = crew.made[2]
    not_yet = Status(ready=False, why="starting", draining=False, in_flight=0, connections=0)
    if how == "ends":
        new.tell(Failed("no key can be read"))
        new.gone()
        clock.advance(0.1)
    else:
        for _ in range(int(READY_WITHIN_S) + 2):
            for child, status in ((one, READY), (two, READY), (new, not_yet)):
                child.tell(status)
            clock.advance(1)
        assert new.asked == ["kill"]
        new.gone()
    error = done.result.value
    assert isinstance(error, GatewayError)
    assert "the old one serves on" in error.message
    done.addErrback(lambda _: None)
    assert (one.asked, crew.places[0].current, states(crew)) == ([], one, ["serving", "serving"])
    clock.advance(5)
    assert len(crew.made) == 3  # nobody is started beside it


def test_an_old_one_that_ends_while_its_successor_fails_is_replaced(
    crew: PretendedCrew, clock: Clock
) -> None:
    one, _two = crew.made
    done = restart(crew)
    one.gone()
    crew.made[2].gone()
    clock.advance(0.1)
    done.addErrback(lambda _: None)
    clock.advance(5)
    assert len(crew.made) == 4
    crew.made[3].tell(READY)
    assert states(crew) == ["serving", "serving"]


def test_one_that_somebody_else_tells_to_end_is_relieved(crew: PretendedCrew) -> None:
    one = crew.made[0]
    one.tell(Status(ready=False, why="draining", draining=True, in_flight=3, connections=3))
    assert (len(crew.made), states(crew)[0], crew.places[0].leaving) == (3, "starting", {one})
    one.gone()
    assert crew.places[0].restarts.total == 0


def test_one_that_says_nothing_is_killed(crew: PretendedCrew, clock: Clock) -> None:
    one, two = crew.made
    for _ in range(int(SILENT_S) + 2):
        clock.advance(1)
        two.tell(READY)
    assert (one.asked, two.asked) == (["kill"], [])


def test_at_the_end_nobody_is_started_again(crew: PretendedCrew, clock: Clock) -> None:
    one, two = crew.made
    one.gone()  # which would be started again in a moment
    crew.drain()
    clock.advance(10)
    assert (len(crew.made), two.asked) == (2, ["drain"])
    crew.hurry()
    assert two.asked == ["drain", "hurry"]
    two.gone()
    assert crew.gone
    late = restart(crew)
    assert late.result.value.status == 409
    late.addErrback(lambda _: None)
    crew.kill()
    assert not clock.getDelayedCalls()
