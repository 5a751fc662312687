"""What every built-in discovery tells of itself, and how it reads its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from llmgw.config.files import DISK
from llmgw.config.reader import Reader
from llmgw.errors import ConfigError
from llmgw.plain_text import plain

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

Update = Callable[[Sequence[Mapping[str, Any]]], None]
Options = TypeVar("Options", bound=Struct)


class Standing:
    """Base of the built-in discoveries.

    :ivar connected: in touch with the source now.
    :ivar contact_s: its last answer, by the reactor's clock.
    :ivar error: why not, in one line; ``""`` while all is well.
    """

    log = Logger()

    def __init__(self, reactor: IReactorTime, called: str) -> None:
        self.connected = False
        self.contact_s: float | None = None
        self.error = ""
        self._reactor = reactor
        self._called = called
        self._update: Update | None = None

    def heard(self) -> None:
        """The source has answered."""
        self.contact_s = self._reactor.seconds()
        if self.error:
            self.log.info("{source}: is there again", source=self._called)
        self.connected, self.error = True, ""

    def failed(self, why: str) -> None:
        """The source did not answer, or with something unusable; told once until it changes."""
        why = plain(" ".join(why.split()), 300).rstrip(".")
        if why != self.error:
            self.log.warn("{source}: {why}; the last set stays", source=self._called, why=why)
        self.connected, self.error = False, why

    def tell(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """The whole set, unless stopped."""
        if self._update is not None:
            self._update(entries)


class Carried(Standing):
    """Base of those that one coroutine carries from start to stop: :meth:`_run`, for subclasses."""

    def __init__(self, reactor: IReactorTime, called: str) -> None:
        super().__init__(reactor, called)
        self._running: Deferred[None] | None = None

    def start(self, update: Update) -> None:
        """See :meth:`llmgw.interfaces.IDiscovery.start`."""
        self._update = update
        self._running = Deferred.fromCoroutine(self._run())
        self._running.addErrback(lambda failure: failure.trap(CancelledError) and None)

    def stop(self) -> None:
        """See :meth:`llmgw.interfaces.IDiscovery.stop`."""
        self._update = None
        running, self._running = self._running, None
        if running is not None:
            running.cancel()

    async def _run(self) -> None:
        """Until there is nobody to tell: it is cancelled then."""
        raise NotImplementedError


class Backoff:
    """How long to wait before the next try: each member once in quick turn, then slower round by round.

    :param members: how many there are to try.
    """

    def __init__(self, members: int, dice: Random, first_s: float = 0.1, most_s: float = 5.0) -> None:
        self._members = members
        self._dice = dice
        self._first_s = first_s
        self._most_s = most_s
        self._tries = 0

    def next_s(self) -> float:
        """Spread by ±20 %, so that gateways do not come in step."""
        rounds = min(30, self._tries // self._members)
        self._tries += 1
        return min(self._most_s, self._first_s * 2.0**rounds) * self._dice.uniform(0.8, 1.2)

    def reset(self) -> None:
        """All is well again."""
        self._tries = 0


def read_options(kind: type[Options], options: Mapping[str, Any], check: Any = None) -> Options:
    """``options`` as a ``kind``, whose annotations are rules as those of the configuration.

    :param check: called with the reader and the struct; tells further faults to the reader.
    :raise ConfigError: every fault.
    """
    reader = Reader("", DISK)
    found = reader.struct(kind, dict(options), "")
    if check is not None and not reader.faults:
        check(reader, found)
    if reader.faults:
        raise ConfigError(reader.faults)
    assert isinstance(found, kind)
    return found
