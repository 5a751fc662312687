"""One load for all gateways where what they share is an etcd: leases and transactions.

As :mod:`llmgw.load_locks`, for a configuration that finds its backends in etcd and
has no store. A lock is a key that is made if it is not there, under a lease that
is renewed; its creation revision is the fence. The keys stand beside the prefix
of the discovery and not below it, where every key is a backend.

:source: etcd 3.5 API, ``/v3/lease/grant``, ``/v3/kv/txn``.
"""

from __future__ import annotations

import base64
import contextlib
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from llmgw.discovery.etcd_client import EtcdClient
from llmgw.discovery.etcd_protocol import b64, range_end
from llmgw.load_locks import RENEW_S, SURE, TTL_S, Lock, Told, read_told, written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmgw.discovery.etcd_client import EtcdOptions

AWAY_S = 5.0
"""An etcd that failed is not asked again for so long; until then this gateway decides by itself."""


class EtcdLock(Lock):
    """
    :ivar lease: its id.
    :param revision: at which the key was made.
    """

    def __init__(self, locks: EtcdLocks, key: str, lease: str, revision: str, asked_s: float) -> None:
        super().__init__(None, key, f"{key}@{revision}", locks.reactor, locks.clock)
        self._locks = locks
        self.lease = lease
        self._revision = revision
        self._sure_until_s = asked_s + TTL_S * SURE
        self._timer = locks.reactor.callLater(RENEW_S, self._renew)

    @property
    def valid(self) -> bool:
        """Nobody else has it now."""
        return not self.lost and self._clock() < self._sure_until_s

    def tell(self, key: str, told: Told) -> Deferred[Any]:
        """Write a failure down for the others, if the lock is still ours. Never fails."""
        return Deferred.fromCoroutine(self._tell(key, told))

    def release(self) -> Deferred[Any]:
        """Give it back. Never fails; what cannot be given back expires."""
        self.lost = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._asking is not None:
            self._asking.cancel()
        return Deferred.fromCoroutine(self._locks.ask("/v3/lease/revoke", {"ID": self.lease}))

    async def put_if_ours(self, key: str, value: bytes, lease: str) -> bool:
        """Write something down under ``lease``, if the lock is still ours. :return: it was."""
        same = {
            "key": b64(self.key.encode()),
            "target": "CREATE",
            "result": "EQUAL",
            "create_revision": self._revision,
        }
        put = {"key": b64(key.encode()), "value": b64(value), "lease": lease}
        done = await self._locks.ask("/v3/kv/txn", {"compare": [same], "success": [{"request_put": put}]})
        return bool((done or {}).get("succeeded"))

    async def _tell(self, key: str, told: Told) -> bool:
        granted = await self._locks.ask("/v3/lease/grant", {"TTL": str(max(1, round(told.pause_s)))})
        return granted is not None and await self.put_if_ours(key, written(told).encode(), granted["ID"])

    def _renew(self) -> None:
        self._timer = None
        self._asking = Deferred.fromCoroutine(self._keep_alive())
        self._asking.addErrback(lambda failure: failure.trap(CancelledError) and None)
        self._asking.addBoth(self._renew_later)

    async def _keep_alive(self) -> None:
        asked_s = self._clock()
        kept = await self._locks.ask("/v3/lease/keepalive", {"ID": self.lease}, patient=True)
        if kept is None:
            return
        if kept.get("result", {}).get("TTL"):
            self._sure_until_s = asked_s + TTL_S * SURE
        elif not self.lost:  # an expired lease has no TTL
            self.lost = True


