"""One connection to a backend: a request out, a response in, never two at a time.

The caller gets the response head from :meth:`UpstreamConnection.request` and then names a
:class:`~llmgw.wire.sink.Sink` with :meth:`~UpstreamConnection.deliver`. From then on each
read of the socket becomes one call of the sink, with the body's bytes without their framing
and the time of arrival. Cancelling the Future, or :meth:`~UpstreamConnection.abort`, closes
the connection at once: that is how a llama-server learns that nobody waits any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHandshakeListener
from twisted.internet.protocol import Protocol as TwistedProtocol
from twisted.logger import Logger
from zope.interface import implementer

from llmgw.core.http import HttpFault, keep_alive_timeout
from llmgw.core.response_reader import ResponseReader
from llmgw.wire.coroutines import Future
from llmgw.wire.fast_path import FastPath
from llmgw.wire.long_body import LongBody
from llmgw.wire.senders import disable_nagle, sender
from llmgw.wire.sink import UpstreamFault
from llmgw.wire.sweep import NEVER
from llmgw.wire.twisted_internals import read_directly, stop_reading_directly, take_over

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.python.failure import Failure

    from llmgw.core.http import ResponseHead
    from llmgw.wire.pool import Pool
    from llmgw.wire.relay import Relay
    from llmgw.wire.sink import Sink


# In a __dict__, more than thirty attributes would take 1.2 KiB more per connection.
_ATTRIBUTES = """
    _answered _busy _closing _complete _direct _fast_path _fault _first_token_s _idle_s _parts _paused
    _pool _reader _reading _rest _send _sink _total_s _waiter
    advertised_s clock deadline_s heard_s lost made_s ready until_s used
