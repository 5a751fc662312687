"""Keeps one server's registration in etcd for as long as the server is well.

A health source looks at the server; what it tells goes into the document
(models, slots, context length). The document's key hangs on a lease that is
kept alive, so that it goes when this process or its machine does. When the
server is unwell, or at the end, the lease is revoked and the key with it; a key
that a newer keeper has put on a lease of its own meanwhile stays.

While etcd is away nothing is lost: it is asked again and again, and a lease that
ended meanwhile is replaced.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from llmgw.core.fall_rise import FallRise
from llmgw.discovery.etcd_client import EtcdClient
from llmgw.discovery.etcd_protocol import NOT_FOUND, EtcdError, b64, error_of
from llmgw.discovery.http_client import AwayError
from llmgw.discovery.registration import Registration, write_registration
from llmgw.discovery.standing import Backoff
from llmgw.values import HealthReport

Tell = Callable[..., None]


class Keeping(Struct, frozen=True):
    """How a registration is kept.

    :param key: in etcd.
    :param told: the document as the operator wants it; what is ``None`` there is asked of the server.
    :param ttl_s: of the lease.
    :param fall: bad looks in a row until it is taken away; ``rise`` good ones until it is back.
    """

    key: str
    told: Registration
    ttl_s: int = 15
    fall: int = 3
    rise: int = 2


class TakenError(Exception):
    """Another server is registered under the key."""


class Sidecar:
    """One registration.

    :param source: a health source, not started; ``target`` is what it looks at.
    :param members: how many etcd endpoints there are.
    :param tell: called with an event's name and its fields.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        keeping: Keeping,
        client: EtcdClient,
        members: int,
        source: Any,
        target: Any,
        tell: Tell,
    ) -> None:
        self._reactor = reactor
        self._keeping = keeping
        self._client = client
        self._members = members
        self._backoff = Backoff(members, random.Random(), most_s=keeping.ttl_s / 3)
        self._source = source
        self._target = target
        self._tell = tell
        self._fall_rise = FallRise(keeping.fall, keeping.rise)
        self._document = keeping.told
        self._lease: str | None = None
        self._every_s = keeping.ttl_s / 3
        self._written: bytes | None = None
        self._trouble = ""
        self._again = False
        self._running: Deferred[None] | None = None
        self._pause: Deferred[None] | None = None

    def start(self) -> None:
        """Look at the server, and register it when it is well."""
        self._source.start(self._target, self._looked)
        self._running = Deferred.fromCoroutine(self._run())
        self._running.addErrback(self._ended)

    async def stop(self) -> bool:
        """Take the registration away. :return: whether etcd has taken note."""
        self._source.stop()
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
        for _ in range(self._members):
            try:
                await self._leave("ended")
                return True
            except (AwayError, EtcdError) as error:
                self._note(error)
                self._client.turn()
        return False

    # --- the server ---

    def _looked(self, report: HealthReport) -> None:
        good = report.alive and not report.loading
        if good:
            self._document = _completed(self._keeping.told, report)
        changed = self._fall_rise.check(good)
        if changed:
            self._tell("healthy" if good else "unhealthy", detail=report.detail)
        if changed or (self._fall_rise.up and write_registration(self._document) != self._written):
            self._wake()

    # --- etcd ---

    async def _run(self) -> None:
        while True:
            try:
                await self._settle()
                self._backoff.reset()
                if self._trouble:
                    self._trouble = ""
                    self._tell("etcd_back", endpoint=self._client.endpoint)
                pause_s = self._every_s
            except (AwayError, EtcdError, TakenError) as error:
                self._note(error)
                if not isinstance(error, TakenError):
                    self._client.turn()
                pause_s = self._backoff.next_s()
            if self._again:
                self._again, pause_s = False, 0.0
            self._pause = deferLater(self._reactor, pause_s)
            try:
                await self._pause
            except CancelledError:
                if self._running is None:
                    raise
            finally:
                self._pause = None

    async def _settle(self) -> None:
        """Make it so in etcd: registered, or not."""
        if not self._fall_rise.up:
            await self._leave("unhealthy")
            return
        if self._lease is not None and not await self._is_alive(self._lease):
            self._tell("lease_lost", lease=self._lease)
            self._lease = None
        if self._lease is None:
            granted = await self._client.call("/v3/lease/grant", {"TTL": str(self._keeping.ttl_s)})
            self._lease, self._written = str(granted.get("ID", "")), None
            # etcd may give a longer life than was asked for, never a shorter one.
            self._every_s = max(self._keeping.ttl_s, _number(granted.get("TTL"))) / 3
        await self._write(self._lease)

    async def _is_alive(self, lease: str) -> bool:
        answer = await self._client.call("/v3/lease/keepalive", {"ID": lease})
        if "error" in answer:
            raise error_of(answer)
        result = answer.get("result")
        return isinstance(result, Mapping) and _number(result.get("TTL")) > 0

    async def _write(self, lease: str) -> None:
        """Put the document, unless it stands there as it should.

        The key of a keeper that died hangs on its lease still, and is taken over so
        that it does not go for a moment. From then on whoever has it keeps it.

        :raise TakenError: another server's document stands there.
        """
        key, raw = b64(self._keeping.key.encode()), write_registration(self._document)
        found = (await self._client.call("/v3/kv/range", {"key": key})).get("kvs") or []
        modified = "0"
        if found:
            there: Mapping[str, Any] = found[0]
            modified = str(there.get("mod_revision", "0"))
            if str(there.get("lease", "0")) == lease:
                if self._written == raw:
                    return
            else:
                url = _url(there.get("value"))
                if url != self._document.url:
                    raise TakenError(f"{self._keeping.key} is registered already, for {url}")
                if self._written is not None:
                    return
        put = {"request_put": {"key": key, "value": base64.b64encode(raw).decode(), "lease": lease}}
        same = {"key": key, "target": "MOD", "mod_revision": modified, "result": "EQUAL"}
        answer = await self._client.call("/v3/kv/txn", {"compare": [same], "success": [put]})
        if not answer.get("succeeded"):
            raise TakenError(f"{self._keeping.key} was changed by another at the same time")
        first, self._written = self._written is None, raw
        self._tell(
            "registered" if first else "changed",
            key=self._keeping.key,
            lease=lease,
            document=msgspec.json.decode(raw),
        )

    async def _leave(self, why: str) -> None:
        if self._lease is None:
            return
        try:
            await self._client.call("/v3/lease/revoke", {"ID": self._lease})
        except EtcdError as error:
            if error.code != NOT_FOUND:
                raise
        self._lease = self._written = None
        self._tell("deregistered", key=self._keeping.key, why=why)

    # --- inside ---

    def _wake(self) -> None:
        """Settle now."""
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._again = True  # it is at it, perhaps with what was true before

    def _note(self, error: Exception) -> None:
        """Tell a trouble once until it changes."""
        event = "taken" if isinstance(error, TakenError) else "etcd_lost"
        why = str(error) if event == "taken" else f"{self._client.endpoint}: {error}"
        if str(error) != self._trouble:
            self._tell(event, why=why)
        self._trouble = str(error)

    def _ended(self, failure: Any) -> None:
        if not failure.check(CancelledError):
            self.log.failure("keeping the registration", failure)
            self._tell("failed", why=failure.getErrorMessage())


def _completed(told: Registration, report: HealthReport) -> Registration:
    """What the operator told, and what the server tells of the rest."""
    asked: dict[str, Any] = {
        "models": list(report.models) if report.models else None,
        "slots": report.slots,
        "context_length": report.context_length,
    }
    gaps = {name: value for name, value in asked.items() if value and getattr(told, name) is None}
    return replace(told, **gaps)


def _url(value: Any) -> str:
    try:
        return msgspec.json.decode(base64.b64decode(value or ""), type=Registration).url
    except (ValueError, TypeError):
        return "something that is no registration"


def _number(value: Any) -> int:
    try:
        return int(value or 0)
    except (ValueError, TypeError):
        return 0
