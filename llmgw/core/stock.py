"""What a backend that loads models by name has: which are in memory, which only on its disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field


class Stock(Struct):
    """One backend's models.

    :param names: all it could serve.
    :param cold: those of them that are not in memory; no request goes there for these.
    :param slots: parallel sequences of single models that are, where known.
    :param used: when each that is in memory was last asked for, or came.
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
        """Take over when each was last used; what has come since then was used now."""
        known = {} if old is None else old.used
        self.used = {name: known.get(name, now_s) for name in self.names if name not in self.cold}


STATES = frozenset({"loaded", "loading", "unloaded", "failed"})


def states_of(told: Any) -> Mapping[str, str]:
    """``told``, if it is what a loader may tell of its models.

    :raise ValueError: it is not; the message is for the operator.
    """
    if not isinstance(told, Mapping):
        raise ValueError(f"its loader told {type(told).__name__}, which is no mapping of models to states")
    for model, state in told.items():
        if not isinstance(model, str) or not isinstance(state, str) or state not in STATES:
            raise ValueError(f"its loader told of {model!r} that it is {state!r}")
    return told
