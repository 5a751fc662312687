"""Connections of the admin listener: ``twisted.web``'s, with deadlines, caps and rules that it lacks.

A deadline of Twisted's begins anew with each byte; here a request has to be whole
in its time. What is refused is answered once, and nothing after it is parsed, where
Twisted takes a request on whose header line it has just answered with 400.

:source: ``twisted.web.http.HTTPChannel`` of Twisted 26, whose ``_version`` is read,
    and whose ``_respondToBadRequestAndDisconnect`` is overridden, here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.protocol import connectionDone
from twisted.web.http import HTTPChannel

from llmgw.core.http import LENGTH
from llmgw.core.target import is_authority

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twisted.internet.interfaces import IDelayedCall
    from twisted.python.failure import Failure
    from twisted.web.server import Request

BODY_BYTES = 64 << 20
"""The longest body taken: what ``/api/explain`` may be asked about."""
HEAD_S = 10.0
IDLE_S = 60
LEAST_BODY_S = 30.0
BODY_BYTES_PER_S = 16 << 10
CLOSE_S = 5
"""For the peer to take leave."""
MAX_CONNECTIONS = 128
"""Twice the listeners to events that there may be: they leave room for the rest."""


class AdminChannel(HTTPChannel):
    """One connection.

    :ivar busy: a request is being answered.
    """

    abortTimeout = CLOSE_S

    def __init__(self) -> None:
        super().__init__()
        self.busy = False
        self._refused = False
        self._late: IDelayedCall | None = None

    # --- Twisted calls ---

    def connectionMade(self) -> None:
        super().connectionMade()
        self.factory.connections.opened(self)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.factory.connections.closed(self)
        self._arrived()
        super().connectionLost(reason)

    def dataReceived(self, data: bytes) -> None:
        if self._refused:
            return
        if self._late is None and not self.busy:
            self._late = self.callLater(HEAD_S, self._too_late)
        super().dataReceived(data)

    def lineReceived(self, line: bytes) -> None:
        if not self._refused:
            super().lineReceived(line)

    def lineLengthExceeded(self, line: bytes) -> None:
        self.refuse(b"431 Request Header Fields Too Large", b"a line of the head is too long")

    def headerReceived(self, line: bytes) -> bool:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and not LENGTH.fullmatch(value.strip()):
            # Python itself refuses to read thousands of digits, which Twisted does not foresee.
            self._respondToBadRequestAndDisconnect()
            return False
        return bool(super().headerReceived(line))

    def rawDataReceived(self, data: bytes) -> None:
        if not self._refused:
            super().rawDataReceived(data)

    def allHeadersReceived(self) -> None:
        fault = _fault_of(self.requests[-1], self._version)
        if fault:
            self.refuse(b"400 Bad Request", fault)
            return
        if self.length is None or self.length > 0:
            allowed_s = max(LEAST_BODY_S, (self.length or 0) / BODY_BYTES_PER_S)
            self._arrived()
            self._late = self.callLater(allowed_s, self._too_late)
        super().allHeadersReceived()

    def allContentReceived(self) -> None:
        self._arrived()
        if not self._refused:
            self.busy = True
            super().allContentReceived()

    def requestDone(self, request: Request) -> None:
        self.busy = False
        self.factory.connections.served(self)
        super().requestDone(request)

    def timeoutConnection(self) -> None:
        """It was idle for too long, or will not be closed; no line of the log is worth that."""
        if self._refused:
            self.cut()
            return
        self._abortingCall = self.callLater(self.abortTimeout, self.forceAbortClient)
        self.loseConnection()

    def forceAbortClient(self) -> None:
        self._abortingCall = None
        self.cut()

    def _respondToBadRequestAndDisconnect(self) -> None:
        self.refuse(b"400 Bad Request", b"the request is malformed")

    # --- ours ---

    def refuse(self, status: bytes, why: bytes) -> None:
        """Answer so, and take nothing more."""
        self._refused = True
        self._arrived()
        self.write(
            b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(why), why)
        )
        self.setTimeout(CLOSE_S)
        self.loseConnection()

    def cut(self) -> None:
        """End at once."""
        transport: Any = self.transport
        transport.abortConnection()

    def _too_late(self) -> None:
        self._late = None
        self.refuse(b"408 Request Timeout", b"the request did not come in time")

    def _arrived(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            late.cancel()


def _fault_of(request: Request, version: bytes) -> bytes:
    """What is wrong with a head; empty: nothing.

    :source: RFC 9112 section 3.2.
    """
    hosts: Sequence[bytes] = request.requestHeaders.getRawHeaders(b"host", ())
    if not hosts:
        return b"the Host header is missing" if version == b"HTTP/1.1" else b""
    if len(hosts) > 1:
        return b"there is more than one Host header"
    return b"" if is_authority(hosts[0]) else b"the Host header names no host"


class Connections:
    """Those that are open. One too many ends the one that has waited longest without a request at
    work, so that whoever says nothing keeps nobody out.

    :param most: so many may be open.
    """

    def __init__(self, most: int = MAX_CONNECTIONS) -> None:
        self.most = most
        self._open: dict[AdminChannel, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, channel: AdminChannel) -> None:
        """A connection begins."""
        self._open[channel] = None
        if len(self._open) > self.most:
            oldest = next((each for each in self._open if not each.busy), channel)
            # Its transport tells us of its end a turn later, when more may have come.
            self.closed(oldest)
            oldest.cut()

    def served(self, channel: AdminChannel) -> None:
        """Its request is answered: it waits from now on."""
        if channel in self._open:
            del self._open[channel]
            self._open[channel] = None

    def closed(self, channel: AdminChannel) -> None:
        """A connection has ended."""
        self._open.pop(channel, None)
