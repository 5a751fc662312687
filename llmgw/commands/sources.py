"""What the discoveries of a configuration name now, as a gateway with it would take it.

They run for a moment on a reactor of their own, since the process may have used up
or be using the common one. Nothing is kept: no state file is read or written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct
from msgspec.structs import replace
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from llmgw.commands.asked import WITHIN_S, Finding, quoted
from llmgw.config import BackendConfig, Config
from llmgw.discoveries import TOGETHER_S, Discoveries

if TYPE_CHECKING:
    from twisted.python.failure import Failure

LOOK_S = 0.02


class Named(Struct, frozen=True):
    """What one ``[[discovery]]`` table has told.

    :param where: path of the table.
    :param told: it has told a set in the time that it had.
    :param error: why it is out of reach, by its own word.
    :param refused: entries that would not be served: each one's name and why.
    """

    where: str
    plugin: str
    told: bool
    error: str
    backends: tuple[BackendConfig, ...]
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        count = len(self.backends)
        names = f": {quoted([backend.id for backend in self.backends])}" if count else ""
        return f"{self.where} ({self.plugin}) names {count} backend{'' if count == 1 else 's'}{names}"

    def findings(self) -> Iterable[Finding]:
        """What of it is probably not meant."""
        what = f"{self.plugin} has told nothing within {WITHIN_S:g} s"
        if not self.told:
            yield Finding(
                self.where,
                f"{what}: {self.error}" if self.error else what,
                "Check its address, and what its account may read; until it tells, only the file's backends "
                "are served, and those of a state_file",
            )
        elif not (self.backends or self.refused):
            yield Finding(
                self.where,
                f"{self.plugin} names no backend",
                "Check the place where it looks, unless they come later",
            )
        for key, why in self.refused:
            yield Finding(
                self.where, f"{key} is not served: {why}", "Correct it at its source, or `allow` it"
            )


def ask_sources(config: Config) -> Sequence[Named]:
    """Let every discovery tell what it has, for a few seconds at most."""
    if not config.discovery:
        return ()
    # Not sooner: importing it installs it, and other commands want none.
    from twisted.internet import reactor as common

    kind: Any = type(common)
    reactor = kind()
    served = SimpleNamespace(backends=())
    served.apply = lambda whole: setattr(served, "backends", whole.backends)
    forgetful = tuple(replace(table, state_file=None) for table in config.discovery)
    gateway = SimpleNamespace(first_word=None, dice=Random())
    discoveries = Discoveries(cast("Any", served), cast("Any", gateway), reactor)

    async def tell() -> None:
        discoveries.apply(replace(config, discovery=forgetful))
        discoveries.start()
        until_s = reactor.seconds() + WITHIN_S
        while reactor.seconds() < until_s and not all(source["told"] for source in discoveries.state()):
            await deferLater(reactor, LOOK_S)
        await deferLater(reactor, 2 * TOGETHER_S)  # until what was told last is taken over
        told.extend(discoveries.state())  # one that was stopped says no error any more
        await discoveries.stop()

    def begin() -> None:
        Deferred.fromCoroutine(tell()).addErrback(faults.append).addBoth(lambda _: reactor.stop())

    told: list[dict[str, Any]] = []
    faults: list[Failure] = []
    reactor.callWhenRunning(begin)
    reactor.run(installSignalHandlers=False)
    for fault in faults:
        fault.raiseException()
    found = {backend.id: backend for backend in served.backends}
    return [
        Named(
            where=f"discovery[{index}]",
            plugin=source["plugin"],
            told=source["told"],
            error=source["error"],
            backends=tuple(
                backend for id, backend in found.items() if discoveries.source_of(id) == source["name"]
            ),
            refused=tuple((each["key"], each["why"]) for each in (*source["refused"], *source["clashes"])),
        )
        for index, source in enumerate(told)
    ]
