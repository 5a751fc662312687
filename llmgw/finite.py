"""The one rule for figures that somebody else made: of plugins, of options, of files."""

from __future__ import annotations

from math import isfinite
from typing import Any, TypeGuard


def is_finite_number(value: Any) -> TypeGuard[float]:
    """An integer or a float that can be reckoned with: neither ``nan`` nor infinite, nor an integer
    beyond every float. ``True`` is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    except OverflowError:
        return False