"""


@implementer(IHandshakeListener)
class UpstreamConnection(TwistedProtocol):
    """A connection that belongs to one :class:`~llmgw.wire.pool.Pool`.

    :ivar until_s: monotonic time at which the current response must be over.
    :ivar heard_s: when some of the body last arrived; silence is counted from here.
    :ivar made_s: monotonic time at which it was made.
    :ivar used: number of requests sent over it.
    :ivar advertised_s: seconds for which the backend keeps idle connections (``Keep-Alive: timeout``).
    :ivar ready: fires when the TLS handshake is done; ``None`` without TLS, and afterwards.
    """

    log = Logger()
    transport: Any  # set by Twisted; which interfaces it has depends on the URL

    __slots__ = tuple(_ATTRIBUTES.split())

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.clock = pool.clock
        self._reader = ResponseReader(self, pool.head_limits, pool.response_heads)
        self._waiter: Future[ResponseHead] | None = None
        self._sink: Sink | None = None
        self._parts: list[bytes] = []
        self._busy = False
        self._complete = False
        self._fault: UpstreamFault | None = None
        self._answered = False
        self._paused = False
        self._reading = False
        self._idle_s = NEVER
        self._first_token_s = NEVER
        self._total_s = NEVER
        self._rest: LongBody | None = None
        self._fast_path: Callable[[bytes], bool] | None = None
        self._direct = False
        self._closing = False
        self.deadline_s = NEVER
        self.until_s = NEVER
        self.heard_s = 0.0
        self.lost = False
        self.made_s = pool.clock()
        self.used = 0
        self.advertised_s: float | None = None
        self.ready: Deferred[UpstreamConnection] | None = None

    # --- called by Twisted ---

    def connectionMade(self) -> None:
        self._send = sender(self.transport, self._pool.outbox)
        take_over(self.transport, self)
        disable_nagle(self.transport)
        self._pool.sweep.add(self)

    def handshakeCompleted(self) -> None:
        if self.ready is not None:
            ready, self.ready = self.ready, None
            self.deadline_s = NEVER
            ready.callback(self)

    def dataReceived(self, data: bytes) -> None:
        if self._fast_path is not None and self._fast_path(data):
            return
        if not self._busy:
            # Bytes without a request: such a connection is never used again.
            self.abort()
            return
        now_s = self.clock()
        self._answered = self._reading = True
        try:
            self._reader.feed(data)
        except HttpFault as fault:
            self._reading = False
            self._hand_over(now_s)
            self._fail(UpstreamFault("framing", fault.message))
            return
        self._reading = False
        if self._parts:
            # Reads on the fast path do not move the deadline: ``expired`` computes it again.
            self.heard_s = now_s
            self.deadline_s = min(now_s + self._idle_s, self.until_s)
            self._hand_over(now_s)
        elif self._sink is not None and not self._complete:
            self._sink.flush()
        if self._complete and self._sink is not None:
            self._finish()

    def connectionLost(self, reason: Failure | None = None) -> None:
        self.lost = True
        self.deadline_s = NEVER
        self._pool.forget(self)
        self._tell_lost(reason)
        self._reader.close()

    def _tell_lost(self, reason: Failure | None) -> None:
        detail = reason.getErrorMessage() if reason is not None else ""
        if self.ready is not None:
            ready, self.ready = self.ready, None
            ready.errback(self._fault or UpstreamFault("tls", detail))
        elif self._waiter is not None:
            # A close may end a response without framing, but not before its head.
            stale = self.used > 1 and not self._answered
            self._fail(self._fault or UpstreamFault("reset", detail, stale=stale))
        elif self._busy and not self._complete:
            if reason is not None and not reason.check(ConnectionDone):
                # Where only a close ends the body, a reset must not pass for it (RFC 9112 section 8).
                self._fail(self._fault or UpstreamFault("cut", detail))
                return
            try:
                self._reader.eof()
            except HttpFault as fault:
                self._fail(self._fault or UpstreamFault("cut", fault.message))
            else:
                if self._sink is not None:
                    self._finish()

    # --- called by the response reader ---

    def head_received(self, head: ResponseHead) -> None:
        waiter, self._waiter = self._waiter, None
        now_s = self.clock()
        if self.used == 1:
            self.advertised_s = keep_alive_timeout(head.get(b"keep-alive"))
        self.until_s = min(self.until_s, now_s + self._first_token_s)
        self.deadline_s = self.until_s
        if waiter is not None:
            waiter.fire(head)

    def body_received(self, data: bytes) -> None:
        self._parts.append(data)

    def response_received(self) -> None:
        self._complete = True

    # --- for the caller ---

    def request(
        self,
        method: str,
        payload: bytes,
        *,
        head_s: float,
        first_token_s: float,
        idle_s: float,
        until_s: float,
        rest: bytes = b"",
    ) -> Future[ResponseHead]:
        """Send a request. Cancelling the Future closes the connection.

        :param payload: head and body, in one piece.
        :param rest: a long body, sent apart from its head at the backend's pace.
        :param head_s: longest time until the response head.
        :param first_token_s: longest time from the head to the first token, which the caller
            reports by :meth:`first_token`.
        :param idle_s: longest silence within the body.
        :param until_s: monotonic time at which everything must be over.
        :raise UpstreamFault: (the Future fails with it.)
        """
        self._busy = True
        self._complete = False
        self._answered = False
        self.used += 1
        self._first_token_s = first_token_s
        self._idle_s = idle_s
        self.until_s = self._total_s = until_s
        self.deadline_s = min(self.clock() + head_s, until_s)
        self._reader.begin(method)
        self._waiter = Future(self.abort)
        waiter = self._waiter
        self._send(payload)
        self._rest = None
        if rest:
            self._send.flush()
            self._rest = LongBody(self.transport, rest)
            self._rest.start()
        return waiter

    def deliver(self, sink: Sink) -> None:
        """Hand the body to ``sink``, beginning with what has arrived already."""
        self._sink = sink
        if self._reading:
            return  # called while a read is being parsed, which hands over the rest
        if self._paused:
            self.resume()
        if self._parts:
            self._hand_over(self.clock())
        else:
            sink.flush()
        if self._sink is None:
            return  # the sink has aborted
        if self._fault is not None:
            self._fail(self._fault)
        elif self._complete:
            self._finish()

    def open_fast_path(self, relay: Relay) -> None:
        """Let typical reads take the fast path from now on, if the content is chunked."""
        alone_at = self._reader.alone_at
        if alone_at is not None:
            take = FastPath(relay, self, alone_at).take
            # Under TLS the data has to be decrypted first, and comes to dataReceived.
            self._direct = read_directly(self.transport, take)
            self._fast_path = None if self._direct else take

    def pause(self) -> None:
        """Stop reading. The idle deadline is suspended, since the silence is ours."""
        if not self._paused and not self.lost:
            self._paused = True
            self.deadline_s = self.until_s
            self.transport.pauseProducing()

    def resume(self) -> None:
        """Go on reading."""
        if self._paused:
            self._paused = False
            if not self.lost:
                if self._busy:
                    self.deadline_s = min(self.clock() + self._idle_s, self.until_s)
                self.transport.resumeProducing()

    def abort(self) -> None:
        """Close at once; the sink is not called any more."""
        self._close_fast_path()
        self._sink = None
        self._busy = False
        self._waiter = None
        self._parts = []
        self.deadline_s = NEVER
        if not self.lost:
            self._pool.forget(self)
            self.transport.abortConnection()

    def expired(self, now_s: float) -> None:
        """See :class:`~llmgw.wire.sweep.Timed`. Which deadline it was follows from the state."""
        self.deadline_s = NEVER
        if self.ready is not None:
            self._fault = UpstreamFault("timeout_connect", "the TLS handshake took too long")
            self.transport.abortConnection()
        elif not self._busy:
            self._pool.forget(self)
            if self._closing:
                self.transport.abortConnection()
            else:
                self._close()
        elif now_s >= self._total_s:
            self._fail(UpstreamFault("timeout_total"))
        elif self._waiter is not None:
            self._fail(UpstreamFault("timeout_head"))
        elif now_s < self.until_s:
            deadline_s = self.heard_s + self._idle_s
            if deadline_s > now_s:
                self.deadline_s = min(deadline_s, self.until_s)
            else:
                self._fail(UpstreamFault("timeout_idle"))
        else:
            self._fail(UpstreamFault("timeout_first_token"))

    def first_token(self, until_s: float) -> None:
        """The first token has come: from now on only the idle time and ``until_s`` count."""
        self.until_s = until_s

    def end_by(self, until_s: float) -> None:
        """The last event has come: the end of the body must follow by then."""
        self.until_s = self.deadline_s = until_s

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent over it."""
        return not self.lost and self._reader.reusable and self._is_sent

    # --- our own ---

    @property
    def _is_sent(self) -> bool:
        """The whole request has been passed to the kernel."""
        return self._send.is_flushed and (self._rest is None or self._rest.done)

    def _close_fast_path(self) -> None:
        self._fast_path = None
        if self._direct:
            self._direct = False
            stop_reading_directly(self.transport)

    def _close(self) -> None:
        """Close in order, and abort if the peer has not followed within the grace time."""
        self._closing = True
        self.deadline_s = self.clock() + self._pool.close_grace_s
        self.transport.loseConnection()

    def _hand_over(self, now_s: float) -> None:
        """Hand the body bytes of this read to the sink, in one piece."""
        sink = self._sink
        parts = self._parts
        if not parts:
            return
        if sink is None:
            # Whoever waits for the head has not called ``deliver`` yet.
            if not self._paused:
                self.pause()
            return
        self._parts = []
        try:
            sink.received(parts[0] if len(parts) == 1 else b"".join(parts), now_s, self._complete)
        except Exception:
            self.failed_ourselves()

    def failed_ourselves(self) -> None:
        """After a bug of ours: the client must not wait for ever."""
        self.log.failure("reading a response failed")
        self._fail(UpstreamFault("local", "the gateway failed"))

    def _finish(self) -> None:
        """The response is complete: return the connection to the pool, then tell the sink."""
        sink, self._sink = self._sink, None
        self._close_fast_path()
        self._busy = False
        self.deadline_s = NEVER
        if self._paused:
            self.resume()
        if self.reusable:
            self._pool.give(self)
        else:
            self._pool.forget(self)
            if not self.lost:
                if self._is_sent:
                    self._close()
                else:
                    # The backend has answered without reading the whole request.
                    self.transport.abortConnection()
        if sink is not None:
            sink.ended()

    def _fail(self, fault: UpstreamFault) -> None:
        """Close, and tell whoever is waiting."""
        waiter, sink = self._waiter, self._sink
        self._waiter = self._sink = None
        self._close_fast_path()
        self.deadline_s = NEVER
        if waiter is None and sink is None:
            self._fault = fault  # for ``deliver``, which gets what has arrived first
        else:
            self._parts = []
            self._busy = False
        self._pool.forget(self)
        if not self.lost:
            self.transport.abortConnection()
        if waiter is not None:
            waiter.fail(fault)
        elif sink is not None:
            sink.failed(fault)
