"""The client's side of the wire: connections, keep-alive, deadlines, closing.

A :class:`ClientConnection` feeds bytes to ``core``'s request reader, hands each
request to the site's ``serve`` as an :class:`~llmgw.wire.incoming.Incoming`,
and takes the next one when it has been answered. Rules that hold here:

1. After an unclear byte nothing more is parsed: the connection is ``_dead`` and
   what still arrives is thrown away. (Over TLS Twisted goes on delivering data
   after ``loseConnection``; a reader that went on would dispatch it.)
2. Every close is a goodbye plus a timer to ``abortConnection``: a peer that
   never answers TLS's close_notify holds nothing. The timer begins when the last
   byte has left; so does the time for which a connection may be idle.
3. Deadlines of head and body are absolute, so a byte now and then does not
   extend them.
4. Half-close counts as leaving: a client that shuts its sending side down gets
   no answer (RFC 9112 section 9.6 leaves that to the server).
5. While more than ``pipelined`` bytes of a next request wait, reading is
   paused, and a client that leaves then is noticed only by the next write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from twisted.internet.interfaces import IHandshakeListener
from twisted.internet.protocol import Protocol
from twisted.protocols.tls import TLSMemoryBIOProtocol
from zope.interface import implementer

from llmgw.core.http import HttpFault
from llmgw.core.request_reader import RequestReader
from llmgw.errors import GatewayError, RequestTimeout
from llmgw.wire.incoming import Incoming, Source, header_lines, status_line
from llmgw.wire.senders import sender
from llmgw.wire.sweep import NEVER
from llmgw.wire.twisted_internals import unacked_bytes

if TYPE_CHECKING:
    from twisted.internet.interfaces import ITCPTransport
    from twisted.python.failure import Failure

    from llmgw.core.http import RequestHead
    from llmgw.wire.site import Site

RATE_GRACE_S = 5.0
"""A body may be slower than the lowest rate for this long."""
JUST_CAME_S = 2.0
"""A connection without a request is not closed as idle before."""

ANSWERED_S = 1.0
"""Nor one that has been idle for less: its client may be sending the next one now."""

LINGER_S = 2.0
"""How long we read and discard after a refusal, so that a reset does not
overtake the answer (RFC 9112 section 9.6)."""
SKIP_BYTES = 65536
"""A refused body that is no longer than this is read to its end instead of closing."""


@implementer(IHandshakeListener)
class ClientConnection(Protocol):
    """One client's connection. One request is at work at a time; pipelined ones wait.

    :ivar peer: the client's address without port.
    :ivar group: whose connection count it is in; the site's.
    :ivar certificate: the subject of the client's certificate, where one was asked for.
    """

    _left_bytes = 0
    _taken_s = 0.0

    def __init__(self, site: Site, peer: str) -> None:
        self.site = site
        self.peer = peer
        self.group = ""
        self.certificate: str | None = None
        self.deadline_s = NEVER
        self.current: Incoming | None = None
        self._fresh: Incoming | None = None
        self._reader = RequestReader(self, site.head_limits, site.request_heads)
        self._source: Source | None = None
        self._served = 0
        self._opened_s = self._idle_since_s = site.clock()
        self._dead = False
        self._reading_paused = False
        self._starting = False
        self._body_since_s = 0.0
        self._stalled = False

    # --- called by Twisted ---

    def connectionMade(self) -> None:
        transport = cast("ITCPTransport", self.transport)
        self.write = sender(transport, self.site.outbox)
        try:
            transport.setTcpNoDelay(True)
        except (AttributeError, OSError):
            pass  # not TCP
        self._opened_s = self._idle_since_s = self.site.clock()
        timeouts = self.site.timeouts
        is_tls = isinstance(transport, TLSMemoryBIOProtocol)
        self.deadline_s = self._opened_s + (timeouts.tls_handshake_s if is_tls else timeouts.request_head_s)
        self.site.opened(self)

    def handshakeCompleted(self) -> None:
        """TLS stands: now the head has its time."""
        self.certificate = getattr(self.transport, "client_certificate", None)
        if self.current is None and not self._dead:
            self.deadline_s = self.site.clock() + self.site.timeouts.request_head_s

    def dataReceived(self, data: bytes) -> None:
        if self._dead:
            return
        reader = self._reader
        was_idle = reader.state == "idle"
        try:
            reader.feed(data)
        except HttpFault as fault:
            self._refuse(fault)
            return
        if self._fresh is not None or (self.current is None and reader.state == "done"):
            self._serve_requests()
        elif self.current is None:
            if was_idle and reader.state == "head":
                self.deadline_s = self.site.clock() + self.site.timeouts.request_head_s
        elif reader.buffered > self.site.limits.pipelined and not self._reading_paused:
            self._reading_paused = True
            self._transport().pauseProducing()

    def connectionLost(self, reason: Failure | None = None) -> None:
        self._dead = True
        self._reader.close()
        self.deadline_s = NEVER
        self.site.closed(self)
        incoming, self.current = self.current, None
        self._fresh = None
        self._source = None
        if incoming is not None:
            self._client_left(incoming)

    def pauseProducing(self) -> None:
        """The client takes no more: stop the backend, and start the stall timer."""
        if self._source is not None:
            self._stalled = True
            self.deadline_s = self.site.clock() + self.site.timeouts.write_stall_s
            self._source.pause()

    def resumeProducing(self) -> None:
        if self._stalled:
            self._stalled = False
            self.deadline_s = NEVER
        if self._source is not None:
            self._source.resume()

    def stopProducing(self) -> None:
        """The transport is gone; ``connectionLost`` follows."""

    # --- called by the request reader ---

    def head_received(self, head: RequestHead) -> None:
        if not self._served:
            self.site.proven(self)
        self._fresh = self.current = Incoming(self, head, self.site.clock())
        self.deadline_s = NEVER

    def body_received(self, data: bytes) -> None:
        if self.current is not None:
            self.current.body_received(data)

    def request_received(self) -> None:
        if self.current is not None:
            self.deadline_s = NEVER
            self.current.body_received_all()
        else:
            self.deadline_s = self.site.clock() + self.site.keepalive_s

    # --- called by Incoming ---

    def reading_body(self) -> None:
        """The exchange waits for the body: its clock runs from now."""
        self._body_since_s = self.site.clock()
        self.deadline_s = self._body_since_s + min(RATE_GRACE_S, self.site.timeouts.body_s)

    def can_skip_body(self, incoming: Incoming) -> bool:
        """The rest of a body that nobody wants is short enough to read to its end."""
        length = incoming.head.content_length
        return length is not None and length <= SKIP_BYTES and not incoming.head.expect_continue

    def must_close(self) -> bool:
        """This answer is the connection's last."""
        timeouts = self.site.timeouts
        return (
            self._dead
            or self.site.draining
            or self._served + 1 >= timeouts.keepalive_requests
            or self.site.clock() - self._opened_s > timeouts.keepalive_age_s
        )

    def stream_from(self, source: Source) -> None:
        """Let the transport's buffer pause and resume ``source``."""
        self._source = source
        self._transport().registerProducer(self, True)

    def answered(self, incoming: Incoming) -> None:
        """The current answer is complete: take the next request, or close."""
        self._end_stream()
        self._served += 1
        self.current = None
        incoming.forget_body()
        if incoming.close_after or self._dead:
            self._goodbye(unread=not incoming.complete)
            return
        now_s = self.site.clock()
        self._idle_since_s = now_s
        self.deadline_s = now_s + self.site.keepalive_s
        if not incoming.complete:
            # The rest of a refused body is read and dropped before the next head.
            self.deadline_s = now_s + LINGER_S
        if self._reading_paused:
            self._reading_paused = False
            self._transport().resumeProducing()
        self._serve_requests()

    def cut(self, *, orderly: bool = False) -> None:
        """End in the middle of an answer.

        :param orderly: what was written may still leave; else a reset, at once.
        """
        self._end_stream()
        incoming, self.current = self.current, None
        if incoming is not None:
            incoming.forget_body()
        self._dead = True
        if orderly:
            self._goodbye(unread=False)
        else:
            self.write.flush()
            self._transport().abortConnection()

    # --- called by the sweep and the site ---

    def expired(self, now_s: float) -> None:
        """A deadline has passed; which one follows from the state."""
        incoming = self.current
        if incoming is None and self._is_taking(now_s):
            return
        if self._dead or self._stalled:
            self.deadline_s = NEVER
            self._transport().abortConnection()
        elif incoming is not None and not incoming.complete:
            self._body_is_slow(incoming, now_s)
        elif incoming is not None:
            self.deadline_s = NEVER
        elif self._reader.state == "head":
            self._refuse(HttpFault(408, "request_timeout", "the request head did not arrive in time"))
        elif self._reader.state == "body":
            self._goodbye(unread=True)
        elif self._served == 0 and not self.site.is_plain(self._transport()):
            # Perhaps a handshake that never ended: there is nobody to say goodbye to.
            if not getattr(self.transport, "handshaken", True):
                self.site.count_refusal("tls_handshake_timeout")
            self.deadline_s = NEVER
            self._transport().abortConnection()
        else:
            self._goodbye(unread=False)

    @property
    def stalled(self) -> bool:
        """The client takes nothing of its answer."""
        return self._stalled and not self._dead

    @property
    def awaited(self) -> bool:
        """A request is on its way: some of it is here; or the client has only just come,
        and not to hear that it came in vain; or it had its answer a moment ago, in which
        it was not told that it was the last."""
        if self._dead or self.current is not None:
            return False
        if self._state() == "head":
            return True
        patience_s = ANSWERED_S if self._served else JUST_CAME_S
        return self.site.patient and self.site.clock() - self._idle_since_s < patience_s

    @property
    def leaving(self) -> bool:
        """Closed, but for what its client has not taken yet."""
        return self._dead and unacked_bytes(self._transport()) > 0

    def close_if_idle(self) -> bool:
        """Close when no request is at work or on its way. :return: whether it did."""
        if self.current is not None or self.awaited:
            return False
        if not self._dead:
            self._goodbye(unread=False)
        return True

    # --- our own ---

    def _is_taking(self, now_s: float) -> bool:
        """The client takes an answer that is complete but long: then there is another look, while
        it takes some of it in ``write_stall_s``; and an idle time that begins with its end."""
        timeouts = self.site.timeouts
        left_bytes, before_bytes = unacked_bytes(self._transport()), self._left_bytes
        if left_bytes != before_bytes:
            self._left_bytes, self._taken_s = left_bytes, now_s
        if left_bytes:
            self.deadline_s = now_s + timeouts.close_grace_s
            return now_s - self._taken_s < timeouts.write_stall_s
        if not before_bytes or self._dead or self._state() != "idle":
            return False
        self._idle_since_s = now_s
        self.deadline_s = now_s + self.site.keepalive_s
        return True

    def _state(self) -> str:
        return self._reader.state

    def _transport(self) -> Any:
        return self.transport

    def _serve_requests(self) -> None:
        """Start the request that has arrived, and those behind it, without recursion."""
        if self._starting:
            return
        self._starting = True
        try:
            while not self._dead:
                incoming, self._fresh = self._fresh, None
                if incoming is None:
                    if self.current is not None or self._reader.state != "done":
                        return
                    self._reader.resume()
                    if self._fresh is None:
                        if self._state() == "head":
                            self.deadline_s = self.site.clock() + self.site.timeouts.request_head_s
                        return
                    continue
                self.site.serve(incoming)
        except HttpFault as fault:
            self._refuse(fault)
        finally:
            self._starting = False

    def _refuse(self, fault: HttpFault) -> None:
        """Bytes that are no request: answer, close, parse nothing more."""
        self._dead = True
        self._fresh = None
        incoming = self.current
        if incoming is not None:
            if not incoming.complete:
                error = GatewayError(fault.message, code=fault.code, status=fault.status)
                error.type = "invalid_request_error"
                incoming.close_after = True
                if not incoming.started:
                    incoming.body_failed(error)
                    if incoming.task is None:
                        self.site.serve(incoming)
                    return
            incoming.close_after = True
            return
        self.site.count_refusal(fault.code)
        headers, body = self.site.fault_answer(fault, self.peer)
        self.write(
            b"%b%bdate: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status_line(fault.status), header_lines(headers), self.site.http_date, len(body), body)
        )
        self._goodbye(unread=True)

    def _body_is_slow(self, incoming: Incoming, now_s: float) -> None:
        """408, or another look later: the lowest rate counts after five seconds, the whole at its end."""
        timeouts = self.site.timeouts
        elapsed_s = now_s - self._body_since_s
        size = max(incoming.body_size, incoming.head.content_length or 0)
        allowed_s = max(timeouts.body_s, size / timeouts.body_rate)
        if elapsed_s >= allowed_s or incoming.body_size < timeouts.body_rate * elapsed_s:
            self.deadline_s = NEVER
            self._dead = True
            incoming.close_after = True
            if not incoming.started:
                incoming.body_failed(RequestTimeout("the request body did not arrive in time"))
        else:
            self.deadline_s = now_s + 1.0

    def _end_stream(self) -> None:
        if self._source is None:
            return
        source, self._source = self._source, None
        self._transport().unregisterProducer()
        if self._stalled:
            self._stalled = False
            # A source that stays paused would hang the next request on its connection.
            source.resume()

    def _goodbye(self, *, unread: bool) -> None:
        """Close: what was written leaves first, then the grace timer aborts.

        :param unread: the client may still be sending; for TCP our side is shut
            down and the rest is read and thrown away for :data:`LINGER_S`.
        """
        self._dead = True
        self.write.flush()
        transport = self._transport()
        if self._reading_paused:
            self._reading_paused = False
            transport.resumeProducing()
        if unread and self.site.is_plain(transport):
            self.deadline_s = self.site.clock() + LINGER_S
            transport.loseWriteConnection()
            return
        self.deadline_s = self.site.clock() + self.site.timeouts.close_grace_s
        transport.loseConnection()

    def _client_left(self, incoming: Incoming) -> None:
        incoming.gone = True
        incoming.forget_body()
        task, incoming.task = incoming.task, None
        if task is not None:
            task.cancel()
