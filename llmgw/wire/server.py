"""The client's side of the wire: connections, keep-alive, deadlines, closing.

A :class:`ClientConnection` feeds bytes to ``core``'s request reader, hands each
request to the site's ``serve`` as an :class:`~llmgw.wire.incoming.Incoming`,
and takes the next one when it has been answered. Rules that hold here:

1. After a malformed byte nothing more is parsed: the connection is ``_dead`` and whatever
   still arrives is discarded. (Over TLS Twisted goes on delivering data after
   ``loseConnection``; it must not be dispatched.)
2. Every orderly close is backed by a timer to ``abortConnection``, so a peer that never
   answers TLS's close_notify holds no resources. The timer starts when the last byte has
   been taken; so does the idle time of a connection.
3. Deadlines of head and body are absolute: a byte now and then does not extend them.
4. A half-close counts as leaving: a client that shuts down its sending side gets no answer
   (RFC 9112 section 9.6 leaves that to the server).
5. While more than ``pipelined`` bytes of further requests are buffered, reading is paused,
   and a client that leaves meanwhile is noticed only by the next write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.interfaces import IHandshakeListener
from twisted.internet.protocol import Protocol
from twisted.protocols.tls import TLSMemoryBIOProtocol
from zope.interface import implementer

from llmgw.core.body_pace import GRACE_S, is_too_slow
from llmgw.core.http import HttpFault
from llmgw.core.request_reader import RequestReader
from llmgw.errors import GatewayError, RequestTimeout
from llmgw.wire.incoming import Incoming, Source, last_answer
from llmgw.wire.senders import disable_nagle, sender
from llmgw.wire.sweep import NEVER
from llmgw.wire.twisted_internals import unacked_bytes

if TYPE_CHECKING:
    from twisted.python.failure import Failure

    from llmgw.core.http import RequestHead
    from llmgw.wire.site import Site

NEW_CONNECTION_S = 2.0
"""A connection without a request yet is not closed as idle before this time."""
NEXT_REQUEST_S = 1.0
"""Nor one that has been idle for less than this: its next request may be on the way."""
LINGER_S = 2.0
"""How long we read on after a refusal, lest a reset overtake the answer (RFC 9112 section 9.6)."""


@implementer(IHandshakeListener)
class ClientConnection(Protocol):
    """One client's connection. One request is served at a time; pipelined ones wait.

    :ivar peer: the client's address without port.
    :ivar group: the address or network under which the site counts it.
    :ivar certificate: the subject of the client's certificate, if one was requested.
    """

    transport: Any  # set by Twisted; which interfaces it has depends on the listener
    _left_bytes = 0
    _taken_s = 0.0

    def __init__(self, site: Site, peer: str) -> None:
        self.site = site
        self.peer = peer
        self.group = ""
        self.certificate: str | None = None
        self.deadline_s = NEVER
        self.current: Incoming | None = None
        self._unserved: Incoming | None = None
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
        transport = self.transport
        self.write = sender(transport, self.site.outbox)
        disable_nagle(transport)
        self._opened_s = self._idle_since_s = self.site.clock()
        timeouts = self.site.timeouts
        is_tls = isinstance(transport, TLSMemoryBIOProtocol)
        self.deadline_s = self._opened_s + (timeouts.tls_handshake_s if is_tls else timeouts.request_head_s)
        self.site.opened(self)

    def handshakeCompleted(self) -> None:
        """TLS is established: now the time for the head starts."""
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
        if self._unserved is not None or (self.current is None and reader.state == "done"):
            self._serve_requests()
        elif self.current is None:
            if was_idle:
                self._await_head()
        elif reader.buffered > self.site.limits.pipelined and not self._reading_paused:
            self._reading_paused = True
            self.transport.pauseProducing()

    def connectionLost(self, reason: Failure | None = None) -> None:
        self._dead = True
        self._reader.close()
        self.deadline_s = NEVER
        self.site.closed(self)
        incoming, self.current = self.current, None
        self._unserved = None
        self._source = None
        if incoming is not None:
            incoming.gone = True
            incoming.forget_body()
            task, incoming.task = incoming.task, None
            if task is not None:
                task.cancel()

    def pauseProducing(self) -> None:
        """The client is too slow: pause the backend, and start the stall timer."""
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
            self.site.first_request(self)
        self._unserved = self.current = Incoming(self, head, self.site.clock())
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
        """The exchange waits for the body: its time starts now."""
        self._body_since_s = self.site.clock()
        self.deadline_s = self._body_since_s + min(GRACE_S, self.site.timeouts.body_s)

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
        """Pause and resume ``source`` as the transport's buffer fills and drains."""
        self._source = source
        self.transport.registerProducer(self, True)

    def answered(self, incoming: Incoming) -> None:
        """The current answer is complete: take the next request, or close."""
        self._end_stream()
        self._served += 1
        self.current = None
        incoming.forget_body()
        if incoming.close_after or self._dead:
            self._close(unread=not incoming.complete)
            return
        now_s = self.site.clock()
        self._idle_since_s = now_s
        self.deadline_s = now_s + self.site.keepalive_s
        if not incoming.complete:
            # The rest of a refused body is read and discarded before the next head.
            self.deadline_s = now_s + LINGER_S
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resumeProducing()
        self._serve_requests()

    def cut(self, *, orderly: bool = False) -> None:
        """Close in the middle of an answer.

        :param orderly: let what was written reach the client; if not, reset at once.
        """
        self._end_stream()
        incoming, self.current = self.current, None
        if incoming is not None:
            incoming.forget_body()
        self._dead = True
        if orderly:
            self._close(unread=False)
        else:
            self.write.flush()
            self.transport.abortConnection()

    # --- called by the sweep and the site ---

    def expired(self, now_s: float) -> None:
        """See :class:`~llmgw.wire.sweep.Timed`. Which deadline it was follows from the state."""
        incoming = self.current
        if incoming is None and self._is_receiving(now_s):
            return
        if self._dead or self._stalled:
            self.deadline_s = NEVER
            self.transport.abortConnection()
        elif incoming is not None and not incoming.complete:
            self._check_body_pace(incoming, now_s)
        elif incoming is not None:
            self.deadline_s = NEVER
        elif self._reader.state == "head":
            self._refuse(HttpFault(408, "request_timeout", "the request head did not arrive in time"))
        elif self._reader.state == "body":
            self._close(unread=True)
        elif self._served == 0 and not self.site.is_plain(self.transport):
            # Perhaps a handshake that was never completed: no orderly close is possible.
            if not getattr(self.transport, "handshaken", True):
                self.site.count_refusal("tls_handshake_timeout")
            self.deadline_s = NEVER
            self.transport.abortConnection()
        else:
            self._close(unread=False)

    @property
    def stalled(self) -> bool:
        """The client does not read its answer."""
        return self._stalled and not self._dead

    @property
    def expects_request(self) -> bool:
        """A request is on its way, or may be: some of it is here; or the client has just
        connected; or it got an answer a moment ago that did not announce a close."""
        if self._dead or self.current is not None:
            return False
        if self._state() == "head":
            return True
        patience_s = NEXT_REQUEST_S if self._served else NEW_CONNECTION_S
        return self.site.patient and self.site.clock() - self._idle_since_s < patience_s

    @property
    def is_draining(self) -> bool:
        """It is being closed, and its client has not received everything yet."""
        return self._dead and unacked_bytes(self.transport) > 0

    def close_if_idle(self) -> bool:
        """Close unless a request is being served or on its way. :return: whether it was closed."""
        if self.current is not None or self.expects_request:
            return False
        if not self._dead:
            self._close(unread=False)
        return True

    # --- our own ---

    def _is_receiving(self, now_s: float) -> bool:
        """The client is still receiving a completed answer, some of it in each ``write_stall_s``;
        its idle time starts when it has all."""
        timeouts = self.site.timeouts
        left_bytes, before_bytes = unacked_bytes(self.transport), self._left_bytes
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

    def _serve_requests(self) -> None:
        """Start the request that has arrived and those pipelined behind it, without recursion."""
        if self._starting:
            return
        self._starting = True
        try:
            while not self._dead:
                incoming, self._unserved = self._unserved, None
                if incoming is not None:
                    self.site.serve(incoming)
                    continue
                if self.current is not None or self._reader.state != "done":
                    return
                self._reader.resume()
                if self._unserved is None:
                    self._await_head()
                    return
        except HttpFault as fault:
            self._refuse(fault)
        finally:
            self._starting = False

    def _await_head(self) -> None:
        """If part of the next head is here, the time for it starts."""
        if self._reader.state == "head":
            self.deadline_s = self.site.clock() + self.site.timeouts.request_head_s

    def _refuse(self, fault: HttpFault) -> None:
        """Malformed bytes: answer, close, and parse nothing more."""
        self._dead = True
        self._unserved = None
        if self.current is not None:
            self._refuse_body(self.current, fault)
            return
        self.site.count_refusal(fault.code)
        headers, body = self.site.fault_answer(fault, self.peer)
        self.write(last_answer(fault.status, headers, self.site.http_date, body))
        self._close(unread=True)

    def _refuse_body(self, incoming: Incoming, fault: HttpFault) -> None:
        """The fault is in the current request's body, or behind it: this answer is the last."""
        incoming.close_after = True
        if incoming.complete or incoming.started:
            return
        error = GatewayError(fault.message, code=fault.code, status=fault.status)
        error.type = "invalid_request_error"
        incoming.body_failed(error)
        if incoming.task is None:
            self.site.serve(incoming)

    def _check_body_pace(self, incoming: Incoming, now_s: float) -> None:
        """Answer 408 if it is too slow; else look again a second later."""
        timeouts, elapsed_s = self.site.timeouts, now_s - self._body_since_s
        declared = incoming.head.content_length
        if not is_too_slow(incoming.body_size, declared, elapsed_s, timeouts.body_s, timeouts.body_rate):
            self.deadline_s = now_s + 1.0
            return
        self.deadline_s = NEVER
        self._dead = True
        incoming.close_after = True
        if not incoming.started:
            incoming.body_failed(RequestTimeout("the request body did not arrive in time"))

    def _end_stream(self) -> None:
        source, self._source = self._source, None
        if source is None:
            return
        self.transport.unregisterProducer()
        if self._stalled:
            self._stalled = False
            # A source that stayed paused would block the next request on its connection.
            source.resume()

    def _close(self, *, unread: bool) -> None:
        """Close in order: what was written is sent first, and the grace timer aborts.

        :param unread: the client may still be sending; for TCP only our side is shut down,
            and the rest is read and discarded for :data:`LINGER_S`.
        """
        self._dead = True
        self.write.flush()
        transport = self.transport
        if self._reading_paused:
            self._reading_paused = False
            transport.resumeProducing()
        if unread and self.site.is_plain(transport):
            self.deadline_s = self.site.clock() + LINGER_S
            transport.loseWriteConnection()
            return
        self.deadline_s = self.site.clock() + self.site.timeouts.close_grace_s
        transport.loseConnection()
