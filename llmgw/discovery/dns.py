"""Discovery ``dns``: the addresses behind a name, or the servers of an SRV record.

Asked again when the shortest time to live of an answer is over, within bounds.
A name that does not exist, or has no such record, is an empty set, as the DNS
says so itself. Whoever does not answer says nothing: the last good answer of
each question is kept for ``keep_s``.

:source: RFC 1035, RFC 2782 (SRV), RFC 2308 (no such name, no such record).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Struct
from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.task import deferLater
from zope.interface import implementer

from llmgw.config.reader import Reader, Rule
from llmgw.discovery.standing import Carried, read_options
from llmgw.interfaces import CONTRACT, IDiscovery, IDiscoveryFactory

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

RESOLV_CONF = "/etc/resolv.conf"
_NAME = r"(?=.{1,253}\.?$)[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,62})(?:\.[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,62}))*\.?"


def _server(reader: Reader, where: str, text: str) -> str:
    host, port = split_server(text)
    try:
        ip_address(host)
    except ValueError:
        raise ValueError(f"must be an address, with :port behind it if not 53, got {text!r}") from None
    if not 0 < port < 65536:
        raise ValueError(f"bad port: {text!r}")
    return text


def split_server(text: str) -> tuple[str, int]:
    """Address and port: ``10.0.0.2``, ``10.0.0.2:5353``, ``::1``, ``[::1]:5353``."""
    host, colon, port = text.rpartition(":")
    if colon and port.isdecimal() and (":" not in host or (host.startswith("[") and host.endswith("]"))):
        return host.strip("[]"), int(port)
    return text.strip("[]"), 53


class DnsOptions(Struct, frozen=True):
    """:param query: the name, whole: no search domain is tried.

    :param record: ``address`` asks for A and AAAA, ``srv`` for SRV and the addresses of its targets.
    :param port: of the backends; for ``address`` only, where it must be.
    :param path: behind the port of every URL.
    :param servers: addresses of name servers; those of the system if there are none.
    :param least_s: the shortest time between two rounds; ``most_s`` the longest.
    :param keep_s: a last good answer counts for so long.
    """

    query: Annotated[str, Rule(shape=_NAME, meaning="a host name")]
    record: Literal["address", "srv"] = "address"
    port: Annotated[int | None, Rule(least=1, most=65_535)] = None
    scheme: Literal["http", "https"] = "http"
    path: Annotated[str, Rule(shape=r"(?:/[A-Za-z0-9._~-]+)*", meaning="a plain path such as /llm")] = ""
    servers: tuple[Annotated[str, Rule(convert=_server)], ...] = ()
    least_s: Annotated[float, Rule(least=1, most=86_400)] = 5.0
    most_s: Annotated[float, Rule(least=1, most=86_400)] = 300.0
    keep_s: Annotated[float, Rule(least=1, most=604_800)] = 3600.0
    timeout_s: Annotated[float, Rule(least=0.1, most=60)] = 2.0


def _check(reader: Reader, options: DnsOptions) -> None:
    if options.record == "address" and options.port is None:
        reader.fault("port", "missing: an address has none")
    if options.record == "srv" and options.port is not None:
        reader.fault("port", "is told by the SRV record")
    if options.least_s > options.most_s:
        reader.fault("least_s", f"must not be above most_s ({options.most_s:g})")


class Record(Struct, frozen=True):
    """One answer, of either kind.

    :param data: an address, or the target of an SRV record.
    """

    ttl_s: float
    data: str
    port: int = 0
    priority: int = 0
    weight: int = 0


Lookup = Callable[[str, str], "Deferred[Sequence[Record]]"]
"""Name and kind (``A``, ``AAAA``, ``SRV``) to records, none if there are none; fails if nobody answers."""


class _Answer(Struct):
    records: Sequence[Record]
    at_s: float


@implementer(IDiscovery)
class DnsDiscovery(Carried):
    """Asks for one name, round after round.

    :param lookup: made at the start if not given.
    """

    def __init__(self, options: DnsOptions, reactor: IReactorTime, lookup: Lookup | None = None) -> None:
        super().__init__(reactor, f"dns {options.query}")
        self._options = options
        self._lookup = lookup
        self._answers: dict[tuple[str, str], _Answer] = {}
        self._told: list[dict[str, Any]] | None = None

    async def _run(self) -> None:
        if self._lookup is None:
            # Not sooner: any Twisted program may import this module, and twisted.names is large.
            from llmgw.discovery.dns_lookup import lookup_at

            self._lookup = lookup_at(self._options.servers, self._options.timeout_s, self._reactor)
        while self._update is not None:
            try:
                wait_s = await self._round()
            except CancelledError:
                if self._update is None:
                    raise
                self.failed("a question was cancelled, and not by us")
                wait_s = self._options.least_s
            except Exception:
                self.log.failure("{source}: a fault of our own", source=self._called)
                wait_s = self._options.most_s
            if self._update is not None:
                await deferLater(self._reactor, wait_s)

    async def _round(self) -> float:
        """Ask everything once, and tell what is new. :return: seconds to the next round."""
        options = self._options
        faults: list[str] = []
        if options.record == "srv":
            services = (await self._ask([(options.query, "SRV")], faults))[0]
            entries = await self._servers(services, faults)
        else:
            found = await self._ask([(options.query, "A"), (options.query, "AAAA")], faults)
            addresses = [record.data for records in found for record in records or ()]
            entries = (
                None
                if None in found and not addresses
                else [self._entry(address, options.port or 0) for address in sorted(set(addresses))]
            )
        if faults:
            self.failed(faults[0])
        else:
            self.heard()
        if entries is not None and entries != self._told:
            self._told = entries
            self.tell(entries)
        if faults:
            return options.least_s
        ttls = [record.ttl_s for answer in self._answers.values() for record in answer.records]
        return min(options.most_s, max(options.least_s, min(ttls, default=options.least_s)))

    async def _ask(
        self, questions: Sequence[tuple[str, str]], faults: list[str]
    ) -> list[Sequence[Record] | None]:
        """Answers, or the last good ones, or ``None`` where there never was one."""
        assert self._lookup is not None
        asked = [self._lookup(name, kind) for name, kind in questions]
        try:
            results: Any = await DeferredList(asked, consumeErrors=True)
        except CancelledError:
            for each in asked:
                each.cancel()
            raise
        now_s = self._reactor.seconds()
        found: list[Sequence[Record] | None] = []
        for question, (good, outcome) in zip(questions, results, strict=True):
            if good:
                self._answers[question] = _Answer(outcome, now_s)
            else:
                faults.append(
                    f"{question[1]} of {question[0]}: {outcome.getErrorMessage() or outcome.type.__name__}"
                )
            answer = self._answers.get(question)
            if answer is not None and now_s - answer.at_s > self._options.keep_s:
                answer = _Answer((), now_s)
            found.append(None if answer is None else answer.records)
        return found

    async def _servers(
        self, services: Sequence[Record] | None, faults: list[str]
    ) -> list[dict[str, Any]] | None:
        """Those of the lowest priority number that has any (RFC 2782); ``None``: nobody knows."""
        if services is None:
            return None
        # A target that is the root says that there is no such service.
        services = sorted(
            (each for each in services if each.data), key=lambda each: (each.priority, each.data, each.port)
        )
        used = {(each.data, kind) for each in services for kind in ("A", "AAAA")} | {
            (self._options.query, "SRV")
        }
        self._answers = {question: answer for question, answer in self._answers.items() if question in used}
        if self._options.scheme == "https":
            # A certificate is for the name.
            first = [each for each in services if each.priority == services[0].priority]
            return [self._entry(each.data, each.port, each.weight) for each in first]
        unknown = False
        for priority in sorted({each.priority for each in services}):
            entries = []
            for service in (each for each in services if each.priority == priority):
                found = await self._ask([(service.data, "A"), (service.data, "AAAA")], faults)
                addresses = sorted({record.data for records in found for record in records or ()})
                unknown = unknown or (None in found and not addresses)
                entries += [self._entry(address, service.port, service.weight) for address in addresses]
            if entries:
                return list({entry["id"]: entry for entry in entries}.values())
        return None if unknown else []

    def _entry(self, host: str, port: int, weight: int = 0) -> dict[str, Any]:
        place = f"[{host}]" if ":" in host else host
        entry: dict[str, Any] = {
            "id": f"{host}:{port}"[-128:],
            "url": f"{self._options.scheme}://{place}:{port}{self._options.path}",
        }
        if weight:
            entry["weight"] = float(weight)
        return entry


@implementer(IDiscoveryFactory)
class DnsDiscoveryFactory:
    """Options: see :class:`DnsOptions`."""

    name = "dns"
    description = "the addresses behind a name (A, AAAA), or the servers of an SRV record"
    contract = CONTRACT

    def build(self, options: Mapping[str, Any], reactor: IReactorTime) -> DnsDiscovery:
        """:raise ConfigError: options are wrong."""
        return DnsDiscovery(read_options(DnsOptions, options, _check), reactor)
