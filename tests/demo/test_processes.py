from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmgw.demo.processes import Child, StartError

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")


def python(tmp_path: Path, code: str, *, announces: bool = True) -> Child:
    return Child("it", [sys.executable, "-c", code], tmp_path / "log", announces=announces)


def test_the_address_is_what_the_ready_line_says(tmp_path: Path) -> None:
    child = python(tmp_path, "print('listening http://x:1', flush=True); import time; time.sleep(60)")
    assert child.wait_listening() == child.url == "http://x:1"
    assert child.returncode() is None
    assert child.stop() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "timeout_s", "said"),
    [
        ("import sys; print('no luck', file=sys.stderr); sys.exit(3)", 30, "it: ended with 3\nno luck"),
        ("import time; time.sleep(60)", 0.3, "it: not ready after 0.3 s"),
        ("print('hello', flush=True); import time; time.sleep(60)", 30, "it: said 'hello'"),
    ],
)
def test_a_child_that_does_not_start_is_told_with_its_log(
    tmp_path: Path, code: str, timeout_s: float, said: str
) -> None:
    child = python(tmp_path, code)
    try:
        with pytest.raises(StartError) as failed:
            child.wait_listening(timeout_s)
        assert str(failed.value).startswith(said)
    finally:
        child.stop()


def test_a_stopped_child_can_be_ended(tmp_path: Path) -> None:
    child = python(tmp_path, "print('listening', flush=True); import time; time.sleep(60)")
    child.wait_listening()
    child.send(signal.SIGSTOP)
    started_s = time.monotonic()
    assert child.stop() == -signal.SIGTERM
    assert time.monotonic() - started_s < 4


def test_a_deaf_child_is_killed(tmp_path: Path) -> None:
    code = "import signal; signal.signal(15, 1); print('listening', flush=True); import time; time.sleep(60)"
    child = python(tmp_path, code)
    child.wait_listening()
    assert child.stop(timeout_s=0.2) == -signal.SIGKILL


def test_what_a_quiet_child_prints_is_in_its_log(tmp_path: Path) -> None:
    child = python(tmp_path, "print('one'); print('two')", announces=False)
    while child.returncode() is None:
        time.sleep(0.01)
    assert child.log_tail() == "one\ntwo"
    assert child.stop() == 0


PARENT = """
import sys, time
from pathlib import Path
from llmgw.demo.processes import Child
code = "import signal; signal.signal(15, 1); print('listening', flush=True); import time; time.sleep(60)"
child = Child("it", [sys.executable, "-c", code], Path(sys.argv[1]))
child.wait_listening()
child.send(19)
print(child.pid, flush=True)
time.sleep(60)
"""


@linux
def test_a_child_does_not_outlive_a_killed_parent_even_when_stopped(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline_s = time.monotonic() + 10
    stat = Path(f"/proc/{pid}/stat")
    # A zombie is dead too: who collects it is the machine's affair.
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
