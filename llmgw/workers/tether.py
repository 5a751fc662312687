"""``python -m llmgw.workers.tether PARENT COMMAND…``: become COMMAND, bound to PARENT's life.

In a session of its own, so that Ctrl-C in a terminal reaches the parent alone.
"""

from __future__ import annotations

import os
import signal
import sys

from llmgw.demo.processes import end_with_parent


def main(arguments: list[str]) -> None:
    """:raise SystemExit: the parent is gone already."""
    parent, *argv = arguments
    os.setsid()
    end_with_parent(int(parent), signal.SIGKILL)
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
