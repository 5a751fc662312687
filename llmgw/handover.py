"""A new daemon takes over from a running one (SIGUSR2): new code, new ``listen``, another number of workers.

The old one starts the new one with its own command line and hands it the listening
sockets. When the new one serves it says so, and the old one stops accepting and
finishes its streams. Nobody is refused, since the sockets are never closed; and if
the new one does not start, the old one serves on.

Between the two: :data:`VARIABLE` holds names and numbers of the sockets, and of a pipe
on which the new one writes ``ready``. What a new one that does not start has to say would be
lost in the background, where standard error leads nowhere; so it writes into a nameless file
there until it serves, and the old one's log tells it. Run as a program (``python -m llmgw.handover``) it
prepares the new process, which needs to know its own id before it becomes ``twistd``.
"""

from __future__ import annotations

import getopt
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

if TYPE_CHECKING:
    from llmgw.systemd import Notifier

VARIABLE = "LLMGW_HANDOVER"
LOOK_EVERY_S = 0.1
FOR_THE_FIRST_ONLY = frozenset(
    {"--uid", "-u", "--gid", "-g", "--euid", "--chroot", "--pidfile", "--nodaemon", "-n", "--no_save", "-o"}
)
"""Options of ``twistd`` that the successor does not get as they are."""
LAST_BYTES = 2000
"""So much of what a successor said is told when it did not start."""


class Serving(Protocol):
    """A service whose sockets can be handed over."""

    @property
    def started(self) -> bool:
        """It serves its sockets."""

    def listening(self) -> tuple[list[tuple[str, int]], Mapping[int, int]]:
        """Names and descriptors of its sockets, and of systemd's: their number to their descriptor."""

    def relieve(self) -> None:
        """Another process serves the sockets: stop accepting, finish, end."""


class Taken:
    """What this process has taken over, if anything.

    :ivar sockets: name and descriptor of each; whoever listens takes what fits out of the list.
    """

    log = Logger()

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        told = json.loads(environment.pop(VARIABLE, "{}"))
        self.sockets: list[tuple[str, int]] = [(name, number) for name, number in told.get("sockets", [])]
        self._ready: int | None = told.get("ready")
        self._pidfile: str = told.get("pidfile", "")
        self._heard: bool = told.get("heard", False)

    def serve(self, twistd: Any) -> None:
        """Tell the old one that we serve. Its process id file is ours from now on.

        :param twistd: its options, by which the file is removed at the end.
        """
        for _, descriptor in self.sockets:
            os.close(descriptor)
        self.sockets.clear()
        if self._ready is None:
            return
        if self._pidfile:
            try:
                _write_pid(self._pidfile)
                twistd["pidfile"] = self._pidfile
            except OSError as error:
                self.log.warn(
                    "{path} names the daemon before this one: {why}", path=self._pidfile, why=error.strerror
                )
        if self._heard:
            _lead_nowhere(2)
        os.write(self._ready, b"ready\n")
        os.close(self._ready)
        self._ready = None


def _write_pid(path: str) -> None:
    """Put our id in the place of the old one's, whose file may be root's though its folder is ours.

    :raise OSError: neither is.
    """
    try:
        with open(path, "w") as file:
            file.write(str(os.getpid()))
    except PermissionError:
        new = f"{path}.{os.getpid()}.new"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(str(os.getpid()))
        os.replace(new, path)


def _lead_nowhere(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def _leads_nowhere(descriptor: int) -> bool:
    return os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))


def when_started(reactor: Any, service: Serving, then: Callable[[], None]) -> None:
    """Call ``then`` once, when ``service`` serves."""

    def look() -> None:
        if service.started:
            loop.stop()
            then()

    loop = LoopingCall(look)
    loop.clock = reactor
    reactor.callWhenRunning(loop.start, LOOK_EVERY_S)


