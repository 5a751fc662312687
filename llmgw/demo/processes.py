"""Start processes that cannot outlive us, wait until they listen, and end them.

A server of the demo prints one line, ``listening URL``, when it answers, and writes
everything else to its log.

On Linux a child asks the kernel for a signal at its parent's death
(``PR_SET_PDEATHSIG``, see ``prctl(2)``); it is kept over ``exec``, so any program
can be started this way. Elsewhere a thread looks at the parent twice a second,
which ``exec`` would end: there a gateway outlives a demo that was killed with SIGKILL.

The signal is sent when the *thread* that started the child ends: start children from the main thread.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


class StartError(Exception):
    """A child ended, or said nothing, before it was ready; the message holds the end of its log."""


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have this process sent ``number`` when its parent ends.

    :param parent: the parent's process id, as known before this call.
    :raise SystemExit: the parent is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    else:
        threading.Thread(target=_watch, args=(parent, number), daemon=True).start()
    if os.getppid() != parent:
        raise SystemExit(f"parent {parent} is gone")


def _watch(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), number)


class Child:
    """One process of ours.

    It has its own session, so that Ctrl-C in a terminal reaches its parent
    alone, which then ends its children in the right order.

    :param argv: the command; its first word is a path.
    :param log_path: its stderr, begun anew.
    :param announces: it says ``listening`` on stdout, and nothing else; otherwise
        its stdout goes to the log too.
    """

    def __init__(self, name: str, argv: Sequence[str], log_path: Path, *, announces: bool = True) -> None:
        self.name = name
        self.log_path = log_path
        self.url = ""
        launch = [sys.executable, "-m", "llmgw.demo.processes", str(os.getpid()), *argv]
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                launch,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if announces else log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id, which stays ours until :meth:`stop` or :meth:`returncode` saw its end."""
        return self._process.pid

    def returncode(self) -> int | None:
        """Its exit status, ``None`` while it runs."""
        return self._process.poll()

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of its log."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return str(error)

    def wait_listening(self, timeout_s: float = 30.0) -> str:
        """Wait for the line ``listening URL``.

        :return: the URL, kept as ``url`` too.
        :raise StartError: the process ended or ``timeout_s`` passed.
        """
        output = self._process.stdout
        assert output is not None, f"{self.name} announces nothing"
        deadline_s = time.monotonic() + timeout_s
        seen = b""
        while b"\n" not in seen:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([output], [], [], left_s)[0]:
                raise StartError(f"{self.name}: not ready after {timeout_s:g} s\n{self.log_tail()}")
            data = os.read(output.fileno(), 4096)
            if not data:
                code = self._process.wait()
                raise StartError(f"{self.name}: ended with {code}\n{self.log_tail()}")
            seen += data
        word, _, url = seen.split(b"\n")[0].decode(errors="replace").partition(" ")
        if word != "listening":
            raise StartError(f"{self.name}: said {word!r} instead of 'listening'\n{self.log_tail()}")
        self.url = url.strip()
        return self.url

    def send(self, number: int) -> None:
        """Send a signal; nothing happens when it is gone."""
        self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 5.0) -> int:
        """End it, asking first, and wait.

        A stopped process does not see SIGTERM, so it is sent SIGCONT too.

        :return: its exit status.
        """
        self.send(number)
        self.send(signal.SIGCONT)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            return self._process.wait()
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()


def main(arguments: Sequence[str]) -> None:
    """``python -m llmgw.demo.processes PARENT COMMAND…``: become COMMAND, bound to PARENT's life."""
    parent, *argv = arguments
    # SIGKILL, since a server that the duty cycle has stopped sees no other signal.
    end_with_parent(int(parent), signal.SIGKILL)
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
