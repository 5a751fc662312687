"""One connection to one Redis server, on txredisapi's protocol.

What txredisapi leaves to its user, and this does: connecting and the first words
are bounded in time; a server that can't be used (a cluster, a replica, one that
still loads) is told apart before anybody sends anything to it.

txredisapi imports the reactor, so it is imported when the first connection is made.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.protocol import Factory

from llmgw.store.errors import StoreDown, StoreError, StoreLost, StoreRefused
from llmgw.wire.pool import endpoint_for, tls_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.internet.interfaces import IStreamClientEndpoint

    from llmgw.store.address import Address
    from llmgw.values import Secret

LATE_S = 0.02
"""A timer that fires so much too late tells of our own pause: what is waited for may
lie in the socket unread, and gets one more turn of the reactor."""


@cache
def _protocol_class() -> Any:
    import txredisapi

    class Protocol(txredisapi.BaseRedisProtocol):
        """txredisapi's, without its own way to connect, authenticate and retry."""

        def __init__(self, lost: Callable[[], None]) -> None:
            # Bytes in, bytes out; numbers that are text stay text.
            super().__init__(charset=None, convertNumbers=False)
            self.end = ""
            self._lost = lost

        def connectionMade(self) -> None:
            self.connected = 1

        def connectionLost(self, why: Any = None) -> None:
            self.end = _words(why.value) if why is not None else ""
            super().connectionLost(why)
            self._lost()

    return Protocol


class Link:
    """An open connection.

    :param lost: called when it is gone, whoever closed it.
    :ivar server: ``HELLO``'s fields, such as ``mode`` and ``role``; empty if the server did not tell.
    :ivar server_id: its ``run_id``, another one after each restart; ``""`` if it did not tell.
    """

    def __init__(self, reactor: Any, lost: Callable[[Link], None]) -> None:
        self.server: dict[str, str] = {}
        self.server_id = ""
        self._reactor = reactor
        self.protocol = _protocol_class()(lambda: lost(self))

    def ask(self, arguments: tuple[Any, ...], within_s: float) -> Deferred[Any]:
        """Send one command.

        Cancelling gives up the answer; the command may be done all the same.

        :return: integers as ``int``, strings as ``bytes``, status lines as ``str``, arrays as lists.
        :raise StoreDown: the connection is closed.
        :raise StoreLost: no answer within ``within_s``, or the connection broke.
        :raise StoreRefused: the server's own error.
        """
        return Deferred.fromCoroutine(self._ask(arguments, within_s))

    async def _ask(self, arguments: tuple[Any, ...], within_s: float) -> Any:
        from txredisapi import ConnectionError, RedisError, ResponseError

        try:
            waiting = self.protocol.execute_command(*arguments)
        except ConnectionError:
            raise StoreDown("not connected") from None
        answer: Deferred[Any] = Deferred()
        waiting.addBoth(lambda result: None if answer.called else answer.callback(result))
        due_s = self._reactor.seconds() + within_s

        timer: Any = None

        def too_late(again: bool) -> None:
            nonlocal timer
            if again and self._reactor.seconds() - due_s > LATE_S:
                timer = self._reactor.callLater(LATE_S, too_late, False)
            else:
                answer.errback(TimeoutError())

        timer = self._reactor.callLater(within_s, too_late, True)
        try:
            return await answer
        except TimeoutError:
            raise StoreLost(f"no answer in {within_s * 1000:g} ms") from None
        except ResponseError as error:
            raise StoreRefused(str(error)) from None
        except RedisError as error:
            raise StoreLost(self.protocol.end or str(error)) from None
        finally:
            if timer.active():
                timer.cancel()

    def close(self) -> None:
        """Close at once; what waits fails with :class:`StoreLost`."""
        transport = self.protocol.transport
        if transport is not None:
            transport.abortConnection()


async def connect(
    reactor: Any,
    address: Address,
    *,
    password: Secret | None,
    ca_file: str | None,
    connect_s: float,
    lost: Callable[[Link], None],
) -> Link:
    """Open a connection and learn who is there.

    Cancelling closes it.

    :param connect_s: for the connection, and again for each of the first words, as
        the first of them waits for TLS.

    :raise StoreDown: nobody there, not in time, or the certificate is not to be trusted.
    :raise StoreLost: the server took the connection, and does not answer.
    :raise StoreRefused: a wrong password, or no such database.
    """
    link = Link(reactor, lost)
    factory = Factory.forProtocol(lambda: link.protocol)
    factory.noisy = False
    try:
        opening = _endpoint(reactor, address, ca_file, connect_s).connect(factory)
        await opening.addTimeout(connect_s, reactor)
    except CancelledError:
        raise
    except TimeoutError:
        raise StoreDown(f"no connection in {connect_s * 1000:g} ms") from None
    except Exception as error:  # whatever connecting, looking up and shaking hands can raise
        raise StoreDown(_words(error)) from None
    try:
        if password is not None:
            user = (address.user,) if address.user else ()
            await link.ask(("AUTH", *user, password.reveal()), connect_s)
        told = await _told(link, ("HELLO", "2"), connect_s) or []
        texts = [_text(item) for item in told]
        link.server = dict(zip(texts[::2], texts[1::2], strict=False))
        info = _text(await _told(link, ("INFO", "server"), connect_s) or b"")
        link.server_id = info.partition("run_id:")[2].partition("\r")[0]
        if address.db:
            await link.ask(("SELECT", address.db), connect_s)
    except BaseException:
        link.close()
        raise
    return link


async def _told(link: Link, question: tuple[str, ...], within_s: float) -> Any:
    """What the server says of itself; ``None`` if it may not tell, or is too old to."""
    try:
        return await link.ask(question, within_s)
    except StoreRefused as error:
        if error.code in ("NOPERM", "unknown"):
            return None
        raise


def _text(item: Any) -> str:
    return item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item)


def _endpoint(reactor: Any, address: Address, ca_file: str | None, connect_s: float) -> IStreamClientEndpoint:
    if address.path:
        return UNIXClientEndpoint(reactor, address.path, timeout=connect_s)
    tls = tls_options(address.host, ca_file, True) if address.tls else None
    scheme = "https" if address.tls else "http"
    return endpoint_for(reactor, scheme, address.host, address.port, connect_s=connect_s, tls=tls)


async def ask_sentinel(
    reactor: Any,
    sentinel: Address,
    master: str,
    *,
    password: Secret | None,
    ca_file: str | None,
    connect_s: float,
) -> tuple[str, int]:
    """Where one Sentinel says that ``master`` is.

    :raise StoreError: it does not answer, or knows no such master.
    """
    link = await connect(
        reactor,
        sentinel,
        password=password,
        ca_file=ca_file,
        connect_s=connect_s,
        lost=lambda link: None,
    )
    try:
        told = await link.ask(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", master), connect_s)
    finally:
        link.close()
    if not isinstance(told, list) or len(told) != 2:
        raise StoreError(f"knows no master {master!r}")
    return told[0].decode(), int(told[1])


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
