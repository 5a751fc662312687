"""Every reader of foreign bytes under random ones: by hypothesis here, by atheris when there is time."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import fuzz_targets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = sorted(fuzz_targets.TARGETS)
RUNS = 100_000
SLOW_RUNS = {"configuration": 5_000, "keys": 30_000}
PIECES = [
    b"\r\n",
    b"\n",
    b"\0",
    b'"',
    b"{",
    b"}",
    b"[",
    b":",
    b",",
    b"-1",
    b"1e999",
    b"\\u0000",
    b"\xff",
    b" ",
]


# One test for all of them: pytest-twisted wraps what hypothesis runs once for each parameter.
@settings(max_examples=200)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_damaged_seeds(name: str, data: st.DataObject) -> None:
    target, seeds = fuzz_targets.TARGETS[name], fuzz_targets.SEEDS[name]
    raw = bytearray(data.draw(st.sampled_from(seeds)))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 8))] = data.draw(
            st.sampled_from(PIECES) | st.binary(max_size=6) | st.sampled_from(seeds)
        )
    target(bytes(raw))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_guided_by_coverage(name: str, tmp_path: Path) -> None:
    """atheris looks for new ways through the code; the first find ends it."""
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed (pip install atheris)")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(fuzz_targets.SEEDS[name]):
        (corpus / str(number)).write_bytes(seed)
    options = [f"-runs={SLOW_RUNS.get(name, RUNS)}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=2048"]
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "fuzz_run.py"),
            name,
            *options,
            f"-artifact_prefix={tmp_path}/",
            str(corpus),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
