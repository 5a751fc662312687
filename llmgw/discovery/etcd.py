"""Discovery ``etcd``: one JSON document for each backend, under a prefix.

Everything is read once (range), and from that revision on watched. When the
connection ends the watch resumes behind the last revision that was seen, at
this member or the next; what cannot be resumed, because etcd has compacted it
or because this is another store, is read anew and compared. A watch that is
silent for ``silence_s`` is opened again, since only that tells silence from death.

While no member answers, the last set stays.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater
from zope.interface import implementer

from llmgw.discovery.etcd_client import EtcdClient, EtcdOptions, check_etcd_options
from llmgw.discovery.etcd_protocol import OUT_OF_RANGE, EtcdError, Heard, Mirror
from llmgw.discovery.registration import read_registration
from llmgw.discovery.standing import Backoff, Carried, read_options
from llmgw.interfaces import CONTRACT, IDiscovery, IDiscoveryFactory

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime


class _StartOverError(Exception):
    """What is known cannot be resumed."""


@implementer(IDiscovery)
class EtcdDiscovery(Carried):
    """Mirrors one prefix.

    :param http: see :class:`llmgw.discovery.http_client.HttpClient`; made at the start if not given.
    """

    def __init__(self, options: EtcdOptions, reactor: IReactorTime, http: Any = None) -> None:
        super().__init__(reactor, f"etcd {options.prefix}")
        self._options = options
        self._http = http
        self._mirror = Mirror(options.prefix.encode())
        self._backoff = Backoff(len(options.endpoints), random.Random())

    async def _run(self) -> None:
        # Not sooner: any Twisted program may import this module, and the client needs treq and OpenSSL.
        from llmgw.discovery.http_client import AwayError, HttpClient, QuietError, TlsFiles

        options = self._options
        if self._http is None:
            files = TlsFiles(options.ca_file, options.cert_file, options.key_file)
            self._http = HttpClient(self._reactor, files, options.timeout_s)
        client = EtcdClient(options, self._http)
        while self._update is not None:
            try:
                if self._mirror.revision is None:
                    await self._read(client)
                await client.watch(self._mirror.watch_request(), self._take)
                self.failed(f"{client.endpoint}: ended the watch")
                client.turn()
            except CancelledError:
                if self._update is None:
                    raise
                self.failed("a question was cancelled, and not by us")
                client.turn()
            except QuietError:
                continue
            except _StartOverError:
                pass
            except (AwayError, EtcdError) as error:
                if isinstance(error, EtcdError) and error.code == OUT_OF_RANGE:
                    self._mirror.revision = None
                self.failed(f"{client.endpoint}: {error}")
                client.turn()
            except Exception:
                self.log.failure("{source}: a fault of our own", source=self._called)
                self._mirror.revision = None
            if self._update is not None:
                await deferLater(self._reactor, self._backoff.next_s())

    async def _read(self, client: EtcdClient) -> None:
        self._mirror.load(await client.call("/v3/kv/range", self._mirror.range_request()))
        self.heard()
        self._tell()

    def _take(self, message: Mapping[str, Any]) -> None:
        heard = self._mirror.take(message)
        if heard in (Heard.COMPACTED, Heard.ANOTHER):
            self.log.info("{source}: {heard}; read anew", source=self._called, heard=heard.value)
            raise _StartOverError
        self.heard()
        self._backoff.reset()
        if heard is Heard.CHANGED:
            self._tell()

    def _tell(self) -> None:
        # The older one first: where two claim one id or URL it keeps it.
        items = sorted(self._mirror.items.items(), key=lambda each: (each[1].created, each[0]))
        self.tell([read_registration(key.decode(errors="replace"), item.value) for key, item in items])


@implementer(IDiscoveryFactory)
class EtcdDiscoveryFactory:
    """Options: see :class:`~llmgw.discovery.etcd_client.EtcdOptions`."""

    name = "etcd"
    description = "JSON documents under a prefix of etcd, kept there by `llmgw register`"
    contract = CONTRACT

    def build(self, options: Mapping[str, Any], reactor: IReactorTime) -> EtcdDiscovery:
        """:raise ConfigError: options are wrong."""
        return EtcdDiscovery(read_options(EtcdOptions, options, check_etcd_options), reactor)
