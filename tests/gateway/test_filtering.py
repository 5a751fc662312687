"""What becomes of requests when filters refuse, fail, or take long."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from llmgw.errors import GatewayError, InvalidRequest, RequestRefused
from llmgw.gateway.filtering import Filter, Filters
from llmgw.testing import submission
from llmgw.values import Caller


class Does:
    """A filter that does what it is given."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act
        self.seen: list[str] = []

    def check(self, sent: Any, caller: Caller) -> Any:
        self.seen.append(sent.model)
        return self._act()


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def odd(**attributes: Any) -> RequestRefused:
    """A refusal that somebody has set these on."""
    error = RequestRefused("no")
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def check(*acts: Callable[[], Any], lenient: bool = False) -> Filters:
    filters = Filters([Filter(f"f{i}", Does(act), lenient) for i, act in enumerate(acts)], lambda: 0.0)
    filters.check(submission(), Caller("k"))
    return filters


def nothing() -> None:
    return None


def test_all_are_asked_in_order_until_one_refuses() -> None:
    products = [Does(nothing), Does(raising(RequestRefused("no"))), Does(nothing)]
    filters = Filters([Filter("f", product) for product in products], lambda: 0.0)
    assert filters
    with pytest.raises(RequestRefused, match="no"):
        filters.check(submission(), Caller("k"))
    assert [product.seen for product in products] == [["m"], ["m"], []]
    assert filters.faults == 0
    assert not Filters([], lambda: 0.0)


def test_a_filter_chooses_its_status() -> None:
    with pytest.raises(InvalidRequest):
        check(raising(InvalidRequest("no")))


@pytest.mark.parametrize("act", [raising(KeyError("x")), raising(SystemExit(1)), lambda: True])
def test_a_filter_that_fails_is_500_or_lets_pass(act: Any, expected_failures: Any) -> None:
    with pytest.raises(GatewayError, match="a request filter failed") as raised:
        check(act)
    assert raised.value.status == 500
    filters = check(act, act, lenient=True)
    assert filters.faults == 2
    expected_failures(KeyError, SystemExit)


@pytest.mark.parametrize(
    "error",
    [
        GatewayError("weird", status=200),
        GatewayError("weird", status=999),
        RequestRefused(None),  # type: ignore[arg-type]
        RequestRefused("later", retry_after_s=float("nan")),
        RequestRefused("later", retry_after_s="1"),  # type: ignore[arg-type]
        odd(headers=[("x-evil", "a\r\nset-cookie: b=1")]),
        odd(headers=[("x-é", "a")]),
        odd(headers=[("x-a", "☃")]),
        odd(headers=[("x-a",)]),
        odd(headers={"x-a": "b"}),
        odd(code=object()),
        odd(code="a\nb"),
        odd(code="x" * 65),
        odd(type=5),
        odd(param=object()),
        odd(should_retry="yes"),
        odd(message="a\ud800"),
        odd(message="x" * 20_000),
    ],
)
def test_an_error_that_cannot_be_told_is_a_fault(error: GatewayError) -> None:
    with pytest.raises(GatewayError, match="a request filter failed"):
        check(raising(error))
    assert check(raising(error), lenient=True).faults == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, BaseException])
def test_what_is_no_exception_is_a_fault_too(kind: type[BaseException], expected_failures: Any) -> None:
    """Signals to the daemon come through its reactor: whoever raises this is the plugin."""
    assert check(raising(kind()), lenient=True).faults == 1
    assert len(expected_failures(kind)) == 1


def test_faults_and_slowness_are_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def slow() -> bool:
        nonlocal now_s
        now_s += 1.0
        return True

    said: list[str] = []
    filters = Filters([Filter("f", Does(slow), lenient=True)], lambda: now_s)
    log = SimpleNamespace(error=lambda text, **fields: said.append(text.format(**fields)))
    monkeypatch.setattr(Filters, "log", log)
    for _ in range(62):
        filters.check(submission(), Caller("k"))
    assert said[:2] == [
        "the filter f returned bool, where nothing is expected",
        "the filter f held up the event loop for 1.00 s",
    ]
    assert len(said) == 4
