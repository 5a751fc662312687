"""A worker: one gateway that serves its parent's sockets (``python -m llmgw.workers.process``).

Its standard error is the parent's to read, and becomes lines of the parent's log.
It obeys the line of :mod:`llmgw.workers.messages`, and SIGTERM and SIGINT as any
gateway does. When the line ends its parent is gone: it takes no more connections,
finishes its streams, and ends.
"""

from __future__ import annotations

import os
import sys


def take_activation(environment: dict[str, str]) -> None:
    """Make the sockets that systemd passed to the parent ours, before Twisted looks for them."""
    if environment.get("LISTEN_FDS"):
        environment["LISTEN_PID"] = str(os.getpid())


def main(arguments: list[str]) -> None:
    """Serve until told to end.

    :param arguments: descriptor of the line to the parent, name of the reactor (may be empty).
    """
    take_activation(os.environ)  # type: ignore[arg-type]
    descriptor, reactor_name = int(arguments[0]), arguments[1]
    if reactor_name:
        from twisted.application.reactors import installReactor

        installReactor(reactor_name)
    from llmgw.workers.worker import run

    run(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])
