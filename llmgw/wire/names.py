"""Host names of backends: resolved for every connection, with the last answer as a fallback.

Caching and times to live are left to the system's resolver. But while it does not answer,
or has no addresses, those it returned last are used, so that the gateway does not stop
because DNS does.

``localhost`` stands for both loopback addresses, whatever the hosts file says: a server may
listen on only one of them.

:source: RFC 8767 (serving stale data, which is up to the resolver there); RFC 6761
    section 6.3 (``localhost``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.interfaces import IHostnameResolver, IResolutionReceiver
from zope.interface import implementer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.internet.interfaces import IAddress, IDelayedCall, IHostResolution, IReactorTime

PATIENCE_S = 1.0
"""A look-up that takes longer is answered from memory, if the name is known."""
STALE_S = 3600.0
"""For this long an answer may be used from memory."""
MAX_NAMES = 1000

_LOOPBACK_NAMES = frozenset({"localhost", "localhost."})
_LOOPBACKS: tuple[tuple[Any, str], ...] = ((IPv4Address, "127.0.0.1"), (IPv6Address, "::1"))

_Key = tuple[str, int, tuple[type, ...] | None, str]


def remember_names(reactor: Any) -> None:
    """Let ``reactor`` remember the names it resolves. Idempotent."""
    resolver = getattr(reactor, "nameResolver", None)
    if resolver is not None and not isinstance(resolver, RememberedNames):
        reactor.installNameResolver(RememberedNames(resolver, reactor))


@implementer(IHostnameResolver)
class RememberedNames:
    """Resolves through ``inner``, and remembers the addresses.

    :param clock: its ``seconds`` are monotonic.
    """

    def __init__(self, inner: IHostnameResolver, clock: IReactorTime) -> None:
        self._inner = inner
        self._clock = clock
        self._known: dict[_Key, tuple[float, list[IAddress]]] = {}

    def resolveHostName(
        self,
        resolutionReceiver: IResolutionReceiver,
        hostName: str,
        portNumber: int = 0,
        addressTypes: Sequence[type[IAddress]] | None = None,
        transportSemantics: str = "TCP",
    ) -> IHostResolution:
        """See ``IHostnameResolver``. Addresses may be up to an hour old if there are no newer ones."""
        types = None if addressTypes is None else tuple(addressTypes)
        key = (hostName, portNumber, types, transportSemantics)
        patient = _Patient(resolutionReceiver, self._clock, lambda: self._recall(key), self._keeper(key))
        if hostName.lower() in _LOOPBACK_NAMES:
            patient.also = [
                address(transportSemantics, host, portNumber)
                for address, host in _LOOPBACKS
                if types is None or address in types
            ]
        return self._inner.resolveHostName(patient, hostName, portNumber, addressTypes, transportSemantics)

    def _recall(self, key: _Key) -> list[IAddress]:
        since_s, addresses = self._known.get(key, (0.0, []))
        return addresses if self._clock.seconds() - since_s <= STALE_S else []

    def _keeper(self, key: _Key) -> Callable[[list[IAddress]], None]:
        def keep(addresses: list[IAddress]) -> None:
            self._known.pop(key, None)
            if len(self._known) >= MAX_NAMES:
                del self._known[next(iter(self._known))]
            self._known[key] = (self._clock.seconds(), addresses)

        return keep


@implementer(IResolutionReceiver)
class _Patient:
    """Receives a look-up's addresses for ``receiver``, and answers from memory if it must.

    :ivar also: addresses added at the end for families of which none was found.
    """

    def __init__(
        self,
        receiver: Any,
        clock: IReactorTime,
        recall: Callable[[], list[IAddress]],
        keep: Callable[[list[IAddress]], None],
    ) -> None:
        self._receiver = receiver
        self._recall = recall
        self._keep = keep
        self._found: list[IAddress] = []
        self._answered = False
        self.also: list[IAddress] = []
        self._timer: IDelayedCall | None = clock.callLater(PATIENCE_S, self._is_late)

    def resolutionBegan(self, resolutionInProgress: IHostResolution) -> None:
        """The look-up has begun."""
        self._receiver.resolutionBegan(resolutionInProgress)

    def addressResolved(self, address: IAddress) -> None:
        """One address; forwarded at once, unless memory has answered."""
        self._found.append(address)
        if not self._answered:
            self._receiver.addressResolved(address)

    def resolutionComplete(self) -> None:
        """All addresses have come."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        families = {type(address) for address in self._found}
        for address in self.also:
            if type(address) not in families:
                self.addressResolved(address)
        if self._found:
            self._keep(self._found)
        if not self._answered:
            self._answered = True
            if not self._found:
                self._tell(self._recall())
            self._receiver.resolutionComplete()

    def _is_late(self) -> None:
        self._timer = None
        known = self._recall()
        if known and not self._found:
            self._answered = True
            self._tell(known)
            self._receiver.resolutionComplete()

    def _tell(self, addresses: list[IAddress]) -> None:
        for address in addresses:
            self._receiver.addressResolved(address)
