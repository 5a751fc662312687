"""The line between a parent and one worker: messages both ways, and answers that find their question."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from msgspec import DecodeError
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, connectionDone
from twisted.logger import Logger
from twisted.protocols.basic import LineOnlyReceiver
from twisted.python.failure import Failure

from llmgw.errors import GatewayError
from llmgw.workers.faults import as_error
from llmgw.workers.messages import Answer, Call, Reload, Setup, encode

LONGEST_LINE = 256 << 20
"""Bytes. A large fleet's metrics are two million."""


class LinkLost(GatewayError):
    """The worker ended before it answered."""


class Link(LineOnlyReceiver):
    """One end of the line.

    :param read: makes a message of a line; raises ``DecodeError``.
    :param heard: gets every message but answers that somebody waits for.
    :param lost: called once, when the line has ended.
    """

    log = Logger()
    delimiter = b"\n"
    MAX_LENGTH = LONGEST_LINE

    def __init__(
        self, read: Callable[[bytes], Any], heard: Callable[[Any], None], lost: Callable[[], None]
    ) -> None:
        self._read = read
        self._heard = heard
        self._lost = lost
        self._ids = count(1)
        self._asked: dict[int, Deferred[Any]] = {}

    def send(self, message: Any) -> None:
        """Say something; nothing happens when the line has ended."""
        if self.connected:
            self.sendLine(encode(message))

    def call(self, what: str, *arguments: Any) -> Deferred[Any]:
        """Ask the other side. :return: fires with its answer, or fails as it did there."""
        return self._ask(Call(next(self._ids), what, list(arguments)))

    def reload(self, setup: Setup) -> Deferred[list[str]]:
        """Have the worker take over ``setup``. :return: fires with what needs a restart."""
        return self._ask(Reload(next(self._ids), setup))

    def _ask(self, question: Call | Reload) -> Deferred[Any]:
        answer: Deferred[Any] = Deferred()
        if not self.connected:
            answer.errback(LinkLost("the worker has ended"))
            return answer
        self._asked[question.id] = answer
        self.send(question)
        return answer

    def lineReceived(self, line: bytes) -> None:
        try:
            message = self._read(line)
        except DecodeError as error:
            self.log.error("a line from the other side is not understood: {error}", error=str(error))
            return
        if isinstance(message, Answer):
            asked = self._asked.pop(message.id, None)
            if asked is not None:
                if message.error is None:
                    asked.callback(message.value)
                else:
                    asked.errback(as_error(message.error))
            return
        self._heard(message)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.connected = 0
        asked, self._asked = self._asked, {}
        for each in asked.values():
            each.errback(LinkLost("the worker has ended"))
        self._lost()


def factory_of(link: Link) -> Any:
    """For ``adoptStreamConnection``, which wants one."""
    factory = Factory.forProtocol(lambda: link)
    factory.noisy = False
    return factory
