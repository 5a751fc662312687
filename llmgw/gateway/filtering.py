"""Runs the configured request filters, and decides what their faults mean."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from twisted.logger import Logger

from llmgw.core.http import TEXT, TOKEN
from llmgw.errors import PLUGIN_FAULTS, GatewayError
from llmgw.finite import is_finite_number
from llmgw.foreign import set_aside
from llmgw.seldom import Seldom
from llmgw.values import Caller, Submission

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SLOW_S = 0.05
MESSAGE_CHARACTERS = 10_000
"""Of what a client is told."""


class Filter(Struct, frozen=True):
    """One filter.

    :param product: what the plugin built, an ``IRequestFilter``.
    :param lenient: a request passes if the filter itself fails.
    """

    name: str
    product: Any
    lenient: bool = False


class Filters:
    """All filters, in the order of the configuration.

    :ivar faults: number of times that a filter failed.
    """

    log = Logger()

    def __init__(self, filters: Sequence[Filter], clock: Callable[[], float]) -> None:
        self._filters = tuple(filters)
        self._clock = clock
        self._seldom = Seldom(clock)
        self.faults = 0

    def __bool__(self) -> bool:
        return bool(self._filters)

    def check(self, submission: Submission, caller: Caller) -> None:
        """Run every filter on the request.

        :raise GatewayError: one of them refuses it, or failed and is not lenient.
        """
        for each in self._filters:
            begun_s = self._clock()
            try:
                answer = each.product.check(submission, caller)
            except GatewayError as error:
                fault = _fault_of(error)
                if fault is None:
                    raise
                self._failed(each, f"refused with {fault}")
            except PLUGIN_FAULTS:
                self._failed(each, "raised", failure=True)
            else:
                if answer is not None:
                    self._failed(each, f"returned {set_aside(answer)}, where nothing is expected")
            took_s = self._clock() - begun_s
            if took_s > SLOW_S:
                self._complain(each, f"held up the event loop for {took_s:.2f} s")

    def _failed(self, each: Filter, what: str, *, failure: bool = False) -> None:
        self.faults += 1
        self._complain(each, what, failure=failure)
        if not each.lenient:
            raise GatewayError("a request filter failed; see the gateway's log")

    def _complain(self, each: Filter, what: str, *, failure: bool = False) -> None:
        """Log it, each kind once a minute at most."""
        who = f"the filter {each.name}"
        if failure:
            self._seldom.tell_raised(self.log, who, what)
        else:
            self._seldom.tell(self.log, who, what)


def _fault_of(error: GatewayError) -> str | None:
    """Why a client cannot be told of ``error``."""
    if not isinstance(error.status, int) or not 400 <= error.status < 600:
        return f"status {error.status!r}"
    if not _is_text(error.message):
        return "a message that is no text"
    if not isinstance(error.code, str) or _WORD.fullmatch(error.code) is None:
        return "a code that is no word"
    if not isinstance(error.type, str) or _WORD.fullmatch(error.type) is None:
        return "a type that is no word"
    if not (error.param is None or _is_text(error.param)):
        return "a param that is no text"
    if not (error.should_retry is None or isinstance(error.should_retry, bool)):
        return "a should_retry that is neither true nor false"
    after_s = error.retry_after_s
    if after_s is not None and not is_finite_number(after_s):
        return f"a retry_after_s of type {type(after_s).__name__} that is no time"
    if not isinstance(error.headers, list) or not all(map(_is_header, error.headers)):
        return "headers that are none"
    return None


_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HEADER_NAME = re.compile(rb"%b+" % TOKEN)
_HEADER_VALUE = re.compile(rb"%b*" % TEXT)


def _is_text(value: Any) -> bool:
    """It can be sent; a lone surrogate cannot."""
    if not isinstance(value, str) or len(value) > MESSAGE_CHARACTERS:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_header(pair: Any) -> bool:
    """A name and a value that may stand in a head: no line ends, above all."""
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, str) for each in pair)):
        return False
    name, value = (each.encode("utf-8", "replace") for each in pair)
    return bool(_HEADER_NAME.fullmatch(name) and value.isascii() and _HEADER_VALUE.fullmatch(value))
