"""How full memory is, by what the kernel's files say."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.memory import Memory

MIB = 1 << 20


def system(
    root: Path, *, own: int, total: int = 1000 * MIB, cgroup: str = "", files: dict[str, str] | None = None
) -> str:
    """A made-up ``/proc`` and ``/sys``."""
    pages = own // os.sysconf("SC_PAGE_SIZE")
    everything = {
        "proc/self/statm": f"99999 {pages} 1 1 0 1 0\n",
        "proc/meminfo": f"MemTotal:       {total // 1024} kB\nMemFree: 1 kB\n",
        "proc/self/cgroup": cgroup,
        **(files or {}),
    }
    for name, text in everything.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_without_a_limit_it_is_the_machines_memory(tmp_path: Path) -> None:
    memory = Memory(root=system(tmp_path, own=250 * MIB))
    assert (memory.limit_bytes, memory.share()) == (1000 * MIB, 0.25)


def test_the_operators_limit_is_for_this_process(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": str(200 * MIB), "sys/fs/cgroup/memory.current": str(199 * MIB)}
    root = system(tmp_path, own=50 * MIB, cgroup="0::/\n", files=files)
    assert Memory(500 * MIB, root).share() == 0.1


def group(folder: str, limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/{folder}memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{folder}memory.current": f"{usage}\n",
        f"sys/fs/cgroup/{folder}memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def test_the_tightest_group_counts_without_what_the_kernel_gives_up(tmp_path: Path) -> None:
    files = {
        **group("", "max", 900 * MIB),
        **group("system.slice/", str(400 * MIB), 300 * MIB, 100 * MIB),
        **group("system.slice/llmgw.service/", "max", 290 * MIB),
    }
    root = system(tmp_path, own=100 * MIB, cgroup="0::/system.slice/llmgw.service\n", files=files)
    memory = Memory(root=root)
    assert (memory.limit_bytes, memory.share()) == (400 * MIB, 0.5)


def test_a_group_that_others_fill_is_none_of_our_doing(tmp_path: Path) -> None:
    files = group("", str(500 * MIB), 499 * MIB)
    assert Memory(root=system(tmp_path, own=10 * MIB, cgroup="0::/\n", files=files)).share() == 0.02
    assert Memory(root=system(tmp_path, own=40 * MIB, cgroup="0::/\n", files=files)).share() == 0.998


def test_version_1_and_paths_of_the_host(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(400 * MIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(300 * MIB),
        "sys/fs/cgroup/memory/memory.stat": f"cache 1\ntotal_inactive_file {20 * MIB}\n",
    }
    cgroup = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n"
    memory = Memory(root=system(tmp_path, own=100 * MIB, cgroup=cgroup, files=files))
    assert (memory.limit_bytes, memory.share()) == (400 * MIB, 0.7)


def test_version_1_has_a_number_for_no_limit(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    root = system(tmp_path, own=100 * MIB, cgroup="4:memory:/\n", files=files)
    assert Memory(root=root).limit_bytes == 1000 * MIB


@pytest.mark.parametrize("text", ["", "junk\n", "1\n"])
def test_what_cannot_be_read_is_not_known(tmp_path: Path, text: str) -> None:
    root = system(tmp_path, own=1)
    (tmp_path / "proc/meminfo").write_text(text)
    assert Memory(root=root).share() is None
    (tmp_path / "proc/self/statm").unlink()
    (tmp_path / "proc/self/cgroup").unlink()
    assert Memory(5 * MIB, root=root).share() is None


def test_a_group_whose_usage_is_gone_leaves_our_own(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": str(200 * MIB)}
    assert Memory(root=system(tmp_path, own=100 * MIB, cgroup="0::/\n", files=files)).share() == 0.5


def test_this_machine_tells() -> None:
    share = Memory().share()
    assert share is None or 0 < share < 1


def test_what_was_freed_is_given_back() -> None:
    memory = Memory()
    memory.give_back()  # what other tests have left would be used first
    memory.share()
    before = memory.own_bytes
    held = [ctypes.create_string_buffer(b"x" * 50_000) for _ in range(2000)]
    last = held[-1]
    memory.share()
    grown = memory.own_bytes
    del held
    memory.give_back()
    assert before + (40 << 20) < grown
    assert memory.own_bytes < grown - (40 << 20)
    assert last.value


FAULTS = """
import resource, sys
from llmgw.memory import keep_freed

if sys.argv[1] == "kept":
    keep_freed()
for _ in range(100):
    copies = [bytes([byte]) * 1_500_000 for byte in range(1, 5)]
    del copies
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
"""Tells how many pages the kernel had to give while blocks of a long prompt's size came and went."""


def test_what_one_long_prompt_took_is_there_for_the_next() -> None:
    anew, kept = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, check=True).stdout)
        for how in ("anew", "kept")
    )
    assert kept < anew / 3
