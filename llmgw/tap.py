"""``twistd llmgw``: options to a configuration, a configuration to the service."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - see makeService
import gc
import os
import resource
import sys
import time
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from twisted.python import usage

from llmgw.config import Config
from llmgw.errors import ConfigError, PluginError
from llmgw.memory import keep_freed
from llmgw.workers.messages import Setup
from llmgw.workers.setup import Recorder, config_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twisted.application.service import IService

    from llmgw.service import GatewayService
    from llmgw.workers.service import ParentService


class Options(usage.Options):
    """What the command line may say; it wins over the file."""

    synopsis = "[-c FILE] [-l ENDPOINT …] [-b URL[,weight=..][,model=..] …]"
    optParameters = [  # noqa: RUF012
        ["config", "c", None, "Configuration file (TOML)."],
        ["workers", None, None, "Number of gateway processes.", int],
    ]
    optFlags = [  # noqa: RUF012
        ["check", None, "Check the configuration and the plugins, print the result, and exit."]
    ]

    def __init__(self) -> None:
        super().__init__()
        self["listen"] = []
        self["admin"] = []
        self["backend"] = []
        self["auth"] = []
        self.working_dir = os.getcwd()

    def opt_listen(self, endpoint: str) -> None:
        """Public listener: any Twisted server endpoint string. Repeatable."""
        self["listen"].append(endpoint)

    opt_l = opt_listen

    def opt_admin(self, endpoint: str) -> None:
        """Admin listener. Repeatable."""
        self["admin"].append(endpoint)

    def opt_backend(self, spec: str) -> None:
        """A backend: URL[,weight=..][,model=..]. Repeatable."""
        self["backend"].append(spec)

    opt_b = opt_backend

    def opt_auth(self, spec: str) -> None:
        """Who may call: keys:FILE, anonymous, or any twisted.cred checker. Repeatable."""
        self["auth"].append(spec)

    def getUsage(self, width: int | None = None) -> str:
        """The options, and every installed plugin of each kind."""
        from llmgw.plugins import describe

        lines = [super().getUsage(width), "Plugins:"]
        lines += [f"  {info.kind:14} {info.name:26} {info.description}" for info in describe()]
        return "\n".join(lines) + "\n"

    def postOptions(self) -> None:
        """Read the configuration, so that a wrong one ends before anything forks."""
        try:
            self.config, self.setup = self.reread()
            if self["check"]:
                warnings = self._verified()
        except (ConfigError, PluginError) as error:
            raise SystemExit("\n".join(f"llmgw: {line}" for line in str(error).splitlines())) from None
        if self["check"]:
            for warning in warnings:
                print(f"llmgw: warning: {warning}", file=sys.stderr)
            print(f"llmgw: {self.config.source or 'the options'}: good")
            raise SystemExit(0)

    def _verified(self) -> Sequence[str]:
        """What is worth a warning, by the rights of whom ``twistd`` is to become.

        :raise ConfigError: as it is now it would not start.
        """
        from twisted.internet import reactor

        from llmgw import writable
        from llmgw.verify import verify

        twistd: Any = self.parent if self.parent is not None else {}
        faults = writable.twistd_faults(twistd, self.working_dir)
        try:
            warnings = verify(self.config, reactor, user=(twistd.get("uid"), twistd.get("gid")))
        except ConfigError as error:
            raise ConfigError([*faults, *error.faults], error.source) from None
        if faults:
            raise ConfigError(faults)
        return warnings

    def read(self) -> Config:
        """The configuration as it is now; a reload calls this again.

        :raise ConfigError: every fault.
        """
        return self.reread()[0]

    def reread(self) -> tuple[Config, Setup]:
        """As :meth:`read`, beside all that it was read from, for workers.

        :raise ConfigError: every fault.
        """
        recorder = Recorder()
        setup = Setup(
            path=self["config"],
            listen=self["listen"],
            admin=self["admin"],
            backends=self["backend"],
            auth=self["auth"],
            workers=self["workers"],
            working_dir=self.working_dir,
            files=recorder.files,
        )
        try:
            return config_of(setup, recorder), setup
        except ConfigError as error:
            from twisted.internet import reactor

            from llmgw.verify import with_what_else

            raise with_what_else(error, reactor) from None


def makeService(options: Options) -> IService:
    """The service of one gateway, or of the parent of several. Touches no network.

    Python reads the codec for host names at the first look-up, in a thread. By
    then twistd may have given up root or changed its root directory, and the
    failed import would leave the look-up without an answer: hence the import above.
    """
    from twisted.internet import reactor

    from llmgw.handover import Successor, Taken, when_started
    from llmgw.systemd import Notifier

    keep_monotonic_time(reactor)
    taken = Taken(os.environ)
    twistd: Any = options.parent if options.parent is not None else {}
    service: GatewayService | ParentService
    try:
        if options.config.workers > 1:
            from llmgw.workers.service import ParentService

            service = ParentService(
                _daemon_warned(options),
                options.setup,
                reactor,
                reread=options.reread,
                reactor_name=twistd.get("reactor") or "",
                inherited=taken.sockets,
            )
        else:
            from llmgw.listening import Sockets
            from llmgw.service import GatewayService

            sockets = Sockets(reactor, taken.sockets)
            service = GatewayService(_daemon_warned(options), reactor, reread=options.read, sockets=sockets)
    except (ConfigError, PluginError) as error:
        raise SystemExit("\n".join(f"llmgw: {line}" for line in str(error).splitlines())) from None
    prepare_process(reactor)
    service.notifier = notifier = Notifier(reactor)
    if options.parent is not None:
        service.upgrade = Successor(reactor, service, notifier, twistd, options.working_dir).start

    def serves() -> None:
        notifier.ready()
        taken.serve(twistd)

    when_started(reactor, service, serves)
    return service


def prepare_process(reactor: Any) -> None:
    """What holds for the whole of a process that serves, once its modules are there."""
    from llmgw.wire.dispatch import without_log_context
    from llmgw.wire.names import remember_names

    keep_monotonic_time(reactor)
    remember_names(reactor)
    leave_no_core()
    tune_memory()
    without_log_context()


def _daemon_warned(options: Options) -> Config:
    """The configuration, with a warning about what a daemon would lose."""
    config = options.config
    parent = options.parent
    if config.log.access == "-" and parent is not None and not parent.get("nodaemon", True):
        warning = "log.access: a daemon has no standard output: name a file, or access lines are lost"
        return replace(config, warnings=(*config.warnings, warning))
    return config


def keep_monotonic_time(reactor: Any) -> None:
    """Let timers run on monotonic time.

    Twisted's ``seconds`` is wall time: a clock set back by an hour would stop
    every timer for that hour. Not once a timer is set, since it holds old time.
    """
    if not reactor.getDelayedCalls():
        reactor.seconds = time.monotonic


def leave_no_core() -> None:
    """A core file would hold every key and prompt that is in memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def tune_memory() -> None:
    """Collect garbage less often, and keep the memory that one long prompt gives to the next.

    Requests make few reference cycles; with the default thresholds a full
    collection over all modules' objects comes every few hundred requests and
    costs milliseconds. What exists now is exempt, and the young generation is larger.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    keep_freed()
