from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmgw.demo.duty import Budget, Step, Target, keep, main, plan
from llmgw.demo.processes import Child

CONT, STOP = signal.SIGCONT, signal.SIGSTOP
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("shares", "steps"),
    [
        ([], []),
        ([1, 2.0], []),
        ([0.5], [(0.0, 0, CONT), (0.5, 0, STOP)]),
        # One after the other, as long as both fit.
        ([1, 0.5, 0.25], [(0.0, 1, CONT), (0.5, 1, STOP), (0.5, 2, CONT), (0.75, 2, STOP)]),
        # The second one ends with the period at the latest.
        ([0.75, 0.5], [(0.0, 0, CONT), (0.5, 1, CONT), (0.75, 0, STOP), (1.0, 1, STOP)]),
    ],
)
def test_each_runs_for_its_share_in_turn(shares: list[float], steps: list[tuple[float, int, int]]) -> None:
    # Steps of one moment may come in any order.
    assert set(plan(shares)) == {Step(*step) for step in steps}
    assert [step.at for step in plan(shares)] == sorted(step.at for step in plan(shares))


@pytest.mark.parametrize("share", [0, -1, float("nan")])
def test_a_share_that_is_nothing_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        plan([0.5, share])


def test_who_has_run_for_too_long_sits_out_until_it_is_made_up_for() -> None:
    budget = Budget(0.1)
    assert budget.allows(10.0, 5.0)
    assert budget.allows(11.0, 5.1)  # its share
    assert not budget.allows(11.02, 5.202)  # a stop came late
    assert not budget.allows(11.5, 5.202)
    assert budget.allows(12.01, 5.202)
    assert budget.allows(20.0, 5.202)
    assert not budget.allows(20.02, 5.242)  # what was left unused is not saved


@linux
def test_its_cpu_time_is_known_while_there_is_a_process(sleeper: subprocess.Popen[bytes]) -> None:
    target = Target(sleeper.pid)
    first_s = target.used_s()
    assert first_s is not None
    assert until(lambda: (target.used_s() or 0.0) > first_s)
    sleeper.kill()
    sleeper.wait()
    assert target.used_s() is None


@linux
def test_a_share_is_kept_though_the_stops_come_late(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(sleeper.pid)
    sleep, ends_s = time.sleep, time.monotonic() + 1.5
    monkeypatch.setattr(time, "sleep", lambda pause_s: sleep(pause_s + 0.02))
    before_s = target.used_s() or 0.0
    keep([target], [0.1], lambda: time.monotonic() < ends_s)
    assert (target.used_s() or 0.0) - before_s < 0.2 * 1.5


def test_a_process_that_is_not_there_is_an_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(ProcessLookupError):
        Target(gone.pid)


@pytest.mark.parametrize("pair", ["1", "x:0.5", "1:x", "1:0"])
def test_a_bad_pair_is_a_usage_error(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([pair])
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.002)
    return True


def is_stopped(process: subprocess.Popen[bytes]) -> Callable[[], bool]:
    return lambda: state(process.pid) == "T"


def runs_on(process: subprocess.Popen[bytes]) -> bool:
    """Not stopped in any of many looks."""
    return all(not is_stopped(process)() and time.sleep(0.002) is None for _ in range(40))


@linux
def test_a_target_runs_on_after_an_error_in_the_loop(sleeper: subprocess.Popen[bytes]) -> None:
    looks = iter([True, True])
    with pytest.raises(StopIteration):
        keep([Target(sleeper.pid)], [0.2], lambda: next(looks))
    assert runs_on(sleeper)


@linux
def test_the_loop_ends_when_nobody_is_left() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    target = Target(process.pid)
    process.kill()
    process.wait()
    keep([target], [0.5], lambda: True)


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_target_runs_on_when_the_controller_is_asked_to_end(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], number: int
) -> None:
    controller = Child(
        "duty", [sys.executable, "-m", "llmgw.demo.duty", f"{sleeper.pid}:0.1"], tmp_path / "log"
    )
    try:
        controller.wait_listening()
        assert until(is_stopped(sleeper))
    finally:
        code = controller.stop(number)
    assert code == 0
    assert runs_on(sleeper)


SUPERVISOR = """
import sys, time
from pathlib import Path
from llmgw.demo.processes import Child
child = Child("duty", [sys.executable, "-m", "llmgw.demo.duty", f"{sys.argv[1]}:0.1"], Path(sys.argv[2]))
child.wait_listening()
print(child.pid, flush=True)
time.sleep(60)
"""


@linux
def test_a_target_runs_on_when_the_supervisor_is_killed(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(sleeper.pid), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        controller = int(supervisor.stdout.readline())
        assert until(is_stopped(sleeper))
        supervisor.kill()
    assert until(lambda: not Path(f"/proc/{controller}").exists() or state(controller) == "Z")
    assert runs_on(sleeper)