class Successor(ProcessProtocol):
    """Starts a successor on demand, one at a time.

    :param twistd: the options of ``twistd``.
    :param working_dir: where our command line was given.
    """

    log = Logger()

    def __init__(
        self, reactor: Any, service: Serving, notifier: Notifier, twistd: Any, working_dir: str
    ) -> None:
        self._reactor = reactor
        self._service = service
        self._notifier = notifier
        self._twistd = twistd
        self._working_dir = working_dir
        self._pid = 0
        self._served = False
        self._said: BinaryIO | None = None

    def start(self) -> None:
        """Start it, unless one is on its way."""
        if self._pid:
            self.log.warn("a successor (pid {pid}) is on its way already", pid=self._pid)
            return
        sockets, activated = self._service.listening()
        descriptors: dict[int, Any] = {0: 0, 1: 1, 2: 2, **activated}
        number = max(descriptors)
        handed = []
        for name, descriptor in sockets:
            if descriptor not in activated.values():
                number += 1
                descriptors[number] = descriptor
                handed.append((name, number))
        ready = number + 1
        descriptors[ready] = "r"
        if _leads_nowhere(2):
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - until it serves or has ended
            descriptors[2] = self._said.fileno()
        pidfile = self._twistd.get("pidfile") or ""
        told = {
            "sockets": handed,
            "ready": ready,
            "pidfile": os.path.abspath(pidfile) if pidfile else "",
            "heard": self._said is not None,
        }
        environment = {**os.environ, VARIABLE: json.dumps(told)}
        environment.pop("WATCHDOG_PID", None)
        environment.pop("LISTEN_FDS", None)
        if activated:
            environment["LISTEN_FDS"] = str(len(activated))
        arguments = [sys.executable, "-m", "llmgw.handover", self._working_dir, *command(self._twistd)]
        try:
            process = self._reactor.spawnProcess(
                self, sys.executable, arguments, env=environment, childFDs=descriptors
            )
        except OSError as error:
            self.log.error("no successor can be started: {error}", error=str(error))
            self._last_words()
            return
        self._pid = process.pid
        self.log.info("a successor is starting: pid {pid}", pid=self._pid)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        """It serves."""
        if self._served:
            return
        self._served = True
        self._last_words()
        self.log.info("pid {pid} serves: finishing here", pid=self._pid)
        self._twistd["pidfile"] = ""
        self._notifier.main_process(self._pid)
        self._service.relieve()

    def processEnded(self, reason: Failure) -> None:
        if not self._served:
            why = self._last_words() or reason.getErrorMessage()
            self.log.error("the successor (pid {pid}) did not start: {why}", pid=self._pid, why=why)
        self._pid = 0

    def _last_words(self) -> str:
        """What it said where nobody would have read it, once."""
        said, self._said = self._said, None
        if said is None:
            return ""
        with said:
            said.seek(0)
            return said.read()[-LAST_BYTES:].decode("utf-8", "replace").strip()


def command(twistd: Any) -> list[str]:
    """The command line of a successor: ours, in the foreground, without what is done once.

    :param twistd: the parsed options of ours.
    """
    arguments = sys.argv[1:]
    program = sys.orig_argv[: len(sys.orig_argv) - len(arguments)]
    options, rest = getopt.getopt(arguments, twistd.shortOpt, twistd.longOpt)
    kept = []
    for name, value in options:
        if name not in FOR_THE_FIRST_ONLY:
            kept.append(f"{name}={value}" if name.startswith("--") and value else f"{name}{value}")
    if not twistd.get("nodaemon") and not twistd.get("logfile"):
        kept.append("--logfile=twistd.log")
    return [*program, *kept, "--nodaemon", "--pidfile=", *rest]


def main(arguments: list[str]) -> None:
    """Become the successor.

    :param arguments: its working directory, and its command line.
    """
    os.chdir(arguments[0])
    if "LISTEN_FDS" in os.environ:
        os.environ["LISTEN_PID"] = str(os.getpid())
    program = arguments[1]
    os.execvp(program, arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
