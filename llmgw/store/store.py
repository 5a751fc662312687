"""The client of the shared store; how to use it stands in :mod:`llmgw.store`.

States::

    down --connected, greeted--> up --lost, 3 answers missed, READONLY …--> down
    down --0.5 s, doubled up to 5 s, each +-20 %--> tries again (at once after a loss)

With Sentinel each try asks it anew who the master is.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.task import deferLater
from twisted.logger import Logger

from llmgw.store.address import Address, parse_address, parse_sentinel
from llmgw.store.errors import StoreDown, StoreError, StoreLost, StoreRefused
from llmgw.store.link import Link, ask_sentinel, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmgw.config import StoreConfig

MISSES = 3
"""Answers missed in a row after which the connection is given up."""

LASTED_S = 1.0
"""A connection that held so long was a good one, and is made anew at once."""

RETRY_S = 0.5
RETRY_MOST_S = 5.0
RETRY_SENTINEL_S = 1.0
"""Where Sentinel is asked, nobody waits longer: a failover is over at any moment."""

ANEW = frozenset(("READONLY", "LOADING", "MOVED", "ASK", "CLUSTERDOWN", "MASTERDOWN", "NOAUTH"))
"""Error codes of a server that is not, or not any more, the one to ask."""

CLUSTER = "Redis Cluster is not supported: use a single server, or Sentinel"


class Script:
    """A Lua script and its digest. Make it once, at import.

    :param text: the source; see the Redis documentation of ``EVAL``.
    """

    __slots__ = ("sha", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode()).hexdigest()


class Store:
    """One connection to the shared store, kept up.

    :param config: checked; it names a server or Sentinels.
    :param reactor: a running one, once :meth:`start` was called.
    :ivar place: for logs and people: its URL, or the Sentinels and the master's name.
    :ivar up: questions are answered. False until the first connection.
    :ivar why: in a few words, why it is not up; ``""`` if it is.
    :ivar watchers: each is called with ``up`` at each change, in the reactor's turn.
    :ivar server_id: tells whether it is still the same run of the same server; ``""``: not known.
    :ivar losses: how often it went down.
    """

    log = Logger()

    def __init__(self, config: StoreConfig, reactor: Any, dice: random.Random | None = None) -> None:
        self.config = config
        self._sentinels = [parse_sentinel(text) for text in config.sentinels]
        self._address = parse_address(config.url or "redis:///", hostless=bool(self._sentinels))
        self.place = (
            f"{config.master} of sentinels {', '.join(config.sentinels)}"
            if self._sentinels
            else str(self._address)
        )
        self.up = False
        self.why = "not started"
        self.losses = 0
        self.server_id = ""
        self.watchers: list[Callable[[bool], None]] = []
        self._reactor = reactor
        self._dice = dice or random.Random()
        self._link: Link | None = None
        self._misses = 0
        self._failures = 0
        self._up_since_s = 0.0
        self._trying: Deferred[None] | None = None
        self._timer: Any = None
        self._closed = False
        self._running = False
        self._told = ""

    # --- what others call ---

    def start(self) -> None:
        """Begin to connect. Further calls do nothing."""
        if not self._running and not self._closed:
            self._running = True
            self.why = "connecting"
            self._try()

    def close(self) -> Deferred[None]:
        """End; what waits fails with :class:`StoreLost`. Fires when the connection is gone."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._trying is not None:
            self._trying.cancel()
        link = self._link
        if link is not None:
            self._down("closed", link)
        # Sockets are closed in the reactor's next turn.
        return deferLater(self._reactor, 0) if self._running else succeed(None)

    def key(self, *parts: str) -> str:
        """A key of ours: the prefix, and ``parts`` joined by colons."""
        return self.config.key_prefix + ":".join(parts)

    def command(self, *arguments: Any, within_s: float | None = None) -> Deferred[Any]:
        """Send one command, such as ``command("SET", key, value, "PX", 500)``.

        :param arguments: ``str``, ``bytes``, ``int`` or ``float`` (six decimals).
        :param within_s: longest wait, where ``op_s`` is too short.
        :return: integers as ``int``, strings as ``bytes``, status lines as ``str``,
            arrays as lists, nothing as ``None``. Cancelling gives the answer up.
        :raise StoreDown: not sent. :raise StoreLost: sent, no answer. :raise StoreRefused: an error.
        """
        return Deferred.fromCoroutine(self._ask(arguments, within_s))

    def run(
        self,
        script: Script,
        keys: Sequence[str | bytes] = (),
        arguments: Sequence[Any] = (),
        *,
        within_s: float | None = None,
    ) -> Deferred[Any]:
        """Run a script by its digest, and once by its text where the server lost it.

        As :meth:`command` else.
        """
        return Deferred.fromCoroutine(self._run(script, keys, arguments, within_s))

    # --- our own ---

    async def _run(
        self, script: Script, keys: Sequence[str | bytes], arguments: Sequence[Any], within_s: float | None
    ) -> Any:
        try:
            return await self._ask(("EVALSHA", script.sha, len(keys), *keys, *arguments), within_s)
        except StoreRefused as error:
            if error.code != "NOSCRIPT":
                raise
        return await self._ask(("EVAL", script.text, len(keys), *keys, *arguments), within_s)

    async def _ask(self, arguments: tuple[Any, ...], within_s: float | None) -> Any:
        link = self._link
        if link is None:
            raise StoreDown(self.why)
        try:
            answer = await link.ask(arguments, self.config.op_s if within_s is None else within_s)
        except StoreLost as error:
            if link is self._link:
                self._misses += 1
                if self._misses >= MISSES:
                    self._down(str(error), link)
            raise
        except StoreRefused as error:
            self._misses = 0
            if error.code in ANEW:
                self._down(CLUSTER if error.code in ("MOVED", "ASK") else str(error), link)
            raise
        self._misses = 0
        return answer

    def _try(self) -> None:
        self._timer = None
        self._trying = Deferred.fromCoroutine(self._connect())
        self._trying.addCallbacks(lambda _: None, self._broken).addBoth(self._tried)

    def _tried(self, _: Any) -> None:
        self._trying = None

    def _broken(self, failure: Any) -> None:
        if failure.check(CancelledError) is None:
            self.log.failure("connecting to the shared store", failure)
            self._again()

    async def _connect(self) -> None:
        try:
            link = await self._open()
        except StoreError as error:
            self._failures += 1
            self._say_down(str(error))
            self._again()
            return
        self._link = link
        self.server_id = link.server_id
        self._misses = 0
        self._up_since_s = self._reactor.seconds()
        self.up = True
        self.why = self._told = ""
        self.log.info("shared store {place}: up", place=self.place)
        self._tell()

    async def _open(self) -> Link:
        config = self.config
        address = await self._master() if self._sentinels else self._address
        link = await connect(
            self._reactor,
            address,
            password=config.password,
            ca_file=config.ca_file,
            connect_s=config.connect_s,
            lost=self._lost,
        )
        fault = ""
        if link.server.get("mode") == "cluster":
            fault = CLUSTER
        elif link.server.get("mode") == "sentinel":
            fault = f"{address} is a Sentinel: name it in `sentinels`"
        elif link.server.get("role", "master") not in ("master", "primary"):
            fault = f"{address} is a replica"
        if fault:
            link.close()
            raise StoreError(fault)
        return link

    async def _master(self) -> Address:
        config = self.config
        whys = []
        # Each try begins with another one, so that one that lies does not keep us for ever.
        start = self._failures % len(self._sentinels)
        for host, port in self._sentinels[start:] + self._sentinels[:start]:
            try:
                found = await ask_sentinel(
                    self._reactor,
                    Address(host=host, port=port, tls=self._address.tls),
                    config.master or "",
                    password=config.sentinel_password,
                    ca_file=config.ca_file,
                    connect_s=config.connect_s,
                )
            except StoreError as error:
                whys.append(f"sentinel {host}:{port}: {error}")
            else:
                return replace(self._address, host=found[0], port=found[1])
        raise StoreDown("; ".join(whys))

    def _lost(self, link: Link) -> None:
        if link is self._link:
            self._down("the connection was lost", link)

    def _down(self, why: str, link: Link) -> None:
        self._link = None
        self.up = False
        self.losses += 1
        self._say_down(why)
        link.close()
        self._tell()
        # One that takes us and drops us is no better than one that is not there.
        lasted = self._reactor.seconds() - self._up_since_s >= LASTED_S
        self._failures = 0 if lasted else self._failures + 1
        self._again(at_once=lasted)

    def _say_down(self, why: str) -> None:
        self.why = why
        if why != self._told and not self._closed:
            self._told = why
            self.log.warn("shared store {place}: down: {why}", place=self.place, why=why)

    def _tell(self) -> None:
        for watcher in list(self.watchers):
            try:
                watcher(self.up)
            except Exception:
                self.log.failure("a watcher of the shared store")

    def _again(self, at_once: bool = False) -> None:
        if self._closed or self._timer is not None:
            return
        most_s = RETRY_SENTINEL_S if self._sentinels else RETRY_MOST_S
        wait_s = min(most_s, RETRY_S * 2.0 ** min(max(0, self._failures - 1), 10))
        if at_once:
            wait_s = RETRY_S / 10  # spread a little: all gateways lost it at this moment
        self._timer = self._reactor.callLater(wait_s * (0.8 + 0.4 * self._dice.random()), self._try)