class EtcdLocks:
    """See :class:`llmgw.load_locks.LoadLocks`."""

    log = Logger()

    def __init__(self, options: EtcdOptions, reactor: Any, clock: Callable[[], float]) -> None:
        self.reactor = reactor
        self.clock = clock
        self._options = options
        self._prefix = options.prefix.rstrip("/") + "-load/"
        self._client: EtcdClient | None = None
        self._away_until_s = float("-inf")
        self._told_leaving: dict[str, tuple[str, tuple[str, ...]]] = {}

    @property
    def shared(self) -> bool:
        """Others may have locks now."""
        return self.clock() >= self._away_until_s

    async def take(self, *parts: str) -> Lock | None:
        """The lock called ``parts``; ``None`` while somebody else has it."""
        key = self._prefix + "lock/" + "/".join(parts)
        asked_s = self.clock()
        granted = await self.ask("/v3/lease/grant", {"TTL": str(round(TTL_S))})
        if granted is None:
            return Lock(None, key, "", self.reactor, self.clock)
        lease = granted["ID"]
        new = {"key": b64(key.encode()), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        put = {"key": b64(key.encode()), "value": b64(lease.encode()), "lease": lease}
        made = await self.ask("/v3/kv/txn", {"compare": [new], "success": [{"request_put": put}]})
        if made is None:
            return Lock(None, key, "", self.reactor, self.clock)
        if not made.get("succeeded"):
            await self.ask("/v3/lease/revoke", {"ID": lease})
            return None
        return EtcdLock(self, key, lease, made["header"]["revision"], asked_s)

    def told_key(self, model: str, url: str) -> str:
        """Where the last failure of ``model`` at a backend is written down."""
        return self._failed_of(model) + quote(url, safe="")

    async def told(self, model: str, urls: list[str]) -> list[Told] | None:
        """What gateways have met with ``model`` at these backends: of each its last failure,
        while it is to be heeded. ``None``: nobody can say."""
        if not self.shared or not urls:
            return None
        first = self._failed_of(model).encode()
        found = await self.ask("/v3/kv/range", {"key": b64(first), "range_end": b64(range_end(first))})
        if found is None:
            return None
        texts = [base64.b64decode(kv.get("value", "")) for kv in found.get("kvs") or []]
        every = [told for text in texts if (told := read_told(text)) is not None]
        return [told for told in every if told.backend in urls]

    async def forget(self, model: str, urls: list[str]) -> None:
        """``model`` was loaded well there, or is to be tried again: nobody need wait any more."""
        if not self.shared or not urls:
            return
        keys = [b64(self.told_key(model, url).encode()) for url in urls]
        gone = [{"request_delete_range": {"key": key}} for key in keys]
        await self.ask("/v3/kv/txn", {"success": gone})

    def _failed_of(self, model: str) -> str:
        return f"{self._prefix}failed/{quote(model, safe='')}/"

    async def tell_leaving(self, lock: Lock, url: str, models: tuple[str, ...]) -> None:
        """The other gateways should send nobody to ``models`` of a backend, for now.

        Once is enough: the word stands under the lease of the backend's lock, and goes with it.
        """
        if not self.shared or not isinstance(lock, EtcdLock):
            return
        if self._told_leaving.get(url) == (lock.id, models):
            return
        if await lock.put_if_ours(self._leaving_of(url), json.dumps(models).encode(), lock.lease):
            self._told_leaving[url] = (lock.id, models)

    async def forget_leaving(self, url: str) -> None:
        """They may send requests there again."""
        if self._told_leaving.pop(url, None) is not None and self.shared:
            await self.ask("/v3/kv/deleterange", {"key": b64(self._leaving_of(url).encode())})

    async def leaving(self, urls: list[str]) -> list[frozenset[str]]:
        """Models that gateways let run out, of each backend."""
        first = f"{self._prefix}leaving/".encode()
        request = {"key": b64(first), "range_end": b64(range_end(first)), "serializable": True}
        if not self.shared or not urls:
            return [frozenset() for _ in urls]
        found = await self.ask("/v3/kv/range", request, patient=True)  # asked each second: no word in the log
        told: dict[str, frozenset[str]] = {}
        for kv in (found or {}).get("kvs") or []:
            with contextlib.suppress(ValueError, TypeError):
                key = base64.b64decode(kv["key"]).decode()
                told[key] = frozenset(json.loads(base64.b64decode(kv["value"])))
        return [told.get(self._leaving_of(url), frozenset()) for url in urls]

    def _leaving_of(self, url: str) -> str:
        return f"{self._prefix}leaving/{quote(url, safe='')}"

    async def ask(
        self, path: str, body: Mapping[str, Any], *, patient: bool = False
    ) -> dict[str, Any] | None:
        """One call; ``None`` when it failed.

        :param patient: a failure says nothing about the next call.
        """
        from llmgw.discovery.http_client import HttpClient, TlsFiles

        options = self._options
        if self._client is None:
            files = TlsFiles(options.ca_file, options.cert_file, options.key_file)
            self._client = EtcdClient(options, HttpClient(self.reactor, files, options.timeout_s))
        try:
            return await self._client.call(path, body)
        except CancelledError:
            raise
        except Exception as error:
            self._client.turn()
            if not patient:
                self._away_until_s = self.clock() + AWAY_S
                self.log.warn("etcd gives no locks now: {why}", why=str(error) or json.dumps(path))
            return None
