"""What counts as a number."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from math import inf, nan
from typing import Any

import pytest

from llmgw.errors import ConfigError, RequestRefused
from llmgw.finite import is_finite_number
from llmgw.gateway.filtering import Filter, Filters
from llmgw.routing.adaptive import Adaptive
from llmgw.testing import submission
from llmgw.values import Caller


class Subclass(float):
    """As numpy's are."""


@pytest.mark.parametrize("value", [0, -1, 1.5, 2**1000, 1e308, Subclass(1.0)])
def test_numbers(value: Any) -> None:
    assert is_finite_number(value)


@pytest.mark.parametrize(
    "value",
    [True, None, "1", nan, inf, -inf, 10**400, 1j, Decimal(1), Fraction(1, 2), Subclass("nan"), object()],
)
def test_what_is_none(value: Any) -> None:
    assert not is_finite_number(value)


def test_an_option_beyond_every_float_is_a_fault_of_its_own() -> None:
    with pytest.raises(ConfigError, match="alpha: must be a number"):
        Adaptive.from_options({"alpha": 10**400})


def test_a_filter_that_names_such_a_time_has_failed() -> None:
    class Never:
        def check(self, sent: Any, caller: Any) -> None:
            raise RequestRefused("later", retry_after_s=10**400)

    filters = Filters([Filter("f", Never(), lenient=True)], lambda: 0.0)
    filters.check(submission(), Caller("k"))
    assert filters.faults == 1
