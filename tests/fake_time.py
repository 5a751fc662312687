"""Another time for a gateway process, by libfaketime (Debian: ``faketime``)."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

LIBRARIES = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/local/lib/faketime/libfaketime.so.1")


def library() -> str:
    """The library; skips the test where there is none."""
    found = [path for pattern in LIBRARIES for path in glob.glob(pattern)]
    if not found:
        pytest.skip("no libfaketime here (Debian: faketime)")
    return found[0]


def faster(times: float) -> dict[str, str]:
    """Environment in which every clock runs ``times`` as fast."""
    return {"LD_PRELOAD": library(), "FAKETIME": f"+0 x{times:g}"}


class WallClock:
    """A wall clock that the test may set; monotonic time is left alone."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "faketime"
        self.set("+0")
        self.environment = {
            "LD_PRELOAD": library(),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, offset: str) -> None:
        """``+1d``, ``-1h``: from real time."""
        self._path.write_text(f"{offset}\n")
