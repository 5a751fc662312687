"""The models of a backend that loads them by name: which are in memory, which only on its disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field


class Stock(Struct):
    """One backend's models.

    :param names: all models that it could serve.
    :param cold: those that are not in memory; it gets no requests for these.
    :param slots: number of parallel sequences of models in memory, where known.
    :param used: monotonic time at which each model in memory was last requested, or was loaded.
    """

    names: tuple[str, ...]
    cold: frozenset[str]
    slots: Mapping[str, int] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)

    def says(self, other: Stock | None) -> bool:
        """Whether ``other`` has the same models in the same states."""
        return other is not None and (self.names, self.cold, self.slots) == (
            other.names,
            other.cold,
            other.slots,
        )

    def follow(self, old: Stock | None, now_s: float) -> None:
        """Take over from ``old`` when each was last used; new ones count as used now."""
        known = {} if old is None else old.used
        self.used = {name: known.get(name, now_s) for name in self.names if name not in self.cold}


STATES = frozenset({"loaded", "loading", "unloaded", "failed"})


def states_of(told: Any) -> Mapping[str, str]:
    """``told``, if it is what a loader may return for its models.

    :raise ValueError: it is not; the message is for the operator.
    """
    if not isinstance(told, Mapping):
        raise ValueError(f"its loader told {type(told).__name__}, which is no mapping of models to states")
    for model, state in told.items():
        if not isinstance(model, str) or not isinstance(state, str) or state not in STATES:
            raise ValueError(f"its loader told of {model!r} that it is {state!r}")
    return told
