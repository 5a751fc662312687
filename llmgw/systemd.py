"""What systemd and the daemon tell each other: sockets that were passed, states that are announced.

Twisted has no ``sd_notify``, and says of sockets that are not there only
``list index out of range``; here is why they are not.

:source: sd_listen_fds(3), sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twisted.internet.task import LoopingCall
from twisted.logger import Logger

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred
    from twisted.python.failure import Failure


class Notifier:
    """Tells systemd about states; does nothing where nobody listens.

    :param environment: where ``NOTIFY_SOCKET`` and ``WATCHDOG_USEC`` stand.
    """

    log = Logger()

    def __init__(self, reactor: Any, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        self._reactor = reactor
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._watchdog_s = _watchdog_s(environment)
        self._failed = False
        self._loop = LoopingCall(self._ping)
        self._loop.clock = reactor

    def ready(self) -> None:
        """We serve. From now on the reactor says, three times in each period of the
        watchdog, that it turns; a reactor that stands still says nothing, and is killed."""
        self.tell("READY=1", f"MAINPID={os.getpid()}")
        if self._watchdog_s and self._address and not self._loop.running:
            self._loop.start(self._watchdog_s / 3)

    def reloading(self) -> None:
        """A reload begins; :meth:`reloaded` must follow, whatever comes of it."""
        # Of the same clock as CLOCK_MONOTONIC, as Type=notify-reload wants it.
        self.tell("RELOADING=1", f"MONOTONIC_USEC={int(self._reactor.seconds() * 1e6)}")

    def reloaded(self, status: str) -> None:
        """:param status: what came of it, in a line."""
        self.tell("READY=1", f"STATUS={status}")

    def around(self, reload: Deferred[list[str]]) -> Deferred[list[str]]:
        """Tell of a reload that begins now, and of what comes of it."""
        self.reloading()

        def done(left: list[str]) -> list[str]:
            self.reloaded(f"reloaded; a restart is needed for {', '.join(left)}" if left else "reloaded")
            return left

        def refused(failure: Failure) -> Failure:
            why = " ".join(failure.getErrorMessage().split())
            self.reloaded(f"reload refused: {why}"[:500])
            return failure

        return reload.addCallbacks(done, refused)

    def stopping(self, most_s: float) -> None:
        """The end begins.

        :param most_s: how long it may take, beyond what the unit allows.
        """
        self.tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(most_s * 1e6)}")

    def main_process(self, pid: int) -> None:
        """Another process is the service from now on. The watchdog is its to satisfy."""
        self.tell(f"MAINPID={pid}")
        self.stop()
        self._address = ""

    def stop(self) -> None:
        """Say nothing more by itself."""
        if self._loop.running:
            self._loop.stop()

    def tell(self, *lines: str) -> None:
        """Send one message; a failure is logged once and harms nobody."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto("\n".join(lines).encode(), address)
            self._failed = False
        except OSError as error:
            if not self._failed:
                self.log.warn("systemd was not told {what}: {error}", what=lines[0], error=str(error))
            self._failed = True

    def _ping(self) -> None:
        self.tell("WATCHDOG=1")


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """The period of the watchdog, 0 for none or when it is another process's."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return max(0.0, int(environment.get("WATCHDOG_USEC", "0")) / 1e6)
    except ValueError:
        return 0.0


def why_not_activated(text: str, environment: Mapping[str, str] | None = None, pid: int | None = None) -> str:
    """Why the ``systemd:`` endpoint ``text`` finds no socket, and what to do; empty if it is another kind.

    :param environment: what the process was started with; Twisted removes from
        ``os.environ`` what it has read.
    """
    if not re.match(r"(?:(?:llmtls|proxied|haproxy):)*systemd:", text):
        return ""
    environment = _first_environment() if environment is None else environment
    pid = os.getpid() if pid is None else pid
    count = environment.get("LISTEN_FDS")
    if count is None:
        return "systemd passed no socket (no LISTEN_FDS): start it through its .socket unit"
    owner = environment.get("LISTEN_PID")
    if owner != str(pid):
        return (
            f"systemd's sockets are for process {owner} (LISTEN_PID), and this is {pid}: let systemd start "
            "twistd itself, with -n, and not through a shell or in the background"
        )
    if not count.isdigit() or count == "0":
        return f"systemd passed no socket (LISTEN_FDS is {count!r})"
    names = [name for name in environment.get("LISTEN_FDNAMES", "").split(":") if name]
    if len(names) != int(count):
        return (
            f"systemd passed {count} sockets and {len(names)} names (LISTEN_FDNAMES), which Twisted refuses: "
            "set FileDescriptorName= in the .socket unit; systemd before 227 passes none"
        )
    wanted = re.search(r"(index|name)=((?:\\.|[^:\\])*)", text)
    if wanted is None:
        return "needs index=, or better name= (FileDescriptorName= of the .socket unit)"
    if wanted[1] == "index":
        return f"there is no socket number {wanted[2]}: systemd passed {count}, from 0"
    if wanted[2] not in names:
        return f"there is no socket of the name {wanted[2]!r}: systemd passed {', '.join(names)}"
    return "its domain must be INET, INET6 or UNIX, as the .socket unit has it"


def _first_environment() -> Mapping[str, str]:
    """The environment as it was at the start of the process, where the system tells it."""
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = [each.partition(b"=") for each in file.read().split(b"\0")]
    except OSError:
        return os.environ
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs if name}
