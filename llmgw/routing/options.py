"""Checks a router's own table of the config."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from msgspec import Struct

from llmgw.errors import ConfigError, ConfigFault
from llmgw.finite import is_finite_number


class Number(Struct, frozen=True):
    """What one option may be.

    :param default: used when the option is absent; ``None`` only ever by default.
    :param least: the smallest value.
    :param above: values must be larger than this.
    :param most: the largest value.
    :param whole: only whole numbers.
    """

    default: float | None
    least: float = -inf
    above: float = -inf
    most: float = inf
    whole: bool = False

    def fault(self, value: object) -> str | None:
        """What is wrong with ``value``, ``None`` if nothing is. ``true`` is no number."""
        if not is_finite_number(value) or (self.whole and not isinstance(value, int)):
            return "must be a whole number" if self.whole else "must be a number"
        if value < self.least:
            return f"must be {self.least:g} or more"
        if value <= self.above:
            return f"must be above {self.above:g}"
        if value > self.most:
            return f"must be {self.most:g} or less"
        return None


def read_numbers(options: Mapping[str, Any], known: Mapping[str, Number]) -> dict[str, Any]:
    """The value of every known option, given or default.

    :raise ConfigError: every unknown option and every senseless value, in the
        order they stand in ``options``.
    """
    faults: list[ConfigFault] = []
    values: dict[str, Any] = {name: number.default for name, number in known.items()}
    for name, value in options.items():
        if name not in known:
            what = (
                f"unknown; the options are {', '.join(known)}" if known else "unknown; there are no options"
            )
            faults.append(ConfigFault(name, what))
            continue
        wrong = known[name].fault(value)
        if wrong is not None:
            faults.append(ConfigFault(name, wrong))
        values[name] = value
    if faults:
        raise ConfigError(faults)
    return values
