"""``python -m llmgw.loading.bound PARENT COMMAND…``: become COMMAND, in a session of its own
(so that Ctrl-C in a terminal reaches the gateway alone, which then ends it), and end with PARENT."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from llmgw.demo.processes import end_with_parent


def main(arguments: Sequence[str]) -> None:
    """:raise SystemExit: the command cannot be run, or the parent is gone already."""
    parent, *argv = arguments
    os.setsid()
    end_with_parent(int(parent), signal.SIGTERM)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        raise SystemExit(f"cannot run {argv[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
