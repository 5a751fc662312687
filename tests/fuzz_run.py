"""One target of ``fuzz_targets.py`` under atheris, which looks for new ways through the code.

pip install atheris
python tests/fuzz_run.py requests -max_total_time=600 [libFuzzer options] [corpus directory]
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["llmgw"]):
    import fuzz_targets

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in fuzz_targets.TARGETS:
        raise SystemExit(f"no such target; there are {', '.join(fuzz_targets.TARGETS)}")
    atheris.Setup([sys.argv[0], *sys.argv[2:]], fuzz_targets.TARGETS[name])
    atheris.Fuzz()
