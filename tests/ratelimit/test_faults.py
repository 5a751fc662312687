"""Limiter processes, a real Redis, real faults: ``benchmarks/limiter_faults.py`` keeps its promises."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import limiter_faults as faults

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None or shutil.which("redis-sentinel") is None,
    reason="no redis-server here: apt-get install redis-server redis-sentinel",
)


def test_a_bad_day_in_short() -> None:
    """Everything at once, in four seconds: flushed, stopped, and one of three gateways killed.

    A store that forgets may cost one bucket more; that gateways remember costs far less.
    """
    row = faults.Row(
        "a bad day",
        [faults.steady(100.0)] * 3,
        [
            (1.0, faults.ask_redis("FLUSHALL")),
            (1.5, faults.redis_signal(signal.SIGSTOP)),
            (2.2, faults.redis_signal(signal.SIGCONT)),
            (3.0, faults.worker_signal(signal.SIGKILL)),
        ],
        extra=2 * 0.1 * faults.BURST,
        least=0.3,  # on a machine that may be busy with other tests
        seconds=4.0,
    )
    outcome = faults.play(row)
    assert outcome.most <= outcome.bound
    assert outcome.utilisation >= row.least


@pytest.mark.slow
@pytest.mark.parametrize("name", list(faults.rows()))
def test_what_is_promised(name: str) -> None:
    outcome = faults.play(faults.rows()[name], seed=2)
    assert outcome.kept, outcome.line()
