"""Questions to name servers, through ``twisted.names``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError
from twisted.names import client, dns, error

from llmgw.discovery.dns import RESOLV_CONF, Lookup, Record, split_server

_KINDS = {"A": dns.A, "AAAA": dns.AAAA, "SRV": dns.SRV}


def lookup_at(servers: Sequence[str], timeout_s: float, reactor: Any) -> Lookup:
    """Asks ``servers``, or those that the system has at the time, one after the other.

    Truncated answers are asked for over TCP. Cancelling leaves a call in the reactor
    until the question's time-out, which nobody hears: ``twisted.names`` keeps it.

    :raise OSError: (in the Deferred) no server is known.
    """

    def lookup(name: str, kind: str) -> Deferred[Sequence[Record]]:
        places = [split_server(each) for each in servers] or system_servers()
        resolver = client.Resolver(servers=places, timeout=(timeout_s,), reactor=reactor)
        query = dns.Query(name.rstrip("."), _KINDS[kind], dns.IN)
        asking: Deferred[Any] = resolver.queryUDP([query], (timeout_s,))
        asking.addCallback(resolver.filterAnswers)
        asking.addBoth(_closed, resolver)
        return asking.addCallbacks(lambda found: _records(found[0], kind), _none_or_failed)

    return lookup


def system_servers(read: Callable[[], str] | None = None) -> list[tuple[str, int]]:
    """The name servers of ``/etc/resolv.conf`` as it is now; this machine if it names none."""
    try:
        if read is None:
            with open(RESOLV_CONF, encoding="utf-8", errors="replace") as file:
                text = file.read()
        else:
            text = read()
    except OSError:
        text = ""
    words = [line.split() for line in text.splitlines()]
    return [(each[1], 53) for each in words if len(each) > 1 and each[0] == "nameserver"] or [
        ("127.0.0.1", 53)
    ]


def _closed(outcome: Any, resolver: Any) -> Any:
    """Of what had to go over TCP no connection stays."""
    for each in list(resolver.connections):
        each.transport.loseConnection()
    return outcome


def _records(answers: Sequence[Any], kind: str) -> list[Record]:
    found = []
    for header in answers:
        if header.type != _KINDS[kind]:
            continue  # a CNAME on the way
        payload = header.payload
        if kind == "SRV":
            target = payload.target.name.decode("ascii", "replace").rstrip(".").lower()
            found.append(Record(header.ttl, target, payload.port, payload.priority, payload.weight))
        else:
            found.append(Record(header.ttl, payload.dottedQuad() if kind == "A" else _ipv6(payload.address)))
    return found


def _ipv6(packed: bytes) -> str:
    from ipaddress import IPv6Address

    return str(IPv6Address(packed))


def _none_or_failed(failure: Any) -> list[Record]:
    if failure.check(error.DNSNameError):
        return []
    if failure.check(TimeoutError, dns.DNSQueryTimeoutError, error.DNSQueryTimeoutError):
        raise OSError("no answer in time") from None
    if failure.check(error.DomainError):
        raise OSError(f"the server says {failure.type.__name__}") from None
    failure.raiseException()
    raise AssertionError  # not reached
